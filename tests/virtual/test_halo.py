"""Windows over sharded dims: ranks receive halos, results stay sharded, gradients of halos go back and are added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from tests.torch_version import TORCH
from tests.virtual.partials import mesh_of

FLOAT = torch.float64
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def conv(**options: Any) -> Callable[..., Any]:
    return lambda x, w, b=None: (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, w, b, **options)


def transposed(**options: Any) -> Callable[..., Any]:
    fns = F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
    return lambda x, w, b=None: fns[x.dim() - 3](x, w, b, **options)


def image(*size: int) -> tuple[int, ...]:
    return (2, 4, *size)


WEIGHT, BIAS = (6, 4, 3, 3), (6,)
CONVOLUTIONS: dict[str, Case] = {
    "same": (conv(padding=1), (image(16, 6), WEIGHT, BIAS)),
    "valid, uneven": (conv(), (image(13, 7), WEIGHT)),
    "stride": (conv(stride=2, padding=1), (image(15, 8), WEIGHT, BIAS)),
    "stride longer than the kernel": (conv(stride=4), (image(17, 9), WEIGHT)),
    "dilation": (conv(padding="same", dilation=2), (image(11, 6), WEIGHT, BIAS)),
    "groups": (conv(padding=1, groups=2), (image(9, 6), (6, 2, 3, 3))),
    "a kernel longer than shards": (conv(padding=(3, 0)), (image(5, 6), (6, 4, 7, 3), BIAS)),
    "empty shards": (conv(padding=1), (image(3, 5), WEIGHT, BIAS)),
    "points": (conv(), (image(9, 5), (6, 4, 1, 1), BIAS)),
    "1d": (conv(padding=2), (image(14), (6, 4, 5), BIAS)),
    "3d": (conv(padding=1), (image(7, 5, 4), (3, 4, 3, 3, 3))),
    "causal and depthwise": (lambda x, w: F.conv1d(F.pad(x, (3, 0)), w, groups=4), (image(18), (4, 1, 4))),
}  # fmt: skip
TRANSPOSED: dict[str, Case] = {
    "plain": (transposed(), (image(9, 4), (4, 6, 3, 3), BIAS)),
    "stride and output padding": (
        transposed(stride=2, padding=1, output_padding=1), (image(9, 4), (4, 6, 3, 3), BIAS),
    ),
    "much output padding": (transposed(stride=4, output_padding=3), (image(7, 4), (4, 6, 2, 3), BIAS)),
    "without bias, dilation": (transposed(padding=2, dilation=2), (image(8, 4), (4, 6, 3, 3))),
    "groups": (transposed(stride=2, groups=2), (image(8, 4), (4, 3, 2, 2), BIAS)),
    "empty shards": (transposed(stride=2), (image(2, 4), (4, 6, 3, 3), BIAS)),
    "1d": (transposed(stride=3, padding=1), (image(8), (4, 6, 5), BIAS)),
    "3d": (transposed(stride=2), (image(5, 3, 4), (4, 3, 2, 2, 2))),
}  # fmt: skip
POOLS: dict[str, Case] = {
    "avg": (lambda x: F.avg_pool2d(x, 3, 2, 1), (image(15, 8),)),
    "avg, padding not counted": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), (image(13, 8),)),
    "avg, ceil": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (image(16, 8),)),
    "avg, divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (image(13, 8),)),
    "avg, whole kernels": (lambda x: F.avg_pool2d(x, 2), (image(16, 8),)),
    "avg 1d": (lambda x: F.avg_pool1d(x, 5, 1, 2), (image(17),)),
    "avg 3d": (lambda x: F.avg_pool3d(x, 3, 2, 1), (image(9, 5, 6),)),
    "avg, empty shards": (lambda x: F.avg_pool2d(x, 3, 2, 1), (image(3, 4),)),
    "max": (lambda x: F.max_pool2d(x, 3, 2, 1), (image(15, 8),)),
    "max, dilation, ceil": (lambda x: F.max_pool2d(x, 2, 3, 1, dilation=2, ceil_mode=True), (image(14, 8),)),
    "max 1d": (lambda x: F.max_pool1d(x, 4, 1, 2), (image(13),)),
    "max 3d": (lambda x: F.max_pool3d(x, 2), (image(9, 5, 6),)),
    "max, empty shards": (lambda x: F.max_pool2d(x, 3, 1, 1), (image(2, 4),)),
    "lp": (lambda x: F.lp_pool2d(x.abs() + 1, 3, 3, 2), (image(13, 6),)),
    "adaptive avg": (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), (image(13, 8),)),
    "adaptive avg, even": (lambda x: F.adaptive_avg_pool2d(x, (8, 4)), (image(16, 8),)),
    "adaptive avg, more": (lambda x: F.adaptive_avg_pool2d(x, (17, 9)), (image(9, 5),)),
    "adaptive avg 1d": (lambda x: F.adaptive_avg_pool1d(x, 7), (image(16),)),
    "adaptive avg 3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 2, 4)), (image(8, 5, 6),)),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, (5, 3)), (image(13, 8),)),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, (3, 2, 4)), (image(8, 5, 6),)),
    "area": (lambda x: F.interpolate(x, size=(5, 3), mode="area"), (image(13, 8),)),
}


def resized(**options: Any) -> Callable[..., Any]:
    return lambda x: F.interpolate(x, **options)


PADS: dict[str, Case] = {
    "reflect": (lambda x: F.pad(x, (1, 2, 3, 2), mode="reflect"), (image(13, 6),)),
    "reflect 1d": (lambda x: F.pad(x, (4, 0), mode="reflect"), (image(9),)),
    "reflect 3d": (lambda x: F.pad(x, (1, 1, 2, 1, 1, 2), mode="reflect"), (image(7, 5, 4),)),
    "reflect most rows": (lambda x: F.pad(x, (0, 1, 4, 4), mode="reflect"), (image(5, 4),)),
    "replicate": (lambda x: F.pad(x, (1, 2, 3, 2), mode="replicate"), (image(13, 6),)),
    "replicate 1d": (lambda x: F.pad(x, (0, 5), mode="replicate"), (image(3),)),
    "replicate 3d": (lambda x: F.pad(x, (1, 1, 2, 1, 1, 2), mode="replicate"), (image(7, 5, 4),)),
    "circular": (lambda x: F.pad(x, (1, 2, 3, 2), mode="circular"), (image(13, 6),)),
    "constant": (lambda x: F.pad(x, (1, 2, 3, -2), value=0.5), (image(13, 6),)),
    "repeated": (lambda x: x.repeat(3, 1, 1, 2, 1), (image(13, 6),)),
    "tiled": (lambda x: x.tile(3, 2), (image(5, 6),)),
    "slope": (lambda x: torch.gradient(x, dim=2)[0], (image(13, 6),)),
}
UNFOLDED: dict[str, Case] = {
    "unfold": (lambda x: x.unfold(2, 3, 1), (image(13, 6),)),
    "unfold by steps": (lambda x: x.unfold(2, 4, 3), (image(15, 6),)),
    "unfold apart": (lambda x: x.unfold(2, 2, 2), (image(16, 6),)),
    "unfold few": (lambda x: x.unfold(2, 5, 1), (image(6, 6),)),
    "both dims": (lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2), (image(9, 6),)),
    "median filter": (lambda x: x.unfold(2, 3, 1).median(-1).values, (image(12, 5),)),
    "columns": (lambda x: F.unfold(x, 3, padding=1), (image(8, 6),)),
    "columns by steps": (lambda x: F.unfold(x, (3, 2), dilation=(2, 1), stride=2), (image(13, 6),)),
    "columns put back": (lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 6), 3, padding=1), (image(8, 6),)),
}
RESIZED: dict[str, Case] = {
    "nearest": (resized(scale_factor=2), (image(9, 4),)),
    "nearest by 1.7": (resized(scale_factor=1.7), (image(11, 4),)),
    "nearest, fewer": (resized(size=(5, 3)), (image(13, 4),)),
    "nearest, far fewer": (resized(scale_factor=(0.2, 1)), (image(40, 4),)),
    "nearest exact": (resized(size=(17, 3), mode="nearest-exact"), (image(7, 4),)),
    "nearest 3d": (resized(scale_factor=2), (image(5, 3, 4),)),
    "linear": (resized(size=23, mode="linear"), (image(9),)),
    "linear, corners": (resized(size=7, mode="linear", align_corners=True), (image(17),)),
    "bilinear": (resized(scale_factor=2, mode="bilinear"), (image(9, 4),)),
    "bilinear by 1.3": (resized(scale_factor=1.3, mode="bilinear"), (image(14, 5),)),
    "bilinear, corners": (resized(size=(17, 6), mode="bilinear", align_corners=True), (image(6, 4),)),
    "bilinear, fewer": (resized(size=(3, 9), mode="bilinear"), (image(13, 4),)),
    "bicubic": (resized(scale_factor=2, mode="bicubic"), (image(9, 4),)),
    "bicubic, fewer": (resized(size=(5, 3), mode="bicubic", align_corners=True), (image(13, 4),)),
    "trilinear": (resized(size=(9, 5, 3), mode="trilinear"), (image(6, 3, 4),)),
    "smoothed": (resized(size=(5, 3), mode="bilinear", antialias=True), (image(14, 8),)),
    "smoothed, more": (resized(scale_factor=1.5, mode="bilinear", antialias=True), (image(10, 4),)),
    "smoothed bicubic": (resized(size=(5, 3), mode="bicubic", antialias=True), (image(17, 8),)),
}
LAYOUTS = (
    ((4,), [Shard(2)]), ((3,), [Shard(2)]), ((2, 2), [Shard(2), Shard(-1)]), ((2, 2), [Shard(0), Shard(2)]),
    ((2, 2), [Shard(1), Shard(2)]), ((2, 2), [Partial(), Shard(2)]),
)  # fmt: skip


def laid(shape: tuple[int, ...], tensor: torch.Tensor, placements: Any, first: bool) -> Any:
    mesh = mesh_of(*shape)
    return sw.distribute_tensor(tensor, mesh, placements if first else [Replicate()] * len(shape)).requires_grad_()


def close(got: Any, wanted: torch.Tensor) -> bool:
    """Relative to the largest element: windows are added up in another order."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[wanted.dtype]
    scale = wanted.abs().max().clamp(min=1e-30) if wanted.numel() else 1.0
    return got.shape == wanted.shape and bool(((got.full_tensor() - wanted).abs() <= tolerance * scale).all())


def compare(name: str, case: Case, shape: tuple[int, ...], placements: Any, dtype: torch.dtype = FLOAT) -> Any:
    """Values and gradients as on one device; the result."""
    torch.manual_seed(0)
    fn, shapes = case
    plain = [torch.randn(size, dtype=dtype).requires_grad_() for size in shapes]
    given = [laid(shape, t.detach().clone(), placements, i == 0) for i, t in enumerate(plain)]
    wanted, got = fn(*plain), fn(*given)
    assert close(got, wanted), f"{name} on {shape} {placements}"
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    (got * laid(shape, weight, placements, first=False).detach()).sum().backward()
    for i, (a, b) in enumerate(zip(given, plain, strict=True)):
        assert close(a.grad, b.grad), f"gradient {i} of {name} on {shape} {placements}"
    return got


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    for shape, placements in LAYOUTS:
        got = compare(name, CONVOLUTIONS[name], shape, placements)
        assert Shard(2) in got.placements
    compare(name, CONVOLUTIONS[name], (4,), [Shard(2)], torch.float32)


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str) -> None:
    for shape, placements in LAYOUTS[:4]:
        got = compare(name, TRANSPOSED[name], shape, placements)
        assert Shard(2) in got.placements


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str) -> None:
    for shape, placements in LAYOUTS[:4]:
        got = compare(name, POOLS[name], shape, placements)
        assert Shard(2) in got.placements


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_scales_that_give_one_size(mode: str) -> None:
    for scale in (2.2, 2.15, 2.24):
        case = resized(scale_factor=scale, mode=mode), (image(8, 8),)
        assert compare(f"{mode} by {scale}", case, (4,), [Shard(2)]).shape[-1] == 17


IGNORED: dict[str, Case] = {
    "nearest 1d": (resized(scale_factor=2.1), (image(3),)),
    "nearest": (resized(scale_factor=2.1), (image(3, 4),)),
    "nearest 3d": (resized(scale_factor=1.3), (image(3, 2, 2),)),
    "nearest exact": (resized(scale_factor=1.3, mode="nearest-exact"), (image(3, 4),)),
    "bicubic": (resized(scale_factor=1.3, mode="bicubic"), (image(3, 7),)),
    "smoothed": (resized(scale_factor=1.3, mode="bilinear", antialias=True), (image(3, 7),)),
    "smoothed bicubic": (resized(scale_factor=1.3, mode="bicubic", antialias=True), (image(3, 7),)),
}


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", IGNORED)
def test_scales_that_some_kernels_ignore(name: str) -> None:
    for dim in (1, 2):
        compare(name, IGNORED[name], (4,), [Shard(dim)])


def test_a_scale_that_is_ignored_with_many_channels_is_refused() -> None:
    x = sw.distribute_tensor(torch.randn(image(3, 2, 2)), mesh_of(4), [Shard(1)])
    last = x.contiguous(memory_format=torch.channels_last_3d)
    with pytest.raises(sw.UnsupportedError, match="does not fit the sizes"):
        F.interpolate(last, scale_factor=2.1)
    assert F.interpolate(last, scale_factor=2).shape[-1] == 4


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", [*PADS, *UNFOLDED, *RESIZED])
def test_pads_windows_and_resizing(name: str) -> None:
    case = {**PADS, **UNFOLDED, **RESIZED}[name]
    for shape, placements in LAYOUTS[:4]:
        got = compare(name, case, shape, placements)
        # columns follow each other in one dim, which is sharded where each rank has as many; others join parts, and
        # small ones are gathered
        elsewhere = name.startswith(("columns", "circular", "repeated", "slope"))
        elsewhere |= name == "tiled" and TORCH < (2, 13)  # where repeat is not replaced
        assert elsewhere or Shard(2) in got.placements
    if name in RESIZED:
        compare(name, case, (4,), [Shard(2)], torch.float32)


@pytest.mark.usefixtures("always_with_halos")
def test_places_of_maxima() -> None:
    """Those of one device, also among equal elements, NaN, and where nothing is larger than what is outside."""
    x = torch.randn(2, 3, 11, 8).mul(2).round()
    x[0, 0], x[0, 1, 3:6], x[1, 0, 2] = -torch.inf, -torch.inf, torch.nan
    pools: list[Callable[[Any], Any]] = [
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        lambda x: F.max_pool2d(x, 4, 1, 2, dilation=2, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
    ]
    for shape, placements in LAYOUTS[:4]:
        for pool in pools:
            (value, place), (wanted, where) = pool(sw.distribute_tensor(x, mesh_of(*shape), placements)), pool(x)
            torch.testing.assert_close(value.full_tensor(), wanted, equal_nan=True, rtol=0, atol=0)
            assert torch.equal(place.full_tensor(), where)


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize("name", ["same", "stride", "groups", "empty shards"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_second_derivatives(name: str) -> None:
    fn, (first, *others) = CONVOLUTIONS[name]
    torch.manual_seed(0)
    given = [torch.randn(size, dtype=FLOAT).requires_grad_() for size in ((1, 4, min(first[2], 5), 3), *others)]

    def on_ranks(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        whole = [sw.DTensor.from_local(t, mesh_of(4)) for t in (x, *rest)]
        return fn(whole[0].redistribute(placements=[Shard(2)]), *whole[1:]).sin().sum((0, 2)).full_tensor()

    assert gradcheck(on_ranks, given, fast_mode=True)
    assert gradgradcheck(on_ranks, given, fast_mode=True)


def network(x: Any, w: Any, v: Any) -> Any:
    """Convolution, pooling, reflection, resizing, windows."""
    y = F.max_pool2d(F.conv2d(x, w, padding=1).tanh(), 3, 2, 1)
    y = F.interpolate(F.pad(y, (1, 1, 1, 1), mode="reflect"), scale_factor=2, mode="bilinear")
    y = F.avg_pool2d(F.conv_transpose2d(y, v, stride=2, padding=1), 3, 1, 1, count_include_pad=False)
    return (y.unfold(2, 3, 1).sum(-1) + F.adaptive_avg_pool2d(y, (y.shape[2] - 2, 1))).square().mean()


NETWORK = (2, 2, 16, 6), (3, 2, 3, 3), (3, 2, 4, 4)


@pytest.mark.usefixtures("always_with_halos")
def test_compiled() -> None:
    shape, placements = (2,), [Shard(2)]
    plain = [torch.randn(size, dtype=FLOAT).requires_grad_() for size in NETWORK]
    wanted = network(*plain)
    wanted.backward()
    given = [laid(shape, t.detach().clone(), placements, i == 0) for i, t in enumerate(plain)]
    got = torch.compile(network, backend="aot_eager", fullgraph=True)(*given)
    got.backward()
    assert close(got, wanted)
    for a, b in zip(given, plain, strict=True):
        assert close(a.grad, b.grad)


@pytest.mark.usefixtures("always_with_halos")
@pytest.mark.parametrize(
    "name", ["avg, padding not counted", "max", "adaptive avg", "adaptive max", "bilinear", "same"]
)
def test_channels_last_stay_last(name: str) -> None:
    fn, (size, *others) = {**POOLS, **RESIZED, **CONVOLUTIONS}[name]
    plain = [torch.randn(size).to(memory_format=torch.channels_last), *map(torch.randn, others)]
    given = [laid((4,), t, [Shard(2)], i == 0).detach() for i, t in enumerate(plain)]
    wanted, got = fn(*plain), fn(*given)
    assert got.stride() == wanted.stride()
    assert close(got, wanted)
    for local in got._local_tensor.tensors:
        assert not local.numel() or local.is_contiguous(memory_format=torch.channels_last)


def received_rows(fn: Callable[[Any], Any], ranks: int, row: int, *size: int, dim: int = 2) -> float:
    """Rows that a rank receives, forward."""
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        result = fn(sw.zeros(*size, device_mesh=mesh, placements=[Shard(dim)]))
    assert result.placements == (Shard(dim),)
    return run.bytes / row


@pytest.mark.parametrize("ranks", [8, 512])
def test_rows_received(ranks: int) -> None:
    def stencil(x: Any) -> Any:
        return x[2:] - 2 * x[1:-1] + x[:-2]

    for options, rows in (({"padding": 1}, 2), ({}, 2), ({"stride": 2, "padding": 1}, 1), ({"dilation": 2}, 4)):
        fn = conv(**options)
        assert received_rows(lambda x, fn=fn: fn(x, kernel(x)), ranks, 4096, 2, 8, 16 * ranks, 64) == rows
    assert received_rows(stencil, ranks, 1024, 16 * ranks, 256, dim=0) <= 4


def kernel(x: Any) -> Any:
    return sw.zeros(8, 8, 3, 3, device_mesh=x.device_mesh, placements=[Replicate()])


def test_tiny_images_are_moved() -> None:
    """A row on each rank, of which a kernel of three rows needs two more: the batch is sharded instead."""
    x = sw.distribute_tensor(torch.randn(64, 8, 8, 64), mesh_of(8), [Shard(2)])
    weight = sw.distribute_tensor(torch.randn(8, 8, 3, 3), mesh_of(8), [Replicate()])
    assert F.conv2d(x, weight, padding=1).placements == (Shard(0),)
    tall = sw.distribute_tensor(torch.randn(8, 8, 256, 8), mesh_of(8), [Shard(2)])
    assert F.conv2d(tall, weight, padding=1).placements == (Shard(2),)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_padding_of_one_dim_with_another_that_has_empty_shards(mode: str, dim: int) -> None:
    """Nine rows on four ranks leave the last one empty; kernels refuse empty rows that are not padded."""
    mesh = sw.init_device_mesh("cpu", (4,))
    image = torch.rand(3, 2, 9, 9, dtype=torch.float64)
    for padding in ((1, 1, 0, 0), (0, 0, 1, 2)):
        results = []
        for x in (image.clone(), sw.distribute_tensor(image, mesh, [sw.Shard(dim)])):
            x.requires_grad_()
            y = F.pad(x, padding, mode=mode)
            (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            results.append((y, first, *torch.autograd.grad(first.square().sum(), x)))
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got.full_tensor(), wanted)
