"""Every operator of torch's test database, a few cases of each: as on one device, or named here with the reason."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests.virtual.conformance import (
    Sample,
    _of_sequences,
    _with_phases_of,
    check_operator,
    database,
    line_of,
    sampled,
)

pytestmark = pytest.mark.usefixtures("always_decomposing")

SEED = 0
CHUNKS = 48  # so that workers can share them

# Operators that fail now, and why. One that passes again must be taken out.
KNOWN: dict[str, str] = {
    "to_sparse": "there are no sparse DTensors",
}


def names_in(chunk: int) -> Iterator[str]:
    """Every CHUNKS-th operator."""
    return itertools.islice(database(), chunk, None, CHUNKS)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators(chunk: int) -> None:
    """Each operator gives one device's values and gradients, or is known not to."""
    wrong = []
    for name in names_in(chunk):
        report = check_operator(name, sampled(SEED))
        if report.failures and name not in KNOWN:
            wrong.append(line_of(report))
        elif not report.failures and name in KNOWN:
            wrong.append(f"{name}: passes now; remove it from KNOWN")
    assert not wrong, "\n".join(wrong)


def test_known_operators_exist() -> None:
    """No entry outlives its operator."""
    assert not set(KNOWN) - set(database())


def test_eigenvectors_are_compared_up_to_a_phase() -> None:
    vectors = torch.linalg.eigh(torch.randn(3, 4, 4, dtype=torch.complex128))[1]
    phases = torch.polar(torch.ones(3, 1, 4, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64))
    torch.testing.assert_close(_with_phases_of(vectors * phases, vectors), vectors)
    assert not torch.allclose(_with_phases_of(vectors.flip(-1), vectors), vectors)


def test_rows_of_no_sequence_are_not_compared() -> None:
    """As in torch's sample for packed sequences: 62 keys of 64 are in one."""
    q, k, v = torch.ones(1, 64, 2, 2), torch.ones(1, 64, 2, 2), torch.ones(1, 64, 2, 2)
    ends = torch.tensor([0, 30, 62], dtype=torch.int32)
    named = {"bias": None, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    given = SampleInput(q, args=(k, v), kwargs=named)
    sample = Sample(None, torch.float32, 0, given, "function", "cpu")
    name = "torch.ops.aten._efficient_attention_forward"
    assert [tuple(grad.shape) for grad in _of_sequences(name, sample, [q, k, v])] == [(1, 62, 2, 2)] * 3
    assert _of_sequences("add", sample, [q, k, v]) == [q, k, v]
