"""How many collectives an operator and its gradients issue on given layouts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardwise as sw
from tests.virtual.parity import bytes_moved, distribute, whole

S0, S1, S2, S3, R, P = sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Shard(3), sw.Replicate(), sw.Partial()


def tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that are the same in each run."""
    generator = torch.Generator().manual_seed(sum((i + 1) * size for i, size in enumerate(shape)))
    return torch.randn(shape, dtype=dtype, generator=generator)


def collectives(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    placements: Sequence[Any],
    mesh_shape: tuple[int, ...] = (4,),
    backward: bool = True,
) -> tuple[tuple[Any, ...], int]:
    """Where the first result of `fn` lies, and the collectives of `fn` and its gradients. Values are checked too.

    Args:
        fn: the function, of tensors.
        args: plain tensors.
        placements: for each of them a placement, or one for each axis.
        mesh_shape: of the virtual mesh.
        backward: whether gradients are computed, for a gradient of the result that lies as the result does.
    """
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    laid = [list(p) if isinstance(p, list | tuple) else [p] for p in placements]
    tensors = [distribute(t, mesh, p) for t, p in zip(args, laid, strict=True)]
    sources = [t.requires_grad_() for t in tensors if t.is_floating_point()] if backward else []
    plain = [t.clone().requires_grad_(t.is_floating_point() and backward) for t in args]

    def run() -> tuple[Any, Any]:
        out = _first(fn(*tensors))
        if not backward:
            return out, ()
        return out, torch.autograd.grad(out, sources, _ones(out, mesh))

    (out, gradients), count, _ = bytes_moved(run)
    wanted = _first(fn(*plain))
    torch.testing.assert_close(whole(out), wanted.detach())
    if backward:
        expected = torch.autograd.grad(wanted, [t for t in plain if t.requires_grad], torch.ones_like(wanted))
        torch.testing.assert_close(tuple(whole(gradients)), expected)
    return out.placements, count


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _ones(out: Any, mesh: Any) -> Any:
    placed = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in out.placements]
    return sw.distribute_tensor(torch.ones(out.shape, dtype=out.dtype), mesh, placed)
