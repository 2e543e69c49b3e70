"""Peak memory that dry runs predict, beside what a GPU measures: training steps of five models on a mesh of one rank.

Without a GPU only the predictions are printed. The measured peak is the caching allocator's, without what was allocated
before the model was made.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from bench.figures import figure
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, LIMIT = 3, 1.05


@dataclass(frozen=True)
class Sizes:
    """Of a transformer."""

    blocks: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 8192
    vocabulary: int = 32_000


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, causal: bool) -> None:
        super().__init__()
        head = sizes.width // sizes.heads
        self.head, self.causal = head, causal
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * head, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * head, bias=False)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module], feed_forward: nn.Module, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(sizes.width), norm(sizes.width)
        self.attention, self.feed_forward = Attention(sizes, causal), feed_forward

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(
            Block(sizes, nn.RMSNorm, GatedFeedForward(sizes.width, sizes.ffn), causal=True) for _ in range(sizes.blocks)
        )
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class ViT(nn.Module):
    def __init__(self, sizes: Sizes, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, patch, patch)
        self.blocks = nn.ModuleList(
            Block(sizes, nn.LayerNorm, mlp(sizes.width, sizes.ffn), causal=False) for _ in range(sizes.blocks)
        )
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, images: Any) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class Experts(nn.Module):
    """Every token goes through two of the experts, which are weighed."""

    def __init__(self, width: int, ffn: int, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(GatedFeedForward(width, ffn) for _ in range(count))

    def forward(self, x: Any) -> Any:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def tensor_parallel(model: Any, mesh: Any) -> None:
    plan = {
        f"blocks.{i}.{name}": style()
        for i in range(len(model.blocks))
        for names, style in (
            (("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"), ColwiseParallel),
            (("attention.o", "feed_forward.down"), RowwiseParallel),
        )
        for name in names
    }
    parallelize_module(model, mesh, plan)


def fully_sharded(model: Any, mesh: Any) -> None:
    for block in getattr(model, "blocks", ()):
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)


def both(model: Any, mesh: Any) -> None:
    tensor_parallel(model, mesh["tp"])
    fully_sharded(model, mesh["dp"])


@dataclass(frozen=True)
class Case:
    """A model, how it is made parallel, and the shapes of a batch."""

    name: str
    make: Callable[[], nn.Module]
    wrap: Callable[[Any, Any], None]
    batch: tuple[int, ...]
    target: tuple[int, ...] | None  # classes; None: the output is its own target
    axes: tuple[str, ...] = ("dp",)


LLAMA, IMAGES = Sizes(), Sizes(12, 768, 12, 12, 3072, 1000)
CASES = [
    Case("llama 1B, fully_shard", lambda: Llama(LLAMA), fully_sharded, (2, 4096), (2 * 4096,)),
    Case("llama 1B, tensor parallel", lambda: Llama(LLAMA), tensor_parallel, (2, 4096), (2 * 4096,), ("tp",)),
    Case("llama 1B, both", lambda: Llama(LLAMA), both, (2, 4096), (2 * 4096,), ("dp", "tp")),
    Case("ViT", lambda: ViT(IMAGES), fully_sharded, (64, 3, 224, 224), (64,)),
    Case(
        "convolution net",
        lambda: nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), *(Residual(256) for _ in range(8))),
        fully_sharded,
        (32, 3, 64, 64),
        None,
    ),
    Case("experts", lambda: Experts(1024, 4096), fully_sharded, (8, 1024, 1024), None),
    Case("MLP", lambda: nn.Sequential(*(mlp(2048, 8192) for _ in range(8))), fully_sharded, (8192, 2048), None),
]


def train(case: Case, mesh: Any, device: str) -> None:
    """A few steps in bfloat16 with AdamW."""
    with torch.device("meta"):
        model = case.make().to(torch.bfloat16)
    case.wrap(model, mesh)
    model.to_empty(device=device)
    if device != "meta":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = len(case.batch) == 2 and case.target is not None
    x: Any = torch.zeros(case.batch, dtype=torch.long if tokens else torch.bfloat16, device=device)
    target = None if case.target is None else torch.zeros(case.target, dtype=torch.long, device=device)
    for _ in range(STEPS):
        out = model(x)
        loss = out.float().square().mean() if target is None else F.cross_entropy(out.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def predicted(case: Case) -> int:
    with sw.dry_run() as run:
        train(case, sw.init_device_mesh("cuda", (1,) * len(case.axes), mesh_dim_names=case.axes), "meta")
    return run.peak_bytes


def measured(case: Case) -> int:
    mesh = sw.init_device_mesh("cuda", (1,) * len(case.axes), mesh_dim_names=case.axes)
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(case, mesh, "cuda")
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    foretold = {case.name: predicted(case) for case in CASES}
    if not torch.cuda.is_available():
        for name, size in foretold.items():
            print(f"  {name:28}  predicted {size / 2**30:6.2f} GiB")
        return
    with world_of_one():
        for case in CASES:
            real = measured(case)
            ratio = foretold[case.name] / real
            print(f"  {case.name:28}  {foretold[case.name] / 2**30:6.2f} of {real / 2**30:6.2f} GiB: {ratio:.3f}")
            figure(f"peak of {case.name}, off by a factor of", max(ratio, 1 / ratio), LIMIT)


if __name__ == "__main__":
    main()
