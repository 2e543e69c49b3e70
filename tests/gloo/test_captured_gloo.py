"""Captured steps on real processes: the same bits as eager, with collectives on process groups."""

from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from tests.gloo.processes import ProcessPool
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
