"""`sw.pipeline`: the stages of a model on the ranks of a mesh axis, run by a schedule.

One interpreter for every schedule and fabric: with virtual ranks it takes the actions of all ranks in turn, with
processes those of its own rank, and waits for messages.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardwise.api import mark_replaced, parameters_of
from shardwise.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from shardwise.checkpoint.state_dicts.model_state_dict import load_model
from shardwise.checkpoint.state_dicts.parameter_names import canonical_name
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.dispatch.random_ops import agree_once, agreements, forget_agreements
from shardwise.errors import LayoutError, PipelineError, UnsupportedError
from shardwise.fabric.base import device_of, fabric_of
from shardwise.fabric.dry import dry
from shardwise.fabric.rank_generators import are_states_recorded
from shardwise.fabric.stage_link import StageLink
from shardwise.pipelines.dry_pipeline import PipelineEstimate, StepRecorder, local_memory
from shardwise.pipelines.pipeline_tables import (
    Action,
    Overlapped,
    actions_of,
    pipeline_table,
    stage_ranks,
    stages_on_each,
)
from shardwise.pipelines.pipeline_timeline import Timeline, Times, timeline_of
from shardwise.pipelines.split_backward import WeightPart, input_gradients
from shardwise.pipelines.stage_modules import StageModules
from shardwise.pipelines.stage_split import split_model, untie
from shardwise.pipelines.stage_values import InProcess, OverLink, ValueMeta
from shardwise.rng.draw_blocks import default_generator
from shardwise.tensor import DTensor

__all__ = ["Pipeline", "draw_seed", "pipeline"]

Parallelize = Callable[[nn.Module, DeviceMesh, int], object]
MOST_VALUES = 64  # tensors that a stage may return; tags of messages count up to it


def pipeline(
    model: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh | Sequence[DeviceMesh],
    *,
    split: Sequence[str | int] | str = "auto",
    schedule: str = "1f1b",
    microbatches: int,
    stages_per_rank: int | None = None,
    parallelize: Parallelize | None = None,
) -> Pipeline:
    """A model cut into stages, each on its own ranks; microbatches go through them by a schedule.

    Gradients of the microbatches are added in the order of their numbers. A parameter that several stages share (tied
    embeddings) becomes one parameter on each of them; after each step their gradients are added, in the order of the
    stages.

    Args:
        model: an `nn.Sequential`, which is cut; or a list of modules, one for each stage. A stage that returns a tuple
            gives the next one several arguments.
        mesh: the axis of stages, `mesh["pp"]`: stage `s` is on the ranks with coordinate `s % ranks` there (in the
            shape of a V: 0, 1, ..., 1, 0), and has the other axes as its mesh. Or a list with a mesh for each stage.
        split: the children (names or numbers) with which the second and later stages begin. "auto": the largest number
            of parameters of a stage is as small as possible.
        schedule: "gpipe", "1f1b", "interleaved" (1F1B with several stages on each rank), "zb1p" (zero bubble), "zbv" or
            "dualpipev" (in the shape of a V, two stages on each rank).
        microbatches: the number of parts of a batch. The batch must divide evenly.
        stages_per_rank: for "interleaved" and "zb1p".
        parallelize: called with each stage of this process, its mesh and its number, to lay it out:
            `parallelize_module`, `fully_shard`, checkpointing of activations.

    Example:
        >>> import shardwise as sw
        >>> from torch import nn
        >>> mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> pipe = sw.pipeline(model, mesh["pp"], split=["2"], schedule="1f1b", microbatches=2)
        >>> loss = pipe.step(torch.ones(6, 4), torch.zeros(6, 1), nn.functional.mse_loss)
        >>> loss.shape, model[0].weight.grad.shape
        (torch.Size([]), torch.Size([8, 4]))
    """
    each = stages_on_each(schedule, stages_per_rank)
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.size()
        homes = _stage_meshes(mesh)
        meshes = [homes[rank] for rank in stage_ranks(schedule, ranks, ranks * each)]
    else:
        meshes = list(mesh)
        ranks = len(meshes) // each
        if not meshes or len(meshes) % each:
            raise LayoutError(
                f"pipeline: {len(meshes)} meshes for {each} stages on each rank", hint="pass a mesh for each stage"
            )
        _check_meshes(meshes, stage_ranks(schedule, ranks, len(meshes)))
    table = pipeline_table(schedule, ranks, microbatches, each)
    stages = split_model(model, split, len(meshes))
    return Pipeline(stages, meshes, table, microbatches, parallelize, in_one=isinstance(model, nn.Sequential))


def _stage_meshes(axis: DeviceMesh) -> list[DeviceMesh]:
    """For each coordinate of an axis the mesh of the other axes."""
    if axis.ndim != 1 or len(axis.axes[0]) != 1:
        raise LayoutError(
            f"pipeline: {axis} is not a single axis of a mesh", hint='pass the axis of stages, as in mesh["pp"]'
        )
    at, names = axis.axes[0][0], axis.root.mesh_dim_names
    grid = np.asarray(axis.grid_ranks).reshape(axis.grid_shape)
    made = []
    for index in range(axis.size()):
        ranks = grid.take(index, axis=at)
        others = None if names is None else [name for number, name in enumerate(names) if number != at]
        if not ranks.ndim:
            ranks, others = ranks.reshape(1), ["one"] if others is not None else None
        made.append(DeviceMesh(axis.device_type, ranks, mesh_dim_names=others, fabric=axis.fabric))
    return made


def _check_meshes(meshes: Sequence[DeviceMesh], homes: Sequence[int]) -> None:
    for first, mesh in enumerate(meshes):
        if mesh.size() != mesh.grid_size or fabric_of(mesh) is not fabric_of(meshes[0]):
            raise LayoutError(
                f"pipeline: {mesh} cannot be the mesh of a stage", hint="pass a mesh over the ranks of the stage"
            )
        for second in range(first):
            shared = not set(mesh.grid_ranks).isdisjoint(meshes[second].grid_ranks)
            together = homes[first] == homes[second]
            if shared != together or (together and mesh is not meshes[second]):
                raise LayoutError(
                    f"stages {second} and {first} {'share ranks' if shared else 'share no ranks'}: "
                    f"{meshes[second]} and {mesh}",
                    hint=f"by this schedule the stages are on ranks {', '.join(map(str, homes))} of the pipeline",
                )


_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward (gradients of weights)"}


class _Saved(NamedTuple):
    """The forward of a microbatch that waits for its backward."""

    inputs: list[Any]
    outputs: list[Any]  # of the last stage, the loss


class Pipeline:
    """Stages and their schedule. Made by `pipeline`.

    Args:
        stages: the modules.
        meshes: the mesh of each.
        table: the actions of each rank.
        microbatches: the number of parts of a batch.
        parallelize: parallelizes a stage.
        in_one: the stages are parts of one `nn.Sequential`, whose names they have.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        meshes: Sequence[DeviceMesh],
        table: Sequence[Sequence[Action | Overlapped]],
        microbatches: int,
        parallelize: Parallelize | None,
        *,
        in_one: bool,
    ) -> None:
        self.meshes, self.table, self.microbatches = list(meshes), [list(actions) for actions in table], microbatches
        before = parameters_of("pipeline", *stages)
        untied, self._ties = untie(stages)
        mark_replaced("pipeline", before, *untied)
        fabric = fabric_of(meshes[0])
        self._here = [number for number, mesh in enumerate(meshes) if not fabric.is_outside(mesh)]
        self.stages: dict[int, nn.Module] = {number: untied[number] for number in self._here}
        if parallelize is not None:
            for number, stage in self.stages.items():
                laid = parallelize(stage, meshes[number], number)
                self.stages[number] = laid if isinstance(laid, nn.Module) else stage
        self._module = StageModules(self.stages, in_one=in_one)
        link = fabric.stage_link(meshes)
        self._link: StageLink | None = link
        self._values: InProcess | OverLink = InProcess() if link is None else OverLink(link)
        self._steps = 0
        self._seed = 0  # of this step
        self._recorder: StepRecorder | None = None  # in a dry run
        self._tied: dict[int, dict[int, ValueMeta]] = {}
        self._metas: dict[int, list[ValueMeta]] = {}  # of the values that each stage sends to the next
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._sent: set[tuple[int, int]] = set()  # forwards in this process that the next stage has not received
        self._weights: dict[tuple[int, int], WeightPart] = {}  # the second parts of split backwards, not run yet
        self._rows = [list(actions_of(row)) for row in self.table]

    # ---------------------------------------------------------------- as a module

    @property
    def module(self) -> StageModules:
        """The stages of this process as one module."""
        self._module.follow(self.stages)
        return self._module

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages in this process."""
        yield from self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names in the model; of a list of stages, after the number of their stage."""
        for path, parameter in self.module.named_parameters():
            yield canonical_name(self.module, path), parameter

    def state_dict(self) -> dict[str, Any]:
        """The state of the stages in this process, by names in the model: an entry of a checkpoint.

        Of an `nn.Sequential`, it loads into any number of stages, and into the model without stages. Of a list of
        modules, names begin with the number of the stage: it loads into lists with the same modules.

        A parameter that several stages share is stored for each of them. Its optimizer state loads only where it is
        shared by as many stages, with the same names there.

        Example:
            >>> import shardwise as sw
            >>> mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            >>> list(sw.pipeline(model, mesh["pp"], microbatches=2).state_dict())
            ['0.weight', '0.bias', '2.weight', '2.bias']
        """
        return get_model_state_dict(self.module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state by names, like `nn.Module.load_state_dict`; entries of this process's stages."""
        return load_model(self.module, state_dict, StateDictOptions(strict=strict), own=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the stages in this process, like `nn.Module.zero_grad`."""
        for stage in self.stages.values():
            stage.zero_grad(set_to_none)

    def timeline(
        self,
        forward: Times = 1.0,
        backward: Times = 2.0,
        send: float = 0.0,
        *,
        weight: Times | None = None,
        overlap: float = 1.0,
    ) -> Timeline:
        """When the actions of a step run, if stages take these times: `timeline_of` its table."""
        return timeline_of(self.table, forward, backward, send, weight=weight, overlap=overlap)

    def dry_step(
        self, inputs: Any, target: Any, loss_function: Callable[[Any, Any], torch.Tensor], *, flops_per_second: float
    ) -> PipelineEstimate:
        """Model the time, idle time and memory of a step inside `dry_run`, without computing it.

        The time of an action is that of its matrix products, convolutions and attention at a given speed, and of its
        collectives by the cost model; other operators take no time. Memory includes parameters, gradients and
        activations, but no optimizer state.

        Args:
            inputs: as in `step`, on the meshes of the dry run or on the meta device.
            target: as in `step`, likewise.
            loss_function: as in `step`.
            flops_per_second: the speed of a rank.

        Example:
            >>> import shardwise as sw
            >>> with sw.dry_run(), torch.device("meta"):
            ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            ...     model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            ...     pipe = sw.pipeline(model, mesh["pp"], microbatches=4)
            ...     batch = torch.empty(64, 256)
            ...     estimate = pipe.dry_step(batch, batch, nn.functional.mse_loss, flops_per_second=1e9)
            >>> f"{estimate.bubble:.3f}"
            '0.288'
        """
        runs = list(dry.runs.values())
        if not runs or fabric_of(self.meshes[0]) is not dry:
            raise UnsupportedError(
                "dry_step needs the dry run in which the pipeline was made", hint="make and call it inside sw.dry_run()"
            )

        def given() -> list[Any]:
            return [*(inputs if isinstance(inputs, tuple | list) else [inputs]), target]

        self._recorder = StepRecorder(runs[-1], local_memory(runs[-1], self.stages, given), flops_per_second)
        self._recorder.begin(self.table)
        try:
            self.step(inputs, target, loss_function)
            return self._recorder.estimate(self.table)
        finally:
            self._recorder = None

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip gradients by their norm over all stages, like `torch.nn.utils.clip_grad_norm_`; every rank calls it.

        A tied parameter counts once. (torch's function, given `parameters()`, has only the stages of this process.)

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm, more than 0; `inf` for the largest absolute value.
            error_if_nonfinite: raise an error if the norm is not finite.

        Returns:
            The norm before clipping, in float64 if gradients have it, else in float32. 0 on a process without stages.

        Example:
            >>> import shardwise as sw
            >>> mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            >>> pipe = sw.pipeline(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), mesh["pp"], microbatches=1)
            >>> for parameter in pipe.parameters():
            ...     parameter.grad = torch.ones_like(parameter)
            >>> pipe.clip_grad_norm_(1.0), next(pipe.parameters()).grad
            (tensor(2.), tensor([[0.5000]]))
        """
        if not norm_type > 0:
            raise UnsupportedError(
                f"clip_grad_norm_ over stages: norm_type={norm_type}", hint="use a norm_type of more than 0, or inf"
            )
        with self._failures_reported():
            totals = self._total_norms(norm_type)
            if self._link is not None:
                self._link.finish()
        if not totals:
            return torch.zeros(())
        if error_if_nonfinite and not totals[0].isfinite():
            raise PipelineError(f"the norm of the gradients over all stages is {totals[0]}, so they cannot be clipped")
        for stage, total in zip(self._here, totals, strict=True):
            torch.nn.utils.clip_grads_with_norm_(self.stages[stage].parameters(), max_norm, total)
        return totals[0]

    def _total_norms(self, norm_type: float) -> list[torch.Tensor]:
        """The norm of the gradients of all stages, on each stage of this process."""
        own = {stage: self._gradient_norm(stage, norm_type) for stage in self._here}
        metas = {stage: ValueMeta.of(norm) for stage, norm in own.items()}
        for stage, norm in own.items():
            for other, mesh in enumerate(self.meshes):
                if other != stage:
                    key = self._tied_key(len(self._ties), stage, other)
                    self._values.send(key, norm, metas[stage], metas[stage].on(mesh), (self.meshes[stage], mesh))
        totals: list[torch.Tensor] = []
        for stage, meta in metas.items():
            norms: list[Any] = []
            for other, mesh in enumerate(self.meshes):
                key = self._tied_key(len(self._ties), other, stage)
                norms.append(
                    own[stage]
                    if other == stage
                    else self._values.receive(key, meta.on(mesh), meta, (mesh, self.meshes[stage]))
                )
            parts, are_wide = torch.stack([norm.full_tensor() for norm in norms]).unbind(1)
            total = torch.linalg.vector_norm(parts, norm_type)
            totals.append(total if are_wide.any() else total.to(torch.float32))
        return totals

    def _gradient_norm(self, stage: int, norm_type: float) -> Any:
        """The norm of the gradients of a stage, and 1 if it is float64, else 0; replicated on its mesh.

        Tied parameters count on their first stage alone.
        """
        module, mesh = self.stages[stage], self.meshes[stage]
        repeated = {id(module.get_parameter(name)) for tie in self._ties for at, name in tie[1:] if at == stage}
        gradients = [p.grad for p in module.parameters() if p.grad is not None and id(p) not in repeated]
        norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        is_wide = torch.full_like(norm, norm.dtype == torch.float64)
        facts = torch.stack([norm, is_wide]).to(device_of(mesh), torch.float64)
        return DTensor.from_local(facts, mesh, [Replicate()] * mesh.ndim, run_check=False)

    # ---------------------------------------------------------------- a step

    def step(self, inputs: Any, target: Any, loss_function: Callable[[Any, Any], torch.Tensor]) -> Any:
        """Forward and backward of a batch: gradients are added to those of the parameters.

        Args:
            inputs: of the first stage, a tensor or a tuple; only its ranks read them.
            target: only the ranks of the last stage read it.
            loss_function: called with the last stage's output and a target; a mean over samples. The loss of a batch is
                the mean of the losses of its microbatches.

        Returns:
            The loss on the ranks of the last stage, None elsewhere.
        """
        if are_states_recorded():
            raise UnsupportedError(
                "captured: a step of a pipeline sends messages between ranks, and sets the random seed in each step",
                hint="call pipe.step outside of captured functions; compile the stages, in parallelize",
            )
        self._steps += 1
        self._module.follow(self.stages)
        # A draw of each step, so that random numbers go on from the state of the generator
        mesh = self.meshes[self._here[0] if self._here else 0]
        device = device_of(mesh) if fabric_of(mesh).has_values else torch.device("cpu")
        self._seed = int(torch.randint(2**62, (), device=device, generator=default_generator(device)))
        with self._failures_reported(), self._gradients_of_this_step():
            return self._run(inputs, target, loss_function)

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Inside, a failure drops the state of the step, and is reported to the other stages."""
        try:
            yield
        except PipelineError:
            self._drop()
            raise
        except Exception as error:  # before the first action or after the last
            self._drop()
            if self._link is None:
                raise
            stages = ", ".join(map(str, self._here))
            self._link.fail(f"a rank of stage {stages} failed outside of its actions: {type(error).__name__}: {error}")
            raise

    def _run(self, inputs: Any, target: Any, loss_function: Callable[[Any, Any], torch.Tensor]) -> Any:
        last = len(self.meshes) - 1
        parts = self._parts(inputs) if 0 in self.stages else []
        targets = self._parts(target) if last in self.stages else []
        step = _Step(parts, targets, loss_function)
        if isinstance(self._values, InProcess):
            self._run_all(step, self._values)
        else:
            self._run_own(step)
        self._add_tied_gradients()
        if self._link is not None:
            self._finish(self._link)
        assert not self._saved, "every forward has its backward"
        assert not self._weights, "every backward has both parts"
        return None if last not in self.stages else step.loss

    def _drop(self) -> None:
        """Discard the state of a failed step."""
        self._saved.clear()
        self._weights.clear()
        self._sent.clear()
        self._values.drop()

    def _parts(self, values: Any) -> list[tuple[Any, ...]]:
        """The microbatches of a batch."""
        given = values if isinstance(values, tuple | list) else (values,)
        columns = [_microbatches(value, self.microbatches) for value in given]
        return list(zip(*columns, strict=True))

    def _run_all(self, step: _Step, values: InProcess) -> None:
        """Run the actions of all ranks in turn, each as soon as its inputs are available."""
        at = [0] * len(self._rows)
        while any(done < len(actions) for done, actions in zip(at, self._rows, strict=True)):
            before = list(at)
            for rank, actions in enumerate(self._rows):
                if at[rank] < len(actions) and self._is_ready(actions[at[rank]], values):
                    self._attempt(actions[at[rank]], step)
                    at[rank] += 1
            assert at != before, "a schedule in which every rank waits for another"

    def _is_ready(self, action: Action, values: InProcess) -> bool:
        kind, stage, microbatch = action
        if kind == "F":
            return stage == 0 or (stage - 1, microbatch) in self._sent
        if kind == "W":
            return (stage, microbatch) in self._weights
        if (stage, microbatch) not in self._saved:
            return False
        wanted = [n for n, meta in enumerate(self._metas.get(stage, ())) if meta.needs_grad]
        return all(values.has(self._key("B", stage, microbatch, n)) for n in wanted)

    def _run_own(self, step: _Step) -> None:
        for actions in self._rows:
            for action in actions:
                if action.stage in self.stages:
                    self._attempt(action, step)

    def _attempt(self, action: Action, step: _Step) -> None:
        try:
            with contextlib.nullcontext() if self._recorder is None else self._recorder.action(action):
                if action.kind == "F":
                    with self._drawing(action):
                        self._forward(action, step)
                elif action.kind == "W":
                    self._weights.pop((action.stage, action.microbatch)).run()
                else:
                    self._backward(action)
        except PipelineError:
            raise
        except Exception as error:
            what = "loss" if step.in_loss else _NAMES[action.kind]
            text = (
                f"stage {action.stage} failed in the {what} of microbatch {action.microbatch}: "
                f"{type(error).__name__}: {error}"
            )
            if self._link is not None:
                text = self._link.fail(text)
            raise PipelineError(text) from error

    def _finish(self, link: StageLink) -> None:
        link.finish()
        for stage in self._here:
            if self._steps > 1 and stage + 1 < len(self.meshes) and self._is_first(stage):
                link.forget(f"{self._steps - 1}/{stage}")

    def _is_first(self, stage: int) -> bool:
        """Whether this process is the first rank of a stage, which publishes for it."""
        mesh = self.meshes[stage]
        return fabric_of(mesh).rank() == mesh.grid_ranks[0]

    # ---------------------------------------------------------------- one action

    def _forward(self, action: Action, step: _Step) -> None:
        _, stage, microbatch = action
        last = len(self.meshes) - 1
        arguments = list(step.inputs[microbatch]) if stage == 0 else self._received(stage, microbatch)
        result = self.stages[stage](*arguments)
        if stage == last:
            loss = step.loss_of(result, microbatch) / self.microbatches
            step.add_loss(loss.detach())
            self._saved[stage, microbatch] = _Saved(arguments, [loss])
            return
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        metas = [ValueMeta.of(output) for output in outputs]
        if len(metas) > MOST_VALUES:
            raise LayoutError(
                f"stage {stage} returns {len(metas)} values", hint=f"return at most {MOST_VALUES} from a stage"
            )
        self._publish_metas(stage, microbatch, metas)
        mesh, following = self.meshes[stage], self.meshes[stage + 1]
        for number, (output, meta) in enumerate(zip(outputs, metas, strict=True)):
            if meta.is_tensor:
                key = self._key("F", stage + 1, microbatch, number)
                with self._sending(stage + 1):
                    self._values.send(key, output, meta, meta.on(following), (mesh, following))
        self._saved[stage, microbatch] = _Saved(arguments, outputs)
        self._sent.add((stage, microbatch))

    @contextlib.contextmanager
    def _drawing(self, action: Action) -> Iterator[None]:
        """Inside, random numbers depend on the step, the stage and the microbatch, not on the order of actions.

        Ranks of a mesh that agree on a random state inside, at their first draw from a DTensor, agree on the state
        outside and on the seed of the step as well.
        """
        if not fabric_of(self.meshes[action.stage]).has_values:
            yield
            return
        devices = dict.fromkeys((torch.device("cpu"), device_of(self.meshes[action.stage])))
        generators = [default_generator(device) for device in devices]
        before, known = [generator.get_state() for generator in generators], agreements()
        for generator in generators:
            generator.manual_seed(draw_seed(self._seed, action.stage, action.microbatch))
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            fresh = forget_agreements(known)
        for mesh in fresh:
            agree_once(mesh)
            if fabric_of(mesh).one_rank and not fabric_of(mesh).is_outside(mesh):
                self._seed = fabric_of(mesh).agree(mesh, self._seed, torch.empty(0))[0]

    def _received(self, stage: int, microbatch: int) -> list[Any]:
        """The arguments of a stage, which begin a separate autograd graph."""
        meshes = self.meshes[stage - 1], self.meshes[stage]
        found = []
        for number, meta in enumerate(self._published_metas(stage - 1, microbatch)):
            if not meta.is_tensor:
                found.append(meta.value)
                continue
            key = self._key("F", stage, microbatch, number)
            value = self._values.receive(key, meta, meta.on(meshes[1]), meshes)
            found.append(value.requires_grad_() if meta.needs_grad else value)
        self._sent.discard((stage - 1, microbatch))
        return found

    def _backward(self, action: Action) -> None:
        kind, stage, microbatch = action
        arguments, outputs = self._saved.pop((stage, microbatch))
        roots, gradients = self._output_gradients(stage, microbatch, outputs)
        before = self._metas[stage - 1] if stage else []
        numbers = [number for number, meta in enumerate(before) if meta.needs_grad]
        leaves = [arguments[number] for number in numbers]
        if kind == "I":
            found, self._weights[stage, microbatch] = input_gradients(roots, gradients, leaves)
        else:
            if roots:
                torch.autograd.backward(roots, gradients)
            found = [leaf.grad for leaf in leaves]
        meshes = self.meshes[stage], self.meshes[stage - 1]
        for number, leaf, gradient in zip(numbers, leaves, found, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            key, here = self._key("B", stage - 1, microbatch, number), before[number].on(meshes[0])
            with self._sending(stage - 1):
                self._values.send(key, gradient, here, before[number], meshes)

    def _sending(self, receiver: int) -> contextlib.AbstractContextManager[None]:
        return (
            contextlib.nullcontext() if self._recorder is None else self._recorder.send(receiver, self.meshes[receiver])
        )

    def _output_gradients(self, stage: int, microbatch: int, outputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results of a forward that need gradients, and their gradients."""
        if stage == len(self.meshes) - 1:
            return outputs, [torch.ones_like(outputs[0])]
        metas, meshes = self._metas[stage], (self.meshes[stage + 1], self.meshes[stage])
        roots, gradients = [], []
        for number, (output, meta) in enumerate(zip(outputs, metas, strict=True)):
            if meta.needs_grad:
                key = self._key("B", stage, microbatch, number)
                roots.append(output)
                gradients.append(self._values.receive(key, meta.on(meshes[0]), meta, meshes))
        return roots, gradients

    def _key(self, kind: str, stage: int, microbatch: int, number: int) -> int:
        """The tag of a message to a stage, for the forward or the backward of a microbatch."""
        return ((stage * 2 + (kind == "B")) * self.microbatches + microbatch) * MOST_VALUES + number

    def _publish_metas(self, stage: int, microbatch: int, metas: list[ValueMeta]) -> None:
        """Publish the shapes and layouts that a stage sends, once in a step: they are equal for all microbatches."""
        if microbatch == 0 or stage not in self._metas:
            self._metas[stage] = metas
            if self._link is not None and self._is_first(stage):
                self._link.publish(f"{self._steps}/{stage}", metas)
        elif self._metas[stage] != metas:
            raise LayoutError(
                f"the outputs of stage {stage} differ between microbatches: {self._metas[stage]} and {metas}",
                hint="microbatches must have equal shapes and layouts",
            )

    def _published_metas(self, stage: int, microbatch: int) -> list[ValueMeta]:
        if self._link is not None and stage not in self.stages and microbatch == 0:
            self._metas[stage] = self._link.lookup(f"{self._steps}/{stage}")
        return self._metas[stage]

    # ---------------------------------------------------------------- tied parameters

    @contextlib.contextmanager
    def _gradients_of_this_step(self) -> Iterator[None]:
        """Inside, tied parameters have the gradients of this step alone, which their stages add; then all."""
        self._check_ties()
        tied = [
            self.stages[stage].get_parameter(name) for tie in self._ties for stage, name in tie if stage in self.stages
        ]
        earlier = [parameter.grad for parameter in tied]
        for parameter in tied:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(tied, earlier, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(tied, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _check_ties(self) -> None:
        """Refuse tied parameters that are frozen on some of their stages, or since another step."""
        for number, tie in enumerate(self._ties):
            own = [(stage, name) for stage, name in tie if stage in self.stages]
            if not own:
                continue
            needed = {stage: meta.needs_grad for stage, meta in self._tied_metas(number).items()}
            needed_now = needed | {stage: self.stages[stage].get_parameter(name).requires_grad for stage, name in own}
            if needed_now != needed or len(set(needed.values())) > 1:
                places = ", ".join(f"{name} of stage {stage}" for stage, name in tie)
                raise LayoutError(
                    f"the tied parameter {places} is frozen on some of its stages, or was in an earlier step",
                    hint="set requires_grad alike on all stages before the first step; make another pipeline to change "
                    "it later",
                )

    def _add_tied_gradients(self) -> None:
        """Set the gradient of each tied parameter, on all of its stages, to the sum of their gradients."""
        for number, tie in enumerate(self._ties):
            own = [(stage, name) for stage, name in tie if stage in self.stages]
            if not own or not self._tied_metas(number)[own[0][0]].needs_grad:
                continue
            parameters = {stage: self.stages[stage].get_parameter(name) for stage, name in own}
            mine = {stage: _gradient_of(parameter) for stage, parameter in parameters.items()}
            for stage, gradient in mine.items():
                for other, _ in tie:
                    if other != stage:
                        self._send_tied(number, stage, other, gradient)
            for stage, parameter in parameters.items():
                total: Any = None
                for other, _ in tie:
                    part = mine[stage] if other == stage else self._receive_tied(number, other, stage)
                    total = part if total is None else total + part
                parameter.grad = total

    def _send_tied(self, number: int, stage: int, other: int, gradient: Any) -> None:
        metas, meshes = self._tied_metas(number), (self.meshes[stage], self.meshes[other])
        self._values.send(self._tied_key(number, stage, other), gradient, metas[stage], metas[other], meshes)

    def _receive_tied(self, number: int, other: int, stage: int) -> torch.Tensor:
        metas, meshes = self._tied_metas(number), (self.meshes[other], self.meshes[stage])
        return self._values.receive(self._tied_key(number, other, stage), metas[other], metas[stage], meshes)

    def _tied_metas(self, number: int) -> dict[int, ValueMeta]:
        """The layout of a tied parameter on each of its stages. Published once."""
        known = self._tied.get(number)
        if known is None:
            tie = self._ties[number]
            known = self._tied[number] = {
                stage: ValueMeta.of(self.stages[stage].get_parameter(name))
                for stage, name in tie
                if stage in self.stages
            }
            for stage, meta in known.items():
                if self._link is not None and self._is_first(stage):
                    self._link.publish(f"tied/{number}/{stage}", meta)
            for stage, _ in tie:
                if stage not in known:
                    assert self._link is not None, "all stages are in this process"
                    known[stage] = self._link.lookup(f"tied/{number}/{stage}")
        return known

    def _tied_key(self, number: int, stage: int, other: int) -> int:
        first = 2 * len(self.meshes) * self.microbatches * MOST_VALUES
        return first + (number * len(self.meshes) + stage) * len(self.meshes) + other


def draw_seed(step: int, stage: int, microbatch: int) -> int:
    """The seed of the random numbers that a stage draws for a microbatch.

    Example:
        >>> draw_seed(0, 1, 2) == draw_seed(0, 1, 2), draw_seed(0, 1, 2) == draw_seed(0, 2, 1)
        (True, False)
    """
    digest = hashlib.blake2b(repr((step, stage, microbatch)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _gradient_of(parameter: Any) -> Any:
    """The gradient of a parameter, in the parameter's layout; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if isinstance(gradient, DTensor) and gradient._spec is not parameter._spec:
        return gradient.redistribute(placements=parameter.placements, shard_order=parameter._spec.shard_order)
    return gradient


class _Step:
    """The microbatches of a step, and its loss so far."""

    def __init__(self, inputs: list[Any], targets: list[Any], loss_function: Callable[..., torch.Tensor]) -> None:
        self.inputs, self.targets, self.loss_function = inputs, targets, loss_function
        self.loss: Any = None
        self.in_loss = False

    def loss_of(self, result: Any, microbatch: int) -> torch.Tensor:
        self.in_loss = True
        loss = self.loss_function(result, *self.targets[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            have = f"{type(loss).__name__} of {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise LayoutError(f"the loss of a microbatch must be one number, got {have}", hint="return its mean")
        self.in_loss = False
        return loss

    def add_loss(self, loss: torch.Tensor) -> None:
        self.loss = loss if self.loss is None else self.loss + loss


def _microbatches(value: Any, count: int) -> Sequence[Any]:
    """Equal parts of a batch, consecutive rows of dim 0 in every layout: inputs and targets must have the same rows.

    Parts of a sharded batch have its layout: ranks exchange rows.
    """
    if not isinstance(value, torch.Tensor) or not value.dim():
        return [value] * count
    if value.shape[0] % count:
        given = value._spec if isinstance(value, DTensor) else tuple(value.shape)
        raise LayoutError(
            f"a batch of {given} does not split into {count} equal microbatches: their mean loss would not be that of "
            "the batch",
            hint="use a batch whose size is a multiple of microbatches",
        )
    parts = value.detach().chunk(count)
    if not isinstance(value, DTensor):
        return parts
    return [part.redistribute(placements=value.placements) for part in parts]  # pyright: ignore[reportAttributeAccessIssue]
