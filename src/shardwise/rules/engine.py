"""The rule language: an operator names the factors of its dims, in the manner of einsum; rows are derived.

    "mk,kn->mn"             m, n parallel; k contracted: shard both, the result is Partial(sum)
    "... n -> ..."          dims that broadcast like a pointwise operator's; n is reduced
    "a! b -> a! b"          a marked dim must not be sharded
    "(i j) k -> i (j k)"    compound factors: i may be sharded, j only where it is major
    "1 n -> n"              a dim of size one

Patterns are parsed once and frozen. `candidates` turns factors into the rows of one axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shardwise.core.placement import AnyShard, MaskPartial, Partial, Placement, Ragged, Replicate, Shard
from shardwise.errors import NotationError

__all__ = ["Factors", "OwnerRow", "Pattern", "Row", "candidates", "parse"]

REPLICATE = Replicate()
# groups of operands in which an operator is linear: the first; each of two while the other is replicated; both together
FIRST: tuple[tuple[int, ...], ...] = ((0,),)
EACH_ALONE: tuple[tuple[int, ...], ...] = ((0,), (1,))
BOTH: tuple[tuple[int, ...], ...] = ((0, 1),)
Dim = str | None  # the factor of a dim; None for one that cannot be sharded


class Row(NamedTuple):
    """One allowed combination on one axis: a placement for each tensor operand and for each result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


class OwnerRow(NamedTuple):
    """A row that the operator's program executes: ranks exchange items with their owners.

    Args:
        row: the placements.
        sent: the operands whose elements are sent to their owners.
        received: the results whose elements come back.
        rounds: the number of exchanges; sizes are exchanged before the first.
        table: the position among operands and results of the tensor whose shards define the owners.
    """

    row: Row
    sent: tuple[int, ...]
    received: tuple[int, ...] = ()
    rounds: int = 1
    table: int = 0


@dataclass(frozen=True)
class Factors:
    """A rule for one call: the factor of every dim, and the Partial placements that it allows.

    Args:
        operands: for each tensor operand the factor of each dim.
        results: for each result the factor of each dim.
        unsharded: factors that may not be sharded.
        reduce: the reduction of a factor that no result has; "sum" if not given, "mask" where each element of the
            result comes from one rank and is zero on the others. For an exchanged factor, "mask" adds such rows to
            those that exchange.
        summed: factors that only some results have: the others sum over them, and are Partial where they are sharded.
        untouched: pairs (factor, result): the result does not depend on how the factor is sharded, and is replicated.
        linear: groups of operands that may be Partial(sum) or Partial(avg) together, the others replicated.
        additive: operands that are added to the contraction: on a contracted axis they are Partial too.
        monotone: 1 for an operator that keeps order (min and max pass), -1 for one that reverses it.
        moves: whether elements are only moved, so that every kind of Partial passes, the same in all operands.
        keeps_zero: whether zeros stay zeros, so that a MaskPartial passes.
        nonempty: factors of which no rank may be left with an empty shard.
        even: factors that must be split into equal shards.
        exchanged: factors whose indices change. If one is sharded, ranks exchange rows, as defined by `rows` or `halo`
            of the rule.
        barred: factors that a call cannot shard; this excludes rows given in `rows` too.
        plain: factors that may be split only by `Shard`.
        grouped: the factors of rows and of their groups, and the operand with the ends of the groups. If rows and ends
            are both `Ragged`, each rank has the rows of its groups, and the groups are sharded with them.
        rows: further rows that do not fit the scheme.
        owned: further rows, executed by the rule's `program`.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    unsharded: frozenset[str] = frozenset()
    reduce: Mapping[str, str] = field(default_factory=dict, hash=False)
    summed: frozenset[str] = frozenset()
    untouched: frozenset[tuple[str, int]] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    additive: tuple[int, ...] = ()
    monotone: int = 0
    moves: bool = False
    keeps_zero: bool = False
    nonempty: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()
    barred: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    grouped: tuple[str, str, int] | None = None
    rows: tuple[Row, ...] = ()
    owned: tuple[OwnerRow, ...] = ()

    @property
    def names(self) -> list[str]:
        """Every factor once, in the order of its first appearance."""
        seen: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            seen.update((dim, None) for dim in dims if dim is not None)
        return list(seen)


class Pattern(NamedTuple):
    """A parsed rule string. A dim is a tuple of factor names: several for a compound one, none for size one."""

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    unsharded: frozenset[str]


ELLIPSIS = ("...",)
_TOKEN = re.compile(r"\s*(?:(?P<name>[a-zA-Z][0-9]*)|(?P<dots>\.\.\.)|(?P<mark>[!()1,]|->))")


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Parse a rule string.

    Example:
        >>> parse("m k!, k! n -> m n").operands
        ((('m',), ('k',)), (('k',), ('n',)))
    """
    reader = _Reader(text)
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            position = at + len(text[at:]) - len(text[at:].lstrip())
            raise NotationError.at(text, position, f"unexpected {text[position]!r} in a rule")
        start = found.end() - len(found[0].lstrip())
        if found["name"]:
            reader.name(found["name"])
        elif found["dots"]:
            reader.dots(start)
        else:
            reader.mark(found["mark"], start)
        reader.last = found["name"]
        at = found.end()
    return reader.pattern(end)


class _Reader:
    """State of the parser of a rule string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sides: list[list[list[tuple[str, ...]]]] = [[[]]]  # operands and results, each a list of dims
        self.unsharded: set[str] = set()
        self.group: list[str] | None = None  # the bracket that is open, if one is
        self.opened = 0
        self.last: str | None = None  # the factor that was read last, if nothing has followed it

    def name(self, name: str) -> None:
        """A factor: a dim of its own, or a part of the bracket."""
        if self.group is None:
            self.sides[-1][-1].append((name,))
        else:
            self.group.append(name)

    def dots(self, start: int) -> None:
        """All remaining dims of the tensor."""
        operand = self.sides[-1][-1]
        if ELLIPSIS in operand or self.group is not None:
            raise self._error(start, "'...' may occur once in an operand, outside brackets")
        operand.append(ELLIPSIS)

    def mark(self, mark: str, start: int) -> None:
        """A character between factors."""
        match mark:
            case "!":
                self._must_not_be_sharded(start)
            case "(":
                self._open(start)
            case ")":
                self._close(start)
            case _ if self.group is not None:
                raise self._error(self.opened, "this bracket is not closed")
            case "1":
                self.sides[-1][-1].append(())
            case ",":
                self.sides[-1].append([])
            case _ if len(self.sides) == 2:
                raise self._error(start, "'->' must occur exactly once in a rule")
            case _:
                self.sides.append([[]])

    def _must_not_be_sharded(self, start: int) -> None:
        if self.last is None:
            raise self._error(start, "'!' must follow the factor that it marks")
        self.unsharded.add(self.last)

    def _open(self, start: int) -> None:
        if self.group is not None:
            raise self._error(start, "brackets do not nest")
        self.group, self.opened = [], start

    def _close(self, start: int) -> None:
        if not self.group:
            problem = "')' closes nothing" if self.group is None else "'()' names no factor; write 1"
            raise self._error(start, problem)
        self.sides[-1][-1].append(tuple(self.group))
        self.group = None

    def pattern(self, end: int) -> Pattern:
        """The pattern, after the last character."""
        if self.group is not None:
            raise self._error(self.opened, "this bracket is not closed")
        if len(self.sides) != 2:
            raise self._error(end, "expected '->' and the results")
        operands, results = (tuple(tuple(dims) for dims in side) for side in self.sides)
        return Pattern(operands, results, frozenset(self.unsharded))

    def _error(self, position: int, problem: str) -> NotationError:
        return NotationError.at(self.text, position, problem)


def factors_of(
    pattern: Pattern, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]], **more
) -> Factors:
    """The factors of a call with these shapes. A dim of size one broadcasts: it has no factor of a larger size.

    Example:
        >>> factors_of(parse("mk,kn->mn"), [(2, 3), (3, 4)], [(2, 4)]).operands
        (('m', 'k'), ('k', 'n'))
    """
    shapes = [*operand_shapes, *result_shapes]
    sides = [*pattern.operands, *pattern.results]
    if len(shapes) != len(sides):
        raise NotationError(f"the rule names {len(sides)} tensors, the call has {len(shapes)}")
    expanded = [_expand(dims, len(shape)) for dims, shape in zip(sides, shapes, strict=True)]
    sizes: dict[str, int] = {}
    for dims, shape in zip(expanded, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1:
                sizes[dim[0]] = max(sizes.get(dim[0], 0), size)
    named = [
        tuple(_major(dim, size, sizes) for dim, size in zip(dims, shape, strict=True))
        for dims, shape in zip(expanded, shapes, strict=True)
    ]
    split = len(operand_shapes)
    return Factors(tuple(named[:split]), tuple(named[split:]), pattern.unsharded, **more)


def _expand(dims: Sequence[tuple[str, ...]], ndim: int) -> list[tuple[str, ...]]:
    """The dims with '...' replaced by as many numbered factors as the tensor has left, counted from the right."""
    if ELLIPSIS not in dims:
        if len(dims) != ndim:
            raise NotationError(f"the rule names {len(dims)} dims, the tensor has {ndim}")
        return list(dims)
    at = list(dims).index(ELLIPSIS)
    extra = ndim - (len(dims) - 1)
    if extra < 0:
        raise NotationError(f"the rule names at least {len(dims) - 1} dims, the tensor has {ndim}")
    return [*dims[:at], *((f"...{i}",) for i in reversed(range(extra))), *dims[at + 1 :]]


def _major(dim: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> Dim:
    """The factor by which a dim may be sharded: the major one of a compound, none of a broadcast one."""
    if not dim or (size == 1 and sizes.get(dim[0], 1) != 1):
        return None
    return dim[0]


# ---------------------------------------------------------------- the engine


def candidates(factors: Factors, given: Sequence[Placement] | None = None) -> tuple[Row, ...]:
    """The rows of one axis: one for each sharded factor, the Partial rows, and the replicated row.

    Args:
        factors: the rule for the call.
        given: the current placements of the operands; strided and zigzag ones among them are offered too.

    Example:
        >>> mm = Factors((("m", "k"), ("k", "n")), (("m", "n"),), linear=((0,), (1,)))
        >>> for row in candidates(mm):
        ...     print(row.inputs, row.outputs)
        (Shard(0), Replicate()) (Shard(0),)
        (Shard(1), Shard(0)) (Partial(sum),)
        (Replicate(), Shard(1)) (Shard(1),)
        (Partial(sum), Replicate()) (Partial(sum),)
        (Replicate(), Partial(sum)) (Partial(sum),)
        (Replicate(), Replicate()) (Replicate(),)
    """
    return _candidates(factors, tuple(given or ()))


@lru_cache(maxsize=8192)  # factors have no sizes: a new shape finds its rows in the cache
def _candidates(factors: Factors, given: tuple[Placement, ...]) -> tuple[Row, ...]:
    rows = [row for name in factors.names for row in _sharded(factors, name, given)]
    rows.extend(_grouped(factors, given))
    rows.extend(_partial(factors, given))
    rows.extend(row for row in factors.rows if not _shards_barred(factors, row))
    rows.append(Row((REPLICATE,) * len(factors.operands), (REPLICATE,) * len(factors.results)))
    return tuple(rows)


def _shards_barred(factors: Factors, row: Row) -> bool:
    """Whether a row of `rows` shards a factor that the call cannot shard."""
    return bool(factors.barred) and any(
        isinstance(placement, AnyShard) and dims[placement.dim] in factors.barred
        for dims, placement in zip(factors.operands, row.inputs, strict=True)
    )


def _sharded(factors: Factors, name: str, given: Sequence[Placement]) -> Iterable[Row]:
    if name in factors.unsharded or name in factors.barred or not any(name in dims for dims in factors.operands):
        return
    splits: list[AnyShard] = [Shard(0)]  # placements for the dim, written as dim 0
    if name in factors.even or name in factors.plain:  # even shards may still be uneven in each row
        given = ()
    for dims, placement in zip(factors.operands, given, strict=False):
        if isinstance(placement, AnyShard) and placement.dim < len(dims) and dims[placement.dim] == name:
            splits.append(placement.on_dim(0))
    depend = [dims for i, dims in enumerate(factors.results) if (name, i) not in factors.untouched]
    contracted = name in factors.summed or not any(name in dims for dims in depend)
    kind = factors.reduce.get(name, "sum")
    reduction = MaskPartial() if kind == "mask" else Partial(kind)
    if name in factors.exchanged:
        others = reduction if name in factors.summed else REPLICATE
        outputs = tuple(_shard(dims, name, splits[0]) if name in dims else others for dims in factors.results)
        yield Row(tuple(_shard(dims, name, splits[0]) for dims in factors.operands), outputs)
        if name in factors.reduce:
            for split in dict.fromkeys(splits):
                inputs = tuple(_shard(dims, name, split) for dims in factors.operands)
                yield Row(inputs, (reduction,) * len(factors.results))
        return
    for split in dict.fromkeys(splits):
        inputs = [_shard(dims, name, split) for dims in factors.operands]
        for operand in factors.additive if contracted else ():
            if inputs[operand] is REPLICATE:
                inputs[operand] = reduction
        outputs = tuple(
            _shard(dims, name, split) if name in dims else REPLICATE if (name, i) in factors.untouched else reduction
            for i, dims in enumerate(factors.results)
        )
        if contracted or all(name in dims for dims in depend):
            yield Row(tuple(inputs), outputs)


def _grouped(factors: Factors, given: Sequence[Placement]) -> Iterable[Row]:
    """The row in which each rank has the rows of its groups, if rows and ends of groups are `Ragged` already."""
    if factors.grouped is None or not given:
        return
    name, group, at = factors.grouped
    ends = given[at]
    rows = {
        placement.on_dim(0)
        for dims, placement in zip(factors.operands, given, strict=True)
        if name in dims and isinstance(placement, Ragged) and placement.dim == dims.index(name)
    }
    if len(rows) != 1 or not isinstance(ends, Ragged) or name in factors.barred or name in factors.plain:
        return
    (split,) = rows
    groups = Shard(0) if ends.sizes == _chunked(sum(ends.sizes), len(ends.sizes)) else ends
    splits = ((name, split), (group, groups))

    def placed(dims: Sequence[Dim]) -> Placement:
        return next((own.on_dim(dims.index(factor)) for factor, own in splits if factor in dims), REPLICATE)

    inputs = [placed(dims) for dims in factors.operands]
    inputs[at] = ends
    yield Row(tuple(inputs), tuple(placed(dims) for dims in factors.results))


def _chunked(size: int, parts: int) -> tuple[int, ...]:
    """The sizes of the parts of `torch.chunk`."""
    chunk = -(-size // parts)
    return tuple([max(0, min(chunk, size - part * chunk)) for part in range(parts)])


def _shard(dims: Sequence[Dim], name: str, split: AnyShard) -> Placement:
    return split.on_dim(dims.index(name)) if name in dims else REPLICATE


def _partial(factors: Factors, given: Sequence[Placement]) -> Iterable[Row]:
    operands, results = range(len(factors.operands)), len(factors.results)
    ops = [p for p in dict.fromkeys(given) if isinstance(p, Partial)] or [Partial()]
    for partial in ops:
        if factors.moves:
            yield Row((partial,) * len(factors.operands), (partial,) * results)
        elif partial.linear:
            for group in factors.linear:
                if max(group) >= len(factors.operands):  # an operand may be a Python number
                    continue
                inputs = tuple(partial if i in group else REPLICATE for i in operands)
                # adding elements of one or more operands does not keep a mask
                masked = factors.keeps_zero and len(group) == 1
                passed = Partial() if isinstance(partial, MaskPartial) and not masked else partial
                yield Row(inputs, (passed,) * results)
            if isinstance(partial, MaskPartial) and factors.keeps_zero and len(factors.operands) == 1:
                yield Row((partial,), (partial,) * results)
        elif factors.monotone and partial.reduce_op in ("min", "max") and len(factors.operands) == 1:
            flipped = {"min": "max", "max": "min"}[partial.reduce_op]
            yield Row((partial,), (Partial(partial.reduce_op if factors.monotone > 0 else flipped),) * results)
