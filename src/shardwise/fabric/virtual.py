"""The fabric of a laptop: N ranks inside this one process, in lockstep, with real values.

A local is a `RankTensor`, which holds one tensor for each rank; an operator on it runs on each. No process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.core.tangents import accept_plain_tangents, made_from_plain
from shardwise.errors import AgreementError, LayoutError, MeshError, ShardwiseError, UnsupportedError
from shardwise.fabric.base import (
    BoundRows,
    BoundStep,
    Fabric,
    LocalOperator,
    OperatorRunner,
    RunTransfer,
    StartExchange,
    advance,
    check_counts,
    check_source,
    register,
)
from shardwise.fabric.block_copies import (
    distinct_blocks,
    divide_average,
    empty_block,
    fill_from,
    local_step,
    pieces_for,
    reduce_tensors,
    slicer,
)
from shardwise.fabric.nondeterministic import is_nondeterministic, shape_only, share_results
from shardwise.fabric.packing import pack_traced
from shardwise.fabric.rank_generators import draws, draws_alike
from shardwise.fabric.rank_sizes import of_rank, rank_sizes, traced_sizes
from shardwise.fabric.rank_tangents import RankTangents, in_forward_mode
from shardwise.fabric.row_packing import RowParcels, row_parcels
from shardwise.fabric.shared_writes import (
    STATISTICS,
    TRACED,
    SharedWrite,
    check_agreement,
    is_shared,
    is_traced,
    written_arguments,
)
from shardwise.fabric.state_messages import rank_transfer
from shardwise.plan.line_change import LineChange
from shardwise.plan.route import Route
from shardwise.plan.state_transfer import StateTransfer
from shardwise.plan.step import (
    AllGather,
    AllReduce,
    Exchange,
    OwnerExchange,
    ReduceScatter,
    Rotate,
    RowExchange,
    Step,
    reduction,
)
from shardwise.rules.owner_programs import Items
from shardwise.torch_private import (
    OpOverload,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "RankTensor", "VirtualFabric", "check_replicas", "is_even", "map_parts", "of_rows", "part_at", "parts_of",
    "virtual", "writes_to",
]  # fmt: skip


SHOWN_RANKS = 6  # of a RankTensor that is printed


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not is_traced(a) and a.is_meta is b.is_meta is False and torch.equal(a, b)


class RankTensor(torch.Tensor):
    """One tensor for each virtual rank. An operator on it runs on each rank's tensor.

    Sizes that differ between ranks are symbolic: numbers computed from them differ too. `tensors` has all.
    """

    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, tensors: Sequence[torch.Tensor]) -> RankTensor:
        first = tensors[0]
        size, stride = first.shape, first.stride()
        if first.__class__ in TRACED:
            size, stride = traced_sizes(tensors)
        else:
            for tensor in tensors:
                if tensor.shape != size:
                    size, stride = _own_sizes(tensors)
                    cls = UnevenDual if in_forward_mode() else cls
                    break
        self = make_wrapper_subclass(cls, size, strides=stride, dtype=first.dtype, device=first.device)
        self.tensors = tuple(tensors)
        return self

    __torch_function__ = disabled_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and any(getattr(kind, "_laid_out_over_ranks", False) for kind in types):
            return NotImplemented  # a DTensor is laid out over the ranks: its class decides
        return run_on_each(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same values, unknown to autograd. Assigning gives each rank's tensor the values of another's."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not isinstance(value, RankTensor) or len(value.tensors) != len(self.tensors):
            raise UnsupportedError(
                f"the data of a RankTensor of {len(self.tensors)} ranks cannot be one plain tensor: the ranks would "
                "share its memory",
                hint=f"RankTensor([tensor.clone() for _ in range({len(self.tensors)})])",
            )
        for mine, other in zip(self.tensors, value.tensors, strict=True):
            mine.data = other
        _DATA.__set__(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        count = len(self.tensors)
        if count > 1 and is_even(self) and all(_is_same(self.tensors[0], other) for other in self.tensors[1:]):
            shown = [f"  ranks 0 to {count - 1}: {self.tensors[0]!r}\n"]
        else:
            shown = [f"  rank {i}: {t!r}\n" for i, t in enumerate(self.tensors)]
            if count > SHOWN_RANKS:
                shown[SHOWN_RANKS // 2 : -(SHOWN_RANKS // 2)] = [f"  ... {count - SHOWN_RANKS} more\n"]
        return "RankTensor(\n" + "".join(shown) + ")"

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        if not is_traced(self.tensors[0]) and not is_even(self):
            raise UnsupportedError(
                f"torch.compile of a RankTensor of shape {tuple(self.shape)}: the ranks' tensors differ in shape, and "
                "the compiler needs one shape",
                hint="make it a DTensor before the compiled program, by from_local(..., shape=, stride=); as such it "
                "compiles",
            )
        return [f"_t{i}" for i in range(len(self.tensors))], len(self.tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_t") and name[2:].isdigit():  # as compilers know them
            return self.tensors[int(name[2:])]
        raise AttributeError(f"'RankTensor' object has no attribute {name!r}", name=name, obj=self)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], count: int, size: Any, stride: Any) -> RankTensor:
        return RankTensor([inner[f"_t{i}"] for i in range(count)])

    def __coerce_tangent_metadata__(self) -> RankTensor:
        """The gradient that a compiler should expect for this output: one for each rank."""
        accept_plain_tangents()
        return self

    def __coerce_same_metadata_as_tangent__(
        self, expected: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        """The ranks' gradients where compiled code expects one plain gradient for all."""
        if expected_type is not torch.Tensor:
            return None
        check_agreement(self.tensors, _differing_gradients)
        return self.tensors[0]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return RankTensor, (self.tensors,)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        copied = RankTensor([tensor.detach().clone() for tensor in self.tensors])
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> list[Any]:
        """The values of each rank."""
        return [tensor.tolist() for tensor in self.tensors]


class UnevenDual(RankTensor):
    """A `RankTensor` of uneven locals that was made in forward mode, where torch needs each rank's zero tangents."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = disabled_torch_function
        if not in_forward_mode():
            return plain(func, types, args, kwargs or {})
        with RankTangents(RankTensor):
            return plain(func, types, args, kwargs or {})


def _differing_gradients(rank: int) -> ShardwiseError:
    return AgreementError(
        f"the gradient of a plain output of compiled code differs between virtual ranks 0 and {rank}: the output is "
        "one tensor in place of every rank's own",
        hint="reduce over the ranks first, as full_tensor() of a DTensor does",
    )


made_from_plain(RankTensor, lambda tangent, count: RankTensor([tangent] * count))


def check_replicas(local: RankTensor) -> None:
    """One plain tensor can be that of every rank only if they have the same."""
    if not is_traced(local.tensors[0]):
        check_agreement(local.tensors, _differing_replicas)


def _differing_replicas(rank: int) -> ShardwiseError:
    return AgreementError(
        f"the replicas of a DTensor differ between virtual ranks 0 and {rank}: no one tensor is that of every rank",
        hint="per-rank values were written to its local or given as replicated; to_local().tensors has each rank's",
    )


def is_even(local: RankTensor) -> bool:
    """Whether all ranks have a tensor of one shape."""
    return all(tensor.shape == local.tensors[0].shape for tensor in local.tensors)


def parts_of(local: Any) -> Sequence[torch.Tensor]:
    """The tensors that a local is: one for each virtual rank, or itself."""
    return local.tensors if isinstance(local, RankTensor) else (local,)


def part_at(local: Any, position: int) -> torch.Tensor:
    """The tensor of the rank at a position among those here; a plain tensor is every rank's."""
    return local.tensors[position] if isinstance(local, RankTensor) else local


def map_parts(fn: Callable[[torch.Tensor], torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """The local made of `fn(part)` for each tensor that a local is."""
    return RankTensor([fn(part) for part in local.tensors]) if isinstance(local, RankTensor) else fn(local)


def of_rows(like: torch.Tensor, rows: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Locals of the kind of `like`, made of a row of tensors for each rank here; none where no rank is here."""
    if isinstance(like, RankTensor):
        return [RankTensor(column) for column in zip(*rows, strict=True)]
    return rows[0] if rows else ()


def writes_to(local: torch.Tensor) -> int | None:
    """How often a local has been written to; None where torch does not count."""
    count = 0
    for tensor in (local, *local.tensors) if isinstance(local, RankTensor) else (local,):
        if tensor.is_inference():
            return None
        count += tensor._version
    return count


def run_on_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` on each rank's tensors; results that are tensors become a `RankTensor`, others must agree."""
    leaves, tree = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RankTensor)]
    counts = {len(leaves[i].tensors) for i in at}
    if len(counts) != 1:
        raise MeshError(f"{func}: locals of meshes with {sorted(counts)} ranks cannot be combined")
    count = counts.pop()
    if any(isinstance(leaf, _SYMBOLIC) for leaf in leaves):
        rows = [[of_rank(leaf, rank) for leaf in leaves] for rank in range(count)]
    else:
        rows = [list(leaves) for _ in range(count)]
    for i in at:
        for row, tensor in zip(rows, leaves[i].tensors, strict=True):
            row[i] = tensor
    if func.namespace == "prims":
        _resize_metas(rows, leaves, at)

    def call(row: Sequence[Any]) -> Any:
        rank_args, rank_kwargs = tree_unflatten(row, tree)
        return func(*rank_args, **rank_kwargs)

    written = written_leaves(func, args, kwargs, leaves)
    results = run_rows(func, rows, call, written)
    for i, _ in written:
        if isinstance(leaves[i], RankTensor):
            _take_sizes(leaves[i])
    return rank_results(results, functools.partial(_agreed, func), leaves)


def _resize_metas(rows: Sequence[list[Any]], leaves: Sequence[Any], at: Sequence[int]) -> None:
    """Beside locals of different shapes, each rank's own shape of a meta tensor that torch gave that of the first.

    Forward mode uses it for the sizes of a product with zero.
    """
    local = leaves[at[0]]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and i not in at and leaf.is_meta and leaf.shape == local.shape:
            for row, tensor in zip(rows, local.tensors, strict=True):
                row[i] = leaf.new_empty(tensor.shape)


def written_leaves(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> list[tuple[int, str]]:
    """Where in the flat arguments the tensors are that an operator writes to, and the names of their arguments."""
    names = written_arguments(func) if isinstance(func, OpOverload) else ()
    if not names:
        return []
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
    if named.get("training") is False:  # running statistics are read alone
        names = [name for name in names if name not in STATISTICS]
    found = {id(leaf): name for name in names for leaf in tree_leaves(named.get(name))}
    return [(i, found[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in found and _is_tensor(leaf)]


def run_rows(
    func: Any, rows: Sequence[list[Any]], call: Callable[[Sequence[Any]], Any], written: Sequence[tuple[int, str]]
) -> list[Any]:
    """`call` on the row of each rank: as N processes would, with one plain tensor or generator in place of N alike.

    Args:
        func: the operator that is called.
        rows: each rank's tensors and other values.
        call: runs the operator on a row.
        written: where in a row the tensors are that it writes to, and the names of their arguments.
    """
    random = draws(func)
    shared = [i for i, _ in written if is_shared([row[i] for row in rows])]
    if not shared and not random:
        return _alike(func, rows, call, written)
    trial = SharedWrite(func, rows, written, shared) if written else None
    mine = rows if trial is None else trial.trials
    if random:
        results = draws_alike(func, mine, call)
    else:
        results = _alike(func, mine, call, written)
    if trial is None:
        return results
    trial.commit()
    return [tree_map(functools.partial(trial.original, rank), result) for rank, result in enumerate(results)]


def _alike(func: Any, rows: Sequence[Any], call: Callable[[Sequence[Any]], Any], written: Any) -> list[Any]:
    """`call` on each row; ranks with equal rows have equal results."""
    if is_nondeterministic(func):
        return share_results(rows, call, written, shape_only(func))
    return [call(row) for row in rows]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_DATA: Any = torch.Tensor.data
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _own_sizes(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The sizes and strides of uneven locals."""
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise LayoutError(
            f"locals of {sorted({tensor.dim() for tensor in tensors})} dims cannot be one RankTensor",
            hint="give every rank a tensor of as many dims",
        )
    return rank_sizes([t.shape for t in tensors]), rank_sizes([t.stride() for t in tensors], strides=True)


def _take_sizes(local: RankTensor) -> None:
    """The sizes of a local whose tensors an operator has given others: resize_, t_, out=."""
    made = RankTensor(local.tensors)
    if _sizes(made) != _sizes(local):
        _DATA.__set__(local, made)


def _sizes(local: RankTensor) -> list[Any]:
    return [of_rank(size, rank) for rank in range(len(local.tensors)) for size in (*local.shape, *local.stride())]


def rank_results(results: Sequence[Any], plain: Callable[[Sequence[Any]], Any], given: Sequence[Any] = ()) -> Any:
    """The results of all ranks as one: tensors as a `RankTensor`, sequences item by item, other values by `plain`.

    An operator in place gives back the very tensor it wrote to: that is found among the `given`.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        for leaf in given:
            if first is leaf or (isinstance(leaf, RankTensor) and _are_parts(results, leaf)):
                return leaf
        return RankTensor(results)
    if isinstance(first, tuple | list):
        if len({len(result) for result in results}) > 1:
            raise AgreementError(
                f"an operator gives {[len(result) for result in results]} results on the virtual ranks",
                hint="ranks run in lockstep here: take the tensor of one rank with local.tensors[rank]",
            )
        items = (rank_results(column, plain, given) for column in zip(*results, strict=True))
        return list(items) if isinstance(first, list) else tuple(items)
    return plain(results)


def _are_parts(results: Sequence[Any], leaf: RankTensor) -> bool:
    return all(result is tensor for result, tensor in zip(results, leaf.tensors, strict=True))


def _agreed(func: Any, values: Sequence[Any]) -> Any:
    """The plain value that every rank has; a NaN agrees with a NaN."""
    first = values[0]
    if any(value != first and (value == value or first == first) for value in values[1:]):
        raise UnsupportedError(
            f"{func} gives a different plain value on each virtual rank ({values[:4]}...)",
            hint="ranks run in lockstep here: take the values of one rank with local.tensors[rank]",
        )
    return first


class VirtualFabric(Fabric):
    """All ranks in this process, in the order of the mesh's grid."""

    name = "virtual"
    many_ranks = True

    def spread(self, mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:  # a local as it is
        return tensor if isinstance(tensor, RankTensor) else RankTensor([tensor] * mesh.grid_size)

    def rank(self) -> int:
        raise UnsupportedError(
            "on the virtual fabric all ranks run in lockstep inside this process, so there is no 'my rank'",
            hint="code for one rank (printing, saving) goes under `if shardwise.is_main():`; data that differs "
            "by rank is a RankTensor or a DTensor; coordinate_of(rank) is where a rank is; "
            "`shardwise run -n N` gives each rank a thread",
        )

    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        return [tuple(row) for row in mesh.coordinates.tolist()]

    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        return RankTensor([make(coordinate) for coordinate in self.coordinates(mesh)])

    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        columns = [_tensors(local, mesh) for local in locals_]
        return RankTensor([fn(c, *row) for c, *row in zip(self.coordinates(mesh), *columns, strict=True)])

    def map_operator(
        self, mesh: DeviceMesh, op: Any, fn: Callable[[torch.Tensor], torch.Tensor], local: torch.Tensor
    ) -> torch.Tensor:
        return RankTensor(_alike(op, [[tensor] for tensor in _tensors(local, mesh)], lambda row: fn(row[0]), ()))

    def is_local(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, RankTensor)

    def on_each(self, op: Callable[..., Any], operands: int) -> Callable[..., Any] | None:
        return _on_one(op) if operands == 1 else _on_two(op) if operands == 2 else None

    def operator_runner(self, operator: LocalOperator, draws: bool) -> OperatorRunner:
        return _drawing_once(operator) if draws else _rank_by_rank(operator)

    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        return list(zip(self.coordinates(mesh), _tensors(local, mesh), strict=True))

    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        check_source(mesh, source)
        return self.build(mesh, blocks)

    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        return [facts] * mesh.size()

    def bind(self, step: Step) -> BoundStep:
        mesh = step.before.mesh
        if step.collective is None:
            steps: list[Any] = [local_step(step, coordinate) for coordinate in self.coordinates(mesh)]
            return lambda local: RankTensor([fn(t) for fn, t in zip(steps, _tensors(local, mesh), strict=True)])
        match step:
            case AllGather():
                return self._all_gather(step)
            case AllReduce() | ReduceScatter():
                return self._reduce(step)
            case _:
                return self._move(step)

    def _all_gather(self, step: AllGather) -> BoundStep:
        if any(step.before.rows(axis) for axis in step.before.dim_axes[step.dim]):
            return self._move(step)
        rows = step.before.mesh.groups(step.over).tolist()

        def run_all_gather(local: torch.Tensor) -> torch.Tensor:
            tensors = local.tensors  # pyright: ignore[reportAttributeAccessIssue]
            out: list[Any] = [None] * len(tensors)
            for row in rows:
                parts = [tensors[i] for i in row]
                for i in row:
                    out[i] = torch.cat(parts, step.dim).contiguous()  # row-major, as process groups gather
            return RankTensor(out)

        return run_all_gather

    def _move(self, step: Step) -> BoundStep:
        """Any movement of blocks: each rank's new block is put together from those that hold its parts."""
        before, after = step.before, step.after
        change = step.change if isinstance(step, Exchange) else None
        if change is not None and before.tensor_meta.is_contiguous:
            return _move_along_line(change, before.mesh)
        ranks = before.mesh.grid_ranks
        jobs: list[tuple[int, Coordinate, list[Any]]] = []
        if before.mesh is after.mesh:
            for row in before.mesh.groups(step.axes).tolist():
                holders = distinct_blocks(before, row)
                for position in row:
                    coordinate = tuple(after.mesh.coordinates[position].tolist())
                    jobs.append((position, coordinate, pieces_for(after.block(coordinate), position, holders)))
            jobs.sort(key=lambda job: job[0])
        else:
            holders = distinct_blocks(before, range(len(ranks)))
            for coordinate, rank in zip(self.coordinates(after.mesh), after.mesh.grid_ranks, strict=True):
                own = before.mesh.position_of(rank)
                receiver = rank % len(ranks) if own is None else own
                jobs.append((receiver, coordinate, pieces_for(after.block(coordinate), receiver, holders)))

        def run_exchange(local: torch.Tensor) -> torch.Tensor:
            tensors = local.tensors  # pyright: ignore[reportAttributeAccessIssue]
            results = []
            for _, coordinate, pieces in jobs:
                out = empty_block(after, coordinate, tensors[0])
                for sender, boxes in pieces:
                    fill_from(out, tensors[sender], boxes)
                results.append(out)
            return RankTensor(results)

        return run_exchange

    def bind_transfer(self, transfer: StateTransfer, route: Route) -> tuple[RunTransfer, int]:
        """As processes do it: every rank packs its messages, and gets those of the others."""
        transfers = {rank: rank_transfer(transfer, rank) for rank in transfer.ranks}

        def run_transfer(
            locals_: Sequence[torch.Tensor],
            results: Sequence[torch.Tensor],
            report: Callable[[int], object],
            in_background: bool,
        ) -> Callable[[], None]:
            have, want = (
                {rank: _of_ranks(rank, tensors, specs) for rank in transfers}
                for tensors, specs in ((locals_, transfer.sources), (results, transfer.targets))
            )
            for number in range(len(transfer.buckets)):
                sent: dict[tuple[int, int], torch.Tensor] = {}
                for rank, own in transfers.items():
                    bucket = own.buckets[number]
                    bucket.keep(have[rank], want[rank])
                    for message in bucket.sends:
                        sent |= dict.fromkeys([(rank, other) for other in message.ranks], message.pack(have[rank]))
                for rank, own in transfers.items():
                    for message in own.buckets[number].receives:
                        message.unpack(sent.pop((message.ranks[0], rank)), want[rank])
                assert not sent, "what is sent is received"
                report(sum(own.buckets[number].nbytes for own in transfers.values()))
            return lambda: None

        return run_transfer, sum(own.sent + own.received for own in transfers.values())

    def bind_rows(self, step: RowExchange, communicates: bool) -> BoundRows:
        """As on processes: each rank packs its boxes, receives its part of the others' buffers, and unpacks."""
        mesh = step.before.mesh
        lines = mesh.groups(step.over).tolist()
        by_line = [[row_parcels(step, me, mesh.coordinates[line]) for me in range(len(line))] for line in lines]

        def run_row_exchange(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
            columns = [_tensors(local, mesh) for local in locals_]
            out: list[list[Any]] = [[None] * mesh.grid_size for _ in step.results]
            for line, parcels in zip(lines, by_line, strict=True):
                given = [[column[i] for column in columns] for i in line]
                for i, own, parts, buffer in zip(line, parcels, given, _swapped(parcels, given), strict=True):
                    for result, made in zip(out, own.unpack(parts, buffer, fill), strict=True):
                        result[i] = made
            return [RankTensor(tensors) for tensors in out]

        return run_row_exchange

    def start_rotation(self, step: Rotate) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        mesh = step.before.mesh
        lines = mesh.groups(step.over).tolist()

        def start(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
            tensors = _tensors(flat, mesh)
            out: list[Any] = [tensor[:0] for tensor in tensors]
            for line in lines:
                for at, (position, wanted) in enumerate(zip(line, step.wanted, strict=True)):
                    if wanted:
                        out[position] = tensors[line[(at - step.distance) % len(line)]]
            return lambda: RankTensor(out)

        return start

    def exchange_by_owner(
        self, step: OwnerExchange, start: StartExchange, locals_: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The programs of the ranks of a line in lockstep."""
        mesh = step.before.mesh
        columns, here = [_tensors(local, mesh) for local in locals_], self.coordinates(mesh)
        results: list[Any] = [None] * mesh.grid_size
        for line in mesh.groups(step.over).tolist():
            programs = [start(here[i], [column[i] for column in columns]) for i in line]
            arrived: Sequence[Items | None] = [None] * len(line)
            while True:
                told = [advance(program, items) for program, items in zip(programs, arrived, strict=True)]
                sent = [items for items, _ in told if items is not None]
                if not sent:
                    break
                arrived = _swapped_items(step, sent)
            for i, (_, made) in zip(line, told, strict=True):
                results[i] = made
        return [RankTensor(made) for made in zip(*results, strict=True)]

    def _reduce(self, step: AllReduce | ReduceScatter) -> BoundStep:
        """The reduction of each group, of which every rank gets its part: after an all-reduce, a copy of all."""
        mesh = step.before.mesh
        rows = mesh.groups(step.over).tolist()
        cuts = [slicer(step.before.block(c), step.after.block(c)) for c in self.coordinates(mesh)]
        op = reduction(step)

        def run_reduction(local: torch.Tensor) -> torch.Tensor:
            tensors = local.tensors  # pyright: ignore[reportAttributeAccessIssue]
            out: list[Any] = [None] * len(tensors)
            for row in rows:
                total = divide_average(step, reduce_tensors([tensors[i] for i in row], op))
                for i in row:
                    out[i] = cuts[i](total)
            return RankTensor(out)

        return run_reduction


def _of_ranks(rank: int, locals_: Sequence[torch.Tensor], specs: Sequence[DTensorSpec]) -> list[Any]:
    """The tensor of a rank in each of the locals; None where it is not in the mesh."""
    places = [spec.mesh.position_of(rank) for spec in specs]
    return [
        None if at is None else _tensors(local, spec.mesh)[at]
        for at, local, spec in zip(places, locals_, specs, strict=True)
    ]


def _move_along_line(change: LineChange, mesh: DeviceMesh) -> BoundStep:
    """One axis splits one dim otherwise: the runs of its ranks, joined and cut again."""
    rows, dim = mesh.groups((change.axis,)).tolist(), change.dim
    runs = [change.new_run(rank) for rank in range(mesh.shape[change.axis])]

    def run_along_line(local: torch.Tensor) -> torch.Tensor:
        tensors = _tensors(local, mesh)
        out: list[Any] = [None] * len(tensors)
        for row in rows:
            whole = torch.cat([tensors[i] for i in row], dim)
            for i, (start, length) in zip(row, runs, strict=True):
                out[i] = whole.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
        return RankTensor(out)

    return run_along_line


def _on_one(op: Callable[..., Any]) -> Callable[..., Any]:
    def unary_on_each(a: RankTensor, *rest: Any, **kwargs: Any) -> RankTensor:
        return RankTensor([op(x, *rest, **kwargs) for x in a.tensors])

    return unary_on_each


def _on_two(op: Callable[..., Any]) -> Callable[..., Any]:
    def binary_on_each(a: Any, b: Any, *rest: Any, **kwargs: Any) -> Any:
        if a.__class__ is RankTensor and b.__class__ is RankTensor:
            return RankTensor([op(x, y, *rest, **kwargs) for x, y in zip(a.tensors, b.tensors, strict=True)])
        return op(a, b, *rest, **kwargs)

    return binary_on_each


def _rank_by_rank(operator: LocalOperator) -> OperatorRunner:
    """On one rank after the other."""

    def run_rank_by_rank(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        rows = [[*(part_at(local, rank) for local in locals_), own] for rank, own in enumerate(operator.own)]

        def call(row: Sequence[Any]) -> Any:
            new_args, new_kwargs = operator.arguments(args, kwargs, row[:-1], row[-1])
            return op(*new_args, **new_kwargs)

        func = operator.op if is_nondeterministic(operator.op) else op  # `op` may be a function around it
        return rank_results(run_rows(func, rows, call, operator.written), lambda values: values[0])

    return run_rank_by_rank


def _drawing_once(operator: LocalOperator) -> OperatorRunner:
    """Random numbers are drawn once, on operands that all ranks hold alike, and given to every rank."""

    def run_once(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        first = [part_at(local, 0) for local in locals_]
        new_args, new_kwargs = operator.arguments(args, kwargs, first, operator.own[0])
        result = op(*new_args, **new_kwargs)
        for position, _ in operator.written:
            for other in parts_of(locals_[position])[1:]:
                other.copy_(first[position])
        copies = [tree_map(lambda t: t.clone() if _is_tensor(t) else t, result) for _ in operator.own]
        return rank_results(copies, lambda values: values[0])

    return run_once


def _swapped(parcels: Sequence[RowParcels], given: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The boxes that each rank of a line receives."""
    sent: dict[tuple[int, int], torch.Tensor] = {}
    for sender, (own, locals_) in enumerate(zip(parcels, given, strict=True)):
        buffer, at = pack_traced(own.packed(locals_), locals_[0], sum(size for _, size in own.sent)), 0
        for receiver, size in own.sent:
            sent[sender, receiver] = buffer.narrow(0, at, size)
            at += size
    nothing = given[0][0].reshape(-1)[:0]
    return [torch.cat([nothing, *(sent[by, me] for by, _ in own.got)]) for me, own in enumerate(parcels)]


def _swapped_items(step: OwnerExchange, sent: Sequence[Items]) -> list[Items]:
    """The items that each rank of a line receives."""
    counts = [
        tuple(items.counts.tolist()) if isinstance(items.counts, torch.Tensor) else items.counts for items in sent
    ]
    for own in counts:
        check_counts(step, own)
    parts = [
        [tensor.split(own) for tensor in items.tensors] for items, own in zip(sent, counts, strict=True)
    ]  # of each sender, of each tensor, for each receiver
    arrived = []
    for me, items in enumerate(sent):
        tensors = tuple(torch.cat([by[k][me] for by in parts]) for k in range(len(items.tensors)))
        arrived.append(Items(tensors, tuple(own[me] for own in counts), counts[me]))
    return arrived


def _tensors(local: torch.Tensor, mesh: DeviceMesh) -> Sequence[torch.Tensor]:
    if not isinstance(local, RankTensor) or len(local.tensors) != mesh.grid_size:
        have = f"{len(local.tensors)} tensors" if isinstance(local, RankTensor) else "one plain tensor"
        raise LayoutError(
            f"{mesh} needs a local with one tensor for each of its {mesh.grid_size} ranks, got {have}",
            hint="make it with shardwise.RankTensor([...]) or distribute a global tensor with distribute_tensor",
        )
    return local.tensors


virtual = register(VirtualFabric())
