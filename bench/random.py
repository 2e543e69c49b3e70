"""Random operators: the time of a rank's part over plain torch's on a tensor of the local size.

A CPU generator is sequential, so a rank draws the numbers of the whole tensor in blocks and keeps its part: with n
ranks about n times the time of the local size. The indexed generator costs the part alone. On CUDA every element is
drawn by its index.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.peers import Peer, start
from bench.timing import compare

RANKS = 8
LOCAL = (128, 1024)
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "random_": lambda x: x.random_(100),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x),
    "dropout": lambda x: F.dropout(x, 0.1),
}


def by_index(run: Callable[[Any], Any], x: Any) -> Any:
    """Run with the indexed generator."""
    with sw.use_rng("indexed"):
        return run(x)


def cpu() -> None:
    """One rank of eight, rows sharded."""
    start(RANKS)
    peer = Peer("shardwise", (RANKS,))
    x, plain = peer.local([peer.Shard(0)], *LOCAL).abs().clamp_(0, 1), torch.rand(LOCAL)
    print(f"one rank of {RANKS}, local size {LOCAL}, float32, cpu")
    for name, run in OPERATORS.items():
        sides = {
            "one device's numbers": lambda run=run: run(x),
            "indexed": lambda run=run: by_index(run, x),
            "plain torch, local size": lambda run=run: run(plain),
        }
        compare(sides, number=2, repeat=7, title=name)


def cuda() -> None:
    """Eight virtual ranks on one device: all parts together over the whole tensor on plain torch."""
    mesh = sw.init_device_mesh("cuda", (RANKS,))
    size = (RANKS * LOCAL[0] * 16, LOCAL[1])
    x, plain = sw.rand(*size, device_mesh=mesh, placements=[sw.Shard(0)]), torch.rand(size, device="cuda")

    def waiting(run: Callable[[Any], Any], given: Any) -> None:
        run(given)
        torch.cuda.synchronize()

    print(f"{RANKS} virtual ranks, {size}, float32, cuda: all of them over plain torch on the whole")
    for name, run in OPERATORS.items():
        sides = {
            "shardwise, 8 parts": lambda run=run: waiting(run, x),
            "plain torch, whole": lambda run=run: waiting(run, plain),
        }
        compare(sides, number=3, repeat=7, title=name)


def main() -> None:
    """Print each operator's time."""
    with torch.no_grad():
        if torch.cuda.is_available():
            cuda()
        cpu()


if __name__ == "__main__":
    main()
