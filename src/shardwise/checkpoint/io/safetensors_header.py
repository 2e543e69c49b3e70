"""Headers and indexes of safetensors files: parsed and validated. Data only.

Symbolic links are followed, because model caches consist of them.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.stored_dtypes import SAFETENSORS
from shardwise.checkpoint.io.range_reader import ReadableDirectory, ReadableFile
from shardwise.checkpoint.partition.boxes import full_box
from shardwise.errors import CheckpointError

__all__ = ["FileTensor", "find_tensors", "read_header"]

LONGEST_HEADER = 100 << 20
SINGLE, INDEXED = "model.safetensors", "model.safetensors.index.json"


class FileTensor(NamedTuple):
    """A tensor in a file: its first byte, dtype and shape."""

    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_tensors(source: ReadableDirectory, file: str | None) -> tuple[dict[str, int], dict[str, FileTensor]]:
    """File sizes and all tensors by name, of a directory in the Hugging Face layout or of one file in it."""
    if file is not None or not source.contains(INDEXED):
        single = file or SINGLE
        size, tensors = read_header(source, single)
        return {single: size}, tensors
    named = _weight_map(source)
    files: dict[str, int] = {}
    found: dict[str, FileTensor] = {}
    for file in sorted(set(named.values())):
        files[file], inside = read_header(source, file)
        found |= {name: tensor for name, tensor in inside.items() if named.get(name) == file}
    if lost := sorted(set(named) - set(found)):
        raise CheckpointError(f"{INDEXED} names {', '.join(lost[:8])}, which are not in its files")
    return files, found


def _weight_map(directory: ReadableDirectory) -> dict[str, str]:
    content = _json(directory.read(INDEXED, "the index", links=True), INDEXED)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise CheckpointError(f"{INDEXED} has no weight_map")
    for file in named.values():
        if os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEXED} names the file {file[:80]!r}", hint="files must be in the directory of the index"
            )
    return named


def _json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))  # of bytes, it would accept UTF-16 and UTF-32
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {str(error)[:120]}") from None


def read_header(directory: ReadableDirectory, file: str) -> tuple[int, dict[str, FileTensor]]:
    """Size and tensors of one file; every byte range is inside the file and matches its shape and dtype."""
    opened = directory.open(file, "the header", links=True)
    try:
        size = opened.size
        length = int.from_bytes(_bytes(directory, opened, file, 0, min(8, size)), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise CheckpointError(f"{file} is not a safetensors file: its header size is {length} bytes")
        described = _json(_bytes(directory, opened, file, 8, length), f"the header of {file}")
    finally:
        opened.close()
    if not isinstance(described, dict):
        raise CheckpointError(f"the header of {file} is not an object")
    described.pop("__metadata__", None)
    return size, {name: _tensor(file, name, entry, 8 + length, size) for name, entry in described.items()}


def _bytes(directory: ReadableDirectory, opened: ReadableFile, file: str, start: int, length: int) -> bytes:
    data, at = bytearray(length), 0
    try:
        while at < length and (got := opened.read_into(memoryview(data)[at:], start + at)):
            at += got
    except OSError as error:
        raise directory.error(f"{file} cannot be read ({error.strerror})", "the disk may be damaged") from None
    return bytes(data[:at])


def _tensor(file: str, name: str, entry: Any, data: int, end: int) -> FileTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = tuple(shape)
        known = all(type(n) is int and n >= 0 for n in (*sizes, start, stop)) and len(sizes) <= 64
    except (TypeError, KeyError, ValueError):
        known, dtype, sizes, start, stop = False, None, (), 0, 0
    if not known or not isinstance(dtype, str):
        raise CheckpointError(f"tensor {name} of {file} has an invalid description")
    if dtype not in SAFETENSORS:
        raise CheckpointError(f"tensor {name} of {file} has the dtype {dtype}, which torch does not have")
    if stop - start != full_box(sizes).numel * SAFETENSORS[dtype].itemsize or data + stop > end:
        raise CheckpointError(
            f"tensor {name} of {file}: the bytes {start} to {stop} do not match {list(sizes)} of {dtype}"
        )
    return FileTensor(file, data + start, SAFETENSORS[dtype], sizes)
