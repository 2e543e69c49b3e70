"""Both libraries over torch's fake process group: one rank of many in this process, whose collectives cost nothing."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as their_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours


def start(world_size: int) -> None:
    """A fake world of this many ranks, replacing an earlier one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


class Peer:
    """One library, with the names that benchmarks need."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.mesh = ours.init_device_mesh("cpu", shape) if name == "shardwise" else their_mesh("cpu", shape)
        library: Any = ours if name == "shardwise" else theirs
        self.DTensor, self.Shard = library.DTensor, library.Shard
        self.Replicate, self.Partial = library.Replicate, library.Partial

    def local(self, placements: list, *size: int) -> torch.Tensor:
        """A DTensor whose local has this size."""
        return self.DTensor.from_local(torch.randn(*size), self.mesh, placements, run_check=False)


def peers(*shape: int) -> list[Peer]:
    """Shardwise and torch on a mesh of this shape."""
    return [Peer("shardwise", shape), Peer("torch", shape)]
