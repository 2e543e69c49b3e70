"""Pointwise operators: every dim is a factor of its own; which of them let a Partial through is one table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rules.notation import Dim, Factors
from shardwise.rules.registry import Call, Rule, declare_rule, default_pointwise

aten = torch.ops.aten


def broadcast(call: Call) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """The factors of operands that broadcast to the results: numbered from the last dim."""
    shape = call.results[0].shape if call.results else call.operands[0].shape

    def dims(own: Sequence[int]) -> tuple[Dim, ...]:
        missing = len(shape) - len(own)
        return tuple(
            None if size != shape[missing + d] else f"d{len(own) - d}" for d, size in enumerate(own)
        )

    return tuple(dims(m.shape) for m in call.operands), tuple(dims(m.shape) for m in call.results)


def pointwise(**facts) -> Rule:
    """The rule of a pointwise operator with these facts about Partial values."""
    return Rule(lambda call: Factors(*broadcast(call), **facts))


default_pointwise.append(pointwise())

UNARY = ((0,),)
TOGETHER = ((0, 1),)
EACH_ALONE = ((0,), (1,))

for rule, ops in {
    # linear in the operands together: sums go through
    pointwise(linear=TOGETHER): (
        aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.copy_, aten.copy,
    ),
    # linear in each operand alone
    pointwise(linear=EACH_ALONE): (aten.mul.Tensor, aten.mul_.Tensor),
    # linear in the first
    pointwise(linear=UNARY, keeps_zero=True): (
        aten.div.Tensor, aten.div_.Tensor, aten.mul.Scalar, aten.mul_.Scalar, aten.div.Scalar, aten.div_.Scalar,
        aten.neg, aten.neg_, aten.clone, aten.detach, aten.alias, aten.view_as_real, aten.zeros_like,
        aten.zero_, aten.contiguous, aten.real, aten.imag, aten.conj_physical, aten._conj,
    ),
}.items():  # fmt: skip
    declare_rule(rule, *ops)
