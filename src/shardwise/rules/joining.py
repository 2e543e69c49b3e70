"""Several tensors put into one: cat, stack, and those that replace a part of a tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.notation import Dim, Factors
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten


def together(operands: Sequence[tuple[Dim, ...]], result: tuple[Dim, ...], fit: bool = True) -> Factors:
    """The factors of several operands whose elements are put into one result: they may be Partial, all alike."""
    return Factors(tuple(operands), (result,), moves=fit)


def same_dtype(call: Call) -> bool:
    """Whether all tensors of a call are of one dtype, so that nothing is cast on the way."""
    return all(m.dtype is call.results[0].dtype for m in call.operands)


@rule(aten.cat.default)
def cat(call: Call) -> Factors:
    """Tensors one after the other along a dim; old-style empty ones of one dim are left out by torch too."""
    ndim = len(call.results[0].shape)
    own = tuple(kept(ndim, [wrapped(call["dim"], ndim)]))
    operands = tuple(own if len(m.shape) == ndim else (None,) * len(m.shape) for m in call.operands)
    return together(operands, own, same_dtype(call))


@rule(aten.stack.default, aten._stack.default)
def stack(call: Call) -> Factors:
    """Tensors along a new dim."""
    own = names(len(call.operands[0].shape))
    at = wrapped(call["dim"], len(own) + 1)
    result = (*own[:at], None, *own[at:])
    return together((tuple(own),) * len(call.operands), result, same_dtype(call))


# ---------------------------------------------------------------- a part replaced


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Factors:
    """A tensor with some indices of a dim replaced."""
    ndim = len(call["self"].shape)
    own = tuple(kept(ndim, [wrapped(call["dim"], ndim)]))
    return together((own, own), own)


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
