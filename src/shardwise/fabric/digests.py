"""Checks plain tensors that are assumed replicated: ranks compare digests through the store.

A rank posts the digest of a tensor at the uses 1, 2, 4, ... of a call site, and compares it with the digest that one
neighbour posted for the same use of the same site. A thread does this on a separate connection, so that no operator
waits. A disagreement becomes an error on every rank.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardwise.core.tracing import is_tracing
from shardwise.errors import LostRankError
from shardwise.events import user_frame
from shardwise.fabric.collective_log import Ranks, argument_name, ranks_name
from shardwise.torch_private import DisableTorchDispatch

__all__ = ["PlainCheck", "digest_of", "is_sampled"]

EVERY = 1024  # a site is checked at the uses 1, 2, 4, ..., and from here on at each multiple of this
BUSY, IDLE = 0.05, 1.0  # seconds between polls: while digests wait to be compared, and the maximum
KEPT = 4096  # digests that wait for those of a neighbour
SITES = 1 << 16  # call sites that are counted
GRACE = 10.0  # seconds to wait at the end for a rank that has not posted
LEAVING = 2.0  # seconds that a program which fails gives others to hear of a disagreement
WAITING = 5.0  # seconds in which a program that is not waiting for others comes to its next operator
PATIENCE = 30.0  # seconds to wait at the end for ranks that take part
ENDED = 1  # the mark of a rank: 0 once it takes part, this once its program has ended
CHUNK = 1 << 18  # words of a tensor that are mixed at a time, on devices


def is_sampled(use: int) -> bool:
    """Whether this use of a call site, counted from 1, is checked.

    Example:
        >>> [use for use in range(1, 5000) if is_sampled(use)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    """
    return use % EVERY == 0 or (use < EVERY and use & (use - 1) == 0)


# ---------------------------------------------------------------- digests


class Digest(NamedTuple):
    """A digest of a tensor: its dtype and shape, and a number computed from its bytes, possibly still on its device."""

    meta: str
    value: Any
    ready: Any = None  # the event after which the value is there

    def text(self) -> str:
        """The digest as all ranks write it. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        value = int(self.value)
        return f"{self.meta} #{value & 0xFFFFFFFFFFFFFFFF:016x}"


def digest_of(tensor: torch.Tensor) -> Digest | None:
    """The digest of a plain tensor; None where it has no bytes to read, as while a program is traced.

    Example:
        >>> digest_of(torch.zeros(2)).text() == digest_of(torch.zeros(2)).text() != digest_of(torch.ones(2)).text()
        True
    """
    if is_tracing() or tensor.is_meta or _dispatch_of(type(tensor)) is not _dispatch_of(torch.Tensor):
        return None
    bits = "~" * tensor.is_conj() + "-" * tensor.is_neg()
    meta = f"{bits}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return Digest(f"{tensor.layout} {meta}", 0)
    with torch.no_grad(), DisableTorchDispatch():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if tensor.device.type == "cpu":
            array: Any = data.numpy()
            return Digest(meta, int.from_bytes(hashlib.blake2b(array, digest_size=8).digest(), "little"))
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        value = _mixed(data)
        ready = torch.cuda.Event() if tensor.is_cuda else None
        if ready is not None:
            ready.record()
        return Digest(meta, value, ready)


def _dispatch_of(kind: Any) -> Any:
    return kind.__torch_dispatch__


def _mixed(data: torch.Tensor) -> torch.Tensor:
    """A sum over the 8-byte words of the data, each mixed with its position, computed on the device."""
    words = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), CHUNK):
        some = words[start : start + CHUNK]
        at = torch.arange(start + 1, start + 1 + some.numel(), device=data.device)
        some = some + at * -7046029254386353131  # the mixing function of splitmix64
        some = (some ^ (some >> 30)) * -4658895280553007687
        some = (some ^ (some >> 27)) * -7723592293110705685
        total = total + (some ^ (some >> 31)).sum()
    return total


# ---------------------------------------------------------------- messages between ranks


class Use(NamedTuple):
    """One sampled use of a call site on this rank: digests by argument."""

    ranks: Ranks
    site: str  # as on all ranks
    number: int
    line: str
    digests: Mapping[str, Digest]


class Reporter(Protocol):
    """Where a disagreement is reported."""

    def found(self, text: str) -> None:
        """Let the program raise it."""
        ...

    def was_raised(self) -> bool:
        """Whether the program raised it."""
        ...

    def show(self) -> None:
        """Print it."""
        ...


class PlainCheck:
    """One rank's side of the comparison.

    Args:
        store: where ranks post; used by the thread of this object alone.
        rank: of this process.
        report: called with a disagreement, by the thread of this object.
        let_others_run: if ranks are threads that take turns, gives the other ranks their turn. Then this object has no
            thread, and compares when a tensor is used.
        patience: seconds to wait for other ranks, at most.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        report: Reporter,
        let_others_run: Callable[[], object] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.rank, self.verdict = rank, ""
        self._patience = min(patience, PATIENCE)
        self._store, self._report, self._process = store, report, os.getpid()
        self._counts: dict[tuple[Any, ...], itertools.count[int]] = {}
        self._posted: deque[Use] = deque()
        self._streams: dict[Ranks, _Stream] = {}
        self._asked: dict[Ranks, int] = {}  # the number of the last `compare_posted`, by the ranks that take part
        self._compared: dict[Ranks, int] = {}  # the number of the last one that is done
        self._wake, self._turn, self._ended = threading.Event(), threading.Condition(), False
        self._let_others_run = let_others_run
        self._main = threading.main_thread().ident if let_others_run is None else threading.get_ident()
        self._thread: threading.Thread | None = None
        if let_others_run is None:
            self._thread = threading.Thread(target=self._work, name="shardwise-plain-tensors", daemon=True)
            self._thread.start()
        else:
            self._begin()

    # ---------------------------------------------------------------- the program's side

    def use(self, ranks: Ranks, op: str, operands: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Plain tensors are about to be used among DTensors of these ranks."""
        frame = user_frame()
        place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        key = (op, place, self._thread_name(), ranks)
        count = self._counts.get(key)
        if count is None:
            if len(self._counts) >= SITES:
                self._counts.clear()
            count = self._counts.setdefault(key, itertools.count(1))
        number = next(count)
        if is_sampled(number):
            self._post(ranks, op, place, number, operands)

    def _post(
        self, ranks: Ranks, op: str, place: tuple[str, int], number: int, operands: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        digests = {argument_name(name, tensor): digest_of(tensor) for name, tensor in operands}
        if os.getpid() != self._process or None in digests.values():
            return
        line = f"{place[0]}:{place[1]}" if place[0] else "backward"
        # paths may differ from host to host
        site = f"{op} {os.path.basename(place[0])}:{place[1]} {self._thread_name()}"
        self._posted.append(Use(ranks, site, number, line, digests))  # pyright: ignore[reportArgumentType]
        if self._thread is None:
            self._look()
        else:
            self._wake.set()

    def _thread_name(self) -> str:
        """The thread's name, the same on all ranks. Autograd's threads have no names."""
        if threading.get_ident() == self._main:
            return ""
        name = threading.current_thread().name
        return "backward" if name.startswith("Dummy") else name

    def compare_posted(self, ranks: Ranks, number: int) -> None:
        """Compare everything posted so far. Waits until the neighbours among `ranks` have posted as much.

        Args:
            ranks: those that call it, this one among them.
            number: how many times they have.
        """
        deadline = time.monotonic() + self._patience
        if self._thread is None:
            self._asked[ranks] = number
            while self._compared.get(ranks, 0) < number and not self.verdict and time.monotonic() < deadline:
                self._look()
                self._pause()
            return
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        with self._turn:
            self._asked[ranks] = number
            self._wake.set()
            while self._compared.get(ranks, 0) < number and self._thread.is_alive() and time.monotonic() < deadline:
                self._turn.wait(0.1)

    def close(self, wait: bool) -> None:
        """End the check. With `wait`, finish the last comparisons and wait until every rank knows of a disagreement."""
        if self._thread is None:
            if wait and not self.verdict:
                self._finish()
            return
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self._ended = True
        self._wake.set()
        self._thread.join(2 * self._patience if wait else LEAVING)

    # ---------------------------------------------------------------- the thread

    def _begin(self) -> None:
        self._store.add("begun", 1)
        self._store.set(f"mark{self.rank}", "0")

    def _pause(self) -> None:
        if self._let_others_run is None:
            time.sleep(BUSY)
        else:
            self._let_others_run()

    def _work(self) -> None:
        try:
            self._begin()
            pause = BUSY
            while not self._ended and not self.verdict:
                self._wake.wait(pause)
                self._wake.clear()
                busy = self._look() or bool(self._to_settle())
                pause = BUSY if busy else min(2 * pause, IDLE)
            self._finish()
        except (dist.DistError, LostRankError):  # the store is gone, and with it the other ranks
            pass
        finally:
            self._show_unless_raised()
            with self._turn:
                self._turn.notify_all()

    def _look(self) -> bool:
        """Post, read, compare. Whether anything happened or is still waited for."""
        to_settle = self._to_settle()
        happened = self._send()
        for ranks, asked in to_settle.items():
            if self._neighbours_reach(ranks, asked):
                self._receive()
                self._hear()  # before `compare_posted` returns, which raises disagreements
                with self._turn:
                    self._compared[ranks] = asked
                    self._turn.notify_all()
        happened = self._receive() or happened
        self._hear()
        return happened

    def _to_settle(self) -> dict[Ranks, int]:
        with self._turn:
            return {ranks: asked for ranks, asked in self._asked.items() if asked > self._compared.get(ranks, 0)}

    def _send(self) -> bool:
        fresh: dict[Ranks, list[Any]] = {}
        while self._posted:
            use = self._posted.popleft()
            said = {name: digest.text() for name, digest in use.digests.items()}
            stream = self._streams.get(use.ranks)
            if stream is None:
                stream = self._streams[use.ranks] = _Stream(use.ranks, self.rank)
            fresh.setdefault(use.ranks, []).append([use.site, use.number, use.line, said])
        for ranks, entries in fresh.items():
            self._streams[ranks].send(self._store, entries)
        return bool(fresh)

    def _receive(self) -> bool:
        happened = False
        for stream in self._streams.values():
            happened = stream.receive(self._store) or happened
            if stream.difference and not self.verdict:
                self._store.compare_set("verdict", "", stream.difference)
        return happened

    def _neighbours_reach(self, ranks: Ranks, asked: int) -> bool:
        """Whether the neighbours among `ranks` have posted everything up to the n-th request."""
        name = f"asked/{_name_of(ranks)}/"
        self._store.set(f"{name}{self.rank}", str(asked))
        neighbours = {stream.before for stream in self._streams.values()}
        return all(
            self._number(f"{name}{rank}", 0) >= asked or self._number(f"mark{rank}", ENDED) == ENDED
            for rank in neighbours.intersection(ranks)
        )

    def _number(self, key: str, absent: int) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else absent

    def _hear(self) -> None:
        if not self.verdict and self._store.check(["verdict"]):
            self.verdict = self._store.get("verdict").decode()
            self._report.found(self.verdict)
            self._store.add("heard", 1)  # from now on the rank that holds the store may end

    def _show_unless_raised(self) -> None:
        """Print an error that the program cannot raise because it is ending or waiting for other ranks."""
        deadline = time.monotonic() + WAITING
        while self.verdict and not self._report.was_raised():
            if self._ended or time.monotonic() > deadline:
                self._report.show()
                return
            time.sleep(BUSY)

    def _finish(self) -> None:
        """The last comparisons: wait for the neighbours to end, then for all to have compared."""
        self._send()
        self._store.set(f"mark{self.rank}", str(ENDED))
        start = time.monotonic()
        while not self.verdict and time.monotonic() < start + self._patience:
            marks = [self._number(f"mark{stream.before}", -1) for stream in self._streams.values()]
            self._receive()
            self._hear()
            late = any(mark < 0 for mark in marks) and time.monotonic() < start + GRACE
            if not late and all(mark < 0 or mark == ENDED for mark in marks):
                break
            self._pause()
        self._store.add("done", 1)
        while not self.verdict and time.monotonic() < start + self._patience:
            every = self._counted("done") >= self._counted("begun")
            self._hear()
            if every:
                break
            self._pause()
        while self.verdict and time.monotonic() < start + self._patience:  # one of us holds the store
            if self._counted("heard") >= self._counted("begun"):
                break
            self._pause()

    def _counted(self, key: str) -> int:
        return int(self._store.get(key))


def _name_of(ranks: Ranks) -> str:
    """A short name of these ranks, the same on all of them."""
    return hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()


class _Stream:
    """The posts of this rank and of the one before it in a group, and their differences.

    A rank's posts are numbered keys of the store. Only the next rank reads and deletes them.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.before = ranks[ranks.index(rank) - 1]
        self.difference = ""
        name = _name_of(ranks)
        self._mine, self._theirs = f"{name}/{rank}/", f"{name}/{self.before}/"
        self._sent = self._read = 0
        self._rank, self._ranks = rank, ranks
        self._waiting: tuple[OrderedDict[Any, Any], OrderedDict[Any, Any]] = (OrderedDict(), OrderedDict())

    def send(self, store: Any, entries: list[Any]) -> None:
        store.set(f"{self._mine}{self._sent}", json.dumps(entries))
        self._sent += 1
        for entry in entries:
            self._match(0, entry)

    def receive(self, store: Any) -> bool:
        before = self._read
        while store.check([key := f"{self._theirs}{self._read}"]):
            entries = json.loads(store.get(key))
            store.delete_key(key)
            self._read += 1
            for entry in entries:
                self._match(1, entry)
        return self._read > before

    def _match(self, side: int, entry: list[Any]) -> None:
        site, number, line, said = entry
        other = self._waiting[1 - side].pop((site, number), None)
        if other is None:
            mine = self._waiting[side]
            mine[site, number] = (line, said)
            while len(mine) > KEPT:  # of ranks that take different paths through the program
                mine.popitem(last=False)
        elif other[1] != said and not self.difference:
            mine, theirs = ((line, said), other) if side == 0 else (other, (line, said))
            self.difference = self._text(site, number, mine, theirs)

    def _text(self, site: str, number: int, mine: tuple[str, Any], theirs: tuple[str, Any]) -> str:
        """The two sides, the smaller rank first."""
        pair = sorted(((self._rank, *mine), (self.before, *theirs)))
        names = [name for name in pair[0][2] if pair[0][2][name] != pair[1][2].get(name)] or list(pair[1][2])
        each = "; ".join(
            f"rank {rank} has {', '.join(said.get(name, 'none') for name in names)}" for rank, _, said in pair
        )
        arguments = ", ".join(names)
        return (
            f"{site.split(' ')[0]} at {pair[0][1]}: argument {arguments} is a plain torch.Tensor among DTensors of "
            f"{ranks_name(self._ranks)}, and ranks {pair[0][0]} and {pair[1][0]} do not have the same (use number "
            f"{number} of this line): {each}"
        )
