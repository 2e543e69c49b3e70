"""`associative_scan` along a sharded dim: ranks scan their blocks, exchange one state for each, and go on from them.

The exchanged bytes do not depend on the length. All steps are differentiable operators on DTensors: functions may
capture DTensors, and derivatives of any order work.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.placement import AnyShard, Partial, Replicate, Shard, Zigzag
from shardwise.decompose.layout_helpers import indices_of
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import CopiedDTensor, PendingDTensor
from shardwise.torch_private import DispatchKey, higher_order_ops, tree_flatten, tree_leaves, tree_unflatten


class States(NamedTuple):
    """States along a dim: their tensors, and a mask of positions with a state (None: all positions).

    Positions without a state have arbitrary values. These are never accumulated: they could overflow, and 0 times
    infinity in a gradient is NaN.
    """

    leaves: list[Any]
    real: Any = None

    def each(self, function: Callable[[Any], Any]) -> States:
        """Apply a function to all tensors."""
        return States([function(x) for x in self.leaves], None if self.real is None else function(self.real))

    def part(self, dim: int, *bounds: int | None) -> States:
        """A slice along a dim."""
        index = (slice(None),) * dim + (slice(*bounds),)
        return self.each(lambda x: x[index])


Join = Callable[[States, States], States]


def scan(
    combine: Callable[..., Any], leaves: Sequence[Any], captured: Sequence[Any] = (), reverse: bool = False
) -> Any:
    """The inclusive scan of states along dim 0, as a list of tensors.

    Args:
        combine: an associative function of two states, each a number of tensors with a leading dim of states.
        leaves: the tensors of the states, of which some are DTensors.
        captured: the arguments of `combine` after the two states.
        reverse: begin with the last state.
    """
    given = states = _alike(leaves)
    blocks, length = _block_count(states[0]), states[0].shape[0]
    size = -(-length // blocks)
    real = None
    if size * blocks > length:
        states = [_padded(x, size * blocks) for x in states]
        real = indices_of(states[0], 0) < length
    join = functools.partial(_joined, combine, captured)
    in_blocks = States(states, real).each(lambda x: x.unflatten(0, (blocks, size)))
    join_in_blocks = functools.partial(_joined_in_blocks, join)
    found = _tree_scan(join_in_blocks, in_blocks, 1, reverse)
    if blocks > 1:
        first, last = (-1, 0) if reverse else (0, -1)
        ends = _tree_scan(join, found.each(lambda x: _gathered(x.select(1, last))), 0, reverse)
        before = _exclusive(ends, reverse).each(lambda x: _spread(x, found.leaves[0]))
        # no state precedes the first block: one of its own states there keeps the computation finite
        kept = [
            torch.where(_along_first(before.real, b), b, x.select(1, first).detach())
            for b, x in zip(before.leaves, found.leaves, strict=True)
        ]
        onward = States(kept, before.real).each(lambda x: x.unsqueeze(1).expand(blocks, size, *x.shape[1:]))
        found = join_in_blocks(onward, found)
    results = [x.flatten(0, 1)[:length] for x in found.leaves]
    return [_laid_out_like(x, like) for x, like in zip(results, given, strict=True)]


def _joined(combine: Callable[..., Any], captured: Sequence[Any], left: States, right: States) -> States:
    """Combine two lists of states, element by element; if one of two is missing, take the other."""
    made = list(tree_leaves(combine(*left.leaves, *right.leaves, *captured)))
    if left.real is None and right.real is None:
        return States(made)
    for i, (x, y) in enumerate(zip(left.leaves, right.leaves, strict=True)):
        if right.real is not None:
            made[i] = torch.where(_along_first(right.real, x), made[i], x)
        if left.real is not None:
            made[i] = torch.where(_along_first(left.real, x), made[i], y)
    return States(made, None if left.real is None or right.real is None else left.real | right.real)


def _joined_in_blocks(join: Join, left: States, right: States) -> States:
    """`join` for states with two leading dims: blocks, and states in each block."""
    sizes = left.leaves[0].shape[:2]
    flat = join(left.each(lambda x: x.flatten(0, 1)), right.each(lambda x: x.flatten(0, 1)))
    return flat.each(lambda x: x.unflatten(0, sizes))


def _tree_scan(join: Join, states: States, dim: int, reverse: bool) -> States:
    """A scan along an unsharded dim, by pairs: at most two combinations for each state, in few operators."""
    if reverse:
        return _tree_scan(join, states.each(lambda x: x.flip(dim)), dim, False).each(lambda x: x.flip(dim))
    count = states.leaves[0].shape[dim]
    if count < 2:
        return states
    odd = _tree_scan(join, join(states.part(dim, 0, count - 1, 2), states.part(dim, 1, None, 2)), dim, False)
    even = states.part(dim, 0, 1)
    if count > 2:
        rest = join(odd if count % 2 else odd.part(dim, 0, -1), states.part(dim, 2, None, 2))
        even = _by_pairs(lambda x, y: torch.cat([x, y], dim), even, rest)
    return _by_pairs(lambda x, y: _interleaved(x, y, dim), even, odd)


def _by_pairs(function: Callable[[Any, Any], Any], left: States, right: States) -> States:
    real = None if left.real is None else function(left.real, right.real)
    return States([function(x, y) for x, y in zip(left.leaves, right.leaves, strict=True)], real)


def _interleaved(even: Any, odd: Any, dim: int) -> Any:
    """States in turn from two tensors, of which the first may have one more."""
    count = odd.shape[dim]
    both = torch.stack([even.narrow(dim, 0, count), odd], dim + 1).flatten(dim, dim + 1)
    return both if even.shape[dim] == count else torch.cat([both, even.narrow(dim, count, 1)], dim)


def _exclusive(ends: States, reverse: bool) -> States:
    """The accumulated state before each block; none before the first."""
    count, places = ends.leaves[0].shape[0], indices_of(ends.leaves[0], 0)
    before = ends.each(lambda x: torch.cat([x[1:], x[-1:]] if reverse else [x[:1], x[:-1]]))
    there = places < count - 1 if reverse else places > 0
    return States(before.leaves, there if before.real is None else there & before.real)


# ---------------------------------------------------------------- layouts


def _alike(leaves: Sequence[Any]) -> list[Any]:
    """States as DTensors with the same split of dim 0, contiguous or zigzag."""
    given = [x for x in leaves if isinstance(x, DTensor)]
    like = next((x for x in given if x.spec.dim_axes[0]), given[0])
    mesh, axes = like.device_mesh, like.spec.dim_axes[0]
    wanted = {axis: like.placements[axis] if _zigzag_blocks(like, axes) else Shard(0) for axis in axes}
    found: list[Any] = []
    for x in leaves:
        each = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        placements = [wanted.get(axis, _unless_of_states(p)) for axis, p in enumerate(each.placements)]
        order: list[Any] = [e for e in each.spec.shard_order if e.dim and not wanted.keys() & set(e.axes)]
        order += [(0, axes)] if axes else []
        found.append(each.redistribute(placements=placements, shard_order=order))
    return found


def _unless_of_states(placement: Any) -> Any:
    """A placement, or `Replicate` for one that shards the dim of states or is to be reduced."""
    sharded = isinstance(placement, AnyShard) and placement.dim == 0
    return Replicate() if sharded or isinstance(placement, Partial) else placement


def _zigzag_blocks(x: DTensor, axes: Sequence[int]) -> int:
    """The number of blocks of a zigzag over one axis; 0 if dim 0 is split differently."""
    placement = x.placements[axes[0]] if len(axes) == 1 else None
    if not isinstance(placement, Zigzag) or placement.split_factor != 1:
        return 0
    return len(placement.blocks_over(x.device_mesh.shape[axes[0]]))


def _block_count(x: DTensor) -> int:
    """The number of blocks of dim 0 on all ranks."""
    axes = x.spec.dim_axes[0]
    return _zigzag_blocks(x, axes) or math.prod([x.device_mesh.shape[axis] for axis in axes])


def _padded(x: Any, length: int) -> Any:
    """`x` with its last state repeated. Blocks stay where they are."""
    count = x.shape[0]
    filled = torch.nn.functional.pad(x, (*(0,) * (2 * x.dim() - 2), 0, length - count))
    return torch.where(_along_first(indices_of(filled, 0) < count, x), filled, _gathered(x[-1:].detach()))


def _gathered(x: Any) -> Any:
    """One state for each block, on every rank."""
    return x.redistribute(placements=[_unless_of_states(p) for p in x.placements])


def _spread(x: Any, like: Any) -> Any:
    """One state for each block, on the ranks of the block."""
    axes = like.spec.dim_axes[0]
    placements = [like.placements[axis] if axis in axes else p for axis, p in enumerate(x.placements)]
    return x.redistribute(placements=placements, shard_order=[(0, axes)])


def _laid_out_like(x: Any, like: Any) -> Any:
    return x.redistribute(placements=like.placements, shard_order=like.spec.shard_order)


def _along_first(x: Any, like: Any) -> Any:
    """A tensor of the first dims of `like`, to be combined with it."""
    return x.reshape(*x.shape, *(1,) * (like.dim() - x.dim()))


# ---------------------------------------------------------------- torch's functions


def _wrap_torch(module: Any) -> None:
    """Let torch's module for this operator take DTensors.

    torch runs generic combinations by a function of the module, and others by a higher-order operator, whose gradient
    supports plain tensors only. For a reversed scan both flip their tensors; `associative_scan` itself is replaced so
    that blocks stay on their ranks. References to it from before the replacement still flip.
    """
    plain, public, op = module.generic_associative_scan, module.associative_scan, module.associative_scan_op
    with_gradients = op.py_kernels[DispatchKey.Autograd]

    @functools.wraps(plain, assigned=("__doc__",))
    def generic_associative_scan(operator: Any, leaves: Any, dim: int = 0, additional_inputs: Any = ()) -> Any:
        if dim == 0 and _any_dtensor(leaves):
            return scan(operator, leaves, additional_inputs)
        return plain(operator, leaves, dim, additional_inputs)

    @functools.wraps(public, assigned=("__doc__",))
    def associative_scan(
        combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        leaves, tree = tree_flatten(xs)
        if not reverse or combine_mode != "generic" or not _any_dtensor(leaves):
            return public(combine_fn, xs, dim, reverse, combine_mode)
        combine = functools.partial(_combined_trees, combine_fn, tree, len(leaves))
        found = scan(torch.vmap(combine), [x.movedim(dim, 0) for x in leaves], reverse=True)
        return tree_unflatten([x.movedim(0, dim) for x in found], tree)

    def run_op(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
        return tuple(scan(combine_fn, xs, additional_inputs))

    def run_op_with_gradients(combine_fn: Any, xs: Any, additional_inputs: Any) -> Any:
        kernel = run_op if _any_dtensor(xs) else with_gradients
        return kernel(combine_fn, xs, additional_inputs)

    module.generic_associative_scan, module.associative_scan = generic_associative_scan, associative_scan
    higher_order_ops.associative_scan = associative_scan
    op.py_kernels[DispatchKey.Autograd] = run_op_with_gradients
    for kind in (DTensor, PendingDTensor, CopiedDTensor):
        op.py_impl(kind)(run_op)


def _combined_trees(combine_fn: Any, tree: Any, count: int, *pair: Any) -> Any:
    """The leaves of two states that are trees, combined."""
    return tree_leaves(combine_fn(tree_unflatten(pair[:count], tree), tree_unflatten(pair[count:], tree)))


def _any_dtensor(leaves: Sequence[Any]) -> bool:
    return any(isinstance(x, DTensor) for x in leaves)


_wrap_torch(sys.modules["torch._higher_order_ops.associative_scan"])  # the package has a function of this name
