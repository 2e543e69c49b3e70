"""States for checkpoint tests: random layouts of all kinds, and a model split by two axes with its optimizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.core.spec import default_shard_order

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,), (2, 2), (2, 3))
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (5, 6), (12, 8), (3, 0, 2), (4, 5, 3), (1, 9), (2, 1030))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128, torch.float8_e4m3fn)
OBJECTS = {
    "step": 3, "big": -(2**70), "rate": 0.1, "negative zero": -0.0, "infinite": float("inf"), "text": "ä/~\n",
    "none": None, "yes": True, "list": [1, (2.5, [])], "tuple": (), "$odd": {1: "one", -2: {"x": (1,)}},
    "dtype": torch.bfloat16, "size": torch.Size((2, 3)), "empty": {},
}  # fmt: skip


def mesh_of(shape: tuple[int, ...]) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each shape, of one dtype each in turn; bits at random."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, shape in enumerate(SHAPES):
        dtype = DTYPES[(i + seed) % len(DTYPES)]
        if dtype is torch.bool:
            made[f"t{i}"] = torch.randint(0, 2, shape, generator=generator).bool()
        else:
            bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            made[f"t{i}"] = bits.view(dtype).reshape(shape)
    return made


def random_layout(rng: random.Random, mesh: sw.DeviceMesh, ndim: int) -> tuple[list[Any], list[Any]]:
    placements: list[Any] = []
    for _ in range(mesh.ndim):
        choices: list[Any] = [sw.Replicate()]
        if ndim:
            choices += [sw.Shard(rng.randrange(ndim)), sw.Shard(rng.randrange(ndim))]
            choices += [sw.StridedShard(rng.randrange(ndim), rng.randint(1, 3)), sw.Zigzag(rng.randrange(ndim))]
        placements.append(rng.choice(choices))
    order = [(dim, tuple(rng.sample(axes, len(axes)))) for dim, axes in default_shard_order(placements)]
    return placements, order


def laid_out(tensors: dict[str, torch.Tensor], mesh: sw.DeviceMesh, rng: random.Random) -> dict[str, Any]:
    """The tensors on a mesh, each in a layout of its own; one in four stays plain."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if rng.random() < 0.25:
            made[name] = tensor.clone()
        else:
            placements, order = random_layout(rng, mesh, tensor.ndim)
            made[name] = sw.distribute_tensor(tensor, mesh, placements, shard_order=order)
    return made


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for value in state.values():
        for part in getattr(
            getattr(value, "_local_tensor", value), "tensors", [getattr(value, "_local_tensor", value)]
        ):
            part.zero_()
    return state


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, sw.DTensor) else value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in (a, b)]  # one element has odd strides
    flat = [t.reshape(-1).view(torch.uint8) for t in dense]
    return torch.equal(*flat)


# ---------------------------------------------------------------- a model under training


class Trained:
    """Two layers whose weights are split by tensor parallelism first and by data parallelism inside, with AdamW."""

    def __init__(self, mesh: sw.DeviceMesh, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.mesh = mesh
        self.parameters: dict[str, Any] = {}
        for name, shape, dim in (("up", (10, 6), 0), ("bias", (10,), 0), ("down", (3, 10), 1)):
            whole = torch.randn(shape, generator=generator)
            placements: list[Any] = [sw.Shard(dim)] * mesh.ndim
            order = [(dim, tuple(reversed(range(mesh.ndim))))]  # tp is major, dp minor
            self.parameters[name] = torch.nn.Parameter(sw.distribute_tensor(whole, mesh, placements, shard_order=order))
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.05)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.step))
            batch = sw.distribute_tensor(x, self.mesh, [sw.Replicate()] * self.mesh.ndim)
            hidden = torch.nn.functional.linear(batch, self.parameters["up"], self.parameters["bias"]).relu()
            loss = torch.nn.functional.linear(hidden, self.parameters["down"]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(full(loss.detach()).item())
        return losses

    def save(self, path: Path) -> None:
        sw.checkpoint.save({"model": self.parameters, "optimizer": self.optimizer, "step": self.step}, path)

    def load(self, path: Path) -> None:
        state = {"model": self.parameters, "optimizer": self.optimizer, "step": 0}
        self.step = sw.checkpoint.load(state, path).state["step"]
