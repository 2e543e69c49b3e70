"""A tensor that is assembled of slices of tensors in files: stacked experts, transposed weights, parts of fused ones.

`LazyTensor` stands for such a tensor while somebody's converter computes it from those in the files. It knows the
functions of torch that only move elements, and no values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.partition.boxes import Box, full_box, intersection
from shardwise.errors import UnsupportedError

__all__ = ["Assembled", "FilePart", "LazyTensor"]


class FilePart(NamedTuple):
    """A box of a tensor in the files, and its box in the assembled tensor.

    Args:
        name: the tensor in the files.
        shape: the shape of all of it.
        start: where the box begins in it.
        place: the box in the assembled tensor.
        dims: for each dim of the assembled tensor the dim in the files; None for one that was inserted.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    place: Box
    dims: tuple[int | None, ...]

    def within(self, box: Box) -> tuple[Box, Box] | None:
        """What a box of the assembled tensor has of this part: its box there, and its box in the files."""
        common = intersection(self.place, box)
        if common is None:
            return None
        offset, sizes = list(self.start), [0] * len(self.shape)
        for dim, size, low, first in zip(self.dims, common.sizes, common.offset, self.place.offset, strict=True):
            if dim is not None:
                offset[dim], sizes[dim] = self.start[dim] + low - first, size
        return common, Box(tuple(offset), tuple(sizes))


class Assembled(NamedTuple):
    """A tensor of the model that consists of parts of tensors in the files.

    Example:
        >>> q, k = LazyTensor.of_file("q", (2, 3)), LazyTensor.of_file("k", (4, 3))
        >>> [part.name for part in torch.cat([q, k]).assembled().parts]
        ['q', 'k']
    """

    parts: tuple[FilePart, ...]

    @property
    def is_renamed(self) -> bool:
        """Whether it is one tensor of the files as it is."""
        if len(self.parts) != 1:
            return False
        (part,) = self.parts
        return part.place == full_box(part.shape) and part.dims == tuple(range(len(part.shape)))


class LazyTensor:
    """The shape of a tensor, and the parts of tensors in files that it consists of.

    Example:
        >>> weight = torch.stack([LazyTensor.of_file(f"experts.{i}", (2, 3)) for i in range(4)])
        >>> weight.shape, torch.transpose(weight, 1, 2).shape
        (torch.Size([4, 2, 3]), torch.Size([4, 3, 2]))
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[FilePart]) -> None:
        self.shape = torch.Size(shape)
        self.parts = tuple(parts)

    @classmethod
    def of_file(cls, name: str, shape: tuple[int, ...]) -> LazyTensor:
        """A tensor in the files."""
        part = FilePart(name, tuple(shape), (0,) * len(shape), full_box(shape), tuple(range(len(shape))))
        return cls(shape, [part])

    def assembled(self) -> Assembled:
        """The parts, as a source of a tensor of the model."""
        return Assembled(self.parts)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        """Itself: it has no memory."""
        return self

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        """With two dims swapped."""
        return _transpose(self, dim0, dim1)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        """In parts of equal size."""
        return _chunk(self, chunks, dim)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _FUNCTIONS.get(function)
        if known is None:
            raise UnsupportedError(
                f"weights in the files are converted by {getattr(function, '__name__', function)}, which is not known "
                "to move slices alone",
                hint="convert the checkpoint once, with from_pretrained and save_pretrained of transformers",
            )
        return known(*args, **(kwargs or {}))


def _narrow(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    dim %= tensor.ndim
    kept = full_box(tensor.shape)
    offset, sizes = list(kept.offset), list(kept.sizes)
    offset[dim], sizes[dim] = start, length
    parts = []
    for part in tensor.parts:
        found = part.within(Box(tuple(offset), tuple(sizes)))
        if found is not None:
            place, box = found
            moved = tuple(at - (start if d == dim else 0) for d, at in enumerate(place.offset))
            parts.append(part._replace(start=box.offset, place=Box(moved, place.sizes)))
    return LazyTensor(sizes, parts)


def _split(tensor: LazyTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    size = tensor.shape[dim]
    sections = split_size_or_sections
    if isinstance(sections, int):
        sections = [min(sections, size - start) for start in range(0, size, sections)]
    starts = itertools.accumulate(sections, initial=0)
    return tuple([_narrow(tensor, dim, start, length) for start, length in zip(starts, sections, strict=False)])


def _chunk(input: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:  # noqa: A002
    return _split(input, -(-input.shape[dim] // chunks), dim)


def _cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= tensors[0].ndim
    shape, parts = list(tensors[0].shape), []
    shape[dim] = 0
    for tensor in tensors:
        for part in tensor.parts:
            moved = tuple(at + (shape[dim] if d == dim else 0) for d, at in enumerate(part.place.offset))
            parts.append(part._replace(place=Box(moved, part.place.sizes)))
        shape[dim] += tensor.shape[dim]
    return LazyTensor(shape, parts)


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= tensors[0].ndim + 1
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    def inserted(values: Sequence[Any], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim:])

    parts = [
        part._replace(
            place=Box(inserted(part.place.offset, 0), inserted(part.place.sizes, 1)), dims=inserted(part.dims, None)
        )
        for part in tensor.parts
    ]
    return LazyTensor(inserted(tensor.shape, 1), parts)


def _transpose(input: LazyTensor, dim0: int, dim1: int) -> LazyTensor:  # noqa: A002
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def moved(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([values[d] for d in order])

    parts = [
        part._replace(place=Box(moved(part.place.offset), moved(part.place.sizes)), dims=moved(part.dims))
        for part in input.parts
    ]
    return LazyTensor(moved(input.shape), parts)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.stack: _stack,
    torch.transpose: _transpose,
}
