"""The virtual fabric: N ranks in this process, in lockstep, with real values.

A local is a `RankTensor`, which holds one tensor for each rank; an operator on it runs on each. No process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError, UnsupportedError
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
    received_boxes,
    reduce_tensors,
    slicer,
)
from shardwise.fabric.nondeterministic import is_nondeterministic
from shardwise.fabric.packing import pack_traced
from shardwise.fabric.rank_tensor import RankTensor, is_tensor, part_at, parts_of, rank_results, results_alike, run_rows
from shardwise.fabric.row_packing import RowParcels, row_parcels
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
    tree_map,
)

__all__ = ["VirtualFabric", "virtual"]


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
        return RankTensor(results_alike(op, [[tensor] for tensor in _tensors(local, mesh)], lambda row: fn(row[0]), ()))

    def is_local(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, RankTensor)

    def on_each(self, op: Callable[..., Any], operands: int) -> Callable[..., Any] | None:
        return _on_one(op) if operands == 1 else _on_two(op) if operands == 2 else None

    def operator_runner(self, operator: LocalOperator, draws: bool) -> OperatorRunner:
        return _run_random_once(operator) if draws else _rank_by_rank(operator)

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
        """Any movement of blocks: each rank's new block is assembled from the blocks that contain its parts."""
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
                    jobs.append((position, coordinate, received_boxes(after.block(coordinate), position, holders)))
            jobs.sort(key=lambda job: job[0])
        else:
            holders = distinct_blocks(before, range(len(ranks)))
            for coordinate, rank in zip(self.coordinates(after.mesh), after.mesh.grid_ranks, strict=True):
                own = before.mesh.position_of(rank)
                receiver = rank % len(ranks) if own is None else own
                jobs.append((receiver, coordinate, received_boxes(after.block(coordinate), receiver, holders)))

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
        """As on processes: every rank packs its messages and receives those of the others."""
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
                assert not sent, "sent and received messages match"
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
        """The reduction of each group, of which every rank gets its part (after an all-reduce, a copy of all)."""
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
    """The tensor of a rank in each of the locals; None if it is not in the mesh."""
    places = [spec.mesh.position_of(rank) for spec in specs]
    return [
        None if at is None else _tensors(local, spec.mesh)[at]
        for at, local, spec in zip(places, locals_, specs, strict=True)
    ]


def _move_along_line(change: LineChange, mesh: DeviceMesh) -> BoundStep:
    """Change how one axis splits one dim: concatenate the runs of its ranks and split again."""
    rows, dim = mesh.groups((change.axis,)).tolist(), change.dim
    runs = [change.new_run(rank) for rank in range(mesh.shape[change.axis])]

    def run_along_line(local: torch.Tensor) -> torch.Tensor:
        tensors = _tensors(local, mesh)
        out: list[Any] = [None] * len(tensors)
        for row in rows:
            joined = torch.cat([tensors[i] for i in row], dim)
            for i, (start, length) in zip(row, runs, strict=True):
                out[i] = joined.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
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
    """Run on one rank after the other."""

    def run_rank_by_rank(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        rows = [[*(part_at(local, rank) for local in locals_), own] for rank, own in enumerate(operator.own)]

        def call(row: Sequence[Any]) -> Any:
            new_args, new_kwargs = operator.arguments(args, kwargs, row[:-1], row[-1])
            return op(*new_args, **new_kwargs)

        func = operator.op if is_nondeterministic(operator.op) else op  # `op` may be a function around it
        return rank_results(run_rows(func, rows, call, operator.written), lambda values: values[0])

    return run_rank_by_rank


def _run_random_once(operator: LocalOperator) -> OperatorRunner:
    """Draw random numbers once, on operands that are equal on all ranks, and give them to every rank."""

    def run_once(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        first = [part_at(local, 0) for local in locals_]
        new_args, new_kwargs = operator.arguments(args, kwargs, first, operator.own[0])
        result = op(*new_args, **new_kwargs)
        for position, _ in operator.written:
            for other in parts_of(locals_[position])[1:]:
                other.copy_(first[position])
        copies = [tree_map(lambda t: t.clone() if is_tensor(t) else t, result) for _ in operator.own]
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
