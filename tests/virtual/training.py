"""Ten steps of the example's transformer: losses and all gradients, on one device and under a plan.

    python -m tests.virtual.training

compares every plan on every mesh, with two blocks, in both dtypes, with and without dropout. The tests do some of it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from examples.llama import PLANS, Llama

VOCABULARY = 48
MESHES = ((2,), (4,), (2, 2), (2, 4))
NAMES = ("dp", "tp")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Step = tuple[Tensor, dict[str, Tensor]]  # the loss, and the gradient of each parameter


def make_model(dtype: torch.dtype, dropout: float, blocks: int = 1) -> Llama:
    """Always the same one: uneven nowhere, eight heads of queries on four of keys."""
    torch.manual_seed(1)
    model = Llama(VOCABULARY, dim=32, blocks=blocks, heads=8, kv_heads=4, hidden=40, longest=16, dropout=dropout)
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


def largest_difference(got: list[Step], expected: list[Step]) -> float:
    """Of all numbers, in units of the largest of their tensor."""
    pairs = [(loss, want) for (loss, _), (want, _) in zip(got, expected, strict=True)]
    for (_, gradients), (_, want) in zip(got, expected, strict=True):
        pairs += [(gradients[name], want[name]) for name in want]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def main() -> None:
    """The whole sweep, a line for each run."""
    for dtype, tolerance in TOLERANCE.items():
        for dropout in (0.0, 0.1):
            model = make_model(dtype, dropout, blocks=2)
            expected = train(copy.deepcopy(model), 10)
            for name, plan in PLANS.items():
                for shape in MESHES:
                    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
                    got = train_under(plan, mesh, model, 10)
                    assert_same_steps(got, expected, rtol=tolerance, atol=tolerance)
                    off = largest_difference(got, expected)
                    print(f"{dtype}, dropout {dropout}, {name} on {shape}: largest difference {off:.1e}", flush=True)


if __name__ == "__main__":
    main()
