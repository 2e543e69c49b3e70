"""Linear algebra and Fourier transforms against one device, and where they need no communication."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.virtual.free import S0, S1, P, R, collectives, tensor
from tests.virtual.parity import assert_parity

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")

t = tensor
L, fft = torch.linalg, torch.fft
A, B = t(3, 2, 4, 4), t(3, 2, 4, 5)
POSITIVE = A @ A.mT + 4 * torch.eye(4, dtype=torch.float64)
COMPLEX = t(4, 6) + 1j * t(4, 6).sin()


def symmetric(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a: fn((a + a.mT) / 2)


CASES: dict[str, tuple[Any, ...]] = {
    "inv": (L.inv, POSITIVE),
    "inv of one": (L.inv, POSITIVE[0, 0]),
    "solve": (L.solve, POSITIVE, B),
    "solve vectors": (L.solve, POSITIVE, t(3, 2, 4)),
    "solve broadcast": (L.solve, POSITIVE[0], B),
    "solve from the right": (lambda a, b: L.solve(a, b, left=False), POSITIVE[:, :1], t(3, 2, 5, 4)),
    "solve, a matrix like the vectors of a shard": (L.solve, POSITIVE.flatten(0, 1).repeat(2, 1, 1)[:8], t(4, 4)),
    "solve triangular": (lambda a, b: L.solve_triangular(a, b, upper=True), POSITIVE[0], B),
    "cholesky": (L.cholesky, POSITIVE),
    "cholesky_solve": (torch.cholesky_solve, B, L.cholesky(POSITIVE)),
    "cholesky_inverse": (torch.cholesky_inverse, L.cholesky(POSITIVE)),
    "qr": (L.qr, B),
    "qr, only r": (lambda a: L.qr(a.detach(), "r"), B),
    "svd": (lambda a: tuple(x.abs() for x in L.svd(a, full_matrices=False)), B),
    "svdvals": (L.svdvals, B),
    "eigh": (symmetric(lambda a: L.eigh(a)[1].abs()), POSITIVE),
    "eigvalsh": (symmetric(L.eigvalsh), POSITIVE),
    "eig": (lambda a: L.eig(a)[0].abs().sum(-1), POSITIVE),
    "eigvals": (lambda a: L.eigvals(a.detach()).abs().sum(-1), POSITIVE),
    "det": (L.det, A),
    "slogdet": (L.slogdet, A),
    "det, column by column": (L.det, A[0, 0].mT),
    "solve, column by column": (L.solve, POSITIVE.mT, B),
    "lu": (lambda a: L.lu(a)[1:], A),
    "lu_solve": (lambda a, b: L.lu_solve(*L.lu_factor(a), b), POSITIVE, B),
    "ldl": (symmetric(lambda a: L.ldl_factor(a.detach())[0]), POSITIVE),
    "matrix_exp": (L.matrix_exp, A / 4),
    "pinv": (L.pinv, B),
    "cross": (L.cross, t(2, 4, 3), t(2, 1, 3)),
    "cross of another dim": (lambda a, b: L.cross(a, b, dim=1), t(4, 3, 5), t(4, 3, 5).sin()),
    "matrix_norm": (lambda a: L.matrix_norm(a, "nuc"), B),
    "matrix_rank": (L.matrix_rank, POSITIVE),
    "fft": (fft.fft, COMPLEX),
    "fft of another size": (lambda a: fft.fft(a, n=8, dim=0), COMPLEX),
    "rfft": (fft.rfft, t(5, 6)),
    "irfft": (fft.irfft, COMPLEX),
    "fft2": (fft.fft2, t(3, 4, 5) + 0j),
    "rfftn": (lambda a: fft.rfftn(a, dim=(0, 2)), t(3, 4, 5)),
    "hfft": (fft.hfft, COMPLEX),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], limit=5)


BATCH = POSITIVE.flatten(0, 1)

FREE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Any, ...], Any]] = {
    "det": (L.det, (BATCH,), (S0,), S0),
    "qr": (L.qr, (BATCH,), (S0,), S0),
    "svdvals": (L.svdvals, (BATCH,), (S0,), S0),
    "matrix_exp": (L.matrix_exp, (BATCH / 9,), (S0,), S0),
    "solve_ex": (L.solve_ex, (BATCH, t(6, 4, 3)), (S0, S0), S0),
    "solve_ex, one matrix": (L.solve_ex, (BATCH[0], t(6, 4, 3)), (R, S0), S0),
    "empty batches": (L.inv_ex, (BATCH[:3],), (S0,), S0),
    "fft": (lambda a: fft.fft(a + 0j), (t(8, 6),), (S0,), S0),
    "fft over the first": (lambda a: fft.fft(a, dim=0), (t(6, 8),), (S1,), S1),
    "fft of nothing on a rank": (lambda a: fft.fft(a + 0j), (t(5, 6),), (S0,), S0),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


def test_half_transforms_without_communication() -> None:
    """Their gradients are put into zeros that torch makes in a size of their own, which are replicated."""
    assert collectives(fft.rfft, (t(8, 6),), (S0,), backward=False) == ((S0,), 0)


def test_solution_of_a_sum_is_a_sum() -> None:
    """The equations are solved for each part of the right side."""
    assert collectives(lambda a, b: L.solve_ex(a, b)[0], (BATCH, t(6, 4, 3)), (R, P), backward=False) == ((P,), 0)


def test_matrix_that_cannot_be_inverted_is_an_error_wherever_it_lies() -> None:
    bad = BATCH.clone()
    bad[4] = 0
    given = sw.distribute_tensor(bad, sw.init_device_mesh("cpu", (4,)), [S0])
    with pytest.raises(L.LinAlgError, match="Batch element 4"):
        L.inv(given)


@pytest.mark.parametrize("left", [True, False])
def test_right_side_that_a_shard_could_take_for_vectors(left: bool) -> None:
    """Eight matrices of four rows, one right side: two shards of four matrices have the shapes of vectors."""
    matrices = POSITIVE.flatten(0, 1)[:1].repeat(8, 1, 1) + torch.arange(8.0).reshape(8, 1, 1) * torch.eye(4)
    right = t(4, 4).to(matrices.dtype)
    given: Any = sw.distribute_tensor(matrices, sw.init_device_mesh("cpu", (2,)), [S0])
    torch.testing.assert_close(L.solve(given, right, left=left).full_tensor(), L.solve(matrices, right, left=left))


@pytest.mark.parametrize("vectors", [True, False])
def test_solve_with_the_second_batch_dim_in_shards(vectors: bool) -> None:
    square = sw.init_device_mesh("cpu", (2, 2))
    right = t(3, 2, 4) if vectors else B
    plain = [POSITIVE.clone().requires_grad_(), right.clone().requires_grad_()]
    wanted = L.solve(*plain)
    wanted.sin().sum().backward()
    given: list[Any] = [sw.distribute_tensor(x.detach(), square, [S1, R]).requires_grad_() for x in plain]
    found: Any = L.solve(*given)
    torch.testing.assert_close(found.full_tensor(), wanted)
    found.sin().sum().backward()
    for ours, theirs in zip(given, plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
