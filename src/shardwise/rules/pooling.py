"""Pooling: batch and channels are factors; windows slide over the last dims, which may be sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.core.layout import Window
from shardwise.core.placement import Partial, Replicate
from shardwise.rules.engine import FIRST, Dim, Factors, Row
from shardwise.rules.reduction import lowest
from shardwise.rules.registry import Call, Halo, rule
from shardwise.rules.taps import averaging, bins, in_memory_of
from shardwise.rules.windows import SPACE, Places, at, kernel_window, window_of, with_rows, with_value

aten = torch.ops.aten
REPLICATE, SUM = Replicate(), Partial()


def leading(call: Call, space: int, linear: bool) -> Factors:
    """The dims before the last `space` ones, which all tensors of the call share; windows slide over the last.

    A gradient reads only the size of the forward's operand: that may be a Partial sum.
    """

    def dims(ndim: int) -> tuple[Dim, ...]:
        # counted from the window: channels, then batches, which kernels take empty
        return (*(f"c{i}" for i in reversed(range(ndim - space))), *SPACE[:space])

    exact = call.operands[0].dtype.is_floating_point or call.operands[0].dtype.is_complex  # integers are rounded
    return Factors(
        tuple(dims(len(meta.shape)) for meta in call.operands),
        tuple(dims(len(meta.shape)) for meta in call.results),
        linear=FIRST if linear and exact else (),
        nonempty=frozenset(["c0"]),
        exchanged=frozenset(SPACE[:space]),
        rows=_of_any_self(call) if call.get("grad_output") is not None and call.get("self") is not None else (),
    )


def _of_any_self(call: Call) -> tuple[Row, ...]:
    rest = (REPLICATE,) * (len(call.operands) - 2)
    return Row((REPLICATE, SUM, *rest), (REPLICATE,)), Row((SUM, SUM, *rest), (SUM,))


# ---------------------------------------------------------------- kernels


def pool_windows(call: Call, space: int) -> dict[str, Window]:
    """By factor, the rows that a row of the result reads."""
    kernel, dilation = call["kernel_size"], call.get("dilation", 1)
    stride, padding = call["stride"] or kernel, call["padding"]
    return {
        SPACE[i]: kernel_window(at(kernel, i), at(stride, i), at(padding, i), at(dilation, i)) for i in range(space)
    }


def correct_borders(call: Call, space: int, local: torch.Tensor, places: Places) -> torch.Tensor:
    """Rescale averages over full kernels, or their gradients: at borders a kernel covers fewer elements."""
    if call["divisor_override"] is not None:
        return local
    for dim, place in places.items():
        i = dim - (local.dim() - space)
        size, pad = call["self"].shape[len(call["self"].shape) - space + i], at(call["padding"], i)
        kernel, stride = at(call["kernel_size"], i), at(call["stride"] or call["kernel_size"], i)
        first = place.window + stride * np.arange(place.length)
        last = (first + kernel).clip(max=size + pad)
        covered = last - first if call["count_include_pad"] else last.clip(max=size) - first.clip(min=0)
        if (covered != kernel).any():
            factors = torch.tensor((kernel / covered).tolist(), dtype=local.dtype, device=local.device)
            local = local * factors.view([-1 if d == dim else 1 for d in range(local.dim())])
    return local


def average_halo(call: Call, space: int) -> Halo | None:
    """A rank averages its window, corrected at borders. Integers would be rounded before that."""
    if not call["self"].dtype.is_floating_point:
        return None

    def pool(
        local: torch.Tensor, kernel: Any, stride: Any, padding: Any, *options: Any, places: Places
    ) -> torch.Tensor:
        made = call.op(local, kernel, stride, with_value(padding, space, places, 0, local.dim()), *options)
        return correct_borders(call, space, made, places)

    return Halo(pool_windows(call, space), pool, reads=(0,))


def average_backward_halo(call: Call, space: int) -> Halo:
    """Gradients of windows, which are added up."""

    def pool(grad: torch.Tensor, local: torch.Tensor, *options: Any, places: Places) -> torch.Tensor:
        kernel, stride, padding, *rest = options
        pad = with_value(padding, space, places, 0, local.dim())
        grad = correct_borders(call, space, grad, places)
        return call.op(grad, window_of(local, places), kernel, stride, pad, *rest)

    return Halo(pool_windows(call, space), pool, adds=(0,), reference=0)


def renumbered(
    indices: torch.Tensor, sizes: Sequence[int], new_sizes: Sequence[int], offsets: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Flat positions in an image as flat positions in another, with another size and the origin shifted by `offsets`.

    A negative position along a dim is moved inside, in multiples of its step: to the kernel's first row in the image.
    """
    result = torch.zeros_like(indices)
    scale = 1
    for size, new_size, offset, step in zip(*(list(v)[::-1] for v in (sizes, new_sizes, offsets, steps)), strict=True):
        row = indices.remainder(size) + offset
        indices = indices.div(size, rounding_mode="floor")
        result += torch.where(row < 0, row.remainder(step), row) * scale
        scale *= new_size
    return result


def offsets_of(places: Places, ndim: int, space: int) -> list[int]:
    """The first row of the window along each of the last dims."""
    return [places[dim].window if dim in places else 0 for dim in range(ndim - space, ndim)]


def maximum_halo(call: Call, space: int) -> Halo:
    """A rank takes the maxima of its window; their positions are global."""
    image = call["self"].shape[-space:]
    steps = [at(call["dilation"], i) for i in range(space)]

    def pool(local: torch.Tensor, *options: Any, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        kernel, stride, padding, *rest = options
        pad = with_value(padding, space, places, 0, local.dim())
        made, indices = call.op(local, kernel, stride, pad, *rest)
        offsets = offsets_of(places, local.dim(), space)
        return made, renumbered(indices, local.shape[-space:], image, offsets, steps)

    return Halo(pool_windows(call, space), pool, reads=(0,), fill=lowest(call["self"].dtype))


def maximum_backward_halo(call: Call, space: int) -> Halo:
    """Gradients of windows, which are added up."""
    image = call["self"].shape[-space:]

    def pool(grad: torch.Tensor, local: torch.Tensor, *options: Any, places: Places) -> torch.Tensor:
        kernel, stride, padding, dilation, ceil_mode, indices = options
        pad, window = with_value(padding, space, places, 0, local.dim()), window_of(local, places)
        offsets = [-offset for offset in offsets_of(places, local.dim(), space)]
        at_window = renumbered(indices, image, window.shape[-space:], offsets, [1] * space)
        return call.op(grad, window, kernel, stride, pad, dilation, ceil_mode, at_window)

    return Halo(pool_windows(call, space), pool, adds=(0,), reference=0)


# ---------------------------------------------------------------- bins


def bin_windows(call: Call, space: int) -> dict[str, Window]:
    """By factor, the rows of an image that a row of the adaptively pooled image reads."""
    made = call.get("grad_output") or call.results[0]
    pairs = zip(call["self"].shape[-space:], made.shape[-space:], strict=True)
    return {SPACE[i]: Window(0, size - 1, size, parts) for i, (size, parts) in enumerate(pairs) if parts}


def kept_along(shape: Sequence[int], places: Places, space: int) -> list[int]:
    """The output size that pools all dims except those of `places`."""
    ndim = len(shape)
    return [places[dim].rows if dim in places else shape[dim] for dim in range(ndim - space, ndim)]


def adaptive_average_halo(call: Call, space: int) -> Halo | None:
    """The kernel averages other dims; then rows of the window are averaged."""
    image, made = call["self"].shape, call.results[0].shape
    if not call["self"].dtype.is_floating_point:
        return None

    def pool(local: torch.Tensor, output_size: Any, *, places: Places) -> torch.Tensor:
        result = call.op(local, kept_along(made, places, space))
        for dim, place in places.items():
            result = averaging(place, image[dim], made[dim]).apply(result, dim)
        return result

    return Halo(bin_windows(call, space), pool, reads=(0,))


def adaptive_average_backward_halo(call: Call, space: int) -> Halo:
    """Gradients of windows, which are added up."""
    image, made = call["self"].shape, call["grad_output"].shape

    def pool(grad: torch.Tensor, local: torch.Tensor, *, places: Places) -> torch.Tensor:
        for dim, place in places.items():
            grad = averaging(place, image[dim], made[dim]).spread(grad, dim, place.rows)
        return call.op(grad, window_of(local, places))

    return Halo(bin_windows(call, space), pool, adds=(0,), reference=0)


def adaptive_maximum_halo(call: Call, space: int) -> Halo:
    """The kernel takes maxima along other dims; then along rows of the window, with their positions."""
    image, made = call["self"].shape, call.results[0].shape

    def pool(local: torch.Tensor, output_size: Any, *, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = call.op(local, kept_along(made, places, space))
        for dim, place in reversed(list(places.items())):
            first, count = bins(place, image[dim], made[dim])
            steps = first[:, None] - place.window + np.minimum(count[:, None] - 1, np.arange(int(count.max())))
            rows = torch.tensor(steps.ravel().tolist(), device=local.device)
            values, indices = (t.index_select(dim, rows).unflatten(dim, steps.shape) for t in (values, indices))
            values, indices = (in_memory_of(t, local) for t in maxima(values, indices, dim + 1))
        offsets = offsets_of(places, local.dim(), space)
        return values, renumbered(indices, local.shape[-space:], image[-space:], offsets, [1] * space)

    return Halo(bin_windows(call, space), pool, reads=(0,))


def maxima(values: torch.Tensor, indices: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values along a dim and their indices, with the kernel's ties: the first maximum, the last NaN.

    Neighbours are compared pairwise until one is left, which keeps their order.
    """
    while values.shape[dim] > 1:
        pairs = values.shape[dim] // 2
        (a, b), (at_a, at_b) = (t.narrow(dim, 0, 2 * pairs).unflatten(dim, (pairs, 2)).unbind(dim + 1) for t in
                                (values, indices))  # fmt: skip
        better = (b > a) | b.isnan()
        rest = values.shape[dim] - 2 * pairs
        values = torch.cat([torch.where(better, b, a), values.narrow(dim, 2 * pairs, rest)], dim)
        indices = torch.cat([torch.where(better, at_b, at_a), indices.narrow(dim, 2 * pairs, rest)], dim)
    return values.squeeze(dim), indices.squeeze(dim)


def adaptive_maximum_backward_halo(call: Call, space: int) -> Halo:
    """Gradients of windows, which are added up."""
    image = call["self"].shape

    def pool(grad: torch.Tensor, local: torch.Tensor, indices: torch.Tensor, *, places: Places) -> torch.Tensor:
        shape = with_rows(local.shape, places)
        offsets = [-offset for offset in offsets_of(places, local.dim(), space)]
        at_window = renumbered(indices, image[-space:], shape[-space:], offsets, [1] * space)
        plane = grad.new_zeros([*shape[:-space], math.prod(shape[-space:])])
        return plane.scatter_add_(-1, at_window.flatten(-space), grad.flatten(-space)).view(shape)

    return Halo(bin_windows(call, space), pool, adds=(0,), reference=0)


# ---------------------------------------------------------------- the rules


def unsharded_window(call: Call, space: int) -> None:
    """No halo: any row may be read, so the dims of a window must not be sharded."""


Halos = Callable[[Call, int], Halo | None]
# by name, with the number of dims left out: whether the operator is linear in its first operand, and its halo
POOLS: dict[str, tuple[bool, Halos]] = {
    "avg_pool{}d": (True, average_halo),
    "avg_pool{}d_backward": (True, average_backward_halo),
    "max_pool{}d_with_indices": (False, maximum_halo),
    "max_pool{}d_with_indices_backward": (True, maximum_backward_halo),
    "_adaptive_avg_pool{}d": (True, adaptive_average_halo),
    "_adaptive_avg_pool{}d_backward": (True, adaptive_average_backward_halo),
    "adaptive_max_pool{}d": (False, adaptive_maximum_halo),
    "adaptive_max_pool{}d_backward": (True, adaptive_maximum_backward_halo),
    "fractional_max_pool{}d_backward": (True, unsharded_window),
    "max_unpool{}d": (True, unsharded_window),
}
for space in (2, 3):
    for name, (linear, halo) in POOLS.items():
        op = getattr(aten, name.format(space)).default
        rule(op, halo=lambda call, space=space, halo=halo: halo(call, space))(
            functools.partial(leading, space=space, linear=linear)
        )
