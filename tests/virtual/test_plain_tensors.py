"""Plain tensors among DTensors on virtual ranks: replicated or refused, alike for every operator; their gradients."""

import threading

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.fabric.rank_tensor import RankTensor
from tests.virtual.parity import assert_parity

FLOAT = torch.float64


@pytest.fixture(params=[(3,), (2, 2)], ids=str)
def mesh(request: pytest.FixtureRequest) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", request.param)


def sharded(mesh: sw.DeviceMesh, *size: int, dim: int = 0) -> sw.DTensor:
    whole = torch.randn(*size, dtype=FLOAT)
    return sw.distribute_tensor(whole, mesh, [sw.Shard(dim), *[sw.Replicate()] * (mesh.ndim - 1)])


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, sw.DTensor) else value


MIXES = {
    "add": lambda x, p: x + p,
    "torch.add": lambda x, p: torch.add(x, p),
    "from the left": lambda x, p: p * x,
    "matmul": lambda x, p: x @ p.t(),
    "cat": lambda x, p: torch.cat([x, p]),
    "where": lambda x, p: torch.where(x > 0, x, p),
    "linear": lambda x, p: F.linear(x, p),
    "einsum": lambda x, p: torch.einsum("ij,kj->ik", x, p),
    "a batch of one": lambda x, p: torch.matmul(x[None], p.t()),
    "mse_loss": lambda x, p: F.mse_loss(x, p),
    "kron": lambda x, p: torch.kron(x, p),
    "cosine_similarity": lambda x, p: torch.cosine_similarity(x, p),
    "a keyword": lambda x, p: torch.add(x, other=p),
    "in place": lambda x, p: x.clone().mul_(p),
    "foreach": lambda x, p: torch._foreach_mul([x, x], [p, p])[1],
    "an index": lambda x, p: x[p[:, 0].argsort()],
    "a list index": lambda x, p: x[[1, 0, 2]] * p[:3],
    "an operator": lambda x, p: torch.ops.aten.add.Tensor(x, p),
    "bilinear": lambda x, p: F.bilinear(x, x, p.expand(3, 4, 3)[:, :3].contiguous()),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=list(MIXES))
def test_every_operator_takes_a_plain_tensor_as_replicated_or_refuses_it(mesh, mix):
    x, p = sharded(mesh, 4, 3), torch.randn(4, 3, dtype=FLOAT)
    wanted = mix(x.full_tensor(), p)
    for policy in ("verify", "replicate"):
        with sw.plain_tensors(policy):
            got = mix(x, p)
            assert isinstance(got, sw.DTensor)
            torch.testing.assert_close(got.full_tensor(), wanted)
    with (
        sw.plain_tensors("refuse"),
        pytest.raises(sw.PlainTensorError, match=r"argument .* is a plain torch.Tensor of"),
    ):
        mix(x, p)
    with sw.strict(), pytest.raises(sw.PlainTensorError, match=__file__):
        mix(x, p)
    torch.testing.assert_close(mix(x, p).full_tensor(), wanted)


def test_a_module_with_plain_parameters_is_refused_in_strict_mode(mesh):
    with sw.strict(), pytest.raises(sw.PlainTensorError, match=r"linear.*argument 2"):
        torch.nn.Linear(3, 4, dtype=FLOAT)(sharded(mesh, 4, 3))


def test_one_element_is_a_constant_everywhere(mesh):
    x = sharded(mesh, 4, 3)
    for policy in ("verify", "replicate", "refuse"):
        with sw.plain_tensors(policy):
            assert torch.equal((x + torch.tensor(2.0)).full_tensor(), x.full_tensor() + 2)
            assert torch.equal((x * torch.tensor([3.0])).full_tensor(), x.full_tensor() * 3)


@pytest.mark.parametrize("policy", ["verify", "refuse"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.mvlgamma(x.abs() + 3, 2),
        lambda x: torch.cartesian_prod(x[:, 0], x[:, 1]),
        lambda x: x.cummax(1)[0],
        lambda x: x.max(1)[0],
        lambda x: F.one_hot(x.abs().long(), 10).double(),
        lambda x: x.prod(1),
        lambda x: x[[1, 0, 2]],
        lambda x: x[:, [True, False, True, True, False]],
    ],
)
def test_operators_that_make_plain_tensors_inside_work_under_every_policy(fn, policy):
    with sw.plain_tensors(policy):
        assert_parity(fn, torch.randn(4, 5, dtype=FLOAT), limit=8)


@pytest.mark.parametrize("policy", ["verify", "refuse"])
def test_svd_lowrank_makes_plain_tensors_in_python(mesh, policy):
    matrix = torch.randn(6, 4, dtype=FLOAT)
    torch.manual_seed(0)
    wanted = torch.svd_lowrank(matrix, q=4)[1]
    torch.manual_seed(0)
    x = sw.distribute_tensor(matrix, mesh, [sw.Shard(0)] + [sw.Replicate()] * (mesh.ndim - 1))
    with sw.plain_tensors(policy):
        got = torch.svd_lowrank(x, q=4)[1]
    torch.testing.assert_close(got.full_tensor(), wanted)


# ---------------------------------------------------------------- policies


def policy_here(x: sw.DTensor) -> str:
    try:
        x + torch.ones(4, 3)
    except sw.PlainTensorError:
        return "refuse"
    return "accept"


def test_the_innermost_context_counts_and_the_default_holds_outside(mesh):
    x = sharded(mesh, 4, 3)
    assert policy_here(x) == "accept"
    with sw.strict():
        assert policy_here(x) == "refuse"
        with sw.implicit_replication():
            assert policy_here(x) == "accept"
        assert policy_here(x) == "refuse"
    with sw.implicit_replication(), sw.strict():
        assert policy_here(x) == "refuse"
    sw.set_plain_tensors("refuse")
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(policy_here(x)))
        thread.start()
        thread.join()
        assert [*seen, policy_here(x)] == ["refuse", "refuse"]
        with sw.plain_tensors("verify"):
            assert policy_here(x) == "accept"
    finally:
        sw.set_plain_tensors("verify")
    assert policy_here(x) == "accept"
    with pytest.raises(RuntimeError, match="once"), sw.plain_tensors("refuse"):
        raise RuntimeError("once")
    assert policy_here(x) == "accept"
    with pytest.raises(sw.UnsupportedError, match="'verify', 'refuse', 'replicate'"):
        sw.set_plain_tensors("allow")


def test_operators_do_not_pay_for_refusal_where_nothing_is_refused():
    ordinary = torch._C._disabled_torch_function_impl
    assert sw.DTensor.__torch_function__ is ordinary
    with sw.plain_tensors("refuse"):
        assert sw.DTensor.__torch_function__ is not ordinary
    assert sw.DTensor.__torch_function__ is ordinary


def test_locals_of_virtual_ranks_must_agree_as_plain_tensors_of_processes(mesh):
    x = sharded(mesh, 4, 3)
    alike = x.redistribute(placements=[sw.Replicate()] * mesh.ndim).to_local()
    torch.testing.assert_close((x + alike).full_tensor(), 2 * x.full_tensor())
    torch.testing.assert_close((alike * x).full_tensor(), x.full_tensor() ** 2)
    differing = RankTensor([torch.full((4, 3), float(rank), dtype=FLOAT) for rank in range(mesh.size())])
    for mix in (lambda a, b: a + b, lambda a, b: b * a, lambda a, b: torch.cat([a, b])):
        with pytest.raises(sw.AgreementError, match="ranks 0 and 1 do not have the same"):
            mix(x, differing)


# ---------------------------------------------------------------- gradients

PROGRAMS = {
    "used twice": lambda x, p: (x * p + p).sum(),
    "broadcast": lambda x, p: (x * p[0] + p[:, :1]).square().sum(),
    "computed before": lambda x, p: (torch.tanh(p) * x).sum(),
    "with plain ones too": lambda x, p: (x * p).sum() + (p * p).sum(),
    "linear": lambda x, p: F.linear(x, p).square().sum(),
    "reduced in parts": lambda x, p: (x.sum(0) * p[0]).sum(),
    "an in-place write": lambda x, p: (x * (p * 1).mul_(2)).sum(),
    "written after its use": lambda x, p: _written_after(x, p),
    "a plain total": lambda x, p: torch.zeros((), dtype=FLOAT).add_((x * p).sum()),
}


def _written_after(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    q = p * 1
    first = x + q
    q.mul_(3)
    return (first * first + x * q).sum()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_the_gradient_of_a_plain_tensor_is_plain_and_whole(mesh, program):
    given, plain = sharded(mesh, 4, 3), torch.randn(4, 3, dtype=FLOAT)
    one, p1 = given.full_tensor().requires_grad_(), plain.clone().requires_grad_()
    x, p = given.requires_grad_(), plain.clone().requires_grad_()
    for _ in range(2):  # the second is added to the first
        program(one, p1).backward()
        program(x, p).backward()
    assert p.grad.__class__ is torch.Tensor
    assert isinstance(x.grad, sw.DTensor)
    torch.testing.assert_close(p.grad, p1.grad)
    torch.testing.assert_close(x.grad.full_tensor(), one.grad)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_second_derivatives_with_plain_tensors(mesh, program):
    given, plain = sharded(mesh, 4, 3), torch.randn(4, 3, dtype=FLOAT)
    one, p1 = given.full_tensor().requires_grad_(), plain.clone().requires_grad_()
    x, p = given.requires_grad_(), plain.clone().requires_grad_()
    for a, b in ((one, p1), (x, p)):
        grads = torch.autograd.grad(program(a, b), (a, b), create_graph=True)
        penalty = whole((grads[0] ** 2).sum()) + (grads[1] ** 2).sum() + whole((grads[0] * grads[1]).sum())
        assert grads[1].__class__ is torch.Tensor
        penalty.backward()
    assert p.grad.__class__ is torch.Tensor
    torch.testing.assert_close(p.grad, p1.grad)
    torch.testing.assert_close(x.grad.full_tensor(), one.grad)


def test_hooks_on_plain_leaves_do_not_pile_up_and_are_not_saved(mesh, tmp_path):
    x, p = sharded(mesh, 4, 3), torch.nn.Parameter(torch.ones(3, dtype=FLOAT))
    for _ in range(5):
        (x * p).sum().backward()
    assert p._backward_hooks is not None
    assert len(p._backward_hooks) == 1
    torch.save(p, tmp_path / "p.pt")
    assert torch.equal(torch.load(tmp_path / "p.pt"), p)


def test_a_plain_parameter_trains_as_on_one_device(mesh):
    torch.manual_seed(0)
    data = torch.randn(8, 3, dtype=FLOAT)
    models = [
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2)).double() for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())
    batches = [data, sw.distribute_tensor(data, mesh, [sw.Shard(0)] + [sw.Replicate()] * (mesh.ndim - 1))]
    for model, batch in zip(models, batches, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
