"""Interpolation: batch and channels are factors; along a sharded resized dim, ranks resample windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from shardwise.core.layout import Window
from shardwise.errors import UnsupportedError
from shardwise.rules.engine import Factors
from shardwise.rules.interpolation_names import INTERPOLATIONS
from shardwise.rules.pooling import leading
from shardwise.rules.registry import Call, Halo, rule
from shardwise.rules.taps import Resampling
from shardwise.rules.windows import SPACE, Places, local_image

aten = torch.ops.aten
SCALES = ("scales", "scales_d", "scales_h", "scales_w")  # arguments; one size may follow from several scales
BY_CHANNELS = {aten.upsample_nearest3d.default}  # whose kernel for channels-last order needs more than three channels
LARGEST = 1 << 16  # denominator of the fraction that approximates a scale
# rows read before and after the position of a row, and one for rounding
REACH = {"nearest": (1, 2), "nearest-exact": (1, 2), "linear": (1, 2), "cubic": (2, 3)}


def resamplings(call: Call, space: int, kind: str, smooths: bool) -> list[Resampling]:
    """How each dim of the image is resampled."""
    corners = bool(call.get("align_corners", False))
    found = []
    for size, parts, given in sizes_and_scales(call, space):
        scale = size / parts if given is None else 1 / given
        if corners:
            scale = (size - 1) / (parts - 1) if parts > 1 else 0.0
        elif size == parts and not smooths:
            scale = 1.0
        single = call.operands[0].dtype is not torch.float64
        found.append(Resampling(size, parts, scale, corners, kind, smooths, single))
    return found


def sizes_and_scales(call: Call, space: int) -> list[tuple[int, int, float | None]]:
    """For each dim of the image its rows before and after, and the scale that was given."""
    images = (
        (call.results[0], call["grad_output"]) if "grad_output" in call.arguments else (call["self"], call.results[0])
    )
    names = ["scales"] if space == 1 else ["scales_" + axis for axis in "dhw"[3 - space :]]
    scales = [given if given and given > 0 else None for given in map(call.get, names)]
    return list(zip(images[0].shape[-space:], images[1].shape[-space:], scales, strict=True))


def depends_on_kernel(call: Call, space: int) -> bool:
    """Whether a scale does not fit sizes that are equal or doubled: some kernels of torch then ignore the scale.

    Which of them do depends on the device, the memory format, the number of channels, and the direction.
    """
    return not call.get("align_corners", False) and any(
        given is not None and (parts == size or parts == 2 * size) and given * size != parts
        for size, parts, given in sizes_and_scales(call, space)
    )


def resized(call: Call, space: int) -> Factors:
    """Batch and channels are factors."""
    if call.op in BY_CHANNELS and depends_on_kernel(call, space) and not call["self"].is_contiguous:
        sizes = call["self"].shape[-space:], call.results[0].shape[-space:]
        raise UnsupportedError(
            f"{call.op} in channels-last order by a scale that does not fit the sizes {sizes[0]} and {sizes[1]}: torch "
            "chooses the kernel by the number of channels, and one of them ignores the scale",
            hint="pass size= in place of scale_factor=, or x.contiguous()",
        )
    return leading(call, space, linear=True)


def window_of_rows(how: Resampling) -> Window:
    """The rows that a resampled row may read, and a spare row."""
    ratio = Fraction(how.scale).limit_denominator(LARGEST)
    before, after = REACH[how.kind]
    if how.smooths:
        before = after = int((1 if how.kind == "linear" else 2) * max(how.scale, 1.0)) + 3
    num, per = 2 * ratio.numerator, 2 * ratio.denominator
    # the position of a row: its start, or its middle
    middle = 0 if how.corners or how.kind == "nearest" else ratio.numerator - ratio.denominator
    return Window(middle - before * per, middle + after * per, num, per)


def resizing_halo(call: Call, space: int, kind: str, smooths: bool) -> Halo | None:
    """The kernel resizes other dims; then rows of the window are resampled."""
    hows = resamplings(call, space, kind, smooths)
    if not call["self"].dtype.is_floating_point or depends_on_kernel(call, space):  # integers would be rounded twice
        return None

    def resize(local: torch.Tensor, output_size: Sequence[int], *options: Any, places: Places) -> torch.Tensor:
        first = local.dim() - space
        size = [places[first + i].rows if first + i in places else n for i, n in enumerate(output_size)]
        result = call.op(local, size, *_scales(options, places, first, space))
        for dim, place in places.items():
            result = hows[dim - first].taps(place).apply(result, dim)
        return result

    return Halo(dict(zip(SPACE, map(window_of_rows, hows), strict=False)), resize, reads=(0,))


def resizing_backward_halo(call: Call, space: int, kind: str, smooths: bool) -> Halo | None:
    """Gradients of windows, which are added up."""
    hows = resamplings(call, space, kind, smooths)
    if depends_on_kernel(call, space):
        return None

    def resize(
        grad: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any, places: Places
    ) -> torch.Tensor:
        first = grad.dim() - space
        for dim, place in places.items():
            grad = hows[dim - first].taps(place).spread(grad, dim, place.rows)
        into, out = list(input_size), list(output_size)
        for dim, place in places.items():
            into[dim] = out[dim - first] = place.rows
        return call.op(grad, out, into, *_scales(options, places, first, space))

    return Halo(dict(zip(SPACE, map(window_of_rows, hows), strict=False)), resize, adds=(0,), reference=0)


def _scales(options: Sequence[Any], places: Places, first: int, space: int) -> list[Any]:
    """The options of the kernel, without scales for the dims in `places`, which it does not resize."""
    others, scales = list(options[: len(options) - space]), options[len(options) - space :]
    return [*others, *(None if first + i in places else scale for i, scale in enumerate(scales))]


for name, (space, kind, smooths) in INTERPOLATIONS.items():
    factors = functools.partial(resized, space=space)
    how = {"space": space, "kind": kind, "smooths": smooths}
    rule(getattr(aten, name).default, reads=SCALES, halo=lambda call, how=how: resizing_halo(call, **how))(factors)
    rule(
        getattr(aten, f"{name}_backward").default,
        localize=local_image,
        reads=SCALES,
        halo=lambda call, how=how: resizing_backward_halo(call, **how),
    )(factors)
