"""The fabric of planning: shapes and costs only, for any number of ranks.

A local is a meta tensor of the largest block. Each step is recorded with its bytes and modelled seconds, and the
bytes of the live locals are followed to their peak.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.mesh import Coordinate, DeviceMesh, fabric_mode
from shardwise.core.mode_stack import ModeStack, mode_context
from shardwise.fabric.base import BoundStep, Fabric, check_source, register
from shardwise.fabric.pieces import empty_block
from shardwise.plan.route import Route, StepCost
from shardwise.plan.step import Step

__all__ = ["DryFabric", "DryRun", "RecordedStep", "dry_run"]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a dry run: what it was, and what the model says it cost a rank."""

    step: Step
    cost: StepCost


@dataclass(eq=False)
class DryRun:
    """What a dry run would have moved and held, on the rank that holds the most.

    Example:
        >>> with dry_run() as run:
        ...     pass
        >>> run.bytes, run.collectives
        (0, Counter())
    """

    steps: list[RecordedStep] = field(default_factory=list)
    live_bytes: int = 0
    peak_bytes: int = 0
    _storages: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes that a rank received."""
        return round(sum(record.cost.received for record in self.steps))

    @property
    def seconds(self) -> float:
        """Modelled time of the communication."""
        return sum(record.cost.seconds for record in self.steps)

    @property
    def collectives(self) -> Counter[str]:
        """How many of each collective."""
        return Counter(record.step.collective for record in self.steps if record.step.collective is not None)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor` for as long as a tensor of this storage lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._storages.get(key)
        if entry is None:
            entry = self._storages[key] = [0, storage.nbytes()]
            self.live_bytes += entry[1]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        entry[0] += 1
        weakref.finalize(tensor, self._release, key)

    def resized(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` has another size now."""
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is not None:
            self.live_bytes += storage.nbytes() - entry[1]
            entry[1] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        entry = self._storages[key]
        entry[0] -= 1
        if not entry[0]:
            del self._storages[key]
            self.live_bytes -= entry[1]


class DryFabric(Fabric):
    """No rank runs; the one at coordinate zero, which holds the most, stands for all."""

    name = "dry"

    def __init__(self) -> None:
        self.runs = ModeStack[DryRun]("dry run")

    def rank(self) -> int:
        return 0

    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        return [(0,) * mesh.ndim]

    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        with torch.device("meta"):
            made = make((0,) * mesh.ndim)
        return self.track(made.to("meta"))

    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        return self.track(fn((0,) * mesh.ndim, *locals_))

    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        return [((0,) * mesh.ndim, local)]

    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        check_source(mesh, source)
        return self.build(mesh, blocks)

    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        return [facts]

    def bind(self, step: Step) -> BoundStep:
        coordinate = (0,) * step.after.mesh.ndim
        return lambda local: self.track(empty_block(step.after, coordinate, local))

    def track(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a local in every dry run that is on here."""
        for run in self.runs.values():
            run.hold(tensor)
        return tensor

    def resized(self, tensor: torch.Tensor) -> None:
        for run in self.runs.values():
            run.resized(tensor)

    def bind_route(self, route: Route) -> BoundStep:
        run = super().bind_route(route)
        records = [RecordedStep(*pair) for pair in zip(route.steps, route.costs, strict=True)]

        def recorded(local: torch.Tensor) -> torch.Tensor:
            for dry_run in self.runs.values():
                dry_run.steps.extend(records)
            return run(local)

        return recorded


dry = register(DryFabric())


@mode_context
def dry_run() -> Iterator[DryRun]:
    """Meshes made inside, by this thread, are dry: nothing is computed or sent; what would be is recorded.

    Example:
        >>> with dry_run() as run:
        ...     mesh = DeviceMesh("cpu", range(16384))
        >>> mesh.fabric
        'dry'
    """
    with dry.runs.holding(DryRun()) as run, fabric_mode.holding(dry.name):
        yield run
