"""Programs of exchanges by owner: ranks send items to their owners, which look up or write, and may answer.

Each index of a sharded dim has one owner. The destinations of items depend on values, so sizes are exchanged first. A
program is a generator on the plain tensors of one rank: it yields items to send, and `send` passes in those received. A
fabric runs it: on one rank, on all virtual ranks in lockstep, or dry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Items", "OwnedPart", "Program", "by_member", "look_up", "owner_of"]

Counts = torch.Tensor | tuple[int, ...]


class Items(NamedTuple):
    """Items to send, or received ones: rows of some tensors, in the order of the members of the group.

    Args:
        tensors: all with the same number of rows.
        counts: the number of rows to each member, or from each; -1 for all members if the call is in error.
        arriving: for an answer, the number of rows expected from each member; for received items, the number of rows
            that were sent to each.
        meanwhile: what this rank has to do that needs nothing of what arrives; called while items are on their way.
    """

    tensors: tuple[torch.Tensor, ...]
    counts: Counts
    arriving: tuple[int, ...] | None = None
    meanwhile: Callable[[], object] | None = None

    def answer(self, *tensors: torch.Tensor) -> Items:
        """Answer received items with as many rows to each member."""
        assert isinstance(self.counts, tuple)
        return Items(tensors, self.counts, self.arriving)


class OwnedPart(NamedTuple):
    """The local part of the dim that defines the owners.

    Args:
        dim: the dim of the tensor.
        start: the first local index.
        length: the number of local indices.
        size: the global size of the dim.
        parts: the sizes of the mesh axes that split it, the first one major; their product is the number of members.
        member: the number of this rank among the members.
    """

    dim: int
    start: int
    length: int
    size: int
    parts: tuple[int, ...]
    member: int

    @property
    def members(self) -> int:
        """The number of ranks that exchange."""
        return math.prod(self.parts)


Exchanging = Generator[Items, Items, Any]
# The program of one rank: from its part and the arguments of the call by name, with its locals, to its results.
Program = Callable[[OwnedPart, Mapping[str, Any]], Generator[Items, Items, tuple[torch.Tensor, ...]]]


def owner_of(place: OwnedPart, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each global index the member that owns it, and its position in that member's part: nested `torch.chunk`."""
    member, size = torch.zeros_like(index), torch.full_like(index, place.size)
    for parts in place.parts:
        chunk = (size + (parts - 1)).div_(parts, rounding_mode="floor").clamp_(min=1)
        part = index.div(chunk, rounding_mode="floor")
        member.mul_(parts).add_(part)
        before = part.mul_(chunk)
        index, size = index - before, torch.minimum(chunk, size - before)
    return member, index


def _owners(place: OwnedPart, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Owners of indices, positions in their parts, and a boolean scalar: whether an index is out of range."""
    wrong = ((index < 0) | (index >= place.size)).any()
    return (*owner_of(place, index.long().clamp(0, max(place.size - 1, 0))), wrong)


def by_member(place: OwnedPart, member: torch.Tensor, wrong: torch.Tensor | None = None) -> tuple[torch.Tensor, Counts]:
    """The order of items by member, stable within each, and the number of items of each."""
    ordered, order = torch.sort(member, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(place.members + 1, device=member.device))
    counts = ends.diff()
    return order, counts if wrong is None else counts.masked_fill_(wrong, -1)


def look_up(
    place: OwnedPart, table: torch.Tensor, member: torch.Tensor, row: torch.Tensor, wrong: torch.Tensor
) -> Exchanging:
    """Rows of the members' tables: send requests to the owners, receive rows."""
    order, counts = by_member(place, member, wrong)
    wanted = yield Items((row[order],), counts)
    found = yield wanted.answer(table.index_select(0, wanted.tensors[0]))
    result = torch.empty_like(found.tensors[0])
    result[order] = found.tensors[0]
    return result


def write(
    place: OwnedPart,
    member: torch.Tensor,
    row: torch.Tensor,
    values: torch.Tensor | None,
    wrong: torch.Tensor,
) -> Exchanging:
    """Send rows and values to their owners; gives those received, in the order of the sending ranks."""
    order, counts = by_member(place, member, wrong)
    sent = (row[order],) if values is None else (row[order], values[order])
    got = yield Items(sent, counts)
    return (*got.tensors, None)[:2]


# ---------------------------------------------------------------- one element for each index along a dim


def _elements(
    place: OwnedPart, table: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Owners, positions in flat tables, and an error flag, for indices along dim 0 that take one element each."""
    rest = table.shape[1:]
    inner = math.prod(rest)
    columns = torch.arange(inner, device=index.device).view(rest)[tuple(slice(n) for n in index.shape[1:])]
    member, row, wrong = _owners(place, index)
    at = row.mul_(inner).add_(columns)
    return member.reshape(-1), at.reshape(-1), wrong


def gather(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """`gather` along a sharded dim, with indices that are sharded along it too."""
    dim = place.dim
    table, index = named["self"].movedim(dim, 0), named["index"].movedim(dim, 0)
    taken = yield from look_up(place, table.reshape(-1), *_elements(place, table, index))
    return (taken.view(index.shape).movedim(0, dim),)


def scatter(op: Any) -> Program:
    """A scatter along a sharded dim, with indices that are sharded along it too."""

    def scatter_by_owner(
        place: OwnedPart, named: Mapping[str, Any]
    ) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
        dim = place.dim
        table, index, source = named["self"].movedim(dim, 0), named["index"].movedim(dim, 0), named.get("src")
        values = None
        if isinstance(source, torch.Tensor):
            values = source.movedim(dim, 0)[tuple(slice(n) for n in index.shape)].reshape(-1)
        member, at, wrong = _elements(place, table, index)
        rows, got = yield from write(place, member, at, values, wrong)
        given = {**named, "self": table.reshape(-1), "dim": 0, "index": rows}
        if got is not None:
            given["src"] = got
        return (op(**given).view(table.shape).movedim(0, dim),)

    return scatter_by_owner


# ---------------------------------------------------------------- rows by indices


def _as_rows(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A matrix whose rows are the elements of `dims`, moved to the front."""
    front = tensor.movedim(tuple(dims), tuple(range(len(dims))))
    count = math.prod(front.shape[: len(dims)])
    return front.reshape(count, math.prod(front.shape[len(dims) :]))


def index_select(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Rows along a sharded dim by sharded indices."""
    local, index = named["self"], named["index"]
    rest = local.movedim(place.dim, 0).shape[1:]
    taken = yield from look_up(place, _as_rows(local, [place.dim]), *_owners(place, index))
    return (taken.view(-1, *rest).movedim(0, place.dim),)


def embedding(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Rows of a table by sharded indices."""
    indices = named["indices"]
    given = {"self": named["weight"], "index": indices.reshape(-1)}
    (rows,) = yield from index_select(place, given)
    return (rows.view(*indices.shape, rows.shape[1]),)


def index_write(op: Any) -> Program:
    """Rows written along a sharded dim by sharded indices."""

    def write_by_owner(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
        local, index, source = named["self"], named["index"], named.get("source")
        values = (
            None if source is None else _as_rows(source.expand(_with(local.shape, place.dim, len(index))), [place.dim])
        )
        member, row, wrong = _owners(place, index)
        rows, got = yield from write(place, member, row, values, wrong)
        given = {**named, "self": _as_rows(local, [place.dim]), "dim": 0, "index": rows}
        if got is not None:
            given["source"] = got
        return (op(**given).view(local.movedim(place.dim, 0).shape).movedim(0, place.dim),)

    return write_by_owner


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else n for d, n in enumerate(shape)]


# ---------------------------------------------------------------- advanced indexing


class _Indexed(NamedTuple):
    """Requests of advanced indexing: owners, rows of tables with the indexed dims in front, positions of results."""

    dims: list[int]
    shape: torch.Size  # of the indices, broadcast together
    member: torch.Tensor
    row: torch.Tensor
    wrong: torch.Tensor
    front: int  # the dim of the result that the indices begin at


def _indexed(place: OwnedPart, local: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Indexed:
    dims = [d for d, index in enumerate(indices) if index is not None]
    found = torch.broadcast_tensors(*(index for index in indices if index is not None))
    at = torch.zeros_like(found[0], dtype=torch.int64)
    member, wrong = at, torch.zeros((), dtype=torch.bool, device=local.device)
    for dim, index in zip(dims, found, strict=True):
        size = place.size if dim == place.dim else local.shape[dim]
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        wrong = wrong | ((index < 0) | (index >= size)).any()
        index = index.clamp(0, max(size - 1, 0))
        if dim == place.dim:
            member, index = owner_of(place, index)
            at = index if dim == dims[0] else at * _lengths(place, member) + index
        else:
            at = at * size + index
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    return _Indexed(dims, at.shape, member.reshape(-1), at.reshape(-1), wrong, dims[0] if together else 0)


def _lengths(place: OwnedPart, member: torch.Tensor) -> torch.Tensor:
    """The length of the part of each of these members."""
    size = torch.full_like(member, place.size)
    left = place.members
    for parts in place.parts:
        left //= parts
        part = member.div(left, rounding_mode="floor").remainder_(parts)
        chunk = (size + (parts - 1)).div_(parts, rounding_mode="floor")
        size = torch.minimum(chunk, size - part.mul_(chunk)).clamp_(min=0)
    return size


def index(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Advanced indexing, one of the indexed dims and the indices sharded."""
    local = named["self"]
    found = _indexed(place, local, named["indices"])
    taken = yield from look_up(place, _as_rows(local, found.dims), found.member, found.row, found.wrong)
    rest = [n for d, n in enumerate(local.shape) if d not in found.dims]
    made = taken.view(*found.shape, *rest)
    count = len(found.shape)
    return (made.movedim(tuple(range(count)), tuple(range(found.front, found.front + count))),)


def index_put(op: Any) -> Program:
    """Values put at indices; one of the indexed dims and the indices are sharded."""

    def put_by_owner(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
        local = named["self"]
        found = _indexed(place, local, named["indices"])
        rest = [n for d, n in enumerate(local.shape) if d not in found.dims]
        shape, front = [*rest[: found.front], *found.shape, *rest[found.front :]], found.front
        values = _as_rows(named["values"].expand(shape), range(front, front + len(found.shape)))
        rows, got = yield from write(place, found.member, found.row, values, found.wrong)
        given = {**named, "self": _as_rows(local, found.dims), "indices": [rows], "values": got}
        made = op(**given).view(*(local.shape[d] for d in found.dims), *rest)
        return (made.movedim(tuple(range(len(found.dims))), tuple(found.dims)),)

    return put_by_owner


def embedding_dense_backward(
    place: OwnedPart, named: Mapping[str, Any]
) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Send gradients to the owners of their rows."""
    grad, indices, padding = named["grad_output"], named["indices"].reshape(-1), named["padding_idx"]
    values = grad.reshape(len(indices), grad.shape[-1])
    member, row, wrong = _owners(place, indices)
    rows, got = yield from write(place, member, row, values, wrong)
    here = padding - place.start if place.start <= padding < place.start + place.length else -1
    by_frequency = named["scale_grad_by_freq"]
    return (torch.ops.aten.embedding_dense_backward.default(got, rows, place.length, here, by_frequency),)
