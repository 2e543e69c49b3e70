"""Reductions against one device, and how little they communicate."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.events import route_started
from tests.torch_version import TORCH
from tests.virtual.free import S0, S1, S2, P, R, collectives, tensor
from tests.virtual.parity import assert_parity, bytes_moved, distribute, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning"),
    pytest.mark.usefixtures("always_decomposing"),
]

t = tensor
EVEN, UNEVEN = t(4, 6, 5), t(7, 3)
TIES = t(7, 5).mul(2).round()
INTEGERS, TRUTHS = TIES.long(), TIES > 0
WITH_NAN = t(7, 5).index_put((torch.tensor([3, 6]), torch.tensor([2, 0])), torch.tensor(math.nan, dtype=torch.float64))
MAX, MIN, PRODUCT = sw.Partial("max"), sw.Partial("min"), sw.Partial("product")


def along(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """A function of torch's with these arguments."""
    return lambda x: getattr(torch, name)(x, *args, **kwargs)


# ---------------------------------------------------------------- values and gradients

OVER_DIMS = ("sum", "mean", "nansum", "amax", "amin", "std", "var", "logsumexp")
OVER_DIM = (
    "max", "min", "argmax", "argmin", "median", "mode", "any", "all", "count_nonzero", "var_mean", "std_mean", "cumsum",
    "cumprod", "cummax", "cummin", "logcumsumexp",
)  # fmt: skip
OVER_ALL = (
    "sum", "mean", "nansum", "max", "min", "argmax", "argmin", "median", "any", "all", "count_nonzero", "var", "std",
    "aminmax", "norm", "prod",
)  # fmt: skip

CASES: dict[str, tuple[Any, ...]] = {
    **{f"{f} {dim}": (along(f, dim, keepdim=f < "m"), EVEN) for f in OVER_DIMS for dim in ((0, 2),)},
    **{f"{f} uneven": (along(f, 0), UNEVEN) for f in OVER_DIMS},
    **{f"{f} {dim}": (along(f, dim), EVEN) for f in OVER_DIM for dim in (-1,)},
    **{f"{f} uneven": (along(f, 0), UNEVEN) for f in OVER_DIM},
    **{f"{f} of all": (along(f), UNEVEN) for f in OVER_ALL},
    **{f"{f} ties": (along(f, 0), TIES) for f in ("max", "min", "argmax", "argmin", "amax", "amin", "cummax")},
    **{f"{f} integers": (along(f, 0), INTEGERS) for f in ("sum", "prod", "max", "argmin", "amax", "any", "cumsum")},
    **{f"{f} truths": (along(f, 0), TRUTHS) for f in ("sum", "prod", "any", "all", "amax", "amin", "max")},
    **{f"{f} nan": (along(f, 0), WITH_NAN) for f in ("max", "argmax", "argmin", "amax", "amin", "nansum", "any")},
    **{f"{f} nothing": (along(f, 0), t(0, 3)) for f in ("sum", "mean", "any", "all", "nansum")},
    **{f"{f} single": (along(f), t()) for f in ("sum", "mean", "max", "argmax", "norm")},
    **{f"{f} complex": (along(f, 0), torch.complex(UNEVEN, UNEVEN + 1)) for f in ("sum", "mean", "var")},
    "norm complex": (along("norm", 3, 0), torch.complex(UNEVEN, UNEVEN + 1)),
    "max of all dims kept": (along("argmax", None, True), UNEVEN),
    "cummin nan": (along("cummin", 0), WITH_NAN),
    "cummin integers": (along("cummin", 0), INTEGERS),
    "cummax truths": (along("cummax", 0), TRUTHS),
    "any of dims": (along("any", (0, 1)), TRUTHS),
    "aminmax": (along("aminmax", dim=0), UNEVEN),
    "aminmax kept": (along("aminmax", dim=1, keepdim=True), EVEN),
    "kthvalue": (along("kthvalue", 2, 0), UNEVEN),
    "nanmedian": (along("nanmedian", 0), WITH_NAN),
    "renorm": (along("renorm", 2, 0, 0.5), UNEVEN),
    "var without correction": (along("var", 0, correction=0), UNEVEN),
    "var of one": (along("var", 0, correction=1.5), t(2, 3)),
    # before torch 2.13 the gradient of its own trace has an element too many where rows are more than columns
    "trace": (torch.trace, t(7, 5) if TORCH >= (2, 13) else t(5, 5)),
    "trace wide": (torch.trace, t(5, 13)),
    "dist": (torch.dist, UNEVEN, UNEVEN + 1),
    "sum in place of a sum": (lambda x: (x * 1).sum(0).add_(1).mul_(2), EVEN),
    "sum out": (lambda x: torch.sum(x.detach(), 0, out=torch.zeros_like(x.detach()[0])), EVEN),
}  # fmt: skip

ORDERS = (2, 1, 0, 3, 0.5, -1, -2.5, math.inf, -math.inf)
CASES |= {f"norm {p} over {dim}": (along("norm", p, dim), EVEN) for p in ORDERS for dim in ((0, 2),)}
CASES |= {f"norm {p} uneven": (lambda x, p=p: torch.linalg.vector_norm(x, p, 0), UNEVEN) for p in ORDERS}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], meshes=((4,), (2, 3)), limit=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mean", "var", "std", "logsumexp", "norm"])
def test_halves_are_computed_wide(name: str, dtype: torch.dtype) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = (t(90) * 90 + 40).to(dtype)  # squares and sums of it overflow
    got = along(name, dim=0)(distribute(x, mesh, [S0]))
    assert got.dtype is dtype
    torch.testing.assert_close(whole(got), along(name, dim=0)(x), rtol=1e-2, atol=0)


def test_sum_to_integers_of_a_sum_of_fractions() -> None:
    assert_parity(lambda x: x.detach().sum(0, dtype=torch.int64), t(7, 3) * 9)


def test_strided_shards_of_uneven_rows() -> None:
    """Each rank holds pieces of several rows, of different lengths in all."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = distribute(t(4, 3), mesh, [S1]).view(12)
    plain = t(4, 3).view(12)
    assert isinstance(x.placements[0], sw.StridedShard)
    for f in ("sum", "mean", "var", "amax", "argmax", "norm", "logsumexp", "prod"):
        torch.testing.assert_close(whole(along(f, dim=0)(x)), along(f, dim=0)(plain))


def test_blocks_that_are_empty_in_the_middle() -> None:
    """7 over 2 x 3: four as 2, 2, 0 and three as 1, 1, 1."""
    mesh = sw.init_device_mesh("cpu", (2, 3))
    for f in ("amax", "amin", "argmax", "mean", "prod", "std", "norm"):
        got = along(f, dim=0)(distribute(t(7), mesh, [S0, S0]))
        torch.testing.assert_close(whole(got), along(f, dim=0)(t(7)))


# ---------------------------------------------------------------- communication

FREE: dict[str, tuple[Callable[[Any], Any], torch.Tensor, Any, Any]] = {
    "sum": (along("sum", 0), UNEVEN, S0, P),
    "sum of the rest": (along("sum", 0), UNEVEN, S1, S0),
    "sum of a sum": (along("sum", 0), UNEVEN, P, P),
    "sum of an average": (along("sum", 0), UNEVEN, sw.Partial("avg"), sw.Partial("avg")),
    "mean even": (along("mean", 1), EVEN, S1, P),
    "mean uneven": (along("mean", 0), UNEVEN, S0, P),
    "mean of a sum": (along("mean", 0), UNEVEN, P, P),
    "mean kept": (along("mean", 0, True), UNEVEN, S0, P),
    "nansum": (along("nansum", 0), UNEVEN, S0, P),
    "cumsum of a sum": (along("cumsum", 0), UNEVEN, P, P),
    "cumsum": (along("cumsum", 0), UNEVEN, S1, S1),
    "trace rows": (torch.trace, t(7, 7), S0, P),
    "trace columns": (torch.trace, t(7, 7), S1, P),
    "var of rows": (along("var", 1), EVEN, S2, S1),
    "max of rows": (along("logsumexp", 1), EVEN, S0, S0),
}

FORWARD_FREE: dict[str, tuple[Callable[[Any], Any], torch.Tensor, Any, Any]] = {
    "amax": (along("amax", 0), UNEVEN, S0, MAX),
    "amin": (along("amin", 0), UNEVEN, S0, MIN),
    "max of all": (along("max"), UNEVEN, S0, MAX),
    "amax of a maximum": (along("amax", 0), UNEVEN, MAX, MAX),
    "prod": (along("prod", 0), UNEVEN, S0, PRODUCT),
    "any": (along("any", 0), TRUTHS, S0, MAX),
    "all": (along("all", 0), TRUTHS, S0, MIN),
    "count": (along("count_nonzero", 0), UNEVEN, S0, P),
    "norm 0": (along("norm", 0, 0), UNEVEN, S0, P),
    "norm 1": (along("norm", 1, 0), UNEVEN, S0, P),
    "norm inf": (along("norm", math.inf, 0), UNEVEN, S0, MAX),
    "norm -inf": (along("norm", -math.inf, 0), UNEVEN, S0, MIN),
    "integers": (along("sum", 0), INTEGERS, P, P),
    "argmax of rows": (along("argmax", 1), UNEVEN, S0, S0),
    "max of rows": (along("max", 1), UNEVEN, S0, S0),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, x, placement, result = FREE[name]
    assert collectives(fn, [x], [placement]) == ((result,), 0)


@pytest.mark.parametrize("name", FORWARD_FREE)
def test_forward_without_communication(name: str) -> None:
    fn, x, placement, result = FORWARD_FREE[name]
    assert collectives(fn, [x], [placement], backward=False) == ((result,), 0)


@pytest.mark.parametrize(
    ("name", "count"), [("norm", 0), ("var", 1), ("std", 2), ("logsumexp", 2), ("argmax", 1), ("max", 1)]
)
def test_only_something_small_is_reduced(name: str, count: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = distribute(t(1000, 2), mesh, [S0])
    seen: list[Any] = []
    route_started.append(seen.append)
    try:
        along(name, dim=0)(x)
    finally:
        route_started.remove(seen.append)
    assert sum(route.collectives for route in seen) == count
    assert sum(route.received for route in seen) <= 2 * 2 * 8 * count


def test_extremes_of_a_sum_wait_for_the_sum() -> None:
    assert collectives(along("amax", 0), [UNEVEN], [P], backward=False)[1] == 1


def test_both_extremes_of_a_sum_wait_for_one_sum() -> None:
    assert collectives(lambda x: torch.aminmax(x)[0], [UNEVEN], [P], backward=False)[1] == 1


@pytest.mark.parametrize(("a", "b", "count"), [(S0, S0, 1), (S0, R, 1), (R, R, 0), (P, R, 1)])
def test_equal_compares_where_things_lie(a: Any, b: Any, count: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for other in (UNEVEN, UNEVEN + torch.eye(*UNEVEN.shape, dtype=UNEVEN.dtype)):
        x, y = distribute(UNEVEN, mesh, [a]), distribute(other, mesh, [b])
        same, moved, received = bytes_moved(lambda x=x, y=y: torch.equal(x, y))
        assert (same, moved) == (other is UNEVEN, count)
        assert received <= (8 if a is S0 else 2 * UNEVEN.nbytes)


def test_distributions_check_their_values_where_they_lie() -> None:
    mean = sw.ones(5, 3, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", sw.ReplicationWarning)
        assert torch.distributions.Normal(mean, mean.exp()).log_prob(mean).placements == (sw.Shard(0),)
