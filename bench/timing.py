"""Times several ways to do one thing, side by side in one process, so that noise hits all of them alike."""

import gc
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Thunk = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the least of all rounds, and the median of them."""

    minimum: float
    median: float


def compare(
    sides: Mapping[str, Thunk],
    *,
    number: int = 1000,
    repeat: int = 15,
    baseline: str | None = None,
    title: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time warm calls; print a table with the ratio of each side to `baseline` (the last side unless named).

    Each of `repeat` rounds times `number` calls of every side, and every round starts with another side. What never
    waits is timed best with `time.process_time`, the processor's time of all threads: other programs disturb it less.
    """
    for thunk in sides.values():  # caches filled, branches predicted
        timeit.timeit(thunk, number=max(1, number // 10))
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for order in _orders(list(sides), repeat):
        for name in order:
            rounds[name].append(timeit.timeit(sides[name], timer=clock, number=number) / number * 1e6)
    return _report(rounds, baseline, title, f"best and median of {repeat} rounds of {number} calls")


def compare_cold(
    sides: Mapping[str, Sequence[Thunk]], *, baseline: str | None = None, title: str = ""
) -> dict[str, Timing]:
    """Time first calls: every thunk is called once, the sides in turn. The median is the number to quote.

    Make each thunk new to the caches under test: another shape, another layout. All sides have equally many.
    """
    counts = {len(thunks) for thunks in sides.values()}
    if len(counts) != 1:
        raise ValueError(f"sides of different lengths: { {name: len(thunks) for name, thunks in sides.items()} }")
    (count,) = counts
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for index, order in enumerate(_orders(list(sides), count)):
        for name in order:
            rounds[name].append(_once(sides[name][index]))
    return _report(rounds, baseline, title, f"{count} first calls")


def _orders(names: list[str], count: int) -> Iterator[list[str]]:
    """The sides, starting with another one each round."""
    for index in range(count):
        shift = index % len(names)
        yield names[shift:] + names[:shift]


def _once(thunk: Thunk) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter_ns()
        thunk()
        return (time.perf_counter_ns() - start) / 1e3
    finally:
        if collecting:
            gc.enable()


def _report(rounds: Mapping[str, list[float]], baseline: str | None, title: str, how: str) -> dict[str, Timing]:
    timings = {name: Timing(min(values), statistics.median(values)) for name, values in rounds.items()}
    base = timings[baseline if baseline is not None else list(timings)[-1]]
    width = max(map(len, timings))
    print(f"{title or 'microseconds a call'} ({how})")
    print(f"  {'':{width}}  {'min us':>10}  {'median us':>10}  {'ratio':>6}")
    for name, timing in timings.items():
        ratio = timing.median / base.median
        print(f"  {name:{width}}  {timing.minimum:10.2f}  {timing.median:10.2f}  {ratio:6.2f}")
    return timings
