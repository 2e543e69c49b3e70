"""torch.optim and clip_grad_norm_ over DTensor parameters, beside the same over plain tensors of a rank's size.

Asked: a foreach AdamW step at most 1.5 of that over plain tensors. torch's DTensor stands beside it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bench.figures import figure
from bench.peers import Peer, peers, start
from bench.timing import compare

PARAMETERS, LOCAL = 38, (64, 64)  # as many as a transformer of four blocks has
WAYS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "one by one": {"foreach": False},
}


def parameters(peer: Peer | None) -> list[nn.Parameter]:
    """Parameters with gradients, of which this rank has the same on every side."""
    made = []
    for _ in range(PARAMETERS):
        value = torch.rand(LOCAL) if peer is None else peer.local([peer.Shard(0)], *LOCAL)
        parameter = nn.Parameter(value)
        parameter.grad = torch.full_like(parameter, 0.1)
        made.append(parameter)
    return made


def main() -> None:
    """Print the time of a step on each side."""
    start(8)
    sides: dict[str, Any] = {peer.name: peer for peer in peers(8)} | {"plain": None}
    for name, way in WAYS.items():
        optimizers = {side: torch.optim.AdamW(parameters(peer), **way) for side, peer in sides.items()}
        timings = compare(
            {side: optimizer.step for side, optimizer in optimizers.items()},
            number=10,
            repeat=21,
            title=f"AdamW, {name}, {PARAMETERS} parameters of {LOCAL} on this rank",
        )
        if name == "foreach":
            ratio = timings["shardwise"].median / timings["plain"].median
            print(f"  {figure('a foreach AdamW step, to plain tensors', ratio, 1.5)}")
    given: dict[str, Sequence[nn.Parameter]] = {side: parameters(peer) for side, peer in sides.items()}
    compare(
        {side: (lambda p=p: clip_grad_norm_(p, 1.0)) for side, p in given.items()},
        number=10,
        repeat=21,
        title="clip_grad_norm_",
    )


if __name__ == "__main__":
    main()
