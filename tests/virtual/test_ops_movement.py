"""Operators that move elements: values on every layout, communication, writes through views, every kind of Partial."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import MaskPartial, Partial, Replicate, Shard
from tests.virtual.parity import assert_parity, bytes_moved
from tests.virtual.partials import KINDS, assert_value, held, mesh_of

X = torch.arange(5 * 6 * 4, dtype=torch.float64).reshape(5, 6, 4).sin()
MESHES = ((4,), (2, 3))

MOVED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:4, :, 1::2],
    "slice little": lambda x: (x[1:2] * 2, x[:, 4:], x[..., ::3]),
    "slice all": lambda x: x[:, 0:6:1],
    "slice none": lambda x: x[3:3],
    "negative": lambda x: x[-2:, :-1],
    "select": lambda x: (x[0], x[:, -1], x.select(2, 3)),
    "select twice": lambda x: x[2][3][1],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "split": lambda x: x.split(2, 1),
    "split sizes": lambda x: x.split([1, 2, 3], -2),
    "chunk": lambda x: x.chunk(4, 0),
    "unbind": lambda x: x.unbind(1),
    "tensor_split": lambda x: x.tensor_split(4, 1),
    "flip": lambda x: x.flip(0, -1),
    "roll": lambda x: x.roll((1, -2), (0, 1)),
    "roll flat": lambda x: x.roll(3),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "rot90 by 4": lambda x: (x.rot90(4, (0, 2)), x.rot90(-2, (1, 2))),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "tile": lambda x: x.tile(2),
    "interleave": lambda x: x.repeat_interleave(2, 1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad value": lambda x: F.pad(x, (0, 0, 1, 1), value=2.5),
    "crop": lambda x: F.pad(x, (-1, -1, 0, 0)),
    "reflect": lambda x: F.pad(x, (1, 2), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate"),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(-1),
    "tril of strided": lambda x: x.reshape(30, 4).tril(3),
    "triu_": lambda x: (x * 1).triu_(1),
    "diagonal": lambda x: x.diagonal(1, 0, 1),
    "diag_embed": lambda x: x.diag_embed(1, 0, 2),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "movedim": lambda x: x.movedim(0, 2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "as_strided": lambda x: x.as_strided((3, 4), (5, 1), 2),
    "as_strided of a view": lambda x: x.transpose(0, 2).as_strided((3, 4), (1, 4)),
    "mT": lambda x: x.mT,
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "real": lambda x: torch.complex(x, x * 2).imag,
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(5, 12, 2) * 1).abs(),
    "clone": lambda x: x.clone(),
    "channels_last": lambda x: x[None].clone(memory_format=torch.channels_last),
    "contiguous": lambda x: x.mT.contiguous(),
    "channel_shuffle": lambda x: F.channel_shuffle(x[None], 5),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(5, 4, 3, 2), 2),
    "broadcast": lambda x: x[:, :1].expand(5, 6, 4) + x.unsqueeze(1).expand(5, 2, 6, 4).sum(1),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
}


@pytest.mark.parametrize("name", MOVED)
def test_layouts(name: str) -> None:
    assert_parity(MOVED[name], X, limit=4, meshes=MESHES)


TWO: dict[str, Callable[[Any, Any], Any]] = {
    "cat": lambda a, b: torch.cat([a, b, a], 1),
    "cat last": lambda a, b: torch.cat([a, b[..., :2]], -1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "slice_scatter": lambda a, b: a.slice_scatter(b[:, :2], 1, 3, 5),
    "select_scatter": lambda a, b: a.select_scatter(b[1], 0, -1),
    "hstack": lambda a, b: torch.hstack([a, b]),
    "diagonal_scatter": lambda a, b: a.diagonal_scatter(b.diagonal(0, 0, 1), 0, 0, 1),
    "dstack": lambda a, b: torch.dstack([a, b]),
    "old empty": lambda a, b: torch.cat([a, torch.zeros_like(a[0, 0, :0]), b], 2),
}


@pytest.mark.parametrize("name", TWO)
def test_layouts_of_two(name: str) -> None:
    assert_parity(TWO[name], X, X.cos(), limit=5, meshes=MESHES)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_partial_passes(kind: Any) -> None:
    x, y = held((4, 6), kind), held((4, 6), kind, seed=1)
    for fn in (
        lambda x: x.flip(0),
        lambda x: x[1:],
        lambda x: x.roll(1, 1),
        lambda x: x.t(),
        lambda x: F.pad(x, (1, 1)),
        lambda x: x.tril(),
        lambda x: x.split(2, 1),
        lambda x: x.repeat(2, 1),
        lambda x: x.diagonal(),
        lambda x: x.diag_embed(),
        lambda x: x.view(24),
        lambda x: F.pad(x[None], (1, 1), mode="reflect"),
        lambda x: x.unfold(1, 2, 1),
        torch.clone,
    ):
        got, collectives, _ = bytes_moved(lambda fn=fn: fn(x))
        assert collectives == 0
        for one in got if isinstance(got, tuple) else (got,):
            assert one.placements == (kind,)
        assert_value(fn, x)
    assert_value(lambda x: (x[1:3], x[2]), x)
    assert_value(lambda x: F.pad(x, (1, 1), value=3.0), x)
    assert_value(lambda a, b: torch.cat([a, b]), x, y)
    assert_value(lambda a, b: torch.stack([a, b]), x, y)
    assert_value(lambda a, b: a.slice_scatter(b[1:2], 0, 1, 2), x, y)


@pytest.mark.parametrize("kind", ["max", "min", "product", "avg", "sum"])
def test_unlike_reductions_do_not_meet(kind: str) -> None:
    mesh, parts = mesh_of(2, 2), torch.randn(4, 4, 6, dtype=torch.float64)

    def laid(at: list[int], placements: list[Any]) -> sw.DTensor:
        return sw.DTensor.from_local(sw.RankTensor([parts[i] for i in at]), mesh, placements)

    x, y = laid([0, 0, 1, 1], [Partial(kind), Replicate()]), laid([2, 3, 2, 3], [Replicate(), Partial()])
    rows = sw.DTensor.from_local(
        sw.RankTensor([parts[i][:2] for i in range(4)]), mesh, [Shard(0), Partial(kind)], shape=(4, 6), stride=(6, 1)
    )
    index = sw.distribute_tensor(torch.tensor([3, 0]), mesh, [Replicate(), Replicate()])
    for fn in (
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.where(a.detach() > 0, a, b),
        lambda a, b: a.slice_scatter(b[:1], 0, 0, 1),
        lambda a, b: a.select_scatter(b[1], 0, 2),
        lambda a, b: torch.ops.aten.copy.default(a, b),
        lambda a, b: a.clone().copy_(b),
    ):
        assert_value(fn, x, y)
    assert_value(lambda x: (x[1], x[1:3], x.tril(1)), rows)
    for lookup in (lambda x, i: x[i], lambda x, i: x.index_select(0, i), lambda x, i: x.index_fill(0, i, 2.0)):
        assert_value(lookup, rows, index)
    for write in (lambda x, y, i: x.index_copy(0, i, y[:2]), lambda x, y, i: x.index_put((i,), y[:2])):
        assert_value(write, x, y, index)


def test_casts_inside_cat_reduce_first() -> None:
    whole = sw.distribute_tensor(torch.ones(4, 6, dtype=torch.float32), mesh_of(3), [Replicate()])
    got = assert_value(lambda a, b: torch.cat([a, b]), held((4, 6), Partial(), torch.int64), whole)
    assert not got.placements[0].is_partial()


# ---------------------------------------------------------------- communication


def sharded(dim: int, ranks: int = 4) -> sw.DTensor:
    return sw.distribute_tensor(X, mesh_of(ranks), [Shard(dim)])


@pytest.mark.parametrize(
    ("fn", "dim", "after"),
    [
        (lambda x: x[1], 0, MaskPartial()),
        (lambda x: x[1:3], 0, MaskPartial()),
        (lambda x: x[:, 1], 0, Shard(0)),
        (lambda x: x[:, 1], 2, Shard(1)),
        (lambda x: x[:, 1:], 0, Shard(0)),
        (lambda x: x[:], 0, Shard(0)),
        (lambda x: x.flip(1), 0, Shard(0)),
        (lambda x: x.tril(1), 1, Shard(1)),
        (lambda x: x.triu(1), 2, Shard(2)),
        (lambda x: x.diagonal(0, 0, 1), 2, Shard(0)),
        (lambda x: torch.cat([x, x], 0), 1, Shard(1)),
        (lambda x: torch.stack([x, x], 0), 1, Shard(2)),
        (lambda x: F.pad(x, (1, 1)), 1, Shard(1)),
        (lambda x: x.unfold(2, 2, 1), 0, Shard(0)),
        (lambda x: x.repeat(1, 2, 1), 0, Shard(0)),
        (lambda x: x.movedim(0, -1), 0, Shard(2)),
        (lambda x: x.split(2, 1)[1], 0, Shard(0)),
        (lambda x: x.rot90(1, (1, 2)), 0, Shard(0)),
        (lambda x: x.rot90(4, (0, 1)), 0, Shard(0)),
        (lambda x: F.channel_shuffle(x[None], 5), 2, Shard(3)),
    ],
)
def test_stays_where_it_is(fn: Callable[[Any], Any], dim: int, after: Any) -> None:
    result, collectives, _ = bytes_moved(lambda: fn(sharded(dim)))
    assert collectives == 0
    assert result.placements == (after,)


@pytest.mark.parametrize(
    ("fn", "shape", "dim"),
    [
        (lambda x: F.pixel_shuffle(x, 2), (2, 16, 3, 3), 1),
        (lambda x: F.pixel_shuffle(x, 2), (2, 8, 4, 3), 2),
        (lambda x: F.pixel_unshuffle(x, 3), (2, 1, 12, 3), 2),
        (lambda x: F.channel_shuffle(x, 2), (2, 8, 3, 5), 3),
    ],
)
def test_shuffles_of_whole_blocks(fn: Callable[[Any], Any], shape: tuple[int, ...], dim: int) -> None:
    """If each rank has complete blocks of pixels, or none, nothing is communicated."""
    plain = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    x = sw.distribute_tensor(plain, mesh_of(4), [Shard(dim)])
    result, collectives, _ = bytes_moved(lambda: fn(x))
    assert (collectives, result.placements) == (0, (Shard(dim),))
    assert torch.equal(result.full_tensor(), fn(plain))


@pytest.mark.parametrize(("shape", "after", "count"), [((3, 3, 4), (9, 4), 0), ((7, 2), (14,), 0), ((5, 4), (20,), 1)])
def test_uneven_parts_flattened(shape: tuple[int, ...], after: tuple[int, ...], count: int) -> None:
    """They stay if the flattened dim is cut at the same elements."""
    plain = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    x = sw.distribute_tensor(plain, mesh_of(4), [Shard(0)])
    result, collectives, _ = bytes_moved(lambda: x.view(after))
    assert collectives == count
    assert torch.equal(result.full_tensor(), plain.view(after))


def test_most_of_a_sharded_dim_is_gathered() -> None:
    _, collectives, _ = bytes_moved(lambda: sharded(1)[:, 1:])
    assert collectives == 1


@pytest.mark.parametrize("at", [torch.tensor([1, 5]), torch.tensor(3)])
def test_splits_at_a_tensor(at: torch.Tensor) -> None:
    """torch reads the memory of the indices, which a DTensor has none of."""
    assert_parity(lambda x, at: torch.tensor_split(x, at), torch.arange(16.0).reshape(8, 2), at, limit=6)
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = torch.arange(8.0).tensor_split(sw.distribute_tensor(at, mesh, [Replicate()]))
    assert [part.tolist() for part in plain] == [part.tolist() for part in torch.arange(8.0).tensor_split(at)]


def test_booleans_have_no_sum() -> None:
    x = sw.distribute_tensor(X > 0, mesh_of(4), [Shard(0)])
    assert torch.equal(x[1].full_tensor(), (X > 0)[1])


def test_hundreds_of_operands() -> None:
    x = sharded(1)
    got, collectives, _ = bytes_moved(lambda: torch.cat([x] * 400, 0))
    assert collectives == 0
    assert got.shape == (2000, 6, 4)


# ---------------------------------------------------------------- writes through views


WRITES: dict[str, Callable[[Any], Any]] = {
    "select": lambda x: x[1].fill_(3.0),
    "setitem": lambda x: x.__setitem__(1, 7.0),
    "slice": lambda x: x[1:3].mul_(2),
    "setitem lists": lambda x: x.__setitem__(([0, 2], [1, 3]), 5.0),
    "setitem slice": lambda x: x.__setitem__((slice(None), slice(1, 3)), 0.0),
    "both": lambda x: x[1, 2:4].add_(1),
    "step": lambda x: x[::3].exp_(),
    "diagonal": lambda x: x.diagonal(0, 0, 1).zero_(),
    "deep": lambda x: x[0][1][2].mul_(5),
    "copy": lambda x: x[2].copy_(x[3]),
    "transpose": lambda x: x.mT[0, 1:2].sub_(1),
    "as_strided": lambda x: x.as_strided((2,), (4,)).neg_(),
}


@pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")
def test_elements_are_taken_as_they_lie_in_memory_on_one_device() -> None:
    def fn(x: Any) -> Any:
        x = x.detach()
        return torch.as_strided_scatter(x * 1, torch.zeros_like(x[0, 0, :2]), (2,), (1,), 1), x.clone().resize_(2, 3)

    assert_parity(fn, X.permute(2, 1, 0), limit=5, meshes=MESHES)
    local = X[0].t().contiguous().t().requires_grad_()
    rows = sw.DTensor.from_local(local, mesh_of(2), [Replicate()], shape=X[0].shape, stride=X[0].stride())
    distances = F.pdist(rows).full_tensor()
    torch.testing.assert_close(distances.detach(), F.pdist(X[0]))
    distances.sum().backward()
    assert local.grad is not None


def test_views_of_locals_that_no_memory_allows_are_copied_and_written_through() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for view in (torch.view_as_complex, lambda x: x.view(torch.int64)):
        x = torch.arange(24, dtype=torch.float32).reshape(3, 4, 2)
        local = x.transpose(0, 2).contiguous().transpose(0, 2)
        held_x = sw.DTensor.from_local(local, mesh, [Replicate()], shape=x.shape, stride=x.stride())
        got = view(held_x)
        torch.testing.assert_close(got.full_tensor(), view(x))
        got.zero_()
        assert not held_x.full_tensor().any()


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_base(name: str) -> None:
    def fn(x: Any) -> Any:
        x = x * 1
        WRITES[name](x)
        return x

    assert_parity(fn, X, limit=5, meshes=MESHES)


def test_writes_to_parts_of_overlapping_windows() -> None:
    """A part of a sharded dim is a copy. Only written elements are copied to the base: windows that overlap are old."""
    mesh, start = sw.init_device_mesh("cpu", (2,)), torch.randn(4, 11)
    part = (slice(0, 1), slice(None, None, 3), slice(1, 2))

    def at_once(windows: Any) -> None:
        windows[part].zero_()

    def of_a_row(windows: Any) -> None:
        windows[0][1:3, 2] = 7.0

    def twice(windows: Any) -> None:
        row = windows[1]
        row[2, 1] = 5.0
        row[0, 0] = float("nan")
        row.select(0, 1).fill_(row[2, 1])  # which is read after it was written to

    def shared(windows: Any) -> None:
        windows[:, ::3, 1:2].zero_()  # shares memory

    for change in (at_once, of_a_row, twice, shared):
        for step in (1, 2, 3):  # the last do not overlap
            plain = start.clone()
            x = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
            ours, theirs = x.unfold(1, 3, step), plain.unfold(1, 3, step)
            change(ours)
            change(theirs)
            torch.testing.assert_close(x.full_tensor(), plain, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial()], ids=str)
@pytest.mark.parametrize("target", [sw.Shard(0), sw.Replicate(), sw.Partial()], ids=str)
def test_set_shares_the_memory_and_the_layout_of_another_tensor(source: Any, target: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, y = (sw.distribute_tensor(torch.randn(6, 5), mesh, [placement]) for placement in (target, source))
    x = x.sum(1) if source == sw.Shard(1) else x  # also of another shape
    assert x.set_(y) is x
    assert x.spec is y.spec
    x[2].mul_(3)
    x.add_(1)
    assert torch.equal(x.full_tensor(), y.full_tensor())


def test_set_of_a_dtensor_and_a_plain_tensor_is_refused() -> None:
    x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    for target, source in ((x, torch.ones(4)), (torch.ones(4), x)):
        with pytest.raises(sw.UnsupportedError, match="cannot share memory"):
            target.set_(source)


@pytest.mark.filterwarnings("ignore:.*has no rule:shardwise.modes.ReplicationWarning")  # QR gathers
def test_a_parametrization_with_an_inverse() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    one = torch.nn.Linear(6, 6)
    layer = sw.distribute_module(copy.deepcopy(one), mesh, shard_rows)
    for module in (one, layer):
        torch.nn.utils.parametrizations.orthogonal(module)
    x = torch.randn(3, 6)
    for _ in range(2):
        found = layer(sw.distribute_tensor(x, mesh, [sw.Replicate()]))
        torch.testing.assert_close(found.full_tensor(), one(x))


def shard_rows(name: str, module: torch.nn.Module, mesh: sw.DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, torch.nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, [sw.Shard(0)])))
