"""Derivatives of any order through moves, locals and layers: by finite differences, and against one device.

`python -m tests.virtual.derivatives` checks every move and every operator of its list.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardwise as sw
from shardwise import DTensor, Partial, RankTensor, Replicate, Shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.virtual.derivatives import OPERATORS, check, operands, sample

# Each is differentiated by others of the list, and `check` runs gradgradcheck through it.
ANY_ORDER = {
    "shardwise.tensor.autograd_functions.FromLocal",
    "shardwise.tensor.autograd_functions.ToLocal",
    "shardwise.tensor.autograd_functions.Redistribute",
    "shardwise.tensor.ranks.OnEveryRank",
    "shardwise.tensor.ranks.FirstRank",
    "shardwise.parallel.tensor_parallel.local_region._ToLayer",
    "shardwise.parallel.tensor_parallel.local_region._FromLayer",
    "shardwise.moe.token_maps.MapRows",  # tests/virtual/test_moe.py
    "shardwise.moe.token_sending.SendTokens",  # test_a_penalty_of_gradients_through_experts, below
    "shardwise.moe.weighted_return.WeightedReturn",  # test_a_penalty_of_gradients_through_experts, below
    "shardwise.decompose.sharded_dropout_attention._Attention",  # test_a_penalty_of_gradients_through_dropout
    "shardwise.interop._FromTorch",  # tests/gloo/test_derivatives.py
    "shardwise.interop._ToTorch",
}
# their derivative raises
ONCE = {
    "shardwise.tensor.gradient_layouts.ProductOfOthers",
    "shardwise.fabric.target_kernels.FusedRMSNorm",
    "shardwise.parallel.data_parallel.gathered_params.Leaves",
    "shardwise.capture.program._Spent",  # in place of a graph that was used up: its gradient raises too
}
# signals: nothing flows through them
NO_GRADIENT = {
    "shardwise.parallel.data_parallel.gathered_params.Completion",
    "shardwise.pipelines.split_backward._Within",
}


def mesh_of(*shape: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_every_function_has_derivatives_of_any_order_or_raises() -> None:
    for module in pkgutil.walk_packages(sw.__path__, "shardwise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = set(), [torch.autograd.Function]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("shardwise."):
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    assert found == ANY_ORDER | ONCE | NO_GRADIENT


def second_gradients(loss: Any, inputs: list[Any]) -> list[torch.Tensor]:
    """Gradients of the squared gradients of a loss."""
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty: Any = sum(each.square().sum() for each in first)
    return [whole(each) for each in torch.autograd.grad(penalty, inputs)]


@pytest.mark.parametrize("capacity", [None, 12], ids=["every token", "capacity"])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_penalty_of_gradients_through_experts(early: bool, choices: int, capacity: int | None) -> None:
    tokens, scale, scores = numbers(9, 4), numbers(9, choices, seed=1), numbers(9, 5, seed=2)
    ids = scores.topk(choices).indices

    def gradients(x: Any, weights: Any, ids: Any) -> list[torch.Tensor]:
        scale = weights.sigmoid()
        rows, back = sw.moe.dispatch(x, ids, 5, weights=scale if early else None, capacity=capacity)
        y = back(rows.sin() * rows) if early else back(rows.sin() * rows, scale)
        return second_gradients(y.pow(3).sum(), [x, weights])

    mesh = mesh_of(4)
    shared = [sw.distribute_tensor(each, mesh, [sw.Shard(0)]) for each in (tokens, scale, ids)]
    plain = gradients(tokens.requires_grad_(), scale.requires_grad_(), ids)
    ours = gradients(shared[0].requires_grad_(), shared[1].requires_grad_(), shared[2])
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("placement", [sw.Shard(2), sw.Zigzag(2)], ids=str)
def test_a_penalty_of_gradients_through_dropout(placement: sw.Placement) -> None:
    tensors = [numbers(1, 2, 16, 4, seed=seed) for seed in range(3)]

    def gradients(tensors: list[Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        out = F.scaled_dot_product_attention(*tensors, dropout_p=0.3, is_causal=True)
        return second_gradients(out.pow(3).sum(), tensors)

    mesh = mesh_of(4)
    ours = gradients([sw.distribute_tensor(t, mesh, [placement]).requires_grad_() for t in tensors])
    for one, other in zip(ours, gradients([t.requires_grad_() for t in tensors]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", sample(0, 3), ids=str)
def test_finite_differences(case: Any) -> None:
    assert check(case) is None


def test_operators_are_those_that_torch_has() -> None:
    assert len(set(OPERATORS)) > 200
    for text in OPERATORS:
        eval(text, {"torch": torch, "F": F}, operands())


# ---------------------------------------------------------------- moves


def penalty(function: Callable[[Any], Any], x: Any) -> torch.Tensor:
    """The gradient of a gradient penalty."""
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return whole(second)


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch does so for forward mode

ROUND: dict[str, Callable[[Any], Any]] = {
    "redistribute": lambda x: x.redistribute(placements=[Shard(1)]),
    "to a sum": lambda x: x.redistribute().redistribute(placements=[Partial()]),
    "full_tensor": lambda x: x.full_tensor(),
    "locals": lambda x: DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape),
    "locals of a sum": lambda x: DTensor.from_local(
        x.redistribute().redistribute(placements=[Partial()]).to_local() * 1.5, x.device_mesh, [Partial()]
    ),
    "locals of replicas": lambda x: x.redistribute().to_local(grad_placements=[Partial("avg")]),
    "async": lambda x: x.redistribute(placements=[Replicate()], async_op=True),
    "with backward_dtype": lambda x: x.redistribute(placements=[Shard(1)], backward_dtype=torch.float64),
    "two moves": lambda x: x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]),
}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ROUND)
def test_a_gradient_penalty_through_a_move(name: str, ranks: int) -> None:
    value = numbers(5, 3)
    x = sw.distribute_tensor(value, mesh_of(ranks), [Shard(0)]).requires_grad_()
    scale = 1.5 if name == "locals of a sum" else 1.0
    want = penalty(lambda x: (x**3 * scale).tanh(), value.requires_grad_())

    torch.testing.assert_close(penalty(lambda x: ROUND[name](x**3).tanh(), x), want)


def test_a_product_of_parts_on_ranks_has_second_derivatives() -> None:
    """What each rank computes of its parts is added up: the gradient of its gradient is a sum over the ranks."""
    a, b, mesh = numbers(4, 6), numbers(6, 3, seed=1), mesh_of(3)

    def product(x: Any, w: Any) -> Any:
        return DTensor.from_local(x.to_local() @ w.to_local(), mesh, [Partial()]).full_tensor().tanh()

    x = sw.distribute_tensor(a, mesh, [Shard(1)]).requires_grad_()
    w = sw.distribute_tensor(b, mesh, [Shard(0)]).requires_grad_()
    for at, (mine, plain) in enumerate([(x, a), (w, b)]):
        own = (lambda t: product(t, w)) if at == 0 else (lambda t: product(x, t))
        want = (lambda t: (t @ b).tanh()) if at == 0 else (lambda t: (a @ t).tanh())
        torch.testing.assert_close(penalty(own, mine), penalty(want, plain.clone().requires_grad_()))


def test_the_second_derivative_of_a_product_over_ranks_is_refused() -> None:
    local = RankTensor([numbers(2, seed=i) for i in range(3)]).requires_grad_()
    made = DTensor.from_local(local, mesh_of(3), [Partial("product")]).full_tensor()
    (first,) = torch.autograd.grad(made.sum(), local, create_graph=True)
    with pytest.raises(sw.UnsupportedError, match=r"second derivatives through from_local with Partial\(product\)"):
        first.sum().backward(torch.ones_like(first.sum()))


@pytest.mark.parametrize("op", ["product", "norm2"])
def test_the_derivative_of_the_local_of_a_product_or_norm_is_refused(op: str) -> None:
    x = DTensor.from_local(numbers(4).abs(), mesh_of(2), [Partial(op)]).requires_grad_()
    with pytest.raises(sw.UnsupportedError, match="the derivative of the local of a tensor"):
        x.to_local().sum().backward(torch.ones_like(x.detach().to_local().sum()))


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extreme_through_locals_has_its_gradient_once(op: str) -> None:
    value = numbers(4)
    x = sw.distribute_tensor(value, mesh_of(3), [Partial(op)]).requires_grad_()
    again = DTensor.from_local(x.to_local(), x.device_mesh, x.placements)
    again.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * value)


def test_a_plain_gradient_is_taken_as_replicated_or_refused() -> None:
    x = sw.distribute_tensor(numbers(4), mesh_of(2), [Shard(0)]).requires_grad_()
    x.redistribute().backward(numbers(4))
    assert torch.equal(x.grad.full_tensor(), numbers(4))
    with sw.plain_tensors("refuse"), pytest.raises(sw.PlainTensorError, match="gradient"):
        x.redistribute().backward(numbers(4))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_backward_sees_that_what_it_saved_was_written_through_a_local_or_a_dtensor(placement: Any) -> None:
    """As on plain tensors, where `y = x.tanh(); y.mul_(3)` cannot be differentiated."""
    mesh = mesh_of(4)

    def through_the_local(x: DTensor) -> Any:
        y = x.tanh()
        return DTensor.from_local(y.to_local().mul_(3), mesh, [placement])

    def through_the_dtensor(x: DTensor) -> Any:
        return DTensor.from_local(x.to_local().tanh(), mesh, [placement]).mul_(3)

    def of_the_dtensor_after_its_local(x: DTensor) -> Any:
        y = x * 1
        z = y.to_local().sin()
        y.mul_(3)
        return DTensor.from_local(z, mesh, [placement])

    def through_a_local_without_grad(x: DTensor) -> Any:
        y = x.tanh()
        with torch.no_grad():
            y.to_local().mul_(3)
        return y

    def through_the_local_of_a_detached_view(x: DTensor) -> Any:
        y = x.tanh()
        y.view(2, 4).detach().to_local().mul_(3)
        return y

    def through_the_local_of_a_constant(x: DTensor) -> Any:
        local = sw.distribute_tensor(numbers(8), mesh, [placement]).to_local()
        y = DTensor.from_local(local, mesh, [placement]) * x
        local.mul_(3)
        return y

    def through_the_plain_tensor_of_every_rank(x: DTensor) -> Any:
        plain = numbers(x.to_local().shape[0])
        y = DTensor.from_local(plain, mesh, [placement]) * x
        plain.mul_(3)
        return y

    functions = [
        through_the_local,
        through_the_dtensor,
        of_the_dtensor_after_its_local,
        through_a_local_without_grad,
        through_the_local_of_a_detached_view,
        through_the_local_of_a_constant,
        through_the_plain_tensor_of_every_rank,
    ]
    for function in functions:
        x = sw.distribute_tensor(numbers(8), mesh, [placement]).requires_grad_()
        result = function(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_writes_to_locals_that_backward_does_not_need() -> None:
    x = sw.distribute_tensor(numbers(8), mesh_of(4), [Shard(0)]).requires_grad_()
    made = DTensor.from_local((x * 2).to_local().mul_(3).sub_(1), x.device_mesh, [Shard(0)])
    made.add_(1).relu_().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(whole(x.grad), 6 * (numbers(8) > 0).double())


def test_distribute_tensor_does_not_end_a_graph_silently() -> None:
    x = numbers(4).requires_grad_()
    with pytest.raises(sw.UnsupportedError, match="gradients would not reach its inputs"):
        sw.distribute_tensor(x * 2, mesh_of(2), [Shard(0)])
    with torch.no_grad():
        assert not sw.distribute_tensor(x * 2, mesh_of(2), [Shard(0)]).requires_grad


# ---------------------------------------------------------------- layers of plans


def plan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()

    plain, mine = model(), model()
    mine.load_state_dict(plain.state_dict())
    styles = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    return plain, parallelize_module(mine, mesh_of(4), styles)


def test_layers_have_second_derivatives() -> None:
    plain, mine = plan()
    value = numbers(4, 8)
    x = sw.distribute_tensor(value, mesh_of(4), [Shard(0)]).requires_grad_()
    y = value.clone().requires_grad_()
    for model, given in ((plain, y), (mine, x)):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(given).tanh().sum(), [given, *parameters], create_graph=True)
        sum((g**2).sum() for g in grads).backward()  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    for p, q in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_layers_in_forward_mode_and_inside_transforms() -> None:
    plain, mine = plan()
    value, tangent = numbers(4, 8), numbers(4, 8, seed=1)
    x, t = (sw.distribute_tensor(v, mesh_of(4), [Shard(0)]) for v in (value, tangent))
    want = jvp(plain, (value,), (tangent,))[1]
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(mine(forward_ad.make_dual(x, t)))
    torch.testing.assert_close(whole(out.tangent), want)
    torch.testing.assert_close(whole(jvp(mine, (x,), (t,))[1]), want)
    own, theirs = dict(mine.named_parameters()), dict(plain.named_parameters())

    def loss(model: nn.Module) -> Callable[..., Any]:
        return lambda parameters, x: functional_call(model, parameters, (x,)).tanh().sum()

    got, expected = grad(loss(mine))(own, x), grad(loss(plain))(theirs, value)
    for name in expected:
        torch.testing.assert_close(whole(got[name]), expected[name])


# ---------------------------------------------------------------- torch.func


def test_methods_of_dtensors_exist_only_where_they_are_meant() -> None:
    plain = torch.ones(3)
    for name in ("redistribute", "to_local", "full_tensor", "placements", "device_mesh", "spec"):
        assert not hasattr(plain, name)
        assert not hasattr(RankTensor([plain]), name)
    assert vmap(lambda x: x * hasattr(x, "placements"))(plain).tolist() == [0.0, 0.0, 0.0]


def inside(x: Any) -> Any:
    """Moves, locals and factories in a function."""
    mesh = x.device_mesh
    y = (x**3).redistribute(placements=[Shard(1)])
    y = y + sw.ones(3, 6, dtype=x.dtype, device_mesh=mesh, placements=[Shard(0)]).sum(0)
    y = DTensor.from_local(y.to_local() * 2, mesh, y.placements, shape=y.shape)
    return y @ sw.distribute_tensor(torch.eye(6, dtype=x.dtype), mesh, [Shard(1)])


def alone(x: torch.Tensor) -> torch.Tensor:
    return (x**3 + 3) * 2


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "grad": lambda f, x: grad(lambda x: f(x).tanh().sum())(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: (f(x) ** 2).sum())(x).square().sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),))[1],
    "vjp": lambda f, x: vjp(f, x)[1](x.cos())[0],
    "hessian": lambda f, x: hessian(lambda x: (f(x) ** 2).sum())(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(lambda x: f(x).sin().sum()))(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x.sin()])),
    "vmap over the last dim": lambda f, x: vmap(f, in_dims=2, out_dims=1)(torch.stack([x, x.sin()], 2)),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).tanh().sum()))(torch.stack([x, x.sin()])),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(x.expand(2, 4, 4, 6).clone()),
    "hvp": lambda f, x: jvp(grad(lambda x: (f(x) ** 2).sum()), (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_transforms_of_functions_that_move(name: str, ranks: int) -> None:
    value = numbers(4, 6)
    x = sw.distribute_tensor(value, mesh_of(ranks), [Shard(0)])
    torch.testing.assert_close(whole(TRANSFORMS[name](inside, x)), TRANSFORMS[name](alone, value))


def test_a_mapped_dim_that_is_sharded_stays_so() -> None:
    """Inside vmap the samples of a sharded batch are seen replicated, and a move of one of them moves its own dims."""
    value, mesh = numbers(8, 4, 6), mesh_of(2, 2)
    x = sw.distribute_tensor(value, mesh, [Shard(0), Shard(2)])
    seen: list[Any] = []

    def one(sample: Any) -> Any:
        seen.append((tuple(sample.placements), tuple(sample.spec.shape)))
        return sample.redistribute(placements=[Replicate(), Shard(0)]) * 2

    out = vmap(one)(x)
    assert seen == [((Replicate(), Shard(1)), (4, 6))]
    assert out.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(out.full_tensor(), value * 2)


def test_per_sample_gradients_of_a_batch_sharded_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs, targets, mesh = numbers(8, 6), numbers(8, 1, seed=1), mesh_of(4)

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    want = per_sample(plain, inputs, targets)
    own = {name: sw.distribute_tensor(p, mesh, [Replicate()]) for name, p in plain.items()}
    with sw.strict():
        x, y = (sw.distribute_tensor(t, mesh, [Shard(0)]) for t in (inputs, targets))
        got = per_sample(own, x, y)
    for name in want:
        assert got[name].placements == (Shard(0),)
        torch.testing.assert_close(got[name].full_tensor(), want[name])


def test_random_factories_obey_vmap() -> None:
    x = sw.distribute_tensor(numbers(4, 3), mesh_of(2), [Shard(0)])

    def noisy(row: Any) -> Any:
        return row + sw.rand(3, dtype=row.dtype, device_mesh=x.device_mesh)

    with pytest.raises(sw.UnsupportedError, match="draws one tensor for all samples"):
        vmap(noisy)(x)
    noise = vmap(noisy, randomness="same")(x).full_tensor() - x.full_tensor()
    assert torch.allclose(noise[0], noise[3])


def test_vjp_after_its_transform_has_ended() -> None:
    value = numbers(4, 6)
    x = sw.distribute_tensor(value, mesh_of(2), [Partial("max")])
    pull = vjp(inside, x)[1]
    weight = x.cos().requires_grad_()
    (again,) = torch.autograd.grad(pull(weight)[0].square().sum(), weight)
    plain = vjp(alone, value)[1]
    other = value.cos().requires_grad_()
    torch.testing.assert_close(whole(again), torch.autograd.grad(plain(other)[0].square().sum(), other)[0])
