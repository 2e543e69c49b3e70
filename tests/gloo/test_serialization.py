"""DTensors between processes: each rank loads its own part; a process that is not a rank raises."""

import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from tests.gloo.processes import ProcessPool

S0, R = sw.Shard(0), sw.Replicate()


def loaded_from_rank_0(folder: str) -> tuple[str, str, list[float], list[float]]:
    """What a rank gets of files that rank 0 wrote of a sharded and of a replicated tensor, and of its own."""
    mesh = sw.init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    sharded = sw.distribute_tensor(torch.arange(8.0), mesh, [S0])
    replicated = sw.distribute_tensor(torch.arange(3.0), mesh)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.save(sharded, f"{folder}/own-{rank}.pt")
        if rank == 0:
            torch.save({"model": {"weight": sharded}}, f"{folder}/sharded.pt")
            torch.save(replicated, f"{folder}/replicated.pt")
    assert len(warned) == (2 if rank == 0 else 1)
    assert f"only the local tensor of rank {rank}" in str(warned[0].message)
    dist.barrier()
    errors = []
    for weights_only in (True, False):
        try:
            torch.load(f"{folder}/sharded.pt", weights_only=weights_only)
            errors.append("")
        except sw.CheckpointError as error:
            errors.append(str(error))
    again = torch.load(f"{folder}/replicated.pt")
    own = torch.load(f"{folder}/own-{rank}.pt")
    return errors[0], errors[1], again.full_tensor().tolist(), own.full_tensor().tolist()


def test_a_part_is_loaded_by_the_rank_that_holds_it(gloo4: ProcessPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = gloo4.run(loaded_from_rank_0, folder, timeout=120)
        for rank, (by_weights, by_anything, replicated, own) in enumerate(said):
            assert (replicated, own) == ([0.0, 1.0, 2.0], [float(i) for i in range(8)])
            for error in (by_weights, by_anything):
                assert ("rank 0 has, and this is rank" in error and "full_state_dict" in error) == (rank != 0)
        looked_at = torch.load(Path(folder) / "own-2.pt")  # by a process that is no rank
        assert looked_at.to_local().tolist() == [4.0, 5.0]


def collectives_on_dtensors() -> list[str]:
    mesh = sw.init_device_mesh("cpu", (4,))
    tensor = sw.distribute_tensor(torch.arange(8.0), mesh, [S0])
    said = []
    for call in (
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_gather([torch.empty(8) for _ in range(4)], tensor),
    ):
        try:
            call()
            said.append("")
        except sw.UnsupportedError as error:
            said.append(str(error))
    return said


def test_collectives_of_process_groups_do_not_take_dtensors(gloo4: ProcessPool) -> None:
    for said in gloo4.run(collectives_on_dtensors, timeout=120):
        assert all("to_local()" in text for text in said), said


class Rows(Dataset[Any]):
    """Rows of a DTensor; of its local, or gathered."""

    def __init__(self, gathered: bool) -> None:
        self.table = sw.distribute_tensor(torch.arange(8.0), sw.init_device_mesh("cpu", (4,)), [S0])
        self.table.full_tensor()  # so that the way there is known before the process is forked
        self.gathered = gathered

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.table.full_tensor()[i] if self.gathered else self.table.to_local()[i]


def rows_in_workers() -> tuple[list[float], str]:
    local = [row.item() for row in DataLoader(Rows(False), None, num_workers=1, multiprocessing_context="fork")]
    try:
        list(DataLoader(Rows(True), None, num_workers=1, multiprocessing_context="fork"))
        said = ""
    except sw.MeshError as error:
        said = str(error)
    after = Rows(True)[1].item()  # the parent is a rank still
    return [*local, after], said


class CollectingRows(Rows):
    """Frees, in the worker, what only garbage refers to."""

    def __getitem__(self, i: int) -> torch.Tensor:
        gc.collect()
        return super().__getitem__(i)


def rows_after_another_world(path: str) -> list[float]:
    """Garbage of the process that is forked holds a group of a world that it has left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    garbage: list[Any] = [sw.init_device_mesh("cpu", (2, 2)).get_group(0)]
    garbage.append(garbage)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
    rows = CollectingRows(False)
    gc.collect()
    gc.disable()
    try:
        del garbage
        return [row.item() for row in DataLoader(rows, None, num_workers=1, multiprocessing_context="fork")]
    finally:
        gc.enable()


def test_a_worker_that_is_forked_in_a_second_world(gloo4: ProcessPool, tmp_path: Path) -> None:
    rows = gloo4.run(rows_after_another_world, str(tmp_path / "store"), timeout=120)
    assert rows == [[2.0 * rank, 2.0 * rank + 1] for rank in range(4)]


def test_a_forked_worker_is_no_rank(gloo4: ProcessPool) -> None:
    for rank, (values, said) in enumerate(gloo4.run(rows_in_workers, timeout=120)):
        assert values == [2.0 * rank, 2.0 * rank + 1, 1.0]
        assert "forked" in said
        assert "full_tensor() or to_local()" in said
