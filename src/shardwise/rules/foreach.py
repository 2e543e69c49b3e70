"""Operators on lists of tensors: one call on the lists of locals if, index by index, the layouts are equal.

Otherwise they are decomposed (`decompose/tensor_lists.py`). Linear in the number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.placement import Partial, Replicate, norm_of
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.registry import Call, layout_rule

aten = torch.ops.aten
Layouts = tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]]

UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
    "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
MORE = (
    "add", "sub", "mul", "div", "clamp_max", "clamp_min", "maximum", "minimum", "pow", "lerp", "addcmul", "addcdiv",
    "clone", "copy", "zero",
)  # fmt: skip
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")

# operators that accept a Partial, the same in all lists: of any kind, or of sums
ANY_PARTIAL = {"clone", "zero", "copy"}
SUMS = {
    "neg.default", "add.List", "sub.List", "lerp.Scalar", "lerp.ScalarList", "mul.Scalar", "mul.ScalarList",
    "mul.Tensor", "div.Scalar", "div.ScalarList", "div.Tensor",
}  # fmt: skip


class Column(NamedTuple):
    """One tensor list of a call: where its tensors begin among the operands."""

    name: str
    start: int
    length: int


def columns_of(call: Call) -> tuple[list[Column], list[int]]:
    """The tensor lists of a call, and the positions of single tensors."""
    lists: list[Column] = []
    singles: list[int] = []
    at = 0
    for argument in call.op._schema.arguments:
        value = call.get(argument.name)
        if isinstance(value, TensorMeta):
            singles.append(at)
            at += 1
        elif isinstance(value, tuple | list) and value and all(isinstance(item, TensorMeta) for item in value):
            lists.append(Column(argument.name, at, len(value)))
            at += len(value)
    return lists, singles


def names_of(op: Any) -> tuple[str, str]:
    """The operator without `_foreach_` and without the mark of an in-place one; with and without its overload."""
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    return name, f"{name}.{op._overloadname}"


def passes(op: Any, spec: DTensorSpec) -> bool:
    """Whether an operator accepts a tensor with this Partial."""
    if not spec.partial_axes:
        return True
    name, full = names_of(op)
    kinds = [spec.placements[a] for a in spec.partial_axes]
    return name in ANY_PARTIAL or (full in SUMS and all(isinstance(k, Partial) and k.linear for k in kinds))


def one_by_one(call: Call, specs: Sequence[DTensorSpec]) -> Layouts | None:
    """The current layouts, if all lists agree for each index; else those of the tensors that are written to.

    None if neither is possible.
    """
    lists, singles = columns_of(call)
    if any(not specs[at].is_replicated for at in singles) or not lists:
        return None
    first, wanted = lists[0], list(specs)
    for i in range(first.length):
        places = [column.start + i for column in lists if column.length == first.length]
        alike = [specs[at] for at in places]
        if not _agree(call, alike):
            moved = _moved_to_first(alike) if call.op._schema.is_mutable else None
            if moved is None:
                return None
            for at, spec in zip(places, moved, strict=True):
                wanted[at] = spec
    results = tuple(specs[first.start + i].with_meta(meta) for i, meta in enumerate(call.results[: first.length]))
    if any(result.ndim != specs[first.start + i].ndim for i, result in enumerate(results)):
        return None
    return tuple(wanted), results


def _moved_to_first(specs: Sequence[DTensorSpec]) -> list[DTensorSpec] | None:
    """The tensors of one index in the layout of the first; None if their sizes differ, or it is Partial."""
    main = specs[0]
    if main.partial_axes or any(spec.shape != main.shape for spec in specs):
        return None
    return [main.with_meta(spec.tensor_meta) for spec in specs]


def _agree(call: Call, specs: Sequence[DTensorSpec]) -> bool:
    """Whether the tensors of one index have one layout; if sizes differ, all must be replicated."""
    main = specs[0]
    if not passes(call.op, main) or (main.partial_axes and not _one_dtype(call, specs)):
        return False
    for spec in specs[1:]:
        if spec.shape == main.shape:
            if spec.placements != main.placements or spec.dim_axes != main.dim_axes:
                return False
        elif not spec.is_replicated or (spec.ndim and not main.is_replicated) or main.partial_axes:
            return False
    return True


def _one_dtype(call: Call, specs: Sequence[DTensorSpec]) -> bool:
    dtypes = {spec.tensor_meta.dtype for spec in specs} | {meta.dtype for meta in call.results}
    return len(dtypes) == 1


def without_out(packet_name: str) -> list[Any]:
    """The overloads of an operator without an `out` argument; empty if torch lacks the operator."""
    packet = getattr(aten, packet_name, None)
    found = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return [op for op in found if not any(a.is_out for a in op._schema.arguments)]


# Operators on each tensor, functional and in place.
ONE_BY_ONE = [op for name in (*UNARY, *MORE) for form in (name, f"{name}_") for op in without_out(f"_foreach_{form}")]
OPTIMIZERS = [op for name in FUSED for op in without_out(name)]
layout_rule(*ONE_BY_ONE)(one_by_one)


# ---------------------------------------------------------------- one number for each tensor


def norms_of_parts(call: Call, specs: Sequence[DTensorSpec]) -> Layouts | None:
    """Each rank takes the norms of its locals: Partial, to be reduced in one collective."""
    order = float(call["ord"])
    if not (0 < order < math.inf) or any(spec.partial_axes for spec in specs):
        return None
    norm, kept = Partial(norm_of(order)), Replicate()
    return tuple(specs), tuple(
        DTensorSpec.from_dim_axes(
            spec.mesh, tuple(kept if isinstance(p, Replicate) else norm for p in spec.placements), meta, ()
        )
        for spec, meta in zip(specs, call.results, strict=True)
    )


layout_rule(aten._foreach_norm.Scalar, reads=("ord",))(norms_of_parts)


# ---------------------------------------------------------------- fused optimizers


def unless_meta(op: Any) -> Callable[..., None]:
    """A fused optimizer on locals; meta tensors are skipped."""

    def run_unless_meta(*args: Any, **kwargs: Any) -> None:
        parameters = args[0] if args else kwargs["self"]
        if parameters and parameters[0].device.type != "meta":
            op(*args, **kwargs)

    return run_unless_meta


for fused in OPTIMIZERS:
    layout_rule(fused, local_op=unless_meta(fused))(one_by_one)
