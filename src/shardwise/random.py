"""Seeds and states of random numbers on a mesh.

Random operators draw from torch's own generators, the same on every rank, and each rank keeps its part of the numbers
of one device. So `torch.manual_seed`, generators and saved states work as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardwise import modes
from shardwise.core.mesh import DeviceMesh
from shardwise.core.mode_stack import mode_context
from shardwise.dispatch.random_ops import agree_on_state
from shardwise.errors import AgreementError, UnsupportedError
from shardwise.fabric.base import device_of, fabric_of
from shardwise.fabric.world import as_mesh
from shardwise.rng.draw_blocks import default_generator

__all__ = ["OffsetBasedRNGTracker", "RNGTracker", "is_rng_supported_mesh", "manual_seed", "use_rng"]


def manual_seed(seed: int, device_mesh: Any = None) -> None:
    """Seed the generators that random operators draw from; call it on every rank with the same seed.

    Args:
        seed: the seed.
        device_mesh: compare the seed over the ranks of this mesh first: a disagreement is an error on all of them.

    Example:
        >>> manual_seed(0)
        >>> a = torch.rand(3)
        >>> manual_seed(0)
        >>> torch.equal(a, torch.rand(3))
        True
    """
    if device_mesh is not None:
        mesh = as_mesh(device_mesh)
        seeds = fabric_of(mesh).agree(mesh, int(seed), torch.empty(0))
        if len(set(seeds)) > 1:
            raise AgreementError(
                f"manual_seed: the ranks of {mesh} passed different seeds: {seeds}",
                hint="pass the same seed on every rank; each still draws its own part of the numbers",
            )
    torch.manual_seed(seed)


@mode_context
def use_rng(rng: str) -> Iterator[None]:
    """Inside, random operators draw from another generator.

    Args:
        rng: "one_device", the default: the numbers that one torch device would draw. On CPU, where generators are
            sequential, every rank draws the global tensor in blocks and keeps its part. "indexed": each number is a
            function of a seed and of its global index: the same on every mesh, and a rank computes only its part, but
            they differ from those of a torch device.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> with use_rng("indexed"):
        ...     x = sw.randn(8, device_mesh=mesh, placements=[sw.Shard(0)])
    """
    if rng not in ("one_device", "indexed"):
        raise UnsupportedError(f"unknown generator {rng!r}", hint='use "one_device" or "indexed"')
    with modes.rng_mode.holding(rng):
        yield


def is_rng_supported_mesh(device_mesh: Any) -> bool:
    """Whether random operators work on a mesh: on CPU and on CUDA.

    Example:
        >>> import shardwise as sw
        >>> is_rng_supported_mesh(sw.init_device_mesh("cpu", (2,)))
        True
    """
    return as_mesh(device_mesh).device_type in ("cpu", "cuda")


class RNGTracker:
    """The random state of a mesh: one generator, the same on every rank.

    Args:
        device_mesh: the mesh.
        run_state_sync: copy the state of the first rank to all ranks.

    Example:
        >>> import shardwise as sw
        >>> tracker = RNGTracker(sw.init_device_mesh("cpu", (2,)))
        >>> tracker.manual_seed(3)
        >>> tracker.seed
        3
    """

    def __init__(self, device_mesh: Any, run_state_sync: bool = True) -> None:
        self.mesh: DeviceMesh = as_mesh(device_mesh)
        if run_state_sync:
            self.synchronize()

    @property
    def generator(self) -> torch.Generator:
        """The generator that random operators on the mesh draw from."""
        return default_generator(device_of(self.mesh))

    @property
    def seed(self) -> int:
        """The seed of the generator."""
        return self.generator.initial_seed()

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of this mesh only."""
        self.generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        """The state, for `set_state`."""
        return self.generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Continue from a state."""
        self.generator.set_state(state)

    def synchronize(self) -> None:
        """Copy the state of the first rank of the mesh to ranks with another state."""
        agree_on_state(self.mesh)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Draws inside do not change the state."""
        before = self.get_state()
        try:
            yield
        finally:
            self.set_state(before)


class OffsetBasedRNGTracker(RNGTracker):
    """The random state of a CUDA mesh, whose generators are a seed and an offset into its sequence.

    Example:
        >>> import shardwise as sw
        >>> OffsetBasedRNGTracker(sw.init_device_mesh("cpu", (2,)))
        Traceback (most recent call last):
        ...
        shardwise.errors.UnsupportedError: ...
    """

    def __init__(self, device_mesh: Any, run_state_sync: bool = True) -> None:
        mesh = as_mesh(device_mesh)
        if mesh.device_type != "cuda":
            raise UnsupportedError(
                f"generators on {mesh} have no offset: those of CPUs are sequential", hint="use RNGTracker"
            )
        super().__init__(mesh, run_state_sync)

    def get_offset(self) -> int:
        """The offset of the generator in its sequence."""
        return self.generator.get_offset()

    def set_offset(self, offset: int) -> None:
        """Set the offset, a multiple of 4."""
        self.generator.set_offset(offset)
