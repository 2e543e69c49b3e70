"""Matrix products: einsum strings. An addend of a product must be Partial if the product is."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.placement import norm_of
from shardwise.rules.dims import aligned
from shardwise.rules.engine import EACH_ALONE, FIRST, Factors, parse
from shardwise.rules.registry import Call, pattern_factors, pattern_rule, rule

aten = torch.ops.aten

SCALES = {"alpha": cmath.isfinite, "beta": cmath.isfinite}


def added(first: str, second: str, result: str) -> Callable[[Call], Factors]:
    """The rule of `self + first @ second`, where self broadcasts to the result."""

    def factors(call: Call) -> Factors:
        own = aligned(call["self"].shape, result, call.results[0].shape)
        # on an empty matrix addmv gives the shape of self, and integers times a fractional beta are refused
        integers = not (call.results[0].dtype.is_floating_point or call.results[0].dtype.is_complex)
        nonempty = frozenset(first if integers or (result == "m" and own != ("m",)) else "")
        factors = Factors((own, tuple(first), tuple(second)), (tuple(result),), nonempty=nonempty)
        if not (cmath.isfinite(call["alpha"]) and cmath.isfinite(call["beta"])):  # addends inf and -inf, 0 times inf
            return replace(factors, unsharded=frozenset(first) - frozenset(result))
        return replace(factors, linear=((0, 1), (0, 2)), additive=(0,))

    return factors


for text, ops in {
    "mk,kn->mn": (aten.mm.default, aten.mm.dtype, aten._int_mm.default),
    "bmk,bkn->bmn": (aten.bmm.default, aten.bmm.dtype),
    "mk,k->m": (aten.mv.default,),
    "k,k->": (aten.dot.default, aten.vdot.default),
    "m,n->mn": (aten.ger.default, aten.outer.default),
}.items():
    pattern_rule(text, *ops, linear=EACH_ALONE)

for strings, ops in {
    ("mk", "kn", "mn"): (aten.addmm.default, aten.addmm.dtype, aten.addmm_.default),
    ("bmk", "bkn", "bmn"): (aten.baddbmm.default, aten.baddbmm.dtype, aten.baddbmm_.default),
    ("bmk", "bkn", "mn"): (aten.addbmm.default,),
    ("mk", "k", "m"): (aten.addmv.default, aten.addmv_.default),
    ("m", "n", "mn"): (aten.addr.default, aten.addr_.default),
}.items():
    rule(*ops, reads=SCALES)(added(*strings))


@rule(aten.addbmm_.default, reads=SCALES, meta_op=aten.addbmm.default)
def addbmm_in_place(call: Call) -> Factors | None:
    """Products of a batch added to `self`, if `self` has the shape of the result."""
    return None if call["self"].shape != call.results[0].shape else added("bmk", "bkn", "mn")(call)


@rule(aten._addmm_activation.default)
def addmm_activation(call: Call) -> Factors:
    """An activation of `self + mat1 @ mat2`: the contracted dim must not be sharded."""
    own = aligned(call["self"].shape, "mn", call.results[0].shape)
    return Factors((own, ("m", "k"), ("k", "n")), (("m", "n"),), unsharded=frozenset("k"))


@rule(aten._trilinear.default)
def trilinear(call: Call) -> Factors:
    """The product of three tensors, expanded by dims of size one, summed over some dims."""
    operands, expands = call.operands, (call["expand1"], call["expand2"], call["expand3"])
    ndim = len(operands[0].shape) + len(expands[0])
    kept = [[d for d in range(ndim) if d not in expand] for expand in expands]
    sizes = [max(m.shape[at.index(d)] for m, at in zip(operands, kept, strict=True) if d in at) for d in range(ndim)]
    named = tuple(
        tuple(f"d{d}" if size == sizes[d] else None for d, size in zip(at, m.shape, strict=True))
        for m, at in zip(operands, kept, strict=True)
    )
    result = tuple(f"d{d}" for d in range(ndim) if d not in call["sumdim"])
    return Factors(named, (result,), linear=((0,), (1,), (2,)))


# ---------------------------------------------------------------- distances: norms of differences

CDIST = parse("... m k, ... n k -> ... m n")
CDIST_BACKWARD = parse("... m n, ... m k, ... n k, ... m n -> ... m k")


def distances(order: float) -> dict[str, Any]:
    """The reduction that combines distances over parts of the vectors."""
    kind = {0: "sum", 1: "sum", math.inf: "max"}.get(order) or norm_of(order)
    return {"reduce": {"k": kind}, "nonempty": frozenset("k")}


@rule(aten._cdist_forward.default, reads=["p"])
def cdist(call: Call) -> Factors:
    """Distances of all pairs of vectors, whose elements may be sharded."""
    return replace(pattern_factors(CDIST, call), **distances(call["p"]))


@rule(aten._euclidean_dist.default)
def euclidean_dist(call: Call) -> Factors:
    """Euclidean distances of all pairs of vectors."""
    return replace(pattern_factors(CDIST, call), **distances(2))


@rule(aten._cdist_backward.default)
def cdist_backward(call: Call) -> Factors:
    """The gradient of the first vectors, element by element, given the full distances."""
    factors = pattern_factors(CDIST_BACKWARD, call, linear=FIRST)
    # on empty tensors the kernel returns the shape before broadcasting
    broadcasts = call["x1"].shape != call.results[0].shape
    return replace(factors, nonempty=frozenset(factors.names if broadcasts else "k"))


@rule(aten._pdist_forward.default, reads=["p"], local_op=lambda x, *p: aten._pdist_forward.default(x.contiguous(), *p))
def pdist(call: Call) -> Factors:
    """Distances of all pairs of rows of one matrix."""
    return Factors(((None, "k"),), ((None,),), **distances(call["p"]))


def pdist_gradient(grad: torch.Tensor, x: torch.Tensor, p: float, distance: torch.Tensor) -> torch.Tensor:
    """The gradient of `pdist` on locals; the kernel needs contiguous rows."""
    return aten._pdist_backward.default(grad.contiguous(), x.contiguous(), p, distance.contiguous())


@rule(aten._pdist_backward.default, local_op=pdist_gradient)
def pdist_backward(call: Call) -> Factors:
    """The gradient of the matrix, element by element, given the full distances."""
    operands = (None,), (None, "k"), (None,)
    return Factors(operands, ((None, "k"),), linear=FIRST, nonempty=frozenset("k"))
