"""Process groups of ranks that are threads of one process: torch.distributed as scripts call it, without a network.

The last rank that reaches a collective executes it for all. Ranks that call different ones get an error with both
lines. A rank waits only where it would wait on processes, and other ranks run meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.errors import AgreementError, UnsupportedError
from shardwise.events import user_line
from shardwise.fabric.collective_log import ranks_name
from shardwise.fabric.rank_threads import RankThreads, rank_threads
from shardwise.torch_private import DisableTorchDispatch, DisableTorchFunction

__all__ = ["ThreadGroup", "forget_groups", "thread_groups"]

BACKEND = "shardwise_threads"  # torch's name of these groups; a script sees the backend that it requested

Tensors = Sequence[torch.Tensor]

_c10d: Any = distributed_c10d  # with names that are not public
_cpp: Any = getattr(torch._C, "_distributed_c10d")  # noqa: B009
_AnyWork: Any = dist.Work  # classes of C++, whose declarations differ between versions
_AnyGroup: Any = dist.ProcessGroup
_AnyStore: Any = dist.Store

_IN_PLACE: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.BAND: torch.Tensor.bitwise_and_,
    dist.ReduceOp.BOR: torch.Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class _Meeting:
    """One collective of a group: the tensors of each rank, and whether it is done."""

    __slots__ = ("calls", "done")

    def __init__(self) -> None:
        self.calls: dict[
            int, tuple[Any, str, Any]
        ] = {}  # by rank of the group: the facts that must agree, the line, the tensors
        self.done = False


class _Work(_AnyWork):
    """A collective that may not be done yet."""

    def __init__(self, threads: RankThreads, is_done: Callable[[], bool], text: str, result: Any = None) -> None:
        super().__init__()
        self._threads, self._is_done, self._text, self._result = threads, is_done, text, result

    def wait(self, timeout: Any = None) -> bool:
        self._threads.wait_until(self._is_done, self._text)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._is_done():
            self._threads.let_others_run()  # polling counts as waiting
        return self._is_done()

    def is_success(self) -> bool:
        return self._is_done()

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        self.wait()  # torch would wait for futures without letting other ranks run
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class ThreadGroup(_AnyGroup):
    """One rank thread's process group.

    Args:
        threads: the ranks.
        rank: of this rank in the group.
        ranks: the ranks of the group, by their number in the world.
        key: torch's name of the group and a number: the same on all of them, and for no other group.
    """

    def __init__(self, threads: RankThreads, rank: int, ranks: Sequence[int], key: tuple[str, int]) -> None:
        super().__init__(rank, len(ranks))
        self._name = key[0]
        self._threads, self._me, self._ranks = threads, rank, tuple(ranks)
        self._meetings: dict[int, _Meeting] = threads.shared.setdefault((key, "meetings"), defaultdict(_Meeting))
        self._sent: dict[Any, deque[list[torch.Tensor]]] = threads.shared.setdefault((key, "sent"), defaultdict(deque))
        self._count = 0
        self._coalesced: list[_Work] | None = None

    def getBackendName(self) -> str:  # as torch's C++ calls it
        return BACKEND

    @property
    def group_name(self) -> str:  # by which functional collectives look a group up
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> ThreadGroup:
        return self

    def shutdown(self) -> None:
        """Nothing to take down."""

    abort = shutdown

    # ---------------------------------------------------------------- meeting

    def _meet(
        self, name: str, agree: Any, given: Any, carry_out: Callable[[list[Any]], None], result: Any = None
    ) -> _Work:
        """Join the next collective; the last rank to arrive executes it.

        Args:
            name: of the collective.
            agree: facts that must be the same on all ranks.
            given: the arguments of this rank, with tensors to read and to write.
            carry_out: executes it; called with the arguments of each rank, in order.
            result: the result of the future of the work.
        """
        self._count += 1
        meeting, number, me = self._meetings[self._count], self._count, self._me
        mine = (name, *agree)
        for other, (theirs, line, _) in meeting.calls.items():
            if theirs != mine:
                raise AgreementError(
                    f"ranks {self._ranks[other]} and {self._ranks[me]} differ in collective number {number} of "
                    f"{ranks_name(self._ranks)}: {_words(theirs)} at {line}; {_words(mine)} at {user_line()}",
                    hint="all ranks of a group must call its collectives in the same order, with the same sizes",
                )
        meeting.calls[me] = mine, user_line(), given
        if len(meeting.calls) == len(self._ranks):
            del self._meetings[number]
            with _plainly():
                carry_out([meeting.calls[rank][2] for rank in range(len(self._ranks))])
            meeting.calls.clear()
            meeting.done = True
        text = f"{name}, collective number {number} of {ranks_name(self._ranks)},"
        return self._issued(_Work(self._threads, lambda: meeting.done, text, result))

    def _issued(self, work: _Work) -> _Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> _Work:
        works, self._coalesced = self._coalesced or [], None
        return _Work(self._threads, lambda: all(work._is_done() for work in works), "several collectives")

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        """Each tensor becomes the reduction of those of all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = _reduce_op(opts)

        def carry_out(given: list[Tensors]) -> None:
            for each in zip(*given, strict=True):
                total = _reduced(each, op)
                for tensor in each:
                    tensor.data.copy_(total)

        return self._meet("all_reduce", (op.name, _metas(tensors)), tensors, carry_out, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        """The tensors of the root become the reduction."""
        root, op = opts.rootRank, _reduce_op(opts)

        def carry_out(given: list[Tensors]) -> None:
            for each in zip(*given, strict=True):
                each[root].data.copy_(_reduced(each, op))

        return self._meet("reduce", (f"to {root}", op.name, _metas(tensors)), tensors, carry_out, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Work:
        """Rank i gets the reduction of all ranks' i-th tensors."""
        op = _reduce_op(opts)

        def carry_out(given: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for at in range(len(outputs)):
                for rank, (into, _) in enumerate(given):
                    _fill(into[at], _reduced([parts[at][rank] for _, parts in given], op))

        agree = op.name, "; ".join(_metas(parts) for parts in inputs)
        return self._meet("reduce_scatter", agree, (outputs, inputs), carry_out, outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        """The same with the parts of each tensor in one, one after the other."""
        return self.reduce_scatter(outputs, [self._split(tensor) for tensor in inputs], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    # ---------------------------------------------------------------- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        """The tensors become those of the root."""
        root = opts.rootRank

        def carry_out(given: list[Tensors]) -> None:
            for rank, into in enumerate(given):
                for target, source in zip(into, given[root], strict=True):
                    if rank != root:
                        target.data.copy_(source.data)

        return self._meet("broadcast", (f"from {root}", _metas(tensors)), tensors, carry_out, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        """Each rank gets the tensors of all ranks."""
        inputs = [tensor.data for tensor in inputs]

        def carry_out(given: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for into, _ in given:
                for at, parts in enumerate(into):
                    for part, (_, source) in zip(parts, given, strict=True):
                        _fill(part, source[at])

        return self._meet("all_gather", (_metas(inputs),), (outputs, inputs), carry_out, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        """The same, with the results of each rank in a list."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        """The same, into parts of one tensor each."""
        return self.allgather([self._split(tensor) for tensor in outputs], inputs, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        """The root gets the tensors of all ranks."""
        root = opts.rootRank

        def carry_out(given: list[tuple[Sequence[Tensors], Tensors]]) -> None:
            for at, parts in enumerate(given[root][0]):
                for part, (_, source) in zip(parts, given, strict=True):
                    _fill(part, source[at].data)

        return self._meet("gather", (f"to {root}", _metas(inputs)), (outputs, inputs), carry_out, outputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        """Each rank gets its part of the root's tensors."""
        root = opts.rootRank

        def carry_out(given: list[tuple[Tensors, Sequence[Tensors]]]) -> None:
            for at, parts in enumerate(given[root][1]):
                for (into, _), part in zip(given, parts, strict=True):
                    _fill(into[at], part.data)

        return self._meet("scatter", (f"from {root}", _metas(outputs)), (outputs, inputs), carry_out, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        """Rank i gets the i-th tensor of every rank."""

        def carry_out(given: list[tuple[Tensors, Tensors]]) -> None:
            for rank, (into, _) in enumerate(given):
                for part, (_, source) in zip(into, given, strict=True):
                    _fill(part, source[rank].data)

        return self._meet("all_to_all", (), (outputs, inputs), carry_out, outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        got: Sequence[int] = (),
        sent: Sequence[int] = (),
        opts: Any = None,
    ) -> _Work:
        """The same with the parts of one tensor, of the given numbers of rows or of equal ones."""
        parts = [
            tensor.data.split(list(sizes)) if sizes else self._split(tensor)
            for tensor, sizes in ((output, got), (source, sent))
        ]
        return self.alltoall(*parts)

    def barrier(self, opts: Any = None) -> _Work:
        """Wait until every rank has arrived."""
        return self._meet("barrier", (), None, lambda given: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """The same, blocking."""
        self.barrier().wait()

    # names of other versions of torch
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of n equal parts, one after the other in memory."""
        if tensor.numel() % len(self._ranks):
            raise AgreementError(
                f"a tensor of shape {list(tensor.shape)} has no {len(self._ranks)} equal parts, at {user_line()}",
                hint="one part for each rank of the group",
            )
        return list(tensor.data.view(len(self._ranks), -1).unbind())

    # ---------------------------------------------------------------- between two ranks

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> _Work:
        """Send a copy to a rank."""
        with _plainly():
            self._sent[self._me, dst, tag].append([tensor.data.clone() for tensor in tensors])
        return self._issued(_Work(self._threads, lambda: True, "send", tensors))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> _Work:
        """Receive from a rank."""
        return self._receive(tensors, lambda: [(src, self._me, tag)], f"recv from rank {self._ranks[src]}")

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> _Work:
        """Receive from any rank."""
        keys = [(src, self._me, tag) for src in range(len(self._ranks))]
        return self._receive(tensors, lambda: keys, "recv from any rank")

    def _receive(self, tensors: Tensors, keys: Callable[[], list[Any]], text: str) -> _Work:
        taken: list[int] = []

        def take() -> bool:
            for key in keys() if not taken else ():
                if self._sent[key]:
                    with _plainly():
                        for target, source in zip(tensors, self._sent[key].popleft(), strict=True):
                            _fill(target, source)
                    taken.append(key[0])
                    break
            return bool(taken)

        work = _Work(self._threads, take, text, tensors)
        setattr(work, "_source_rank", lambda: taken[0])  # noqa: B010  # read by dist.recv() without a source
        return self._issued(work)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Inside, operators bypass the modes of the calling rank: they belong to the group."""
    with torch.no_grad(), DisableTorchFunction(), DisableTorchDispatch():
        yield


def _metas(tensors: Tensors) -> str:
    """The dtypes and shapes, as they are compared and shown."""
    plain: Any = torch.Tensor
    kinds: set[Any] = {type(tensor) for tensor in tensors}
    for kind in kinds:
        if kind.__torch_dispatch__ is not plain.__torch_dispatch__:
            raise UnsupportedError(
                f"a collective of a process group was called with a {kind.__name__}",
                hint="redistribute(...) and full_tensor() move a DTensor; to_local() gives a tensor for collectives",
            )
    return ", ".join(f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for tensor in tensors)


def _words(call: tuple[Any, ...]) -> str:
    return " ".join(call)


def _reduce_op(opts: Any) -> Any:
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op in _IN_PLACE:
        if wanted == op:
            return op
    raise UnsupportedError(f"{wanted} is not supported among rank threads", hint="use torchrun")


def _reduced(tensors: Tensors, op: Any) -> torch.Tensor:
    """The reduction, in the order of the ranks."""
    total = tensors[0].data.clone()
    for tensor in tensors[1:]:
        _IN_PLACE[op](total, tensor.data)
    if op == dist.ReduceOp.AVG:
        total = (
            total.div_(len(tensors)) if total.is_floating_point() else total.div_(len(tensors), rounding_mode="trunc")
        )
    return total


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise AgreementError(
            f"a rank sends {_metas([source])} where another one expects {_metas([target])}",
            hint="all ranks must expect the shapes that the others send",
        )
    target.data.copy_(source.reshape(target.shape))


# ---------------------------------------------------------------- how torch comes to these groups


class _Store(_AnyStore):
    """A torch store for threads: while a key is missing, other ranks run."""

    def __init__(self, threads: RankThreads) -> None:
        super().__init__()
        self._threads, self._values = threads, {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._threads.wait_until(lambda: self.check(keys), f"the keys {', '.join(keys)} of the store")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        expected, desired = (v if isinstance(v, bytes) else str(v).encode() for v in (expected, desired))
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def append(self, key: str, value: Any) -> None:
        self._values[key] = self._values.get(key, b"") + (value if isinstance(value, bytes) else str(value).encode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Ignored: a rank that would wait for ever gets an error at once."""

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> _Store:
        return self

    # as torch's C++ calls them
    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set


def _make_group(options: Any, _: Any) -> ThreadGroup:
    """Called by torch to create one of our groups, numbered by its name in the same order on every rank."""
    threads = rank_threads()
    assert threads is not None
    ranks = options.global_ranks_in_group or range(options.group_size)
    me = ranks[options.group_rank]
    made = threads.shared.setdefault("made", defaultdict(int))
    made[me, options.group_id] += 1
    return ThreadGroup(threads, options.group_rank, ranks, (options.group_id, made[me, options.group_id]))


def forget_groups() -> None:
    """Remove the groups of this thread's rank, which is ending, from the look-up by name."""
    _cpp._unregister_all_process_groups()


@contextlib.contextmanager
def thread_groups() -> Iterator[None]:
    """Inside, process groups of rank threads are of this kind, for any requested backend."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
    helper, rendezvous = _c10d._new_process_group_helper, _c10d.rendezvous
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def in_threads(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments["backend"]
        if str(asked) == "fake":
            return helper(*args, **kwargs)
        given.arguments.update(backend=dist.Backend(BACKEND), backend_options=None, device_id=None)
        group, store = helper(*given.args, **given.kwargs)
        if isinstance(group, ThreadGroup):
            # torch reads the version of NCCL for its groups
            shown = "gloo" if str(asked) == "nccl" and not dist.is_nccl_available() else asked
            _c10d._world.pg_map[group] = shown, store
        return group, store

    def meet_in_process(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        threads = rank_threads()
        assert threads is not None
        rank, size = (rank if rank >= 0 else int(os.environ["RANK"])), max(world_size, 0) or threads.size
        if size != threads.size:
            raise AgreementError(
                f"a process group of {size} ranks in a world of {threads.size}, at {user_line()}",
                hint=f"shardwise run -n {size} gives the script {size} ranks",
            )
        # one for all, stored here: C++ does not keep a reference to the Python object
        yield threads.shared.get("store") or threads.shared.setdefault("store", _Store(threads)), rank, size

    isolate = _cpp._set_thread_isolation_mode
    _c10d._new_process_group_helper, _c10d.rendezvous = in_threads, meet_in_process
    isolate(True)  # groups are looked up by name in C++: each thread has its own
    try:
        yield
    finally:
        isolate(False)
        _c10d._new_process_group_helper, _c10d.rendezvous = helper, rendezvous
