"""Plain gradients that compiled code is given where it expects DTensors: zeros, for outputs that are not used."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import fabric_of
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor.dtensor import DTensor, dtensor_of, redistributed

__all__ = ["accept_plain_tangents"]


def accept_plain_tangents() -> None:
    """Let compiled code accept what autograd makes for an output that is not used: zeros, of the class torch.Tensor.

    The compiler asks the tensor itself to become what it expected, and a plain one has no such method unless it is
    given one. It speaks for DTensors alone: of anything else it says None, as if it were not there.
    """
    if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
        torch.Tensor.__coerce_same_metadata_as_tangent__ = _plain_tangent  # pyright: ignore[reportAttributeAccessIssue]


def _plain_tangent(tangent: torch.Tensor, expected: Any, expected_type: type | None = None) -> torch.Tensor | None:
    """A whole gradient, alike on every rank, as compiled code expects it."""
    if expected_type is not DTensor or tangent.__class__ is not torch.Tensor:
        return None
    meta = TensorMeta.of(tangent)
    local = fabric_of(expected[0]).build(expected[0], lambda coordinate: tangent)
    return redistributed(
        dtensor_of(replicated_spec(expected[0], meta), local), DTensorSpec.from_context(expected, meta)
    )


never_traced(_plain_tangent)
