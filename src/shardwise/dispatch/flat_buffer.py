"""Tensors of one layout, sharded on no axis, in one flat buffer that is moved by one collective.

Works on specs and locals. Parameters with blocks of several sizes have `parallel/data_parallel/flat_params`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.base import fabric_of

__all__ = ["FlatBuffer", "alike"]


class FlatBuffer(NamedTuple):
    """The shapes of some tensors, and the spec of the buffer that contains them."""

    shapes: list[torch.Size]
    spec: DTensorSpec

    @classmethod
    def of(cls, specs: Sequence[DTensorSpec]) -> FlatBuffer:
        """Tensors of one mesh, layout and dtype, sharded on no axis."""
        first, shapes = specs[0], [spec.shape for spec in specs]
        meta = TensorMeta((sum(map(math.prod, shapes)),), dtype=first.tensor_meta.dtype)
        return cls(shapes, DTensorSpec(first.mesh, first.placements, meta))

    def joined(self, locals_: Iterable[torch.Tensor]) -> torch.Tensor:
        """The local of the buffer."""
        return torch.cat([local.reshape(-1) for local in locals_])

    def parts(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """The local of each tensor, contiguous, of a local of the buffer."""
        if fabric_of(self.spec.mesh).is_outside(self.spec.mesh):
            return [joined.new_zeros((0,) if shape else ()) for shape in self.shapes]
        pieces = joined.split([math.prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def alike(specs: Mapping[int, DTensorSpec]) -> list[list[int]]:
    """The positions of specs, grouped by mesh, layout and dtype."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for at, spec in specs.items():
        kinds.setdefault((spec.mesh, spec.placements, spec.tensor_meta.dtype), []).append(at)
    return list(kinds.values())
