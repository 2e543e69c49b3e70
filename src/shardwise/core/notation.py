"""Layouts from their short notation: `f32[8,32] dp:S0 tp:R order 0:tp>dp`, the inverse of `repr(spec)`; also meshes.

Errors point at the character.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import (
    AnyShard,
    MaskPartial,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
)
from shardwise.core.spec import (
    DTYPE_NAMES,
    DTensorSpec,
    TensorMeta,
    checked_order,
    default_shard_order,
    dtype_name,
    with_dim_from_front,
)
from shardwise.errors import NotationError, ShardwiseError

__all__ = ["parse_axes", "parse_meta", "parse_spec"]

MOST_RANKS = 2**20
Word = tuple[int, str]  # where it begins, and the word

# the printed form of a dtype, and its name in torch
_DTYPES = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    for name in (dtype_name(dtype), str(dtype).removeprefix("torch."))
}
# no number has more than 18 digits: none is larger than an int64
_NUMBER = re.compile(r"\d{1,18}")
_WORD = re.compile(r"\S+")
_META = re.compile(r"\s*(?P<dtype>[a-z0-9_]+)\[(?P<sizes>[^\]]*)\]")
_PLACEMENT = re.compile(
    r"(?P<kind>[A-Z])(?P<dim>-?\d{1,18})?(?:/(?P<rows>\d{1,18}))?(?:\((?P<blocks>\d{1,18}(?:[,;]\d{1,18})*)\)|\((?P<op>\w*)\))?"
)


def parse_spec(text: str, mesh: DeviceMesh, *, meta: TensorMeta | None = None, start: int = 0) -> DTensorSpec:
    """The spec on `mesh` that `text` (from `start` on) describes.

    Args:
        text: `f32[8,32] dp:S0 tp:R`; the dtype and sizes may be omitted if `meta` is given.
        mesh: whose axis names (or, without names, whose order) the placements refer to.
        meta: the tensor, if the text does not describe one.
        start: where in `text` to begin; errors show all of the text.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        >>> parse_spec("bf16[4,6] tp:S1", mesh)
        bf16[4,6] dp:R tp:S1
    """
    found = _META.match(text, start)
    if found is not None:
        meta = parse_meta(text, start)
        start = found.end()
    elif meta is None:
        raise NotationError.at(text, _skip(text, start), "expected a dtype and sizes such as f32[8,32]")
    placements, order = _layout(text, mesh, start, len(meta.shape))
    with _pointing_at(text, _skip(text, start)):
        return DTensorSpec(mesh, placements, meta, order)


def parse_meta(text: str, start: int = 0) -> TensorMeta:
    """The tensor that `f32[8,32]` describes."""
    found = _META.match(text, start)
    if found is None:
        raise NotationError.at(text, _skip(text, start), "expected a dtype and sizes such as f32[8,32]")
    dtype = _DTYPES.get(found["dtype"])
    if dtype is None:
        known = ", ".join(DTYPE_NAMES.values())
        raise NotationError.at(text, found.start("dtype"), f"unknown dtype {found['dtype']!r}", hint=f"one of {known}")
    sizes = []
    at = found.start("sizes")
    for part in found["sizes"].split(",") if found["sizes"].strip() else []:
        size = part.strip()
        if not _NUMBER.fullmatch(size):
            raise NotationError.at(text, at + len(part) - len(part.lstrip()), f"expected a size, found {size!r}")
        sizes.append(int(size))
        at += len(part) + 1
    return TensorMeta(sizes, dtype=dtype)


def _layout(
    text: str, mesh: DeviceMesh, start: int, ndim: int
) -> tuple[list[Placement], dict[int, tuple[int, ...]] | None]:
    """The placements and the shard order of `dp:S0 tp:R order 0:tp>dp`; axes not named are replicated."""
    words = [(word.start(), word[0]) for word in _WORD.finditer(text, start)]
    split = next((i for i, (_, word) in enumerate(words) if word == "order"), len(words))
    placements = _placements(text, words[:split], mesh, ndim)
    return placements, _order(text, words[split:], mesh, placements, ndim) or None


def _placements(text: str, words: Sequence[Word], mesh: DeviceMesh, ndim: int) -> list[Placement]:
    placements: dict[int, Placement] = {}
    for at, word in words:
        name, colon, value = word.partition(":") if ":" in word else ("", "", word)
        axis = _axis(text, at, name, mesh) if colon else len(placements)
        if axis >= mesh.ndim:
            raise NotationError.at(text, at, f"more placements than the mesh has axes ({mesh.ndim})")
        if axis in placements:
            raise NotationError.at(text, at, f"axis {mesh.axis_name(axis)} is named twice")
        with _pointing_at(text, at + len(name) + len(colon)):
            placement = _placement(value)
            if isinstance(placement, AnyShard):
                placement = with_dim_from_front(placement, mesh, axis, ndim)
        placements[axis] = placement
    return [placements.get(axis, Replicate()) for axis in range(mesh.ndim)]


def _order(
    text: str, words: Sequence[Word], mesh: DeviceMesh, placements: list[Placement], ndim: int
) -> dict[int, tuple[int, ...]]:
    """The entries after `order`, which may be repeated before each of them."""
    order: dict[int, tuple[int, ...]] = {}
    wanted = False
    for at, word in [*words, (len(text), "order")]:  # nothing follows, or another `order`
        dim, _, names = word.partition(":")
        if word == "order" and not wanted:
            wanted = True
            continue
        if not _NUMBER.fullmatch(dim) or not names:
            raise NotationError.at(text, at, "expected dim:axis>axis, as in 0:tp>dp")
        if int(dim) in order:
            raise NotationError.at(text, at, f"dim {int(dim)} is ordered twice")
        axes: list[int] = []
        position = at + len(dim) + 1
        for name in names.split(">"):
            axes.append(_axis(text, position, name, mesh))
            position += len(name) + 1
        order[int(dim)] = tuple(axes)
        with _pointing_at(text, at):
            checked_order({int(dim): axes}, default_shard_order(placements), mesh, placements, ndim)
        wanted = False
    return order


def _axis(text: str, at: int, name: str, mesh: DeviceMesh) -> int:
    """An axis by its name or, if there is no such name, by its number."""
    named = name in (mesh.mesh_dim_names or ())
    try:
        return mesh.axis(int(name) if not named and _NUMBER.fullmatch(name) else name)
    except ShardwiseError:
        have = ", ".join(mesh.axis_name(a) for a in range(mesh.ndim))
        raise NotationError.at(text, at, f"the mesh has no axis {name!r}", hint=f"it has {have}") from None


def _placement(word: str) -> Placement:
    found = _PLACEMENT.fullmatch(word)
    match found and found.group("kind", "dim", "rows", "blocks", "op"):
        case "S", str(dim), None, None, None:
            return Shard(int(dim))
        case "S", str(dim), None, str(sizes), None:
            given, _, blocks = sizes.partition(";")
            return Ragged(int(dim), map(int, given.split(",")), map(int, blocks.split(",")) if blocks else None)
        case "O", str(dim), None, str(rank), None if _NUMBER.fullmatch(rank):
            return Owned(int(rank), int(dim))
        case "S", str(dim), str(rows), None, None:
            return StridedShard(int(dim), int(rows))
        case "Z", str(dim), rows, blocks, None if ";" not in (blocks or ""):
            return Zigzag(int(dim), None if blocks is None else map(int, blocks.split(",")), int(rows or 1))
        case "R", None, None, None, None:
            return Replicate()
        case "M", None, None, None, None:
            return MaskPartial()
        case "P", None, None, None, reduce_op:
            return Partial(reduce_op or "sum")
        case _:
            raise ShardwiseError(
                f"expected a placement, found {word!r}",
                hint="R, S<dim>, S<dim>(<sizes>), S<dim>/<rows>, Z<dim>, O<dim>(<rank>), P, P(max) or M",
            )


@contextmanager
def _pointing_at(text: str, at: int) -> Iterator[None]:
    """Errors raised inside point at `text[at]`."""
    try:
        yield
    except ShardwiseError as error:
        raise NotationError.at(text, at, error.problem, hint=error.hint) from None


def _skip(text: str, at: int) -> int:
    """The next position that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def parse_axes(text: str) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """The sizes of the axes that `dp=2,tp=4` or, without names, `2x4` describes, and their names.

    Args:
        text: the axes with their sizes.

    Example:
        >>> parse_axes("dp=2,tp=4"), parse_axes("2x4")
        (((2, 4), ('dp', 'tp')), ((2, 4), None))
    """
    named = "=" in text
    names: list[str] = []
    sizes: list[int] = []
    at = 0
    for part in text.split("," if named else "x"):
        name, equals, size = part.partition("=") if named else ("", "", part)
        where = at + len(part) - len(part.lstrip())
        if named and (not equals or not name.strip().isidentifier()):
            raise NotationError.at(text, where, f"expected an axis such as dp=2, found {part.strip()!r}")
        if name.strip() in names:
            raise NotationError.at(text, where, f"axis {name.strip()} is named twice")
        value = at + len(name) + len(equals) + len(size) - len(size.lstrip())
        if not re.fullmatch(r"[0-9]{1,9}", size.strip()) or not int(size):
            problem = f"expected a number of ranks, found {size.strip()!r}"
            raise NotationError.at(text, value, problem, hint="a mesh is written dp=2,tp=4 or, without names, 2x4")
        sizes.append(int(size))
        if math.prod(sizes) > MOST_RANKS:
            raise NotationError.at(text, value, f"a mesh of more than {MOST_RANKS:,} ranks")
        names += [name.strip()] if named else []
        at += len(part) + 1
    return tuple(sizes), tuple(names) or None
