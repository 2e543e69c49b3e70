"""dispatch: tokens go to the ranks of their experts, sorted by expert, and results come back.

The same call on plain tensors does the same on one device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_dynamo_compiling, is_tracing
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.moe.capacity_slots import returned_rows, slot_weights, slotted_rows
from shardwise.moe.expert_ranks import expert_ranks
from shardwise.moe.routing_plan import RoutingPlan, plan_of
from shardwise.moe.token_maps import as_dtensor, mapped, weighted
from shardwise.moe.token_sending import sent_tokens
from shardwise.moe.weighted_return import weighted_return
from shardwise.tensor import is_dtensor, moved
from shardwise.transforms import transforming

__all__ = ["Back", "dispatch"]

INDICES = (torch.int64, torch.int32)


class Back:
    """Returns dispatched tokens to their ranks: `y = back(outputs, weights)`. Made by `dispatch`.

    Attributes:
        offs: the end of each expert's rows among all rows, int32: the offsets that `F.grouped_mm` takes. Sharded as the
            experts are.
        counts: how many choices of tokens each expert has, also those that a capacity drops.
        capacity: as given to `dispatch`.
    """

    offs: Any
    counts: Any
    _weights: Any = None  # as given to `dispatch`
    _version: int | None = None  # of their memory then

    def __init__(self, offs: Any, counts: Any, shape: tuple[int, int], rows: int, capacity: int | None = None) -> None:
        self.offs, self.counts, self.capacity = offs, counts, capacity
        self._shape, self._rows = shape, rows  # of the expert ids; how many are dispatched

    def __call__(self, outputs: Any, weights: Any = None) -> Any:
        """The sum over the choices of each token of what its experts made, times the weight of the choice.

        Args:
            outputs: a row for each row of the dispatched tokens, as they lie.
            weights: `[T, k]`, in any layout; those given to `dispatch`, or 1, if not given here. The product is rounded
                to the dtype of `outputs`.

        Returns:
            `[T, ...]` in the order of the tokens, with the rows laid out as those of `x` were exchanged. A token whose
            choices were all dropped has zeros.
        """
        if outputs.shape[:1] != (self._rows,):
            raise LayoutError(
                f"back: outputs of shape {tuple(outputs.shape)} for {self._rows} dispatched rows",
                hint="give it a row for each row of the tokens that dispatch returned",
            )
        if weights is None:
            weights = self._kept_weights()
        elif self._weights is not None:
            raise LayoutError(
                "back: weights, and dispatch was given weights too",
                hint="give them to dispatch or to back, not to both",
            )
        else:
            _check_weights("back", weights, self._shape)
        if weights is not None and weights.is_complex() and not outputs.is_complex():
            raise LayoutError(
                f"back: weights of dtype {weights.dtype} for outputs of dtype {outputs.dtype}, which the results have",
                hint="make the outputs complex, or give real weights",
            )
        return self._returned(outputs, weights)

    def _keep_weights(self, weights: Any) -> Any:
        self._weights, self._version = weights, _version(weights)
        return self

    def _kept_weights(self) -> Any:
        """The weights that `dispatch` was given. Some have been sent, so all must be as they were then."""
        if self._version is not None and self._version != _version(self._weights):
            raise LayoutError(
                "back: the weights that dispatch was given have been changed in place",
                hint="give dispatch a clone of them, or give them to back",
            )
        return self._weights

    def weights_of_rows(self, weights: Any) -> Any:
        """A number for each dispatched row of one for each choice, `[T, k]`: to scale tokens before their experts.

        Example:
            >>> tokens, back = dispatch(torch.eye(2), torch.tensor([[1], [0]]), 2)
            >>> back.weights_of_rows(torch.tensor([[3.0], [4.0]]))
            tensor([4., 3.])
        """
        raise NotImplementedError

    def _returned(self, outputs: Any, weights: Any) -> Any:
        raise NotImplementedError


class OneDeviceBack(Back):
    """On one device: the choice of each row."""

    _order: torch.Tensor

    def _returned(self, outputs: Any, weights: Any) -> Any:
        if weights is not None:
            outputs = weighted(outputs, self.weights_of_rows(weights))
        tokens, choices = self._shape
        total = outputs.new_zeros((tokens + 1, *outputs.shape[1:]))
        return total.index_add(0, self._order.div(choices, rounding_mode="floor"), outputs)[:tokens]

    def weights_of_rows(self, weights: Any) -> Any:
        flat = torch.cat([weights.reshape(-1), weights.new_zeros(1)])
        return flat.index_select(0, self._order)


class PlannedBack(Back):
    """On a mesh, with sizes that depend on values."""

    def __init__(self, plan: RoutingPlan, of_rows: Any) -> None:
        self._plan, self.capacity = plan, None
        self._shape, self._rows = plan.shape, sum(plan.per_rank)
        self._of_rows = of_rows  # the weights of its rows, if dispatch was given weights

    def _returned(self, outputs: Any, weights: Any) -> Any:
        if weights is None:
            return mapped(outputs, self._plan.tokens, transposed=True)
        if self._plan.choices == 1:
            weights = as_dtensor(weights, self._plan.ranks.mesh)
        else:
            weights = self.weights_of_rows(weights) if self._of_rows is None else self._of_rows
        return weighted_return(outputs, weights, self._plan)

    def weights_of_rows(self, weights: Any) -> Any:
        return mapped(as_dtensor(weights, self._plan.ranks.mesh), self._plan.slots)

    @property
    def offs(self) -> Any:
        return self._plan.offs

    @property
    def counts(self) -> Any:
        return self._plan.counts


class SlotsBack(Back):
    """On a mesh, with a capacity: the choice in each slot of each rank."""

    _slots: Any
    _axis: int

    def _returned(self, outputs: Any, weights: Any) -> Any:
        return returned_rows(outputs, self._slots, weights, self.offs.shape[0], self._axis, self._shape)

    def weights_of_rows(self, weights: Any) -> Any:
        return slot_weights(weights, self._slots, self.offs.shape[0], self._axis)


def dispatch(
    x: Any,
    expert_ids: Any,
    num_experts: int,
    *,
    weights: Any = None,
    axis: str | int | None = None,
    capacity: int | None = None,
    groups: int | None = None,
) -> tuple[Any, Back]:
    """Send tokens to the ranks of their experts. A token that goes to one rank for several experts goes once.

    Experts are sharded over one mesh axis in the manner of `torch.chunk`, as a stacked parameter `[E, ...]` with
    `Shard(0)` is. Rows are sorted by expert, those of an expert in the order of the tokens, then of the choices: as on
    one device, bit for bit. The host waits once, for the number of rows of each expert.

    Args:
        x: tokens `[T, ...]` in any layout, or a plain tensor: then all happens on one device.
        expert_ids: `[T, k]` integers, the experts that each token goes to.
        num_experts: how many experts there are.
        weights: `[T, k]`, the weights of the choices, in any layout. `back(outputs)` then multiplies by them. They go
            with the tokens, and their gradients come back with those of the tokens, so they cost no exchange of their
            own, as they do when they are given to `back`.
        axis: the mesh axis of the experts; by default the only one, or the one named "ep". If other axes shard `T` too,
            the rows of each rank's experts are divided among the ranks along these.
        capacity: the most rows that an expert gets from one rank; later ones are dropped. All sizes are then fixed, an
            expert has `groups * capacity` rows, of which unused ones are zero, and the host waits for nothing.
        groups: into how many equal parts `T` is cut for the capacity. The number of ranks that share `T`, and on one
            device 1, or the number of ranks to compare with.

    Returns:
        `tokens`, `[T * k, ...]`, each rank with the rows of its experts (`Ragged`), and `back`, which takes what the
        experts make of them: `y = back(outputs)`, or `back(outputs, weights)`. `back.offs` are the offsets for
        `F.grouped_mm`.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        >>> x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [sw.Shard(0)])
        >>> ids = sw.distribute_tensor(torch.tensor([[3], [0], [3], [2]]), mesh, [sw.Shard(0)])
        >>> tokens, back = sw.moe.dispatch(x, ids, 4)
        >>> tokens.spec, back.offs.full_tensor().tolist()
        (f32[4,2] ep:S0(1,3), [1, 1, 2, 4])
        >>> torch.equal(back(tokens * 2).full_tensor(), x.full_tensor() * 2)
        True
    """
    ids = _checked_ids(x, expert_ids)
    _check_sizes(num_experts, capacity, groups)
    if weights is not None:
        _check_weights("dispatch", weights, tuple(ids.shape))
    if is_dtensor(x):
        return _on_mesh(x, ids, weights, num_experts, axis, capacity, groups)
    for name, tensor in (("expert_ids", ids), ("weights", weights)):
        if is_dtensor(tensor):
            raise LayoutError(
                f"dispatch: x is a plain tensor, and {name} is a DTensor",
                hint="distribute_tensor(x, mesh, placements), or from_local of each rank's part",
            )
    return _on_one_device(x, ids, weights, num_experts, capacity, groups or 1)


def _on_mesh(
    x: Any, ids: Any, weights: Any, experts: int, axis: str | int | None, capacity: int | None, groups: int | None
) -> tuple[Any, Back]:
    if transforming():
        raise UnsupportedError(
            "dispatch in a function of torch.func: it has no rule for transformed tensors",
            hint="take derivatives by torch.autograd, also of higher order",
        )
    mesh = x.device_mesh
    if fabric_of(mesh).is_outside(mesh):
        raise MeshError(f"dispatch on a rank that is not in {mesh}", hint="call it on the ranks of the mesh alone")
    over, of_experts = _axes(x._spec, axis)
    members = math.prod([mesh.shape[each] for each in over])
    if groups not in (None, members):
        raise LayoutError(
            f"dispatch: groups={groups}, and {members} ranks share the tokens", hint="leave it out on a mesh"
        )
    ids = as_dtensor(ids, mesh)
    weights = None if weights is None else as_dtensor(weights, mesh)
    if capacity is None:
        return _with_sizes(x, ids, weights, experts, over, of_experts)
    return _with_capacity(x, ids, weights, experts, over, of_experts, members, capacity)


def _with_sizes(x: Any, ids: Any, weights: Any, experts: int, over: tuple[int, ...], axis: int) -> tuple[Any, Back]:
    """On a mesh, with as many rows for each expert as it was chosen."""
    if is_tracing() or is_dynamo_compiling():
        raise UnsupportedError(
            "dispatch in a graph: how many rows go where depends on values",
            hint="give it a capacity, which fixes all sizes, or leave the mixture of experts outside of torch.compile, "
            "as by torch.compiler.disable",
        )
    ranks = expert_ranks(x._spec.mesh, over, axis, experts)
    plan = plan_of(ranks, moved(ids, ranks.source(ids._spec, tuple(ids.shape[1:]))))
    rows, of_rows = sent_tokens(x, weights, plan)
    return rows, PlannedBack(plan, of_rows)._keep_weights(weights)


def _with_capacity(
    x: Any, ids: Any, weights: Any, experts: int, over: tuple[int, ...], axis: int, members: int, capacity: int
) -> tuple[Any, Back]:
    """On a mesh, with `capacity` slots on each of `members` ranks for each expert."""
    rows, slots, offs, counts = slotted_rows(x, ids, experts, over, axis, capacity)
    back = SlotsBack(offs, counts, (ids.shape[0], ids.shape[1]), experts * members * capacity, capacity)
    back._slots, back._axis = slots, axis
    return rows, back._keep_weights(weights)


def _checked_ids(x: Any, ids: Any) -> Any:
    """The ids as numbers that can index."""
    if ids.dtype is torch.bool:
        raise LayoutError(
            f"dispatch: expert_ids of shape {tuple(ids.shape)} are a mask",
            hint="give it the number of each expert, as topk(k).indices does, [T, k]",
        )
    integers = not (ids.is_floating_point() or ids.is_complex())
    if ids.dim() != 2 or x.dim() < 1 or ids.shape[0] != x.shape[0] or not integers or ids.shape[1] < 1:
        raise LayoutError(
            f"dispatch: expert_ids of shape {tuple(ids.shape)} and dtype {ids.dtype} for x of shape {tuple(x.shape)}",
            hint="x is [T, ...] and expert_ids [T, k] of integers; with one expert for each token, unsqueeze(1)",
        )
    return ids if ids.dtype in INDICES else ids.long()  # bytes would be masks where they index


def _check_sizes(experts: int, capacity: int | None, groups: int | None) -> None:
    if experts < 1 or (capacity is not None and capacity < 1) or (groups is not None and groups < 1):
        raise LayoutError(
            f"dispatch: num_experts={experts}, capacity={capacity}, groups={groups}", hint="each is at least 1"
        )


def _version(tensor: Any) -> int | None:
    """A number that changes with each write in place; None where there is none."""
    if tensor is None or is_dynamo_compiling() or is_tracing() or tensor.is_inference():
        return None
    return tensor._version


def _check_weights(where: str, weights: Any, shape: tuple[int, int]) -> None:
    if tuple(weights.shape) != shape:
        raise LayoutError(
            f"{where}: weights of shape {tuple(weights.shape)} for expert_ids of shape {shape}",
            hint="one weight for each choice of each token",
        )


def _axes(spec: DTensorSpec, axis: str | int | None) -> tuple[tuple[int, ...], int]:
    """The axes that split the tokens, in their order, and the one of the experts."""
    mesh = spec.mesh
    if axis is None and mesh.ndim > 1 and "ep" not in (mesh.mesh_dim_names or ()):
        raise MeshError(f"dispatch: which axis of {mesh} are the experts sharded over?", hint='as in axis="ep"')
    of_experts = 0 if axis is None and mesh.ndim == 1 else mesh.axis("ep" if axis is None else axis)
    over = tuple([a for a in spec.dim_axes[0] if mesh.shape[a] > 1 or a == of_experts])
    return over if of_experts in over else (*over, of_experts), of_experts


def _on_one_device(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, experts: int, capacity: int | None, groups: int
) -> tuple[torch.Tensor, Back]:
    tokens, choices = ids.shape
    flat = ids.reshape(-1)
    wrong = (flat < 0) | (flat >= experts)
    if not flat.is_meta and bool(wrong.any()):
        raise IndexError(f"{int(wrong.sum())} entries of expert_ids are no experts: these are 0 to {experts - 1}")
    expert, rows = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(expert, torch.arange(experts + 1, device=flat.device, dtype=expert.dtype))
    counts, ends = bounds.diff(), bounds[1:]
    if capacity is not None:
        rows = _first_rows(rows, expert, experts, capacity, groups, choices, tokens)
        ends = torch.arange(1, experts + 1, device=flat.device) * (groups * capacity)
    back = OneDeviceBack(ends.to(torch.int32), counts, (tokens, choices), len(rows), capacity)
    back._order = rows
    padded = x if capacity is None else torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
    return padded.index_select(0, rows.div(choices, rounding_mode="floor")), back._keep_weights(weights)


def _first_rows(
    rows: torch.Tensor, expert: torch.Tensor, experts: int, capacity: int, groups: int, choices: int, tokens: int
) -> torch.Tensor:
    """For each expert and group the first `capacity` of the sorted rows; the number of all rows marks an empty slot."""
    size = experts * groups * capacity
    part = rows.div(choices * max(1, -(-tokens // groups)), rounding_mode="floor")
    block = expert * groups + part  # ascending
    turn = torch.arange(len(rows), device=rows.device) - torch.searchsorted(block, block)
    slot = torch.where(turn < capacity, block * capacity + turn, size)
    return torch.full((size + 1,), len(rows), device=rows.device).scatter_(0, slot, rows)[:size]
