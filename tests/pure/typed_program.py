"""A program that uses the public interface, for type checkers: `tests/pure/test_types.py` checks it strictly."""

import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, init_device_mesh
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def layouts(x: DTensor) -> tuple[sw.Placement, ...]:
    return x.placements


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = Block(16)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sw.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = sw.distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
    with sw.explain() as report:
        loss = model(x).square().mean()
        loss.backward()
    print(report, layouts(x), x.spec, x.device_mesh.shape)
    optimizer.zero_grad()

    @sw.captured
    def step(batch: torch.Tensor) -> torch.Tensor:
        found = model(batch).sum()
        found.backward()
        return found.detach()

    print(step(x))
    local: torch.Tensor = x.to_local()
    full: torch.Tensor = x.full_tensor()
    moved: DTensor = x.redistribute(mesh, [Replicate(), Shard(1)])
    print(local.shape, full.shape, moved.shape)
    zeros: DTensor = sw.zeros(4, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    with sw.dry_run():
        dry = sw.init_device_mesh("cuda", (512,))
        print(dry.size(), sw.rand(8, 8, device_mesh=dry).shape)
    with sw.strict(), sw.allow_implicit():
        pass
    sw.checkpoint.save({"model": model.state_dict(), "zeros": zeros}, "checkpoint")
    sw.checkpoint.load({"model": model.state_dict(), "zeros": zeros}, "checkpoint")
    try:
        sw.draw(x)
    except sw.ShardwiseError as error:
        print(error.hint)
    print(sw.cache_info().entries, sw.current_cost_model())


if __name__ == "__main__":
    main()
