"""The dispatcher: keys, caches, plain tensors, writes, strict mode, warnings."""

import dataclasses
import functools
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch import OpDispatcher, executors
from shardwise.local import sparing_empty
from shardwise.rules.registry import RULES
from shardwise.schema import op_info
from shardwise.tensor import dispatcher, forget_operators
from tests.virtual.parity import assert_parity

FLOAT = torch.float64


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,))


def sharded(mesh: sw.DeviceMesh, *size: int, dim: int = 0) -> sw.DTensor:
    return sw.distribute_tensor(torch.randn(*size, dtype=FLOAT), mesh, [sw.Shard(dim)])


# ---------------------------------------------------------------- keys and caches


def entries() -> int:
    return sw.cache_info().entries


def test_a_scalar_that_no_rule_reads_makes_no_new_entry(mesh):
    x = sharded(mesh, 8, 4)
    for fn in (lambda s: x + s, lambda s: x * s, lambda s: x.clamp(min=s), lambda s: x.add(x, alpha=s), lambda s: x**s):
        fn(0.5)
        before = entries()
        for step in range(20):
            fn(step + 0.25)
        assert entries() == before


def test_the_type_of_a_scalar_is_in_the_key(mesh):
    x = sw.ones(4, dtype=torch.int64, device_mesh=mesh, placements=[sw.Shard(0)])
    plain = torch.ones(4, dtype=torch.int64)
    for scalar in (1, 1.0, True, 1 + 0j, 2, 2.0):
        assert (x + scalar).dtype is (plain + scalar).dtype
        assert torch.equal((x + scalar).full_tensor(), plain + scalar)
    for scalar in (0.0, -0.0):
        got, wanted = torch.copysign(x.double(), scalar).full_tensor(), torch.copysign(plain.double(), scalar)
        assert torch.equal(got, wanted)


def test_the_types_of_numbers_in_a_list_are_in_the_key(mesh):
    plain = [torch.arange(4), torch.arange(4) > 1]
    given = [sw.distribute_tensor(t, mesh, [sw.Shard(0)]) for t in plain]
    for numbers in ([1, 2], [1, 2.0], [1, True], [True, 2], [1.0, 2]):
        for got, wanted in zip(torch._foreach_mul(given, numbers), torch._foreach_mul(plain, numbers), strict=True):
            assert got.dtype is got.full_tensor().dtype is wanted.dtype


@pytest.mark.parametrize("copied", [torch.Tensor.contiguous, torch.clone])
def test_copies_in_another_memory_format(mesh, copied):
    x = torch.randn(2, 4, 3, 5)
    for dim in range(4):
        last = copied(sw.distribute_tensor(x, mesh, [sw.Shard(dim)]), memory_format=torch.channels_last)
        assert last.stride() == copied(x, memory_format=torch.channels_last).stride()
        torch.manual_seed(0)
        got = torch.rand_like(last)
        torch.manual_seed(0)
        assert torch.equal(got.full_tensor(), torch.rand_like(copied(x, memory_format=torch.channels_last)))


def test_a_rule_cannot_read_a_number_that_is_not_in_the_key(mesh, monkeypatch):
    op = torch.ops.aten.elu.default
    rule = RULES[op]
    reading = dataclasses.replace(rule, factors=lambda call: rule.factors(call) if call["alpha"] > 0 else None)
    monkeypatch.setitem(RULES, op, reading)
    forget_operators()
    try:
        with pytest.raises(AssertionError, match="not among its `reads`"):
            torch.nn.functional.elu(sharded(mesh, 4), 2.0)
    finally:
        monkeypatch.undo()
        forget_operators()


def test_sizes_are_in_the_key_and_the_cache_is_bounded(mesh, monkeypatch):
    monkeypatch.setattr(dispatcher.cache, "limit", entries() + 16)
    for size in range(1, 60):
        x = sw.ones(size, device_mesh=mesh, placements=[sw.Shard(0)])
        assert (x + x).sum().item() == 2 * size
    assert entries() <= sw.cache_info().limit + 16


def test_stack_and_cat_of_hundreds_hit_the_cache(mesh):
    tensors = [sharded(mesh, 4, 3) for _ in range(300)]
    torch.stack(tensors)
    torch.cat(tensors, 1)
    before = sw.cache_info().misses
    assert torch.stack(tensors).shape == (300, 4, 3)
    assert torch.cat(tensors, 1).shape == (4, 900)
    assert sw.cache_info().misses == before


def test_warm_add_enters_few_frames():
    """Speed is protected by a count: Python frames of ours that a warm `a + b` enters. Without beartype's wrappers."""
    program = """
import sys, torch, shardwise as sw
mesh = sw.init_device_mesh("cpu", (2,))
a = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
a + a
frames = []
def look(frame, event, arg):
    if event == "call" and "shardwise" in frame.f_code.co_filename:
        frames.append(frame.f_code.co_qualname)
sys.setprofile(look)
a + a
sys.setprofile(None)
print(len(frames), frames)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, _, names = done.stdout.partition(" ")
    assert int(count) <= 6, names  # dispatch, executor, its list, two wrappers


def test_many_threads_see_one_answer(mesh):
    wrong = []

    def work(seed: int) -> None:
        value = torch.full((8, 4), float(seed), dtype=FLOAT)
        x = sw.distribute_tensor(value, mesh, [sw.Shard(0)]).requires_grad_()
        (x * x + seed).sum().backward()
        if not torch.equal(x.grad.full_tensor(), 2 * value):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------- writes


def write_slice(a):
    a = a * 1
    a[1:3] = 0
    return a


def write_column(a):
    a = a * 1
    a[:, 2].add_(1)
    return a


def write_flat(a):
    a = a * 1
    a.view(-1)[7] = 1.0
    return a


def write_through_two_views(a):
    a = a * 1
    a.view(24, 5)[3:10].mul_(2)
    return a


def write_transposed(a):
    a = a * 1
    a.transpose(0, 1)[2:4].fill_(3.0)
    return a


def write_diagonal(a):
    a = a * 1
    a.diagonal(0, 0, 1).zero_()
    return a


def write_masked(a):
    a = a * 1
    a[a > 0] = 0
    return a


def write_in_place(a):
    return (a * 1).add_(1).neg_().mul_(2).sub_(a).div_(3)


def write_out(a):
    a = a.detach()
    out = torch.empty_like(a)
    torch.add(a, a, out=out)
    return out


def write_reshaped(a):
    a = a * 1
    a.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    return a + 1


def write_chunks(a):
    a = a * 1
    for i in range(3):
        a.narrow(1, 2 * i, 2).add_(i)
    return a


@pytest.mark.parametrize(
    "fn",
    [
        write_slice,
        write_column,
        write_flat,
        write_through_two_views,
        write_transposed,
        write_diagonal,
        write_masked,
        write_in_place,
        write_reshaped,
        write_chunks,
    ],
)
def test_a_write_is_never_lost(fn):
    assert_parity(fn, torch.randn(4, 6, 5, dtype=FLOAT), limit=16)


def test_out_is_written(mesh):
    assert_parity(write_out, torch.randn(4, 6, dtype=FLOAT), gradients=False)
    x = sharded(mesh, 4, 3)
    with pytest.raises(sw.LayoutError, match="cannot be written into"):
        torch.add(x, x, out=sharded(mesh, 5, 3))


def test_fill_of_a_partial_means_the_value(mesh):
    x = sw.zeros(4, device_mesh=mesh, placements=[sw.Partial()])
    assert torch.equal(x.fill_(3.0).full_tensor(), torch.full((4,), 3.0))
    assert torch.equal(torch.full_like(x, 2.0).full_tensor(), torch.full((4,), 2.0))
    assert torch.equal(torch.ones_like(x).full_tensor(), torch.ones(4))
    assert (x + 1).full_tensor().tolist() == [4.0] * 4
    assert bool((x == 3).all())
    assert x.sum().item() == 12.0


# ---------------------------------------------------------------- what people trip on with torch's DTensor

MEAN_LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "soft_margin": lambda a, b: F.soft_margin_loss(a, b.detach().sign()),
}


@pytest.mark.parametrize("name", MEAN_LOSSES)
@pytest.mark.parametrize("size", [4, 7])
def test_mean_losses_on_even_and_uneven_shards(name, size):
    a, b = torch.randn(size, dtype=FLOAT), torch.randn(size, dtype=FLOAT)
    assert_parity(MEAN_LOSSES[name], a, b, limit=12)


PITFALLS = {
    "partial + scalar": lambda x: x + 1,
    "max": lambda x: x.max(),
    "min over a dim": lambda x: x.min(1),
    "argmax": lambda x: x.argmax(0),
    "argmin of all": lambda x: x.argmin(),
    "flatten an uneven dim": lambda x: x.flatten(),
    "view of an uneven dim": lambda x: x.reshape(5, -1),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "inf norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "amax": lambda x: x.amax(0),
    "fft": lambda x: torch.fft.fft(x, dim=0).abs(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cosine embedding": lambda x: F.cosine_embedding_loss(x, x.flip(0), x[:, 0].sign()),
    "one hot": lambda x: F.one_hot(x.abs().long().clamp(max=3), 4).double(),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "std": lambda x: x.std(0),
    "roll": lambda x: x.roll(2, 0),
    "tril": lambda x: x.tril(),
}


@pytest.mark.parametrize("name", PITFALLS)
@pytest.mark.parametrize("shape", [(5, 3), (4, 6), (2, 7)])
def test_known_pitfalls(name, shape):
    if name.startswith("view") and shape[0] * shape[1] % 5:
        pytest.skip("the shape does not divide")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.ReplicationWarning)
        assert_parity(PITFALLS[name], torch.randn(*shape, dtype=FLOAT), limit=12)


@pytest.mark.parametrize("length", [4, 6, 7])
def test_linear_on_a_sharded_sequence_moves_nothing(length, mesh):
    x = torch.randn(2, length, 5, dtype=FLOAT)
    weight, bias = torch.randn(3, 5, dtype=FLOAT), torch.randn(3, dtype=FLOAT)
    assert_parity(F.linear, x, weight, bias, limit=12)
    whole = [sw.Replicate()]
    shards = sw.distribute_tensor(x, mesh, [sw.Shard(1)])
    with CommDebugMode() as comm:
        got = F.linear(shards, sw.distribute_tensor(weight, mesh, whole), sw.distribute_tensor(bias, mesh, whole))
    assert comm.get_total_counts() == 0
    assert got.placements == (sw.Shard(1),)


def test_item_and_bool_of_a_partial(mesh):
    x = sharded(mesh, 6, 2)
    total = x.sum()
    assert total.placements == (sw.Partial(),)
    assert total.item() == pytest.approx(x.full_tensor().sum().item())
    assert bool(total > 0) == bool(x.full_tensor().sum() > 0)


# ---------------------------------------------------------------- strict mode and warnings


def test_strict_names_operator_layouts_bytes_and_line(mesh):
    x = sharded(mesh, 8, 4)
    y = sharded(mesh, 8, 4, dim=1)
    with sw.strict():
        x + x
        with pytest.raises(sw.ImplicitCommunicationError) as caught:
            x + y
        x + y.redistribute(placements=[sw.Shard(0)])
        with sw.allow_implicit(torch.ops.aten.add):
            x + y
    message = str(caught.value)
    assert "aten.add.Tensor" in message
    assert "test_dispatch.py:" in message
    assert "S1 -> S0" in message or "S0 -> S1" in message
    assert "bytes" in message
    x + y


def test_strict_holds_in_backward(mesh):
    x = sharded(mesh, 8, 4).requires_grad_()
    result, other = x.tanh(), sharded(mesh, 8, 4, dim=1)
    with sw.strict():
        with pytest.raises(sw.ImplicitCommunicationError, match=r"aten\.tanh_backward") as caught:
            result.backward(other, retain_graph=True)
        assert x.grad is None
        with sw.allow_implicit(torch.ops.aten.tanh_backward):
            result.backward(other, retain_graph=True)
    assert "bytes" in str(caught.value)
    allowed, x.grad = x.grad, None
    result.backward(other)
    assert torch.equal(x.grad.full_tensor(), allowed.full_tensor())


def test_strict_lets_a_backward_through_that_moves_nothing(mesh):
    x = sharded(mesh, 8, 4).requires_grad_()
    y = sharded(mesh, 8, 4, dim=1).redistribute(placements=[sw.Replicate()])
    loss = (x * y).sum()
    with sw.strict():
        loss.backward()
    assert torch.equal(x.grad.full_tensor(), y.full_tensor())


def test_one_warning_for_an_operator_and_line(mesh):
    x = sw.distribute_tensor(torch.randn(8, 8, dtype=FLOAT), mesh, [sw.Shard(0)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.linalg.matrix_exp(x)
    ours = [w for w in seen if issubclass(w.category, sw.ReplicationWarning)]
    assert len(ours) <= 1


def test_operands_on_different_meshes_are_refused(mesh):
    other = sw.init_device_mesh("cpu", (2, 2))
    with pytest.raises(sw.MeshError, match="different meshes"):
        sharded(mesh, 4, 2) + sw.distribute_tensor(torch.randn(4, 2, dtype=FLOAT), other, [sw.Shard(0), sw.Replicate()])


def test_dispatcher_counts_misses(mesh):
    x = sharded(mesh, 3, 11)
    before = sw.cache_info().misses
    x.sinh()
    assert sw.cache_info().misses == before + 1
    x.sinh()
    assert sw.cache_info().misses == before + 1
    assert dispatcher.info().entries == len(dispatcher.cache)


# ---------------------------------------------------------------- numbers that were silently wrong once


def test_reductions_that_do_not_commute_never_meet():
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x, y = torch.randn(4, 3, dtype=FLOAT), torch.randn(4, 3, dtype=FLOAT)
    a = sw.distribute_tensor(x, mesh, [sw.Partial("max"), sw.Replicate()])
    b = sw.distribute_tensor(y, mesh, [sw.Replicate(), sw.Partial()])
    assert torch.equal(torch.maximum(a, b).full_tensor(), torch.maximum(x, y))
    assert torch.equal(torch.stack([a, b]).full_tensor(), torch.stack([x, y]))


@pytest.mark.parametrize("fn", [torch.linalg.pinv, lambda x: x.conj() * x, lambda x: x.mH @ x, torch.sinh])
def test_conjugates_are_seen(fn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.ReplicationWarning)
        assert_parity(fn, torch.randn(4, 3, dtype=torch.complex128), limit=8)


# ---------------------------------------------------------------- views that had to be copied, and their bases


def test_a_copied_view_sees_what_is_written_to_its_base() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    plain = torch.arange(16.0).reshape(8, 2)
    base = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
    expected = plain.clone()
    rows, wanted = base.narrow(0, 1, 5), expected.narrow(0, 1, 5)
    part, wanted_part = rows[1:3], wanted[1:3]
    for write in (
        lambda b, r, p: b.add_(1),
        lambda b, r, p: b.view(-1).mul_(2),
        lambda b, r, p: p.add_(0.5),
        lambda b, r, p: r.t().mul_(3),
        lambda b, r, p: b[7].zero_(),
        lambda b, r, p: b[2].fill_(9),
    ):
        write(base, rows, part)
        write(expected, wanted, wanted_part)
        for have, want in ((part, wanted_part), (rows, wanted), (base, expected)):
            torch.testing.assert_close(have.full_tensor(), want)
            torch.testing.assert_close((have + 0).full_tensor(), want)


def test_gradients_flow_through_views_whose_base_was_written_to() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    plain = torch.randn(6, 4, dtype=torch.float64)
    grads = []
    for leaf in (plain.clone().requires_grad_(), sw.distribute_tensor(plain, mesh, [sw.Shard(0)]).requires_grad_()):
        base = leaf * 2
        rows = base[1:4]
        base.view(-1).mul_(3)
        rows[0].add_(1)
        (rows.square().sum() + base.sum()).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1].full_tensor(), grads[0])


def test_views_in_inference_mode_see_writes_too() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        base = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
        part = base[1:5]
        base.add_(1)
        torch.testing.assert_close(part.full_tensor(), torch.arange(2.0, 6.0))
        part.mul_(2)
        torch.testing.assert_close(base.full_tensor(), torch.tensor([1.0, 4, 6, 8, 10, 6]))


def test_views_in_inference_mode_of_what_was_made_outside() -> None:
    """They are no inference tensors, as in torch; and writes get across as always."""
    plain = torch.arange(24.0).reshape(4, 6)
    x = sw.distribute_tensor(plain, sw.init_device_mesh("cpu", (2,)), [sw.Shard(0)]).requires_grad_()
    for base in (plain, x):
        with torch.inference_mode():
            rows, columns = base.detach()[1:3], base.chunk(2, dim=1)[1]
            base.view(2, 2, 6)[1, 0, 3] = -1.0
            base.mT[3, 1] = -2.0
            columns.mul_(2)
        assert not rows.is_inference()
        assert not rows.requires_grad
        assert rows.sum().item() == 162.0
    torch.testing.assert_close(x.full_tensor(), plain)


def test_a_redistributed_tensor_is_one_of_its_own_without_overlaps() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.randn(5, dtype=torch.float64), mesh, [sw.Replicate()]).requires_grad_()
    moved = x.unfold(0, 2, 1).redistribute(placements=[sw.Shard(1)])
    assert moved.stride() == (2, 1)
    moved[0:4, ::3].zero_()
    moved.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), torch.tensor([0.0, 1, 1, 1, 1], dtype=torch.float64))
    assert x.redistribute(placements=[sw.Replicate()]) is x


def test_empty_tensors_whose_meta_function_divides_by_their_size() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.randn(1, 5), mesh, [sw.Replicate()]).requires_grad_()
    torch.nn.functional.group_norm(x.narrow(0, 0, 0)[None], 1).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.zeros(1, 5))


@pytest.mark.parametrize(
    "op", [torch.softmax, torch.log_softmax, torch.cumsum, torch.logcumsumexp, torch.sum, torch.amax]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_results_lie_in_memory_as_on_one_device(op: Any, dim: int) -> None:
    """Also where an operator is computed from others: random numbers are drawn into a tensor in the order of memory."""
    mesh = sw.init_device_mesh("cpu", (2,))
    plain = torch.randn(6, 4)
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
        x = sw.distribute_tensor(plain, mesh, [placement])
        for view in (lambda t: t, lambda t: t.t()):
            want, have = op(view(plain), dim), op(view(x), dim)
            assert have.stride() == want.stride()
            torch.testing.assert_close(have.full_tensor(), want)


def normalized(x: Any) -> Any:
    return F.batch_norm(x, None, None, torch.ones(x.shape[1]), training=True)


def normalized_gradient(x: Any) -> Any:
    own = x.detach().requires_grad_()
    return torch.autograd.grad(normalized(own).pow(3).sum(), own)[0]


KERNEL_ORDERS: dict[str, Any] = {
    "batch_norm": normalized,
    "batch_norm backward": normalized_gradient,
    "reflection_pad2d": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "replication_pad2d": lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"),
    "_pad_circular": lambda x: F.pad(x, (1, 2, 1, 0), mode="circular"),
    "max_unpool2d": lambda x: F.max_unpool2d(x, torch.zeros_like(x, dtype=torch.int64), 2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "roll": lambda x: x.roll((1, 2), (1, 0)),
    "roll by nothing": lambda x: x.roll(8, 1),
    "roll, flat": lambda x: x.roll(1),
    "floor_divide": lambda x: x // x,
    "floor_divide by a number": lambda x: x // 2,
    "floor_divide, broadcast": lambda x: x // torch.ones(8, 1, 1),
    "div, rounded": lambda x: torch.div(x, torch.ones(6), rounding_mode="floor"),
    "copysign": lambda x: torch.copysign(x, torch.ones(6)),
    "xlogy": lambda x: torch.xlogy(x, x),
    "xlog1py": lambda x: torch.special.xlog1py(x, 2.0),
    "native_dropout backward": lambda x: torch.ops.aten.native_dropout_backward(x, torch.ones_like(x) > 0, 2.0),
}


@pytest.mark.parametrize("name", KERNEL_ORDERS)
def test_results_have_the_memory_order_of_cpu_kernels(mesh: sw.DeviceMesh, name: str) -> None:
    """Where functions on meta tensors give another: a later `as_strided`, or random numbers, would differ silently."""
    op, shape = KERNEL_ORDERS[name], (2, 8, 5, 6)
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 3, 2), (1, 0, 2, 3)]:
        plain = torch.rand([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        for placement in (sw.Replicate(), sw.Shard(1), sw.Shard(2)):
            want, have = op(plain), op(sw.distribute_tensor(plain, mesh, [placement]))
            assert have.stride() == want.stride(), (order, placement)
            torch.testing.assert_close(have.full_tensor(), want)
            torch.manual_seed(7)
            drawn = F.dropout(torch.ones_like(want))
            torch.manual_seed(7)
            assert torch.equal(F.dropout(torch.ones_like(have)).full_tensor(), drawn)


def test_circular_padding_by_nothing_is_a_copy(mesh: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.ones(1, 2, 8), mesh, [sw.Shard(2)])
    F.pad(x, (0, 0), mode="circular").add_(1)
    assert torch.equal(x.full_tensor(), torch.ones(1, 2, 8))


def test_printing_does_not_communicate() -> None:
    """One rank alone may do it; a copied view whose base was written to says so, and is right when it is used."""
    mesh = sw.init_device_mesh("cpu", (2,))
    base = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
    part = base[1:5]
    assert "written" not in repr(part)
    base.add_(1)
    with CommDebugMode() as moved:
        assert "before its base was written to" in repr(part)
    assert moved.get_total_counts() == 0
    assert part.tolist() == [2, 3, 4, 5]
    assert "written" not in repr(part)


def test_a_new_size_is_run_as_a_known_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))

    def operands(*shape: int) -> tuple[sw.DTensor, sw.DTensor, torch.Tensor]:
        x = torch.randn(shape)
        a, b = (sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Shard(1)]) for _ in range(2))
        return a, b, x

    a, b, x = operands(6, 6)
    torch.testing.assert_close((a * b).full_tensor(), x * x)
    worked_out: list[Any] = []
    resolve = OpDispatcher.resolve
    monkeypatch.setattr(OpDispatcher, "resolve", lambda *given: worked_out.append(given) or resolve(*given))
    for shape in ((8, 6), (5, 7), (3, 2)):
        a, b, x = operands(*shape)
        torch.testing.assert_close((a * b).full_tensor(), x * x)
    assert not worked_out
    for shape in ((1, 6), (6, 1), (0, 4)):  # where a dim could broadcast, or there is none of it
        a, b, x = operands(*shape)
        torch.testing.assert_close((a * b).full_tensor(), x * x)
    a, b, x = operands(4, 4)
    torch.testing.assert_close((a.t() * b).full_tensor(), x.t() * x)
    assert len(worked_out) >= 4


def test_a_write_to_some_of_overlapping_windows_reaches_the_tensor() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = torch.arange(30.0).reshape(5, 6)

    def run(rows: Any) -> tuple[Any, Any]:
        doubled = rows.repeat_interleave(2, -2)  # a view that had to be copied, where rows are sharded
        windows = doubled.unfold(1, 3, 1)
        windows[::1, ::3, ::2] = 0.25
        return doubled, windows

    for ours, plain in zip(run(sw.distribute_tensor(x, mesh, [sw.Shard(0)])), run(x), strict=True):
        torch.testing.assert_close(ours.full_tensor(), plain)


def test_norms_that_wait_can_be_written_to_and_looked_at() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = torch.randn(6, 4, dtype=torch.float64)

    def seen_before(norms: Any) -> Any:
        view = norms.view(2, 3)
        norms.sub_(5)
        return view

    def written_through(norms: Any) -> Any:
        norms.view(2, 3).mul_(-2)
        return norms

    uses: list[Any] = [
        lambda n: n.clamp_min_(1.5), lambda n: n.fill_(-3.0), lambda n: n.neg_(), lambda n: torch.neg(n, out=n),
        lambda n: (torch._foreach_sub_([n], 7.0), n)[1], seen_before, written_through, lambda n: torch.cat([n, -n]),
        lambda n: torch.stack([n, -n, n * 0 - 1e200]), lambda n: n.sort().values, lambda n: n.sum(),
        torch.linalg.vector_norm, lambda n: torch.linalg.vector_norm(n, 1), lambda n: n[2:4].neg_(),
    ]  # fmt: skip
    for use in uses:
        for placements in ([sw.Replicate(), sw.Shard(1)], [sw.Shard(1)] * 2, [sw.Shard(0), sw.Shard(1)]):
            ours = torch.linalg.vector_norm(sw.distribute_tensor(x, mesh, placements), 2, 1)
            plain = torch.linalg.vector_norm(x, 2, 1)
            result, wanted = use(ours), use(plain)
            if wanted is not None:
                torch.testing.assert_close(result.full_tensor(), wanted)
            torch.testing.assert_close(ours.full_tensor(), plain)


def test_what_a_hook_keeps_of_a_gradient_is_its_own(mesh: sw.DeviceMesh) -> None:
    x, kept = sharded(mesh, 8, 4).requires_grad_(), []
    x.register_hook(kept.append)
    (x * 4).sum().backward()
    assert x.grad is not None
    assert x.grad is not kept[0]
    x.grad.zero_()
    assert kept[0].full_tensor().eq(4).all()


def test_detaching_gives_a_tensor_of_its_own(mesh: sw.DeviceMesh) -> None:
    x = sharded(mesh, 8, 4)
    for detached in (x.detach(), torch.detach(x), *map(torch.Tensor.detach, [x]), torch.ops.aten.detach.default(x)):
        assert detached is not x
        detached.requires_grad_()
        assert not x.requires_grad


def test_what_is_saved_for_backward_is_freed(mesh: sw.DeviceMesh) -> None:
    x = sharded(mesh, 8, 4).requires_grad_()
    y = x.exp()  # which torch detaches to save it
    saved = weakref.ref(y)
    y.sum().backward()
    del y
    assert saved() is None, "nothing goes round in a circle"


@pytest.fixture
def refusing_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs treated like devices whose kernels may not be called with nothing."""
    dispatcher.forget()
    monkeypatch.setattr(executors, "REFUSING_EMPTY", {"cpu"})
    yield
    dispatcher.forget()


def test_kernels_are_not_called_for_an_empty_result() -> None:
    op, called = torch.ops.aten._upsample_bilinear2d_aa.default, []

    def counted(image: torch.Tensor, *rest: Any) -> torch.Tensor:
        called.append((image.device.type, len(image)))
        return op(image, *rest)

    run = sparing_empty(op_info(op), counted)
    shapes = [run(torch.ones(n, 1, 4, 4), [2, 2], False, None, None).shape for n in (0, 2)]
    assert shapes == [(0, 1, 2, 2), (2, 1, 2, 2)]
    assert called == [("meta", 0), ("cpu", 2)]


@pytest.mark.usefixtures("refusing_empty")
def test_resizing_with_no_sample_on_a_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    image = torch.arange(48.0).reshape(3, 1, 4, 4)
    resize = functools.partial(F.interpolate, size=(2, 2), mode="bilinear", antialias=True)
    x, plain = sw.distribute_tensor(image, mesh, [sw.Shard(0)]).requires_grad_(), image.clone().requires_grad_()
    out = resize(x)
    assert out.placements == (sw.Shard(0),)
    torch.testing.assert_close(out.full_tensor(), resize(image))
    out.square().sum().backward()
    resize(plain).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.usefixtures("refusing_empty")
def test_reductions_of_nothing_and_writes_to_nothing_with_such_kernels() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    table = torch.arange(12.0).reshape(6, 2)
    words = torch.tensor([1, 1, 5])
    for placements in ([sw.Shard(0)], [sw.Shard(1)]):
        x = sw.distribute_tensor(table, mesh, placements)
        torch.testing.assert_close(x.sum(1).full_tensor(), table.sum(1))
        torch.testing.assert_close((x.T @ x).full_tensor(), table.T @ table)
        assert x.clone().index_fill_(0, words, 0).sum().item() == table.index_fill(0, words, 0).sum()
        plain, weight = table.clone().requires_grad_(), x.detach().clone().requires_grad_()
        for given, at in ((plain, words), (weight, sw.distribute_tensor(words, mesh, [sw.Replicate()]))):
            F.embedding(at, given, scale_grad_by_freq=True).square().sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)


@pytest.mark.usefixtures("refusing_empty")
def test_short_calls_with_such_kernels_see_one_rank_at_a_time() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, plain = torch.arange(9.0), torch.arange(9.0)[None]
    given = sw.distribute_tensor(x, mesh, [sw.Shard(0)])
    torch.testing.assert_close(given.clone().zero_().full_tensor(), torch.zeros(9))
    torch.testing.assert_close(torch.maximum(given, 9 - given).full_tensor(), torch.maximum(x, 9 - x))
    torch.testing.assert_close((given.norm() + given.std()).full_tensor(), x.norm() + x.std())
    rows = sw.distribute_tensor(plain.T.contiguous(), mesh, [sw.Shard(0)])
    torch.testing.assert_close((rows @ plain).full_tensor(), plain.T @ plain)
    torch.testing.assert_close(
        F.interpolate(rows[..., None], scale_factor=2).full_tensor(), F.interpolate(plain.T[..., None], scale_factor=2)
    )


def test_new_tensors_on_another_device_are_plain_and_global(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.ones(6, 3), mesh, [sw.Shard(0)])
    monkeypatch.setattr("shardwise.dispatch.dispatcher._is_elsewhere", lambda device, mesh: device is not None)
    for made in (torch.zeros_like(x, device="cpu"), x.new_zeros((6, 3), device="cpu")):
        assert type(made) is torch.Tensor
        assert torch.equal(made, torch.zeros(6, 3))
    with pytest.raises(sw.UnsupportedError, match="was called with the device"):
        torch.ops.aten._to_copy.default(x, device="cpu")
    dispatcher.forget()


def test_collectives_of_process_groups_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    with pytest.raises(sw.UnsupportedError, match=r"all_reduce\S* is a collective of a process group"):
        torch.ops._c10d_functional.all_reduce(x, "sum", "0")


def test_plain_operands_write_to_the_out_of_a_dtensor() -> None:
    """Some optimizers compute factors from plain state and write the product into the update."""
    mesh = sw.init_device_mesh("cpu", (4,))
    a, b = torch.rand(7, 1), torch.rand(1, 6)
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        out = sw.zeros(7, 6, device_mesh=mesh, placements=[placement])
        assert torch.mul(a, b, out=out) is out
        torch.testing.assert_close(out.full_tensor(), a * b)
        values, indices = sw.zeros(7, device_mesh=mesh, placements=[sw.Shard(0)]), torch.zeros(7, dtype=torch.long)
        torch.max(a * b, 1, out=(values, indices))
        torch.testing.assert_close((values.full_tensor(), indices), tuple((a * b).max(1)))
