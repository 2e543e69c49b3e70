"""Softmax and normalisations against one device, running statistics among it, and how little they communicate."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from tests.virtual.free import S0, S1, S2, P, R, collectives, tensor
from tests.virtual.parity import assert_parity, distribute, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning"),
    pytest.mark.usefixtures("always_decomposing"),
]

t = tensor
aten = torch.ops.aten
EVEN, UNEVEN = t(4, 6, 8), t(5, 7, 3)
MASKED = t(4, 6).masked_fill(t(4, 6) > 0, -math.inf).index_fill(0, torch.tensor([2]), -math.inf)


def layer_norm(dims: int) -> Any:
    """Layer norm over the last dims."""
    return lambda x, *weights: F.layer_norm(x, x.shape[-dims:], *weights)


def rms_norm(dims: int) -> Any:
    """RMS norm over the last dims."""
    return lambda x, *weights: F.rms_norm(x, x.shape[-dims:], *weights, eps=1e-3)


def batch_norm(training: bool) -> Any:
    """Batch norm and what becomes of the running statistics."""

    def norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        mean, var = mean.detach().clone(), var.detach().clone()
        return F.batch_norm(x, mean, var, weight, bias, training, 0.3), mean, var

    return norm


def batch_norm_alone(x: Any, *weights: Any) -> Any:
    """Batch norm without running statistics."""
    return F.batch_norm(x, None, None, *weights, training=True)


def group_norm(groups: int) -> Any:
    """Group norm."""
    return lambda x, *weights: F.group_norm(x, groups, *weights)


CHANNELS = [t(6), t(6) + 1, t(6) + 2, t(6).abs() + 1]
CHANNELS7 = [t(7), t(7) + 1, t(7) + 2, t(7).abs() + 1]

CASES: dict[str, tuple[Any, ...]] = {
    **{f"softmax {d}": (lambda x, d=d: F.softmax(x, d), EVEN) for d in (0, -1)},
    **{f"log_softmax {d}": (lambda x, d=d: F.log_softmax(x, d), EVEN) for d in (0, -1)},
    **{f"softmax uneven {d}": (lambda x, d=d: F.softmax(x, d), UNEVEN) for d in (0, 1)},
    **{f"log_softmax uneven {d}": (lambda x, d=d: F.log_softmax(x, d), UNEVEN) for d in (0, 1)},
    **{f"safe softmax {d}": (lambda x, d=d: torch._safe_softmax(x, d), MASKED) for d in (0, 1)},
    "softmax of nothing allowed": (lambda x: F.softmax(x, 1), MASKED),
    "softmax of nothing": (lambda x: F.softmax(x, 1), t(3, 0, 2)),
    "softmax of a number": (lambda x: F.softmax(x, 0), t()),
    "layer norm": (layer_norm(1), EVEN, t(8), t(8) + 1),
    "layer norm uneven": (layer_norm(1), UNEVEN, t(3), t(3) + 1),
    "layer norm of two": (layer_norm(2), UNEVEN, t(7, 3), t(7, 3) + 1),
    "layer norm of all": (layer_norm(3), UNEVEN, UNEVEN + 1, UNEVEN + 2),
    "layer norm without bias": (layer_norm(1), EVEN, t(8)),
    "layer norm without weights": (layer_norm(2), EVEN),
    "rms norm": (rms_norm(1), EVEN, t(8)),
    "rms norm uneven": (rms_norm(2), UNEVEN, t(7, 3)),
    "rms norm without weight": (rms_norm(1), UNEVEN),
    "batch norm": (batch_norm(True), EVEN, *CHANNELS),
    "batch norm uneven": (batch_norm(True), UNEVEN, *CHANNELS7),
    "batch norm evaluated": (batch_norm(False), UNEVEN, *CHANNELS7),
    "batch norm of rows": (batch_norm(True), t(5, 7), *CHANNELS7),
    "batch norm, input without gradient": (lambda x, *w: batch_norm_alone(x.detach(), *w), EVEN, t(6), t(6)),
    "batch norm without statistics": (batch_norm_alone, UNEVEN, t(7)),
    "batch norm without anything": (batch_norm_alone, EVEN),
    "group norm": (group_norm(2), EVEN, t(6), t(6) + 1),
    "group norm uneven": (group_norm(7), UNEVEN, t(7), t(7) + 1),
    "group norm of one": (group_norm(1), UNEVEN, t(7)),
    "group norm without weights": (group_norm(3), EVEN),
    "group norm of rows": (group_norm(2), t(5, 6), t(6)),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), EVEN, t(6), t(6) + 1),
    "normalize": (lambda x: F.normalize(x, dim=1), UNEVEN),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), EVEN, t(4, 1, 1)),
    "local response norm": (lambda x: F.local_response_norm(x, 2), EVEN),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], meshes=((4,), (2, 3)), limit=3)


@pytest.mark.parametrize("name", ["layer norm", "batch norm", "group norm", "rms norm", "softmax -1"])
def test_in_bfloat16(name: str) -> None:
    fn, *args = CASES[name]
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = [arg.bfloat16() for arg in args]
    for dim in range(3):
        laid = [distribute(arg, mesh, [sw.Shard(dim) if arg.dim() == 3 else R]) for arg in plain]
        got, wanted = fn(*laid), fn(*plain)
        torch.testing.assert_close(whole(got), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (True, True, False)])
def test_gradients_that_are_not_wanted(dim: int, mask: tuple[bool, bool, bool]) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for fn, weights in (
        (layer_norm(1), (t(8), t(8) + 1)),
        (group_norm(2), CHANNELS[:2]),
        (batch_norm_alone, CHANNELS[:2]),
    ):
        results = []
        for place in (lambda x: x.clone(), lambda x: distribute(x, mesh, [sw.Shard(dim) if x.dim() == 3 else R])):
            sources = [place(x).requires_grad_(wanted) for x, wanted in zip((EVEN, *weights), mask, strict=True)]
            out = fn(*sources)
            ones = torch.ones_like(out)
            grads = torch.autograd.grad(out, [s for s in sources if s.requires_grad], ones * out.detach())
            results.append(whole(list(grads)))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("placements", [(S0, R), (S1, R), (S1, S0), (S2, S0), (R, S0), (P, R)])
def test_running_statistics_are_written_where_they_lie(placements: tuple[Any, Any]) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, mean, var = UNEVEN, t(7), t(7).abs()
    wanted = [mean.clone(), var.clone()]
    F.batch_norm(x, *wanted, training=True)
    got = [distribute(one, mesh, [placements[1]]) for one in (mean, var)]
    before = [one.spec for one in got]
    F.batch_norm(distribute(x, mesh, [placements[0]]), *got, training=True)
    assert [one.spec for one in got] == before
    torch.testing.assert_close(whole(got), wanted)


@pytest.mark.parametrize("placement", [S0, S1, P])
def test_variants_of_batch_norm(placement: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, weight = distribute(UNEVEN, mesh, [placement]), distribute(t(7), mesh, [R])
    plain = [t(7).clone(), t(7).abs()]
    wanted = aten.native_batch_norm.default(UNEVEN, t(7), t(7), *plain, True, 0.1, 1e-5)
    for op in (aten._native_batch_norm_legit.default, aten._batch_norm_with_update.default):
        stats = [distribute(one, mesh, [R]) for one in (t(7), t(7).abs())]
        training = (True,) if op is aten._native_batch_norm_legit.default else ()
        got = op(x, weight, weight, *stats, *training, 0.1, 1e-5)
        torch.testing.assert_close(whole(list(got[:3])), list(wanted))
        torch.testing.assert_close(whole(stats), plain)


# ---------------------------------------------------------------- communication

WEIGHTS8 = (t(8), t(8) + 1)

FREE: dict[str, tuple[Any, ...]] = {
    "softmax of rows": (lambda x: F.softmax(x, -1), (UNEVEN,), (S0,), S0),
    "log-softmax of columns": (lambda x: F.log_softmax(x, 0), (UNEVEN,), (S1,), S1),
    "layer norm": (layer_norm(1), (EVEN, *WEIGHTS8), (S0, R, R), S0),
    "layer norm of a sequence": (layer_norm(1), (UNEVEN, t(3), t(3)), (S1, R, R), S1),
    "rms norm": (rms_norm(1), (UNEVEN, t(3)), (S1, R), S1),
    "batch norm of channels": (batch_norm_alone, (t(4, 8, 3), *WEIGHTS8), (S1, S0, S0), S1),
    "group norm": (group_norm(2), (t(5, 6, 3), t(6), t(6)), (S0, R, R), S0),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


REDUCED: dict[str, tuple[Any, ...]] = {
    "softmax": (lambda x: F.softmax(x, -1), (UNEVEN,), (S2,), S2, 3),
    "log-softmax": (lambda x: F.log_softmax(x, 0), (UNEVEN,), (S0,), S0, 3),
    "layer norm": (layer_norm(1), (EVEN, *WEIGHTS8), (S2, S0, S0), S2, 4),
    "batch norm of samples": (batch_norm_alone, (UNEVEN, t(7), t(7)), (S0, R, R), S0, 4),
    "softmax of a sum": (lambda x: F.softmax(x, -1), (t(4, 5),), (P,), S0, 1),
}


@pytest.mark.parametrize("name", REDUCED)
def test_small_reductions_in_place_of_gathering(name: str) -> None:
    fn, args, placements, result, count = REDUCED[name]
    assert collectives(fn, args, placements) == ((result,), count)


def test_gradient_of_a_softmax_passes_a_sum() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    grad, output = t(4, 5), F.softmax(t(4, 5), -1)
    got = aten._softmax_backward_data.default(
        distribute(grad, mesh, [P]), distribute(output, mesh, [R]), -1, torch.float64
    )
    assert got.placements == (P,)
    torch.testing.assert_close(whole(got), aten._softmax_backward_data.default(grad, output, -1, torch.float64))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_gradients_beside_weights_without_any() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x, weight = (sw.distribute_tensor(value, mesh, [S0]) for value in (EVEN, t(8)))
    wanted = torch.func.jvp(lambda x: F.layer_norm(x, (8,), t(8), t(8)), (EVEN,), (EVEN.cos(),))
    got = torch.func.jvp(lambda x: F.layer_norm(x, (8,), weight, weight), (x,), (x.cos(),))
    torch.testing.assert_close([whole(value) for value in got], list(wanted))


@pytest.mark.parametrize("by_channels", [False, True])
def test_group_norm_of_locals_in_any_order_of_memory(by_channels: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x, grad = t(4, 6, 5, 3), t(4, 6, 5, 3).cos()
    if by_channels:
        x = x.contiguous(memory_format=torch.channels_last)

    def held(whole: torch.Tensor, order: tuple[int, ...]) -> sw.DTensor:
        local = torch.empty_permuted(whole.shape, order, dtype=whole.dtype).copy_(whole)
        return sw.DTensor.from_local(local, mesh, [R], shape=x.shape, stride=x.stride())

    source = x.clone().requires_grad_()
    result = F.group_norm(source, 2)
    result.backward(grad)
    rows, by_channel, reversed_ = (0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)
    for order, order_of_grad in (reversed_, rows), (rows, reversed_), (by_channel, rows):
        inner = held(x, order).requires_grad_()
        got = F.group_norm(inner, 2)
        torch.testing.assert_close(whole(got), result.detach())
        got.backward(held(grad, order_of_grad))
        torch.testing.assert_close(whole(inner.grad), source.grad)


@pytest.mark.parametrize("stride", [(1, 1, 12, 4), (12, 1, 12, 4), (4, 1, 12, 4), (36, 9, 3, 1), (3, 9, 3, 1)])
def test_group_norm_with_one_sample_on_each_rank(stride: tuple[int, ...]) -> None:
    """The stride of a dim of one index says nothing, and kernels read it to find the order of memory."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x = t(4, 4, 3, 3)
    locals_ = [torch.empty_strided((1, 4, 3, 3), stride, dtype=x.dtype).copy_(one) for one in x.split(1)]
    inner = sw.DTensor.from_local(sw.RankTensor(locals_), mesh, [S0]).requires_grad_()
    source = x.clone().requires_grad_()
    wanted, got = F.group_norm(source, 2), F.group_norm(inner, 2)
    torch.testing.assert_close(whole(got), wanted.detach())
    wanted.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(whole(inner.grad), source.grad)
