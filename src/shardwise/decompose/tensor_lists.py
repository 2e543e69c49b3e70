"""Operators on lists of tensors in different layouts: tensor by tensor; fused optimizers after a redistribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.placement import Partial, Replicate
from shardwise.rules.foreach import (
    ONE_BY_ONE,
    OPTIMIZERS,
    names_of,
    unless_meta,
)
from shardwise.rules.registry import decomposition

aten = torch.ops.aten


# ---------------------------------------------------------------- tensor by tensor


def single_of(name: str, in_place: bool) -> Callable[..., Any]:
    """The operator on one tensor that corresponds to a foreach operator."""
    extremum = {"maximum": (aten.maximum, aten.clamp_min), "minimum": (aten.minimum, aten.clamp_max)}.get(name)
    if extremum is None:
        return getattr(aten, f"{name}_" if in_place else name)
    of_tensor, of_number = extremum

    def run_single(tensor: Any, other: Any) -> Any:
        result = (of_tensor if isinstance(other, torch.Tensor) else of_number)(tensor, other)
        return aten.copy_.default(tensor, result) if in_place else result

    return run_single


def in_turn(op: Any) -> Callable[..., Any]:
    """A foreach operator as a loop over the tensors."""
    arguments = op._schema.arguments
    name, _ = names_of(op)
    in_place = op._schema.is_mutable
    single = single_of(name, in_place)
    by_keyword = {a.name for a in arguments if a.kwarg_only} | (
        {"value", "scalars"} if name.startswith("addc") else set()
    )

    def run_in_turn(*args: Any, **kwargs: Any) -> list[Any] | None:
        bound = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        if name.startswith("addc") and isinstance(bound.get("scalars"), torch.Tensor):
            bound["scalars"] = bound["scalars"].tolist()
        count = next(len(value) for value in bound.values() if isinstance(value, list | tuple))
        results = []
        for i in range(count):
            chosen = {n: v[i] if isinstance(v, list | tuple) else v for n, v in bound.items()}
            keywords = {"value" if n == "scalars" else n: chosen.pop(n) for n in list(chosen) if n in by_keyword}
            results.append(single(*chosen.values(), **keywords))
        return None if in_place else results

    return run_in_turn


for each in ONE_BY_ONE:
    decomposition(each)(in_turn(each))


@decomposition(aten._foreach_norm.Scalar)
def norms(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:  # noqa: A002
    """The norm of each tensor."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


@decomposition(aten._foreach_max.default)
def maxima(tensors: Sequence[Any]) -> list[Any]:
    """The largest element of each tensor."""
    return [aten.max.default(tensor) for tensor in tensors]


if hasattr(aten, "_foreach_mm"):

    @decomposition(aten._foreach_mm.default)
    def products(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        """The product of each pair of matrices."""
        return [aten.mm.default(a, b) for a, b in zip(first, second, strict=True)]


def _locals(value: Any) -> Any:
    """DTensors replaced by their locals."""
    if isinstance(value, list | tuple):
        return [_locals(item) for item in value]
    return value.to_local() if hasattr(value, "to_local") else value


def aligned(op: Any) -> Callable[..., None]:
    """A fused optimizer on lists in different layouts: gradients and states get the layouts of their parameters."""
    names = [a.name for a in op._schema.arguments]

    def run_aligned(*args: Any, **kwargs: Any) -> None:
        bound = dict(zip(names, args, strict=False)) | kwargs
        parameters = bound["self"]
        back: list[tuple[Any, Any]] = []

        def aligned(name: str, tensor: Any, parameter: Any) -> Any:
            moved = tensor if tensor.shape != parameter.shape else _laid_out_as(tensor, parameter)
            if moved is tensor:
                return tensor
            if name != "grads" or bound.get("grad_scale") is not None:
                back.append((tensor, moved))
            return moved

        for name, value in list(bound.items()):
            if isinstance(value, list | tuple) and value and name != "state_steps":
                bound[name] = [aligned(name, t, p) for t, p in zip(value, parameters, strict=True)]
        unless_meta(op)(**{name: _locals(value) for name, value in bound.items()})
        for tensor, moved in back:
            tensor.copy_(moved)

    return run_aligned


def _laid_out_as(tensor: Any, parameter: Any) -> Any:
    """A gradient or state in the layout of its parameter; plain ones are replicated."""
    if not hasattr(parameter, "placements"):
        return tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    if not hasattr(tensor, "placements"):
        return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    placements, order = [_unsummed(p) for p in parameter.placements], parameter.spec.shard_order
    if list(tensor.placements) == placements and tensor.spec.shard_order == order:
        return tensor
    return tensor.redistribute(parameter.device_mesh, placements, shard_order=order)


def _unsummed(placement: Any) -> Any:
    return Replicate() if isinstance(placement, Partial) else placement


for fused in OPTIMIZERS:
    decomposition(fused)(aligned(fused))


@decomposition(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale(gradients: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Unscale gradients, and set `found_inf` on all ranks if an element of any of them is not finite."""
    bad = torch.stack([aten.sum.default((~gradient.isfinite()).to(torch.int64)) for gradient in gradients]).sum()
    flag: Any = (bad > 0).to(found_inf.dtype)
    value = flag if hasattr(found_inf, "full_tensor") else flag.full_tensor()
    found_inf.copy_(torch.maximum(found_inf, value.reshape(found_inf.shape)))
    for gradient in gradients:
        gradient.mul_(inv_scale)
