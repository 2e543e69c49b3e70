"""A Llama-style transformer in plain PyTorch, and plans that spread it over a mesh of devices.

    python examples/llama.py --plan tp --mesh 4                               # four ranks inside this process
    python examples/llama.py --plan fsdp-tp --mesh 2,4                        # two by four
    torchrun --nproc-per-node 4 examples/llama.py --plan fsdp-tp --mesh 2,2   # real processes, the same file
    python examples/llama.py --plan dp-cp-tp --mesh 2,2,2 --length 512        # long sequences, over cp in zigzags

The model knows nothing of Shardwise. It learns to read this file, and the losses stand beside those of one device.
"""

import argparse
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# ---------------------------------------------------------------- the model


class Attention(nn.Module):
    """Grouped-query attention: several heads of queries share one of keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: pairs of features, turned by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.attention, self.feed_forward = Attention(dim, heads, kv_heads), FeedForward(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 256,
        dim: int = 64,
        blocks: int = 2,
        heads: int = 8,
        kv_heads: int = 4,
        hidden: int = 192,
        longest: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden, dropout) for _ in range(blocks))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(longest), 10000.0 ** (-torch.arange(half) / half))[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


# ---------------------------------------------------------------- the plans


def tensor_parallel(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """Heads and hidden features are split over tp; a sum after each half of a block."""
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(use_local_output=False)
    plan = {
        "embedding": rows,
        "blocks.*.attention.[qkv]*": columns,
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward.gate": columns,
        "blocks.*.feed_forward.up": columns,
        "blocks.*.feed_forward.down": rows,
        "head": columns,
    }
    parallelize_module(model, mesh["tp"], plan)
    return sw.distribute_module(model, mesh)  # what the plan does not name, on every rank


def sequence_parallel(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """As above, and between the halves of a block each rank keeps a part of the sequence."""
    columns = ColwiseParallel(use_local_output=False)
    onto_sequence = RowwiseParallel(output_layouts=sw.Shard(1), use_local_output=False)
    whole = PrepareModuleInput(input_layouts=sw.Shard(1), desired_input_layouts=sw.Replicate())
    whole_of_three = PrepareModuleInput(
        input_layouts=(sw.Shard(1), None, None), desired_input_layouts=(sw.Replicate(), None, None)
    )
    plan = {
        "embedding": onto_sequence,
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention": whole_of_three,
        "blocks.*.attention.[qkv]*": columns,
        "blocks.*.attention.out": onto_sequence,
        "blocks.*.feed_forward": whole,
        "blocks.*.feed_forward.gate": columns,
        "blocks.*.feed_forward.up": columns,
        "blocks.*.feed_forward.down": onto_sequence,
        "norm": SequenceParallel(),
        "head": columns,
    }
    parallelize_module(model, mesh["tp"], plan)
    return sw.distribute_module(model, mesh)


def fully_sharded(model: Llama, mesh: sw.DeviceMesh) -> nn.Module:
    """Each rank keeps a part of everything, and has a block whole while that computes."""
    sw.distribute_module(model, mesh)  # for the tables of angles, which batches as DTensors meet
    return shard_blocks(model, mesh)


def fully_sharded_tensor_parallel(model: Llama, mesh: sw.DeviceMesh) -> nn.Module:
    """What tensor parallelism leaves of a block on a rank is shared out over dp."""
    sequence_parallel(model, mesh)
    return shard_blocks(model, mesh["dp"])


def shard_blocks(model: Llama, mesh: sw.DeviceMesh) -> nn.Module:
    for block in model.blocks:
        sw.fully_shard(block, mesh)
    return sw.fully_shard(model, mesh)  # what is left: the embedding, the last norm and the head


def data_parallel(model: Llama, mesh: sw.DeviceMesh) -> nn.Module:
    """Each rank keeps everything; gradients are added up while backward runs."""
    sw.distribute_module(model, mesh)
    return sw.replicate(model, mesh)


def data_tensor_parallel(model: Llama, mesh: sw.DeviceMesh) -> nn.Module:
    tensor_parallel(model, mesh)
    return sw.replicate(model, mesh["dp"])


class Plan(NamedTuple):
    """What spreads a model, and the names of axes; of a mesh with fewer axes, the last of them."""

    spread: Callable[[Llama, sw.DeviceMesh], nn.Module]
    axes: tuple[str, ...] = ("dp", "tp")


PLANS = {
    "tp": Plan(tensor_parallel),
    "tp+sp": Plan(sequence_parallel),
    "fsdp": Plan(fully_sharded, ("replicas", "dp")),
    "fsdp-tp": Plan(fully_sharded_tensor_parallel),
    "ddp": Plan(data_parallel, ("replicas", "dp")),
    "ddp-tp": Plan(data_tensor_parallel),
    "dp-cp-tp": Plan(tensor_parallel, ("dp", "cp", "tp")),
}


# ---------------------------------------------------------------- training


def batches(steps: int, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of this file, and the same moved on by one letter."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        window = text[starts + torch.arange(length + 1)]
        yield window[:, :-1], window[:, 1:]


def train(
    model: nn.Module, data: Iterator[tuple[Tensor, Tensor]], place: Callable[[Tensor], Tensor] = lambda t: t
) -> Iterator[float]:
    """The loss of each step. `place` puts a batch where it belongs."""
    torch.manual_seed(0)  # dropout: the numbers of one device, on every mesh
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for tokens, targets in data:
        logits = model(place(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), place(targets).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def place_on(mesh: sw.DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Puts one global batch over the ranks that see different data.

    So the loss is that of the whole batch, and dropout draws one device's numbers. Where each rank reads its own plain
    batch, as under torch, `fully_shard` and `replicate` average the gradients instead, and no table need be a DTensor.
    Tokens over cp lie in zigzags, so that the causal masks leave every rank as much to compute.
    """
    by_name = {"tp": sw.Replicate(), "cp": sw.Zigzag(1)}
    placements = [by_name.get(name, sw.Shard(0)) for name in mesh.mesh_dim_names or ()]
    return lambda batch: sw.distribute_tensor(batch, mesh, placements)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", choices=PLANS, nargs="+", default=["tp"], help="one, or several to compare")
    parser.add_argument("--mesh", type=sizes, help="sizes of the axes, as 2,4; by default all ranks")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", 4))
    shape = options.mesh or ((2, ranks // 2) if any(name.endswith("-tp") for name in options.plan) else (ranks,))
    data = (options.steps, 8, options.length)
    torch.manual_seed(0)
    model = Llama(longest=max(options.length, 64), dropout=options.dropout)
    say = print if os.environ.get("RANK", "0") == "0" else lambda line: None

    runs = [train(copy.deepcopy(model), batches(*data))]
    for name in options.plan:
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=PLANS[name].axes[-len(shape) :])
        say(f"{name} on {mesh}")
        spread = PLANS[name].spread(copy.deepcopy(model), mesh)
        runs.append(train(spread, batches(*data), place_on(mesh)))
    say("".join(f"{title:12}" for title in ("step", "one device", *options.plan)))
    for step, losses in enumerate(zip(*map(list, runs), strict=True)):
        say(f"{step:<12}" + "".join(f"{loss:<12.6f}" for loss in losses))


if __name__ == "__main__":
    main()
