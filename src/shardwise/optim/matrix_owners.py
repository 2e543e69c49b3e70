"""Functions of full matrices that are distributed over a mesh: each matrix is computed once, by a rank that owns it.

Ranks send their parts of all matrices to the owners in one exchange, and get their parts of the results in another. An
exchange is a redistribution of one flat tensor between two layouts of given sizes (`Ragged`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.layout import Block
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Ragged, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor, dtensor_of

__all__ = ["by_matrix", "matrix_owners"]

MAX_PLANS = 64


@torch.no_grad()
def by_matrix(
    function: Callable[[torch.Tensor], torch.Tensor],
    matrices: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    cost: Callable[[torch.Size], float] | None = None,
    batched: bool = False,
) -> list[torch.Tensor]:
    """Apply a function of full matrices to distributed matrices; results have the layouts of the matrices.

    Each matrix is computed once in the mesh. The work is balanced by the costs of the matrices, the most expensive
    first. All parts are sent in one exchange, and results come back in another. No derivatives.

    Args:
        function: from a plain matrix to one of the same shape. It is called for the matrices that a rank owns.
        matrices: 2-D DTensors in any layout. For plain tensors every rank computes the function itself.
        dtype: the dtype in which matrices are sent, computed and returned; that of each matrix by default.
        cost: the cost of a matrix of a shape; by default that of a product with its own transpose.
        batched: the function takes and returns a stack `[n, rows, columns]` of the matrices of one shape that a rank
            owns, and is called once for each shape.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> x = sw.distribute_tensor(torch.eye(4) * 2, mesh, [sw.Shard(0)])
        >>> [inverse] = by_matrix(torch.linalg.inv, [x])
        >>> inverse.spec, float(inverse.full_tensor()[1, 1])
        (f32[4,4] S0, 0.5)
    """
    results: list[torch.Tensor | None] = [None] * len(matrices)
    groups: dict[tuple[DeviceMesh, torch.dtype], list[int]] = {}
    for at, matrix in enumerate(matrices):
        if matrix.dim() != 2:
            raise LayoutError(
                f"by_matrix: tensor {at} has {matrix.dim()} dims, not 2", hint="reshape it to a matrix before"
            )
        if isinstance(matrix, DTensor):
            groups.setdefault((matrix.device_mesh, dtype or matrix.dtype), []).append(at)
        else:
            given = matrix if dtype is None else matrix.to(dtype)
            results[at] = function(given.unsqueeze(0)).squeeze(0) if batched else function(given)
    for (mesh, sent), positions in groups.items():
        given = [_reduced(matrices[at]) for at in positions]
        for at, result in zip(positions, _computed(function, mesh, given, sent, cost, batched), strict=True):
            results[at] = result
    return results  # pyright: ignore[reportReturnType]  # each was computed


def _reduced(matrix: Any) -> Any:
    """The matrix with every Partial reduced and broadcast dims materialized."""
    spec: DTensorSpec = matrix._spec
    if not spec.partial_axes and not spec.broadcast:
        return matrix
    spec = spec.materialized().reduced()
    return matrix.redistribute(placements=spec.placements, shard_order=spec.shard_order)


def _computed(
    function: Callable[[torch.Tensor], torch.Tensor],
    mesh: DeviceMesh,
    matrices: Sequence[Any],
    dtype: torch.dtype,
    cost: Callable[[torch.Size], float] | None,
    batched: bool,
) -> list[Any]:
    """The results for DTensors of one mesh, sent in one dtype."""
    given = tuple([matrix._spec for matrix in matrices])
    costs = tuple([(cost or _cost)(spec.shape) for spec in given])
    plan = _plans.get((given, dtype, costs))
    if plan is None:
        dense = tuple([_dense(spec, dtype) for spec in given])
        plan = _plans.keep((given, dtype, costs), transfers(dense, matrix_owners(costs, mesh.size())))
    fabric = fabric_of(mesh)
    locals_ = [matrix._local_tensor for matrix in matrices]

    def pack(coordinate: Coordinate, *parts: torch.Tensor) -> torch.Tensor:
        sent = [parts[at].reshape(-1) for at in plan.sent_by(_number(mesh, coordinate))]
        if len({part.dtype for part in sent}) > 1:
            sent = [part.to(dtype) for part in sent]
        return torch.cat(sent).to(dtype) if sent else parts[0].new_empty(0, dtype=dtype)

    def compute(coordinate: Coordinate, received: torch.Tensor) -> torch.Tensor:
        return plan.compute(function, coordinate[0], received, batched)

    def unpack(at: int) -> Callable[..., torch.Tensor]:
        return lambda coordinate, received: plan.part_of(at, _number(mesh, coordinate), received)

    flat = plan.gathering.before.mesh
    sent = dtensor_of(plan.gathering.before, fabric.map(mesh, pack, *locals_))
    owned = sent.redistribute(placements=plan.gathering.after.placements).to_local()
    back = dtensor_of(plan.returning.before, fabric_of(flat).map(flat, compute, owned))
    returned = back.redistribute(placements=plan.returning.after.placements).to_local()
    return [dtensor_of(spec, fabric.map(mesh, unpack(at), returned)) for at, spec in enumerate(plan.specs)]


def _dense(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The layout of a row-major copy in another dtype."""
    meta = spec.tensor_meta
    if meta.dtype is dtype and meta.is_contiguous:
        return spec
    return spec.with_meta(TensorMeta(spec.shape, dtype=dtype))


def _cost(shape: torch.Size) -> float:
    return math.prod(shape) * min(shape)


def _number(mesh: DeviceMesh, coordinate: Sequence[int]) -> int:
    """The row-major number of a coordinate in a mesh."""
    number = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        number = number * size + index
    return number


def matrix_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has the least to do so far.

    Example:
        >>> matrix_owners([1.0, 4.0, 2.0, 1.0], 2)
        [1, 0, 1, 1]
    """
    owners, load = [0] * len(costs), [0.0] * ranks
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        owners[at] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[at]] += costs[at]
    return owners


# ---------------------------------------------------------------- buffers


class Transfer(NamedTuple):
    """A flat tensor with a block for each pair of ranks: on the senders before, on the receivers after."""

    before: DTensorSpec
    after: DTensorSpec


class Transfers(NamedTuple):
    """The owners of matrices, the local blocks of ranks, and the two exchanges."""

    specs: tuple[DTensorSpec, ...]
    owned: tuple[tuple[int, ...], ...]  # by each rank
    blocks: tuple[tuple[Block, ...], ...]  # of each matrix on each rank
    sends: tuple[frozenset[int], ...]  # the ranks whose blocks form each matrix: one of each group of replicas
    starts: tuple[tuple[int, ...], ...]  # of each matrix and rank: the start of its block in the returned buffer
    gathering: Transfer
    returning: Transfer

    def sent_by(self, rank: int) -> Iterable[int]:
        """The matrices whose part a rank sends, in order."""
        return (at for owned in self.owned for at in owned if rank in self.sends[at])

    def compute(
        self, function: Callable[[torch.Tensor], torch.Tensor], owner: int, received: torch.Tensor, batched: bool
    ) -> torch.Tensor:
        """All blocks of the results of a rank's matrices, in the order of the receiving ranks."""
        mine = self.owned[owner]
        if not mine:
            return received.new_empty(0)
        alike: dict[torch.Size, list[int]] = {}
        for at in mine:
            alike.setdefault(self.specs[at].shape, []).append(at)
        stacks = {shape: received.new_empty((len(group), *shape)) for shape, group in alike.items()}
        matrices = {
            at: matrix for shape, group in alike.items() for at, matrix in zip(group, stacks[shape], strict=True)
        }
        start = 0
        for rank in range(len(self.owned)):
            for at in (at for at in mine if rank in self.sends[at]):
                block = self.blocks[at][rank]
                matrices[at][_indices(block)] = received[start : start + math.prod(block.shape)].view(block.shape)
                start += math.prod(block.shape)
        results: dict[int, torch.Tensor] = {}
        for shape, group in alike.items():
            if batched:
                made = function(stacks[shape])
                _check_shape(made.shape, stacks[shape].shape)
                results.update(zip(group, made.to(received.dtype), strict=True))
                continue
            for at in group:
                made = function(matrices[at])
                _check_shape(made.shape, shape)
                results[at] = made.to(received.dtype)
        pairs = itertools.product(range(len(self.owned)), mine)
        return torch.cat([results[at][_indices(self.blocks[at][rank])].reshape(-1) for rank, at in pairs])

    def part_of(self, at: int, rank: int, received: torch.Tensor) -> torch.Tensor:
        """A rank's block of the result of one matrix, from its received buffer."""
        start, shape = self.starts[at][rank], self.blocks[at][rank].shape
        return received[start : start + math.prod(shape)].view(shape).clone()


_plans: BoundedCache[tuple[Any, ...], Transfers] = BoundedCache(MAX_PLANS)


def _check_shape(made: torch.Size, given: torch.Size) -> None:
    if made != given:
        raise LayoutError(
            f"by_matrix: the function returned {tuple(made)} for {tuple(given)}",
            hint="return a matrix of the same shape, or a stack of as many",
        )


def _indices(block: Block) -> tuple[Any, ...]:
    """The index of a block in its tensor."""
    if all(len(runs) == 1 for runs in block.runs):
        return tuple([slice(runs[0].start, runs[0].start + runs[0].length) for runs in block.runs])
    each = [torch.cat([torch.arange(run.start, run.start + run.length) for run in runs]) for runs in block.runs]
    return torch.meshgrid(*each, indexing="ij")


def transfers(specs: tuple[DTensorSpec, ...], owners: Sequence[int]) -> Transfers:
    """The plan for matrices of one mesh and dtype with these owners."""
    mesh = specs[0].mesh
    coordinates = [tuple(int(i) for i in np.unravel_index(rank, mesh.shape)) for rank in range(mesh.size())]
    owned = tuple([tuple(at for at, owner in enumerate(owners) if owner == rank) for rank in range(mesh.size())])
    blocks = tuple([tuple([spec.block(coordinate) for coordinate in coordinates]) for spec in specs])
    sends = tuple(
        [
            frozenset(rank for rank, other in enumerate(coordinates) if _is_nearest(spec, other, coordinates[owner]))
            for spec, owner in zip(specs, owners, strict=True)
        ]
    )

    counts = np.array([[math.prod(block.shape) for block in of_ranks] for of_ranks in blocks])
    order = list(itertools.chain.from_iterable(owned))
    starts = np.empty_like(counts)
    starts[order] = np.cumsum(counts[order], 0) - counts[order]
    gathered, returned = (np.zeros((mesh.size(), mesh.size()), dtype=np.int64) for _ in range(2))
    for at, owner in enumerate(owners):
        senders = sorted(sends[at])
        gathered[senders, owner] += counts[at, senders]
        returned[owner] += counts[at]
    dtype, flat = specs[0].tensor_meta.dtype, mesh.flatten()
    both = [_transfer(flat, sizes, dtype) for sizes in (gathered, returned)]
    return Transfers(specs, owned, blocks, sends, tuple(map(tuple, starts.tolist())), *both)


def _is_nearest(spec: DTensorSpec, rank: Sequence[int], owner: Sequence[int]) -> bool:
    """Whether this rank sends its block: of all replicas, the one at the owner's coordinate along replicated axes."""
    return all(
        rank[axis] == owner[axis] for axis, placement in enumerate(spec.placements) if isinstance(placement, Replicate)
    )


def _transfer(flat: DeviceMesh, sizes: np.ndarray, dtype: torch.dtype) -> Transfer:
    """An exchange of `sizes[sender, receiver]` elements.

    Blocks are ordered by receiver, then by sender.
    """
    numbers = np.arange(sizes.size).reshape(sizes.shape)  # of blocks, by receiver and sender
    meta = TensorMeta((int(sizes.sum()),), dtype=dtype)
    before = Ragged(0, sizes.T.reshape(-1).tolist(), numbers.T.reshape(-1).tolist())
    after = Ragged(0, sizes.sum(0).tolist())
    return Transfer(DTensorSpec(flat, [before], meta), DTensorSpec(flat, [after], meta))
