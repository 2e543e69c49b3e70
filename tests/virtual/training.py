"""Ten steps of the example's transformer: losses and all gradients, on one device and under a plan.

    python -m tests.virtual.training
    torchrun --nproc-per-node 4 -m tests.virtual.training      # on real processes, the meshes of four ranks

compares every plan on every mesh, in both dtypes, with and without dropout, with global batches and with batches of
ranks; and once more with sizes that do not divide and tied weights. The tests do some of it.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from examples.llama import PLANS, Llama, place_on
from tests.plans import own_rows, spread_plain

VOCABULARY = 48
ROWS = 8
SHAPES = ((2,), (4,), (2, 2), (2, 4))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Step = tuple[Tensor, dict[str, Tensor]]  # the loss, and the gradient of each parameter


@dataclass(frozen=True)
class Sort:
    """Which model is trained: `odd` has sizes that do not divide, and one weight for embedding and head."""

    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    odd: bool = False
    blocks: int = 1

    def __str__(self) -> str:
        odd = ", odd sizes, tied" if self.odd else ""
        return f"{str(self.dtype).removeprefix('torch.')}, dropout {self.dropout}{odd}"


@dataclass(frozen=True)
class Case:
    """A plan on a mesh. With `plain` batches each rank has its own, and the loss is the mean over the ranks."""

    plan: str
    shape: tuple[int, ...]
    plain: bool = False

    def __str__(self) -> str:
        return f"{self.plan} on {self.shape}, {'batches of ranks' if self.plain else 'a global batch'}"


def make_model(sort: Sort) -> Llama:
    """Always the same one."""
    torch.manual_seed(1)
    if sort.odd:
        model = Llama(51, dim=40, blocks=sort.blocks, heads=4, kv_heads=4, hidden=41, longest=16, dropout=sort.dropout)
        model.head.weight = model.embedding.weight
    else:
        model = Llama(
            VOCABULARY, dim=32, blocks=sort.blocks, heads=8, kv_heads=4, hidden=40, longest=16, dropout=sort.dropout
        )
    return model.to(sort.dtype)


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets, eight sequences of eight."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (count, ROWS, 9), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def mesh_for(case: Case) -> sw.DeviceMesh:
    """The mesh of a case. A plan of two axes on a shape of one has a tensor parallel axis of one rank."""
    shape = case.shape
    if case.plan.endswith("-tp") and len(shape) == 1:
        shape = (*shape, 1)
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=PLANS[case.plan].axes[-len(shape) :])


def whole(tensor: Any) -> Tensor:
    """The value of a DTensor that all ranks agree on, of any mesh, or of a plain tensor."""
    full = tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor
    if isinstance(full, sw.RankTensor):  # on a slice: each slice's own
        first, *others = full.tensors
        assert all(torch.equal(first, other) for other in others), "slices differ"
        full = first
    return full.detach().clone()


def mean_over_ranks(loss: Any) -> Tensor:
    """Of a loss that each rank has its own of; ranks along tp have the same."""
    if isinstance(loss, sw.RankTensor):
        return torch.stack(loss.tensors).mean().detach()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train(
    model: nn.Module,
    steps: int,
    place: Callable[[Tensor], Tensor] = lambda t: t,
    value: Callable[[Any], Tensor] = whole,
) -> list[Step]:
    """Losses and gradients of each step."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Step] = []
    for tokens, targets in make_batches(steps):
        loss = F.cross_entropy(model(place(tokens)).flatten(0, 1), place(targets).flatten())
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append((value(loss), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_under(case: Case, sort: Sort, steps: int) -> list[Step]:
    """The same, parallel by a plan."""
    mesh, model = mesh_for(case), make_model(sort)
    if case.plain:
        return train(spread_plain(case.plan, model, mesh), steps, own_rows(mesh), mean_over_ranks)
    return train(PLANS[case.plan].spread(model, mesh), steps, place_on(mesh))


def assert_same_steps(got: list[Step], expected: list[Step], **tolerance: float) -> None:
    """Every loss and gradient of every step."""
    assert len(got) == len(expected)
    for (loss, gradients), (want_loss, want) in zip(got, expected, strict=True):
        torch.testing.assert_close(loss, want_loss, **tolerance)
        assert gradients.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(gradients[name], want[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_trains_as_one_device(case: Case, sort: Sort, expected: list[Step]) -> list[Step]:
    """As many steps as are expected; returns those under the plan."""
    tolerance = TOLERANCE[sort.dtype]
    got = train_under(case, sort, len(expected))
    assert_same_steps(got, expected, rtol=tolerance, atol=tolerance)
    return got


def largest_difference(got: list[Step], expected: list[Step]) -> float:
    """Of all numbers, in units of the largest of their tensor."""
    pairs = [(loss, want) for (loss, _), (want, _) in zip(got, expected, strict=True)]
    for (_, gradients), (_, want) in zip(got, expected, strict=True):
        pairs += [(gradients[name], want[name]) for name in want]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def cases(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Iterator[Case]:
    """Every plan on every mesh. Batches of ranks need a plan that averages gradients wherever there are several."""
    for plan, shape in itertools.product(PLANS, shapes):
        yield Case(plan, shape)
        if len(shape) == 1 or not plan.startswith(("tp", "dp-cp")):
            yield Case(plan, shape, plain=True)


def sorts() -> Iterator[Sort]:
    """The trained model; dropout is that of one device for global batches only."""
    for odd, (dtype, dropout) in itertools.product((False, True), itertools.product(TOLERANCE, (0.0, 0.1))):
        if not odd or dtype is torch.float64:
            yield Sort(dtype, dropout, odd, blocks=2)


def runs() -> Iterator[tuple[Sort, Case, list[Step]]]:
    """What is trained, how, and the steps of one device. Under torchrun, the meshes that have all its processes."""
    world = int(os.environ.get("WORLD_SIZE", 0))
    for sort in sorts():
        expected = train(make_model(sort), 10)
        # three ranks along dp as well, where sizes need not divide
        for case in cases((*SHAPES, (3,)) if sort.odd else SHAPES):
            drawn = sort.dropout > 0 or case.shape == (3,)  # which batches of ranks have not
            if not (case.plain and drawn) and world in (0, math.prod(case.shape)):
                yield sort, case, expected


def main() -> int:
    """The full sweep, a line for each run."""
    say = print if os.environ.get("RANK", "0") == "0" else lambda line: None
    number, failures, worst = 0, 0, dict.fromkeys(TOLERANCE, 0.0)
    for number, (sort, case, expected) in enumerate(runs(), 1):
        start = time.perf_counter()
        try:
            off = largest_difference(assert_trains_as_one_device(case, sort, expected), expected)
            worst[sort.dtype] = max(worst[sort.dtype], off)
            outcome = f"largest difference {off:.1e}"
        except Exception as error:  # the others are run all the same
            failures += 1
            outcome = f"FAILED: {str(error).strip().splitlines()[:1]}"
        say(f"{number:3} {sort}: {case}: {outcome} ({time.perf_counter() - start:.1f} s)")
    say(f"{number - failures} of {number} train as one device; largest differences {worst}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
