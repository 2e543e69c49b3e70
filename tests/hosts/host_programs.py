"""Programs for several hosts, started by torchrun with their names. Values are those of one device.

A program that finds a difference raises, and torchrun ends with its status. Each that is done prints its name.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.demo.corpus import read_corpus
from shardwise.demo.training import Size, make_pair
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.gloo.test_moe_gloo import given
from tests.gloo.test_moe_gloo import train as train_experts
from tests.pipelines import Block, batch, language_model, loss_of, one_device, placed, train, whole

SHARED, LOCAL = (Path(os.environ.get(name, ".")) for name in ("SHARED_DISK", "LOCAL_DISK"))


def demo() -> None:
    """The demo's transformer, fully sharded between hosts and tensor parallel inside, against one device."""
    mesh = hosts_by_ranks("dp", "tp")
    size = Size(width=32, heads=mesh.shape[1] if mesh.shape[1] > 1 else 2, length=8 * mesh.shape[1], windows=12)
    pair = make_pair(size, mesh, 3)
    for texts in read_corpus().batches(3, size.windows, size.length):
        alone, sharded = pair.alone.step(texts), pair.sharded.step(texts)
        assert abs(alone - sharded) < 1e-8, (alone, sharded)


def model_on(mesh: sw.DeviceMesh, plain: nn.Sequential) -> nn.Module:
    """Blocks tensor parallel over tp, all fully sharded over dp."""
    model = copy.deepcopy(plain)
    for child in model:
        if isinstance(child, Block):
            parallelize_module(child, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            sw.fully_shard(child, mesh["dp"])
    return sw.fully_shard(model, mesh["dp"])


def training() -> None:
    """TP x FSDP on both arrangements of axes and hosts, with a checkpoint on the shared disk in the middle."""
    plain = language_model(2, tied=False)
    losses, parameters = one_device(plain, 12, 4)
    for number, names in enumerate((("dp", "tp"), ("tp", "dp"))):
        mesh = hosts_by_ranks(*names)
        if names[0] == "tp":
            mesh = mesh["dp", "tp"]
        model = model_on(mesh, plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = steps_of(model, optimizer, mesh, 0, 2)
        path = SHARED / f"training-{number}"
        checkpoint.save({"model": model, "optimizer": optimizer}, path)
        assert not checkpoint.verify(path)
        again = model_on(mesh, language_model(2, tied=False))
        fresh = torch.optim.AdamW(again.parameters(), lr=1e-2)
        checkpoint.load({"model": again, "optimizer": fresh}, path)
        found += steps_of(again, fresh, mesh, 2, 4)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        for name, value in again.named_parameters():
            torch.testing.assert_close(whole(value), parameters[name], rtol=1e-3, atol=1e-4)


def steps_of(model: nn.Module, optimizer: Any, mesh: sw.DeviceMesh, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        inputs, targets = (placed(value, mesh) for value in batch(step, 12))
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, sw.DTensor) else loss).item())
    return losses


def pipeline() -> None:
    """One stage on each rank, so that some are neighbours on a host and others not."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    model = language_model(dist.get_world_size(), tied=True)
    losses, parameters = one_device(model, 8, 4)
    pipe = sw.pipeline(model, mesh["pp"], microbatches=4)
    found = train(pipe, 8, 4)
    if found:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for name, value in pipe.named_parameters():
        torch.testing.assert_close(value.detach(), parameters[name], rtol=1e-3, atol=1e-4)


def experts() -> None:
    """Tokens of all ranks to experts of all ranks."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    wanted = train_experts(given(8), 2, None, None)
    layouts = [sw.Shard(0), sw.Replicate(), sw.Shard(0), sw.Shard(0)]
    tensors = [sw.distribute_tensor(t, mesh, [layout]) for t, layout in zip(given(8), layouts, strict=True)]
    for value, plain in zip(train_experts(tensors, 2, None, None), wanted, strict=True):
        torch.testing.assert_close(value.full_tensor(), plain, rtol=1e-4, atol=1e-5)


def wrong() -> None:
    """A difference on one rank alone: what a failure looks like from outside."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise AssertionError("a value differs")
    dist.barrier()


def hosts_by_ranks(*names: str) -> sw.DeviceMesh:
    """The mesh of hosts by the ranks of each."""
    inside = int(os.environ["LOCAL_WORLD_SIZE"])
    return sw.init_device_mesh("cpu", (dist.get_world_size() // inside, inside), mesh_dim_names=names)


PROGRAMS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (demo, training, pipeline, experts, wrong)
}  # fmt: skip


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        torch.manual_seed(0)
        PROGRAMS[name]()
        dist.barrier()
        print(f"{name} done on rank {dist.get_rank()} of {socket.gethostname()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
