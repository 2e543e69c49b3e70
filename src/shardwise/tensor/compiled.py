"""What programs that are compiled ask for beside DTensor's own methods: to make one in a graph, and plain gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compilers import never_traced, refuse_dry, taken_whole
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.world import as_mesh
from shardwise.plan.propagate import replicated_spec
from shardwise.tensor.dtensor import DTensor, dtensor_of, redistributed

__all__ = ["accept_plain_tangents", "from_local_in_graph"]


@taken_whole
def from_local_in_graph(
    local: torch.Tensor,
    mesh: Any,
    placements: Sequence[Any] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Any] | None,
    shard_order: Sequence[Any] | None,
) -> DTensor:
    refuse_dry(as_mesh(mesh))
    if run_check:
        raise UnsupportedError(
            "from_local(run_check=True) compares values over the ranks, which a compiled program cannot",
            hint="leave run_check out, or call from_local outside of what is compiled",
        )
    return DTensor.from_local(
        local, mesh, placements, shape=shape, stride=stride, grad_placements=grad_placements, shard_order=shard_order
    )


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
