"""Given sizes that are new on each call, beside the same call again: what new sizes cost on the host.

Asked: a few tens of microseconds for each operator and redistribution. On one rank of torch's fake process group, which
sends nothing.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from bench.peers import start
from bench.timing import compare_cold
from shardwise import Ragged, Replicate, Shard

RANKS, TOKENS, WIDTH, CALLS = 8, 4096, 8, 200


def new_sizes(rng: random.Random) -> Ragged:
    """Dim 0 in parts of random sizes, some of them empty."""
    bounds = [0, *sorted(rng.choices(range(TOKENS + 1), k=RANKS - 1)), TOKENS]
    return Ragged(0, [high - low for low, high in itertools.pairwise(bounds)])


def main() -> None:
    """Print the time of each operation with new sizes and with sizes that it had before."""
    start(RANKS)
    rng = random.Random(0)
    mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    even = sw.distribute_tensor(torch.randn(TOKENS, WIDTH), mesh, [Shard(0)])
    weight = sw.distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()])

    def ragged() -> Any:
        return even.redistribute(placements=[new_sizes(rng)])

    def moving(tensor: Callable[[], Any], to: Callable[[], Any]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            given, target = tensor(), [to()]
            return lambda: given.redistribute(placements=target)

        return make

    def computing(function: Callable[[Any], object]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            given = ragged()
            return lambda: function(given)

        return make

    operations = {
        "Shard to Ragged": moving(lambda: even, lambda: new_sizes(rng)),
        "Ragged to Shard": moving(ragged, lambda: Shard(0)),
        "Ragged to Ragged": moving(ragged, lambda: new_sizes(rng)),
        "Ragged to Replicate": moving(ragged, Replicate),
        "x * x": computing(lambda x: x * x),
        "x.relu()": computing(torch.relu),
        "x @ weight": computing(lambda x: x @ weight),
        "x.sum(1)": computing(lambda x: x.sum(1)),
    }
    for name, make in operations.items():
        for _ in range(10):
            make()()
        new, again = [make() for _ in range(CALLS)], make()
        again()
        timings = compare_cold({"new sizes": new, "the same again": [again] * CALLS}, title=name)
        print(f"  new sizes cost {timings['new sizes'].median - timings['the same again'].median:.0f} us")


if __name__ == "__main__":
    main()
