"""A sample of random programs, the same on each run; `python -m tests.virtual.programs` runs any number."""

import pytest

from tests.virtual.programs import EAGER, Input, Program, check, failure, make

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch does so for forward mode


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_programs(first: int) -> None:
    failures = [text for seed in range(first, first + 20) if (text := failure(make(seed))) is not None]
    assert not failures, "\n".join(failures)


def test_programs_use_what_they_are_made_for() -> None:
    """Enough lines, in-place ones and several kinds of layout among them: a fuzzer that makes nothing finds nothing."""
    programs = [make(seed) for seed in range(100)]
    lines = [line for program in programs for line in program.lines]
    assert len(lines) > 600
    assert sum("_(" in line or "] =" in line for line in lines) > 60
    assert len({i.placements for program in programs for i in program.inputs}) > 40
    assert {program.derivative for program in programs} == set(EAGER)
    for kind in ("L(", "T(", "G(", "C("):
        assert sum(kind in line for line in lines) > 3, kind


@pytest.mark.parametrize("derivative", ["penalty", "hessian"])
def test_a_second_derivative_that_is_none_is_zero(derivative: str) -> None:
    assert check(Program(0, (2,), (Input("x0", (4, 1), ("S0",)),), ("v0 = x0.prod(1)",), derivative)) is None


def test_a_gathered_tensor_has_the_order_of_memory_of_one_device() -> None:
    """Random numbers follow it."""
    lines = ("v0 = x0.t()", "v1 = G(v0)", "v2 = torch.randn_like(v1)", "v3 = T(v0, 'R')", "v4 = torch.randn_like(v3)")
    for rows in (4, 8, 6):
        for placement in ("S0", "S1", "P"):
            assert check(Program(0, (4,), (Input("x0", (rows, 5), (placement,)),), lines)) is None


def test_a_difference_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tanh that is wrong on shards is found, and the printed program runs and reproduces it."""
    import torch

    import shardwise as sw

    original = sw.DTensor.tanh
    monkeypatch.setattr(sw.DTensor, "tanh", lambda self: original(self) * 1.001)
    inputs = (Input("x0", (4, 6), ("S0", "R")), Input("x1", (3,), ("S0", "S0")))
    program = Program(0, (2, 2), inputs, ("v0 = x0 + 1", "v1 = v0.tanh()", "v2 = x1 * 2"))
    told = failure(program)
    assert told is not None
    assert "v2" not in told
    assert "tanh" in told
    assert "(2,)" in told
    scope: dict[str, object] = {}
    exec(told[told.index("import torch") :].replace("print(check(program))", ""), scope)
    assert isinstance(scope["program"], Program)
    assert check(scope["program"]) is not None
    assert torch.tanh is not original
