"""A tensor that is assembled of slices of tensors in files: stacked experts, transposed weights, parts of fused ones.

`LazyTensor` takes the place of such a tensor while a converter computes it from those in the files. It knows the
functions of torch that only move elements, and no values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
        >>> LazyTensor.of_file("q", (6, 4)).view(3, 2, -1).transpose(0, 1).reshape(6, 4).shape
        torch.Size([6, 4])
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

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def view(self, *shape: int | Sequence[int]) -> LazyTensor:
        """With dims split or merged, where each part of the result is a box of a file."""
        return _view(self, [size for each in shape for size in ([each] if isinstance(each, int) else each)])

    def reshape(self, *shape: int | Sequence[int]) -> LazyTensor:
        """As `view`: it has no memory."""
        return self.view(*shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(name)

    def __getitem__(self, index: object) -> Any:
        raise _unsupported("indexing")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _FUNCTIONS.get(function)
        if known is None:
            raise _unsupported(getattr(function, "__name__", function))
        return known(*args, **(kwargs or {}))


def _unsupported(name: object) -> UnsupportedError:
    return UnsupportedError(
        f"weights in the files are converted by {name}, which is not known to move slices alone",
        hint="convert the checkpoint once, with from_pretrained and save_pretrained of transformers",
    )


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


def _view(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """Dims are split and merged one group after another: a group of old dims has as many elements as one of new dims.

    Along dims that are split or merged every row becomes a part of its own.
    """
    shape = _known_sizes(tensor, shape)
    parts, merged = list(tensor.parts), 0
    for old, new in _groups(tensor.shape, shape):
        parts = [piece for part in parts for piece in _regrouped(part, merged, tensor.shape[old], shape[new])]
        merged += new.stop - new.start
    return LazyTensor(shape, parts)


def _known_sizes(tensor: LazyTensor, shape: Sequence[int]) -> list[int]:
    known = math.prod(size for size in shape if size != -1)
    return [tensor.numel() // max(known, 1) if size == -1 else size for size in shape]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Runs of dims of two shapes with equal numbers of elements, as short as possible."""
    if math.prod(old) != math.prod(new) or 0 in old:
        raise _unsupported(f"a view of {tuple(old)} as {tuple(new)}")
    first, second = 0, 0
    while first < len(old) or second < len(new):
        ends = [min(first + 1, len(old)), min(second + 1, len(new))]
        while (left := math.prod(old[first : ends[0]])) != (right := math.prod(new[second : ends[1]])):
            ends[left > right] += 1
        yield slice(first, ends[0]), slice(second, ends[1])
        first, second = ends[0], ends[1]


def _regrouped(part: FilePart, at: int, old: Sequence[int], new: Sequence[int]) -> Iterator[FilePart]:
    """A part with the dims from `at` on, of these sizes, seen with others."""
    if tuple(old) == tuple(new):
        yield part
        return
    own = slice(at, at + len(old))
    mapped = [dim for dim in part.dims[own] if dim is not None]
    if len(mapped) > 1:
        raise _unsupported(f"a view of {tuple(old)} as {tuple(new)}")
    offsets, sizes = part.place.offset[own], part.place.sizes[own]
    for index in itertools.product(*(range(low, low + size) for low, size in zip(offsets, sizes, strict=True))):
        flat, start = 0, list(part.start)
        for position, (each, size, low) in enumerate(zip(index, old, offsets, strict=True)):
            flat = flat * size + each
            if (dim := part.dims[at + position]) is not None:
                start[dim] += each - low
        place: list[int] = []
        for size in reversed(new):
            flat, here = divmod(flat, size)
            place.insert(0, here)
        dims = (*(None,) * (len(new) - 1), mapped[0] if mapped else None) if new else ()
        yield part._replace(
            start=tuple(start),
            place=Box(
                (*part.place.offset[:at], *place, *part.place.offset[own.stop :]),
                (*part.place.sizes[:at], *(1,) * len(new), *part.place.sizes[own.stop :]),
            ),
            dims=(*part.dims[:at], *dims, *part.dims[own.stop :]),
        )


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.stack: _stack,
    torch.transpose: _transpose,
}
