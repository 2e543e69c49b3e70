"""Operators over a tensor whose second dim has an uncommon layout, against one device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw

__all__ = ["OPERATORS", "assert_as_on_one_device"]

OPERATORS: dict[str, Any] = {
    "pointwise": lambda x: (x * 2 + 1).sigmoid(),
    "broadcast": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "positions": lambda x: x * torch.cos(torch.arange(x.shape[1])[None, :, None] / 7),
    "sum": lambda x: x.sum(1),
    "norm of all": lambda x: x.norm(),
    "mean and variance": lambda x: x.var((1, 2)) + x.mean((1, 2)),
    "maximum": lambda x: x.max(1).values + x.amax((0, 1)),
    "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "log_softmax of the last dim": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1).values,
    "slice": lambda x: x[:, 1:-1],
    "differences": lambda x: x[:, 2:] - 2 * x[:, 1:-1] + x[:, :-2],
    "step": lambda x: x[:, ::2],
    "select": lambda x: x[:, 3],
    "last": lambda x: x[:, -1],
    "index": lambda x: x[:, torch.tensor([5, 0, 3])],
    "gather": lambda x: x.gather(1, torch.tensor([4, 2]).view(1, 2, 1).expand(x.shape[0], 2, x.shape[2])),
    "scatter": lambda x: x.scatter(1, torch.tensor([4]).view(1, 1, 1).expand(x.shape[0], 1, x.shape[2]), 0.5),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(2, 1),
    "diff": lambda x: x.diff(dim=1),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1)),
    "cat": lambda x: torch.cat([x, x[:, :2]], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 1, 3, dtype=x.dtype), groups=4),
    "pooling": lambda x: F.avg_pool1d(x.transpose(1, 2), 2),
    "interpolate": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear"),
    "tril": lambda x: x.transpose(1, 2).tril(1),
    "flatten": lambda x: x.flatten(0, 1) * 2,
    "flatten and back": lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2]) * 2,
    "flatten all": lambda x: x.flatten() * 2,
    "heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2) * 2,
    "matrix product": lambda x: x @ x.transpose(1, 2),
    "contraction": lambda x: x.transpose(1, 2) @ x,
    "einsum": lambda x: torch.einsum("bsd,bte->bst", x, x),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2), 2),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % x.shape[2]),
    "cross entropy of classes": lambda x: F.cross_entropy(x, torch.arange(x.shape[2]).expand(x.shape[0], -1)),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(3, 1).values,
    "median": lambda x: x.median(1).values,
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "where": lambda x: torch.where(torch.ones(x.shape[1], 1).cumsum(0) > 3, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(torch.arange(x.shape[1])[:, None] < 3, 0.0),
    "boolean mask": lambda x: x[x > 0],
    "written": lambda x: x.clone().index_fill_(1, torch.tensor([1, 4]), 0.0),
    "slice written": lambda x: torch.slice_scatter(x, torch.ones_like(x[:, 2:4]), 1, 2, 4),
    "split": lambda x: x.split([2, x.shape[1] - 2], 1)[1],
    "chunk": lambda x: x.chunk(3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "kronecker": lambda x: torch.kron(x[0], x[1]),
    "distances": lambda x: torch.cdist(x, x.flip(1)).square(),
    "bucketed": lambda x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])),
}  # fmt: skip

Layout = tuple[tuple[int, ...], tuple[sw.Placement, ...], int]  # a mesh, placements, the length of the second dim


def assert_as_on_one_device(name: str, layout: Layout) -> None:
    """Values and gradients of an operator of this name."""
    (shape, placements, length), fn = layout, OPERATORS[name]
    generator = torch.Generator().manual_seed(length)
    plain = torch.randn(2, length, 4, dtype=torch.float64, generator=generator).requires_grad_()
    laid: Any = sw.distribute_tensor(plain.detach(), sw.init_device_mesh("cpu", shape), placements)
    assert torch.equal(laid.full_tensor(), plain)
    wanted, got = fn(plain), fn(laid.requires_grad_())
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.full_tensor(), wanted, msg=lambda m: f"{placements}: {m}")
    if wanted.requires_grad:
        weights = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
        (plain_grad,), (grad,) = (
            torch.autograd.grad((result * weights).sum(), x) for result, x in ((wanted, plain), (got, laid))
        )
        torch.testing.assert_close(grad.full_tensor(), plain_grad, msg=lambda m: f"{placements}: {m}")
