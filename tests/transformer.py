"""A small transformer for tests of parallel modules, and its training against the same on one device."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 11, 8, 20, 2, 6


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout after each."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Logits of the next token."""

    def __init__(self, blocks: int = 2, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def shard_all(model: Transformer, mesh: sw.DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        sw.fully_shard(block, mesh, **options)
    return sw.fully_shard(model, mesh, **options)


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor()
    return full.tensors[0] if isinstance(full, sw.RankTensor) else full


def mean_loss(loss: Any) -> torch.Tensor:
    """The loss of the global batch: of DTensors it is that, else the mean over the ranks."""
    if isinstance(loss, sw.DTensor):
        return loss.full_tensor()
    if isinstance(loss, sw.RankTensor):
        return torch.stack(loss.tensors).mean()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def assert_same(model: nn.Module, reference: nn.Module, of: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        have, want = of(ours[name]), of(expected)
        assert (have is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(
                whole(have), want.detach(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_trains_as_one_device(
    wrap: Callable[[Transformer], Any],
    place: Callable[[torch.Tensor], Any],
    *,
    dropout: float,
    steps: int = 10,
    tied: bool = False,
    prepare: Callable[[Transformer], None] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    torch.manual_seed(1)
    reference = Transformer(dropout=dropout, tied=tied).to(dtype)
    model = copy.deepcopy(reference)
    if prepare is not None:
        prepare(model)
    wrap(model)
    optimizers = [
        (torch.optim.AdamW if dtype is torch.float64 else torch.optim.SGD)(m.parameters(), lr=1e-2)
        for m in (reference, model)
    ]
    for step in range(steps):
        tokens, targets = batch(step)
        torch.manual_seed(step)
        expected = loss_of(reference(tokens), targets)
        torch.manual_seed(step)
        loss = loss_of(model(place(tokens)), place(targets))
        value = mean_loss(loss)
        assert abs(value.item() - expected.item()) < tolerance
        for optimizer, result in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            result.backward()
        assert_same(model, reference, lambda parameter: parameter.grad, tolerance)
        for optimizer in optimizers:
            optimizer.step()
    if dtype is torch.float64:  # Adam makes large steps of gradients that are next to nothing
        assert_same(model, reference, lambda parameter: parameter.detach(), tolerance)


def tensor_parallel(model: Transformer, mesh: sw.DeviceMesh) -> None:
    """Feed-forward and attention weights split by hand."""
    for block in model.blocks:
        for layer, weight, bias in (
            *((layer, sw.Shard(0), sw.Shard(0)) for layer in (block.q, block.k, block.v, block.up)),
            *((layer, sw.Shard(1), sw.Replicate()) for layer in (block.out, block.down)),
        ):
            layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, [weight]))
            layer.bias = nn.Parameter(sw.distribute_tensor(layer.bias.detach(), mesh, [bias]))
