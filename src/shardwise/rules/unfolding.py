"""Sliding windows as new dims, and sums of windows: unfold, im2col, col2im."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from shardwise.core.layout import Window
from shardwise.rules.dims import names, wrapped
from shardwise.rules.engine import FIRST, Dim, Factors
from shardwise.rules.registry import Call, Halo, rule
from shardwise.rules.slicing import local_input_sizes
from shardwise.rules.windows import SPACE, Places, at, kernel_window, with_rows, with_value

aten = torch.ops.aten
NOWHERE: Places = MappingProxyType({})


def unfold_halo(call: Call) -> Halo:
    """A rank takes the windows that begin in its rows."""
    dim = wrapped(call["dimension"], len(call["self"].shape))
    windows = {f"d{dim}": Window(0, call["size"] - 1, call["step"])}
    return Halo(windows, lambda local, *options, places: call.op(local, *options), reads=(0,))


@rule(aten.unfold.default, aten.unfold_copy.default, halo=unfold_halo)
def unfold(call: Call) -> Factors:
    """Windows of a dim: the dim counts windows, a new last dim has their elements."""
    own = names(len(call["self"].shape))
    if not own:
        return Factors(((),), ((None,),), moves=True)
    exchanged = frozenset({own[wrapped(call["dimension"], len(own))]})
    return Factors((tuple(own),), ((*own, None),), moves=True, exchanged=exchanged)


def unfold_backward_halo(call: Call) -> Halo:
    """Windows are added up on each rank, then over ranks."""
    dim = wrapped(call["dim"], len(call["input_sizes"]))
    windows = {f"d{dim}": Window(0, call["size"] - 1, call["step"])}

    def added(grad: torch.Tensor, input_sizes: Sequence[int], *options: Any, places: Places) -> torch.Tensor:
        return call.op(grad, with_rows(input_sizes, places), *options)

    return Halo(windows, added, adds=(0,), reference=0)


@rule(aten.unfold_backward.default, localize=local_input_sizes, halo=unfold_backward_halo)
def unfold_backward(call: Call) -> Factors:
    """Windows added up: they may overlap."""
    own = tuple(names(len(call.results[0].shape)))
    if not own:
        return Factors(((None,),), ((),), linear=FIRST)
    exchanged = frozenset({own[wrapped(call["dim"], len(own))]})
    return Factors(((*own, None),), (own,), linear=FIRST, exchanged=exchanged)


# ---------------------------------------------------------------- columns


@rule(aten.im2col.default)
def im2col(call: Call) -> Factors:
    """Windows as columns. The rows of a channel are adjacent, so an even split of channels is a split of rows."""
    batch = ("b",) * (len(call["self"].shape) - 3)
    return Factors(((*batch, "c", None, None),), ((*batch, "c", None),), linear=FIRST, even=frozenset("c"))


@rule(aten.col2im.default)
def col2im(call: Call) -> Factors:
    """Columns put back as windows, added where they overlap."""
    batch = ("b",) * (len(call["self"].shape) - 2)
    return Factors(((*batch, None, None),), ((*batch, None, None, None),), linear=FIRST)


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("image_to_columns(Tensor self, int[] kernel, int[] dilation, int[] padding, int[] stride) -> Tensor")
_library.define(
    "columns_to_image(Tensor self, int[] size, int[] kernel, int[] dilation, int[] padding, int[] stride) -> Tensor"
)


def places_of(size: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[int]:
    """How many windows there are along both dims of an image."""
    return [
        (n + 2 * at(padding, i) - at(dilation, i) * (at(kernel, i) - 1) - 1) // at(stride, i) + 1
        for i, n in enumerate(size)
    ]


def image_to_columns(
    image: torch.Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any, *, places: Places = NOWHERE
) -> torch.Tensor:
    """Windows as columns, one for each place in the plane."""
    padding = with_value(padding, 2, places, 0, image.dim())
    plane = places_of(image.shape[-2:], kernel, dilation, padding, stride)
    return aten.im2col.default(image, kernel, dilation, padding, stride).unflatten(-1, plane)


def columns_to_image(
    columns: torch.Tensor,
    size: Sequence[int],
    kernel: Any,
    dilation: Any,
    padding: Any,
    stride: Any,
    *,
    places: Places = NOWHERE,
) -> torch.Tensor:
    """Columns put back as windows, added where they overlap."""
    padding = with_value(padding, 2, places, 0, columns.dim())
    first = columns.dim() - 2
    into = [places[first + i].rows if first + i in places else n for i, n in enumerate(size)]
    return aten.col2im.default(columns.flatten(-2), into, kernel, dilation, padding, stride)


_library.impl("image_to_columns", image_to_columns, "CompositeExplicitAutograd")
_library.impl("columns_to_image", columns_to_image, "CompositeExplicitAutograd")


def plane_windows(call: Call) -> dict[str, Window]:
    """By factor, the rows of an image that a row of the plane of windows covers."""
    kernel, dilation, padding, stride = (call[name] for name in ("kernel", "dilation", "padding", "stride"))
    return {SPACE[i]: kernel_window(at(kernel, i), at(stride, i), at(padding, i), at(dilation, i)) for i in range(2)}


def columns_of_windows(call: Call) -> Halo:
    """A rank takes the windows of its part of the plane."""
    return Halo(plane_windows(call), image_to_columns, reads=(0,))


def windows_of_columns(call: Call) -> Halo:
    """A rank puts its part of the plane back, and windows are added up over ranks."""
    return Halo(plane_windows(call), columns_to_image, adds=(0,), reference=0)


@rule(torch.ops.shardwise.image_to_columns.default, halo=columns_of_windows)
def image_columns(call: Call) -> Factors:
    """Windows as columns over a plane."""
    batch: tuple[Dim, ...] = ("b",) * (len(call["self"].shape) - 3)
    image = (*batch, "c", *SPACE[:2])
    return Factors((image,), (image,), linear=FIRST, even=frozenset("c"), exchanged=frozenset(SPACE[:2]))


@rule(torch.ops.shardwise.columns_to_image.default, halo=windows_of_columns)
def column_images(call: Call) -> Factors:
    """Columns over a plane put back as windows."""
    batch: tuple[Dim, ...] = ("b",) * (len(call["self"].shape) - 3)
    return Factors(
        ((*batch, None, *SPACE[:2]),), ((*batch, None, *SPACE[:2]),), linear=FIRST, exchanged=frozenset(SPACE[:2])
    )
