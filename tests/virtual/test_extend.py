"""Users' own functions and operators: local_map on DTensors, and rules that are checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.rules.registry import RULES
from shardwise.tensor import dispatcher, forget_operators
from tests.torch_version import needs_torch

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,))


def laid_out(mesh: sw.DeviceMesh, placement: sw.Placement) -> tuple[torch.Tensor, sw.DTensor]:
    whole = torch.arange(24.0).reshape(6, 4)
    return whole, sw.distribute_tensor(whole, mesh, [placement])


def test_several_results_and_what_is_no_tensor(mesh: sw.DeviceMesh) -> None:
    whole, x = laid_out(mesh, S0)

    @sw.local_map(out_placements=([S0], [sw.Partial()], None), in_placements=([S0], None))
    def both(t: torch.Tensor, factor: float) -> tuple[Any, Any, str]:
        return t * factor, t.sum(0), "done"

    scaled, total, word = both(x, 2.0)
    assert torch.equal(scaled.full_tensor(), 2 * whole)
    assert torch.equal(total.full_tensor(), whole.sum(0))
    assert word == "done"


def test_keyword_arguments_need_no_placements(mesh: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [S0])
    scaled = sw.local_map(lambda t, *, factor, more: t * factor + more[0], out_placements=[S0], in_placements=([S0],))
    assert torch.equal(scaled(x, factor=2.0, more=[1.0]).full_tensor(), torch.arange(8.0) * 2 + 1)
    with pytest.raises(sw.LayoutError, match="3 arguments, 1 in_placements"):
        scaled(x, factor=x, more=[1.0])


def test_arguments_are_brought_or_refused(mesh: sw.DeviceMesh) -> None:
    whole, x = laid_out(mesh, S1)
    rows = {"out_placements": [S0], "in_placements": ([S0],)}
    with pytest.raises(sw.LayoutError, match=r"argument 0 is f32\[6,4\] S1, but in_placements requires S0"):
        sw.local_map(torch.relu, **rows)(x)
    assert torch.equal(sw.local_map(torch.relu, **rows, redistribute_inputs=True)(x).full_tensor(), whole)
    with pytest.raises(sw.LayoutError, match="2 arguments, 1 in_placements"):
        sw.local_map(torch.add, **rows)(x, x)
    with pytest.raises(sw.LayoutError, match="2 out_placements for 1 results"):
        sw.local_map(torch.relu, out_placements=([S1], [S1]))(x)


def test_gradients_come_back_as_they_are_said_to_lie(mesh: sw.DeviceMesh) -> None:
    whole = torch.arange(6.0)
    weight = sw.distribute_tensor(whole, mesh, [R]).requires_grad_()
    uses = sw.RankTensor([torch.tensor(1.0), torch.tensor(10.0)])
    used = sw.local_map(
        lambda w, use: w * use, out_placements=[sw.Partial()], in_grad_placements=([sw.Partial()], None)
    )(weight, uses)
    used.full_tensor().sum().backward()
    assert weight.grad is not None
    assert weight.grad.full_tensor().tolist() == [11.0] * 6


def test_without_dtensors_the_mesh_is_said_or_nothing_is_wrapped(mesh: sw.DeviceMesh) -> None:
    assert type(sw.local_map(torch.relu, out_placements=[R])(torch.ones(2))) is torch.Tensor
    made = sw.local_map(lambda n: torch.ones(n), out_placements=[S0], device_mesh=mesh)(2)
    assert made.spec.layout == "S0"
    assert made.shape == (4,)


def test_a_rule_that_is_not_true_is_found() -> None:
    with torch.library._scoped_library("shardwise_test_extend", "DEF") as library:
        library.define("square(Tensor x) -> Tensor")
        library.impl("square", lambda x: x * x, "CompositeExplicitAutograd")
        op = torch.ops.shardwise_test_extend.square.default
        with pytest.raises(sw.RuleError, match="has no rule"):
            sw.check_rule(op, torch.randn(5))
        sw.register_sharding(op, "a -> a")
        sw.check_rule(op, torch.randn(5))
        sw.register_sharding(op, "a -> a", linear=((0,),))
        with pytest.raises(sw.RuleError, match=r"Partial\(sum\).* on 2 ranks gives a wrong value"):
            sw.check_rule(op, torch.randn(5))


def test_what_a_new_rule_reads_is_in_the_key(mesh: sw.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.elu.default
    _, x = laid_out(mesh, S0)
    assert dispatcher.key(op, (x, 1.0), {}) == dispatcher.key(op, (x, 2.0), {})
    reading = dataclasses.replace(RULES[op], reads={"alpha": lambda value: value})
    monkeypatch.setitem(RULES, op, reading)
    forget_operators()
    different = dispatcher.key(op, (x, 1.0), {}) != dispatcher.key(op, (x, 2.0), {})
    monkeypatch.undo()
    forget_operators()
    assert different


def test_rows_of_a_users_function_may_depend_on_numbers() -> None:
    """They are worked out again for other numbers, also inside lists."""
    mesh = sw.init_device_mesh("cpu", (2,))
    with torch.library._scoped_library("rows_by_numbers", "FRAGMENT") as library:
        library.define("power(Tensor x, float p) -> Tensor")
        library.define("powers(Tensor x, Scalar[] p) -> Tensor")
        library.impl("power", lambda x, p: x**p, "CompositeExplicitAutograd")
        library.impl("powers", lambda x, p: x ** p[1], "CompositeExplicitAutograd")
        ops = torch.ops.rows_by_numbers

        @sw.register_sharding([ops.power.default, ops.powers.default])
        def rows(x: Any, p: Any) -> Any:
            linear = [([sw.Partial()], [sw.Partial(), None])]
            return linear if (p[1] if isinstance(p, list | tuple) else p) == 1 else []

        x = sw.DTensor.from_local(torch.full((2,), 3.0), mesh, [sw.Partial()])
        for p in (1.0, 2.0, 1.0):
            assert torch.equal(ops.power(x, p).full_tensor(), torch.full((2,), 6.0**p))
            assert torch.equal(ops.powers(x, [7.0, p]).full_tensor(), torch.full((2,), 6.0**p))


class MappedCall(torch.nn.Module):
    """A module whose call makes a function of local tensors of the call that it inherits."""

    def __call__(self, x: Any) -> Any:
        rows = x.placements
        return sw.local_map(super().__call__, out_placements=(rows,), in_placements=(rows,))(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@needs_torch(2, 12, "the compiler cannot call a function that was made while tracing")
def test_local_map_is_made_inside_compiled_code() -> None:
    x, module = sw.ones(8, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[sw.Shard(0)]), MappedCall()
    compiled = torch.compile(lambda x: module(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).full_tensor(), torch.full((8,), 3.0))
