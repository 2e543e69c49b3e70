"""The dtypes a checkpoint can hold: their names in the index, and how safetensors files store them. Data only."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DTYPES", "NAMES", "SAFETENSORS", "Stored", "stored_as"]


class Stored(NamedTuple):
    """How a safetensors file holds elements of a dtype: complex numbers it has no name for are pairs."""

    name: str
    pairs: bool = False


_TABLE: tuple[tuple[torch.dtype, str, Stored], ...] = (
    (torch.float64, "float64", Stored("F64")),
    (torch.float32, "float32", Stored("F32")),
    (torch.float16, "float16", Stored("F16")),
    (torch.bfloat16, "bfloat16", Stored("BF16")),
    (torch.float8_e4m3fn, "float8_e4m3fn", Stored("F8_E4M3")),
    (torch.float8_e5m2, "float8_e5m2", Stored("F8_E5M2")),
    (torch.int64, "int64", Stored("I64")),
    (torch.int32, "int32", Stored("I32")),
    (torch.int16, "int16", Stored("I16")),
    (torch.int8, "int8", Stored("I8")),
    (torch.uint64, "uint64", Stored("U64")),
    (torch.uint32, "uint32", Stored("U32")),
    (torch.uint16, "uint16", Stored("U16")),
    (torch.uint8, "uint8", Stored("U8")),
    (torch.bool, "bool", Stored("BOOL")),
    (torch.complex64, "complex64", Stored("C64")),
    (torch.complex128, "complex128", Stored("F64", pairs=True)),
    (torch.complex32, "complex32", Stored("F16", pairs=True)),
)

NAMES: dict[torch.dtype, str] = {dtype: name for dtype, name, _ in _TABLE}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name, _ in _TABLE}
_STORED: dict[torch.dtype, Stored] = {dtype: stored for dtype, _, stored in _TABLE}
SAFETENSORS: dict[str, torch.dtype] = {stored.name: dtype for dtype, _, stored in _TABLE if not stored.pairs}


def stored_as(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, list[int]]:
    """Name and sizes of a block in the header of a safetensors file.

    Example:
        >>> stored_as(torch.bfloat16, (2, 3)), stored_as(torch.complex128, (2, 3))
        (('BF16', [2, 3]), ('F64', [2, 3, 2]))
    """
    stored = _STORED[dtype]
    return stored.name, [*sizes, 2] if stored.pairs else list(sizes)
