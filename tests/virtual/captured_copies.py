"""Random programs of copies, views and writes in place, captured and eager: the same values, and the same memory.

Results are written to one after the other, so that memory which two of them share, or share with an argument, shows.

    python -m tests.virtual.captured_copies --programs 2000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch

from shardwise.capture import captured
from shardwise.capture.copy_propagation import copied_bytes
from shardwise.errors import UnsupportedError

ROWS, COLUMNS, CALLS = 4, 16, 4  # a row is 64 bytes


class Drawn:
    """A program of random operators on tensors of rows, as a list of choices that can be run again."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.arguments = draw.randint(1, 3)
        self.steps = [
            (draw.choice(STEPS), draw.random(), draw.random(), draw.random()) for _ in range(draw.randint(4, 16))
        ]
        self.returned = [draw.random() for _ in range(draw.randint(1, 3))]
        self.keeps = draw.random() < 0.3

    def run(self, *given: torch.Tensor, again: bool = False) -> Any:
        """Results of the steps; `again` uses all values once more at the end, the last first, as backward does."""
        values: list[torch.Tensor] = list(given)

        def pick(at: float, since: float = 0.0) -> torch.Tensor:
            at = max(at, since) if self.keeps else at**0.5  # mostly the last ones
            return values[int(at * len(values))]

        for step, first, second, third in self.steps:
            step(values, pick(first), pick(second), third)
        found = [pick(at) for at in self.returned]
        if again:
            total = torch.zeros(1, COLUMNS)
            for value in reversed(values):
                total = total * 0.5 + (value[:1] @ (value.t() @ value)).tanh()
            found.append(total)
        return found


def _cat(values: list[Any], a: Any, b: Any, at: float) -> None:
    values.append(torch.cat([a, b]) if at < 0.8 else torch.cat([a, a, b]))


def _split_out(values: list[Any], a: Any, b: Any, at: float) -> None:
    cut = max(1, int(at * len(a)))
    if len(a) > cut:
        out = [torch.empty(cut, COLUMNS), torch.empty(len(a) - cut, COLUMNS)]
        torch.split_with_sizes_copy(a, [cut, len(a) - cut], out=out)
        values += out


def _cat_out(values: list[Any], a: Any, b: Any, at: float) -> None:
    buffer = torch.empty(1, (len(a) + len(b)) * COLUMNS)
    torch.cat([a.reshape(1, -1), b.reshape(1, -1)], 1, out=buffer)
    flat = buffer.view(-1, COLUMNS)
    values += [flat[: len(a)], flat[len(a) :]] if at < 0.7 else [flat]


def _into(values: list[Any], a: Any, b: Any, at: float) -> None:
    if a.shape == b.shape and a is not b:
        a.copy_(b.clone() if at < 0.3 else b)


def _foreach(values: list[Any], a: Any, b: Any, at: float) -> None:
    made = [torch.empty_like(a), torch.empty_like(b)]
    torch._foreach_copy_(made, [a, b])
    values += made


def _rows(values: list[Any], a: Any, b: Any, at: float) -> None:
    values.append(a[int(at * len(a)) :])


STEPS: list[Callable[[list[Any], Any, Any, float], None]] = [
    lambda values, a, b, at: values.append(a.clone()),
    lambda values, a, b, at: values.append(a.clone()),
    lambda values, a, b, at: values.append(a.t().clone().t() if at < 0.5 else a.t().contiguous().t()),
    lambda values, a, b, at: values.append(a.detach()),
    lambda values, a, b, at: values.append(a.view(-1, COLUMNS)),
    lambda values, a, b, at: values.append(a * 2 + at),
    lambda values, a, b, at: values.append(a + b.sum()),
    lambda values, a, b, at: a.add_(at),
    lambda values, a, b, at: a.mul_(2),
    lambda values, a, b, at: values.append(a[: max(1, len(a) // 2)].clone()),
    _cat, _cat, _split_out, _split_out, _cat_out, _into, _foreach, _rows,
]  # fmt: skip


def observed(results: list[torch.Tensor], given: list[torch.Tensor]) -> list[Any]:
    """Everything that a caller can see of results and arguments, also by writing to them."""
    found: list[Any] = [(tuple(t.shape), t.stride()) for t in results]
    for at, one in enumerate(results):
        one.mul_(0.5).add_(at + 1)
        found += [t.detach().clone() for t in (*results, *given)]
    return found


def assert_same(
    step: Any, function: Any, given: list[torch.Tensor], what: str, random: torch.Tensor | None = None
) -> None:
    """Both give the same, and leave the same, of the same arguments; `random`: the state that both begin with."""
    other = [tensor.clone() for tensor in given]
    found = observed(step(*given), given)
    if random is not None:
        torch.set_rng_state(random)
    wanted = observed(function(*other), other)
    for one, want in zip(found, wanted, strict=True):
        same = torch.equal(one, want) if isinstance(want, torch.Tensor) else one == want
        assert same, what


def compare(seed: int) -> tuple[int, int]:
    """Compare one program with itself captured. Returns how many bytes it copies without the pass and with it."""
    program = Drawn(seed)

    def function(*given: torch.Tensor) -> Any:
        return program.run(*given)

    counts = []
    for remove in (False, True):
        step = captured(function, remove_copies=remove, verify=False)  # which would take the program without the pass
        for call in range(CALLS):
            torch.manual_seed(call)
            given = [torch.rand(ROWS, COLUMNS) for _ in range(program.arguments)]
            assert_same(step, function, given, f"seed {seed}, call {call}, remove_copies={remove}")
        assert step._last is not None, f"seed {seed} was not captured"
        counts.append(copied_bytes(step._last.program))
    return counts[0], counts[1]


def compare_bounded(seed: int, **options: Any) -> tuple[int, int]:
    """Compare one program with itself captured in the least memory. Returns the bytes at the peak without and with."""
    program = Drawn(seed)

    def function(*given: torch.Tensor) -> Any:
        return program.run(*given, again=True)

    def peak(**options: Any) -> int:
        step = captured(function, verify=False, **options)
        for call in range(CALLS):
            torch.manual_seed(call)
            given = [torch.rand(ROWS, COLUMNS) for _ in range(program.arguments)]
            assert_same(step, function, given, f"seed {seed}, call {call}, {options}")
        return step.explain().memory.peak

    before = peak(**options)
    try:
        return before, peak(max_bytes=0, **options)
    except UnsupportedError as error:
        least = int(str(error).split("(")[1].split()[0])
    after = peak(max_bytes=least, **options)
    assert after == least <= before, f"seed {seed}"
    if least < before:
        assert peak(max_bytes=(least + before) // 2, **options) <= (least + before) // 2
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bounded", action="store_true", help="recomputation in the least memory, not copies")
    options = parser.parse_args()
    before = after = 0
    for seed in range(options.seed, options.seed + options.programs):
        counts = compare_bounded(seed) if options.bounded else compare(seed)
        before, after = before + counts[0], after + counts[1]
    what = "bytes at the peaks" if options.bounded else "bytes copied"
    print(f"{options.programs} programs: the same as eager; {before} {what}, {after} with the pass")


if __name__ == "__main__":
    main()
