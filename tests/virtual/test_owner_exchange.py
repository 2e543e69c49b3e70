"""Look-ups, writes and sorting along a sharded dim by exchanges by owner: values, gradients, communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.decompose import sharded_masks, sharded_search
from shardwise.dispatch import dispatcher
from shardwise.events import route_started
from shardwise.plan.cost import current_cost_model, set_cost_model
from shardwise.plan.propagate import ShardingPropagator
from shardwise.plan.step import OwnerExchange

# the sizes of a dim and of indices: shards are even, uneven, and empty
MESHES = {(4,): ((16, 8), (3, 6)), (3,): ((11, 9), (1, 4)), (2, 2): ((11, 9), (7, 2))}
KINDS = {16: "different", 11: "different", 3: "ties", 1: "in order", 7: "nan"}


@pytest.fixture
def by_owner(monkeypatch: pytest.MonkeyPatch):
    """Exchanges by owner wherever there can be one, and the steps that were taken."""
    monkeypatch.setattr(ShardingPropagator, "_by_owner", lambda *_: -1.0)
    monkeypatch.setattr(sharded_search, "MANY", 2)
    monkeypatch.setattr(dispatcher, "worth_decomposing", lambda _, specs, routes, *more: any(r.steps for r in routes))
    set_cost_model(current_cost_model())  # forget what was chosen
    steps: list[str] = []

    def note(route: Any) -> None:
        steps.extend(type(step).__name__ for step in route.steps)

    route_started.append(note)
    yield steps
    route_started.remove(note)
    monkeypatch.undo()
    set_cost_model(current_cost_model())


def distributed(tensor: torch.Tensor, mesh: sw.DeviceMesh, dim: int | None) -> sw.DTensor:
    placement = sw.Replicate() if dim is None else sw.Shard(dim)
    return sw.distribute_tensor(tensor, mesh, [placement] * mesh.ndim)


def check(fn: Callable[..., Any], tensors: Sequence[torch.Tensor], dims: Sequence[int | None], mesh: Any) -> list[Any]:
    """A function of DTensors has the values of one device, and so have its first and second gradients."""
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    given = [distributed(t.clone(), mesh, d).detach() for t, d in zip(tensors, dims, strict=True)]
    given = [t.requires_grad_(t.is_floating_point()) for t in given]
    wanted, found = fn(*plain), fn(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    found = found if isinstance(found, tuple) else (found,)
    for want, got in zip(wanted, found, strict=True):
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)
    if wanted[0].requires_grad and not wanted[0].isnan().any():
        grads = [
            torch.autograd.grad(
                (out[0] * out[0]).sum(), [t for t in of if t.requires_grad], create_graph=True, allow_unused=True
            )
            for out, of in ((wanted, plain), (found, given))
        ]
        compare(*grads)
        twice = [
            torch.autograd.grad(
                sum((g * g).sum() for g in first if g is not None and g.requires_grad),
                [t for t in of if t.requires_grad],
                allow_unused=True,
            )
            for first, of in zip(grads, (plain, given), strict=True)
            if any(g is not None and g.requires_grad for g in first)
        ]
        if twice:
            compare(*twice)
    return list(found)


def compare(wanted: Sequence[Any], found: Sequence[Any]) -> None:
    for want, got in zip(wanted, found, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got.full_tensor(), want)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "gather": lambda x, i, s: x.gather(0, i),
    "take_along_dim": lambda x, i, s: torch.take_along_dim(x, i, 0),
    "index_select": lambda x, i, s: x.index_select(0, i[:, 0]),
    "int32": lambda x, i, s: x.index_select(0, i[:, 0].int()),
    "index": lambda x, i, s: x[i[:, 0]],
    "index with negative ones": lambda x, i, s: x[-1 - i[:, 0]],
    "index of two dims": lambda x, i, s: x[i[:, 0], i[:, 1] % 3],
    "index of two dims, the second sharded": lambda x, i, s: x.t()[i[:, 1] % 3, i[:, 0]],
    "index by a matrix": lambda x, i, s: x[i],
    "embedding": lambda x, i, s: F.embedding(i, x),
    "embedding with padding": lambda x, i, s: F.embedding(i, x, padding_idx=0),
    "embedding by frequency": lambda x, i, s: F.embedding(i, x, scale_grad_by_freq=True),
    "scatter": lambda x, i, s: x.detach().scatter(0, i, s.detach()),
    "scatter of a number": lambda x, i, s: x.scatter(0, i, 2.0),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "index_add": lambda x, i, s: x.index_add(0, i[:, 0], s, alpha=2),
    "index_copy": lambda x, i, s: x.detach().index_copy(0, i[:, 0], s.detach()),
    "index_fill": lambda x, i, s: x.index_fill(0, i[:, 0], 2.0),
    "index_put": lambda x, i, s: x.detach().index_put((i[:, 0],), s.detach()),
    "index_put of one number": lambda x, i, s: x.index_put((i[:, 0],), x.detach().sum()),
    "index_put adding": lambda x, i, s: x.index_put((i[:, 0],), s, accumulate=True),
    "index_put adding in two dims": lambda x, i, s: x.index_put((i[:, 0], i[:, 1] % 3), s[:, 0], accumulate=True),
    "in place": lambda x, i, s: x.detach().clone().index_add_(0, i[:, 0], s.detach()).scatter_(0, i, s.detach()),
    "setting items": lambda x, i, s: _set_items(x.detach().clone(), i[:, 0], s.detach()),
    **{
        f"scatter_reduce {reduce}, {include}": lambda x, i, s, r=reduce, c=include: x.scatter_reduce(
            0, i, s, r, include_self=c
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
}


def _set_items(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    x[at] = values
    return x


def meshes_of(names: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Each name with one mesh, in turn."""
    return [(name, list(MESHES)[i % len(MESHES)]) for i, name in enumerate(names)]


@pytest.mark.parametrize(("name", "shape"), meshes_of([*INDEXED]), ids=str)
def test_indices_and_what_they_index_are_sharded(by_owner: list[str], name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    for length, count in MESHES[shape]:
        x, index, source = randn(length, 3), torch.randint(0, length, (count, 3)), randn(count, 3)
        by_owner.clear()
        check(INDEXED[name], (x, index, source), (0, 0, 0), mesh)
        assert "OwnerExchange" in by_owner


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_elements_of_any_dtype_go_to_their_owners(by_owner: list[str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (4,))
    x, index = torch.randint(0, 2, (10, 3)).to(dtype), torch.randint(0, 10, (7, 3))
    given, at = distributed(x, mesh, 0), distributed(index, mesh, 0)
    assert torch.equal(given.gather(0, at).full_tensor(), x.gather(0, index))
    assert torch.equal(given[at[:, 0]].full_tensor(), x[index[:, 0]])
    values = torch.randint(0, 2, (7, 3)).to(dtype)
    put = given.scatter(0, at, distributed(values, mesh, 0))
    assert torch.equal(put.full_tensor(), x.scatter(0, index, values))
    assert "OwnerExchange" in by_owner


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_index_out_of_range_is_an_error(by_owner: list[str], wrong: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    index = torch.zeros(8, 3, dtype=torch.int64)
    index[5, 1] = wrong
    with pytest.raises(IndexError, match="out of range for dim 0 of size 10"):
        distributed(randn(10, 3), mesh, 0).gather(0, distributed(index, mesh, 0))


# ---------------------------------------------------------------- sorting


SORTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: x.sort(dim=0, stable=True),
    "descending": lambda x: x.sort(dim=0, descending=True, stable=True),
    "not said to be stable": lambda x: x.sort(0).values,
    "argsort": lambda x: x.argsort(dim=0, stable=True),
    "msort": lambda x: x.msort(),
    "topk of many": lambda x: x.topk(len(x) - 1, 0).values,
    "topk of the smallest": lambda x: x.topk(len(x), 0, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(len(x) // 2 + 1, 0).values,
    "kthvalue, kept": lambda x: x.kthvalue(1, 0, keepdim=True).values,
    "median": lambda x: x.median(0).values,
    "nanmedian": lambda x: x.nanmedian(0).values,
    "median of all": lambda x: x.median(),
    "nanmedian of all": lambda x: x.nanmedian(),
    "mode": lambda x: x.mode(0).values,
}
FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantile": lambda x: x.quantile(0.3, 0),
    "quantiles": lambda x: x.quantile(torch.tensor([0.1, 0.5], dtype=x.dtype), 0, interpolation="lower"),
    "nanquantile": lambda x: x.nanquantile(0.6, 0),
}


def numbers(length: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows of two columns: all different, with ties, with NaNs, in order."""
    x = torch.randperm(2 * length).view(length, 2).to(dtype)
    if kind == "ties":
        return (x % 3).to(dtype)
    if kind == "in order":
        return x.sort(0).values
    if kind == "nan":
        return torch.where(x % 4 == 1, torch.tensor(math.nan), x)
    if kind == "zeros":
        return torch.where(x % 2 == 1, torch.tensor(-0.0), torch.tensor(0.0)).to(dtype)
    return x


@pytest.mark.parametrize(("name", "shape"), meshes_of([*SORTED, *FLOATS]), ids=str)
def test_a_sharded_dim_is_sorted(by_owner: list[str], name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mesh, fn = sw.init_device_mesh("cpu", shape), {**SORTED, **FLOATS}[name]
    for length, kind in [*((length, KINDS[length]) for length, _ in MESHES[shape]), (9, "nan"), (12, "ties")]:
        if "topk" in name and length == 1:
            continue
        if name == "mode" and kind == "nan":  # torch sorts these by a comparison that is not an order
            continue
        if "of all" in name and length % mesh.size():  # flattening moves the boundaries of shards
            continue
        by_owner.clear()
        x = numbers(length, kind, torch.float64)
        if kind != "different":  # gradients of ties go to either
            x = x.detach()
            torch.testing.assert_close(
                _tensors(fn(distributed(x, mesh, 0))), _plain(fn(x)), equal_nan=True, rtol=0, atol=0
            )
        else:
            check(fn, (x,), (0,), mesh)
        assert "OwnerExchange" in by_owner


def _tensors(made: Any) -> list[torch.Tensor]:
    return [t.full_tensor() for t in (made if isinstance(made, tuple) else (made,))]


def _plain(made: Any) -> list[torch.Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32],
    ids=str,
)
def test_any_dtype_is_sorted(by_owner: list[str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (3,))
    for descending in (False, True):
        x = (torch.randint(0, 9, (13, 2)) - (4 if dtype.is_signed else 0)).to(dtype)
        found = distributed(x, mesh, 0).sort(dim=0, descending=descending, stable=True)
        wanted = x.sort(dim=0, descending=descending, stable=True)
        assert found.values.placements == (sw.Shard(0),)
        assert torch.equal(found.values.full_tensor(), wanted.values)
        assert torch.equal(found.indices.full_tensor(), wanted.indices)
    limits = torch.iinfo(torch.int64)
    x = torch.tensor([limits.max, 0, limits.min, -1, limits.max, limits.min + 1])
    assert torch.equal(distributed(x, mesh, 0).sort().values.full_tensor(), x.sort().values)
    zeros = numbers(11, "zeros", torch.float32)
    found = distributed(zeros, mesh, 0).sort(dim=0, stable=True)
    assert torch.equal(found.indices.full_tensor(), zeros.sort(dim=0, stable=True).indices)
    assert torch.equal(found.values.full_tensor().signbit(), zeros.sort(dim=0, stable=True).values.signbit())


def test_other_dims_may_be_sharded_over_other_axes(by_owner: list[str]) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = randn(5, 3, 1)
    for placements in ([sw.Shard(0), sw.Shard(1)], [sw.Shard(2), sw.Shard(0)]):
        given = sw.distribute_tensor(x, mesh, placements)
        found, wanted = given.sort(0), x.sort(0)
        assert torch.equal(found.values.full_tensor(), wanted.values)
        assert torch.equal(found.indices.full_tensor(), wanted.indices)
    index = torch.randint(0, 5, (7, 3, 1))
    given, at = (sw.distribute_tensor(t, mesh, [sw.Shard(0), sw.Shard(1)]) for t in (x, index))
    assert torch.equal(given.gather(0, at).full_tensor(), x.gather(0, index))
    assert "OwnerExchange" in by_owner


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values_and_the_sequence_that_they_are_searched_in_are_sharded(
    by_owner: list[str], shape: tuple[int, ...], right: bool
) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    for length in (16, 11, 3, 1):
        sequence = torch.randint(0, 9, (length,)).double().sort().values
        values = torch.cat([torch.arange(-1.0, 10).double(), torch.tensor([math.nan, math.inf, -math.inf]).double()])
        given, wanted = distributed(sequence, mesh, 0), distributed(values, mesh, 0)
        by_owner.clear()
        found = torch.searchsorted(given, wanted, right=right)
        assert torch.equal(found.full_tensor(), torch.searchsorted(sequence, values, right=right))
        assert "OwnerExchange" in by_owner
        assert torch.equal(
            torch.bucketize(wanted, given, right=right, out_int32=True).full_tensor(),
            torch.bucketize(values, sequence, right=right, out_int32=True),
        )


# ---------------------------------------------------------------- costs


def cost(fn: Callable[..., Any], ranks: int, rows: int = 4096) -> tuple[float, float]:
    """Peak and received bytes of forward and backward, in units of a rank's part."""
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        placements = [sw.Shard(0)]
        x = sw.zeros([rows * ranks, 3], device_mesh=mesh, placements=placements).requires_grad_()
        index = sw.zeros([rows * ranks, 3], dtype=torch.int64, device_mesh=mesh, placements=placements)
        made = fn(x, index)
        first = made[0] if isinstance(made, tuple) else made
        if first.requires_grad:
            first.sum().backward()
    return run.peak_bytes / (rows * 12), run.bytes / (rows * 12)


FLAT: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda x, i: x.gather(0, i),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x * 2),
    "index": lambda x, i: x[i[:, 0]],
    "index_add": lambda x, i: x.index_add(0, i[:, 0], x * 2),
    "embedding": lambda x, i: F.embedding(i[:, 0], x),
    "sort": lambda x, i: x.sort(0),
    "median": lambda x, i: x.median(0),
    "mode": lambda x, i: x.mode(0),
    "quantile": lambda x, i: x.quantile(0.3, 0),
    "cummax": lambda x, i: x.cummax(0),
    "cumprod": lambda x, i: x.cumprod(0),
    "searchsorted": lambda x, i: torch.searchsorted(x[:, 0].detach(), x[:, 1].detach()),
}


@pytest.mark.parametrize("name", FLAT)
def test_memory_and_traffic_do_not_grow_with_the_ranks(name: str) -> None:
    few, many = cost(FLAT[name], 32), cost(FLAT[name], 512)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= 1.1 * few[1] + 0.6  # sizes: a number for each rank in each exchange


def test_small_tables_are_gathered_in_one_collective() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, index = distributed(torch.randn(8, 3), mesh, 0), distributed(torch.zeros(8, 3, dtype=torch.int64), mesh, 0)
    with CommDebugMode() as counted:
        x.gather(0, index)
    assert counted.get_total_counts() == 1


def test_compiled_programs_move_what_the_rule_says(by_owner: list[str]) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (4,))
    x, index = randn(12, 3), torch.randint(0, 12, (8, 3))

    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(0, index) * 2

    given = distributed(x, mesh, 0), distributed(index, mesh, 0)
    program(*given)
    assert "OwnerExchange" in by_owner
    by_owner.clear()
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(found.full_tensor(), program(x, index))
    assert "OwnerExchange" not in by_owner


def test_strict_mode_refuses_an_exchange_by_owner(by_owner: list[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with sw.strict(), pytest.raises(sw.errors.ImplicitCommunicationError, match=r"sort.default at .* would move"):
        distributed(torch.randn(16), mesh, 0).sort()


def test_the_step_says_what_it_is() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    spec = distributed(torch.randn(16), mesh, 0).spec
    assert OwnerExchange(spec, spec, 0, (0,)).describe() == "exchange by owners of dim 0 over 0"


# ---------------------------------------------------------------- masks


MASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: (x > 1).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "masked_select of nothing": lambda x: x.masked_select(x > 99),
    "masks": lambda x: x[x > 1] * 2,
    "masks of rows": lambda x: x[x[:, 0] > 1],
    "masked_scatter": lambda x: x.masked_scatter(x > 1, x * 3),
    "setting masked items": lambda x: _set_items(x.detach().clone(), x[:, 0].detach() > 1, x.detach()[:1] * 3),
    "where": lambda x: torch.where(x > 1)[0],
    "bincount": lambda x: x.detach().long().flatten().bincount(minlength=3),
    "bincount of weights": lambda x: x.detach().long().flatten().bincount(x.detach().flatten()),
    "unique": lambda x: x.detach().unique(),
    "unique with all": lambda x: tuple(x.detach().unique(return_inverse=True, return_counts=True)),
    "unique_consecutive": lambda x: tuple(
        x.detach().sort(0).values.unique_consecutive(return_inverse=True, return_counts=True)
    ),
}


@pytest.mark.parametrize(("name", "shape"), meshes_of([*MASKED]), ids=str)
def test_masks_are_looked_into_part_by_part(
    by_owner: list[str], monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sharded_masks, "LARGE", 0)
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    x = torch.randint(0, 5, (12, 2)).double()
    check(MASKED[name], (x,), (0,), mesh)
    assert "nothing" in name or "bincount" in name or "OwnerExchange" in by_owner


def test_masks_of_uneven_shards(by_owner: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_masks, "LARGE", 0)
    mesh = sw.init_device_mesh("cpu", (4,))
    for length in (11, 3, 1):
        x = torch.randint(0, 3, (length,)).double()
        given = distributed(x, mesh, 0)
        assert torch.equal(given.nonzero().full_tensor(), x.nonzero())
        assert torch.equal(given[given > 0].full_tensor(), x[x > 0])
        assert torch.equal(given.unique().full_tensor(), x.unique())
