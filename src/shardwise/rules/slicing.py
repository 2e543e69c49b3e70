"""Select and slice, and their gradients.

A small slice of a sharded dim is a MaskPartial: ranks contribute their rows and zeros elsewhere, and nothing moves. A
longer slice stays sharded, and ranks exchange rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import Run, Segment
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import known_value
from shardwise.rules.dims import kept, moved, names, wrapped
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, Rows, rule

aten = torch.ops.aten


def sums_masks(dtype: torch.dtype) -> bool:
    """Whether parts of this dtype can be added up by a collective."""
    return dtype is not torch.bool and (dtype.itemsize > 1 or not dtype.is_floating_point)


def contributed(own: Sequence[str], result: Sequence[Dim], dim: int, masked: bool) -> Factors:
    """The factors of taking a part of `dim`; `masked` if each rank may contribute its part of a sharded one.

    Then only sums pass: a sum over one axis and an extremum over another do not commute.
    """
    if not masked:
        return moved(own, result, unsharded=frozenset({own[dim]}))
    return Factors((tuple(own),), (tuple(result),), reduce={own[dim]: "mask"}, linear=((0,),), keeps_zero=True)


def runs_along(spec: DTensorSpec, dim: int, coordinate: Coordinate) -> tuple[Run, ...]:
    """The runs of global indices of a dim on the rank at `coordinate`; one run of all if it is not sharded."""
    return spec.block(coordinate).runs[dim]


def local_index(runs: Sequence[Run], index: int) -> int | None:
    """The local position of a global index on a rank with these runs; None if the rank lacks it."""
    at = 0
    for run in runs:
        if run.start <= index < run.start + run.length:
            return at + index - run.start
        at += run.length
    return None


def where_selected(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The selected local index, if any, and whether the result is a MaskPartial."""
    spec = inputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    index = call["index"] % spec.shape[dim] if spec.shape[dim] else call["index"]
    if not spec.dim_axes[dim]:
        return {"index": index}
    return {"index": local_index(runs_along(spec, dim, coordinate), index), "masked": True}


def local_select(local: torch.Tensor, dim: int, index: int | None, masked: bool = False) -> torch.Tensor:
    """The selected slice on the rank that has it, zeros on the others."""
    if index is None:
        at = dim % local.dim()
        return local.new_zeros([size for d, size in enumerate(local.shape) if d != at])
    chosen = aten.select.int(local, dim, index)
    return chosen.clone() if masked else chosen


@rule(aten.select.int, aten.select_copy.int, localize=where_selected, local_op=local_select)
def select(call: Call) -> Factors:
    """One index of a dim: of a sharded one, the rank that has it contributes it."""
    ndim = len(call["self"].shape)
    at = wrapped(call["dim"], ndim)
    own = names(ndim)
    return contributed(own, own[:at] + own[at + 1 :], at, sums_masks(call.results[0].dtype))


class Taken(NamedTuple):
    """The indices that a slice takes: a range, of integers that may be symbolic."""

    start: int
    step: int
    length: int


def taken_by_slice(call: Call) -> Taken:
    """The indices that a slice takes, as Python counts them."""
    size = call["self"].shape[wrapped(call["dim"], len(call["self"].shape))]
    start = 0 if call["start"] is None else call["start"]
    return Taken(start if start >= 0 else max(start + size, 0), call["step"], call.results[0].shape[call["dim"]])


def where_sliced(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """For a slice of a sharded dim, the local pieces of it."""
    spec = inputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    if not spec.dim_axes[dim] or call.results[0].shape[dim] == spec.shape[dim]:
        return {}
    taken = taken_by_slice(call)
    return {"pieces": tuple(pieces_of(runs_along(spec, dim, coordinate), taken)), "length": taken.length}


def pieces_of(runs: Sequence[Run], taken: Taken) -> list[tuple[int, int, int]]:
    """The indices taken on a rank with these runs: (first local index, first of the result, number) each."""
    found = []
    at = 0
    for run in runs:
        first = max(0, -(-(run.start - taken.start) // taken.step))
        last = min(taken.length, -(-(run.start + run.length - taken.start) // taken.step))
        if first < last:
            piece = at + taken.start + first * taken.step - run.start, first, last - first
            found.append((known_value(piece[0]), known_value(piece[1]), known_value(piece[2])))
        at += run.length
    return found


def local_slice(
    local: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
    length: int = 0,
) -> torch.Tensor:
    """The slice; along a sharded dim, the local pieces in zeros."""
    if pieces is None:
        return aten.slice.Tensor(local, dim, start, end, step)
    shape = list(local.shape)
    shape[dim] = length
    result = local.new_zeros(shape)
    for at, first, count in pieces:
        result.narrow(dim, first, count).copy_(aten.slice.Tensor(local, dim, at, at + (count - 1) * step + 1, step))
    return result


def rows_sliced(call: Call, dim: int) -> Rows:
    """The rows that a slice takes."""
    taken = taken_by_slice(call)
    return Rows((Segment(0, taken.start, 0, 0, taken.length, step=taken.step),))


@rule(aten.slice.Tensor, aten.slice_copy.Tensor, localize=where_sliced, local_op=local_slice, rows=rows_sliced)
def slice_(call: Call) -> Factors:
    """A slice of a dim. A full slice keeps the layout; a small slice of a sharded dim may be a MaskPartial."""
    shape = call["self"].shape
    at = wrapped(call["dim"], len(shape))
    own = names(len(shape))
    if call.results[0].shape[at] == shape[at]:
        return moved(own, own)
    little = 2 * call.results[0].shape[at] <= shape[at] and sums_masks(call.results[0].dtype)
    return moved(own, own, exchanged=frozenset({own[at]}), reduce={own[at]: "mask"} if little else {})


# ---------------------------------------------------------------- gradients


def local_input_sizes(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local size of the forward's operand."""
    return {"input_sizes": list(outputs[0].local_shape(coordinate))}


def where_put_back(
    call: Call, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], coordinate: Coordinate
) -> Mapping[str, Any]:
    """The local size of the result and, along a sharded dim, the local pieces of the gradient."""
    spec = outputs[0]
    dim = wrapped(call["dim"], spec.ndim)
    found: dict[str, Any] = {"input_sizes": list(spec.local_shape(coordinate))}
    if not spec.dim_axes[dim]:
        return found
    return found | {"pieces": pieces_written(call, spec, dim, call["grad_output"], coordinate)}


def pieces_written(
    call: Call, spec: DTensorSpec, dim: int, source: TensorMeta, coordinate: Coordinate
) -> tuple[tuple[int, int, int], ...]:
    """The local pieces of an index or a slice of a sharded dim that `source` is written to, as in `pieces_of`."""
    size, runs = spec.shape[dim], runs_along(spec, dim, coordinate)
    if "index" in call.arguments:
        at = local_index(runs, call["index"] % size)
        return () if at is None else ((at, 0, 1),)
    start = 0 if call["start"] is None else call["start"]
    first = min(start if start >= 0 else max(start + size, 0), size)
    return tuple(pieces_of(runs, Taken(first, call["step"], source.shape[dim])))


def write_pieces(
    target: torch.Tensor, source: torch.Tensor, dim: int, step: int, pieces: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """Write pieces of `source` to every `step`-th local index of `target`, in place."""
    for at, first, count in pieces:
        place = aten.slice.Tensor(target, dim, at, at + (count - 1) * step + 1, step)
        place.copy_(source.narrow(dim, first, count))
    return target


def local_slice_backward(
    grad: torch.Tensor,
    input_sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """The gradient in zeros; along a sharded dim, its local pieces."""
    if pieces is None:
        return aten.slice_backward.default(grad, input_sizes, dim, start, end, step)
    return write_pieces(grad.new_zeros(input_sizes), grad, dim, step, pieces)


def local_select_backward(
    grad: torch.Tensor,
    input_sizes: Sequence[int],
    dim: int,
    index: int,
    *,
    pieces: Sequence[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """The gradient at one index of zeros; along a sharded dim, only on the rank that has the index."""
    if pieces is None:
        return aten.select_backward.default(grad, input_sizes, dim, index)
    result = grad.new_zeros(input_sizes)
    for at, _, _ in pieces:
        result.select(dim, at).copy_(grad)
    return result


def rows_put_back(call: Call, dim: int) -> Rows:
    """The rows of a gradient in zeros."""
    size, start = call.results[0].shape[dim], call["start"]
    first = start if start >= 0 else max(start + size, 0)
    return Rows((Segment(0, 0, 0, first, call["grad_output"].shape[dim], stride=call["step"]),))


@rule(aten.slice_backward.default, localize=where_put_back, local_op=local_slice_backward, rows=rows_put_back)
def slice_backward(call: Call) -> Factors:
    """Zero except in the slice."""
    shape = call.results[0].shape
    own = names(len(shape))
    return moved(own, own, exchanged=frozenset({own[wrapped(call["dim"], len(shape))]}))


@rule(aten.select_backward.default, localize=where_put_back, local_op=local_select_backward)
def select_backward(call: Call) -> Factors:
    """Zero except at one index of a dim."""
    ndim = len(call.results[0].shape)
    at = wrapped(call["dim"], ndim)
    own = kept(ndim, [at])
    return moved(own[:at] + own[at + 1 :], own)
