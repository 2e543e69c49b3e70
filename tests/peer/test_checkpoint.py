"""torch.distributed.checkpoint on our DTensors; checkpoints of torch's DTensor into ours and the other way round."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as their_mesh

import shardwise as sw
from tests.gloo.processes import ProcessPool
from tests.virtual.checkpoints import MESHES, full, laid_out, mesh_of, same_bits, values, zeroed

# layouts that both libraries have, as (ours, theirs) on a mesh of two axes
LAYOUTS: tuple[tuple[list[Any], list[Any]], ...] = (
    ([sw.Shard(0), sw.Replicate()], [theirs.Shard(0), theirs.Replicate()]),
    ([sw.Shard(1), sw.Shard(0)], [theirs.Shard(1), theirs.Shard(0)]),
    ([sw.Shard(0), sw.Shard(0)], [theirs.Shard(0), theirs.Shard(0)]),
    ([sw.Replicate(), sw.Replicate()], [theirs.Replicate(), theirs.Replicate()]),
)


def quietly(action: Any, *args: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about a single process and about its storages
        action(*args, **options)


@pytest.mark.parametrize(("before", "after"), list(zip(MESHES, MESHES[1:] + MESHES[:1], strict=True)))
def test_dcp_on_virtual_ranks(before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path) -> None:
    rng = random.Random(f"{before} {after}")
    tensors = values(0)
    quietly(dcp.save, {"t": laid_out(tensors, mesh_of(before), rng)}, checkpoint_id=tmp_path, no_dist=True)
    target = zeroed(laid_out(tensors, mesh_of(after), rng))
    quietly(dcp.load, {"t": target}, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bits(full(target[name]), tensor) for name, tensor in tensors.items())
    for value in target.values():
        if isinstance(value, sw.DTensor) and value.spec.is_replicated:
            assert len({bytes(part.reshape(-1).view(torch.uint8).tolist()) for part in value.to_local().tensors}) == 1


def test_dcp_refuses_a_sum(tmp_path: Path) -> None:
    x = sw.distribute_tensor(torch.ones(2), mesh_of((2,)), [sw.Partial()])
    with pytest.raises(dcp.CheckpointException) as caught:
        quietly(dcp.save, {"x": x}, checkpoint_id=tmp_path, no_dist=True)
    assert "not yet reduced" in str(caught.value)


def test_dcp_refuses_to_fill_a_view_that_shares_no_memory_with_its_base(tmp_path: Path) -> None:
    base = sw.distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh_of((4,)), [sw.Shard(0)])
    quietly(dcp.save, {"x": base.view(4, 3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        quietly(dcp.load, {"x": base.view(4, 3)}, checkpoint_id=tmp_path, no_dist=True)
    assert "shares no memory with its base" in str(caught.value)


def both_ways(folder: str) -> None:
    """On four processes: ours to ours with all kinds of layouts, ours to torch's, torch's to ours."""
    place, rng = Path(folder), random.Random(3)
    tensors = values(1)
    mesh, other = mesh_of((2, 2)), their_mesh("cpu", (2, 2))
    quietly(dcp.save, laid_out(tensors, mesh_of((4,)), rng), checkpoint_id=place / "own")
    target = zeroed(laid_out(tensors, mesh, rng))
    quietly(dcp.load, target, checkpoint_id=place / "own")
    assert all(same_bits(full(target[name]), tensor) for name, tensor in tensors.items())
    whole = torch.arange(7 * 10).float().reshape(7, 10)
    for i, (our_layout, their_layout) in enumerate(LAYOUTS):
        ours = sw.distribute_tensor(whole, mesh, our_layout)
        torchs = theirs.distribute_tensor(whole, other, their_layout)
        quietly(dcp.save, {"x": ours}, checkpoint_id=place / f"ours{i}")
        quietly(dcp.save, {"x": torchs}, checkpoint_id=place / f"theirs{i}")
        j = (i + 1) % len(LAYOUTS)
        into_theirs = theirs.distribute_tensor(torch.zeros_like(whole), other, LAYOUTS[j][1])
        into_ours = sw.distribute_tensor(torch.zeros_like(whole), mesh, LAYOUTS[j][0])
        quietly(dcp.load, {"x": into_theirs}, checkpoint_id=place / f"ours{i}")
        quietly(dcp.load, {"x": into_ours}, checkpoint_id=place / f"theirs{i}")
        assert torch.equal(into_theirs.full_tensor(), whole)
        assert torch.equal(into_ours.full_tensor(), whole)
    pair = sw.DeviceMesh("cpu", [1, 3])  # ranks outside have no part
    quietly(dcp.save, {"x": sw.distribute_tensor(whole, pair, [sw.Shard(1)])}, checkpoint_id=place / "pair")
    target = {"x": sw.distribute_tensor(torch.zeros_like(whole), mesh, [sw.Shard(0), sw.StridedShard(1, 2)])}
    quietly(dcp.load, target, checkpoint_id=place / "pair")
    assert torch.equal(target["x"].full_tensor(), whole)
    dist.barrier()


def test_dcp_between_the_libraries(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(both_ways, str(tmp_path))
