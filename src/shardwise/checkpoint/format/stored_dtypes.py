"""The supported dtypes: their names in the index, and in safetensors files. Data only."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DTYPES", "NAMES", "SAFETENSORS", "SafetensorsDtype", "stored_as"]


class SafetensorsDtype(NamedTuple):
    """The representation of a dtype in safetensors files; complex dtypes without a name there are stored as pairs."""

    name: str
    pairs: bool = False


_TABLE: tuple[tuple[torch.dtype, str, SafetensorsDtype], ...] = (
    (torch.float64, "float64", SafetensorsDtype("F64")),
    (torch.float32, "float32", SafetensorsDtype("F32")),
    (torch.float16, "float16", SafetensorsDtype("F16")),
    (torch.bfloat16, "bfloat16", SafetensorsDtype("BF16")),
    (torch.float8_e4m3fn, "float8_e4m3fn", SafetensorsDtype("F8_E4M3")),
    (torch.float8_e5m2, "float8_e5m2", SafetensorsDtype("F8_E5M2")),
    (torch.int64, "int64", SafetensorsDtype("I64")),
    (torch.int32, "int32", SafetensorsDtype("I32")),
    (torch.int16, "int16", SafetensorsDtype("I16")),
    (torch.int8, "int8", SafetensorsDtype("I8")),
    (torch.uint64, "uint64", SafetensorsDtype("U64")),
    (torch.uint32, "uint32", SafetensorsDtype("U32")),
    (torch.uint16, "uint16", SafetensorsDtype("U16")),
    (torch.uint8, "uint8", SafetensorsDtype("U8")),
    (torch.bool, "bool", SafetensorsDtype("BOOL")),
    (torch.complex64, "complex64", SafetensorsDtype("C64")),
    (torch.complex128, "complex128", SafetensorsDtype("F64", pairs=True)),
    (torch.complex32, "complex32", SafetensorsDtype("F16", pairs=True)),
)

NAMES: dict[torch.dtype, str] = {dtype: name for dtype, name, _ in _TABLE}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name, _ in _TABLE}
_STORED: dict[torch.dtype, SafetensorsDtype] = {dtype: stored for dtype, _, stored in _TABLE}
SAFETENSORS: dict[str, torch.dtype] = {stored.name: dtype for dtype, _, stored in _TABLE if not stored.pairs}


def stored_as(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, list[int]]:
    """The dtype name and the sizes of a block in the header of a safetensors file.

    Example:
        >>> stored_as(torch.bfloat16, (2, 3)), stored_as(torch.complex128, (2, 3))
        (('BF16', [2, 3]), ('F64', [2, 3, 2]))
    """
    stored = _STORED[dtype]
    return stored.name, [*sizes, 2] if stored.pairs else list(sizes)
