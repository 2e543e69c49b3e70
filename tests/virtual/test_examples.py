"""The examples, run as a user would: their output is true, and equal to that of one device."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# patterns that the output must contain, in this order
PRINTED: dict[str, list[str]] = {
    "smallest": [r"f32\[6,8\] x:S0 @ b -> f32\[6,5\] x:S0", r"as on one device: True, 44\.67"],
    "mlp": [
        r"0\.weight  f32\[64,16\] tp:S0",
        r"2\.weight  f32\[16,64\] tp:S1",
        "20 collectives in 20 steps: all_reduce",
    ],
    "moe": [
        r"experts\.0\.up +f32\[6,32,64\] ep:S0 tp:S2",
        r"exchange \d+ tokens over dp x ep: a rank received \d+ bytes",
    ],
    "custom_operator": [
        "qd,kd->qk is true",
        "queries split: .* x:S0; 0 collectives, as on one device: True",
        "keys split: .* x:S1; 0 collectives, as on one device: True",
        "a rule that is not true is told so: .* gives a wrong value",
    ],
    "conjugate_gradients": ["8.00 MiB, a device may hold 4.00 MiB", "2.02 MiB at the peak: it fits", "after 20 steps"],
    "heat": [
        r"f64\[1,1,254,64\] x:S2, after 20 steps f64\[1,1,254,64\] x:S2",
        "receives 2 of 254 rows a step, in 20 ex",
    ],
    "inference": ["80 characters: ", "as on one device: True"],
}
LOSSES = re.compile(r"^ *\d+ +([\d.]+) +([\d.]+) *$", re.MULTILINE)


@functools.cache
def printed_by(name: str, *args: str) -> str:
    with (
        mock.patch.object(sys, "argv", [f"{name}.py", *args]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str) -> None:
    assert re.search(".*".join(PRINTED[name]), printed_by(name), re.DOTALL), printed_by(name)


def test_losses_of_the_mlp_stand_beside_each_other() -> None:
    rows = LOSSES.findall(printed_by("mlp"))
    assert len(rows) == 4
    for alone, together in rows:
        assert float(alone) == pytest.approx(float(together), abs=2e-6)
    assert float(rows[-1][0]) < float(rows[0][0])


def test_losses_of_experts_stand_beside_each_other() -> None:
    rows = LOSSES.findall(printed_by("moe"))
    assert len(rows) == 4
    for alone, together in rows:
        assert float(alone) == pytest.approx(float(together), abs=2e-4)
    assert float(rows[-1][0]) < float(rows[0][0])


def test_conjugate_gradients_converge() -> None:
    left = [float(number) for number in re.findall(r"what is left is (\S+) of", printed_by("conjugate_gradients"))]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-4


def test_heat_spreads_as_on_one_device() -> None:
    errors = re.findall(r"values (\S+), gradients (\S+)", printed_by("heat"))
    assert len(errors) == 1
    assert all(float(error) < 1e-12 for error in errors[0])


def test_inference_works_nothing_out_twice() -> None:
    known = re.findall(r"(\d+) signatures known, (\d+) worked out", printed_by("inference"))
    assert len(known) == 4
    assert len(set(known)) == 1


def test_the_transformer() -> None:
    rows = LOSSES.findall(printed_by("llama", "--plan", "tp+sp", "--mesh", "2,2", "--steps", "2"))
    assert len(rows) == 2
    for alone, together in rows:
        assert float(alone) == pytest.approx(float(together), abs=1e-4)


def test_the_transformer_on_long_sequences() -> None:
    plan = ("--plan", "dp-cp-tp", "--mesh", "2,2,2", "--steps", "2", "--length", "90")
    rows = LOSSES.findall(printed_by("llama", *plan))
    assert len(rows) == 2
    for alone, together in rows:
        assert float(alone) == pytest.approx(float(together), abs=1e-4)


def test_none_is_forgotten() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"} == {*PRINTED, "llama", "chat", "elastic"}
