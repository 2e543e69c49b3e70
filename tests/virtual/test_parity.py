"""Op parity: wrong values are found where they happen, rounding is no error, right programs have no findings."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.fabric.virtual import VirtualFabric
from shardwise.rules.registry import RULES
from shardwise.tensor import forget_operators

HERE = __file__


def mesh22() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def here(offset: int = 0) -> str:
    """This line, or one near it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{HERE}:{frame.f_back.f_lineno + offset}"


LIBRARY = torch.library.Library("shardwise_parity", "DEF")
LIBRARY.define("running(Tensor x) -> Tensor")
LIBRARY.impl("running", lambda x: x.cumsum(0), "CompositeExplicitAutograd")
running = torch.ops.shardwise_parity.running


class Twice(torch.autograd.Function):
    """Its gradient goes through the operator with the wrong rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return running(grad)


@pytest.fixture
def wrong_rules() -> Iterator[None]:
    """`running` with a pointwise rule, which is wrong along dim 0."""
    sw.register_sharding(running.default, "...->...")
    yield
    RULES.pop(running.default, None)
    forget_operators()


def sharded(*shape: int, dim: int = 0) -> sw.DTensor:
    return sw.distribute_tensor(torch.randn(*shape), mesh22(), [sw.Shard(dim), sw.Replicate()])


@pytest.mark.usefixtures("wrong_rules")
def test_a_wrong_rule_is_found_at_its_line_and_not_again_after() -> None:
    x = sharded(6, 4)
    with sw.parity(stop=False) as check:
        a = x * 3
        b, line = running(a), here()
        c = (b + 1).sum()
        d, second = running(x), here()
    assert [found.line for found in check.findings] == [line, second]
    first = check.first
    assert first is not None
    assert first.what == "shardwise_parity.running.default"
    assert (first.kind, first.backward, first.operands) == ("wrong", False, ("f32[6,4] dp:S0 tp:R",))
    assert first.at[0] >= 3  # the block of the second rank begins again at its first row
    assert first.error > 1000 * first.allowed
    expected = (x * 3).full_tensor().cumsum(0)
    assert first.expected == pytest.approx(expected[first.at].item())
    assert check.counts["carried"] + check.counts["rounding"] + check.counts["equal"] >= 3
    assert "gave a wrong value" in str(check)
    del b, c, d


@pytest.mark.usefixtures("wrong_rules")
def test_it_stops_at_the_first_one() -> None:
    x = sharded(6, 4)
    said = r"running.default gave a wrong value, at (?s:.*)compared before it were right"
    with pytest.raises(sw.ParityError, match=said), sw.parity():
        running(x * 2)
    assert (x + 1).shape == (6, 4)  # nobody watches any more


@pytest.mark.usefixtures("wrong_rules")
def test_a_wrong_gradient_is_found_with_the_line_of_its_forward() -> None:
    x = sharded(6, 4).requires_grad_()
    with sw.parity(stop=False) as check:
        y = x * 3
        z = Twice.apply(y)
        loss = (z * z).sum()
        loss.backward()
    (found,) = check.findings
    assert found.backward
    assert found.what == "shardwise_parity.running.default"
    line = f"{HERE}:{inspect.getsourcelines(Twice.forward)[1] + 2}"
    assert found.line == line
    assert f"in backward of {line}" in str(found)


def test_copies_that_differ_are_found_where_they_came_in() -> None:
    mesh = mesh22()
    locals_ = sw.RankTensor([torch.full((3,), float(rank)) for rank in range(4)])
    with sw.parity(stop=False) as check:
        x, line = sw.DTensor.from_local(locals_, mesh, [sw.Shard(0), sw.Replicate()], run_check=False), here()
        y = x * 2 + 1
        y.sum()
    (found,) = check.findings
    assert (found.kind, found.line) == ("replicas", line)
    assert found.ranks == ((0, 1), (1, 1))
    with pytest.raises(sw.ParityError, match="differs between ranks"), sw.parity():
        sw.DTensor.from_local(locals_, mesh, [sw.Shard(0), sw.Replicate()])


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_a_bad_collective_is_found_where_it_is_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = VirtualFabric.bind

    def bad(self: VirtualFabric, step: Any) -> Callable[[Any], Any]:
        run = good(self, step)

        def with_an_error(local: Any) -> Any:
            moved = run(local)
            moved.tensors[-1].view(-1)[0] += 1
            return moved

        return with_an_error if step.collective == kind else run

    monkeypatch.setattr(VirtualFabric, "bind", bad)
    shape = (12, 7) if kind == "all_gather" else (12, 9)  # bound for this test alone
    x = sharded(*shape)
    with sw.parity(stop=False) as check:
        if kind == "all_gather":
            y, line = x.redistribute(placements=[sw.Replicate(), sw.Replicate()]), here()
        else:
            y, line = x.sum(0).redistribute(placements=[sw.Replicate(), sw.Replicate()]), here()
        y.add(1)
    (found,) = check.findings
    assert found.line == line
    assert found.what.startswith("redistribute to dp:R tp:R")
    assert found.ranks == ((1, 1),)
    assert found.error == pytest.approx(1, rel=1e-4)


def test_a_bad_collective_inside_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    good = VirtualFabric.bind

    def bad(self: VirtualFabric, step: Any) -> Callable[[Any], Any]:
        run = good(self, step)
        return run if step.collective is None else lambda local: sw.RankTensor([t + 1 for t in run(local).tensors])

    monkeypatch.setattr(VirtualFabric, "bind", bad)
    x, w = sharded(10, 11), sharded(11, 3)
    with sw.parity(stop=False) as check:
        y, line = x @ w, here()
        y.relu()
    (found,) = check.findings
    assert (found.what, found.line) == ("aten.mm.default", line)


def test_rounding_of_a_reordered_sum_is_not_wrong() -> None:
    x = sharded(2048, 32)
    with sw.parity() as check:
        total, line = x.sum(0), here()
        total.redistribute(placements=[sw.Replicate(), sw.Replicate()])
    assert check.ok
    assert check.first_rounding is not None
    assert (check.first_rounding.kind, check.first_rounding.line) == ("rounding", line)
    assert check.first_rounding.error <= check.first_rounding.allowed
    assert "rounds differently" in str(check)


def test_what_users_change_by_hand_is_carried_not_wrong() -> None:
    x = sharded(4096)
    with sw.parity() as check:
        y = x.exp()
        y._local_tensor.tensors[0][5] *= 1.01
        y._local_tensor.tensors[1][5] *= 1.01
        (y + 0).sum()
    assert check.ok
    assert check.counts["carried"] >= 1
    assert check.drift[0] > 1e-4


@contextlib.contextmanager
def plain_matmul() -> Iterator[None]:
    """Without the kernels for bfloat16 that some processors claim and do not run."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def transformer_step(dtype: torch.dtype) -> Callable[[], None]:
    """A block with embedding, attention, dropout, a feed-forward part, tied logits, and AdamW."""
    mesh = mesh22()
    shard, copy = sw.Shard, sw.Replicate

    def parameter(value: torch.Tensor, placements: list[Any]) -> torch.nn.Parameter:
        return torch.nn.Parameter(sw.distribute_tensor(value.to(dtype), mesh, placements))

    up, down = (
        parameter(torch.randn(64, 32) / 6, [copy(), shard(0)]),
        parameter(torch.randn(32, 64) / 8, [copy(), shard(1)]),
    )
    qkv, table = (
        parameter(torch.randn(96, 32) / 6, [copy(), shard(0)]),
        parameter(torch.randn(50, 32), [copy(), shard(0)]),
    )
    gain, bias = parameter(torch.ones(32), [copy(), copy()]), parameter(torch.zeros(32), [copy(), copy()])
    optimizer = torch.optim.AdamW([up, down, qkv, table, gain, bias], lr=1e-2)
    ids = sw.distribute_tensor(torch.randint(0, 50, (4, 8)), mesh, [shard(0), copy()])

    def step() -> None:
        h = F.layer_norm(F.embedding(ids, table), (32,), gain, bias)
        q, k, v = (t.reshape(4, 8, 4, 8).transpose(1, 2) for t in F.linear(h, qkv).split(32, -1))
        attended = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        h = h + F.dropout(attended.transpose(1, 2).reshape(4, 8, 32), 0.1)
        h = h + F.linear(F.gelu(F.linear(h, up)), down)
        loss = F.cross_entropy(F.linear(h, table).reshape(-1, 50), ids.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_step_is_clean(dtype: torch.dtype) -> None:
    with plain_matmul():
        step = transformer_step(dtype)
        with sw.parity() as check:
            step()
    assert check.ok
    assert check.counts["unchecked"] == 0
    assert sum(check.counts.values()) > 100
    assert check.first_rounding is not None
    if dtype is torch.float32:
        assert check.drift[0] < 1e-3


def test_writes_views_random_numbers_and_lists_are_followed() -> None:
    x = sharded(6, 8)
    y = sharded(6, 8, dim=1)
    with sw.parity() as check:
        base = x * 1
        base[1:4].add_(5)  # a view that had to be copied, and a write through it
        base.t().mul_(2)
        base.clamp_(min=-1)
        base += y
        base.normal_()
        noise = torch.rand_like(base)
        torch.bernoulli(noise)
        torch._foreach_add_([base, noise], [noise, base * 1])
        out = torch.zeros_like(base)
        torch.add(base, noise, out=out)
        kept = base.sort(0)
        kept.values.view(-1)[3]
        base.squeeze_()
        assert isinstance(base.sum().item(), float)
        base.masked_fill_(base > 0, 0.5)
        base.topk(2)
    assert check.ok
    assert check.counts["unchecked"] == check.counts["carried"] == 0


def test_the_numbers_of_the_program_are_those_without_parity() -> None:
    def program() -> torch.Tensor:
        torch.manual_seed(3)
        x = sharded(4, 4)
        return torch.cat([F.dropout(x, 0.5).full_tensor(), torch.rand(4, 4)])

    plain = program()
    with sw.parity() as check:
        watched = program()
    assert check.ok
    assert torch.equal(plain, watched)


def test_slices_of_a_mesh() -> None:
    mesh = mesh22()["tp"]
    locals_ = sw.RankTensor([torch.full((2,), float(rank)) for rank in range(4)])
    with sw.parity() as check:
        x = sw.DTensor.from_local(locals_, mesh, [sw.Shard(0)])
        (x * 2 + x.sum()).full_tensor()
    assert check.ok
    assert check.counts["unchecked"] == 0


def test_two_at_a_time_are_refused() -> None:
    with sw.parity(), pytest.raises(sw.UnsupportedError, match="active already"), sw.parity():
        pass
    with sw.parity():  # the first one has gone
        pass


class Block(torch.nn.Module):
    """A feed-forward block with a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def shard_model(model: Any, mesh: sw.DeviceMesh) -> Any:
    """A copy with `up` split by rows and `down` by columns."""
    model = copy.deepcopy(model)
    split = {"up.weight": sw.Shard(0), "up.bias": sw.Shard(0), "down.weight": sw.Shard(1)}
    for name, parameter in list(model.named_parameters()):
        placement = split.get(".".join(name.split(".")[-2:]), sw.Replicate())
        module = model.get_submodule(name.rpartition(".")[0])
        value = sw.distribute_tensor(parameter.detach(), mesh, [sw.Replicate(), placement])
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(value))
    return model


@pytest.mark.parametrize("given", [False, True])
def test_models_are_compared_module_by_module(given: bool) -> None:
    mesh = mesh22()
    plain = torch.nn.Sequential(Block(), Block())
    model = shard_model(plain, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(torch.randn(8, 16), mesh, [sw.Shard(0), sw.Replicate()])
    with sw.parity(plain, model if given else None) as check:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert check.ok
    # 12 parameters and their gradients, and twice the outputs of 9 modules
    assert sum(check.counts.values()) == 12 + 12 + 2 * 9
    assert check.counts["rounding"] > 0
    assert all(parameter.grad is None for parameter in plain.parameters())


def test_a_wrong_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh22()
    plain = torch.nn.Sequential(Block(), Block())
    model = shard_model(plain, mesh)
    x = sw.distribute_tensor(torch.randn(8, 16), mesh, [sw.Shard(0), sw.Replicate()])
    right = model[1].up.forward
    monkeypatch.setattr(model[1].up, "forward", lambda x: right(x) * 1.001)
    with sw.parity(plain, stop=False) as check:
        model(x)
    (found,) = check.findings
    assert (found.kind, found.what) == ("wrong", "the module 1.up")
    with pytest.raises(sw.ParityError, match=r"the module 1\.up gave a wrong value"), sw.parity(plain):
        model(x)


def test_a_wrong_gradient_and_a_wrong_parameter_are_named() -> None:
    mesh = mesh22()
    plain = torch.nn.Sequential(Block(), Block())
    model = shard_model(plain, mesh)
    x = sw.distribute_tensor(torch.randn(8, 16), mesh, [sw.Shard(0), sw.Replicate()])
    weight = model[0].up.weight
    hook = weight.register_hook(lambda gradient: gradient * 2)
    with sw.parity(plain, stop=False) as check:
        model(x).square().mean().backward()
    hook.remove()
    assert check.first is not None
    assert check.first.what == "the gradient of 0.up.weight"
    with torch.no_grad():
        weight.add_(1e-3)
    with pytest.raises(sw.ParityError, match=r"the parameter 0\.up\.weight gave a wrong value"), sw.parity(plain):
        model(x)
    with pytest.raises(sw.UnsupportedError, match="different submodules or parameters"), sw.parity(plain[0], model):
        pass


@pytest.mark.parametrize("inside", [False, True])
def test_it_goes_together_with_explain(inside: bool) -> None:
    x = sharded(6, 4)
    outer, inner = (sw.explain(), sw.parity()) if inside else (sw.parity(), sw.explain())
    with outer as a:
        x.exp()
        with inner as b:
            (x * 2).sum()
        x.sin()
    check: Any = b if inside else a
    report: Any = a if inside else b
    assert check.ok
    assert sum(check.counts.values()) == (2 if inside else 4)
    assert len(report.records) == (4 if inside else 2)
    assert "_watched" not in repr(sw.DTensor.__dict__["__torch_dispatch__"])
