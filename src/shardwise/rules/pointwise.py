"""Pointwise operators: every dim is a factor. Tables list the operators that keep a Partial.

An operator that only torch's tag marks as pointwise keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.core.placement import MaskPartial, Partial, Replicate
from shardwise.core.spec import TensorMeta
from shardwise.rules.dims import aligned, along
from shardwise.rules.engine import BOTH, EACH_ALONE, FIRST, Dim, Factors, Row
from shardwise.rules.registry import (
    Call,
    Rule,
    declare_rule,
    default_pointwise,
    is_zero,
    overloads,
    rule,
)

aten = torch.ops.aten
prims = torch.ops.prims  # used by forward mode for zero tangents
Groups = tuple[tuple[int, ...], ...]


def broadcast(call: Call) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """The factors of operands that broadcast to the results: numbered from the last dim."""
    shape = call.results[0].shape if call.results else call.operands[0].shape
    names: tuple[Dim, ...] = tuple([f"d{d}" for d in range(len(shape), 0, -1)])
    operands, results = (
        tuple([names if m.shape == shape else _broadcasting(m.shape, names, shape) for m in metas])
        for metas in (call.operands, call.results)
    )
    return operands, results


def _broadcasting(own: Sequence[int], names: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    return aligned(own, names, shape) if len(own) <= len(shape) else (None,) * len(own)


def pointwise(**facts: Any) -> Rule:
    """The rule of a pointwise operator with these fields of `Factors` about Partial values."""
    return Rule(lambda call: Factors(*broadcast(call), **facts))


default_pointwise.append(pointwise())


# ---------------------------------------------------------------- casts that keep a Partial


def keeps_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether the addends of a sum may be cast before they are added: nothing is rounded, nothing wraps."""
    if before is after:
        return True
    if torch.bool in (before, after) or after.is_complex < before.is_complex:
        return False
    inexact_before = before.is_floating_point or before.is_complex
    inexact_after = after.is_floating_point or after.is_complex
    return inexact_before is inexact_after and _widens(before, after)


def only_rounds(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast rounds and cannot overflow: both dtypes have the same exponents.

    The addends of a sum may then be cast before they are added. Each is rounded once, like the addends of a bfloat16
    matrix product. So gradients of float32 arithmetic on bfloat16 weights stay Partial until they are reduced in one
    collective.
    """
    return before is torch.float32 and after is torch.bfloat16


def keeps_order(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast is monotone: into a dtype with at least the range."""
    return _widens(before, after) and not after.is_complex


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    try:
        return torch.promote_types(before, after) is after
    except RuntimeError:  # eight-bit floats have no promotion
        return False


def sums_exactly(call: Call, group: Iterable[int]) -> bool:
    """Whether every operand of a linear group is cast to the result's dtype by a cast that keeps sums."""
    dtype = call.results[0].dtype if call.results else call.operands[0].dtype
    return all(keeps_sums(call.operands[i].dtype, dtype) for i in group if i < len(call.operands))


# ---------------------------------------------------------------- rows for several modules
EXTREMA = (Partial("min"), Partial("max"))  # reduce equal values to that value
SUMS = (Partial("sum"), MaskPartial(), Partial("avg"))  # commute, so different axes of one tensor may have them
KINDS = (*SUMS, *EXTREMA, Partial("product"))


def alike(operands: int, which: Iterable[int], results: int = 1, kinds: Sequence[Partial] = KINDS) -> tuple[Row, ...]:
    """Rows in which the operands `which` are Partial of one kind, and the results too; the others are replicated."""
    chosen = frozenset(which)
    return tuple(
        Row(tuple(kind if i in chosen else Replicate() for i in range(operands)), (kind,) * results) for kind in kinds
    )


# ---------------------------------------------------------------- the table


def linear_rule(groups: Groups, keeps_zero: bool = False, monotone: int = 0) -> Rule:
    """The rule of an operator that is linear in some groups of operands.

    Args:
        groups: the operands that may be Partial together.
        keeps_zero: as in `Factors`.
        monotone: as in `Factors`, for floating-point operands (negation of integers may wrap).
    """

    def factors(call: Call) -> Factors:
        given = call.arguments.get("self", call.operands[0])
        fit = tuple(g for g in groups if isinstance(given, TensorMeta) and sums_exactly(call, g))
        floating = all(m.dtype.is_floating_point for m in (*call.operands, *call.results))
        return Factors(*broadcast(call), linear=fit, keeps_zero=keeps_zero, monotone=monotone if floating else 0)

    return Rule(factors)


def with_inplace(*ops: Any) -> list[Any]:
    """The operators and those of their in-place forms that torch has: `add.Tensor` and `add_.Tensor`."""
    found = []
    for op in overloads(ops):
        found.append(op)
        packet = getattr(aten, op._schema.name.removeprefix("aten::") + "_", None)
        inplace = getattr(packet, op._overloadname, None) if packet is not None else None
        if inplace is not None:
            found.append(inplace)
    return found


# zero maps to zero, elementwise: a MaskPartial passes; otherwise not linear
ZERO_KEEPING = (
    aten.abs, aten.sqrt, aten.sin, aten.tan, aten.asin, aten.atan, aten.sinh, aten.asinh, aten.tanh, aten.atanh,
    aten.erf, aten.expm1, aten.log1p, aten.sign, aten.sgn, aten.floor, aten.ceil, aten.round.default, aten.trunc,
    aten.frac, aten.square, aten.relu, aten.relu6, aten.leaky_relu, aten.elu, aten.celu, aten.selu, aten.silu,
    aten.gelu, aten.mish, aten.hardswish, aten.erfinv, aten.nan_to_num,
)  # fmt: skip

# monotone and defined everywhere: min and max may be taken before or after. Functions with NaN on part of the line
# (sqrt, log, asin, ...) are excluded: a rank's value may be outside of the domain while the maximum is inside
RISING = (
    aten.exp, aten.exp2, aten.expm1, aten.tanh, aten.sigmoid, aten.atan, aten.sinh, aten.asinh, aten.erf, aten.relu,
    aten.relu6, aten.hardsigmoid, aten.hardtanh, aten.selu, aten.floor, aten.ceil, aten.trunc, aten.round.default,
    aten.sign, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
)  # fmt: skip
FALLING = (aten.erfc, aten.bitwise_not)

LINEAR: dict[Rule, Sequence[Any]] = {
    # in the operands together, so that both must be Partial
    linear_rule(BOTH): (
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.lerp, aten.complex, prims.add, prims.sub,
    ),
    # in each operand alone
    linear_rule(EACH_ALONE, keeps_zero=True): (aten.mul.Tensor, prims.mul),
    # in the first
    linear_rule(FIRST, keeps_zero=True): (
        aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.conj_physical,
        aten._conj_physical, aten._conj, aten._neg_view, prims.div,
    ),
    linear_rule(FIRST, keeps_zero=True, monotone=1): (aten.positive, aten.deg2rad, aten.rad2deg),
    linear_rule(FIRST, keeps_zero=True, monotone=-1): (aten.neg,),
    # self + value * a * b
    linear_rule(((0, 1), (0, 2))): (aten.addcmul,),
    linear_rule(((0, 1),)): (aten.addcdiv,),
    # the gradient that comes in is multiplied by something that does not depend on it
    linear_rule(FIRST, keeps_zero=True): tuple(
        getattr(aten, f"{name}_backward").default
        for name in (
            "tanh", "sigmoid", "gelu", "silu", "threshold", "logit", "native_dropout", "leaky_relu", "hardtanh",
            "hardswish", "hardsigmoid", "softplus", "softshrink", "hardshrink", "mish", "elu", "rrelu_with_noise",
        )
    ),
}  # fmt: skip

# pointwise operators that are in no list above and that torch does not tag, or only in their functional form
UNTAGGED = (
    aten.copysign_, aten.eq_, aten.ne_, aten.ge_, aten.gt_, aten.le_, aten.lt_, aten.gcd_, aten.lcm_,
    aten.heaviside_, aten.threshold_, aten.xlogy_, aten.floor_divide, aten.floor_divide_, aten.polar,
    aten._prelu_kernel, prims.convert_element_type,
)  # fmt: skip


def is_out(op: Any) -> bool:
    """Whether an overload writes to an `out=` argument. Its rule is that of the functional operator."""
    return any(a.is_out for a in op._schema.arguments)


def declare(made: Rule, ops: Iterable[Any]) -> None:
    """Register a rule for operators and their in-place forms."""
    declare_rule(made, *(op for op in with_inplace(*ops) if not is_out(op)))


def unary_facts() -> dict[Any, dict[str, Any]]:
    """For each unary operator its entries in the lists above."""
    facts: dict[Any, dict[str, Any]] = {}
    for ops, entry in ((ZERO_KEEPING, {"keeps_zero": True}), (RISING, {"monotone": 1}), (FALLING, {"monotone": -1})):
        for op in with_inplace(*ops):
            if not is_out(op):
                facts.setdefault(op, {}).update(entry)
    return facts


def unary_rule(keeps_zero: bool = False, monotone: int = 0) -> Rule:
    """The rule of an operator with one operand; order has no meaning for complex numbers."""

    def factors(call: Call) -> Factors:
        ordered = not call.operands[0].dtype.is_complex and len(call.operands) == 1
        return Factors(*broadcast(call), keeps_zero=keeps_zero, monotone=monotone if ordered else 0)

    return Rule(factors)


declare_rule(pointwise(), *(op for op in overloads(UNTAGGED) if not is_out(op)))
for made, listed in LINEAR.items():
    declare(made, listed)
for unary, entries in unary_facts().items():
    declare_rule(unary_rule(**entries), unary)


# ---------------------------------------------------------------- operators whose rule depends on arguments


def either(call: Call, chosen: Sequence[int], **more: Any) -> Factors:
    """An operator that picks each element from one of the operands `chosen`: all may have the same Partial.

    With several operands only sums pass: an extremum over one axis and a sum over another do not commute.
    """
    dtype = call.results[0].dtype if call.results else call.operands[0].dtype
    fit = all(call.operands[i].dtype is dtype for i in chosen)
    rows = alike(len(call.operands), chosen, kinds=KINDS if len(chosen) == 1 else SUMS) if fit else ()
    return Factors(*broadcast(call), rows=rows, **more)


@rule(aten.where.self)
def where(call: Call) -> Factors:
    """Each element comes from one of two operands."""
    return either(call, (1, 2))


@rule(aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
def masked_fill_tensor(call: Call) -> Factors:
    """Each element comes from the first operand, or is the value of the last."""
    return either(call, (0, 2))


@rule(aten.masked_fill.Scalar, aten.masked_fill_.Scalar, reads={"value": is_zero})
def masked_fill(call: Call) -> Factors:
    """Elements replaced by a number. Any Partial reduces zeros to zero; only extrema keep another number."""
    if call["value"] == 0:
        return either(call, (0,), linear=FIRST, keeps_zero=True)
    return Factors(*broadcast(call), rows=alike(len(call.operands), (0,), kinds=EXTREMA))


@rule(aten.copy.default, aten.copy_.default)
def copy(call: Call) -> Factors:
    """The second operand cast to the dtype of the first."""
    kind = call.operands[0].dtype
    if len(call.operands) < 2:
        return Factors(*broadcast(call))
    source = call.operands[1].dtype
    pinned = call.op is aten.copy_.default  # the written tensor keeps its layout, so kinds of Partial do not mix
    return Factors(*broadcast(call), moves=pinned and source is kind, linear=BOTH if keeps_sums(source, kind) else ())


def extremum(kind: str) -> Callable[[Call], Factors]:
    """The larger or smaller of two operands: a Partial of that reduction passes, in one operand or in both."""

    def factors(call: Call) -> Factors:
        same = all(m.dtype is call.results[0].dtype for m in call.operands)
        sides = ((0, 1), (0,), (1,)) if same and len(call.operands) == 2 else ()
        rows = tuple(row for side in sides for row in alike(2, side, kinds=(Partial(kind),)))
        return Factors(*broadcast(call), rows=rows)

    return factors


rule(aten.maximum.default, aten.max.other)(extremum("max"))
rule(aten.minimum.default, aten.min.other)(extremum("min"))


@rule(aten.clamp.Tensor, aten.clamp_.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.clamp_min_.Tensor)
def clamp(call: Call) -> Factors:
    """Monotone in the first operand, for any bounds."""
    same = call.operands[0].dtype is (call.results or call.operands)[0].dtype
    rows = alike(len(call.operands), (0,), kinds=EXTREMA) if same else ()
    return Factors(*broadcast(call), rows=rows)


def is_positive(exponent: complex) -> tuple[type, bool]:
    """The type of an exponent, which determines the dtype of the result, and whether zero to that power is zero."""
    return type(exponent), not isinstance(exponent, complex) and exponent > 0


@rule(aten.pow.Tensor_Scalar, aten.pow_.Scalar, reads={"exponent": is_positive})
def power(call: Call) -> Factors:
    """Zero to a positive power is zero."""
    return Factors(*broadcast(call), keeps_zero=is_positive(call["exponent"])[1])


@rule(aten._to_copy.default)
def to_copy(call: Call) -> Factors:
    """A cast: sums pass if nothing overflows, extrema if the cast is monotone, a MaskPartial always."""
    before, after = call["self"].dtype, call.results[0].dtype
    return Factors(
        *broadcast(call),
        moves=before is after,
        linear=FIRST if keeps_sums(before, after) or only_rounds(before, after) else (),
        monotone=1 if keeps_order(before, after) else 0,
        keeps_zero=after is not torch.bool,
    )


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(call: Call) -> Factors:
    """The gradient of the input and that of the weight, both of the shape of the input."""
    return Factors(*broadcast(call), linear=FIRST)


@rule(aten.glu.default)
def halves(call: Call) -> Factors:
    """Two halves of a dim are treated differently: that dim must not be sharded."""
    return along(call, [call["dim"]])


@rule(aten.glu_backward.default)
def halves_backward(call: Call) -> Factors:
    """Linear in the gradient."""
    return along(call, [call["dim"]], linear=FIRST)
