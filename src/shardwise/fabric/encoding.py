"""How tensors are encoded for process groups: unchanged, as bytes, wider, as powers, or as ordered integers.

Pure functions on plain tensors. Communicates nothing.
"""

from __future__ import annotations

import torch

from shardwise.core.placement import norm_order
from shardwise.fabric.block_copies import norm_from_powers, powers_of

__all__ = ["CARRIED", "as_carried", "as_reducible", "from_reducible"]

# Dtypes that process groups carry. Others are sent as bytes (copies) or widened (reductions).
CARRIED = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
_WIDENED = {torch.bool: torch.int32, torch.int16: torch.int32}
# Process groups lose a NaN in a minimum or maximum, depending on which rank has it; torch never does. So extrema of
# floats travel as integers in the same order, with NaN as the extreme value.
EXTREMA = ("min", "max")
_ORDERED = {torch.float64: (torch.int64, 63), torch.float32: (torch.int32, 31)}


def as_reducible(local: torch.Tensor, op: str) -> torch.Tensor:
    """`local` as process groups can reduce it: itself, wider, as powers, or as integers that keep its order."""
    order = norm_order(op)
    if order is not None:
        return powers_of(local, order)
    if op not in EXTREMA or not local.is_floating_point():
        wide = _WIDENED.get(local.dtype)
        return local if wide is None else local.to(wide)
    floats = local if local.dtype in _ORDERED else local.float()
    kind, shift = _ORDERED[floats.dtype]
    limits = torch.iinfo(kind)
    bits = floats.contiguous().view(kind)
    ordered = bits ^ ((bits >> shift) & limits.max)
    return ordered.masked_fill_(floats.isnan(), limits.max if op == "max" else limits.min)


def from_reducible(total: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """The reduced value, decoded to the original dtype."""
    order = norm_order(op)
    if order is not None:
        return norm_from_powers(total, order, dtype)
    if op not in EXTREMA or not dtype.is_floating_point:
        return total if total.dtype is dtype else total.to(dtype)
    floats = torch.float64 if dtype is torch.float64 else torch.float32
    kind, shift = _ORDERED[floats]
    return (total ^ ((total >> shift) & torch.iinfo(kind).max)).view(floats).to(dtype)


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as process groups can carry it: itself, or its bytes."""
    return tensor if tensor.dtype in CARRIED else tensor.view(-1).view(torch.uint8)
