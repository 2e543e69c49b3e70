"""A captured training step of 4 transformer blocks under tensor and sequence parallelism, and the cost of its guards.

CPU time on one rank of a fake world of 8, as `bench step`: the same models, with DTensors throughout in the captured
one. Asked: at most 1.02 of the hand-written step and 0.35 of torch's DTensor; guards of at most 20 us and 0.05 us for
each parameter.

    python -m bench captured
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import shardwise as ours
from bench.figures import figure
from bench.peers import start
from bench.step import ROUNDS, THROUGHOUT, WORLD, Side, sides, timed
from shardwise.capture.binding import arguments_key
from shardwise.capture.captured_function import _ambient, is_watched

SIDES = ("hand-written", "torch", "shardwise", THROUGHOUT)


def whole_step(side: Side) -> Callable[[], None]:
    """Forward, backward and the optimizer as one function."""

    def step() -> None:
        side.compute()
        side.update()

    return step


def guard_time(step: Any) -> float:
    """Microseconds of what is looked at before a program runs."""
    binding = step._binding
    best = []
    for _ in range(50):
        begin = time.process_time_ns()
        for _ in range(20):
            is_watched()
            _ambient()
            binding.holds()
            arguments_key((), binding.state)
        best.append((time.process_time_ns() - begin) / 20e3)
    return min(best)


def main() -> None:
    """Print milliseconds and ratios."""
    start(WORLD)
    torch.set_flush_denormal(True)  # the fake group leaves in its outputs whatever was there
    made = sides()
    steps: dict[str, Any] = {name: whole_step(made[name]) for name in SIDES}
    captured = ours.captured(whole_step(sides()[THROUGHOUT]), verify=False)
    steps["captured"] = captured
    begin = time.perf_counter()
    for _ in range(6):
        captured()
    took = time.perf_counter() - begin
    print(f"the first six calls of the captured step: {took:.2f} s, {len(captured.programs)} programs")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name in (*steps, *steps):
        steps[name]()
    gc.collect()
    gc.disable()
    names = list(steps)
    for index in range(ROUNDS):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(timed(steps[name]))
    gc.enable()
    found = {name: statistics.median(values) for name, values in times.items()}
    print(f"milliseconds of CPU, median of {ROUNDS} steps in turn")
    for name, value in found.items():
        print(f"  {name:32}{value:9.2f}")
    for peer, asked in (("hand-written", 1.02), ("torch", 0.35), (THROUGHOUT, None)):
        ratio = found["captured"] / found[peer]
        shown = f"{ratio:.2f}" if asked is None else figure(f"a captured step, to {peer}", ratio, asked)
        print(f"  captured, to {peer}: {shown}")
    parameters = sum(1 for _ in made[THROUGHOUT].model.parameters())
    guard = guard_time(captured)
    limit = 20 + 0.05 * parameters
    print(f"  guards: {guard:.1f} us for {parameters} parameters, {limit:.1f} asked")


if __name__ == "__main__":
    main()
