"""Ten steps of the example's transformer: losses and all gradients, on one device and under a plan."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from examples.llama import Llama

VOCABULARY = 48
Step = tuple[Tensor, dict[str, Tensor]]  # the loss, and the gradient of each parameter


def make_model(dtype: torch.dtype, dropout: float) -> Llama:
    """Always the same one: uneven nowhere, eight heads of queries on four of keys."""
    torch.manual_seed(1)
    model = Llama(VOCABULARY, dim=32, blocks=2, heads=8, kv_heads=4, hidden=40, longest=16, dropout=dropout)
    return model.to(dtype)


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets, four sequences of eight."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (count, 4, 9), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def whole(tensor: Any) -> Tensor:
    """The value of a DTensor that all ranks agree on, of any mesh, or of a plain tensor."""
    full = tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor
    if isinstance(full, sw.RankTensor):  # on a slice: each slice's own
        first, *others = full.tensors
        assert all(torch.equal(first, other) for other in others), "slices differ"
        full = first
    return full.detach().clone()


def train(model: nn.Module, steps: int, place: Callable[[Tensor], Tensor] = lambda t: t) -> list[Step]:
    """Losses and gradients of each step."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Step] = []
    for tokens, targets in make_batches(steps):
        loss = F.cross_entropy(model(place(tokens)).flatten(0, 1), place(targets).flatten())
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append((whole(loss), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_under(
    plan: Callable[[nn.Module, sw.DeviceMesh], nn.Module], mesh: sw.DeviceMesh, model: nn.Module, steps: int
) -> list[Step]:
    """The same with batches sharded over dp, and the model as a plan says."""
    spread = plan(copy.deepcopy(model), mesh)
    placements = [sw.Shard(0), sw.Replicate()][-mesh.ndim :]
    return train(spread, steps, lambda batch: sw.distribute_tensor(batch, mesh, placements))


def assert_same_steps(got: list[Step], expected: list[Step], **tolerance: float) -> None:
    """Every loss and gradient of every step."""
    assert len(got) == len(expected)
    for (loss, gradients), (want_loss, want) in zip(got, expected, strict=True):
        torch.testing.assert_close(loss, want_loss, **tolerance)
        assert gradients.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(gradients[name], want[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)
