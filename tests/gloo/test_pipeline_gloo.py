"""Pipelines on processes: schedules beside one device, stages of several ranks, and a stage that fails."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.gloo.processes import ProcessPool, run_processes
from tests.pipelines import language_model, lay_out, loss_of, one_device, train, whole


def train_four_stages(schedule: str, chunks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    model = language_model(7, tied=True)
    pipe = sw.pipeline(model, mesh["pp"], schedule=schedule, stages_per_rank=chunks, microbatches=4)
    return train(pipe, 8), {name: value.detach() for name, value in pipe.named_parameters()}


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_four_stages_train_as_one_device(gloo4: ProcessPool, schedule: str, chunks: int) -> None:
    losses, parameters = one_device(language_model(7, tied=True), 8)
    answers = gloo4.run(train_four_stages, schedule, chunks, timeout=120)
    assert [found for found, _ in answers[:3]] == [[], [], []]
    torch.testing.assert_close(torch.tensor(answers[3][0]), torch.tensor(losses), rtol=1e-4, atol=1e-5)
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


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the data is broken")


def fail_in_a_stage() -> tuple[str, float]:
    """A stage raises; its process stays, so that no connection breaks."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    modules = [nn.Linear(4, 4), nn.Linear(4, 4), Failing(), nn.Linear(4, 4)]
    pipe = sw.pipeline(nn.Sequential(*modules), mesh["pp"], split=[1, 2, 3], microbatches=4)
    began = time.monotonic()
    try:
        pipe.step(torch.ones(8, 4), torch.ones(8, 4), loss_of)
    except sw.PipelineError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("nothing was raised")


def test_a_failed_stage_is_named_on_all_ranks() -> None:
    for text, seconds in run_processes(fail_in_a_stage, 4, timeout=90):
        assert text == "stage 2 failed in the forward of microbatch 0: ValueError: the data is broken"
        assert seconds < 30
