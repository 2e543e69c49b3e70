"""One process in one world after another, as another rank each time: nothing of the former one is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw


@contextmanager
def world(rank: int, size: int) -> Iterator[sw.DeviceMesh]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield sw.init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def test_random_numbers_and_operators_are_those_of_the_new_rank() -> None:
    whole = torch.rand(6, generator=torch.Generator().manual_seed(3))
    matrix = torch.arange(1.0, 13).reshape(6, 2)
    for rank in (0, 2, 1):
        with world(rank, 3) as mesh:
            here = slice(2 * rank, 2 * rank + 2)
            drawn = sw.rand(
                6, generator=torch.Generator().manual_seed(3), device_mesh=mesh, placements=[sw.Shard(0)]
            ).to_local()
            assert torch.equal(drawn, whole[here])
            laid_out = sw.DTensor.from_local(matrix[here], mesh, [sw.Shard(0)])
            assert torch.equal(torch.tril(laid_out).to_local(), torch.tril(matrix)[here])
            assert torch.equal(
                laid_out.uniform_(generator=torch.Generator().manual_seed(3)).to_local(),
                torch.rand(6, 2, generator=torch.Generator().manual_seed(3))[here],
            )
