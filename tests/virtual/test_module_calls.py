"""Data parallel modules in any pattern of calls: a sample of random trees, and patterns that once went wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Shard
from tests.transformer import assert_same, whole
from tests.virtual.module_trees import run_models

MESH = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
PLACES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: sw.distribute_tensor(x, MESH, [Shard(0)]),
    lambda x: sw.RankTensor(x.chunk(2)),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.dec(torch.tanh(self.enc(x))) * self.scale


def pair(make: Callable[[], nn.Module], *children: str) -> tuple[Any, Any]:
    """A module of one device, and the same fully sharded, some of its children on their own."""
    torch.manual_seed(0)
    reference = make().double()
    model: Any = copy.deepcopy(reference)
    for name in (*children, ""):
        sw.fully_shard(model.get_submodule(name), MESH)
    return reference, model


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss(out: Any) -> Any:
    return out.pow(2).mean()


def test_random_trees() -> None:
    assert run_models(range(16)) == []


@pytest.mark.parametrize("place", PLACES)
def test_a_child_called_on_its_own_changes_nothing_for_the_root(place: Any) -> None:
    reference, model = pair(Net, "enc", "dec")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    for step in range(3):
        for one, x in ((reference, batch(step)), (model, place(batch(step)))):
            loss(one(x)).backward()
            one.enc(x)
            loss(one(x) + one.dec(x)).backward()
        assert_same(model, reference, lambda parameter: parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, reference, lambda parameter: parameter.detach())


@pytest.mark.parametrize("wrap", [lambda m: sw.replicate(m, MESH), lambda m: sw.fully_shard(m, MESH)])
def test_hooks_of_parameters_step_an_optimizer_in_backward(wrap: Any) -> None:
    torch.manual_seed(0)
    reference = Net().double()
    model = wrap(copy.deepcopy(reference))
    for one in (reference, model):
        for parameter in one.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def step(_: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss(reference(batch(number))).backward()
        loss(model(PLACES[0](batch(number)))).backward()
        assert_same(model, reference, lambda parameter: parameter.detach())
        assert all(parameter.grad is None for parameter in model.parameters())


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.table(tokens))


@pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")
@pytest.mark.parametrize("children", [(), ("table",)])
def test_a_write_in_forward_is_kept_or_refused(children: tuple[str, ...]) -> None:
    reference, model = pair(Renormed, *children)
    tokens = torch.tensor([0, 1, 2, 3])
    for _ in range(2):
        loss(reference(tokens)).backward()
        loss(model(PLACES[0](tokens))).backward()
        assert_same(model, reference, lambda parameter: parameter.detach())
        assert_same(model, reference, lambda parameter: parameter.grad)
    with pytest.raises(sw.UnsupportedError, match="copies of it may differ"):
        model(PLACES[1](tokens))
    model(PLACES[0](tokens))


def test_a_write_after_unshard_is_refused() -> None:
    _, model = pair(Net)
    model.unshard()
    with torch.no_grad():
        model.scale.mul_(2)
    with pytest.raises(sw.UnsupportedError, match="scale was written to"):
        model.reshard()
    loss(model(PLACES[0](batch()))).backward()


def test_a_write_between_forward_and_backward_is_said() -> None:
    _, model = pair(Net, "enc", "dec")
    out = loss(model(PLACES[0](batch())))
    with torch.no_grad():
        model.dec.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    loss(model(PLACES[0](batch()))).backward()


@pytest.mark.parametrize("place", PLACES)
def test_functional_call(place: Any) -> None:
    reference, model = pair(Net, "enc")
    before = dict(model.named_parameters())
    for kind in (lambda p: p.detach().clone().requires_grad_(), lambda p: nn.Parameter(p.detach() * 2)):
        ours, theirs = ({n: kind(p) for n, p in m.named_parameters()} for m in (model, reference))
        loss(functional_call(reference, theirs, (batch(),))).backward()
        loss(functional_call(model, ours, (place(batch()),))).backward()
        for name, expected in theirs.items():
            torch.testing.assert_close(whole(ours[name].grad), expected.grad, rtol=0, atol=1e-9)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    loss(reference(batch())).backward()
    loss(model(place(batch()))).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


class Merged(nn.Module):
    """A frozen weight with a product of small ones added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.frozen + self.b @ self.a)


class Layers(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = Merged(), Merged(), reentrant

    def forward(self, x: Any) -> Any:
        for layer in (self.first, self.second):
            x = torch.tanh(layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("place", PLACES)
def test_weights_merged_with_frozen_ones(place: Any, reentrant: bool | None) -> None:
    reference, model = pair(lambda: Layers(reentrant), "first", "second")
    for _ in range(2):
        loss(reference(batch().requires_grad_())).backward()
        loss(model(place(batch()).requires_grad_())).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


@pytest.mark.parametrize("place", PLACES)
def test_a_penalty_on_gradients_of_inputs(place: Any) -> None:
    reference, model = pair(Net, "enc", "dec")
    for one, x in ((reference, batch().requires_grad_()), (model, place(batch()).requires_grad_())):
        out = one(x)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        (loss(out) + loss(grad)).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)
    with pytest.raises(sw.UnsupportedError, match="create_graph"):
        loss(model(PLACES[0](batch()))).backward(create_graph=True)


def test_momentum_has_the_layout_of_its_parameter() -> None:
    weight = nn.Parameter(sw.ones(4, device_mesh=MESH))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    (weight * sw.ones(2, 4, device_mesh=MESH, placements=[Shard(0)])).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].spec is weight.spec


class Inner(nn.Module):
    """A part that is checkpointed inside: backward reads the parameters again, without a hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Any) -> Any:
        return checkpoint(lambda value: torch.tanh(F.linear(value, self.weight)), x, use_reentrant=False)


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_without_gradients_leaves_the_backward_of_an_earlier_one_its_parameters(place: Any) -> None:
    reference, model = pair(Inner)
    for one, x in ((reference, batch()), (model, place(batch()))):
        first = loss(one(x))
        with torch.no_grad():
            one(x)
        first.backward()
    assert_same(model, reference, lambda parameter: parameter.grad)
