"""Layers of recurrent networks, as oneDNN and cuDNN compute them: the batch is parallel, time is not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.spec import TensorMeta
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten

BATCH = frozenset("b")
WEIGHTS = ("weight", "weight0", "weight1", "weight2", "weight3", "weight4", "weight_buf")
OPAQUE = ("workspace", "reserve", "dropout_state")  # what a kernel keeps for its backward: no tensor of the network


def factors(names: Sequence[str], metas: Sequence[TensorMeta], batch_first: bool) -> tuple[tuple[Dim, ...], ...]:
    """The factors of tensors by their names: sequences have time and batch before the features, states the batch."""
    return tuple(_dims(name, len(meta.shape), batch_first) for name, meta in zip(names, metas, strict=True))


def _dims(name: str, ndim: int, batch_first: bool) -> tuple[Dim, ...]:
    if name in WEIGHTS or name in OPAQUE:
        return (None,) * ndim
    at = 0 if name in ("input", "output", "grad_output") and batch_first else ndim - 2
    return tuple("b" if dim == at else None for dim in range(ndim))


def operand_names(call: Call) -> list[str]:
    """The argument of each tensor operand."""
    names: list[str] = []
    for argument in call.op._schema.arguments:
        value: Any = call.get(argument.name)
        if isinstance(value, TensorMeta):
            names.append(argument.name)
        elif isinstance(value, list | tuple):
            names.extend(argument.name for item in value if isinstance(item, TensorMeta))
    return names


def recurrent(*results: str, batch_first: bool | None = None) -> Any:
    """The rule of a layer.

    Args:
        results: what its results are; the last one stands for all that follow.
        batch_first: whether the batch is before time; None where the operator is told.
    """

    def of_call(call: Call) -> Factors | None:
        if call.get("dropout") or call["batch_sizes"]:  # random numbers; sequences packed into one another
            return None
        first = call["batch_first"] if batch_first is None else batch_first
        names = [*results, *results[-1:] * (len(call.results) - len(results))][: len(call.results)]
        opaque = frozenset(("b", i) for i, name in enumerate(names) if name in OPAQUE or name == "weight_buf")
        return Factors(
            factors(operand_names(call), call.operands, first),
            factors(names, call.results, first),
            summed=BATCH,
            untouched=opaque,
            nonempty=BATCH,
        )

    return of_call


# oneDNN is given time before the batch always
rule(aten.mkldnn_rnn_layer.default)(recurrent("output", "hx", "cx", "workspace", batch_first=False))
rule(aten.mkldnn_rnn_layer_backward.default)(
    recurrent("input", "weight1", "weight2", "weight3", "weight4", "hx", "cx", batch_first=False)
)
rule(aten._cudnn_rnn.default, reads=("dropout",))(recurrent("output", "hx", "cx", "reserve", "weight_buf"))
rule(aten._cudnn_rnn_backward.default, reads=("dropout",))(recurrent("input", "hx", "cx", "weight"))
