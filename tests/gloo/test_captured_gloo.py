"""Captured steps on real processes: the same bits as eager, with collectives on process groups."""

import functools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.capture import captured
from tests.gloo.processes import ProcessPool
from tests.gloo.schedules import Event, disagreement, events_of
from tests.virtual import captured_data_parallel, captured_steps, exported_programs, joined_collectives
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


def exported_step() -> list[str]:
    return exported_programs.compare(sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


def test_an_exported_program(gloo4: ProcessPool) -> None:
    found: Any = gloo4.run(exported_step, timeout=300)
    for of_rank in found:
        assert "model.up.weight" in of_rank
        assert any("_c10d_functional.all_gather_into_tensor" in name for name in of_rank)
        assert any("_c10d_functional.all_reduce" in name for name in of_rank)


def sharing_steps(names: list[str], bound: int) -> list[tuple[int, int]]:
    captured_data_parallel.captured = functools.partial(captured, share_gathers=bound)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return data_parallel_steps(names)
    finally:
        captured_data_parallel.captured = captured


@pytest.mark.parametrize("bound", [2000, 10**9])
def test_steps_that_share_gathers(gloo4: ProcessPool, bound: int) -> None:
    names = ["tensor parallel", "bfloat16", "checkpointed dropout", "accumulating", "keeping gradients"]
    found: Any = gloo4.run(sharing_steps, names, bound, timeout=300)
    assert all(ran >= 1 for of_rank in found for ran, _ in of_rank), found


def joined_steps(seeds: list[int], shape: tuple[int, ...], options: dict[str, Any]) -> list[tuple[int, list[Event]]]:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    found = []
    for seed in seeds:
        without = joined_collectives.compare(seed, mesh)
        found.append((len(events_of(without)), events_of(joined_collectives.compare(seed, mesh, **options))))
    return found


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4,), {"bucket": 10**6}),
        ((4,), {"bucket": 10**6, "bucket_sums": True, "remove_dead": True}),
        ((2, 2), {"bucket": 10**6, "remove_dead": True, "overlap": True}),
        ((2, 2), {"bucket": 300, "share_gathers": 10**6, "remove_copies": False}),
        ((4,), {"remove_dead": True}),
    ],
)
def test_joined_and_dead_collectives(gloo4: ProcessPool, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    found: Any = gloo4.run(joined_steps, [0, 1, 2, 3], shape, options, timeout=300)
    for of_ranks in zip(*found, strict=True):
        assert disagreement([events for _, events in of_ranks]) == ""
    before, after = (sum(count for count, _ in found[0]), sum(len(events) for _, events in found[0]))
    assert after < before


def refusals(max_bytes: int) -> str:
    """What this rank raises when the values of a captured step are to take no more than this."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)), mesh, [sw.Shard(0)])
    step = sw.captured(lambda t: (t.cumsum(1).sin() * t.cumsum(1).cos()).sum(), max_bytes=max_bytes)
    try:
        for _ in range(3):
            step(x)
    except sw.UnsupportedError as error:
        return str(error)
    return ""


def test_a_bound_that_one_rank_cannot_meet_is_refused_by_all(gloo4: ProcessPool) -> None:
    """The last rank has one row, the others have two."""
    said = gloo4.run(refusals, 1, timeout=120)
    needed = [int(re.findall(r"\((\d+) and", text)[0]) for text in said]
    assert needed[3] < needed[0]
    said = gloo4.run(refusals, (needed[0] + needed[3]) // 2, timeout=120)
    assert all("at the least" in text for text in said)
    assert said[3].startswith("another rank refuses")
    assert gloo4.run(refusals, needed[0], timeout=120) == [""] * 4
