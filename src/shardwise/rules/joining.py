"""Several tensors put into one: cat, stack, and those that replace a part of a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Segment
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, Rows, rule
from shardwise.rules.slicing import pieces_written, write_pieces

aten = torch.ops.aten


def joined_factors(
    operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], fit: bool = True, exchanged: Collection[str] = ()
) -> Factors:
    """The factors of operands that are joined into one result. If `fit`, all may have the same Partial."""
    return Factors(tuple(operands), (result,), moves=fit, exchanged=frozenset(exchanged))


def same_dtype(call: Call) -> bool:
    """Whether all tensors of a call have one dtype, so that nothing is cast."""
    return all(m.dtype is call.results[0].dtype for m in call.operands)


def rows_joined(call: Call, dim: int) -> Rows:
    """The rows of the operands one after the other."""
    ndim, at = len(call.results[0].shape), 0
    segments = []
    for i, meta in enumerate(call.operands):
        if len(meta.shape) == ndim:
            segments.append(Segment(i, 0, 0, at, meta.shape[dim]))
            at += meta.shape[dim]
    return Rows(tuple(segments))


@rule(aten.cat.default, rows=rows_joined)
def cat(call: Call) -> Factors:
    """Tensors concatenated along a dim. As in torch, empty tensors of one dim are skipped."""
    ndim = len(call.results[0].shape)
    own = tuple(names(ndim))
    at = wrapped(call["dim"], ndim)
    operands = tuple(own if len(m.shape) == ndim else (None,) * len(m.shape) for m in call.operands)
    return joined_factors(operands, own, same_dtype(call), exchanged={own[at]})


@rule(aten.stack.default, aten._stack.default)
def stack(call: Call) -> Factors:
    """Tensors along a new dim."""
    own = names(len(call.operands[0].shape))
    at = wrapped(call["dim"], len(own) + 1)
    result = (*own[:at], None, *own[at:])
    return joined_factors((tuple(own),) * len(call.operands), result, same_dtype(call))


# ---------------------------------------------------------------- a part replaced


def rows_replaced(call: Call, dim: int) -> Rows:
    """The rows of the second operand in place of some of the first."""
    size, length = call["self"].shape[dim], call["src"].shape[dim]
    start = 0 if call["start"] is None else call["start"]
    start = min(start if start >= 0 else max(start + size, 0), size)
    end = start + length
    segments = (Segment(0, 0, 0, 0, start), Segment(1, 0, 0, start, length), Segment(0, end, 0, end, size - end))
    return Rows(tuple(segment for segment in segments if segment.length))


def where_replaced(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """Which rows of the second operand go to which local rows of a sharded dim; empty if the dim is not sharded."""
    spec = outputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    if not spec.dim_axes[dim]:
        return {}
    return {"pieces": pieces_written(call, spec, dim, call["src"], coordinate)}


def replace_slice(
    local: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """Replace rows; along a sharded dim, the local ones."""
    if pieces is None:
        return aten.slice_scatter.default(local, src, dim, start, end, step)
    return write_pieces(local.clone(), src, dim, step, pieces)


def replace_index(
    local: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    index: int,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """Replace an index; along a sharded dim, only on the rank that has it."""
    if pieces is None:
        return aten.select_scatter.default(local, src, dim, index)
    result = local.clone()
    for at, _, _ in pieces:
        result.select(dim, at).copy_(src)
    return result


@rule(aten.slice_scatter.default, rows=rows_replaced, localize=where_replaced, local_op=replace_slice)
def slice_scatter(call: Call) -> Factors:
    """A tensor with some indices of a dim replaced. With a step, the source is replicated along the dim."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    if call["step"] != 1:
        own, src = tuple(names(ndim)), tuple(kept(ndim, [at]))
        return joined_factors((own, src), own)
    named = tuple(names(ndim))
    return joined_factors((named, named), named, exchanged={named[at]})


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Factors:
    """A tensor with its diagonal replaced."""
    ndim = len(call["self"].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    diagonal = [*(name for d, name in enumerate(own) if d not in gone), None]
    return joined_factors((tuple(own), tuple(diagonal)), tuple(own))


@rule(aten.select_scatter.default, localize=where_replaced, local_op=replace_index)
def select_scatter(call: Call) -> Factors:
    """A tensor with one index of a dim replaced."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = names(ndim)
    return joined_factors((tuple(own), tuple(own[:at] + own[at + 1 :])), tuple(own))
