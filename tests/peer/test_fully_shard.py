"""fully_shard against torch's own on the same processes: the same losses, and no more collectives or bytes a step."""

from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from bench.counting import _RECEIVED, Calls, fake_world
from tests.gloo.processes import ProcessPool
from tests.transformer import Transformer, batch, loss_of


class RealCalls(Calls):
    """Counts on real processes, where the group itself fills the outputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _RECEIVED:
            self.count += 1
            self.received += _RECEIVED[name](args, result)
        assert name in _RECEIVED or func.namespace not in ("c10d", "_c10d_functional"), name
        return result


def trained(fully_shard: Any, mesh: Any, rank: int, size: int, **options: Any) -> list[tuple[float, int, float]]:
    """Loss, collectives and bytes received of three steps."""
    torch.manual_seed(0)
    model = Transformer(3)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for step in range(3):
        tokens, targets = (t.chunk(size)[rank] for t in batch(step))
        with RealCalls() as calls:
            loss = loss_of(model(tokens), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append((loss.item(), calls.count, calls.received))
    return said


def both() -> list[tuple[Any, Any]]:
    found = []
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
        mesh = sw.init_device_mesh("cpu", (4,))
        rank = mesh.get_rank()
        ours = trained(sw.fully_shard, mesh, rank, 4, **options)
        found.append((ours, trained(theirs.fully_shard, init_device_mesh("cpu", (4,)), rank, 4, **options)))
    return found


def test_no_more_than_torch(gloo4: ProcessPool) -> None:
    for cases in gloo4.run(both, timeout=120):
        for ours, peers in cases:
            for (loss, count, received), (their_loss, their_count, their_received) in zip(ours, peers, strict=True):
                assert abs(loss - their_loss) < 1e-5
                assert count <= their_count
                assert received <= their_received


class Normed(torch.nn.Module):
    """A feed-forward block behind a norm, which computes in float32 on weights of bfloat16."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def collectives(fully_shard: Any, mesh: Any, sharded: bool) -> int:
    """Collectives of the second step in bfloat16."""
    model = torch.nn.Sequential(*(Normed() for _ in range(4)), torch.nn.RMSNorm(32)).to(torch.bfloat16)
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    given: Any = sw.DTensor.from_local(x, mesh, [sw.Shard(0)]) if sharded else x
    count = 0
    for _ in range(2):
        with Calls() as calls:
            model(given).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        count = calls.count
    return count


def test_a_sharded_batch_in_bfloat16_takes_no_more_collectives_than_torch() -> None:
    with fake_world(8):
        ours, peers = sw.init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (8,))
        expected = collectives(theirs.fully_shard, peers, False)
        assert collectives(sw.fully_shard, ours, False) == expected
        assert collectives(sw.fully_shard, ours, True) == expected
