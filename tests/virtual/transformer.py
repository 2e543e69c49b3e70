"""A small transformer on a mesh of two axes, and the report of one step of its training."""

import torch
from torch import nn

import shardwise as sw

R, S0 = sw.Replicate(), sw.Shard(0)


class Layer(nn.Module):
    """Attention and MLP of a transformer, tensor-parallel."""

    def __init__(self, mesh: sw.DeviceMesh, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for name, dim in {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1}.items():
            layer = getattr(self, name)
            layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, [R, sw.Shard(dim)]))
        for name in ("weight", "bias"):
            setattr(self.norm, name, nn.Parameter(sw.distribute_tensor(getattr(self.norm, name).detach(), mesh)))
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def transformer(layers: int = 2, width: int = 32) -> sw.debug.Report:
    """The report of one step."""
    mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Layer(mesh, width) for _ in range(layers)))
    x = sw.distribute_tensor(torch.randn(4, 16, width), mesh, [S0, R])
    with sw.explain(candidates=True) as report:
        model(x).square().mean().backward()
        for parameter in model.parameters():  # the sum over the batch, made once for each
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return report
