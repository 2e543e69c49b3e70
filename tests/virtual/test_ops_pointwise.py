"""Pointwise operators: the kinds of Partial that they take, communication, in-place forms, casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import MaskPartial, Partial, Replicate, Shard
from tests.virtual.parity import assert_parity, bytes_moved
from tests.virtual.partials import KINDS, RANKS, assert_value, held, mesh_of


def moves(fn: Callable[[], Any]) -> int:
    return bytes_moved(fn)[1]


# ---------------------------------------------------------------- every kind of Partial

NAMES = (
    "neg", "abs", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "asinh", "tanh", "sigmoid", "erf", "erfc", "floor", "ceil", "round", "trunc", "frac",
    "sign", "square", "reciprocal", "relu", "selu", "logical_not", "isnan", "isinf", "signbit", "positive", "deg2rad",
    "rad2deg", "nan_to_num", "digamma", "lgamma",
)  # fmt: skip
EYE = torch.eye(4, 5, dtype=torch.bool)
HALF = torch.full((5,), 0.5, dtype=torch.float64)

UNARY: dict[str, Callable[[Any], Any]] = {name: getattr(torch, name) for name in NAMES} | {
    "relu6": F.relu6,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": F.celu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "negative slope": lambda x: F.leaky_relu(x, -0.5),
    "softplus reversed": lambda x: F.softplus(x, beta=-1),
    "glu": lambda x: F.glu(x, 0),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp_min(0.5),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "x * 2": lambda x: x * 2,
    "x * -2": lambda x: x * -2,
    "x / 2": lambda x: x / 2,
    "1 / x": lambda x: 1 / x,
    "x // 2": lambda x: x // 2,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** 0": lambda x: x**0,
    "x ** -1": lambda x: x**-1.0,
    "x % 2": lambda x: x % 2,
    "x > 0": lambda x: x > 0,
    "x == x": lambda x: x == x,
    "not": lambda x: ~(x > 0),
    "floor_divide": lambda x: x.floor_divide(2),
    "masked_fill 0": lambda x: x.masked_fill(EYE, 0),
    "masked_fill 3": lambda x: x.masked_fill(EYE, 3.0),
    "masked_fill inf": lambda x: x.masked_fill(EYE, -torch.inf),
    "to f32": lambda x: x.to(torch.float32),
    "to int": lambda x: x.to(torch.int64),
    "to bool": lambda x: x.to(torch.bool),
    "to complex": lambda x: x.to(torch.complex128),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "clone": torch.clone,
    "fill": lambda x: x.clone().fill_(2),
    "zero_": lambda x: x.clone().zero_(),
    "mul_": lambda x: x.clone().mul_(2),
    "neg_": lambda x: x.clone().neg_(),
    "add_": lambda x: x.clone().add_(1),
    "exp_": lambda x: x.clone().exp_(),
    "relu_": lambda x: x.clone().relu_(),
    "clamp_": lambda x: x.clone().clamp_(0, 1),
    "sqrt_": lambda x: x.clone().abs_().sqrt_(),
    "pow_": lambda x: x.clone().pow_(2),
    "gt_": lambda x: x.clone().gt_(0),
    "masked_fill_": lambda x: x.clone().masked_fill_(EYE, 3.0),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unary_of_partial(kind: Any) -> None:
    with sw.implicit_replication():
        for name, fn in UNARY.items():
            try:
                assert_value(fn, held((4, 5), kind))
            except Exception as error:
                error.add_note(name)
                raise


PAIRED = (
    "add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "eq", "gt", "logical_and",
    "remainder", "fmod", "copysign", "logaddexp", "floor_divide", "rsub", "complex",
)  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {name: getattr(torch, name) for name in PAIRED} | {
    "add alpha": lambda a, b: torch.add(a, b, alpha=-2),
    "sub alpha": lambda a, b: a.sub(b, alpha=3),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "lerp tensor": lambda a, b: torch.lerp(a, b, HALF),
    "where": lambda a, b: torch.where(EYE, a, b),
    "where on itself": lambda a, b: torch.where(a > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, HALF, value=3),
    "addcmul both": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b),
    "addcdiv first": lambda a, b: torch.addcdiv(a, b, HALF),
    "clamp": lambda a, b: torch.clamp(a, b - 1, b + 1),
    "clamp_min": lambda a, b: torch.clamp_min(a, b),
    "copy_": lambda a, b: a.clone().copy_(b),
    "add_": lambda a, b: a.clone().add_(b),
    "sub_": lambda a, b: a.clone().sub_(b),
    "mul_": lambda a, b: a.clone().mul_(b),
    "div_": lambda a, b: a.clone().div_(b),
    "lt_": lambda a, b: a.clone().lt_(b),
    "copy_ f32": lambda a, b: a.to(torch.float32).copy_(b),
    "copy_ int": lambda a, b: a.to(torch.int64).copy_(b),
    "masked_fill": lambda a, b: a.masked_fill(EYE, b[0, 0]),
}


@pytest.mark.parametrize("first", [*KINDS, Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("second", [Partial(), Partial("max"), Shard(1)], ids=str)
def test_binary_of_partial(first: Any, second: Any) -> None:
    a = held((4, 5), first) if isinstance(first, Partial) else _laid(first, 1)
    b = held((4, 5), second, seed=7) if isinstance(second, Partial) else _laid(second, 2)
    with sw.implicit_replication():
        for name, fn in BINARY.items():
            try:
                assert_value(fn, a, b)
            except Exception as error:
                error.add_note(name)
                raise


def _laid(placement: Any, seed: int) -> sw.DTensor:
    torch.manual_seed(seed)
    return sw.distribute_tensor(torch.randn(4, 5, dtype=torch.float64), mesh_of(RANKS), [placement])


# ---------------------------------------------------------------- communication


@pytest.mark.parametrize(
    ("fn", "before", "after"),
    [
        (lambda x: x + x, Partial(), Partial()),
        (lambda x: x - x, Partial("avg"), Partial("avg")),
        (lambda x: x * 2, Partial(), Partial()),
        (lambda x: x / 2, Partial("avg"), Partial("avg")),
        (torch.neg, Partial(), Partial()),
        (torch.neg, Partial("max"), Partial("min")),
        (torch.exp, Partial("max"), Partial("max")),
        (torch.erfc, Partial("min"), Partial("max")),
        (lambda x: x.clamp(-1, 1), Partial("min"), Partial("min")),
        (lambda x: x.masked_fill(x.isnan(), 0), Replicate(), Replicate()),
        (torch.relu, MaskPartial(), MaskPartial()),
        (lambda x: x**2, MaskPartial(), MaskPartial()),
        (lambda x: x * 3, MaskPartial(), MaskPartial()),
        (lambda x: x.to(torch.int64), MaskPartial(), MaskPartial()),
        (lambda x: x + x, MaskPartial(), Partial()),
        (lambda x: x.to(torch.float64), Partial(), Partial()),
        (lambda x: torch.maximum(x, x), Partial("max"), Partial("max")),
        (torch.ones_like, Partial(), Replicate()),
        (torch.zeros_like, Partial("max"), Replicate()),
        (lambda x: torch.full_like(x, 2), MaskPartial(), Replicate()),
        (lambda x: x.clone().zero_(), Partial("product"), Partial("product")),
        (lambda x: x.clone().fill_(1), Partial("max"), Partial("max")),
        (lambda x: x.sin().cos() * 2 - x, Shard(0), Shard(0)),
    ],
)
def test_passes_without_communication(fn: Callable[[Any], Any], before: Any, after: Any) -> None:
    x = held((4, 5), before) if isinstance(before, Partial) else _laid(before, 0)
    result, collectives, _ = bytes_moved(lambda: fn(x))
    assert collectives == 0
    assert result.placements == (after,)


def test_a_cast_of_a_sum_passes_unless_parts_could_overflow() -> None:
    for dtype, count in ((torch.float64, 0), (torch.bfloat16, 0), (torch.float16, 1), (torch.int64, 1)):
        x = held((4, 5), Partial(), torch.float32)
        assert moves(lambda x=x, dtype=dtype: x.to(dtype)) == count
    assert moves(lambda: held((4, 5), Partial(), torch.int64).to(torch.float32)) == 1
    assert moves(lambda: held((4, 5), Partial("max"), torch.int64).to(torch.float32)) == 0


@pytest.mark.parametrize(
    "fn", [lambda x: x + 1, torch.relu, lambda x: x**2, lambda x: x > 0, lambda x: x * x], ids=range(5)
)
def test_what_is_not_linear_reduces_once(fn: Callable[[Any], Any]) -> None:
    assert moves(lambda: fn(held((4, 5), Partial()))) == 1


def test_a_sum_is_scaled_by_what_is_replicated() -> None:
    x, y = held((4, 5), Partial()), _laid(Replicate(), 3)
    for fn in (torch.mul, torch.div, lambda a, b: torch.mul(b, a), lambda a, b: a.mul_(b)):
        result, collectives, _ = bytes_moved(lambda fn=fn: fn(x.clone(), y))
        assert collectives == 0
        assert result.placements == (Partial(),)
    assert moves(lambda: y / x) == 1


# ---------------------------------------------------------------- values that are not numbers


def test_extrema_keep_nan_and_infinity() -> None:
    parts = [
        torch.tensor([-1.0, torch.nan, -torch.inf]),
        torch.tensor([5.0, 1.0, 2.0]),
        torch.tensor([0.0, 2.0, torch.inf]),
    ]
    for kind in (Partial("max"), Partial("min")):
        x = sw.DTensor.from_local(sw.RankTensor(parts), mesh_of(3), [kind])
        for fn in (
            torch.log,
            torch.sqrt,
            torch.exp,
            torch.relu,
            torch.neg,
            torch.tanh,
            torch.sinh,
            lambda x: x.clamp(-2, 2),
        ):
            assert_value(fn, x)


def test_integer_extrema_do_not_wrap() -> None:
    parts = [torch.tensor([-128, 3], dtype=torch.int8), torch.tensor([3, 4], dtype=torch.int8)]
    for kind in (Partial("max"), Partial("min")):
        x = sw.DTensor.from_local(sw.RankTensor(parts), mesh_of(2), [kind])
        for fn in (torch.neg, torch.bitwise_not, torch.sign, lambda x: x.clamp(0, 2), lambda x: x.to(torch.float32)):
            assert_value(fn, x)


# ---------------------------------------------------------------- layouts

SHAPED = torch.randn(5, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a * b + a,
        lambda a, b: torch.where(a > 0, a, b[0]),
        lambda a, b: torch.addcmul(a, b[:, :1], b[:1]),
        lambda a, b: (a * 1).mul_(b).add_(a, alpha=2).clamp_(-1, 1),
        lambda a, b: (a * 1).copy_(b[0]) * a,
        lambda a, b: F.gelu(a) * F.silu(b) - F.hardswish(a),
        lambda a, b: F.prelu(a, b[0]),
        lambda a, b: F.glu(a, 1) + F.glu(b, -1),
        lambda a, b: torch.polar(a.abs(), b),
        lambda a, b: torch.view_as_complex(torch.stack([a, b], -1)).conj().abs(),
        lambda a, b: a.masked_fill(b > 0, 2.0) + a.to(torch.float32),
        lambda a, b: torch.lerp(a, b, 0.3) + torch.lerp(a, b, b.sigmoid()),
        lambda a, b: torch.div(a, b, rounding_mode="trunc").detach() + a,
    ],
    ids=range(13),
)
def test_layouts(fn: Callable[..., Any]) -> None:
    assert_parity(fn, SHAPED, SHAPED.flip(0).contiguous(), limit=5, meshes=((4,), (2, 3)))
