"""Captured steps on real processes: the same bits as eager, with collectives on process groups."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.capture import captured
from tests.gloo.processes import ProcessPool
from tests.gloo.schedules import Event, disagreement, events_of
from tests.virtual import captured_data_parallel, captured_steps
from tests.virtual.captured_steps import compare
from tests.virtual.saved_programs import train_saved


def varied_steps(seeds: list[int]) -> list[tuple[int, int]]:
    found = []
    for seed in seeds:
        shape = (4,) if seed % 2 else (2, 2)
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        torch.manual_seed(0)
        found.append(compare(seed, mesh, calls=6))
    return found


def test_varied_steps(gloo4: ProcessPool) -> None:
    found: Any = gloo4.run(varied_steps, [0, 1], timeout=300)
    assert all(sum(ran for ran, _ in of_rank) >= 2 for of_rank in found), found


def saved_step(folder: str) -> list[str]:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    train_saved(Path(folder), mesh)
    return sorted(file.name for file in Path(folder).iterdir())


def test_a_saved_step(gloo4: ProcessPool, tmp_path: Path) -> None:
    found: Any = gloo4.run(saved_step, str(tmp_path / "step"), timeout=300)
    assert "rank3.json" in found[3]


def overlapped_steps(seeds: list[int]) -> list[tuple[int, int]]:
    captured_steps.captured = functools.partial(captured, overlap=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return varied_steps(seeds)
    finally:
        captured_steps.captured = captured


def test_overlapped_steps(gloo4: ProcessPool) -> None:
    found: Any = gloo4.run(overlapped_steps, [2, 3], timeout=300)
    assert all(sum(ran for ran, _ in of_rank) >= 2 for of_rank in found), found


def schedules_of(seed: int, overlap: bool) -> list[list[Event]]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    draw = random.Random(seed)
    job = captured_steps.Job(seed, mesh)
    step = captured(job.step, overlap=overlap)
    for _ in range(4):
        step(*job.data(draw, 8))
    return [events_of(entry.program) for entry in step.programs.values()]


@pytest.mark.parametrize("overlap", [False, True])
def test_programs_of_all_ranks_fit(gloo4: ProcessPool, overlap: bool) -> None:
    found: Any = gloo4.run(schedules_of, 5, overlap, timeout=300)
    assert len({len(programs) for programs in found}) == 1
    for programs in zip(*found, strict=True):
        assert disagreement(programs) == ""
        assert sum(map(len, programs)) > 4
        for broken in (_swapped(programs[0]), programs[0][1:], [programs[0][0]._replace(sizes=(7,)), *programs[0][1:]]):
            assert disagreement([broken, *programs[1:]])


def _swapped(events: list[Event]) -> list[Event]:
    """The events with two of them that differ in each other's place."""
    at = next(at for at in range(1, len(events)) if events[at] != events[at - 1])
    return [*events[: at - 1], events[at], events[at - 1], *events[at + 1 :]]


def data_parallel_steps(names: list[str]) -> list[tuple[int, int]]:
    found = []
    for name in names:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        over = mesh["dp"] if name == "tensor parallel" else mesh
        wanted = mesh if name in captured_data_parallel.PLANE else sw.init_device_mesh("cpu", (4,))

        def place(batch: torch.Tensor, over: sw.DeviceMesh = over) -> Any:
            return sw.distribute_tensor(batch, over, [sw.Shard(0)] * over.ndim).to_local()

        found.append(captured_data_parallel.compare(name, wanted, place))
    return found


def test_data_parallel_steps(gloo4: ProcessPool) -> None:
    names = ["tensor parallel", "hybrid", "bfloat16", "checkpointed dropout", "microbatches"]
    found: Any = gloo4.run(data_parallel_steps, names, timeout=300)
    assert all(ran >= 1 for of_rank in found for ran, _ in of_rank), found
