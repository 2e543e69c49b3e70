"""Matrix products against one device, and the layouts on which they need no communication."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from tests.virtual.free import S0, S1, S2, P, R, collectives, tensor
from tests.virtual.parity import assert_parity, bytes_moved, distribute, layouts, whole

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning", "ignore:torch.chain_matmul")

t = tensor
SCALED = {"beta": 0.5, "alpha": 2.0}

CASES: dict[str, tuple[Any, ...]] = {
    "mm": (torch.mm, t(4, 6), t(6, 5)),
    "mm uneven": (torch.mm, t(3, 7), t(7, 5)),
    "mm nothing contracted": (torch.mm, t(3, 0), t(0, 5)),
    "mm complex": (torch.mm, t(4, 6) + 1j * t(4, 6), t(6, 5) + 2j * t(6, 5)),
    "mm integers": (torch.mm, t(4, 6).mul(9).long(), t(6, 5).mul(9).long()),
    "addmm row": (torch.addmm, t(5), t(4, 6), t(6, 5)),
    "addmm column": (torch.addmm, t(4, 1), t(4, 6), t(6, 5)),
    "addmm number": (lambda s, a, b: torch.addmm(s, a, b, **SCALED), t(), t(4, 6), t(6, 5)),
    "addmm matrix": (lambda s, a, b: torch.addmm(s, a, b, **SCALED), t(3, 5), t(3, 7), t(7, 5)),
    "addmm beta 0": (lambda s, a, b: torch.addmm(s, a, b, beta=0), t(3, 5), t(3, 7), t(7, 5)),
    "addmm_": (lambda s, a, b: (s * 1).addmm_(a, b, **SCALED), t(4, 5), t(4, 6), t(6, 5)),
    "bmm": (torch.bmm, t(3, 4, 6), t(3, 6, 5)),
    "baddbmm": (lambda s, a, b: torch.baddbmm(s, a, b, **SCALED), t(4, 5), t(3, 4, 6), t(3, 6, 5)),
    "baddbmm_": (lambda s, a, b: (s * 1).baddbmm_(a, b, **SCALED), t(3, 4, 5), t(3, 4, 6), t(3, 6, 5)),
    "addbmm": (lambda s, a, b: torch.addbmm(s, a, b, **SCALED), t(4, 5), t(3, 4, 6), t(3, 6, 5)),
    "addbmm_": (lambda s, a, b: (s * 1).addbmm_(a, b, **SCALED), t(4, 5), t(3, 4, 6), t(3, 6, 5)),
    "addbmm_ that resizes": (lambda s, a, b: (s * 1).addbmm_(a, b), t(5), t(3, 4, 6), t(3, 6, 5)),
    "addbmm row": (torch.addbmm, t(5), t(3, 4, 6), t(3, 6, 5)),
    "mv": (torch.mv, t(4, 6), t(6)),
    "addmv": (lambda s, a, b: torch.addmv(s, a, b, **SCALED), t(4), t(4, 6), t(6)),
    "addmv number": (torch.addmv, t(1), t(5, 7), t(7)),
    "dot": (torch.dot, t(7), t(7)),
    "vdot": (torch.vdot, t(6) + 1j * t(6), t(6) + 2j * t(6)),
    "outer": (torch.outer, t(4), t(5)),
    "addr": (lambda s, a, b: torch.addr(s, a, b, **SCALED), t(5), t(4), t(5)),
    "matmul batches": (torch.matmul, t(2, 3, 4, 5), t(3, 5, 6)),
    "matmul vector first": (torch.matmul, t(5), t(3, 5, 6)),
    "matmul vector last": (torch.matmul, t(3, 4, 5), t(5)),
    "linear": (F.linear, t(2, 6, 5), t(3, 5), t(3)),
    "linear uneven": (F.linear, t(3, 7, 5), t(3, 5), t(3)),
    "linear without bias": (F.linear, t(2, 7, 5), t(3, 5)),
    "linear of a vector": (F.linear, t(5), t(3, 5), t(3)),
    "linear 4d": (F.linear, t(2, 2, 4, 5), t(3, 5), t(3)),
    "einsum contracted": (lambda a, b: torch.einsum("bij,bjk->ik", a, b), t(3, 4, 5), t(3, 5, 6)),
    "einsum heads": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), t(2, 4, 5, 3), t(2, 4, 6, 3)),
    "einsum three": (lambda *a: torch.einsum("bi,ij,bj->b", *a), t(4, 3), t(3, 5), t(4, 5)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])), t(3, 4, 5), t(4, 5, 6)),
    "inner": (torch.inner, t(3, 5), t(4, 5)),
    "bilinear": (F.bilinear, t(4, 5), t(4, 6), t(3, 5, 6), t(3)),
    "kron": (torch.kron, t(2, 3), t(4, 5)),
    "multi_dot": (lambda *a: torch.linalg.multi_dot(a), t(3, 5), t(5, 4), t(4, 6)),
    "matrix_power": (lambda a: torch.matrix_power(a, 3), t(2, 4, 4)),
    "cdist": (torch.cdist, t(2, 4, 5), t(2, 6, 5)),
    "cdist broadcast": (torch.cdist, t(3, 4, 5), t(6, 5)),
    "cdist p=1": (lambda a, b: torch.cdist(a, b, p=1), t(4, 5), t(6, 5)),
    "cdist by products": (lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"), t(4, 5), t(6, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], limit=6)


UNBOUNDED: dict[str, tuple[Any, ...]] = {
    "addmm beta -inf": (lambda s, a, b: torch.addmm(s, a, b, beta=-math.inf), t(4, 5), t(4, 6), t(6, 5)),
    "addbmm beta inf": (lambda s, a, b: torch.addbmm(s, a, b, beta=math.inf), t(4, 5), t(3, 4, 6), t(3, 6, 5)),
    "addmv beta inf": (lambda s, a, b: torch.addmv(s, a, b, beta=math.inf), t(4), t(4, 6), t(6)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_an_infinite_factor_multiplies_a_complete_addend(name: str) -> None:
    """An addend that is Partial is zero on other ranks, and its parts may have different signs."""
    function, *operands = UNBOUNDED[name]
    assert_parity(function, *operands, limit=12, gradients=False)


LINEAR = (t(4, 8, 12), t(16, 12), t(16))
UNEVEN = (t(3, 7, 5), t(6, 5), t(6))

FREE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Any, ...], Any]] = {
    "mm rows": (torch.mm, (t(8, 6), t(6, 4)), (S0, R), S0),
    "mm columns": (torch.mm, (t(8, 6), t(6, 4)), (R, S1), S1),
    "mm contracted": (torch.mm, (t(5, 7), t(7, 3)), (S1, S0), P),
    "mm sum": (torch.mm, (t(5, 7), t(7, 3)), (P, R), P),
    "addmm contracted, bias whole": (torch.addmm, (t(3), t(5, 7), t(7, 3)), (R, S1, S0), P),
    "addmm contracted, bias a sum": (torch.addmm, (t(3), t(5, 7), t(7, 3)), (P, S1, S0), P),
    "addmm sum, bias whole": (torch.addmm, (t(3), t(5, 7), t(7, 3)), (R, P, R), P),
    "bmm batch": (torch.bmm, (t(6, 4, 3), t(6, 3, 5)), (S0, S0), S0),
    "addbmm batch": (torch.addbmm, (t(4, 5), t(6, 4, 3), t(6, 3, 5)), (R, S0, S0), P),
    "dot": (torch.dot, (t(7), t(7)), (S0, S0), P),
    "linear batch": (F.linear, LINEAR, (S0, R, R), S0),
    "linear sequence": (F.linear, LINEAR, (S1, R, R), S1),
    "linear columns": (F.linear, LINEAR, (R, S0, S0), S2),
    "linear rows": (F.linear, LINEAR, (S2, S1, R), P),
    "linear uneven sequence": (F.linear, UNEVEN, (S1, R, R), S1),
    "linear uneven columns": (F.linear, UNEVEN, (R, S0, S0), S2),
    "linear sum": (F.linear, LINEAR, (P, R, R), P),
    "matmul heads": (torch.matmul, (t(2, 4, 3, 5), t(2, 4, 5, 6)), (S1, S1), S1),
    "cdist rows": (torch.cdist, (t(4, 5, 3), t(4, 6, 3)), (S1, R), S1),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


@pytest.mark.parametrize(
    ("placements", "result"),
    [
        (([S0, S1], R2 := [R, R], R2), (S0, S1)),
        (([S0, R], [R, S0], [R, S0]), (S0, S2)),
        (([S1, R], [R, S0], [R, S0]), (S1, S2)),
        (([S0, S2], [R, S1], R2), (S0, P)),
        (([S1, S2], [R, S1], R2), (S1, P)),
    ],
)
def test_linear_on_two_axes_without_communication(placements: Any, result: Any) -> None:
    assert collectives(F.linear, LINEAR, placements, (2, 2)) == (result, 0)


@pytest.mark.parametrize("bias", [[R, S0], [S0, S0]])
def test_linear_with_a_shard_on_an_axis_of_one_rank(bias: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4, 1))
    given = (t(3, 6), [S0, S1]), (t(5, 6), [R, R]), (t(5), bias)
    out = F.linear(*(sw.distribute_tensor(value, mesh, placements) for value, placements in given))
    torch.testing.assert_close(out.full_tensor(), F.linear(t(3, 6), t(5, 6), t(5)))


def test_bias_is_added_once_to_a_sum() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(t(5, 8), mesh, [S1])
    weight = sw.distribute_tensor(t(3, 8), mesh, [S1])
    bias = sw.distribute_tensor(t(3), mesh, [R])
    out = F.linear(x, weight, bias)
    assert out.placements == (P,)
    torch.testing.assert_close(out.full_tensor(), F.linear(t(5, 8), t(3, 8), t(3)))


def test_product_of_a_masked_sum_is_a_plain_sum() -> None:
    """What ranks hold of it overlaps: nothing but a linear operator may be computed before the reduction."""
    mesh = sw.init_device_mesh("cpu", (4,))
    table, indices = t(8, 3), torch.arange(8).flip(0)
    looked_up = F.embedding(sw.distribute_tensor(indices, mesh, [R]), sw.distribute_tensor(table, mesh, [S0]))
    mixed = sw.distribute_tensor(t(2, 8), mesh, [R]) @ looked_up
    torch.testing.assert_close(mixed.relu().full_tensor(), (t(2, 8) @ table[indices]).relu())


# ---------------------------------------------------------------- groups of rows with a matrix each

ENDS = torch.tensor([2, 2, 9, 10], dtype=torch.int32)
GROUPED: dict[str, tuple[torch.Tensor, ...]] = {
    "tokens and experts": (t(10, 8), t(4, 8, 12), ENDS),
    "experts and tokens": (t(4, 12, 8), t(8, 12), ENDS + 2),
    "tokens summed": (t(12, 8), t(8, 16), torch.tensor([3, 3, 8], dtype=torch.int32)),
    "batches": (t(3, 10, 8), t(3, 8, 12)),
}


def twice_derived(first: Any, second: Any, offs: Any = None) -> list[Any]:
    """A grouped product, its gradients and theirs."""
    result = F.grouped_mm(first, second, offs=offs)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)
    grads = torch.autograd.grad((result * result * weights).sum(), [first, second], create_graph=True)
    return [result, *grads, *torch.autograd.grad(sum((g * g).sum() for g in grads), [first, second])]


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_and_two_orders_of_derivatives(name: str, recwarn: pytest.WarningsRecorder) -> None:
    given = [a.float() if a.is_floating_point() else a for a in GROUPED[name]]
    wanted = twice_derived(*(a.clone().requires_grad_(a.is_floating_point()) for a in given))
    for shape in ((4,), (2, 3)):
        mesh = sw.init_device_mesh("cpu", shape)
        for placed in layouts([a.shape for a in given], len(shape), random.Random(0), 8):
            laid_out = [distribute(a, mesh, p) for a, p in zip(given, placed, strict=True)]
            got = twice_derived(*(a.requires_grad_(a.is_floating_point()) for a in laid_out))
            for a, b in zip(whole(got), wanted, strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))
    assert not [w for w in recwarn if issubclass(w.category, sw.ReplicationWarning)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("placements", "result", "weight_gradient"),
    [
        ((R, S0, R), sw.MaskPartial(), S0),
        ((S0, R, R), S0, P),
        ((R, S2, R), S1, S2),
        ((S1, S1, R), P, S1),
        ((P, R, R), P, P),
    ],
)
def test_grouped_products_without_communication(
    dtype: torch.dtype, placements: Any, result: Any, weight_gradient: Any
) -> None:
    """The gradient of sharded experts is computed by the ranks that hold them, though all rows are everywhere."""
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = (t(16, 8).to(dtype), t(6, 8, 16).to(dtype), torch.tensor([2, 2, 9, 10, 15, 16], dtype=torch.int32))
    given = [distribute(a, mesh, [p]) for a, p in zip(plain, placements, strict=True)]
    first, second = given[0].requires_grad_(), given[1].requires_grad_()

    def run() -> Any:
        out = F.grouped_mm(first, second, offs=given[2])
        like = [R if isinstance(p, sw.Partial) else p for p in out.placements]
        (grad,) = torch.autograd.grad(out, second, sw.distribute_tensor(torch.ones(16, 16, dtype=dtype), mesh, like))
        return out, grad

    (out, grad), moved, _ = bytes_moved(run)
    assert (out.placements, grad.placements) == ((result,), (weight_gradient,))
    assert moved == 0
    wanted = F.grouped_mm(plain[0], plain[1], offs=plain[2])
    torch.testing.assert_close(whole(out), wanted, rtol=2e-2, atol=5e-2)


def test_grouped_product_on_a_dry_run() -> None:
    with sw.dry_run():
        mesh = sw.init_device_mesh("cpu", (64,))
        rows = sw.distribute_tensor(torch.empty(512, 64, device="meta"), mesh, [R])
        experts = sw.distribute_tensor(torch.empty(128, 64, 256, device="meta"), mesh, [S0]).requires_grad_()
        ends = sw.distribute_tensor(torch.empty(128, dtype=torch.int32, device="meta"), mesh, [R])
        out = F.grouped_mm(rows, experts, offs=ends)
        out.sum().backward()
        assert (str(out.spec), str(experts.grad.spec)) == ("f32[512,256] M", "f32[128,64,256] S0")


def test_grouped_product_that_one_device_refuses() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    rows, experts = (sw.distribute_tensor(a, mesh, [R]) for a in (t(8, 8).float(), t(4, 8, 8).float()))
    for bad in (torch.arange(4), torch.arange(3, dtype=torch.int32), None):
        with pytest.raises(RuntimeError):
            F.grouped_mm(rows, experts, offs=bad)
    with pytest.raises(RuntimeError):
        F.grouped_mm(rows.double(), experts.double(), offs=torch.arange(4, dtype=torch.int32))
