"""Operators on lists of tensors: one call on the lists of locals where the lists lie alike, index by index.

Otherwise the operator of one tensor is run on each, and finds the cheapest way itself. Linear in the number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.placement import Partial, Replicate, norm_of
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.registry import Call, decomposition, layout_rule

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
VALUES = ("value", "scalars")  # what the addc operators take by position here and by name there
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")

# where a Partial passes: of every kind, or of sums; in all lists alike
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
    """The tensor lists of a call, and the places of single tensors."""
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
    """Whether an operator takes a tensor that is Partial so."""
    if not spec.partial_axes:
        return True
    name, full = names_of(op)
    kinds = [spec.placements[a] for a in spec.partial_axes]
    return name in ANY_PARTIAL or (full in SUMS and all(isinstance(k, Partial) and k.linear for k in kinds))


def one_by_one(call: Call, specs: Sequence[DTensorSpec]) -> Layouts | None:
    """The layouts as they are, where all lists agree for each index. What is written to is what others are brought to.

    None where neither holds.
    """
    lists, singles = columns_of(call)
    if any(not specs[at].is_replicated for at in singles) or not lists:
        return None
    first, wanted = lists[0], list(specs)
    for i in range(first.length):
        places = [column.start + i for column in lists if column.length == first.length]
        alike = [specs[at] for at in places]
        if not _agree(call, alike):
            brought = _brought_to_first(alike) if call.op._schema.is_mutable else None
            if brought is None:
                return None
            for at, spec in zip(places, brought, strict=True):
                wanted[at] = spec
    results = tuple(specs[first.start + i].with_meta(meta) for i, meta in enumerate(call.results[: first.length]))
    if any(result.ndim != specs[first.start + i].ndim for i, result in enumerate(results)):
        return None
    return tuple(wanted), results


def _brought_to_first(specs: Sequence[DTensorSpec]) -> list[DTensorSpec] | None:
    """The tensors of one index as the first of them lies; None where they are of other sizes, or it is Partial."""
    main = specs[0]
    if main.partial_axes or any(spec.shape != main.shape for spec in specs):
        return None
    return [main.with_meta(spec.tensor_meta) for spec in specs]


def _agree(call: Call, specs: Sequence[DTensorSpec]) -> bool:
    """Whether the tensors of one index lie alike; those of another size must be replicated, and what they meet too."""
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


# ---------------------------------------------------------------- one tensor after the other


def single_of(name: str, in_place: bool) -> Callable[..., Any]:
    """The operator of one tensor that a foreach operator stands for."""
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


def declare(name: str) -> None:
    """Enter the rule and the loop of a foreach operator, functional and in place, in all its overloads."""
    for form in (f"_foreach_{name}", f"_foreach_{name}_"):
        packet = getattr(aten, form, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not any(a.is_out for a in op._schema.arguments):
                layout_rule(op)(one_by_one)
                decomposition(op)(in_turn(op))


for each in (*UNARY, *MORE):
    declare(each)


# ---------------------------------------------------------------- one number for each tensor


def norms_of_parts(call: Call, specs: Sequence[DTensorSpec]) -> Layouts | None:
    """Each rank takes the norms of its parts, which wait for one reduction together."""
    order = float(call["ord"])
    if not (0 < order < math.inf) or any(spec.partial_axes for spec in specs):
        return None
    norm, whole = Partial(norm_of(order)), Replicate()
    return tuple(specs), tuple(
        DTensorSpec.from_dim_axes(
            spec.mesh, tuple(whole if isinstance(p, Replicate) else norm for p in spec.placements), meta, ()
        )
        for spec, meta in zip(specs, call.results, strict=True)
    )


layout_rule(aten._foreach_norm.Scalar, reads=("ord",))(norms_of_parts)


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


# ---------------------------------------------------------------- fused optimizers


def unless_meta(op: Any) -> Callable[..., None]:
    """A fused optimizer on locals; those without values are left as they are."""

    def run_unless_meta(*args: Any, **kwargs: Any) -> None:
        parameters = args[0] if args else kwargs["self"]
        if parameters and parameters[0].device.type != "meta":
            op(*args, **kwargs)

    return run_unless_meta


def _locals(value: Any) -> Any:
    """DTensors replaced by what this rank holds of them."""
    if isinstance(value, list | tuple):
        return [_locals(item) for item in value]
    return value.to_local() if hasattr(value, "to_local") else value


def aligned(op: Any) -> Callable[..., None]:
    """A fused optimizer on lists that do not lie alike: all of a parameter is brought to where that lies."""
    names = [a.name for a in op._schema.arguments]

    def run_aligned(*args: Any, **kwargs: Any) -> None:
        bound = dict(zip(names, args, strict=False)) | kwargs
        parameters = bound["self"]
        back: list[tuple[Any, Any]] = []

        def brought(name: str, tensor: Any, parameter: Any) -> Any:
            moved = tensor if tensor.shape != parameter.shape else _laid_out_as(tensor, parameter)
            if moved is tensor:
                return tensor
            if name != "grads" or bound.get("grad_scale") is not None:
                back.append((tensor, moved))
            return moved

        for name, value in list(bound.items()):
            if isinstance(value, list | tuple) and value and name != "state_steps":
                bound[name] = [brought(name, t, p) for t, p in zip(value, parameters, strict=True)]
        unless_meta(op)(**{name: _locals(value) for name, value in bound.items()})
        for tensor, moved in back:
            tensor.copy_(moved)

    return run_aligned


def _laid_out_as(tensor: Any, parameter: Any) -> Any:
    """A gradient or state in the layout of its parameter; of plain ones every rank has the whole."""
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


for fused in FUSED:
    for overload in getattr(aten, fused).overloads():
        chosen = getattr(getattr(aten, fused), overload)
        if not any(a.is_out for a in chosen._schema.arguments):
            layout_rule(chosen, local_op=unless_meta(chosen))(one_by_one)
            decomposition(chosen)(aligned(chosen))


@decomposition(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale(gradients: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Gradients multiplied, and one number that says for all ranks whether any of them is not finite."""
    bad = torch.stack([aten.sum.default((~gradient.isfinite()).to(torch.int64)) for gradient in gradients]).sum()
    flag: Any = (bad > 0).to(found_inf.dtype)
    value = flag if hasattr(found_inf, "full_tensor") else flag.full_tensor()
    found_inf.copy_(torch.maximum(found_inf, value.reshape(found_inf.shape)))
    for gradient in gradients:
        gradient.mul_(inv_scale)
