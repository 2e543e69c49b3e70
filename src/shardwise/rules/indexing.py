"""Indexing, gather and scatter: indexed dims are not sharded, the others are factors.

In a look-up along a sharded dim every rank reads its local part, with zeros for the rest (a MaskPartial); in a write
along a sharded dim every rank writes to its local part, with a spare slot for the rest. Neither moves the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules import owner_programs
from shardwise.rules.dims import aligned, kept, names, unnamed, wrapped
from shardwise.rules.engine import Dim, Factors, OwnerRow, Row
from shardwise.rules.pointwise import EXTREMA, KINDS, SUMS, alike
from shardwise.rules.registry import Call, rule
from shardwise.rules.slicing import sums_masks
from shardwise.torch_private import assert_async

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
# Operators along one dim whose indices may count from the end.
FROM_END = {aten.index_fill.int_Scalar, aten.index_fill.int_Tensor}


def lookup(operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], dtype: torch.dtype) -> Factors:
    """The factors of a look-up in the first operand along its dim "at".

    If that dim may be sharded, only sums pass: a sum over one axis and an extremum over another do not commute.
    If indices are sharded too, they are exchanged by owner.
    """
    count, everything = len(operands), tuple(operands)
    asked = looked_up(everything, result, [everything[0].index("at")])
    if not sums_masks(dtype):
        return Factors(everything, (result,), frozenset({"at"}), rows=alike(count, (0,)), owned=asked)
    return Factors(everything, (result,), reduce={"at": "mask"}, rows=alike(count, (0,), kinds=SUMS), owned=asked)


def sharded_by(name: Dim, dims: Sequence[Dim]) -> Shard | Replicate:
    """A tensor sharded along its dim of this factor, if it has one."""
    return Shard(dims.index(name)) if name is not None and name in dims else Replicate()


def looked_up(
    operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], dims: Sequence[int]
) -> tuple[OwnerRow, ...]:
    """Rows of a look-up along one of `dims` of the first operand, with the indices and the result sharded alike."""
    names = dict.fromkeys(name for index in operands[1:] for name in index if name and name not in operands[0])
    return tuple(
        OwnerRow(
            Row((Shard(dim), *(sharded_by(name, index) for index in operands[1:])), (sharded_by(name, result),)),
            sent=tuple(range(1, len(operands))),
            received=(0,),
            rounds=2,
        )
        for dim in dims
        for name in names
    )


def written_by_owner(operands: Sequence[tuple[Dim, ...]], name: Dim, dims: Sequence[int]) -> tuple[OwnerRow, ...]:
    """Rows of a write along one of `dims` of the first operand, with indices and values sharded by factor `name`."""
    others = tuple(sharded_by(name, part) for part in operands[1:])
    sent = tuple(i for i, placement in enumerate(others, start=1) if isinstance(placement, Shard))
    return tuple(OwnerRow(Row((Shard(dim), *others), (Shard(dim),)), sent) for dim in dims) if sent else ()


class LocalIndices(NamedTuple):
    """The local part of the indexed dim: runs of the indices up to `size`."""

    dim: int
    runs: tuple[Run, ...]
    size: int


def local_indices_along(dim_of: Callable[[Call], int]) -> Callable[..., Mapping[str, Any]]:
    """The local part of the indexed dim of the first operand, if it is sharded."""

    def localize(
        call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
    ) -> Mapping[str, Any]:
        spec = inputs[0]
        dim = dim_of(call)
        if dim >= spec.ndim or not spec.dim_axes[dim]:
            return {}
        return {"part": LocalIndices(dim, spec.block(coordinate).runs[dim], spec.shape[dim])}

    return localize


def own_dim(call: Call) -> int:
    """The dim argument, counted from the front."""
    return wrapped(call["dim"], len(call.operands[0].shape))


def local_of(index: torch.Tensor, part: LocalIndices, from_end: bool) -> torch.Tensor:
    """The local positions of global indices; -1 for those of other ranks.

    With `from_end`, negative indices count from the end; otherwise they are out of range.
    """
    least = -part.size if from_end else 0
    inside = ((index >= least) & (index < part.size)).all()
    assert_async(inside, f"an index is out of range for a dim of size {part.size}")
    index = torch.where(index < 0, index + part.size, index) if from_end else index
    at, before = torch.full_like(index, -1), 0
    for run in part.runs:
        inside = (index >= run.start) & (index < run.start + run.length)
        at = torch.where(inside, index - run.start + before, at)
        before += run.length
    return at


def by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)


# ---------------------------------------------------------------- advanced indexing


class Indexed(NamedTuple):
    """The factors of advanced indexing: of the tensor ("at" for a single indexed dim), the indices, the result."""

    tensor: tuple[Dim, ...]
    indices: tuple[tuple[Dim, ...], ...]
    taken: tuple[Dim, ...]
    shape: tuple[int, ...]  # of the result
    dims: tuple[int, ...]  # the indexed dims


def indexed(call: Call) -> Indexed | None:
    """The factors of a call with `self` and `indices`; None if an index is a mask."""
    shape, given = call["self"].shape, call["indices"]
    found = [(d, index) for d, index in enumerate(given) if index is not None]
    if not found or any(index.dtype in MASKS for _, index in found):
        return None
    dims = [d for d, _ in found]
    common = torch.broadcast_shapes(*(index.shape for _, index in found))
    places = [f"i{len(common) - k}" for k in range(len(common))]
    alone = "at" if len(dims) == 1 else None
    tensor: list[Dim] = [alone if d in dims else f"d{d}" for d in range(len(shape))]
    indices = tuple(aligned(index.shape, places, common) for _, index in found)
    first = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    rest = [d for d in range(len(shape)) if d not in dims]
    before, after = [d for d in rest if d < first], [d for d in rest if d >= first]
    taken = (*(tensor[d] for d in before), *places, *(tensor[d] for d in after))
    sizes = (*(shape[d] for d in before), *common, *(shape[d] for d in after))
    return Indexed(tuple(tensor), indices, taken, sizes, tuple(dims))


def first_indexed(call: Call) -> int:
    """The first dim that is indexed."""
    return next(d for d, index in enumerate(call["indices"]) if index is not None)


def local_index(
    local: torch.Tensor, indices: Sequence[torch.Tensor | None], *, part: LocalIndices | None = None
) -> torch.Tensor:
    """Advanced indexing; along a sharded dim, of the local part, with zeros for the rest."""
    if part is None:
        return aten.index.Tensor(local, indices)
    (index,) = [i for i in indices if i is not None]
    at, count = local_of(index, part, from_end=True), local.shape[part.dim]
    after = local.shape[part.dim + 1 :]
    if not count:
        return local.new_zeros((*local.shape[: part.dim], *at.shape, *after))
    taken = aten.index.Tensor(local, [None] * part.dim + [at.clamp(min=0)])
    return taken.masked_fill_((at < 0).reshape(*at.shape, *(1,) * len(after)), 0)


@rule(
    aten._unsafe_index.Tensor,
    aten.index.Tensor,
    localize=local_indices_along(first_indexed),
    local_op=local_index,
    program=owner_programs.index,
)
def index(call: Call) -> Factors | None:
    """Elements by indices that broadcast together."""
    found = indexed(call)
    if found is None:
        return None
    operands = (found.tensor, *found.indices)
    if len(found.dims) == 1:
        return lookup(operands, found.taken, call["self"].dtype)
    asked = looked_up(operands, found.taken, found.dims)
    return Factors(operands, (found.taken,), rows=alike(len(operands), (0,)), owned=asked)


def spare_slot(op: Any, in_place: bool = False) -> Callable[..., torch.Tensor]:
    """A writing operator on a shard of the dim that it writes to: values for other ranks go to a spare slot."""

    def write_with_spare_slot(*args: Any, part: LocalIndices | None = None, **kwargs: Any) -> torch.Tensor:
        if part is None:
            return op(*args, **kwargs)
        named = by_name(op, args, kwargs)
        local = named["self"]
        count = local.shape[part.dim]
        from_end = "indices" in named or op in FROM_END

        def moved(index: torch.Tensor) -> torch.Tensor:
            at = local_of(index, part, from_end)
            return torch.where(at < 0, count, at)

        if "indices" in named:
            named["indices"] = [None if i is None else moved(i) for i in named["indices"]]
        else:
            named["index"] = moved(named["index"])
        one = [1 if d == part.dim else size for d, size in enumerate(local.shape)]
        named["self"] = torch.cat([local, local.new_zeros(one)], part.dim)
        written = op(**named).narrow(part.dim, 0, count)
        return local.copy_(written) if in_place else written.contiguous()

    return write_with_spare_slot


def index_put(call: Call) -> Factors | None:
    """Put values at indices. With `accumulate`, ranks may each add a part of the indices."""
    found = indexed(call)
    values = call["values"]
    if found is None or not isinstance(values, TensorMeta):
        return None
    count = len(call.operands)
    if len(values.shape) > len(found.shape):
        return None
    given = aligned(values.shape, found.taken, found.shape)
    operands, pair = (found.tensor, *found.indices, given), (0, count - 1)
    places = [name for name in found.taken if name is not None and name.startswith("i")]
    # the last value at an index wins: ranks must be in the order of the indices
    owned = written_by_owner(operands, places[0], found.dims) if places else ()
    if call["accumulate"]:
        return Factors(operands, (found.tensor,), linear=(pair,), additive=(0,), owned=owned)
    return Factors(
        operands, (found.tensor,), unsharded=frozenset(places), rows=alike(count, pair, kinds=SUMS), owned=owned
    )


def declare_write(
    functional: Any,
    in_place: Any,
    factors: Callable[[Call], Factors | None],
    dim_of: Callable[[Call], int] = own_dim,
    reads: Sequence[str] = (),
    program: Callable[[Any], owner_programs.Program] = owner_programs.scatter,
) -> None:
    """Register the rule of a writing operator and of its in-place form, if it has one."""
    here = local_indices_along(dim_of)
    by_owner = program(functional)
    rule(functional, localize=here, reads=reads, local_op=spare_slot(functional), program=by_owner)(factors)
    aside = spare_slot(functional, in_place=True)

    def local(*args: Any, part: LocalIndices | None = None, **kwargs: Any) -> torch.Tensor:
        return in_place(*args, **kwargs) if part is None else aside(*args, part=part, **kwargs)

    if in_place is not None:
        rule(in_place, localize=here, reads=reads, local_op=local, program=by_owner)(factors)


declare_write(
    aten.index_put.default, aten.index_put_.default, index_put, first_indexed, program=owner_programs.index_put
)
declare_write(
    aten._index_put_impl.default,
    aten._index_put_impl_.default,
    index_put,
    first_indexed,
    program=owner_programs.index_put,
)
declare_write(aten._unsafe_index_put.default, None, index_put, first_indexed, program=owner_programs.index_put)


# ---------------------------------------------------------------- along one dim


def local_lookup(op: Any) -> Callable[..., torch.Tensor]:
    """gather or index_select along a sharded dim: of the local part, with zeros for the rest."""

    def look_up_local(*args: Any, part: LocalIndices | None = None, **kwargs: Any) -> torch.Tensor:
        if part is None:
            return op(*args, **kwargs)
        named = by_name(op, args, kwargs)
        local, index = named["self"], named["index"]
        at, count = local_of(index, part, from_end=False), local.shape[part.dim]
        outside = at < 0
        if op is aten.index_select.default:
            outside = outside.reshape([-1 if d == part.dim else 1 for d in range(local.dim())])
        if not count:
            one = [1 if d == part.dim else size for d, size in enumerate(local.shape)]
            named["self"] = local.new_zeros(one)
        named["index"] = at.clamp(min=0)
        return op(**named).masked_fill_(outside, 0)

    return look_up_local


@rule(
    aten.index_select.default,
    localize=local_indices_along(own_dim),
    local_op=local_lookup(aten.index_select.default),
    program=owner_programs.index_select,
)
def index_select(call: Call) -> Factors:
    """Some indices of a dim."""
    ndim, at = len(call["self"].shape), own_dim(call)
    if not ndim:
        return Factors(((), (None,) * len(call["index"].shape)), ((),), rows=alike(2, (0,)))
    own: list[Dim] = ["at" if d == at else f"d{d}" for d in range(ndim)]
    place: Dim = "k" if call["index"].shape else None
    result = (*own[:at], place, *own[at + 1 :])
    return lookup((tuple(own), (place,) if place else ()), result, call["self"].dtype)


def matching(call: Call, names: Sequence[str], at: int) -> list[Dim] | None:
    """A factor for each dim except `at` that has one size in all tensors; None if their numbers of dims differ."""
    shapes = [call[name].shape for name in names]
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes):
        return None
    first, *others = shapes  # not a set of sizes: symbolic ones have no hash
    return [f"d{d}" if d != at and all(shape[d] == first[d] for shape in others) else None for d in range(ndim)]


@rule(
    aten.gather.default,
    localize=local_indices_along(own_dim),
    local_op=local_lookup(aten.gather.default),
    program=owner_programs.gather,
)
def gather(call: Call) -> Factors:
    """For each index one element along a dim."""
    at = own_dim(call)
    own = matching(call, ("self", "index"), at)
    if not own:
        return unnamed(call, rows=alike(2, (0,)))
    taken = tuple("k" if d == at else name for d, name in enumerate(own))
    own[at] = "at"
    return lookup((tuple(own), taken), taken, call["self"].dtype)


class Write(NamedTuple):
    """How an operator that writes along a dim lets a Partial through.

    Args:
        source: the argument that is written, if it is a tensor.
        adds: whether written values are added: Partial sums are allowed, parts of the source may be added one by one.
        picks: the kinds of Partial that pass because each element of the result is copied from an operand.
        averages: whether Partial sums are allowed, but parts of the source may not be added separately.
    """

    source: str | None = None
    adds: bool = False
    picks: tuple[Partial, ...] = ()
    averages: bool = False


def write_factors(call: Call, kind: Write, own: Sequence[Dim], operands: Sequence[tuple[Dim, ...]], at: int) -> Factors:
    """The factors of a write: `own` of the tensor, with dim `at` unsharded, and those of all operands."""
    count = len(call.operands)
    tensor = tuple("at" if d == at else name for d, name in enumerate(own))
    pair = (0, count - 1) if kind.source else (0,)
    rows = alike(count, pair, kinds=kind.picks)
    unsharded = frozenset() if kind.adds else frozenset({"k"})
    linear = (pair,) if kind.adds or kind.averages else ()
    additive = (0,) if kind.adds else ()
    owned = written_by_owner((tensor, *operands), "k", [at])
    return Factors((tensor, *operands), (tensor,), unsharded, linear=linear, additive=additive, rows=rows, owned=owned)


def scatter_kind(call: Call) -> Write:
    """How a scatter combines values with those of the tensor."""
    name, reduce = call.op._schema.name, call.get("reduce")
    source = "src" if isinstance(call.get("src"), TensorMeta) else None
    if name.startswith("aten::scatter_add") or (source and reduce in ("add", "sum")):
        return Write(source, adds=reduce != "sum" or call["include_self"], averages=True)
    if reduce == "mean":
        return Write(source, averages=call["self"].dtype.is_floating_point)
    if reduce is None:
        return Write(source, picks=SUMS if source else kinds_of(call["value"]))
    return Write(source)


def kinds_of(value: Any) -> tuple[Partial, ...]:
    """The kinds of Partial that reduce `value` on every rank to `value`."""
    return KINDS if value == 0 else EXTREMA


def scatter(call: Call) -> Factors:
    """Put values at indices along a dim. Other dims are factors if all operands have the same size there."""
    at, kind = own_dim(call), scatter_kind(call)
    own = matching(call, ("self", "index", *((kind.source,) if kind.source else ())), at)
    if not own:
        return unnamed(call)
    same_length = kind.source is None or call[kind.source].shape[at] == call["index"].shape[at]
    part = tuple(("k" if same_length else None) if d == at else name for d, name in enumerate(own))
    return write_factors(call, kind, own, (part,) * (len(call.operands) - 1), at)


def index_write(kind: Write) -> Callable[[Call], Factors]:
    """The rule of an operator that writes slices along a dim at a one-dimensional index."""

    def factors(call: Call) -> Factors:
        at, ndim = own_dim(call), len(call["self"].shape)
        chosen = kind
        if call.get("value") is not None and not isinstance(call["value"], TensorMeta):
            chosen = Write(picks=kinds_of(call["value"]))
        if not ndim or not call["index"].shape or (kind.source and len(call[kind.source].shape) not in (0, ndim)):
            return unnamed(call)
        own = kept(ndim, [at])
        source: list[tuple[Dim, ...]] = []
        if chosen.source:
            scalar = not call[chosen.source].shape
            source.append(() if scalar else tuple("k" if d == at else name for d, name in enumerate(own)))
        return write_factors(call, chosen, own, (("k",), *source), at)

    return factors


for overload, read in (("src", ()), ("value", ("value",)), ("reduce", ()), ("value_reduce", ("value",))):
    declare_write(getattr(aten.scatter, overload), getattr(aten.scatter_, overload), scatter, reads=read)
declare_write(aten.scatter_add.default, aten.scatter_add_.default, scatter)
declare_write(aten.scatter_reduce.two, aten.scatter_reduce_.two, scatter)
by_rows = owner_programs.index_write
declare_write(aten.index_add.default, aten.index_add_.default, index_write(Write("source", adds=True)), program=by_rows)
declare_write(
    aten.index_copy.default, aten.index_copy_.default, index_write(Write("source", picks=SUMS)), program=by_rows
)
declare_write(aten.index_reduce.default, aten.index_reduce_.default, index_write(Write("source")), program=by_rows)
declare_write(
    aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar, index_write(Write()), reads=("value",), program=by_rows
)
declare_write(
    aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor, index_write(Write("value", picks=SUMS)), program=by_rows
)


# ---------------------------------------------------------------- by flat indices


@rule(aten.take.default)
def take(call: Call) -> Factors:
    """Elements of a tensor by their flat index."""
    taken = tuple(names(len(call["index"].shape)))
    return Factors(((None,) * len(call["self"].shape), taken), (taken,), rows=alike(2, (0,)))
