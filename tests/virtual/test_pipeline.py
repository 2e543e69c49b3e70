"""Pipelines on virtual ranks against one device: losses, parameters, refusals, schedules in time."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.pipelines import pipeline_table, timeline_of
from shardwise.pipelines.pipeline_run import draw_seed
from shardwise.pipelines.pipeline_tables import actions_of, stage_ranks
from tests.pipelines import Block, batch, ends, language_model, lay_out, loss_of, one_device, placed, train, whole

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zb1p", 2), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(
    ("schedule", "chunks", "tied"), [(*case, number % 2 == 0) for number, case in enumerate(CASES)]
)
def test_four_stages_train_as_one_device(schedule: str, chunks: int, tied: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    model = language_model(7, tied)
    losses, parameters = one_device(model, 8)
    pipe = sw.pipeline(model, mesh["pp"], schedule=schedule, stages_per_rank=chunks, microbatches=8)
    assert len(pipe.stages) == 4 * chunks
    torch.testing.assert_close(torch.tensor(train(pipe, 8)), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.detach(), parameters[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_stages_of_data_and_tensor_parallelism_train_as_one_device(schedule: str, chunks: int) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    model = language_model(4, tied=False, checkpointed=True)
    losses, parameters = one_device(model, 8, 3)
    pipe = sw.pipeline(
        model, mesh["pp"], schedule=schedule, stages_per_rank=chunks, microbatches=4, parallelize=lay_out
    )
    torch.testing.assert_close(torch.tensor(train(pipe, 8, 3)), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter), parameters[name], rtol=1e-3, atol=1e-4)


def test_stages_of_different_sizes_and_tied_embeddings() -> None:
    """A stage on one axis of two ranks, one on a mesh of 2 x 2, one on a single rank."""
    meshes = [
        sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
        sw.DeviceMesh("cpu", [[2, 3], [4, 5]], mesh_dim_names=("dp", "tp")),
        sw.DeviceMesh("cpu", [6], mesh_dim_names=("dp",)),
    ]
    model = language_model(2, tied=True)
    losses, parameters = one_device(model, 8, 3)

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        if number == 1:
            lay_out(stage, mesh, number)
        else:
            sw.fully_shard(stage, mesh)

    pipe = sw.pipeline(model, meshes, split=["1", "3"], microbatches=2, parallelize=lay)
    torch.testing.assert_close(torch.tensor(train(pipe, 8, 3)), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter), parameters[name], rtol=1e-3, atol=1e-4)
    first, last = pipe.stages[0].get_parameter("0.weight"), pipe.stages[2].get_parameter("3.weight")
    assert torch.equal(whole(first), whole(last))


def test_gradients_are_those_of_microbatches_in_order() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    x, y = torch.randn(12, 5), torch.randn(12, 3)
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(plain(part), goal) / 4).backward()
    for schedule in ("gpipe", "1f1b"):
        model.zero_grad()
        pipe = sw.pipeline(model, mesh["pp"], split=[2], schedule=schedule, microbatches=4)
        pipe.step(x, y, nn.functional.mse_loss)
        for have, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert have.grad is not None
            assert want.grad is not None
            assert torch.equal(have.grad, want.grad)


class Two(nn.Module):
    """Gives two tensors, one of them without a gradient."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, torch.arange(x.shape[1])


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_a_stage_may_return_several_tensors() -> None:
    mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    stages = [nn.Sequential(first, Two()), Sum(), nn.Sequential(nn.ReLU(), last)]
    x = torch.randn(6, 4)
    want = nn.functional.mse_loss(last(torch.relu(first(x) * 2 + torch.arange(4))), torch.zeros(6, 4))
    want.backward()
    gradients = [parameter.grad for parameter in (*first.parameters(), *last.parameters())]
    first.zero_grad()
    last.zero_grad()
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=3)
    torch.testing.assert_close(pipe.step(x, torch.zeros(6, 4), nn.functional.mse_loss), want.detach())
    for parameter, gradient in zip((*first.parameters(), *last.parameters()), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such token")


def test_what_cannot_be_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = sw.pipeline(model, mesh["pp"], microbatches=4)
    with pytest.raises(sw.LayoutError, match="4 equal microbatches"):
        pipe.step(torch.ones(6, 4), torch.ones(6, 4), nn.functional.mse_loss)
    with pytest.raises(sw.LayoutError, match="no schedule named"):
        sw.pipeline(model, mesh["pp"], schedule="none", microbatches=2)
    with pytest.raises(sw.LayoutError, match="one stage on each rank"):
        sw.pipeline(model, mesh["pp"], stages_per_rank=2, microbatches=2)
    with pytest.raises(sw.LayoutError, match="two stages on each rank, not 3"):
        sw.pipeline(model, mesh["pp"], schedule="zbv", stages_per_rank=3, microbatches=2)
    with pytest.raises(sw.LayoutError, match="a microbatch for each of its 4 stages, not 3"):
        sw.pipeline(language_model(3, False), mesh["pp"], schedule="dualpipev", microbatches=3)
    with pytest.raises(sw.LayoutError, match="no module 7"):
        sw.pipeline(model, mesh["pp"], split=[7], microbatches=2)
    with pytest.raises(sw.LayoutError, match="does not cut 3 modules"):
        sw.pipeline(model, mesh["pp"], split=[1, 2], microbatches=2)
    with pytest.raises(sw.LayoutError, match="cannot be cut"):
        sw.pipeline(Block(), mesh["pp"], microbatches=2)
    with pytest.raises(sw.LayoutError, match="not a single axis"):
        sw.pipeline(model, mesh, microbatches=2)
    one = sw.DeviceMesh("cpu", [0, 1])
    with pytest.raises(sw.LayoutError, match="share ranks"):
        sw.pipeline(model[:2], [one, sw.DeviceMesh("cpu", [1, 2])], microbatches=2)
    with pytest.raises(sw.LayoutError, match="equal rounds"):
        sw.pipeline(language_model(7, False), mesh["pp"], schedule="interleaved", stages_per_rank=2, microbatches=5)
    lopsided = sw.pipeline(model[:2], [one, sw.DeviceMesh("cpu", [2])], microbatches=2)
    with pytest.raises(sw.PipelineError, match="a plain tensor cannot go from"):
        lopsided.step(torch.ones(6, 4), torch.ones(6, 4), nn.functional.mse_loss)
    broken = sw.pipeline(nn.Sequential(nn.Linear(4, 4), Broken()), mesh["pp"], microbatches=2)
    with pytest.raises(sw.PipelineError, match="stage 1 failed in the forward of microbatch 0: ValueError: no such"):
        broken.step(torch.ones(4, 4), torch.ones(4, 4), loss_of)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 12])
def test_idle_time_is_the_published_one(ranks: int, microbatches: int) -> None:
    """(p - 1) / (m v + p - 1), for p ranks, m microbatches and v stages on each."""
    for schedule, chunks in CASES:
        if schedule not in ("gpipe", "1f1b", "interleaved") or (chunks > 1 and microbatches % ranks):
            continue
        timeline = timeline_of(pipeline_table(schedule, ranks, microbatches, chunks), 1.0, 2.0)
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches * chunks + ranks - 1))
    held = timeline_of(pipeline_table("1f1b", ranks, microbatches)).in_flight
    assert held == {stage: min(microbatches, ranks - stage) for stage in range(ranks)}


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_messages_between_two_ranks_are_taken_in_the_order_in_which_they_are_sent(schedule: str, chunks: int) -> None:
    """Backends that do not know tags match messages by their order: that of forwards, and that of backwards."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 4), (3, 9)):
        if schedule == "dualpipev" and microbatches < 2 * ranks:
            continue
        homes = stage_ranks(schedule, ranks, ranks * chunks)
        sent: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
        taken: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
        for rank, row in enumerate(pipeline_table(schedule, ranks, microbatches, chunks)):
            for kind, stage, microbatch in actions_of(row):
                if kind == "W":
                    continue
                way, name = (1, "F") if kind == "F" else (-1, "B")
                if 0 <= stage + way < len(homes):
                    sent.setdefault((rank, homes[stage + way], name), []).append((stage + way, microbatch))
                if 0 <= stage - way < len(homes):
                    taken.setdefault((homes[stage - way], rank, name), []).append((stage, microbatch))
        assert sent == taken


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 6])
def test_idle_time_of_zero_bubble_schedules_is_the_published_one(ranks: int, more: int) -> None:
    """With F forward, B backward and W its part for weights: ZB1P (p - 1)(F + B - 2W), DualPipeV on p ranks
    (p - 1)(F&B + B - 3W), ZBV nothing between the first and the last action of a rank, if all parts take equally long.
    """

    def idle(schedule: str, microbatches: int, *times: float) -> float:
        timeline = timeline_of(pipeline_table(schedule, ranks, microbatches), times[0], times[1], weight=times[2])
        return timeline.seconds * timeline.bubble

    microbatches = 2 * ranks + more * ranks
    assert idle("zb1p", microbatches, 1, 2, 1) == pytest.approx((ranks - 1) * (1 + 2 - 2 * 1))
    assert idle("zb1p", microbatches, 2, 4, 1.5) == pytest.approx((ranks - 1) * (2 + 4 - 2 * 1.5))
    assert idle("dualpipev", microbatches, 1, 2, 1) == pytest.approx((ranks - 1) * (3 + 2 - 3 * 1))
    v = timeline_of(pipeline_table("zbv", ranks, microbatches))
    for spans in v.ranks:
        assert sum(span.stop - span.start for span in spans) == pytest.approx(spans[-1].stop - spans[0].start)
    assert v.seconds * v.bubble == pytest.approx(ranks - 1)  # ranks begin one after the other


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_in_flight_are_the_published_ones(ranks: int) -> None:
    """Of a rank, both of its stages: ZBV as many as 1F1B has (p of twice the size), DualPipeV one more."""
    for schedule, most in (("zbv", 2 * ranks), ("dualpipev", 2 * ranks + 1)):
        for row in pipeline_table(schedule, ranks, 4 * ranks):
            held = peak = 0
            for action in actions_of(row):
                held += {"F": 1, "I": 0}.get(action.kind, -1)
                peak = max(peak, held)
            assert peak <= most


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("sharded", [False, True])
def test_tied_gradients_accumulate_over_steps(schedule: str, sharded: bool) -> None:
    model = language_model(2, tied=True)
    reference = copy.deepcopy(model)
    mesh = sw.init_device_mesh("cpu", (2, 2) if sharded else (2,), mesh_dim_names=("pp", "dp") if sharded else ("pp",))
    lay = (lambda stage, mesh, number: sw.fully_shard(stage, mesh["dp"])) if sharded else None
    pipe = sw.pipeline(model, mesh["pp"], schedule=schedule, microbatches=2, parallelize=lay)
    for step in range(3):
        inputs, targets = batch(step, 8)
        loss_of(reference(inputs), targets).backward()
        pipe.step(*(placed(value, mesh) for value, mesh in zip((inputs, targets), ends(pipe), strict=True)), loss_of)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, msg=lambda m, n=name: f"{n}: {m}")


def test_a_failed_step_keeps_earlier_gradients_of_tied_parameters() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(language_model(2, tied=True), mesh["pp"], microbatches=2)
    pipe.step(*batch(0, 8), loss_of)
    before = {name: parameter.grad.clone() for name, parameter in pipe.named_parameters() if parameter.grad is not None}

    def fails(logits: Any, targets: Any) -> torch.Tensor:
        raise ValueError("the data is broken")

    with pytest.raises(sw.PipelineError, match="the data is broken"):
        pipe.step(*batch(1, 8), fails)
    for name in ("0.weight", "3.weight"):
        found = dict(pipe.named_parameters())[name].grad
        assert found is not None
        assert torch.equal(found, before[name])


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_clipped_by_the_norm_over_all_stages(sharded: bool, norm_type: float) -> None:
    model = language_model(4, tied=True)
    reference = copy.deepcopy(model)
    mesh = sw.init_device_mesh(
        "cpu", (2, 2, 2) if sharded else (2,), mesh_dim_names=("pp", "dp", "tp") if sharded else ("pp",)
    )
    pipe = sw.pipeline(model, mesh["pp"], microbatches=2, parallelize=lay_out if sharded else None)
    inputs, targets = batch(0, 8)
    loss_of(reference(inputs), targets).backward()
    pipe.step(*(placed(value, mesh) for value, mesh in zip((inputs, targets), ends(pipe), strict=True)), loss_of)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1, norm_type), want)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, msg=lambda m, n=name: f"{n}: {m}")


def test_a_norm_that_is_not_finite_is_an_error_before_gradients_change() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh["pp"], microbatches=1)
    for parameter in pipe.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    with pytest.raises(sw.PipelineError, match="norm of the gradients over all stages is inf"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(parameter.grad is not None and parameter.grad.isinf().all() for parameter in pipe.parameters())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_random_numbers_do_not_depend_on_the_order_of_actions(schedule: str) -> None:
    """Of four stages on four ranks or two, run one after the other."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))]
    model = nn.Sequential(*layers)
    reference = copy.deepcopy(model)
    stages = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
    mesh = sw.init_device_mesh("cpu", (4 // stages,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(
        model, mesh["pp"], split=["2", "4", "6"], schedule=schedule, microbatches=4,
        stages_per_rank=2 if schedule == "interleaved" else None,
    )  # fmt: skip
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    torch.manual_seed(5)
    losses = [pipe.step(x, y, nn.functional.mse_loss) for _ in range(2)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for found in losses:
        seed = int(torch.randint(2**62, ()))
        state = torch.get_rng_state()
        total = torch.zeros(())
        for number, (rows, wanted) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            for stage in range(4):
                torch.manual_seed(draw_seed(seed, stage, number))
                rows = reference[2 * stage : 2 * stage + 2](rows)
            total = total + nn.functional.mse_loss(rows, wanted) / 4
        torch.testing.assert_close(found, total)
        total.backward()
        torch.set_rng_state(state)
    assert torch.equal(after, torch.get_rng_state())
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_states_have_the_names_of_the_model(tmp_path: Path) -> None:
    """Saved by stages, and loaded into the model without stages, into others, and with another order of parameters."""
    inputs, targets = batch(1, 8)

    def stages_of(ranks: int) -> tuple[sw.Pipeline, torch.optim.Optimizer, dict[str, Any]]:
        mesh = sw.init_device_mesh("cpu", (ranks, 2), mesh_dim_names=("pp", "dp"))
        pipe = sw.pipeline(
            language_model(4, tied=False), mesh["pp"], microbatches=2,
            parallelize=lambda stage, mesh, number: sw.fully_shard(stage, mesh["dp"]),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        return pipe, optimizer, {"model": pipe, "optimizer": sw.checkpoint.NamedOptimizer(pipe.module, optimizer)}

    def steps(pipe: sw.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        pipe.step(*(placed(value, mesh) for value, mesh in zip((inputs, targets), ends(pipe), strict=True)), loss_of)
        optimizer.step()
        return {name: whole(value) for name, value in pipe.named_parameters()}

    pipe, optimizer, state = stages_of(2)
    steps(pipe, optimizer)
    sw.checkpoint.save(state, tmp_path / "stages")
    expected = steps(pipe, optimizer)
    pipe, optimizer, state = stages_of(3)
    sw.checkpoint.load(state, tmp_path / "stages")
    torch.testing.assert_close(steps(pipe, optimizer), expected)

    model = language_model(4, tied=False)
    sw.fully_shard(model, sw.init_device_mesh("cpu", (4,)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[5:]}, {"params": parameters[:5]}], lr=0.5)
    sw.checkpoint.load(
        {"model": model, "optimizer": sw.checkpoint.NamedOptimizer(model, optimizer)}, tmp_path / "stages"
    )
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2
    torch.testing.assert_close({name: whole(value) for name, value in model.named_parameters()}, expected)


def test_a_list_of_stages_is_named_by_their_numbers() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=1)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in stages.named_parameters()]
    values = {name: torch.ones_like(value) for name, value in stages.state_dict().items()}
    pipe.load_state_dict(values)
    assert stages[1].weight.detach().eq(1).all()
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        pipe.load_state_dict({"0.weight": values["0.weight"]})


def test_a_module_may_occur_several_times() -> None:
    """In one stage or in several, with parameters or without: processes have their own, and so have virtual ranks."""
    act, layer = nn.ReLU(), nn.Linear(4, 4)
    model = nn.Sequential(layer, act, nn.Linear(4, 4), act, layer, act, layer)
    reference = copy.deepcopy(model)
    mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(model, mesh["pp"], split=["3", "5"], microbatches=2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    own = [dict(stage.named_parameters()) for stage in pipe.stages.values()]
    assert [len(found) for found in own] == [4, 2, 2]
    assert len({id(parameter) for found in own for parameter in found.values()}) == 8
    for _ in range(2):
        want = nn.functional.mse_loss(reference(x), y)
        want.backward()
        torch.testing.assert_close(pipe.step(x, y, nn.functional.mse_loss), want)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=lambda m, n=name: f"{n}: {m}")


class Wraps(nn.Module):
    """Has parameters and buffers of a module below it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_stages_share_no_buffers_of_modules() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first, second = Wraps(inner), Wraps(inner)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline([first, second], mesh["pp"], microbatches=1)
    assert pipe.stages[0] is first
    assert first.inner is inner
    pipe.step(torch.randn(4, 2), torch.zeros(4, 2), nn.functional.mse_loss)
    counts = [int(stage.get_buffer("inner.1.num_batches_tracked")) for stage in pipe.stages.values()]
    assert counts == [1, 1]
    weights = [stage.get_parameter("inner.0.weight") for stage in pipe.stages.values()]
    assert weights[0] is not weights[1]
    assert torch.equal(*(weight.grad for weight in weights))


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one")


def test_a_shared_module_that_cannot_be_copied_is_refused() -> None:
    layer = NotCopied(2, 2)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(sw.UnsupportedError, match=r"NotCopied belongs to several stages.*there is only one"):
        sw.pipeline(nn.Sequential(layer, layer), mesh["pp"], microbatches=1)


def tied_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def test_an_optimizer_of_tied_parameters_that_was_made_before_the_pipeline_is_refused() -> None:
    """It would step the parameter of one of the stages, and the others would keep their values."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, untied = tied_layers(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.is_tied = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, untied)]
    pipes = [sw.pipeline(each, mesh["pp"], microbatches=2) for each in (model, untied)]
    for pipe in pipes:
        pipe.step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    with pytest.raises(sw.LayoutError, match="pipeline has replaced it"):
        optimizers[0].step()
    optimizers[1].step()
    assert sum(hasattr(parameter, "is_tied") for parameter in pipes[0].parameters()) == 2
    torch.optim.SGD(pipes[0].parameters(), lr=0.1).step()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_tied_parameters_with_hooks_are_refused(register: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = tied_layers()
    getattr(model[0].weight, register)(lambda _: None)
    with pytest.raises(sw.UnsupportedError, match=r"0\.weight of stage 0, 2\.weight of stage 1 has hooks"):
        sw.pipeline(model, mesh["pp"], split=["2"], microbatches=2)


def tied_and_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    return model


def test_frozen_tied_parameters_have_no_gradient() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(tied_and_frozen(), mesh["pp"], split=["2"], microbatches=2)
    frozen = [pipe.stages[0].get_parameter("0.weight"), pipe.stages[1].get_parameter("2.weight")]
    before = frozen[0].clone()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
    pipe.step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    optimizer.step()
    for weight in frozen:
        assert weight.grad is None
        assert torch.equal(weight, before)
    frozen[0].requires_grad_(True)
    with pytest.raises(
        sw.LayoutError, match=r"0\.weight of stage 0, 2\.weight of stage 1 is frozen on some of its stages"
    ):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_norms_that_stages_cannot_add_are_refused(norm_type: float) -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), mesh["pp"], microbatches=1)
    for parameter in pipe.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with pytest.raises(sw.UnsupportedError, match=f"norm_type={norm_type}"):
        pipe.clip_grad_norm_(1.0, norm_type)
    assert all(parameter.grad is not None and parameter.grad.eq(2).all() for parameter in pipe.parameters())


def test_norms_have_the_widest_dtype_of_the_stages() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3).double())
    mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(model, mesh["pp"], microbatches=1)
    for parameter in pipe.parameters():
        parameter.grad = torch.randn_like(parameter)
    reference = copy.deepcopy(model)
    for parameter, copied in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        copied.grad = parameter.grad.clone()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    found = pipe.clip_grad_norm_(0.1)
    assert found.dtype == want.dtype == torch.float64
    torch.testing.assert_close(found, want)
    for parameter, copied in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, copied.grad)


def test_replaced_stages_are_followed() -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh["pp"], microbatches=1)
    module, new = pipe.module, nn.Sequential()
    new.add_module("1", nn.Linear(2, 2, bias=False))
    pipe.stages[1] = new
    assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "1.weight"]
    assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    assert list(pipe.parameters())[-1] is new.get_parameter("1.weight")
    assert pipe.module is module
