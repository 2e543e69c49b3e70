"""The positions of a rank's elements along a dim, with which sharded extremes are found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.dims import names
from shardwise.rules.engine import Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("positions(Tensor self, int dim) -> Tensor")


def positions(local: torch.Tensor, dim: int, *, runs: Sequence[Run] | None = None) -> torch.Tensor:
    """The indices of a dim, of size one in all others; of a shard the global ones."""
    held = (Run(0, local.shape[dim]),) if runs is None else runs
    found = [torch.arange(start, start + length, device=local.device) for start, length in held]
    whole = found[0] if len(found) == 1 else torch.cat([*found, found[0][:0]] if found else [local.new_empty(0).long()])
    return whole.view([-1 if d == dim else 1 for d in range(local.dim())])


_library.impl("positions", positions, "CompositeExplicitAutograd")


def held_runs(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The indices of the dim that a rank holds."""
    return {"runs": inputs[0].block(coordinate).runs[call["dim"]]} if inputs[0].dim_axes[call["dim"]] else {}


@rule(torch.ops.shardwise.positions.default, localize=held_runs, local_op=positions)
def by_position(call: Call) -> Factors:
    """Each rank makes those of its own part."""
    own = names(len(call["self"].shape))
    result = tuple(name if d == call["dim"] else None for d, name in enumerate(own))
    untouched = frozenset((name, 0) for d, name in enumerate(own) if d != call["dim"])
    return Factors((tuple(own),), (result,), untouched=untouched, moves=False)
