"""Runs the tests of this folder where there is no pytest: `PYTHONPATH=src python -m tests.gpu [word ...]`.

A test is a function `test_*` without arguments; it passes by returning, is skipped by raising unittest.SkipTest, and
fails by any other exception. A word on the command line keeps the tests with that word in their name.
"""

import importlib
import sys
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

Test = tuple[str, Callable[[], object]]


def find(folder: Path, package: str) -> Iterator[Test]:
    """Every test in `folder`, in order. A module that cannot be imported is one test, which fails."""
    for path in sorted(folder.glob("test_*.py")):
        name = f"{package}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except unittest.SkipTest as skipped:
            yield path.stem, _raiser(skipped)
            continue
        except Exception as error:
            yield path.stem, _raiser(error)
            continue
        yield from (
            (f"{path.stem}::{key}", value)
            for key, value in vars(module).items()
            if key.startswith("test_") and callable(value) and value.__module__ == name
        )


def run(tests: Sequence[Test]) -> Counter[str]:
    """Run each, print a line for each, and count how they ended."""
    counts: Counter[str] = Counter()
    for name, test in tests:
        start = time.perf_counter()
        outcome, detail = _outcome(test)
        counts[outcome] += 1
        print(f"{outcome:8}{name}  ({time.perf_counter() - start:.2f} s){detail}", flush=True)
    return counts


def main(words: Sequence[str]) -> int:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {device}")
    folder = Path(__file__).parent
    tests = [test for test in find(folder, "tests.gpu") if not words or any(word in test[0] for word in words)]
    counts = run(tests)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    # A run in which nothing passed has shown nothing, so it is no success.
    return 0 if counts["passed"] and not counts["failed"] else 1


def _outcome(test: Callable[[], object]) -> tuple[str, str]:
    try:
        torch.manual_seed(0)
        test()
    except unittest.SkipTest as skipped:
        return "skipped", f": {skipped}"
    except Exception:
        return "failed", "\n" + traceback.format_exc()
    return "passed", ""


def _raiser(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
