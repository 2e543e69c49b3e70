"""Operators that change the indices of a sharded dim: it stays sharded, and ranks receive the rows that they lack."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import shardwise as sw
from shardwise import MaskPartial, Partial, Replicate, Shard, StridedShard
from shardwise.core.layout import Segment
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.row_packing import row_parcels
from shardwise.plan.step import RowExchange
from tests.virtual.parity import bytes_moved
from tests.virtual.partials import mesh_of

FLOAT = torch.float64
ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "from the second": lambda x, y: x[1:],
    "but the last": lambda x, y: x[:-1],
    "inner": lambda x, y: x[2:-1],
    "every other": lambda x, y: x[::2],
    "every third": lambda x, y: x[1::3],
    "diff": lambda x, y: x.diff(dim=0),
    "roll": lambda x, y: x.roll(1, 0),
    "roll both": lambda x, y: x.roll((-3, 2, 1), (0, 1, 0)),
    "flip": lambda x, y: x.flip(0, 1),
    "pad": lambda x, y: F.pad(x, (1, 0, 2, 1), value=0.5),
    "crop and pad": lambda x, y: F.pad(x, (0, 0, -2, 3)),
    "cat": lambda x, y: torch.cat([x, y[1:], x]),
    "cat of dtypes": lambda x, y: torch.cat([x.float(), y]),
    "cat with an old empty one": lambda x, y: torch.cat([x, torch.empty(0, dtype=FLOAT), y]),
    "split": lambda x, y: x.split(3),
    "split by sizes": lambda x, y: x.split([1, 0, x.shape[0] - 1]),
    "chunk": lambda x, y: y.chunk(3),
    "slice_scatter": lambda x, y: x.slice_scatter(y[1:-1], 0, 2),
    "shifted by cat": lambda x, y: torch.cat([x[1:], x[:1]]),
    "none": lambda x, y: x[2:2],
}  # fmt: skip
LAYOUTS = (
    ((4,), [Shard(0)]), ((8,), [Shard(0)]), ((3,), [Shard(0)]), ((1,), [Shard(0)]), ((2, 2), [Shard(0), Shard(0)]),
    ((2, 3), [Shard(0), Shard(1)]), ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Partial(), Shard(0)]),
    ((2, 2), [Shard(0), StridedShard(0, 2)]),
)  # fmt: skip


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rows", [8, 13, 5])  # even, uneven, some ranks empty
def test_values_and_gradients(name: str, rows: int) -> None:
    fn = ROWS[name]
    torch.manual_seed(0)
    x, y = torch.randn(2, rows, 3, dtype=FLOAT).unbind()
    for shape, placements in LAYOUTS:
        plain = [t.clone().requires_grad_() for t in (x, y)]
        given = [sw.distribute_tensor(t, mesh_of(*shape), placements).requires_grad_() for t in (x, y)]
        wanted, got = listed(fn(*plain)), listed(fn(*given))
        for a, b in zip(got, wanted, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a.full_tensor(), b), f"{name} on {shape} {placements}"
        weights = [torch.randn_like(t) for t in wanted]
        sum((t * w).sum() for t, w in zip(wanted, weights, strict=True)).backward()
        laid = [sw.distribute_tensor(w, mesh_of(*shape), [Replicate()] * len(shape)) for w in weights]
        sum((t * w).sum() for t, w in zip(got, laid, strict=True)).backward()
        for a, b in zip(given, plain, strict=True):
            if b.grad is not None:
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=f"{name} on {shape}")


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda x: x[1:], 1),
        (lambda x: x[3:], 3),
        (lambda x: x[:-1], 0),
        (lambda x: x[::2], 0),
        (lambda x: x.roll(2, 0), 2),
        (lambda x: x.diff(dim=0), 1),
        (lambda x: x.flip(0), 16),
        (lambda x: x[2:].square()[1:], 3),
        (lambda x: torch.cat([x[:, :1], x[:, 1:]], 1), 0),
        (lambda x: x.slice_scatter(x[:-1], 0, 1), 1),
    ],
)
@pytest.mark.parametrize("ranks", [8, 512])
def test_only_rows_that_are_lacking_are_received(fn: Callable[[Any], Any], rows: int, ranks: int) -> None:
    with sw.dry_run() as run:
        x = sw.zeros(16 * ranks, 4, device_mesh=sw.init_device_mesh("cpu", (ranks,)), placements=[Shard(0)])
        result = fn(x)
    assert result.placements == (Shard(0),)
    assert run.bytes == rows * 16


def test_a_little_is_contributed_and_more_is_exchanged() -> None:
    x = sw.distribute_tensor(torch.randn(32, 3), mesh_of(8), [Shard(0)])
    little, collectives, _ = bytes_moved(lambda: x[1:9])
    assert (little.placements, collectives) == ((MaskPartial(),), 0)
    more, collectives, _ = bytes_moved(lambda: x[1:10])
    assert (more.placements, collectives) == ((Shard(0),), 1)


def test_strict_mode_refuses_an_exchange() -> None:
    x = sw.distribute_tensor(torch.randn(8, 3), mesh_of(4), [Shard(0)])
    with sw.strict(), pytest.raises(sw.ShardwiseError, match="would move 12 bytes"):
        x.roll(1, 0)


@pytest.mark.parametrize("write", [lambda v: v.add_(1), lambda v: v.zero_(), lambda v: v[1:].mul_(3)])
@pytest.mark.parametrize(
    "view", [lambda x: x[2:], lambda x: x[::2], lambda x: x.split(5)[1], lambda x: x.narrow(0, 1, 7)]
)
def test_writes_to_views_reach_the_base(view: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
    plain = torch.randn(9, 3)
    x = sw.distribute_tensor(plain.clone(), mesh_of(4), [Shard(0)])
    shown, seen = view(plain), view(x)
    write(shown)
    write(seen)
    assert torch.equal(x.full_tensor(), plain)
    plain.add_(1)
    x.add_(1)
    assert torch.equal(seen.full_tensor(), shown)


@pytest.mark.parametrize("name", ["inner", "every other", "roll", "flip", "pad", "cat", "chunk", "slice_scatter"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_derivatives_of_any_kind(name: str) -> None:
    x, y = torch.randn(2, 7, 2, dtype=FLOAT).unbind()

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        laid = [sw.DTensor.from_local(t, mesh_of(4)).redistribute(placements=[Shard(0)]) for t in (x, y)]
        return sum((part.sin() ** 2).sum(0) for part in listed(ROWS[name](*laid))).full_tensor()

    given = [x.requires_grad_(), y.requires_grad_()]
    assert gradcheck(fn, given, check_forward_ad=True)
    assert gradgradcheck(fn, given)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_forward_mode() -> None:
    x, tangent = torch.randn(2, 9, 2, dtype=FLOAT).unbind()
    laid = [sw.distribute_tensor(t, mesh_of(4), [Shard(0)]) for t in (x, tangent)]
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(forward_ad.make_dual(*laid)[1:].roll(2, 0))
        assert torch.equal(made.tangent.full_tensor(), tangent[1:].roll(2, 0))


def test_compiled() -> None:
    def fn(x: Any, y: Any) -> Any:
        return torch.cat([x[1:] - x[:-1], y.flip(0)]).roll(2, 0).square().sum()

    x, y = torch.randn(2, 8, 2, dtype=FLOAT).unbind()
    plain = [t.clone().requires_grad_() for t in (x, y)]
    fn(*plain).backward()
    given = [sw.distribute_tensor(t, mesh_of(4), [Shard(0)]).requires_grad_() for t in (x, y)]
    torch.compile(fn, backend="aot_eager")(*given).backward()
    for a, b in zip(given, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_compiled_slices_whose_length_changes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, length: x[:length], backend="aot_eager")
    plain = torch.randn(8, 4)
    for length in (2, 4, 6):  # the third one is symbolic
        given = sw.distribute_tensor(plain, mesh_of(2), [Shard(0)])
        assert torch.equal(compiled(given, length).full_tensor(), plain[:length])
    torch._dynamo.reset()


def test_plans_know_only_the_ranks_that_they_talk_to() -> None:
    with sw.dry_run():
        mesh = sw.init_device_mesh("cpu", (4096,))
    spec = DTensorSpec(mesh, [Shard(0)], TensorMeta((4 * 4096, 2)))
    step = RowExchange(spec, spec, (spec,), (spec,), 0, (Segment(0, 0, 0, 3, 4 * 4096 - 3),), (0,))
    goods = row_parcels(step, 17, mesh.coordinates)
    assert (goods.sent, goods.got, len(goods.keeps)) == (((17, 1), (18, 6)), ((16, 6), (17, 1)), 1)
    assert goods.splits(2)[0][16] == 12


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
@pytest.mark.parametrize("ranks", [3, 12])  # totals are gathered, and exchanged
def test_scans(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    for shape in ((40, 6), (13, 3), (30,), (20, 3, 5), (5, 4)):
        x = torch.randn(shape, dtype=FLOAT)
        x = x.round() if name.startswith("cumm") else x  # with ties
        plain, given = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh_of(ranks), [Shard(0)]).requires_grad_()
        wanted, got = listed(getattr(torch, name)(plain, 0)), listed(getattr(torch, name)(given, 0))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
        wanted[0].square().sum().backward()
        got[0].square().sum().backward()
        torch.testing.assert_close(given.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_scans_of_complex_numbers(name: str) -> None:
    x = torch.randn(20, 3, dtype=torch.complex128)
    plain, given = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh_of(12), [Shard(0)]).requires_grad_()
    wanted, got = getattr(torch, name)(plain, 0), getattr(torch, name)(given, 0)
    torch.testing.assert_close(got.full_tensor(), wanted)
    wanted.abs().sum().backward()
    got.abs().sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), plain.grad)


@pytest.mark.usefixtures("always_decomposing")
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("rows", [24, 23, 13])
def test_largest_of_a_sharded_dim(rows: int, largest: bool) -> None:
    """Values as on one device; indices that show them, each once: which of equal elements are taken is not defined."""
    torch.manual_seed(0)
    x = torch.randn(rows, 5)
    odd = x.clone()
    odd[1::4], odd[2::5] = float("nan"), float("-inf") if largest else float("inf")
    for shape, placements in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(0), Shard(0)])):
        for values in (x, odd, x.mul(9).long()):
            given = sw.distribute_tensor(values, mesh_of(*shape), placements)
            for k in (1, 3):
                wanted, got = values.topk(k, 0, largest), given.topk(k, 0, largest)
                at = got.indices.full_tensor()
                torch.testing.assert_close(got.values.full_tensor(), wanted.values, equal_nan=True)
                torch.testing.assert_close(values.gather(0, at), wanted.values, equal_nan=True)
                assert k == 1 or bool((at.sort(0).values.diff(dim=0) != 0).all())
    plain, laid = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh_of(4), [Shard(0)]).requires_grad_()
    for tensor in (plain, laid):
        tensor.topk(2, 0, largest).values.square().sum().backward()
    torch.testing.assert_close(laid.grad.full_tensor(), plain.grad)


def test_extremes_so_far_with_nan() -> None:
    x = torch.tensor([1.0, 3.0, float("nan"), 3.0, 5.0, 5.0, float("nan"), 2.0, 5.0, 7.0, 1.0, 0.0, 9.0])
    given = sw.distribute_tensor(x, mesh_of(12), [Shard(0)])
    for name in ("cummax", "cummin"):
        for part in (slice(0, 2), slice(None), slice(3, 6)):
            wanted, got = getattr(torch, name)(x[part], 0), getattr(torch, name)(given[part], 0)
            torch.testing.assert_close(got.values.full_tensor(), wanted.values, equal_nan=True)
            assert torch.equal(got.indices.full_tensor(), wanted.indices)


def test_a_slice_of_all_rows_in_backward_takes_a_constant_gradient() -> None:
    """The gradient of a sum is stored once; put back into the rows of a sharded dim it has all of them."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)]).requires_grad_()
    y = x * 2
    y[::1] = y[::1] * 2 + 1
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.full_tensor().tolist() == [4.0] * 6
