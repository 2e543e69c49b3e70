"""Kinds of stages and of their values, under every schedule, against one device that runs the microbatches in order."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.pipelines import pipeline_table
from shardwise.pipelines.pipeline_run import draw_seed
from tests.pipelines import language_model, lay_out, one_device, train, whole
from tests.torch_version import needs_torch

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"]
MICROBATCHES, ROWS, WIDTH = 4, 8, 6


def stages_of(make: Callable[[int], nn.Module], schedule: str) -> tuple[list[nn.Module], sw.DeviceMesh, int]:
    """Two ranks with one stage each, or two."""
    each = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(1)
    return [make(number) for number in range(2 * each)], mesh, each


def compare(
    make: Callable[[int], nn.Module], schedule: str, *, exact: bool = True, loss: Any = nn.functional.mse_loss,
    inputs: Sequence[torch.Tensor] | None = None, prepare: Any = None, steps: int = 3,
) -> sw.Pipeline:  # fmt: skip
    """Steps of a pipeline and of one device: the same losses and gradients, each microbatch after the other."""
    stages, mesh, each = stages_of(make, schedule)
    plain = copy.deepcopy(stages)
    pipe = sw.pipeline(
        stages, mesh["pp"], schedule=schedule, stages_per_rank=each, microbatches=MICROBATCHES, parallelize=prepare
    )
    x = list(inputs) if inputs is not None else [torch.randn(ROWS, WIDTH)]
    y = torch.randn(ROWS, WIDTH)
    for step in range(steps):
        torch.manual_seed(step)
        found = pipe.step(tuple(x), y, loss)
        torch.manual_seed(step)
        wanted: Any = 0.0
        seed = int(torch.randint(2**62, ()))
        for microbatch, parts in enumerate(zip(*(value.chunk(MICROBATCHES) for value in (*x, y)), strict=True)):
            values: Any = parts[:-1]
            for number, stage in enumerate(plain):
                torch.manual_seed(draw_seed(seed, number, microbatch))
                values = stage(*values)
                values = values if isinstance(values, tuple | list) else (values,)
            part = loss(values if len(values) > 1 else values[0], parts[-1]) / MICROBATCHES
            part.backward()
            wanted = wanted + part.detach()
        if exact:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted)
        for have, want in zip(pipe.stages.values(), plain, strict=True):
            for (name, a), b in zip(have.named_parameters(), want.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), name
                if exact and a.grad is not None:
                    assert torch.equal(a.grad, b.grad), name  # pyright: ignore[reportArgumentType]
                else:
                    torch.testing.assert_close(a.grad, b.grad)
    return pipe


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plain_stages_bit_by_bit(schedule: str) -> None:
    compare(lambda n: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)), schedule)


class Passing(nn.Module):
    """Several tensors, of which one needs no gradient and one is an integer, None, a number and a text."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x: Any, skip: Any = None, nothing: Any = None, ids: Any = None, scale: float = 1.0,
                mode: str = "first") -> Any:  # fmt: skip
        assert nothing is None
        assert mode == ("first" if self.number == 0 else "later")
        y = torch.tanh(self.layer(x)) * scale
        if skip is not None:
            y = y + skip + ids[: y.shape[1]]
        return y, x * 0.5, None, torch.arange(WIDTH + 2), 0.5, "later"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_values_of_all_kinds(schedule: str) -> None:
    compare(Passing, schedule, loss=lambda values, y: nn.functional.mse_loss(values[0], y))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_inputs_of_the_first_stage(schedule: str) -> None:
    class Joining(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.layer(sum(values))  # pyright: ignore[reportArgumentType]

    compare(Joining, schedule, inputs=[torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)])


class Cast(nn.Module):
    """Every other stage computes and returns bfloat16."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.dtype = torch.bfloat16 if number % 2 == 0 else torch.float32
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.dtype))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_different_dtypes(schedule: str) -> None:
    compare(Cast, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_in_a_stage(schedule: str) -> None:
    class Auto(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)

    compare(Auto, schedule, loss=lambda a, b: nn.functional.mse_loss(a.float(), b))


class Checkpointed(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda t: self.drop(self.inner(t)), x, use_reentrant=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpointed_stages_with_dropout(schedule: str) -> None:
    """Activations that are computed again see the masks of the forward, in both parts of a backward."""
    compare(Checkpointed, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_stage_and_unused_parameters(schedule: str) -> None:
    class Frozen(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(2))
            self.layer.requires_grad_(number != 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layer(x))

    compare(Frozen, schedule)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first stage, on one device too
@needs_torch(2, 12, "sizes of gradients of functions in Python are not known: schedules with a split backward refuse")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_run_once_for_each_microbatch(schedule: str) -> None:
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    class Hooked(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(WIDTH, WIDTH)

    def prepare(stage: nn.Module, mesh: Any, number: int) -> None:
        stage.register_full_backward_hook(count("module"))
        stage.weight.register_hook(count("weight"))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        stage.bias.register_post_accumulate_grad_hook(count("bias"))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    pipe = compare(Hooked, schedule, prepare=prepare, steps=1)
    calls = MICROBATCHES * len(pipe.stages)
    # torch runs the hook of a module whose inputs need no gradient when its output gets one
    assert counts == {"module": calls, "weight": calls, "bias": calls}


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv"])
def test_compiled_stages(schedule: str) -> None:
    def prepare(stage: nn.Module, mesh: Any, number: int) -> None:
        stage.compile(backend="aot_eager")

    compare(
        lambda n: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), schedule, prepare=prepare, exact=False, steps=2
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_meshes_of_different_sizes(schedule: str) -> None:
    """Two ranks, four ranks; in the shape of a V they come back in reverse."""
    small = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    large = sw.DeviceMesh("cpu", [[2, 3], [4, 5]], mesh_dim_names=("dp", "tp"))
    meshes = {1: [small, large], 2: [small, large, small, large]}
    each = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
    placed = [small, large, large, small] if schedule in ("zbv", "dualpipev") else meshes[each]

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        lay_out(stage, mesh, number) if mesh is large else sw.fully_shard(stage, mesh)

    model = language_model(2, tied=schedule in ("gpipe", "zbv"))
    losses, parameters = one_device(model, 8, 2)
    pipe = sw.pipeline(
        model, placed, schedule=schedule, stages_per_rank=each, microbatches=MICROBATCHES, parallelize=lay
    )
    torch.testing.assert_close(torch.tensor(train(pipe, 8, 2)), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter), parameters[name], rtol=1e-3, atol=1e-4)


def test_meshes_that_do_not_fit_the_schedule_are_refused() -> None:
    a, b = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [2, 3])
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(sw.LayoutError, match="stages 0 and 2 share ranks"):
        sw.pipeline(model, [a, b, a, b], schedule="zbv", microbatches=4)
    with pytest.raises(sw.LayoutError, match="stages 0 and 2 share no ranks"):
        sw.pipeline(model, [a, b, b, a], schedule="interleaved", stages_per_rank=2, microbatches=4)
    with pytest.raises(sw.LayoutError, match="3 meshes for 2 stages"):
        sw.pipeline(model, [a, b, a], schedule="zbv", microbatches=4)


@pytest.mark.parametrize("value", [{"a": torch.ones(2)}, [torch.ones(2)], object()])
def test_values_that_cannot_go_on_are_refused_by_name(value: Any) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, value

    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline([Odd(), nn.Linear(4, 4)], mesh["pp"], microbatches=2)
    with pytest.raises(sw.PipelineError, match=f"a stage returns a {type(value).__name__}, which cannot go"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4), nn.functional.mse_loss)


def test_a_failed_step_leaves_nothing_behind() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("once")
            return self.layer(x)

    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    for schedule in ("1f1b", "zb1p"):
        torch.manual_seed(0)
        stages = [nn.Linear(4, 4), Once()]
        pipe = sw.pipeline(stages, mesh["pp"], schedule=schedule, microbatches=4)
        x = torch.randn(8, 4)
        with pytest.raises(sw.PipelineError, match="stage 1 failed in the forward of microbatch 2: ValueError: once"):
            pipe.step(x, x, nn.functional.mse_loss)
        pipe.zero_grad()
        found = pipe.step(x, x, nn.functional.mse_loss)
        wanted = nn.functional.mse_loss(stages[1].layer(stages[0](x)), x)  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(found, wanted.detach())


def test_reentrant_checkpointing_cannot_be_split_and_says_so() -> None:
    """torch runs a backward inside of it, which adds gradients of weights at once."""

    class Reentrant(nn.Linear):
        def __call__(self, x: torch.Tensor) -> Any:
            return checkpoint(super().__call__, x, use_reentrant=True)

    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x = torch.randn(4, 4)
    for schedule in ("1f1b", "zb1p"):
        pipe = sw.pipeline([nn.Linear(4, 4), Reentrant(4, 4)], mesh["pp"], schedule=schedule, microbatches=2)
        if schedule == "1f1b":
            pipe.step(x, x, nn.functional.mse_loss)
            continue
        with pytest.raises(sw.PipelineError, match=r"stage 1 failed in the backward .*use_reentrant=False"):
            pipe.step(x, x, nn.functional.mse_loss)


def test_a_loss_that_is_no_number_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mesh["pp"], microbatches=2)
    with pytest.raises(sw.PipelineError, match=r"stage 1 failed in the loss of microbatch 0: .*must be one number"):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4), lambda a, b: a - b)


def dry_estimate(schedule: str, microbatches: int, rows: int = 8) -> Any:
    with sw.dry_run(), torch.device("meta"):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
        each = 2 if schedule in ("zbv", "dualpipev") else 1
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4 * each)))
        pipe = sw.pipeline(model, mesh["pp"], schedule=schedule, microbatches=microbatches)
        batch = torch.empty(rows * microbatches, 32)
        return pipe.dry_step(batch, batch, nn.functional.mse_loss, flops_per_second=1e6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dry_run_models_time_and_memory(schedule: str) -> None:
    if schedule == "interleaved":
        pytest.skip("as zb1p")
    estimate = dry_estimate(schedule, 8)
    product = 2 * 8 * 32 * 32 / 1e6
    assert estimate.forward == pytest.approx([product] * len(estimate.forward))
    # the first stage has no inputs that need gradients
    assert estimate.backward == pytest.approx([product, *[2 * product] * (len(estimate.forward) - 1)])
    busy = 8 * 3 * product * len(estimate.forward) - 8 * product
    assert estimate.bubble == pytest.approx(1 - busy / (4 * estimate.seconds))
    # each microbatch under way holds at least the input of the layer
    weights = 32 * 32 * 4
    for stage, count in estimate.timeline.in_flight.items():
        assert estimate.stage_bytes[stage] >= weights + (count if stage else 0) * 8 * 32 * 4
    assert estimate.draw().svg.count("<title>stage") == sum(len(spans) for spans in estimate.timeline.ranks)
    assert f"{estimate.bubble:.1%}" in str(estimate)


def test_memory_of_a_dry_run_grows_with_microbatches_under_way() -> None:
    gpipe = [dry_estimate("gpipe", count).stage_bytes for count in (4, 8, 12)]
    for stage in range(1, 3):  # the same for each microbatch more
        assert gpipe[1][stage] - gpipe[0][stage] == gpipe[2][stage] - gpipe[1][stage] > 0
    one = [dry_estimate("1f1b", count).stage_bytes for count in (8, 12)]
    assert one[0] == one[1]
    assert one[0][3] < one[0][2] < one[0][1] < gpipe[1][1]
    zbv = dry_estimate("zbv", 8)
    assert max(zbv.rank_bytes.values()) < sum(zbv.stage_bytes.values())


def test_a_dry_step_outside_of_a_dry_run_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mesh["pp"], microbatches=2)
    with pytest.raises(sw.UnsupportedError, match="dry_step needs the dry run"):
        pipe.dry_step(torch.ones(4, 4), torch.ones(4, 4), nn.functional.mse_loss, flops_per_second=1.0)
    with sw.dry_run():
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        pipe = sw.pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mesh["pp"], microbatches=2)
        with pytest.raises(sw.UnsupportedError, match="stage 0 has values"):
            pipe.dry_step(torch.ones(4, 4), torch.ones(4, 4), nn.functional.mse_loss, flops_per_second=1.0)


def test_tables_hold_each_action_once() -> None:
    for schedule in SCHEDULES:
        for row in pipeline_table(schedule, 2, 4, 2 if schedule == "interleaved" else None):
            assert len(set(map(str, row))) == len(row)
