"""Forward mode through moves and locals: writes in place, uneven locals, broadcast dims; against plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp

import shardwise as sw
from shardwise import AgreementError, DTensor, Partial, Placement, RankTensor, Replicate, Shard

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch does so for forward mode

MESH = (4,)
S0, R, P, AVG = Shard(0), Replicate(), Partial(), Partial("avg")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def on(placement: Placement, value: torch.Tensor) -> DTensor:
    return sw.distribute_tensor(value, sw.init_device_mesh("cpu", MESH), [placement])


def dual_of(tensor: Any) -> list[Any]:
    return [part.full_tensor() if isinstance(part, DTensor) else part for part in forward_ad.unpack_dual(tensor)]


def assert_same(have: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for mine, other in zip(have, want, strict=True):
        torch.testing.assert_close(mine, other)


# ---------------------------------------------------------------- writes in place


WRITES: dict[str, Callable[[Any], Any]] = {
    "fill": lambda y: y.fill_(0.75), "mul": lambda y: y.mul_(y), "a part": lambda y: y[1:3].mul_(3),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("tangent", [S0, R], ids=str)
@pytest.mark.parametrize(("source", "target"), [(S0, R), (R, S0), (P, R), (AVG, R), (AVG, S0)], ids=str)
def test_a_write_after_a_move_leaves_the_tangent_of_the_source(
    source: Placement, target: Placement, tangent: Placement, write: str
) -> None:
    value, direction = numbers(8), numbers(8, seed=1)
    with forward_ad.dual_level():
        plain = forward_ad.make_dual(value, direction)
        x = forward_ad.make_dual(on(source, value), on(tangent, direction))
        y, copy = x.redistribute(placements=[target]), plain.clone()
        WRITES[write](y)
        WRITES[write](copy)
        assert_same(dual_of(x), dual_of(plain))
        assert_same(dual_of(y), dual_of(copy))
        x.mul_(2)  # the other way round
        plain.mul_(2)
        assert_same(dual_of(y), dual_of(copy))
        assert_same(dual_of(x), dual_of(plain))


def moved_and_written(x: Any) -> Any:
    y = x.redistribute(placements=[R]) if hasattr(x, "redistribute") else x.clone()
    y.mul_(y)
    return x * 3 + y


@pytest.mark.parametrize("tangent", [S0, R], ids=str)
def test_a_write_after_a_move_inside_transforms(tangent: Placement) -> None:
    value, direction = numbers(8), numbers(8, seed=1)

    def second(x: Any, t: Any) -> Any:
        return jvp(lambda x: jvp(moved_and_written, (x,), (t,))[1], (x,), (t,))

    x, t = on(S0, value), on(tangent, direction)
    for have, want in (
        (jvp(moved_and_written, (x,), (t,)), jvp(moved_and_written, (value,), (direction,))),
        (second(x, t), second(value, direction)),
    ):
        assert_same([part.full_tensor() for part in have], list(want))


@pytest.mark.parametrize("placement", [S0, R, P, AVG], ids=str)
def test_a_local_and_its_dtensor_share_the_tangent_as_they_share_the_value(placement: Placement) -> None:
    values, directions = [numbers(3, seed=s) for s in range(4)], [numbers(3, seed=s) for s in range(4, 8)]
    with forward_ad.dual_level():
        local = forward_ad.make_dual(RankTensor([v.clone() for v in values]), RankTensor(directions).clone())
        made = DTensor.from_local(local, sw.init_device_mesh("cpu", MESH), [placement])
        made.mul_(2)
        have = forward_ad.unpack_dual(local)
        for mine, other in ((have.primal, values), (have.tangent, directions)):
            assert_same(list(mine.tensors), [2 * v for v in other])


# ---------------------------------------------------------------- uneven locals

SIZES = (3, 1, 0, 2)
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "by a number": lambda x, c: 2 * x / 3 - 1.5, "a function": lambda x, c: x.tanh() + x.sin() * x,
    "beside a constant": lambda x, c: torch.where(x > 0, c * x, x - c), "a view": lambda x, c: x[:2].unsqueeze(0) * 2,
    "written": lambda x, c: c.clone().add_(x, alpha=0.5), "itself written": lambda x, c: x.clone().mul_(2).add_(c),
    "summed": lambda x, c: (x * c).sum() * x, "joined": lambda x, c: torch.cat([x, x * c]),
    "expanded": lambda x, c: x.expand(2, -1).t() + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_uneven_locals_have_the_tangents_of_each_rank(name: str) -> None:
    values, directions, others = ([numbers(n, seed=s + n) for n in SIZES] for s in (0, 10, 20))
    with forward_ad.dual_level():
        mine = FUNCTIONS[name](
            forward_ad.make_dual(RankTensor(values), RankTensor(directions)), RankTensor([o.clone() for o in others])
        )
        have = forward_ad.unpack_dual(mine)
        for rank, (value, direction, other) in enumerate(zip(values, directions, others, strict=True)):
            want = forward_ad.unpack_dual(FUNCTIONS[name](forward_ad.make_dual(value, direction), other.clone()))
            assert_same([have.primal.tensors[rank], have.tangent.tensors[rank]], list(want))


@pytest.mark.parametrize("shape", [(5,), (5, 3), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 2)], ids=str)
def test_a_dtensor_by_way_of_uneven_locals(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    value, direction = numbers(*shape), numbers(*shape, seed=1)
    device_mesh = sw.init_device_mesh("cpu", mesh)
    placements = [Shard((len(shape) - 1 + axis) % len(shape)) for axis in range(len(mesh))]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(*(DTensor.from_local(v, device_mesh) for v in (value, direction)))
        local = x.redistribute(placements=placements).to_local() * 1.5
        made = DTensor.from_local(local, device_mesh, placements, shape=shape)
        assert_same(dual_of(made), [value * 1.5, direction * 1.5])


def test_a_program_that_asks_for_sizes_of_uneven_locals_is_refused() -> None:
    with forward_ad.dual_level():
        local = forward_ad.make_dual(RankTensor([torch.ones(n) for n in SIZES]), RankTensor([*map(torch.ones, SIZES)]))
        for asks in (lambda: local.shape[0] == 0, lambda: local.shape[0] == 1, lambda: local.shape[0] != 0):
            with pytest.raises(AgreementError, match="a condition on the sizes"):
                bool(asks())


# ---------------------------------------------------------------- broadcast dims


@pytest.mark.parametrize("tangent", [S0, Shard(1), R], ids=str)
@pytest.mark.parametrize("placement", [S0, Shard(1), R], ids=str)
def test_an_expanded_tensor_gathered(placement: Placement, tangent: Placement) -> None:
    value, direction = numbers(3, 5), numbers(3, 5, seed=1)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(on(placement, value), on(tangent, direction)).expand(2, 4, 3, 5)
        assert_same(dual_of(x.full_tensor()), [value.expand(2, 4, 3, 5), direction.expand(2, 4, 3, 5)])


# ---------------------------------------------------------------- metadata of results


def test_finding_the_metadata_of_a_result_leaves_autograd_as_it_was() -> None:
    """The function of `lerp_` on meta tensors tries an overload that does not match, whose error prints the tensors."""
    value = numbers(8, 3)
    x = on(S0, value)
    with forward_ad.dual_level():
        mixed = forward_ad.make_dual(x, x.cos())
        have = dual_of(mixed.clone().lerp_(mixed, mixed))
        plain = forward_ad.make_dual(value, value.cos())
        assert_same(have, dual_of(plain.clone().lerp_(plain, plain)))
        assert_same(dual_of(mixed.quantile(0.3, dim=0)), dual_of(plain.quantile(0.3, dim=0)))
    weight = torch.ones(3, requires_grad=True)
    assert (weight * 2).requires_grad
