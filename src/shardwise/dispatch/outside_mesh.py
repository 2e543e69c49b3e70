"""Operators on a rank outside the mesh of their operands: results of the right kind with empty locals.

Nothing is computed or communicated. A number is zero, and a comparison is true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.signature import Executor, Signature
from shardwise.fabric.base import nothing_of
from shardwise.plan.propagate import replicated_spec

__all__ = ["holding_nothing"]


def holding_nothing(
    signature: Signature, outputs: Sequence[DTensorSpec] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Executor:
    """The executor of a call on such a rank. `outputs`: the specs of results, None if they depend on values."""
    info, wrapping = signature.info, signature.wrapping
    values: Any = None
    if outputs is None:
        values = _of_zeros(signature, args, kwargs)
        found = values if isinstance(values, tuple | list) else (values,)
        if not all(isinstance(value, torch.Tensor) for value in found):
            return lambda args, kwargs: True if info.returns == ("bool",) else values
        outputs = [replicated_spec(signature.mesh, TensorMeta.of(value)) for value in found]
    wraps = [(wrapping.wrapper(spec), spec) for spec in outputs]

    def run_outside_mesh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = [wrap(nothing_of(spec)) for wrap, spec in wraps]
        if info.returns == ("List[Tensor]",):
            return made
        given = info.bind(args, kwargs) if info.writes else {}
        new = iter(made)
        results = [next(new) if name is None else given[name] for name in info.returned]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    return run_outside_mesh


def _of_zeros(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The results of the operator for zeros of these shapes, which take no memory."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot, spec in zip(signature.slots, signature.specs, strict=True):
        slot.put(new_args, new_kwargs, torch.zeros((), dtype=spec.tensor_meta.dtype).expand(spec.shape))
    return signature.info.op(*new_args, **new_kwargs)
