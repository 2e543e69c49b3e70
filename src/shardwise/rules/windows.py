"""Windows that slide over dims: which rows a kernel reads, and arguments and shapes of the part of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Window, dense_strides
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.registry import Call, WindowPart

__all__ = ["SPACE", "Places", "at", "kernel_window", "local_image", "window_of", "with_rows", "with_value"]

Places = Mapping[int, WindowPart]  # by dim
SPACE = ("x", "y", "z")  # the factors of dims that a window slides over


def at(values: Any, index: int) -> int:
    """An argument that is one number for all dims of a window, or one for each."""
    if isinstance(values, int):
        return values
    return values[index] if len(values) > 1 else values[0]


def kernel_window(size: int, stride: int, padding: int, dilation: int = 1) -> Window:
    """The rows that a row of the result of a kernel reads."""
    return Window(-padding, dilation * (size - 1) - padding, stride)


def with_value(values: Any, count: int, dims: Iterable[int], value: int, ndim: int) -> list[int]:
    """An argument with one number for each of the last `count` dims of a tensor, replaced for some of its dims."""
    changed = [at(values, i) for i in range(count)]
    for dim in dims:
        changed[dim - (ndim - count)] = value
    return changed


def with_rows(shape: Sequence[int], places: Places) -> list[int]:
    """A shape with the rows of windows along the dims of `places`."""
    return [places[dim].rows if dim in places else size for dim, size in enumerate(shape)]


def window_of(local: torch.Tensor, places: Places) -> torch.Tensor:
    """An uninitialized tensor of the size of a rank's window, for operators that read only the size."""
    shape = with_rows(local.shape, places)
    return local.new_empty_strided(shape, dense_strides(shape, like=local.stride()))


def local_image(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The size of the image on this rank."""
    return {"input_size": list(outputs[0].local_shape(coordinate))}
