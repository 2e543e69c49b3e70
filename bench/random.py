"""Random operators: the time of a rank's part over plain torch's on a tensor of the local size.

A CPU generator is sequential. A rank draws its part and skips the other numbers, long gaps by jumps of a constant time.
The indexed generator costs the part alone. On CUDA every element is drawn by its index.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.peers import start
from bench.timing import compare

RANKS = 8
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


def measure(device: str, local: tuple[int, int]) -> None:
    """One rank of eight, rows sharded, over plain torch on a tensor of the local size."""
    mesh = sw.init_device_mesh(device, (RANKS,))
    plain = torch.rand(local, device=device)
    x = sw.DTensor.from_local(plain.clone(), mesh, [sw.Shard(0)])
    print(f"one rank of {RANKS}, local size {local}, float32, {device}")

    def finished(run: Callable[[Any], Any], given: Any) -> None:
        run(given)
        if device == "cuda":
            torch.cuda.synchronize()

    for name, run in OPERATORS.items():
        sides = {
            "one device's numbers": lambda run=run: finished(run, x),
            "indexed": lambda run=run: finished(lambda given: by_index(run, given), x),
            "plain torch, local size": lambda run=run: finished(run, plain),
        }
        compare(sides, number=2, repeat=7, title=name)


def main() -> None:
    """Print each operator's time."""
    start(RANKS)
    with torch.no_grad():
        if torch.cuda.is_available():
            measure("cuda", (8192, 8192))
        measure("cpu", (128, 1024))


if __name__ == "__main__":
    main()
