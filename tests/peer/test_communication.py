"""No more communication than torch.distributed.tensor: every operator of torch's test database that both carry out."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from bench.counting import Calls
from tests.peer.communication import Libraries, Report, cases_of, compare, totals, world
from tests.peer.truth import why_wrong
from tests.torch_version import TORCH, needs_torch
from tests.virtual.conformance import database

CASES = 4  # of each operator, always the same
SLOW_IN_TORCH = {"_batch_norm_with_update", "_chunk_cat"}  # half a minute of cold dispatch; --all has them
KERNEL = "takes a sharded kernel, or parts of a sum, for whole ones"
ROUNDED = "parts of a sum are rounded, and overflow, where the sum does not"
READ = "reads what each rank has of a number, which is not the number"
DRAWN = "draws other numbers than one device"

# Operators that cost torch less because it gives something else than one device does.
WRONG_IN_TORCH = {
    "bfloat16": ROUNDED,
    "half": ROUNDED,
    "item": READ,
    "multinomial": DRAWN,
    "narrow": READ,
    "nn.functional.conv2d": KERNEL,
    "nn.functional.conv3d": KERNEL,
    "nn.functional.conv_transpose2d": KERNEL,
}

SEVERAL = "a sum that is read several times, also by the gradient, is added up each time"
SHORT = "a loss over sharded classes gathers no score, also where they are so few that it would be cheaper"
SINGLE = "a dim of size one is sharded: only one rank has anything, and keeps it"
SHARDED = "the result stays sharded, and its gradient moves something again"
OPEN = "not mended yet, nor looked into"
REFUSED = "torch refuses the cases in which ours communicates less"

# Operators that cost more on some samples of the small tensors here.
MORE = {
    "_batch_norm_with_update": SINGLE,
    "fft.ifftshift": SHARDED,
    "grid_sampler_3d": SHARDED,
    "linalg.lu_factor": OPEN,
    "log_softmax": SHORT,
    "logcumsumexp": SHARDED,
    "matrix_exp": OPEN,
    "nn.functional.gaussian_nll_loss": SEVERAL,
    "nn.functional.group_norm": SEVERAL,
    "nn.functional.linear_cross_entropy.chunked": OPEN,
    "nn.functional.max_unpool3d.grad": SINGLE,
}
if TORCH < (2, 13):
    MORE["nn.functional.multi_head_attention_forward"] = REFUSED
COMPARED = 500 if TORCH >= (2, 13) else 350  # operators at least; older versions of torch refuse more


@pytest.fixture(scope="module")
def libraries() -> Iterator[Libraries]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def reports(libraries: Libraries) -> list[Report]:
    """Every operator, counted once for all tests."""
    return [compare(name, CASES, libraries) for name in database() if name not in SLOW_IN_TORCH]


def test_no_operator_communicates_more(reports: list[Report]) -> None:
    """Not in collectives or bytes without less of the other, forward and backward, over the cases of each operator."""
    worse = {r.op: (*r.sums("call"), *r.sums("settled")) for r in reports if r.worse}
    assert not {op: sums for op, sums in worse.items() if op not in WRONG_IN_TORCH and op not in MORE}


def test_nothing_is_issued_where_torch_issues_nothing(reports: list[Report]) -> None:
    found = [f"{r.op}: {one.case}" for r in reports for one in r.needless if r.op not in WRONG_IN_TORCH]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("what", ["call", "settled"])
def test_all_together(reports: list[Report], what: str) -> None:
    """Both counts, over all operators; with and without the reductions that results put off."""
    mine, peer = totals(reports, what)
    assert sum(bool(r.compared) for r in reports) > COMPARED
    assert mine.collectives < peer.collectives
    assert mine.received < peer.received


@pytest.mark.parametrize("what", ["softmax", "log_softmax", "logsumexp", "_safe_softmax"])
def test_long_rows_are_not_gathered(libraries: Libraries, what: str) -> None:
    """What costs more on short rows costs far less on long ones."""
    received = []
    for library in libraries[(4,)]:
        x = library.module.DTensor.from_local(torch.ones(8, 2**15), library.mesh, [library.module.Shard(1)])
        with Calls() as calls:
            getattr(torch, what)(x, 1)
        received.append(calls.received)
    assert received[0] < received[1] / 10


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_halves_are_reduced_as_halves(libraries: Libraries, dtype: torch.dtype) -> None:
    received = []
    for library in libraries[(4,)]:
        module = library.module
        x = module.DTensor.from_local(torch.ones(8, 64, dtype=dtype), library.mesh, [module.Partial()])
        with Calls() as calls:
            x.redistribute(placements=[module.Replicate()])
            x.redistribute(placements=[module.Shard(0)])
        received.append(calls.received)
    assert received[0] == received[1] == 2 * 8 * 64 * (1.5 + 0.75)


@pytest.mark.parametrize("name", [op for op, reason in WRONG_IN_TORCH.items() if reason in (KERNEL, READ)])
def test_torch_is_wrong(libraries: Libraries, name: str) -> None:
    if TORCH < (2, 13) and name in ("nn.functional.conv2d", "nn.functional.conv_transpose2d"):
        pytest.skip(f"torch {torch.__version__} refuses, or carries out as one device does, the cases of {name}")
    cases = cases_of(name, None)
    assert any(why_wrong(case.sample, libraries[case.mesh][1].mesh, case.layout) for case in cases)


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.half, (1e5, -1e5, 1.0, 0.0)), (torch.bfloat16, (256.5, -256.0, 0.0, 0.0))]
)
def test_torch_rounds_the_parts_of_a_sum(
    libraries: Libraries, dtype: torch.dtype, parts: tuple[float, float, float, float]
) -> None:
    mesh = libraries[(4,)][1].mesh
    with LocalTensorMode(4):
        held = LocalTensor({rank: torch.tensor([part]) for rank, part in enumerate(parts)})
        x = theirs.DTensor.from_local(held, mesh, [theirs.Partial()], run_check=False)
        found = x.to(dtype).full_tensor()._local_tensors[0]
    assert not torch.equal(found, torch.tensor([sum(parts)]).to(dtype))


@needs_torch(2, 13, "its test database lacks some operators of the tables")
def test_tables_name_operators() -> None:
    assert not {*WRONG_IN_TORCH, *MORE} - set(database())
    assert not WRONG_IN_TORCH.keys() & MORE.keys()
