"""Random mixtures of experts against a loop over tokens and choices on plain tensors.

    python -m tests.virtual.expert_programs --trials 500 --seed 0

Meshes, layouts of tokens, ids and weights, dtypes of ids and weights, numbers of tokens, experts and choices are drawn,
and whether `dispatch` or `back` gets the weights: sums that wait for a reduction, experts that nobody chose, a token
that goes to one expert twice, and no tokens at all. Values and gradients are compared, in every third trial second
derivatives too.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard

MESHES = {
    (1,): ("ep",), (3,): ("ep",), (4,): ("ep",), (5,): ("ep",), (8,): ("ep",),
    (2, 2): ("dp", "ep"), (2, 3): ("ep", "tp"), (2, 2, 2): ("dp", "ep", "tp"),
}  # fmt: skip
INTEGERS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def by_loop(x: Any, ids: Any, weights: Any, experts: Any) -> torch.Tensor:
    """What a mixture is, written down."""
    rows = []
    for token, own in enumerate(ids.tolist()):
        made = [torch.tanh(x[token] @ experts[expert]) for expert in own]
        if weights is not None:
            made = [(row * weights[token, turn]).to(row.dtype) for turn, row in enumerate(made)]
        rows.append(sum(made[1:], made[0]))
    return torch.stack(rows) if rows else x * 1


def by_dispatch(x: Any, ids: Any, weights: Any, experts: Any, early: bool) -> Any:
    """The same by `dispatch`; torch has no derivative of grouped products without rows.

    `early`: weights are given to `dispatch`, otherwise to `back`.
    """
    rows, back = sw.moe.dispatch(x, ids, experts.shape[0], weights=weights if early else None)
    made = torch.tanh(F.grouped_mm(rows, experts, offs=back.offs)) if x.shape[0] else rows * 1
    return back(made) if early else back(made, weights)


def random_layout(rng: random.Random, mesh: sw.DeviceMesh, dims: tuple[int, ...]) -> list[Any]:
    return [Shard(rng.choice(dims)) if rng.random() < 0.75 else Replicate() for _ in mesh.shape]


def random_ids(rng: random.Random, tokens: int, experts: int) -> torch.Tensor:
    """Different experts for each token, or any, sometimes a few of them alone."""
    choices = rng.choice((1, 1, 2, 3, experts))
    if rng.random() < 0.4 and choices <= experts:
        return torch.rand(tokens, experts).topk(choices)[1]
    return torch.randint(0, experts, (tokens, choices)).clamp(max=rng.choice((experts - 1, experts // 2, 0)))


def check(seed: int) -> None:
    """One mixture."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = rng.choice(sorted(MESHES))
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=MESHES[shape])
    tokens, experts, width = rng.choice((0, 1, 2, 3, 7, 16, 33)), rng.choice((1, 2, 3, 4, 5, 8, 11)), rng.choice((4, 8))
    x, stacked = torch.randn(tokens, width), torch.randn(experts, width, width)
    ids = random_ids(rng, tokens, experts)
    ids = ids.to(rng.choice(INTEGERS))
    given = torch.rand(tokens, ids.shape[1], dtype=rng.choice((torch.float32, torch.float64)))
    weights = given if rng.random() < 0.85 else None
    placed = random_layout(rng, mesh, (0, 0, 1))
    laid = sw.distribute_tensor(x, mesh, placed)
    whole = [axis for axis, placement in enumerate(placed) if placement.is_replicate()]
    if whole and rng.random() < 0.3:
        placed[whole[0]] = Partial()
        laid = laid.redistribute(placements=placed)
    of_experts = [Shard(0) if name == "ep" else Replicate() for name in MESHES[shape]]
    own_ids = ids if rng.random() < 0.15 else sw.distribute_tensor(ids, mesh, random_layout(rng, mesh, (0, 1)))
    own_weights = weights if weights is None else sw.distribute_tensor(weights, mesh, random_layout(rng, mesh, (0, 1)))
    needs = (rng.random() < 0.85, rng.random() < 0.7, True)
    plain, many = (
        [t if t is None else t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        for tensors in ((x, weights, stacked), (laid, own_weights, sw.distribute_tensor(stacked, mesh, of_experts)))
    )
    wanted = by_loop(plain[0], ids, *plain[1:])
    got = by_dispatch(many[0], own_ids, *many[1:], early=rng.random() < 0.6)
    torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(wanted)
    losses = (wanted * gradient).sum(), (got * sw.distribute_tensor(gradient, mesh, of_experts)).sum()
    pairs = [(p, m) for p, m in zip(plain, many, strict=True) if p is not None and p.requires_grad]
    leaves = [list(side) for side in zip(*(pairs if tokens else pairs[: int(needs[0])]), strict=True)]
    if leaves:
        _compare(losses, leaves, seed % 3 == 0 and tokens > 0)


def _compare(losses: tuple[Any, Any], leaves: list[list[Any]], twice: bool) -> None:
    """The gradients of both sides, and the second derivatives."""
    found = [
        torch.autograd.grad(loss, own, create_graph=twice, allow_unused=True)
        for loss, own in zip(losses, leaves, strict=True)
    ]
    _same(*found, 1e-4)
    if twice:
        squares = [sum((g.square().sum() for g in side if g is not None), torch.zeros(())) for side in found]
        again = [torch.autograd.grad(s, own, allow_unused=True) for s, own in zip(squares, leaves, strict=True)]
        _same(*again, 1e-2)


def _same(wanted: Any, got: Any, tolerance: float) -> None:
    for one, many in zip(wanted, got, strict=True):
        if one is not None or many is not None:
            one = torch.zeros_like(many.full_tensor()) if one is None else one
            many = torch.zeros_like(one) if many is None else many.full_tensor()
            torch.testing.assert_close(many, one, rtol=tolerance, atol=tolerance)


def run(seeds: range) -> list[str]:
    """What differed."""
    wrong = []
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            wrong.append(f"{seed}: {type(error).__name__}: {error}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    given = parser.parse_args()
    wrong = run(range(given.seed, given.seed + given.trials))
    print(f"{given.trials} mixtures, {len(wrong)} differ", *wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
