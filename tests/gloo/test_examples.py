"""The examples as torchrun starts them: the first of four processes prints what four virtual ranks print."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

from tests.gloo.processes import ProcessPool

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("smallest", "mlp", "custom_operator", "conjugate_gradients", "heat", "inference")


def run_examples() -> dict[str, str]:
    """What this process prints for each example."""
    found = {}
    for name in NAMES:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        found[name] = printed.getvalue()
    return found


@pytest.fixture(scope="module")
def printed() -> list[dict[str, str]]:
    with ProcessPool(4) as pool:
        return pool.run(run_examples, timeout=120)


def test_only_the_first_process_prints(printed: list[dict[str, str]]) -> None:
    assert all(text == "" for rank in printed[1:] for text in rank.values())
    assert all(printed[0].values())


def test_processes_print_what_virtual_ranks_print(printed: list[dict[str, str]]) -> None:
    for name, text in run_examples().items():
        ours, theirs = (
            [_without_surroundings(line) for line in side.splitlines()] for side in (text, printed[0][name])
        )
        assert ours == theirs


def _without_surroundings(line: str) -> str:
    """What depends on the fabric, or on what this process has run before, left out."""
    if "signatures known" in line:
        return "signatures known"
    return line.replace(", virtual)", ")").replace(", c10d)", ")")
