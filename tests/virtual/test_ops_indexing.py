"""Indexing, gather and scatter, sorting and searching: values on every layout, and communication."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import MaskPartial, Partial, Replicate, Shard
from tests.virtual.parity import assert_parity, bytes_moved, whole
from tests.virtual.partials import KINDS, assert_value, held, mesh_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::shardwise.modes.ReplicationWarning",
    "ignore:.*non-contiguous",
    "ignore:index_reduce",
    "ignore:The reduce argument",
)

X = torch.arange(5 * 6 * 4, dtype=torch.float64).reshape(5, 6, 4).sin()
MESHES = ((4,), (2, 3))
I = torch.tensor([[3, -1, 0], [2, 2, -5]])  # noqa: E741
K = torch.tensor([4, 0, 2, 0, 1, 3, 3])
ALONG = torch.tensor([[1, 0, 3, 5], [2, 2, 4, 0]]).expand(5, 2, 4).contiguous()

TAKEN: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "index": (lambda x, i: x[i], (I,)),
    "index last": (lambda x, i: x[..., i], (I % 4,)),
    "index two": (lambda x, i, k: x[i, :, k], (I, I % 4)),
    "index broadcast": (lambda x, i, k: x[:, i, k], (I, K[:3] % 4)),
    "index slice": (lambda x, k: x[1:4, k % 3], (K,)),
    "mask": (lambda x, m: x[m], (X[:, 0, 0] > 0,)),
    "mask of all": (lambda x, m: x[m], (X > 0,)),
    "mask behind": (lambda x, m: x[:, m], (X[0] > 0,)),
    "index_select": (lambda x, k: x.index_select(0, k), (K,)),
    "index_select 1": (lambda x, k: x.index_select(1, k), (K,)),
    "gather": (lambda x, a: x.gather(1, a), (ALONG,)),
    "gather 0": (lambda x, a: x.gather(0, a % 5), (ALONG,)),
    "take": (lambda x, i: x.take(i + 5), (I,)),
    "take_along_dim": (lambda x, a: x.take_along_dim(a, 1), (ALONG,)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    fn, indices = TAKEN[name]
    assert_parity(fn, X, *indices, limit=5, meshes=MESHES)


PUT: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "index_put": (lambda x, v, k: torch.index_put(x, (k,), v), (X[:4].cos(), torch.tensor([4, 0, 2, 1]))),
    "index_put one": (lambda x, v, k: torch.index_put(x, (k,), v), (X[0, 0, 0], torch.tensor([4, 0]))),
    "index_put two": (
        lambda x, v, i: torch.index_put(x, (i[0], i[1]), v),
        (X[0, :3].cos(), torch.tensor([[4, 0, 1], [5, 2, 0]])),
    ),
    "accumulate": (lambda x, v, k: torch.index_put(x, (k,), v, True), (X[[0, 1, 2, 3, 4, 0, 1]].cos(), K)),
    "setitem": (lambda x, v, k: _set(x, k, v), (X[:4].cos(), torch.tensor([4, 0, 2, 1]))),
    "setitem mask": (lambda x, v, m: _set(x, m, v), (X[0, 0, 0], X > 0)),
    "setitem row mask": (lambda x, v, m: _set(x, m, v), (X[0], X[:, 0, 0] > 0)),
    "index_add": (lambda x, v, k: x.index_add(0, k, v, alpha=2), (X[[0, 1, 2, 3, 4, 0, 1]].cos(), K)),
    "index_copy": (lambda x, v, k: x.index_copy(1, k, v), (X[:, :4].cos(), torch.tensor([4, 0, 2, 1]))),
    "index_copy_": (lambda x, v, k: (x * 1).index_copy_(1, k, v), (X[:, :4].cos(), torch.tensor([4, 0, 2, 1]))),
    "index_fill": (lambda x, v, k: x.index_fill(1, k, 2.5) + x.index_fill(0, k, v), (X[0, 0, 0], torch.tensor([4, 0]))),
    "index_reduce": (lambda x, v, k: x.index_reduce(0, k, v, "amax"), (X[[0, 1, 2, 3, 4, 0, 1]].cos(), K)),
    "scatter": (lambda x, v, a: x.scatter(1, a, v), (X[:, :1].cos(), ALONG[:, :1])),
    "scatter value": (lambda x, v, a: x.scatter(1, a, 1.5) * v, (X, ALONG)),
    "scatter_add": (lambda x, v, a: x.scatter_add(1, a, v), (X[:, :2].cos(), ALONG)),
    "scatter_add_": (lambda x, v, a: (x * 1).scatter_add_(1, a, v), (X[:, :2].cos(), ALONG)),
    "scatter_add less": (
        lambda x, v, a: x.detach().scatter_add(0, a % 5, v.detach()),
        (X.cos(), ALONG[:2, :, :3].contiguous()),
    ),
    "scatter sum": (lambda x, v, a: x.scatter_reduce(1, a, v, "sum", include_self=False), (X[:, :2].cos(), ALONG)),
    "scatter mean": (lambda x, v, a: x.scatter_reduce(1, a, v, "mean"), (X[:, :2].cos(), ALONG)),
    "scatter amax": (lambda x, v, a: x.scatter_reduce(1, a, v, "amax"), (X[:, :2].cos(), ALONG)),
    "scatter multiply": (
        lambda x, v, a: x.detach().scatter(1, a, v.detach(), reduce="multiply"),
        (X[:, :2].cos(), ALONG),
    ),
    "masked_scatter": (lambda x, v, m: x.masked_scatter(m, v), (X.cos(), X > 0)),
    "put": (lambda x, v, i: x.put(i + 5, v), (X[0, :2, :3].cos(), torch.tensor([[3, 1, 0], [2, 7, 5]]))),
}


def _set(x: Any, index: Any, value: Any) -> Any:
    x = x * 1
    x[index] = value
    return x


@pytest.mark.parametrize("name", PUT)
def test_put(name: str) -> None:
    fn, others = PUT[name]
    assert_parity(fn, X, *others, limit=5, meshes=MESHES)


SORTED: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: x.sort(1),
    "sort stable": lambda x: x.sort(dim=0, stable=True, descending=True),
    "argsort": lambda x: x.argsort(-1),
    "topk": lambda x: x.topk(3, 1),
    "topk smallest": lambda x: x.topk(2, 0, largest=False),
    "kthvalue": lambda x: (x.kthvalue(2, 0), x.kthvalue(3, 1, keepdim=True)),
    "msort": lambda x: x.msort(),
    "unique": lambda x: (x > 0).unique(return_counts=True),
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "histc": lambda x: x.detach().histc(5, -1, 1),
    "histc of its range": lambda x: x.detach().histc(5),
    "bincount": lambda x: (x.flatten() * 5).abs().long().bincount(),
}


@pytest.mark.parametrize("name", SORTED)
def test_sorted(name: str) -> None:
    assert_parity(SORTED[name], X, limit=4, meshes=MESHES)


def test_searched() -> None:
    line, rows = X[0, 0].sort().values, X[:, :, 0].sort(1).values
    assert_parity(torch.searchsorted, line, X, limit=5, meshes=MESHES)
    assert_parity(torch.searchsorted, rows, X[:, :, 1].contiguous(), limit=5, meshes=MESHES, right=True)
    assert_parity(lambda s: torch.searchsorted(s, 0.3), line, limit=4, meshes=MESHES)
    assert_parity(lambda x, s: torch.bucketize(x, s), X, line, limit=5, meshes=MESHES)
    assert_parity(lambda a, b: torch.isin(a, b), K, torch.tensor([0, 3, 9]), limit=5, meshes=MESHES)
    assert_parity(lambda a: torch.isin(a, 3), K, limit=4, meshes=MESHES)
    order = torch.tensor([3, 2, 1, 0])
    assert_parity(lambda s, x, o: torch.searchsorted(s, x, sorter=o), line.flip(0), X, order, limit=4, meshes=MESHES)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_partial(kind: Any) -> None:
    x, y, k = held((4, 6), kind), held((2, 6), kind, seed=1), torch.tensor([3, 0])
    a = torch.tensor([[1, 0, 3, 2, 0, 3]])
    with sw.implicit_replication():
        for fn in (lambda x: x[k], lambda x: x.index_select(1, k), lambda x: x.gather(0, a), lambda x: x.take(k)):
            got, collectives, _ = bytes_moved(lambda fn=fn: fn(x))
            if kind.linear:
                assert (collectives, got.placements) == (0, (kind,))
            assert_value(fn, x)
        for fn in (lambda x: x.index_fill(0, k, 0), lambda x: x.index_fill(0, k, 2.0), lambda x: x.scatter(0, a, 3.0)):
            assert_value(fn, x)
        for write in (
            lambda x, y: x.index_copy(0, k, y),
            lambda x, y: x.index_add(0, k, y),
            lambda x, y: x.index_put((k,), y),
            lambda x, y: x.index_put((k,), y, accumulate=True),
            lambda x, y: x.scatter(0, a, y),
            lambda x, y: x.scatter_add(0, a, y),
            lambda x, y: x.scatter_reduce(0, a, y, "amax"),
            lambda x, y: x.scatter_reduce(0, a, y, "mean"),
        ):
            assert_value(write, x, y)
        assert_value(lambda x: x.sort(1).values, x)
        assert_value(lambda x: x.topk(2, 0).values, x)


# ---------------------------------------------------------------- communication


def laid(tensor: torch.Tensor, *placements: Any) -> sw.DTensor:
    return sw.distribute_tensor(tensor, mesh_of(4), placements)


@pytest.mark.parametrize(
    ("fn", "tensor", "index", "after"),
    [
        (lambda x, k: x[k], Shard(0), Replicate(), MaskPartial()),
        (lambda x, k: x[k], Shard(1), Replicate(), Shard(1)),
        (lambda x, k: x[k], Replicate(), Shard(0), Shard(0)),
        (lambda x, k: x[:, k], Shard(0), Replicate(), Shard(0)),
        (lambda x, k: x.index_select(0, k), Shard(0), Replicate(), MaskPartial()),
        (lambda x, k: x.index_select(0, k), Replicate(), Shard(0), Shard(0)),
        (lambda x, k: x.gather(0, k[:, None, None].expand(7, 6, 4)), Shard(1), Replicate(), Shard(1)),
        (lambda x, k: x.gather(0, k[:, None, None].expand(7, 6, 4)), Shard(0), Replicate(), MaskPartial()),
        (lambda x, k: x.index_add(0, k, x[k]), Shard(2), Replicate(), Shard(2)),
        (lambda x, k: x.index_fill(0, k, 1.0), Shard(0), Replicate(), Shard(0)),
        (lambda x, k: x.sort(0)[0], Shard(1), Replicate(), Shard(1)),
        (lambda x, k: torch.searchsorted(x[0, 0].sort()[0], k.double()), Replicate(), Shard(0), Shard(0)),
    ],
)
def test_stays_where_it_is(fn: Callable[..., Any], tensor: Any, index: Any, after: Any) -> None:
    result, collectives, _ = bytes_moved(lambda: fn(laid(X, tensor), laid(K, index)))
    assert collectives == 0
    assert result.placements == (after,)


def test_writes_along_a_sharded_dim_stay_there() -> None:
    cache, new = laid(X, Shard(1)), laid(X[:, :2].cos(), Replicate())
    where = laid(torch.tensor([4, 1]), Replicate())
    wanted = X.index_copy(1, torch.tensor([4, 1]), X[:, :2].cos())
    for fn in (lambda x: x.index_copy(1, where, new), lambda x: x.clone().index_copy_(1, where, new)):
        got, collectives, _ = bytes_moved(lambda fn=fn: fn(cache))
        assert (collectives, got.placements) == (0, (Shard(1),))
        assert torch.equal(got.full_tensor(), wanted)


def test_indices_that_are_sharded_add_up() -> None:
    zeros, index, values = laid(torch.zeros(5, 4), Replicate()), laid(K, Shard(0)), laid(torch.ones(7, 4), Shard(0))
    for fn in (lambda: zeros.index_add(0, index, values), lambda: zeros.index_put((index,), values, accumulate=True)):
        got, collectives, _ = bytes_moved(fn)
        assert (collectives, got.placements) == (0, (Partial(),))
        assert torch.equal(got.full_tensor()[:, 0], K.bincount().float())


def test_booleans_are_gathered() -> None:
    x = laid(X > 0, Shard(0))
    assert torch.equal(x[laid(K, Replicate())].full_tensor(), (X > 0)[K])


def test_any_order_of_axes_and_strided_shards() -> None:
    mesh, index, values = mesh_of(2, 3), torch.tensor([5, 0, -1]), -torch.ones(3, 4, dtype=torch.float64)
    table = X.reshape(30, 4)[:14].contiguous()
    everywhere = [Replicate(), Replicate()]
    swapped = sw.distribute_tensor(table, mesh, everywhere).redistribute(
        placements=[Shard(0), Shard(0)], shard_order=[(0, (1, 0))]
    )
    strided = sw.distribute_tensor(X[:2, :, :].contiguous(), mesh, [Replicate(), Shard(1)]).reshape(12, 4)
    assert "S0/2" in strided.spec.layout
    where, what = (sw.distribute_tensor(t, mesh, everywhere) for t in (index, values))
    for x, plain in ((swapped, table), (strided, X[:2].reshape(12, 4))):
        for fn in (
            lambda x, i, v: x[i],
            lambda x, i, v: (x[4], x[2:5], x.tril(1)),
            lambda x, i, v: x.index_add(0, i % 7, v),
            lambda x, i, v: x.clone().index_copy_(0, i % 7, v),
            lambda x, i, v: _set(x, i, v),
        ):
            got, collectives, _ = bytes_moved(lambda fn=fn, x=x: fn(x, where, what))
            assert collectives == 0
            torch.testing.assert_close(whole(got), fn(plain, index, values))


FLAT = torch.tensor([[3, -1, 0, 119], [2, 77, -120, 3]])
FRONT = ALONG[:2, :, :3].contiguous()
BY_SHARDS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "take": (lambda x, i: x.take(i), (FLAT,)),
    "take one": (lambda x, i: x.take(i), (FLAT[0, 1],)),
    "take none": (lambda x, i: x.take(i), (FLAT[:0],)),
    "put": (lambda x, i, v: x.put(i[0], v[0]), (FLAT, X[0, :2].cos())),
    "put, added": (lambda x, i, v: x.put(i, v, accumulate=True), (FLAT, X[0, :2].cos())),
    "put in place": (lambda x, i, v: (x * 1).put_(i, v, accumulate=True), (FLAT, X[0, :2].cos())),
    "gather in front": (lambda x, a: x.gather(1, a), (FRONT,)),
    "gather in front of one dim": (lambda x, a: x.gather(1, a), (ALONG[:2].contiguous(),)),
    "gather along the front": (lambda x, a: x.gather(0, a % 5), (FRONT,)),
    "scatter in front": (lambda x, a, v: x.scatter(1, a[:, :1], v[:2, :1, :3]), (FRONT, X.cos())),
    "scatter of a longer source": (lambda x, a, v: x.detach().scatter(1, a[:, :1], v.detach()), (FRONT, X.cos())),
    "scatter of a number": (lambda x, a: x.scatter(1, a, 2.0), (FRONT,)),
    "scatter_add in front": (lambda x, a, v: x.scatter_add(1, a, v[:2, :2, :3]), (FRONT, X.cos())),
    "scatter_add_ in front": (lambda x, a, v: (x * 1).scatter_add_(1, a, v[:2, :2, :3]), (FRONT, X.cos())),
    "scatter_reduce in front": (lambda x, a, v: x.scatter_reduce(1, a, v[:2, :2, :3], "amax"), (FRONT, X.cos())),
    "scatter by product": (lambda x, a: x.detach().scatter(1, a, 2.0, reduce="multiply"), (FRONT,)),
}


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", BY_SHARDS)
def test_only_what_is_asked_for_moves(name: str, shape: tuple[int, ...]) -> None:
    fn, others = BY_SHARDS[name]
    mesh = sw.init_device_mesh("cpu", shape)

    def run(lay_out: Callable[[torch.Tensor, int], Any], dim: int, index_dim: int) -> tuple[Any, list[Any]]:
        x = lay_out(X.clone(), dim).requires_grad_()
        index = lay_out(others[0], index_dim)
        values = [lay_out(v.clone(), -1).requires_grad_() for v in others[1:]]
        made = fn(x, index, *values)
        grads = torch.autograd.grad((made**2).sum(), [x, *values]) if made.requires_grad else []
        return made.detach(), list(grads)

    wanted, wanted_grads = run(lambda t, _: t, 0, 0)
    for dim in range(3):
        for index_dim in range(-1, others[0].dim()):

            def lay_out(t: torch.Tensor, d: int) -> Any:
                placements = [Replicate()] * mesh.ndim if d < 0 else [Shard(d)] * mesh.ndim
                return sw.distribute_tensor(t, mesh, placements)

            got, grads = run(lay_out, dim, index_dim)
            torch.testing.assert_close(got.full_tensor(), wanted)
            for grad, want in zip(grads, wanted_grads, strict=True):
                torch.testing.assert_close(grad.full_tensor(), want)


OUTSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i.view(2, 1, 1).expand(2, 6, 4)),
    "take": lambda x, i: x.take(i * 1000),
    "index_put": lambda x, i: x.index_put((i,), x.new_zeros(())),
    "index_add": lambda x, i: x.index_add(0, i, x.new_ones(2, 6, 4)),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "scatter": lambda x, i: x.scatter(0, i.view(2, 1, 1).expand(2, 6, 4), 1.0),
}


@pytest.mark.parametrize("bad", [5, -6])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_is_an_error(name: str, bad: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(X, mesh, [Shard(0)])
    with pytest.raises((RuntimeError, IndexError)):  # as on one device
        OUTSIDE[name](X, torch.tensor([1, bad]))
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        OUTSIDE[name](x, sw.distribute_tensor(torch.tensor([1, bad]), mesh, [Replicate()]))


@pytest.mark.parametrize("name", ["gather", "index_select", "scatter", "index_add"])
def test_negative_indices_where_one_device_refuses_them(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises((RuntimeError, IndexError)):
        OUTSIDE[name](X, torch.tensor([1, -1]))
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        OUTSIDE[name](
            sw.distribute_tensor(X, mesh, [Shard(0)]), sw.distribute_tensor(torch.tensor([1, -1]), mesh, [Replicate()])
        )


@pytest.mark.parametrize("wrong", [120, 123, -121])
@pytest.mark.parametrize("dim", range(3))
def test_flat_indices_out_of_range_are_refused(dim: int, wrong: int) -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    x = sw.distribute_tensor(X, mesh, [sw.Shard(dim)])
    index = sw.distribute_tensor(torch.tensor([0, wrong]), mesh, [sw.Replicate()])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        x.take(index).full_tensor()
    values = sw.zeros(2, device_mesh=mesh, placements=[sw.Replicate()], dtype=X.dtype)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        x.clone().put_(index, values)


@pytest.mark.parametrize("wrong", [6, -1])
@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Replicate()], ids=str)
def test_classes_of_one_hot(placement: sw.Placement, wrong: int) -> None:
    mesh, plain = sw.init_device_mesh("cpu", (3,)), torch.tensor([[0, 5, 2], [3, 1, 4], [5, 0, 0], [1, 1, 2]])
    index = sw.distribute_tensor(plain, mesh, [placement])
    got, collectives, _ = bytes_moved(lambda: F.one_hot(index, 6))
    assert (collectives, got.placements) == (0, (placement,))
    assert torch.equal(got.full_tensor(), F.one_hot(plain, 6))
    assert torch.equal(F.one_hot(index).full_tensor(), F.one_hot(plain))
    plain[2, 1] = wrong
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        F.one_hot(sw.distribute_tensor(plain, mesh, [placement]), 6)
