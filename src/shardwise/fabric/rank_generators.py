"""Random states of virtual ranks: each rank draws as a process with a generator of its own would.

Processes that were seeded alike draw the same numbers. So every virtual rank begins at the state that the one plain
generator has, and all must leave it in the same state: one generator cannot hold states that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.errors import AgreementError
from shardwise.rng.blocks import default_generator

__all__ = ["draws", "draws_alike"]


def draws(op: Any) -> bool:
    """Whether an operator may take numbers from a generator.

    Example:
        >>> draws(torch.ops.aten.native_dropout.default), draws(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def draws_alike(op: Any, leaves: Iterable[Any], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each rank's call of a random operator, all from the same random state.

    Args:
        op: the operator, for the error.
        leaves: all that it is called with: the generators among it are drawn from, or else those of the devices.
        calls: the call of each rank.
    """
    generators = _generators(leaves)
    before = [generator.get_state() for generator in generators]
    after: list[torch.Tensor] = []
    results = []
    for rank, call in enumerate(calls):
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        results.append(call())
        left = [generator.get_state() for generator in generators]
        if rank == 0:
            after = left
        elif not all(map(torch.equal, left, after)):
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            raise AgreementError(
                f"{op} draws more random numbers on virtual rank {rank} than on rank 0, or fewer: one generator is in "
                "place of every rank's own, and cannot hold states that differ",
                hint="draw as many numbers on every rank: from tensors of the same shape, or on the DTensor itself, "
                "which draws what one device would",
            )
    return results


def _generators(leaves: Iterable[Any]) -> list[torch.Generator]:
    held = list(leaves)
    given = [leaf for leaf in held if isinstance(leaf, torch.Generator)]
    devices = dict.fromkeys(leaf.device for leaf in held if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
    return given or [default_generator(device) for device in devices]
