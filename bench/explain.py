"""What recording costs an operator: when it is off, before and after it was on, and when it is on.

Asked: under 2 us when off.
"""

import statistics
import timeit
from collections.abc import Callable

import torch

import shardwise as sw
from bench.figures import figure
from shardwise.debug import CommDebugMode

ROUNDS, CALLS = 15, 1000


def measured(run: Callable[[], object]) -> float:
    """Microseconds a call, the median of the rounds."""
    run()
    return statistics.median(timeit.timeit(run, number=CALLS) / CALLS * 1e6 for _ in range(ROUNDS))


def main() -> None:
    """Print the time of a warm operator in each state."""
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
    with torch.no_grad():
        before = measured(lambda: x + x)
        with sw.explain() as report:
            on = measured(lambda: x + x)
        count = len(report.records)
        del report
        with CommDebugMode():
            counting = measured(lambda: x + x)
        after = measured(lambda: x + x)
    print(f"  x + x before any recording   {before:8.2f} us")
    print(f"  x + x while explain is on    {on:8.2f} us, {count} recorded")
    print(f"  x + x in a CommDebugMode     {counting:8.2f} us")
    print(f"  x + x after it was on        {after:8.2f} us")
    print(f"  {figure('an operator after `explain`, beyond one before', after - before, 2, ' us')}")


if __name__ == "__main__":
    main()
