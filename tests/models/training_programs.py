"""One training program for one device, and the same program edited for each way of running it on a mesh.

The functions are also read as text: `edited_lines` counts the lines of a way that differ from the plain program. So
each of them holds what a user's program would hold, and nothing else.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

import shardwise as sw

__all__ = ["BY_PLAN", "MESHES", "OF_TOKENS", "PROGRAMS", "WAYS", "Program", "Task", "Trained", "edited_lines", "plain"]

Batch = dict[str, torch.Tensor]
Trained = tuple[nn.Module, torch.Tensor]
Program = Callable[["Task"], Trained]


class Task(Protocol):
    """What a program trains, and on what."""

    def model(self) -> nn.Module:
        """The model, on one device."""
        ...

    def batch(self) -> Batch:
        """A batch, on one device."""
        ...

    def dim(self, name: str) -> int:
        """The dim of a tensor of the batch along which its samples are stacked."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of the model on the batch."""
        ...


def plain(task: Task) -> Trained:
    model = task.model()
    batch = task.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def replicated_4(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = sw.distribute_module(task.model(), mesh)
    batch = task.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def replicated_2x2(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    model = sw.distribute_module(task.model(), mesh)
    batch = task.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def batch_sharded_4(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = sw.distribute_module(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k))]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def batch_sharded_2x2(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    model = sw.distribute_module(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k))] * 2) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def fully_shard_4(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = sw.fully_shard(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k))]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def fully_shard_2x2(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    model = sw.fully_shard(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k))] * 2) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def sequence_sharded_4(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = sw.distribute_module(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(1)]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def sequence_sharded_2x2(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    model = sw.distribute_module(task.model(), mesh)
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k)), sw.Zigzag(1)]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def tensor_parallel_4(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = sw.hf.parallelize(task.model(), mesh, "tp")
    batch = task.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def tensor_parallel_2x2(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sw.hf.parallelize(task.model(), mesh["tp"], "tp")
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k)), sw.Replicate()]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


def tensor_parallel_and_fully_shard(task: Task) -> Trained:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sw.fully_shard(sw.hf.parallelize(task.model(), mesh["tp"], "tp"), mesh["dp"])
    batch = {k: sw.distribute_tensor(v, mesh, [sw.Shard(task.dim(k)), sw.Replicate()]) for k, v in task.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return model, loss


MESHES = ("(4,)", "(2, 2)")
PROGRAMS: dict[str, dict[str, Program]] = {
    "replicated": dict(zip(MESHES, (replicated_4, replicated_2x2), strict=True)),
    "batch-sharded": dict(zip(MESHES, (batch_sharded_4, batch_sharded_2x2), strict=True)),
    "fully_shard": dict(zip(MESHES, (fully_shard_4, fully_shard_2x2), strict=True)),
    "sequence-sharded": dict(zip(MESHES, (sequence_sharded_4, sequence_sharded_2x2), strict=True)),
    "TP plan": dict(zip(MESHES, (tensor_parallel_4, tensor_parallel_2x2), strict=True)),
    "TP plan and fully_shard": {MESHES[1]: tensor_parallel_and_fully_shard},
}
BY_PLAN = ("TP plan", "TP plan and fully_shard")  # only for models that carry a plan
OF_TOKENS = ("sequence-sharded",)  # only for models whose batch is token ids
WAYS = tuple(PROGRAMS)


def edited_lines(program: Program) -> int:
    """How many lines of the program are new or differ from the plain one. Imports stand above and do not count."""
    before, after = (inspect.getsource(function).splitlines()[1:] for function in (plain, program))
    changes = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return sum(max(a2 - a1, b2 - b1) for tag, a1, a2, b1, b2 in changes if tag != "equal")
