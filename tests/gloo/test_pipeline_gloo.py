"""Pipelines on processes: schedules against one device, stages of several ranks, and a stage that fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.gloo.processes import LOOPBACK, ProcessPool, run_processes
from tests.pipelines import language_model, lay_out, one_device, train, whole


def train_four_stages(schedule: str, chunks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    model = language_model(7, tied=True)
    pipe = sw.pipeline(model, mesh["pp"], schedule=schedule, stages_per_rank=chunks, microbatches=8)
    return train(pipe, 8), {name: value.detach() for name, value in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]
)
def test_four_stages_train_as_one_device(gloo4: ProcessPool, schedule: str, chunks: int) -> None:
    losses, parameters = one_device(language_model(7, tied=True), 8)
    answers = gloo4.run(train_four_stages, schedule, chunks, timeout=120)
    last = 0 if schedule in ("zbv", "dualpipev") else 3  # in the shape of a V it ends where it began
    assert [rank for rank, (found, _) in enumerate(answers) if found] == [last]
    torch.testing.assert_close(torch.tensor(answers[last][0]), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    seen = set()
    for _, own in answers:
        for name, value in own.items():
            seen.add(name)
            torch.testing.assert_close(value, parameters[name], rtol=1e-3, atol=1e-4)
    assert seen == set(parameters)


def train_stages_of_two(steps: int) -> tuple[list[float], dict[str, Any]]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        sw.fully_shard(stage, mesh["dp"])

    pipe = sw.pipeline(language_model(2, tied=True), mesh["pp"], microbatches=2, parallelize=lay)
    losses = train(pipe, 8, steps)
    return losses, {name: whole(value) for name, value in pipe.named_parameters()}


def test_fully_sharded_stages_with_tied_embeddings(gloo4: ProcessPool) -> None:
    losses, parameters = one_device(language_model(2, tied=True), 8, 3)
    answers = gloo4.run(train_stages_of_two, 3, timeout=120)
    for rank in (2, 3):
        torch.testing.assert_close(torch.tensor(answers[rank][0]), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for _, own in answers:
        for name, value in own.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-3, atol=1e-4)


def train_on_eight(schedule: str, chunks: int, steps: int) -> tuple[list[float], dict[str, Any]]:
    mesh = sw.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    pipe = sw.pipeline(
        language_model(4, tied=False), mesh["pp"], schedule=schedule, stages_per_rank=chunks, microbatches=2,
        parallelize=lay_out,
    )  # fmt: skip
    return train(pipe, 8, steps), {name: whole(value) for name, value in pipe.named_parameters()}


class DropsOut(nn.Module):
    """Dropout of a replicated DTensor; keeps what this rank dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.masks = list[list[bool]]()

    def forward(self, x: Any) -> Any:
        result = nn.functional.dropout(x * self.weight, 0.5)
        self.masks.append(result._local_tensor.ne(0).flatten().tolist())
        return result


def drops_out(stages: int) -> tuple[list[list[bool]], list[bool]]:
    """The masks of this rank in two steps, and a draw after them. Ranks begin with other seeds."""
    # names that no other test uses: ranks agree on a random state once for each mesh
    mesh = sw.init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=("drawing", "alike"))
    layers = [DropsOut() for _ in range(stages)]

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        for layer in stage.modules():
            if isinstance(layer, DropsOut):
                layer.weight = nn.Parameter(sw.distribute_tensor(torch.ones(16), mesh, [sw.Replicate()]))

    pipe = sw.pipeline(nn.Sequential(*layers), mesh["drawing"], microbatches=3, parallelize=lay)
    torch.manual_seed(dist.get_rank())
    x, y = (
        sw.distribute_tensor(torch.ones(3, 16), pipe.meshes[end], [sw.Replicate()], src_data_rank=None)
        for end in (0, -1)
    )

    for _ in range(2):
        pipe.step(x, y, nn.functional.mse_loss)
    mine = pipe.meshes[pipe._here[0]]
    after = nn.functional.dropout(sw.ones(16, device_mesh=mine))._local_tensor.ne(0).tolist()
    return [mask for layer in layers for mask in layer.masks], after


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_of_a_stage_draw_alike_whatever_their_seeds(gloo4: ProcessPool, stages: int) -> None:
    answers = gloo4.run(drops_out, stages, timeout=120)
    width = 4 // stages
    for rank, (masks, after) in enumerate(answers):
        assert (masks, after) == answers[rank - rank % width]
        assert len({tuple(mask) for mask in masks}) == 6  # other ones in each microbatch and step


class Hides(nn.Module):
    """A module around another, whose parameters have other names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def fails_outside_of_actions(how: str) -> tuple[float, str]:
    """The norm on a process with a stage or without, and the error of a stage that fails later."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if how == "ties":
        layers[1].weight = layers[0].weight

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> nn.Module:
        return Hides(stage) if how == "ties" and number == 1 else stage

    meshes = [sw.DeviceMesh("cpu", [rank]) for rank in (0, 1)]
    pipe = sw.pipeline(layers, meshes, microbatches=1, parallelize=lay)
    norm, x = -1.0, torch.ones(2, 2)
    if how == "clipping":
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = float(pipe.clip_grad_norm_(100.0))
        if dist.get_rank() == 1:
            next(pipe.parameters()).grad = torch.ones(2, 2).to_sparse()
    try:
        if how == "clipping":
            pipe.clip_grad_norm_(100.0)
        else:
            pipe.step(x, x, nn.functional.mse_loss)
    except Exception as error:
        return norm, str(error)
    return norm, ""


@pytest.mark.parametrize(("how", "cause"), [("clipping", "NotImplementedError"), ("ties", "AttributeError")])
def test_failures_outside_of_actions_are_reported(how: str, cause: str) -> None:
    """One process of three has no stage, and takes no part."""
    answers = run_processes(fails_outside_of_actions, 3, how, timeout=90)
    if how == "clipping":
        assert [norm for norm, _ in answers] == [pytest.approx(12**0.5), pytest.approx(12**0.5), 0]
    assert f"a rank of stage 1 failed outside of its actions: {cause}" in answers[0][1]
    assert answers[1][1]
    assert not answers[2][1]


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ValueError("the data is broken")


class Failing(nn.Module):
    """Fails in one way or another at its third microbatch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls < 3:
            return x
        if self.how == "forward":
            raise ValueError("the data is broken")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return FailingBackward.apply(x) if self.how in ("backward", "zero bubble") else x


def failing_loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("the data is broken")


def fail_in_a_stage(how: str, folder: str) -> None:
    """A stage fails; its process stays, if it can, so that no connection breaks."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    broken = Failing(how)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), broken), nn.Linear(4, 4)]
    schedule = "zb1p" if how == "zero bubble" else "1f1b"
    pipe = sw.pipeline(nn.Sequential(*modules), mesh["pp"], split=[1, 2, 3], schedule=schedule, microbatches=4)
    loss = failing_loss if how == "loss" else nn.functional.mse_loss
    rows = 7 if how == "batch" else 8
    began = time.monotonic()
    try:
        pipe.step(torch.ones(rows, 4), torch.ones(8, 4), loss)
    except (sw.PipelineError, sw.LayoutError) as error:
        (Path(folder) / os.environ["RANK"]).write_text(f"{error} (after {time.monotonic() - began:.1f} s)")
        return
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("forward", "stage 2 failed in the forward of microbatch 2: ValueError: the data is broken"),
        ("backward", "stage 2 failed in the backward of microbatch 2: ValueError: the data is broken"),
        ("zero bubble", "stage 2 failed in the backward of microbatch 2: ValueError: the data is broken"),
        ("loss", "stage 3 failed in the loss of microbatch 0: ValueError: the data is broken"),
        ("batch", "does not split into 4 equal microbatches"),
    ],
)
def test_a_failed_stage_is_named_on_all_ranks(how: str, wanted: str, tmp_path: Path) -> None:
    run_processes(fail_in_a_stage, 4, how, str(tmp_path), timeout=120)
    check_failures(tmp_path, [0, 1, 2, 3], wanted)


def check_failures(folder: Path, ranks: list[int], wanted: str) -> None:
    found = {int(path.name): path.read_text() for path in folder.iterdir() if path.name.isdigit()}
    assert sorted(found) == ranks
    for text in found.values():
        assert wanted in text


class FailsOnOneRank(nn.Linear):
    """Raises on one of the ranks of its stage; the other waits for it in a collective of the next layer."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if os.environ["RANK"] == "3":
            raise ValueError("the data is broken")
        return super().forward(input)


def fail_on_one_rank(folder: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def lay(stage: nn.Module, mesh: sw.DeviceMesh, number: int) -> None:
        for layer in stage.children():
            sw.fully_shard(layer, mesh["dp"])
        sw.fully_shard(stage, mesh["dp"])

    stages = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), FailsOnOneRank(), nn.Linear(4, 4))]
    pipe = sw.pipeline(stages, mesh["pp"], microbatches=2, parallelize=lay)
    batches = [
        sw.distribute_tensor(torch.ones(8, 4), stage, [sw.Shard(0)], src_data_rank=None)
        for stage in (pipe.meshes[0], pipe.meshes[-1])
    ]
    began = time.monotonic()
    try:
        pipe.step(*batches, nn.functional.mse_loss)
    except sw.PipelineError as error:
        (Path(folder) / os.environ["RANK"]).write_text(f"{error} (after {time.monotonic() - began:.1f} s)")


def in_a_failing_pipeline(how: str, folder: str) -> None:
    """One of four processes, which ends as processes of users do."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=4, store=dist.FileStore(f"{folder}/store", 4))
    if how == "kill":
        fail_in_a_stage("kill", folder)
    else:
        fail_on_one_rank(folder)
    sys.stdout.flush()
    sys.exit(3)


@pytest.mark.parametrize(
    ("how", "ranks", "wanted"),
    [
        ("kill", [0, 1, 3], "rank 2, which has stage 2, is gone: "),
        ("one rank", [0, 1, 2, 3], "stage 1 failed in the forward of microbatch 0: ValueError: the data is broken"),
    ],
)
def test_processes_end_with_the_stage_and_the_cause(how: str, ranks: list[int], wanted: str, tmp_path: Path) -> None:
    """They raise and end, although collectives are under way and nobody ends them."""
    program = f"from {__name__} import in_a_failing_pipeline; in_a_failing_pipeline({how!r}, {str(tmp_path)!r})"
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *(path for path in sys.path if path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "PYTHONPATH": paths}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "4"}
    logs = [(tmp_path / f"log{rank}").open("wb") for rank in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    ends = [path.read_text(errors="replace")[-2000:] for path in sorted(tmp_path.glob("log*"))]
    # a thread that still waits for a message may end its process by an abort, after everything has been raised
    assert all(
        code in ((3, -signal.SIGABRT) if rank in ranks else (-signal.SIGKILL,)) for rank, code in enumerate(codes)
    ), ends
    check_failures(tmp_path, ranks, wanted)
