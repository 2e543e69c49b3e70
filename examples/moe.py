"""A small transformer with mixtures of experts: data, expert and tensor parallel at once, beside one device.

python examples/moe.py                                   # eight ranks inside this process: dp=2, ep=2, tp=2
torchrun --nproc-per-node 8 examples/moe.py              # real processes, the same file
torchrun --nproc-per-node 4 examples/moe.py              # dp=1, ep=2, tp=2

The model knows nothing of ranks but `sw.moe.dispatch`, which on one device only sorts.
"""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel, parallelize_module

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None
WIDTH, HIDDEN, HEADS, EXPERTS, CHOICES, LETTERS, LENGTH, BATCH = 32, 64, 4, 6, 2, 16, 12, 8


class Experts(nn.Module):
    """Each token goes to a few feed-forward networks, and to one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        weights, ids = chances.topk(CHOICES)
        weights = weights / weights.sum(-1, keepdim=True)
        rows, back = sw.moe.dispatch(tokens, ids, EXPERTS, axis="ep")
        hidden = F.grouped_mm(rows, self.up, offs=back.offs) * F.silu(F.grouped_mm(rows, self.gate, offs=back.offs))
        y = back(F.grouped_mm(hidden, self.down, offs=back.offs), weights) + self.shared(tokens)
        # the loss that keeps experts equally busy: how often each was chosen, times its mean chance
        balance = EXPERTS * (back.counts / (len(tokens) * CHOICES) * chances.mean(0)).sum()
        return x + y.unflatten(0, x.shape[:2]), balance


class Attention(nn.Module):
    """Causal attention; a rank may have some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (each(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks, and a loss for balance beside the one for letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x, balances = self.embed(text), []
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x, balance = experts(attention(x))
            balances.append(balance)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten()) + 0.01 * sum(balances)


def spread(model: Model, mesh: sw.DeviceMesh) -> Model:
    """The model over all three axes."""
    parallelize_module(model, mesh["ep"], {
        "experts.*": ExpertParallel(tp_mesh=mesh["tp"], tp_dims={"up": 2, "gate": 2, "down": 1}),
    })  # fmt: skip
    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tp"], {"attention.*.[qkv]": columns, "attention.*.out": rows})
    sw.distribute_module(model, mesh)  # what no plan names: the same on all ranks
    return model


def train(model: Model, steps: int, mesh: sw.DeviceMesh | None = None) -> list[float]:
    """The losses of learning to count on: each letter is the one before plus a step that the text keeps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        start, step = torch.randint(0, LETTERS, (BATCH, 1)), torch.randint(1, 4, (BATCH, 1))
        text = (start + step * torch.arange(LENGTH + 1)) % LETTERS
        if mesh is not None:  # dp and ep share the batch
            text = sw.distribute_tensor(text, mesh, [sw.Shard(0), sw.Shard(0), sw.Replicate()])
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    size = int(os.environ.get("WORLD_SIZE", 8))
    mesh = sw.init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    torch.manual_seed(0)
    alone = Model()
    together = spread(copy.deepcopy(alone), mesh)
    say(f"on {mesh}")
    for name in ("experts.0.up", "experts.0.down", "attention.0.q.weight"):
        say(f"{name:20} {together.get_parameter(name).spec}")  # pyright: ignore[reportAttributeAccessIssue]

    with sw.explain() as report:
        first = train(copy.deepcopy(together), 1, mesh)
    moves = [move for record in report.records for move in record.moves if " tokens over" in move.words]
    for move in [move for move in moves if "numbers" not in move.words][:2]:
        say(f"{move.words}: a rank received {move.received:.0f} bytes")
    say("step   one device   together")
    for step, losses in enumerate(zip(train(alone, 10), train(together, 10, mesh), strict=True)):
        if step == 0:
            assert abs(first[0] - losses[0]) < 1e-4
        if step % 3 == 0:
            say(f"{step + 1:4}   {losses[0]:<10.5f}   {losses[1]:.5f}")


if __name__ == "__main__":
    main()
