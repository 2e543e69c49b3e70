"""A step of a pipeline without values: time of each stage, idle time, and the peak memory of stages and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from shardwise.core.mesh import DeviceMesh
from shardwise.debug.pictures.draw_svg import Drawing
from shardwise.errors import UnsupportedError
from shardwise.fabric.dry import DryRun
from shardwise.pipelines.pipeline_picture import draw_pipeline
from shardwise.pipelines.pipeline_tables import Action, Table, actions_of
from shardwise.pipelines.pipeline_timeline import Timeline, timeline_of
from shardwise.plan.cost import current_cost_model
from shardwise.tensor import DTensor
from shardwise.text import human_bytes
from shardwise.torch_private import TorchDispatchMode

__all__ = ["PipelineEstimate", "StepRecorder", "local_memory"]


class PipelineEstimate(NamedTuple):
    """The time and memory of a step of a pipeline, modelled by a dry run.

    Args:
        timeline: when actions run.
        forward: seconds of a forward of each stage.
        backward: seconds of a backward of each stage, both parts.
        stage_bytes: the peak memory of each stage on a rank: parameters, gradients, activations.
        rank_bytes: the peak memory of a rank at each coordinate, of all its stages.
    """

    timeline: Timeline
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stage_bytes: Mapping[int, int]
    rank_bytes: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """The time of a step, without the optimizer."""
        return self.timeline.seconds

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        return self.timeline.bubble

    def draw(self) -> Drawing:
        """The picture: a row for each stage, with its memory, a box for each microbatch."""
        return draw_pipeline(self.timeline, self.stage_bytes)

    def __str__(self) -> str:
        lines = [f"a step takes {self.seconds:.3g} s, ranks idle {self.bubble:.1%} of it"]
        for stage, memory in self.stage_bytes.items():
            lines.append(
                f"  stage {stage}: forward {self.forward[stage]:.3g} s, backward {self.backward[stage]:.3g} s, "
                f"{human_bytes(memory)}, {self.timeline.in_flight[stage]} microbatches at once"
            )
        most = max(self.rank_bytes.values())
        return "\n".join([*lines, f"  peak memory of a rank: {human_bytes(most)}"])


class _Flops(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, convolutions and attention on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for kind in types):  # pyright: ignore[reportAttributeAccessIssue]
            return NotImplemented  # operators on its locals are dispatched to this mode again
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


class StepRecorder:
    """Measures each action of a step in a dry run.

    Args:
        run: the dry run.
        memory: the bytes of each stage before the step.
        flops_per_second: the speed of a rank.
    """

    def __init__(self, run: DryRun, memory: Mapping[int, int], flops_per_second: float) -> None:
        self._run, self._speed = run, flops_per_second
        self._live, self._peak = dict(memory), dict(memory)
        self._homes: dict[int, int] = {}
        self._rank_peak: dict[int, int] = {}
        self._times: dict[tuple[str, int], list[float]] = {}
        self._sends: list[float] = []
        self._sent = (0, 0.0)  # bytes that this action has sent to another stage, and the seconds for it

    def begin(self, table: Table) -> None:
        """Begin a step of a table."""
        self._homes = {action.stage: rank for rank, row in enumerate(table) for action in actions_of(row)}
        for stage, rank in self._homes.items():
            self._rank_peak[rank] = self._rank_peak.get(rank, 0) + self._live[stage]

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Measure an action."""
        run, stage = self._run, action.stage
        before, earlier, steps = run.live_bytes, run.peak_bytes, len(run.steps)
        run.peak_bytes, self._sent = before, (0, 0.0)
        with _Flops() as flops:
            yield
        inside = run.peak_bytes - before
        run.peak_bytes = max(run.peak_bytes, earlier)
        self._peak[stage] = max(self._peak[stage], self._live[stage] + inside)
        rank = self._homes[stage]
        total = sum(memory for other, memory in self._live.items() if self._homes[other] == rank)
        self._rank_peak[rank] = max(self._rank_peak[rank], total + inside)
        given, sending = self._sent
        self._live[stage] += run.live_bytes - before - given
        moved = sum(record.cost.seconds for record in run.steps[steps:]) - sending
        self._times.setdefault((action.kind, stage), []).append(flops.total / self._speed + moved)

    @contextmanager
    def send(self, receiver: int, mesh: DeviceMesh) -> Iterator[None]:
        """Measure a message to another stage on `mesh`; its memory counts there from now on."""
        before, steps = self._run.live_bytes, len(self._run.steps)
        yield
        size = self._run.live_bytes - before
        if len(self._run.steps) > steps:
            seconds = sum(record.cost.seconds for record in self._run.steps[steps:])
        else:  # of a plain tensor: each rank sends one message
            link = current_cost_model().link(mesh, ())
            seconds = link.alpha + size * link.beta
        self._live[receiver] += size
        self._peak[receiver] = max(self._peak[receiver], self._live[receiver])
        recorded = sum(record.cost.seconds for record in self._run.steps[steps:])
        self._sent = self._sent[0] + size, self._sent[1] + recorded
        self._sends.append(seconds)

    def estimate(self, table: Table) -> PipelineEstimate:
        """The step, computed from the times of its actions."""
        stages = range(len(self._homes))
        forward = [self._mean("F", stage) for stage in stages]
        weight = [self._mean("W", stage) for stage in stages]
        backward_time = [self._mean("B", stage) or self._mean("I", stage) + weight[stage] for stage in stages]
        send = sum(self._sends) / len(self._sends) if self._sends else 0.0
        timeline = timeline_of(table, forward, backward_time, send, weight=weight)
        ranks = dict(sorted(self._rank_peak.items()))
        return PipelineEstimate(timeline, tuple(forward), tuple(backward_time), dict(sorted(self._peak.items())), ranks)

    def _mean(self, kind: str, stage: int) -> float:
        found = self._times.get((kind, stage), [])
        return sum(found) / len(found) if found else 0.0


def local_memory(run: DryRun, stages: Mapping[int, nn.Module], given: Callable[[], Sequence[Any]]) -> dict[int, int]:
    """The bytes of parameters and buffers of each stage on a rank; plain ones are tracked by the dry run from now on.

    Args:
        run: the dry run.
        stages: the modules.
        given: the tensors of the batch.
    """
    found = {}
    for number, stage in stages.items():
        sizes: dict[int, int] = {}
        for tensor in (*stage.parameters(), *stage.buffers()):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not local.is_meta:
                raise UnsupportedError(
                    f"dry_step: stage {number} has values, so its step would be computed",
                    hint="make the model inside torch.device('meta')",
                )
            if not isinstance(tensor, DTensor):
                run.hold(local)
            sizes[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
        found[number] = sum(sizes.values())
    for value in given():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if not value.is_meta:
                raise UnsupportedError("dry_step: the batch has values", hint="make it inside torch.device('meta')")
            run.hold(value)
    return found
