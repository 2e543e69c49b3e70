"""Convolution, pooling, interpolation and sampling against one device, and where they need no communication."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from tests.virtual.free import S0, S1, P, R, collectives, tensor
from tests.virtual.parity import assert_parity

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning"),
    pytest.mark.usefixtures("always_with_halos"),  # images are small
]

t = tensor
resize: Callable[..., Any] = F.interpolate
X, X1, X3 = t(3, 5, 6, 8), t(3, 5, 8), t(2, 5, 4, 4, 6)
EVEN = t(4, 4, 6, 7)


def grouped(groups: int, transposed: bool = False) -> Callable[..., Any]:
    conv = F.conv_transpose2d if transposed else F.conv2d
    return lambda x, w, b=None: conv(x, w, b, groups=groups)


CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "1d": (F.conv1d, t(4, 4, 9), t(6, 4, 3), t(6)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), EVEN, t(6, 4, 3, 3), t(6)),
    "2d dilated": (lambda x, w, b: F.conv2d(x, w, b, dilation=2), EVEN, t(6, 4, 2, 2), t(6)),
    "2d uneven, no bias": (F.conv2d, t(3, 5, 6, 7), t(7, 5, 3, 3)),
    "2d same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), EVEN, t(6, 4, 3, 3), t(6)),
    "2d without batch": (F.conv2d, EVEN[0], t(6, 4, 3, 3), t(6)),
    "2d input without gradient": (lambda x, w, b: F.conv2d(x.detach(), w, b), EVEN, t(6, 4, 3, 3), t(6)),
    "3d": (F.conv3d, t(2, 4, 4, 5, 4), t(6, 4, 2, 2, 2), t(6)),
    "transposed 1d": (F.conv_transpose1d, t(4, 4, 5), t(4, 6, 3), t(6)),
    "transposed 2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1), EVEN, t(4, 6, 3, 3), t(6),
    ),
    "transposed 3d": (F.conv_transpose3d, t(2, 4, 3, 3, 3), t(4, 6, 2, 2, 2), t(6)),
    "a channel a group": (grouped(4), EVEN, t(8, 1, 3, 3), t(8)),
    "an output a group": (grouped(2), EVEN, t(2, 2, 3, 3), t(2)),
    "groups": (grouped(2), EVEN, t(4, 2, 3, 3), t(4)),
    "transposed, a channel a group": (grouped(4, transposed=True), EVEN, t(4, 2, 3, 3), t(8)),
    "transposed, an output a group": (grouped(2, transposed=True), EVEN, t(4, 1, 3, 3)),
}  # fmt: skip

WINDOWS: dict[str, tuple[Any, ...]] = {
    "avg 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), X1),
    "avg 2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), X),
    "avg 2d of integers": (lambda x: F.avg_pool2d(x.mul(9).long(), 2), X),
    "avg 2d without batch": (lambda x: F.avg_pool2d(x, 2), X[0]),
    "avg 3d": (lambda x: F.avg_pool3d(x, 2), X3),
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1), X1),
    "max 2d with indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), X),
    "max 3d": (lambda x: F.max_pool3d(x, 2), X3),
    "unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), X),
    "adaptive avg 1d": (lambda x: F.adaptive_avg_pool1d(x, 3), X1),
    "adaptive avg 2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), X),
    "adaptive avg 2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), X),
    "adaptive avg 3d": (lambda x: F.adaptive_avg_pool3d(x, 2), X3),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 3), X1),
    "adaptive max 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), X),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2), X3),
    "lp 1d": (lambda x: F.lp_pool1d(x.abs(), 3, 2), X1),
    "lp 2d": (lambda x: F.lp_pool2d(x.abs(), 3, 2), X),
    "nearest 1d": (lambda x: resize(x, scale_factor=2), X1),
    "nearest 2d": (lambda x: resize(x, scale_factor=2), X),
    "nearest 3d": (lambda x: resize(x, scale_factor=2), X3),
    "nearest exact": (lambda x: resize(x, scale_factor=1.5, mode="nearest-exact"), X),
    "linear": (lambda x: resize(x, size=11, mode="linear"), X1),
    "bilinear": (lambda x: resize(x, size=(9, 5), mode="bilinear", align_corners=True), X),
    "bilinear of integers": (lambda x: resize(x.mul(40).byte(), size=(9, 5), mode="bilinear"), X.abs()),
    "bicubic": (lambda x: resize(x, scale_factor=1.5, mode="bicubic"), X),
    "trilinear": (lambda x: resize(x, scale_factor=2, mode="trilinear"), X3),
    "bilinear, smoothed": (lambda x: resize(x, size=(3, 5), mode="bilinear", antialias=True), X),
    "area": (lambda x: resize(x, size=(3, 5), mode="area"), X),
    "grid 2d": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), X, t(3, 4, 5, 2)),
    "grid 3d": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), X3, t(2, 4, 5, 3, 3)),
    "grid without gradient": (lambda x, g: F.grid_sample(x, g.detach(), align_corners=False), X, t(3, 4, 5, 2)),
    "affine grid": (lambda x: F.affine_grid(x, [3, 1, 4, 5], align_corners=False), t(3, 2, 3)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), X),
    "unfold without batch": (lambda x: F.unfold(x, 3, padding=1), X[0]),
    "fold": (lambda x: F.fold(x, (4, 5), 2), t(3, 8, 12)),
    "reflected": (lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"), X),
    "replicated": (lambda x: F.pad(x, (1, 2), mode="replicate"), X1),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), t(4, 8, 3, 4)),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), t(3, 4, 3, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_is_the_same_as_on_one_device(name: str) -> None:
    assert_parity(*CONVOLUTIONS[name], limit=6)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_the_same_as_on_one_device(name: str) -> None:
    assert_parity(*WINDOWS[name], limit=4)


WEIGHTS = EVEN, t(8, 4, 3, 3), t(8)
DEPTHWISE = EVEN, t(8, 1, 3, 3), t(8)

FREE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Any, ...], Any]] = {
    "batch": (F.conv2d, WEIGHTS, (S0, R, R), S0),
    "empty batches": (F.conv2d, (EVEN[:3], *WEIGHTS[1:]), (S0, R, R), S0),
    "output channels": (F.conv2d, WEIGHTS, (R, S0, S0), S1),
    "input channels": (F.conv2d, WEIGHTS, (S1, S1, R), P),
    "sum, bias whole": (F.conv2d, WEIGHTS, (P, R, R), P),
    "a channel a group": (grouped(4), DEPTHWISE, (S1, S0, S0), S1),
    "no bias": (F.conv2d, WEIGHTS[:2], (S0, R), S0),
    "transposed": (F.conv_transpose2d, (EVEN, t(4, 8, 3, 3), t(8)), (R, S1, S0), S1),
    "avg": (lambda x: F.avg_pool2d(x, 2), (X,), (S0,), S0),
    "avg of a sum": (lambda x: F.avg_pool2d(x, 2), (X,), (P,), P),
    "max": (lambda x: F.max_pool2d(x, 2), (EVEN,), (S1,), S1),
    "bilinear": (lambda x: resize(x, scale_factor=2, mode="bilinear"), (EVEN,), (S1,), S1),
    "grid": (lambda x, g: F.grid_sample(x, g, align_corners=False), (X, t(3, 4, 5, 2)), (R, S1), sw.Shard(2)),
    "unfold": (lambda x: F.unfold(x, 3), (X,), (S0,), S0),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


def test_groups_that_do_not_divide_are_gathered() -> None:
    """Two groups on four ranks: four channels divide evenly, the groups do not."""
    assert_parity(grouped(2), EVEN, t(4, 2, 3, 3), meshes=((4,),), limit=12)


@pytest.mark.parametrize("operand", ["input", "weight", "neither"])
@pytest.mark.parametrize("placement", [R, S0, S1])
def test_results_have_the_memory_format_of_one_device(operand: str, placement: sw.Placement) -> None:
    """Dropout draws in the order of memory, so it shows."""
    x, weight = torch.randn(5, 8, 6, 6), torch.randn(4, 8, 3, 3)
    if operand == "input":
        x = x.to(memory_format=torch.channels_last)
    if operand == "weight":
        weight = weight.to(memory_format=torch.channels_last)
    mesh = sw.init_device_mesh("cpu", (4,))
    own = F.conv2d(x, weight)
    result = F.conv2d(sw.distribute_tensor(x, mesh, [placement]), sw.distribute_tensor(weight, mesh, [R]))
    assert result.stride() == own.stride()
    torch.manual_seed(3)
    dropped = F.dropout(own)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(result).full_tensor() == 0, dropped == 0)


@pytest.mark.parametrize(("image", "grid"), [(True, False), (False, True), (True, True)])
def test_gradients_of_a_sampled_grid_stay_sharded(image: bool, grid: bool) -> None:
    """Kernels give the gradient of the grid also where only that of the image is asked for."""
    line = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    plain = [torch.randn(8, 2, 5, 5).requires_grad_(image), (torch.rand(8, 4, 4, 2) * 2 - 1).requires_grad_(grid)]
    torch.nn.functional.grid_sample(*plain, align_corners=False).square().sum().backward()
    given: list[Any] = [sw.distribute_tensor(x.detach(), line, [sw.Shard(0)]) for x in plain]
    for ours, theirs in zip(given, plain, strict=True):
        ours.requires_grad_(theirs.requires_grad)
    torch.nn.functional.grid_sample(*given, align_corners=False).square().sum().backward()
    for ours, theirs in zip(given, plain, strict=True):
        if theirs.grad is not None:
            assert ours.grad.placements == (sw.Shard(0),)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
