"""Placements, the layout along one mesh axis: shards of several kinds, Replicate, Partial, MaskPartial.

Placements of torch are recognized by their class and field names.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any, ClassVar, Self, SupportsIndex

import torch

from shardwise.core.intern import Interned
from shardwise.core.layout import Division
from shardwise.core.opaque import constant_to_compilers
from shardwise.errors import LayoutError

__all__ = [
    "AnyShard", "MaskPartial", "Owned", "Partial", "Placement", "Ragged", "Replicate", "Shard", "StridedShard",
    "Zigzag", "as_placement", "norm_of", "norm_order",
]  # fmt: skip

REDUCE_OPS: tuple[str, ...] = ("sum", "avg", "min", "max", "product")
NORM = "norm"  # followed by the order: "norm2"


@constant_to_compilers
class Placement(Interned):
    """Base of the placements; see `Shard`, `Replicate` and `Partial`."""

    __slots__ = ("short",)
    short: str  # the notation in layouts: "S0", "R", "P", "P(max)"

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a (plain) `Shard`, of `dim` if given."""
        return False

    def is_replicate(self) -> bool:
        """Whether this is `Replicate()`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a `Partial`, of `reduce_op` if given."""
        return False


@constant_to_compilers
class AnyShard(Placement):
    """Base of the placements that split a dim: `Shard`, `StridedShard`, `Zigzag`, `Ragged`, `Owned`."""

    __slots__ = ("dim",)
    dim: int

    def on_dim(self, dim: int) -> Self:
        """The same kind of split, on another dim."""
        if dim == self.dim:
            return self
        return self._intern(*[dim if name == "dim" else getattr(self, name) for name in self._fields])

    def division(self, parts: int) -> Division:
        """How the dim is cut for this number of ranks."""
        return Division(parts)


@constant_to_compilers
class Shard(AnyShard):
    """Dim `dim` is split over the axis in the manner of `torch.chunk`: ceil-sized blocks, then short or empty ones.

    Args:
        dim: the tensor's dim; negative ones count from the end and are normalized when the tensor is known.

    Example:
        >>> Shard(0) is Shard(0), Shard(1).is_shard(), Shard(1).is_shard(0)
        (True, True, False)
    """

    __slots__ = ()
    _fields = ("dim",)

    def __new__(cls, dim: SupportsIndex) -> Shard:
        return cls._intern(_as_int(dim, "Shard", "dim"))

    def _derive(self) -> None:
        object.__setattr__(self, "short", f"S{self.dim}")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@constant_to_compilers
class StridedShard(AnyShard):
    """Dim `dim` is a flattened pair (`split_factor` x rest) and the minor part, the rest, is split over the axis.

    It is the layout of a `[B, T, D]` tensor sharded on T after a view as `[B*T, D]`: each rank has a part of each of
    the `split_factor` rows. The order in which axes split a dim is the shard order of the spec.

    Args:
        dim: the tensor's dim.
        split_factor: how many rows the dim consists of, in the block that remains after the axes before this one.

    Example:
        >>> StridedShard(0, split_factor=4)
        StridedShard(0, split_factor=4)
    """

    __slots__ = ("split_factor",)
    _fields = ("dim", "split_factor")
    split_factor: int

    def __new__(cls, dim: SupportsIndex, split_factor: SupportsIndex) -> StridedShard:
        return cls._intern(_as_int(dim, "StridedShard", "dim"), _as_rows(split_factor, "StridedShard"))

    def _derive(self) -> None:
        object.__setattr__(self, "short", f"S{self.dim}/{self.split_factor}")

    def division(self, parts: int) -> Division:
        return Division(parts, self.split_factor)

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


@constant_to_compilers
class Zigzag(AnyShard):
    """Dim `dim` is cut into blocks, two for each rank, and a rank holds one from the front and one from the back.

    Of `2 * n` blocks in the manner of `torch.chunk`, rank `r` of `n` holds the blocks `r` and `2 * n - 1 - r`, in this
    order. Under a causal mask every rank then has the same work. Values of operators are those of one device, as with
    any other placement.

    Args:
        dim: the tensor's dim.
        blocks: another assignment: all blocks in the order of the ranks, equally many for each. A rank stores its
            blocks in the order of the tensor.
        split_factor: how many rows the dim consists of, each cut in this way; more than one if dims have been
            flattened.

    Example:
        >>> Zigzag(1), Zigzag(0, blocks=(0, 3, 1, 2))
        (Zigzag(1), Zigzag(0, blocks=(0, 3, 1, 2)))
    """

    __slots__ = ("blocks", "split_factor")
    _fields = ("dim", "blocks", "split_factor")
    blocks: tuple[int, ...] | None
    split_factor: int

    def __new__(
        cls, dim: SupportsIndex, blocks: Iterable[SupportsIndex] | None = None, split_factor: SupportsIndex = 1
    ) -> Zigzag:
        return cls._intern(
            _as_int(dim, "Zigzag", "dim"), _as_blocks(blocks, "Zigzag"), _as_rows(split_factor, "Zigzag")
        )

    def _derive(self) -> None:
        rows = "" if self.split_factor == 1 else f"/{self.split_factor}"
        order = "" if self.blocks is None else f"({','.join(map(str, self.blocks))})"
        object.__setattr__(self, "short", f"Z{self.dim}{rows}{order}")

    def blocks_over(self, ranks: int) -> tuple[int, ...]:
        """The blocks in the order of the ranks, equally many for each.

        Example:
            >>> Zigzag(0).blocks_over(3)
            (0, 5, 1, 4, 2, 3)
        """
        if self.blocks is not None:
            return self.blocks
        return tuple([block for rank in range(ranks) for block in (rank, 2 * ranks - 1 - rank)])

    def division(self, parts: int) -> Division:
        return Division(parts, self.split_factor, self.blocks_over(parts))

    def __repr__(self) -> str:
        order = "" if self.blocks is None else f", blocks={self.blocks}"
        rows = "" if self.split_factor == 1 else f", split_factor={self.split_factor}"
        return f"Zigzag({self.dim}{order}{rows})"


@constant_to_compilers
class Ragged(AnyShard):
    """Dim `dim` is split into parts of given sizes: rank `r` holds the next `sizes[r]` indices, which may be none.

    Used for experts with different numbers of tokens, and for parameters that must not be split inside a block. Values
    of operators are those of one device, as with any other placement.

    Args:
        dim: the tensor's dim.
        sizes: how many indices each rank of the axis holds; together the size of the dim. A tensor of integers, the
            same on every rank, is read: the host waits for its values. Sizes that change from step to step make no
            cache grow.
        blocks: an assignment of blocks to ranks, as that of `Zigzag`: all blocks in the order of the ranks, equally
            many for each. Then `sizes` are those of the blocks, and a rank holds its blocks in the order of the tensor.

    Example:
        >>> Ragged(0, (5, 0, 3)), Ragged(0, (5, 0, 3, 1), blocks=(0, 2, 1, 3))
        (Ragged(0, (5, 0, 3)), Ragged(0, (5, 0, 3, 1), blocks=(0, 2, 1, 3)))
    """

    __slots__ = ("blocks", "sizes")
    _fields = ("dim", "sizes", "blocks")
    sizes: tuple[int, ...]
    blocks: tuple[int, ...] | None
    in_use: ClassVar[bool] = False  # whether any was made: until then no call can have one

    def __new__(cls, dim: SupportsIndex, sizes: Iterable[Any], blocks: Iterable[SupportsIndex] | None = None) -> Ragged:
        Ragged.in_use = True
        kept = tuple(sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes)
        if any(size.__class__ is not int for size in kept):
            kept = tuple([_as_int(size, "Ragged", "size") for size in kept])
        if not kept or min(kept) < 0:
            raise LayoutError(f"Ragged needs sizes of at least 0, got {kept}", hint="as in Ragged(0, (5, 0, 3))")
        order = _as_blocks(blocks, "Ragged")
        if order is not None and len(order) != len(kept):
            raise LayoutError(f"Ragged: {len(kept)} sizes for {len(order)} blocks", hint="give a size for each block")
        return cls._intern(_as_int(dim, "Ragged", "dim"), kept, order)

    @property
    def short(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # not made for each new size
        order = "" if self.blocks is None else f";{','.join(map(str, self.blocks))}"
        return f"S{self.dim}({','.join(map(str, self.sizes))}{order})"

    def division(self, parts: int) -> Division:
        return Division(parts, 1, self.blocks, self.sizes)

    def __repr__(self) -> str:
        order = "" if self.blocks is None else f", blocks={self.blocks}"
        return f"Ragged({self.dim}, {self.sizes}{order})"


@constant_to_compilers
class Owned(AnyShard):
    """One rank of the axis has all of the tensor; on the others dim `dim` is empty.

    Args:
        rank: the coordinate of the owner along the axis.
        dim: the dim that is empty on the other ranks.

    Example:
        >>> Owned(2)
        Owned(2)
    """

    __slots__ = ("rank",)
    _fields = ("rank", "dim")
    rank: int

    def __new__(cls, rank: SupportsIndex, dim: SupportsIndex = 0) -> Owned:
        owner = _as_int(rank, "Owned", "rank")
        if owner < 0:
            raise LayoutError(
                f"Owned needs a rank of at least 0, got {owner}", hint="give the owner's coordinate along the axis"
            )
        return cls._intern(owner, _as_int(dim, "Owned", "dim"))

    def _derive(self) -> None:
        object.__setattr__(self, "short", f"O{self.dim}({self.rank})")

    def division(self, parts: int) -> Division:
        return Division(parts, 1, None, None, self.rank)

    def __repr__(self) -> str:
        return f"Owned({self.rank})" if self.dim == 0 else f"Owned({self.rank}, dim={self.dim})"


@constant_to_compilers
class Replicate(Placement):
    """Every rank along the axis holds the same values.

    Example:
        >>> Replicate() is Replicate()
        True
    """

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return cls._intern()

    def _derive(self) -> None:
        object.__setattr__(self, "short", "R")

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@constant_to_compilers
class Partial(Placement):
    """The value is the reduction of the local tensors along the axis.

    Args:
        reduce_op: "sum", "avg", "min", "max" or "product"; or "norm2", the norm (of this or another
            order) of the local tensors, as in the norm of a sharded tensor.

    Example:
        >>> Partial(), Partial("max"), Partial("max").is_partial("sum")
        (Partial(sum), Partial(max), False)
    """

    __slots__ = ("reduce_op",)
    _fields = ("reduce_op",)
    reduce_op: str

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        if reduce_op not in REDUCE_OPS and norm_order(reduce_op) is None:
            raise LayoutError(f"Partial({reduce_op!r}): unknown reduction", hint=f"one of {', '.join(REDUCE_OPS)}")
        return cls._intern(reduce_op)

    def _derive(self) -> None:
        object.__setattr__(self, "short", "P" if self.reduce_op == "sum" else f"P({self.reduce_op})")

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    @property
    def linear(self) -> bool:
        """Whether the reduction is a linear function of the local tensors (sum and avg)."""
        return self.reduce_op in ("sum", "avg")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


@constant_to_compilers
class MaskPartial(Partial):
    """A `Partial("sum")` in which at most one rank holds each element and the others hold zero there.

    It is the layout of a look-up in a table with sharded rows. Each element has one addend that is not zero, so the
    reduction is exact in every dtype, and operators that map zero to zero may be computed before it.

    Example:
        >>> MaskPartial(), MaskPartial().is_partial("sum")
        (MaskPartial(), True)
    """

    __slots__ = ()
    _fields = ()

    def __new__(cls) -> MaskPartial:
        return cls._intern()

    def _derive(self) -> None:
        object.__setattr__(self, "reduce_op", "sum")
        object.__setattr__(self, "short", "M")

    def __repr__(self) -> str:
        return "MaskPartial()"


REPLICATE = Replicate()


def norm_of(order: float) -> str:
    """The reduction by the norm of a finite order that is not zero.

    Example:
        >>> norm_of(2.0), norm_order("norm2"), norm_order("sum")
        ('norm2', 2.0, None)
    """
    return f"{NORM}{int(order) if order == int(order) else float(order)}"


@functools.cache
def norm_order(reduce_op: str) -> float | None:
    """The order of a reduction by a norm; None for other reductions."""
    try:
        order = float(reduce_op.removeprefix(NORM)) if str(reduce_op).startswith(NORM) else math.nan
    except ValueError:
        return None
    return order if math.isfinite(order) and order else None


def _as_int(value: Any, where: str, what: str) -> int:
    # bool is an int to Python: Shard(True) is a mistake, not Shard(1)
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise LayoutError(f"{where} needs an integer {what}, got {value!r}", hint=f"as in {what}=1")


def _as_blocks(blocks: Iterable[Any] | None, where: str) -> tuple[int, ...] | None:
    order = None if blocks is None else tuple([_as_int(block, where, "block") for block in blocks])
    if order is not None and (not order or sorted(order) != list(range(len(order)))):
        raise LayoutError(
            f"{where} needs each block once, got blocks={order}", hint="a permutation, as in blocks=(0, 3, 1, 2)"
        )
    return order


def _as_rows(split_factor: Any, where: str) -> int:
    factor = _as_int(split_factor, where, "split_factor")
    if factor < 1:
        raise LayoutError(
            f"{where} needs a split_factor of at least 1, got {factor}",
            hint="it counts the rows that the dim consists of; 1 for a dim that is one row",
        )
    return factor


def as_placement(value: object) -> Placement:
    """`value` as a placement: itself, or the translation of a placement of torch.

    These are recognized by the module of their class, so that torch.distributed.tensor need not be imported.

    Example:
        >>> as_placement(Shard(0))
        Shard(0)
    """
    if isinstance(value, Placement):
        return value
    kind = type(value)
    if kind.__module__.startswith("torch.distributed.tensor") or kind.__module__ == "torch._C._distributed":
        given: Any = value
        match kind.__name__:
            case "Shard":
                return Shard(given.dim)
            case "_StridedShard":
                return StridedShard(given.dim, given.split_factor)
            case "Replicate":
                return REPLICATE
            case "Partial":
                return Partial(given.reduce_op)
            case "_MaskPartial" | "MaskPartial":
                raise LayoutError(
                    "torch's mask-partial keeps its mask outside the tensor and cannot be taken over",
                    hint="redistribute the torch tensor to Replicate() or Shard() first",
                )
            case _:
                pass
    raise LayoutError(
        f"{value!r} is not a placement",
        hint="use Shard(dim), Replicate(), Partial(reduce_op), StridedShard(...), Zigzag(dim), Ragged(dim, sizes) or "
        "Owned(rank)",
    )
