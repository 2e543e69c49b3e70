"""Random programs with many small collectives, some of them dead, captured with passes and eager, on any fabric.

Values of all calls must have the same bits; sums of more than two ranks that are joined may differ by rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from shardwise.capture import captured
from shardwise.capture.program import Program
from shardwise.fabric.rank_tensor import parts_of

ROWS, COLUMNS, CALLS = 12, 4, 5


class Drawn:
    """A program of random operators on DTensors, as a list of choices that can be run again."""

    def __init__(self, seed: int, mesh: sw.DeviceMesh) -> None:
        draw = random.Random(seed)
        self.mesh = mesh
        steps = [draw.choice(STEPS) for _ in range(draw.randint(10, 24))]
        self.steps = [(step, draw.random(), draw.random(), draw.randrange(mesh.ndim)) for step in steps]
        self.returned = [draw.random() for _ in range(4)]

    def placed(self, axis: int, placement: Any) -> list[Any]:
        return [placement if at == axis else sw.Replicate() for at in range(self.mesh.ndim)]

    def run(self, *given: Any) -> Any:
        values = list(given)

        def pick(at: float) -> Any:
            return values[int(at**0.5 * len(values))]

        for step, first, second, axis in self.steps:
            made = step(self, pick(first), pick(second), axis)
            if made is not None:
                values.append(made)
        return [pick(at).redistribute(placements=self.placed(0, sw.Replicate())) for at in self.returned]


def _gather(drawn: Drawn, a: Any, b: Any, axis: int) -> Any:
    return a.redistribute(placements=drawn.placed(axis, sw.Replicate()))


def _gather_parts(drawn: Drawn, a: Any, b: Any, axis: int) -> Any:
    """Three gathers with nothing between."""
    whole = a.redistribute(placements=drawn.placed(axis, sw.Replicate()))
    parts = [whole * k for k in (1, 2, 3)]
    shards = [part.redistribute(placements=drawn.placed(axis, sw.Shard(0))) for part in parts]
    found = [shard.redistribute(placements=drawn.placed(axis, sw.Replicate())) for shard in shards]
    return found[0] + found[1] * found[2]


def _dead(drawn: Drawn, a: Any, b: Any, axis: int) -> None:
    shard = a.redistribute(placements=drawn.placed(axis, sw.Shard(0)))
    (shard * 2).redistribute(placements=drawn.placed(axis, sw.Replicate()))


def _shard(drawn: Drawn, a: Any, b: Any, axis: int) -> Any:
    return a.redistribute(placements=drawn.placed(axis, sw.Shard(0)))


def _sums(drawn: Drawn, a: Any, b: Any, axis: int) -> Any:
    """Two all-reduces and a reduce-scatter of products over a sharded dim."""
    one, other = (x.redistribute(placements=drawn.placed(axis, sw.Shard(0))) for x in (a, b))
    partial = [one.t() @ other, other.t() @ other, one.t() @ one, (other * 2).t() @ one]
    whole = [x.redistribute(placements=drawn.placed(axis, sw.Replicate())) for x in partial[:2]]
    parts = [x.redistribute(placements=drawn.placed(axis, sw.Shard(0))) for x in partial[2:]]
    spread = [x.redistribute(placements=drawn.placed(axis, sw.Replicate())) for x in parts]
    return a @ ((whole[0] + whole[1]).tanh() + (spread[0] * spread[1]).tanh())


def _largest(drawn: Drawn, a: Any, b: Any, axis: int) -> Any:
    one, other = (x.redistribute(placements=drawn.placed(axis, sw.Shard(0))) for x in (a, b))
    tops = [x.amax(0).redistribute(placements=drawn.placed(axis, sw.Replicate())) for x in (one, other, one * other)]
    return a * (tops[0] + tops[1] + tops[2]).tanh()


def _write(drawn: Drawn, a: Any, b: Any, axis: int) -> None:
    a.mul_(0.5)


STEPS: list[Callable[[Drawn, Any, Any, int], Any]] = [
    _gather, _gather, _gather_parts, _dead, _shard, _sums, _largest, _write,
    lambda drawn, a, b, axis: a * 0.5,
    lambda drawn, a, b, axis: (a + 1).tanh(),
]  # fmt: skip


def program_of(step: Any) -> Program:
    assert step._last is not None
    return step._last.program


def compare(seed: int, mesh: sw.DeviceMesh, **options: Any) -> Program:
    """Compare a program with itself captured. Returns what was recorded."""
    drawn = Drawn(seed, mesh)

    def function(*given: Any) -> Any:
        return drawn.run(*given)

    step = captured(function, verify=seed % 2 == 0, **options)
    for call in range(CALLS):
        torch.manual_seed(call)
        whole = [torch.randn(ROWS, COLUMNS) for _ in range(3)]
        pairs = [
            [sw.distribute_tensor(x, mesh, drawn.placed(at % mesh.ndim, sw.Shard(0))) for at, x in enumerate(whole)]
            for _ in range(2)
        ]
        found, wanted = step(*pairs[0]), function(*pairs[1])
        for one, want in zip([*found, *pairs[0]], [*wanted, *pairs[1]], strict=True):
            assert one.placements == want.placements
            for mine, other in zip(parts_of(one.to_local()), parts_of(want.to_local()), strict=True):
                if options.get("bucket_sums"):
                    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
                else:
                    assert torch.equal(mine, other), f"seed {seed}, call {call}, {options}"
    return program_of(step)
