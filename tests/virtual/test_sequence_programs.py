"""Random programs along sharded sequences and images: a sample of `python -m tests.virtual.sequence_programs`."""

import pytest

from tests.virtual.programs import Input, Program, check, failure
from tests.virtual.sequence_programs import MODES, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch does so for forward mode
]
EAGER = [mode for mode in MODES if mode != "compiled"]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_programs(first: int) -> None:
    failures = [text for seed in range(first, first + 20) if (text := failure(make(seed, EAGER))) is not None]
    assert not failures, "\n".join(failures)


def test_compiled_programs() -> None:
    failures = [text for seed in range(4) if (text := failure(make(seed, ["compiled"]))) is not None]
    assert not failures, "\n".join(failures)


def test_programs_use_what_they_are_made_for() -> None:
    programs = [make(seed) for seed in range(80)]
    lines = [line for program in programs for line in program.lines]
    for name in (
        "A(",
        "conv",
        "pool",
        "interpolate",
        "F.pad",
        "roll",
        "unfold",
        "cum",
        "L(",
        "C(lambda",
        "] = ",
        "is_causal=True",
    ):
        assert any(name in line for line in lines), name
    assert {program.derivative for program in programs} == set(MODES)
    assert len({given.placements for program in programs for given in program.inputs}) > 30


@pytest.mark.parametrize("placement", ["R", "S0", "S1", "Z0"])
@pytest.mark.parametrize("mode", ["function", "first", "penalty", "forward"])
def test_writes_to_views_of_transformed_tensors(placement: str, mode: str) -> None:
    """Inside `torch.func.grad` autograd would find the written part by a storage offset, which DTensors lack."""
    lines = ("v0 = x0 * 2", "v0[1:] = v0[:-1].clone() * v0[1:].clone()", "v0.t()[1:2].mul_(3)", "v2 = v0 * v0")
    assert check(Program(0, (3,), (Input("x0", (5, 4), (placement,)),), lines, mode)) is None
