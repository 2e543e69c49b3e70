"""torch.optim, clipping and schedules on parameters of different layouts, against one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S0, S1, P, P2 = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial(), sw.Partial("norm2")
LAYOUTS = ([R, S0], [R, R], [S0, S1], [S0, S0], [S1, R])  # of parameters, in turn
GRADIENTS = ([P, S0], [P, P], [S0, S1], [R, S1], [P, R])  # of their gradients: alike, other, and waiting to be added
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam-amsgrad": lambda p, **how: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, **how),
    "sgd": lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **how),
    "adagrad": torch.optim.Adagrad,
}
LOOPS = {
    "rmsprop": lambda p, **how: torch.optim.RMSprop(p, momentum=0.9, centered=True, **how),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def mesh_of_four() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parameters(count: int = 10) -> tuple[list[Any], list[nn.Parameter]]:
    """The same parameters spread over a mesh, uneven ones among them, and on one device."""
    torch.manual_seed(0)
    mesh = mesh_of_four()
    values = [torch.randn(3 + i, 4) for i in range(count)]
    spread = [nn.Parameter(sw.distribute_tensor(v, mesh, LAYOUTS[i % 5])) for i, v in enumerate(values)]
    return spread, [nn.Parameter(v.clone()) for v in values]


def give_gradients(spread: list[Any], plain: list[nn.Parameter], layouts: Any = GRADIENTS) -> None:
    for i, (ours, one) in enumerate(zip(spread, plain, strict=True)):
        one.grad = torch.randn_like(one)
        ours.grad = sw.distribute_tensor(one.grad, ours.device_mesh, layouts[i % 5])


def assert_same(spread: list[Any], plain: list[nn.Parameter]) -> None:
    for ours, one in zip(spread, plain, strict=True):
        torch.testing.assert_close(ours.full_tensor(), one.detach())


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_numbers_of_one_device(name: str, how: dict[str, bool]) -> None:
    spread, plain = parameters()
    sharded, one = OPTIMIZERS[name](spread, **how), OPTIMIZERS[name](plain, **how)
    for _ in range(3):
        give_gradients(spread, plain)
        sharded.step()
        one.step()
    assert_same(spread, plain)
    assert all(p.placements == tuple(LAYOUTS[i % 5]) for i, p in enumerate(spread))


@pytest.mark.parametrize("name", LOOPS)
def test_other_optimizers_by_lists(name: str) -> None:
    spread, plain = parameters(5)
    sharded, one = LOOPS[name](spread, foreach=True), LOOPS[name](plain, foreach=True)
    for _ in range(3):
        give_gradients(spread, plain)
        sharded.step()
        one.step()
    assert_same(spread, plain)


def test_a_step_on_gradients_that_lie_alike_communicates_nothing() -> None:
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        spread, plain = parameters()
        optimizer = torch.optim.AdamW(spread, **how)
        give_gradients(spread, plain, LAYOUTS)
        with sw.strict():
            optimizer.step()


def test_sums_that_wait_are_reduced_once_and_together() -> None:
    spread, plain = parameters()
    whole, ones = spread[1::5], plain[1::5]  # replicated; their gradients are sums over both axes
    optimizer = torch.optim.AdamW(whole, foreach=True)
    give_gradients(whole, ones, [[P, P]] * 5)
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_total_counts() == 1


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, float("inf")])
def test_clipping_gradients(foreach: bool | None, order: float) -> None:
    spread, plain = parameters()
    give_gradients(spread, plain)
    norm = clip_grad_norm_(spread, 0.5, order, foreach=foreach)
    torch.testing.assert_close(norm.full_tensor(), clip_grad_norm_(plain, 0.5, order, foreach=foreach))  # pyright: ignore[reportAttributeAccessIssue]
    for ours, one in zip(spread, plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), one.grad)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("count", [4, 40])
def test_clipping_takes_one_reduction(foreach: bool | None, count: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread: list[Any] = [
        nn.Parameter(sw.ones(8, 4, device_mesh=mesh, placements=[(S0, R)[i % 2]])) for i in range(count)
    ]
    for p in spread:
        p.grad = torch.ones_like(p)
    with CommDebugMode() as comm:
        clip_grad_norm_(spread, 1.0, foreach=foreach)
    assert comm.get_total_counts() == 1


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, -1.5])
def test_a_norm_that_waits_on_one_axis_may_wait_on_another(order: float) -> None:
    """Parameters sharded over one axis and over both: their norms are reduced in one collective."""
    mesh = mesh_of_four()
    values = torch.randn(8, 4)
    norms = [
        torch.linalg.vector_norm(sw.distribute_tensor(values * scale, mesh, placements), order)
        for scale, placements in ((1, [S0, S0]), (2, [S0, R]), (3, [S0, S1]), (4, [R, S1]))
    ]
    with CommDebugMode() as comm:
        total: Any = torch.linalg.vector_norm(torch.stack(norms), order).add(1.0)
    assert comm.get_total_counts() == 1
    expected = torch.linalg.vector_norm(torch.stack([values * scale for scale in (1, 2, 3, 4)]), order)
    torch.testing.assert_close(total.full_tensor(), expected + 1.0)
    waiting: Any = norms[1]
    for axes in ([P2, P2], [R, P2]) if order == 2 else ():
        torch.testing.assert_close(waiting.redistribute(placements=axes).full_tensor(), waiting.full_tensor())


def test_what_is_no_norm_cannot_be_seen_as_one() -> None:
    value = sw.ones((), device_mesh=mesh_of_four())
    with pytest.raises(sw.LayoutError, match="norm2"):
        value.redistribute(placements=[R, P2])


def test_clipping_over_several_meshes() -> None:
    mesh = mesh_of_four()
    spread: list[Any] = [
        nn.Parameter(sw.ones(4, 4, device_mesh=on, placements=[S0] * on.ndim)) for on in (mesh["tp"], mesh, mesh["tp"])
    ]
    for p in spread:
        p.grad = torch.ones_like(p)
    with CommDebugMode() as comm:
        norm = clip_grad_norm_(spread, 1.0)
    plain = [nn.Parameter(torch.ones(4, 4)) for _ in spread]
    for p in plain:
        p.grad = torch.ones_like(p)
    torch.testing.assert_close(norm.to_local().tensors[0], clip_grad_norm_(plain, 1.0))  # pyright: ignore[reportAttributeAccessIssue]
    assert comm.get_total_counts() <= 2


# ---------------------------------------------------------------- what is remembered


def test_a_partial_that_is_read_twice_is_reduced_once() -> None:
    x = sw.DTensor.from_local(torch.ones(4), sw.init_device_mesh("cpu", (4,)), [P])
    with CommDebugMode() as comm:
        assert (x.exp() - x.sin()).full_tensor().tolist() == [
            pytest.approx(torch.tensor(4.0).exp() - torch.tensor(4.0).sin())
        ] * 4
    assert comm.get_total_counts() == 1


def test_what_is_remembered_is_forgotten_by_a_write() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    local = sw.RankTensor([torch.ones(4) for _ in range(4)])
    x = sw.DTensor.from_local(local, mesh, [P])
    writes: list[Callable[[], Any]] = [
        lambda: x.mul_(2),
        lambda: x.view(2, 2).mul_(2),
        lambda: x.to_local().mul_(2),
        lambda: local.tensors[1].add_(1),
        lambda: torch._foreach_add_([x], 1.0),
        lambda: torch._foreach_mul_([x.view(2, 2)], 3.0),
        lambda: x.detach().zero_(),
    ]
    for write in writes:
        before = x.sin().full_tensor()
        write()
        now = x.redistribute(placements=[R]).full_tensor()
        torch.testing.assert_close(x.sin().full_tensor(), now.sin())
        assert not torch.equal(before, now.sin())


# ---------------------------------------------------------------- what people use with an optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def spread_net(mesh: sw.DeviceMesh) -> tuple[Net, Net]:
    """A net by columns and rows, and the same on one device."""
    torch.manual_seed(1)
    plain, spread = Net(), Net()
    spread.load_state_dict(plain.state_dict())
    layouts = {"up.weight": [S0], "up.bias": [S0], "down.weight": [S1], "down.bias": [R]}
    for name, placements in layouts.items():
        layer, _, kind = name.partition(".")
        value = sw.distribute_tensor(spread.get_parameter(name).detach(), mesh, placements)
        setattr(spread.get_submodule(layer), kind, nn.Parameter(value))
    return spread, plain


def batch(mesh: sw.DeviceMesh) -> tuple[Any, torch.Tensor]:
    x = torch.randn(5, 6)
    return sw.distribute_tensor(x, mesh, [R]), x


def test_gradient_scaling_skips_a_step_on_every_rank_where_one_overflows() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread, plain = spread_net(mesh)
    runs: list[list[float]] = []
    for net, of in ((spread, 0), (plain, 1)):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        seen = []
        for _ in range(8):
            x = batch(mesh)[of]
            optimizer.zero_grad()
            loss: Any = net(30 * x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen += [loss.item(), scaler.get_scale()]
        runs.append(seen)
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert runs[1][1] < 2.0**127, "no step was skipped: the test shows nothing"


def test_autocast() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread, plain = spread_net(mesh)
    ours, x = batch(mesh)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = spread(ours), plain(x)
    assert result.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(result.full_tensor(), expected, atol=0.05, rtol=0.05)
    result.float().sum().backward()
    expected.float().sum().backward()
    torch.testing.assert_close(spread.up.weight.grad.full_tensor(), plain.up.weight.grad, atol=0.05, rtol=0.05)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread, plain = spread_net(mesh)
    ours, x = batch(mesh)
    checkpoint(spread, ours.requires_grad_(), use_reentrant=reentrant).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(spread.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_states_are_saved_and_loaded() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread, _ = spread_net(mesh)
    optimizer = torch.optim.AdamW(spread.parameters(), lr=0.1)
    ours, _ = batch(mesh)
    spread(ours).sum().backward()
    optimizer.step()
    other, _ = spread_net(mesh)
    other.load_state_dict(spread.state_dict())
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for net, opt in ((spread, optimizer), (other, again)):
        opt.zero_grad()
        net(ours).sum().backward()
        opt.step()
    for p, q in zip(spread.parameters(), other.parameters(), strict=True):
        assert p.placements == q.placements  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(p.full_tensor(), q.full_tensor())  # pyright: ignore[reportAttributeAccessIssue]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_parametrizations() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spread, plain = spread_net(mesh)
    ours, x = batch(mesh)
    for net in (spread, plain):
        parametrize.register_parametrization(net.up, "weight", Doubled())
        parametrizations.weight_norm(net.down)
    spread(ours).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(spread(ours).full_tensor(), plain(x))
    for p, q in zip(spread.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_learning_rates_and_schedules_add_no_signatures() -> None:
    spread, plain = parameters(5)
    optimizer = torch.optim.AdamW(spread, lr=0.1, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    misses = []
    for _ in range(8):
        give_gradients(spread, plain, LAYOUTS)
        optimizer.step()
        schedule.step()
        misses.append(sw.cache_info().misses)
    assert misses[2] == misses[-1]
