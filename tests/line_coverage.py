"""Which lines of the package each test executes, and how long each test takes."""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

__all__ = ["Coverage", "LineRecorder"]


class Coverage:
    """By test: its seconds, and for each file a bitmap of the lines that it executed."""

    def __init__(self, tests: dict[str, dict[str, Any]]) -> None:
        self._tests = tests

    @classmethod
    def load(cls, path: Path) -> Coverage:
        return cls(json.loads(path.read_text()))

    @property
    def tests(self) -> int:
        return len(self._tests)

    def tests_of_lines(self, file: str, first: int, last: int) -> list[tuple[float, str]]:
        """Tests that execute one of these lines, with their seconds."""
        wanted = ((1 << (last - first + 1)) - 1) << first
        return [
            (entry["seconds"], test)
            for test, entry in self._tests.items()
            if int(entry["lines"].get(file, "0"), 16) & wanted
        ]

    def tests_of_file(self, file: str) -> list[tuple[float, str]]:
        """Tests that execute any line inside a function of the file."""
        return [(entry["seconds"], test) for test, entry in self._tests.items() if file in entry["lines"]]


class LineRecorder:
    """Records the lines of files under `packages` while a test runs.

    Decisions that earlier tests have left in caches are forgotten before each test, so that the lines behind them are
    executed again.
    """

    def __init__(self, source: Path, packages: Sequence[str]) -> None:
        self._prefixes = tuple(f"{source / package}/" for package in packages)
        self._source = source
        self._seen: dict[CodeType, set[int]] = {}
        self._all_lines: dict[CodeType, frozenset[int]] = {}
        self.tests: dict[str, dict[str, Any]] = {}  # those that pass

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        lines = self._all_lines.get(code)
        if lines is None:
            ours = code.co_filename.startswith(self._prefixes) and code.co_name != "<module>"
            lines = frozenset(line for *_, line in code.co_lines() if line) if ours else frozenset()
            self._all_lines[code] = lines
        if not lines:
            return None
        seen = self._seen.setdefault(code, set())
        seen.add(frame.f_lineno)
        if len(seen) >= len(lines):
            return None  # every line of this function is known to run in this test

        def trace_line(frame: FrameType, event: str, arg: Any) -> Any:
            seen.add(frame.f_lineno)
            return trace_line

        return trace_line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        forget_decisions()
        self._seen.clear()
        start = time.process_time()
        sys.settrace(self._trace)
        try:
            result = yield
        finally:
            sys.settrace(None)
        seconds = time.process_time() - start
        bitmaps: dict[str, int] = {}
        for code, lines in self._seen.items():
            file = str(Path(code.co_filename).relative_to(self._source))
            bitmaps[file] = bitmaps.get(file, 0) | sum(1 << line for line in lines)
        lines = {file: f"{bitmap:x}" for file, bitmap in bitmaps.items()}
        self.tests[item.nodeid] = {"seconds": round(seconds, 3), "lines": lines}
        return result


def forget_decisions() -> None:
    """Forget executors, routes and rows, and empty the caches of functions of plans, rules and dispatch."""
    from shardwise.fabric.base import on_new_world
    from shardwise.plan.cost import current_cost_model, set_cost_model

    for forget in on_new_world:
        forget()
    set_cost_model(current_cost_model())
    for cache in _function_caches():
        cache.cache_clear()


@functools.cache
def _function_caches() -> list[Any]:
    packages = ("shardwise.plan", "shardwise.rules", "shardwise.dispatch")
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [cache for cache in caches if str(getattr(cache, "__module__", "")).startswith(packages)]
