"""Sorting, searching and counting: the dim that is sorted is whole; what is counted in parts is added up. Pure."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.core.spec import TensorMeta
from shardwise.rules.dims import kept, names, wrapped
from shardwise.rules.notation import Dim, Factors
from shardwise.rules.pointwise import pointwise
from shardwise.rules.registry import Call, declare_rule, rule

aten = torch.ops.aten


def along_dim(call: Call) -> Factors:
    """The factors of an operator that works along one dim of its only operand and may leave that dim out."""
    ndim = len(call.operands[0].shape)
    at = wrapped(call["dim"], ndim)
    own = tuple(kept(ndim, [at]))
    left = own if len(call.results[0].shape) == ndim else own[:at] + own[at + 1 :]
    return Factors((own,), (left,) * len(call.results))


rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.topk.default)(along_dim)


def search(values: str, boundaries: str) -> Callable[[Call], Factors | None]:
    """The rule of a search: how many boundaries lie before a value is how many lie there in each part, added up."""

    def factors(call: Call) -> Factors | None:
        sequence, wanted = call[boundaries].shape, call[values]
        shape = wanted.shape if isinstance(wanted, TensorMeta) else ()
        places = tuple(f"v{d}" for d in range(len(shape)))
        shared: tuple[Dim, ...] = places[: len(sequence) - 1] if len(sequence) > 1 else ()
        sorter = call.get("sorter")
        if sorter is not None:
            parts = {values: places, boundaries: (*shared, None), "sorter": (*shared, None)}
        else:
            parts = {values: places, boundaries: (*shared, "k")}
        order = (a.name for a in call.op._schema.arguments)
        operands = tuple(parts[name] for name in order if name in parts and isinstance(call[name], TensorMeta))
        return Factors(operands, (places,))

    return factors


rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)(search("self", "sorted_sequence"))
rule(aten.bucketize.Tensor, aten.bucketize.Scalar)(search("self", "boundaries"))


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Factors:
    """Each element against all of the others."""
    own = tuple(names(len(call["elements"].shape)))
    return Factors((own, (None,) * len(call["test_elements"].shape)), (own,))


declare_rule(pointwise(), aten.isin.Tensor_Scalar)


@rule(aten.histc.default, reads=("min", "max"))
def histc(call: Call) -> Factors | None:
    """Counts in bins, added up over the parts; without bounds they come from all of the values."""
    if call["min"] == call["max"]:
        return None
    return Factors((tuple(names(len(call["self"].shape))),), ((None,),))
