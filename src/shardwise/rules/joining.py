"""Several tensors put into one: cat, stack, and those that replace a part of a tensor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from shardwise.core.layout import Segment
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, Rows, rule

aten = torch.ops.aten


def together(
    operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], fit: bool = True, exchanged: Collection[str] = ()
) -> Factors:
    """The factors of several operands whose elements are put into one result: they may be Partial, all alike."""
    return Factors(tuple(operands), (result,), moves=fit, exchanged=frozenset(exchanged))


def same_dtype(call: Call) -> bool:
    """Whether all tensors of a call are of one dtype, so that nothing is cast on the way."""
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
    """Tensors one after the other along a dim; old-style empty ones of one dim are left out by torch too."""
    ndim = len(call.results[0].shape)
    own = tuple(names(ndim))
    at = wrapped(call["dim"], ndim)
    operands = tuple(own if len(m.shape) == ndim else (None,) * len(m.shape) for m in call.operands)
    return together(operands, own, same_dtype(call), exchanged={own[at]})


@rule(aten.stack.default, aten._stack.default)
def stack(call: Call) -> Factors:
    """Tensors along a new dim."""
    own = names(len(call.operands[0].shape))
    at = wrapped(call["dim"], len(own) + 1)
    result = (*own[:at], None, *own[at:])
    return together((tuple(own),) * len(call.operands), result, same_dtype(call))


# ---------------------------------------------------------------- a part replaced


def rows_replaced(call: Call, dim: int) -> Rows:
    """The rows of the second operand in place of some of the first."""
    size, length = call["self"].shape[dim], call["src"].shape[dim]
    start = 0 if call["start"] is None else call["start"]
    start = min(start if start >= 0 else max(start + size, 0), size)
    end = start + length
    segments = (Segment(0, 0, 0, 0, start), Segment(1, 0, 0, start, length), Segment(0, end, 0, end, size - end))
    return Rows(tuple(segment for segment in segments if segment.length))


@rule(aten.slice_scatter.default, rows=rows_replaced)
def slice_scatter(call: Call) -> Factors:
    """A tensor with some indices of a dim replaced. Every so many-th would be as many segments, so the dim is whole."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    if call["step"] != 1:
        own = tuple(kept(ndim, [at]))
        return together((own, own), own)
    named = tuple(names(ndim))
    return together((named, named), named, exchanged={named[at]})


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Factors:
    """A tensor with its diagonal replaced."""
    ndim = len(call["self"].shape)
    gone = [wrapped(call["dim1"], ndim), wrapped(call["dim2"], ndim)]
    own = kept(ndim, gone)
    diagonal = [*(name for d, name in enumerate(own) if d not in gone), None]
    return together((tuple(own), tuple(diagonal)), tuple(own))


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Factors:
    """A tensor with one index of a dim replaced."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return together((tuple(own), tuple(own[:at] + own[at + 1 :])), tuple(own))
