"""Gradients of sums of sharded tensors: values, second derivatives, and that no rank holds the global tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from tests.torch_version import TORCH

MESHES = ((4,), (2, 2))
ROWS = 22  # uneven over four ranks
PLACES = torch.tensor([1, 5])
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "tril": lambda x: x[..., 0].tril(1),
    "triu": lambda x: (x[..., 0] * 2).triu(-1),
    "rot90": lambda x: torch.rot90(x, 1, (0, 1)),
    "rot90 twice": lambda x: torch.rot90(x, 2, (0, 1)),
    "rot90 back": lambda x: torch.rot90(x, 3, (0, 2)),
    "glu": lambda x: F.glu(x, 0),
    "pad": lambda x: F.pad(x, (0, 0, 1, -1, 2, 3)),
    "crop": lambda x: F.pad(x * 2, (0, 0, -1, -1, -2, -3)),
    "cumsum": lambda x: (x * 2).cumsum(0),
    "chunk": lambda x: torch.cat([part * 2 for part in x.chunk(2)][::-1]),
    "split": lambda x: (x * 2).split(5)[1],
    "unbind": lambda x: (x * 2).unbind(0)[2],
    "unfold": lambda x: (x * 2).unfold(0, 4, 2),
    "trace": lambda x: (x[..., 0] * 2).trace(),
    "prod": lambda x: x.prod(0),
    "prod of all": lambda x: x[:3, :2].prod(),
    "renorm": lambda x: torch.renorm(x, 2, 1, 1.5),
    "renorm by the largest": lambda x: torch.renorm(x, float("inf"), 2, 0.5),
    "select_scatter": lambda x: torch.select_scatter(x * 2, x.select(0, 1), 0, -2),
    "slice_scatter": lambda x: torch.slice_scatter(x * 2, x[:4] * 3, 0, 3, 7),
    "slice_scatter by two": lambda x: torch.slice_scatter(x, x[:3], 0, 1, 7, 2),
    "index_fill": lambda x: (x * 2).index_fill(0, PLACES, 3.0),
    "index_fill of columns": lambda x: (x * 2).index_fill(1, PLACES, 3.0),
    "index_put": lambda x: (x * 2).index_put((PLACES,), x[:2]),
    "index_copy": lambda x: (x * 2).index_copy(1, PLACES, x[:, :2]),
    "scatter": lambda x: (x * 2).scatter(0, torch.tensor([[[1, 2], [3, 0]]]), 1.5),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([[[1]]]), 1),
    "irfft": lambda x: torch.fft.irfft(x, 10, 1),
    "hfft2": lambda x: torch.fft.hfft2(x, (3, 10)),
    "hfft": lambda x: torch.fft.hfft(x, 8, 2),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "interpolate": lambda x: F.interpolate((x * 2).permute(1, 2, 0), scale_factor=0.6, mode="linear"),
    "channel_shuffle": lambda x: F.channel_shuffle(x.transpose(0, 1).reshape(6, ROWS, 4), 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, ROWS, 6, 4)[:, :8], 2),
    "instance_norm": lambda x: F.instance_norm(x, weight=torch.arange(6.0, dtype=x.dtype)),
    "one_hot": lambda x: F.one_hot((x[..., 0] > 0).long(), 3) * x[..., :3].sum(),
    "view": lambda x: x.reshape(2, 11, 6, 4).select(0, 1),
    "view across": lambda x: x.reshape(6, ROWS, 4) ** 2,
}


def derivatives(program: Callable[[Any], Any], x: Any) -> list[Any]:
    """Of a sum, and of one that differs from element to element: the result, first and second derivatives."""
    made = program(x)
    (of_sum,) = torch.autograd.grad(made.sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(made.pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return [made.detach(), of_sum, first.detach(), second]


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_sums(name: str, shape: tuple[int, ...]) -> None:
    if name == "trace" and TORCH < (2, 13):
        pytest.skip("the gradient of torch's own trace has an element too many where rows are more than columns")
    value = torch.randn(ROWS, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh = sw.init_device_mesh("cpu", shape)
    placements = [sw.Shard(0), *[sw.Replicate()] * (mesh.ndim - 1)]
    got = derivatives(PROGRAMS[name], sw.distribute_tensor(value, mesh, placements).requires_grad_())
    expected = derivatives(PROGRAMS[name], value.clone().requires_grad_())
    torch.testing.assert_close([one.full_tensor() for one in got], expected)


@pytest.mark.parametrize("name", ["tril", "pad", "chunk", "unfold", "trace", "index_fill", "scatter", "irfft"])
def test_no_rank_holds_the_global_gradient(name: str) -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (64,))
        x = sw.zeros(64 * 64, 6, 4, device_mesh=mesh, placements=[sw.Shard(0)]).requires_grad_()
        PROGRAMS[name](x).sum().backward()
    assert x.grad.placements == (sw.Shard(0),)
    assert run.peak_bytes <= 16 * 64 * 6 * 4 * 4


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("size", [12, 10])
def test_distances_of_sharded_vectors(p: float, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, size, dtype=torch.float64, generator=generator) for n in (5, 30)]
    mesh = sw.init_device_mesh("cpu", (4,))
    sharded = [sw.distribute_tensor(v, mesh, [sw.Shard(1)]).requires_grad_() for v in values]
    whole = [v.clone().requires_grad_() for v in values]
    for mode in ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist"):
        results = [torch.cdist(*pair, p=p, compute_mode=mode) for pair in (sharded, whole)]
        gradients = [
            torch.autograd.grad(r.pow(2).sum(), pair) for r, pair in zip(results, (sharded, whole), strict=True)
        ]
        torch.testing.assert_close(results[0].full_tensor(), results[1])
        torch.testing.assert_close([g.full_tensor() for g in gradients[0]], list(gradients[1]))
    of_rows = [F.pdist(x, p) for x in (sharded[0], whole[0])]
    torch.testing.assert_close(of_rows[0].full_tensor(), of_rows[1])
    for distance in of_rows:
        distance.pow(2).sum().backward()
    torch.testing.assert_close(sharded[0].grad.full_tensor(), whole[0].grad)


def test_a_view_that_fits_no_shard_is_exchanged() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(40.0).view(20, 2), mesh, [sw.Shard(0)])
    y = x.view(5, 4, 2)
    assert y.placements == (sw.Shard(1),)
    assert torch.equal(y.full_tensor(), torch.arange(40.0).view(5, 4, 2))
    y[0].fill_(7)  # the view is a copy; the base follows
    assert torch.equal(x.full_tensor()[:4], torch.full((4, 2), 7.0))
    with sw.dry_run() as run:
        many = sw.init_device_mesh("cpu", (64,))
        sw.zeros(5 * 64, 2, device_mesh=many, placements=[sw.Shard(0)]).view(5, 64, 2)
    assert run.bytes <= 5 * 2 * 4
