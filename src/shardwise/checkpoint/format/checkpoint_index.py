"""The index of a checkpoint: which block of which tensor is where in which file. Written as JSON; validated on reading.

Sizes, products, offsets, overlaps, coverage, file names and dtypes are checked before any memory is allocated, so a
damaged or malicious index cannot request more bytes than the files have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.stored_dtypes import DTYPES, NAMES
from shardwise.checkpoint.partition.boxes import Box, overlapping
from shardwise.errors import CheckpointError

__all__ = [
    "FORMAT",
    "INDEX",
    "VERSION",
    "Index",
    "StoredBlock",
    "StoredTensor",
    "parse_index",
    "saved_at",
    "write_index",
]

FORMAT = "shardwise.checkpoint"
VERSION = 3
BEFORE = (1, 2)  # versions without the time of the save; 2 is with the hosts of files
HEAD = 256  # bytes of an index that contain the time of the save
INDEX = "index.json"
MOST_DIMS = 64
LONGEST_HOST = 255
LARGEST = 2**62  # the largest number allowed: the sum of two is a valid file offset
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_HEAD = '{{"sha256": "{}", "index": '
_SAVED = re.compile(rb'\{"sha256": "[0-9a-f]{64}", "index": \{"format":"[a-z.]+","version":\d+,"saved":(\d{1,19}),')
_HEAD_LENGTH = len(_HEAD.format("0" * 64))
_HINT = "the checkpoint is damaged or was not written by Shardwise; run `shardwise checkpoint verify`"


class StoredBlock(NamedTuple):
    """A box of a tensor: its file, its first byte there, and the checksum of its row-major bytes."""

    box: Box
    file: str
    start: int
    checksum: int


class StoredTensor(NamedTuple):
    """A global tensor and the blocks that make it up."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return sum(block.box.numel for block in self.blocks) * self.dtype.itemsize


class Index(NamedTuple):
    """The index: file sizes, tensors by name, and the nested state that refers to the tensors."""

    files: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    state: Any  # encoded, see state_tree.py
    digest: str = ""  # hash of the index file; distinguishes a checkpoint from one that replaced it
    hosts: Mapping[str, str] = MappingProxyType({})  # of files on disks that hosts do not share; else empty
    saved: int = 0  # when it was written, in nanoseconds since 1970; 0 if it does not say


def write_index(index: Index) -> bytes:
    """The bytes of the index file.

    Example:
        >>> parse_index(write_index(Index({}, {}, {"step": 3}))).state
        {'step': 3}
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "saved": index.saved,
        "state": index.state,
        "tensors": {name: _tensor_data(tensor) for name, tensor in index.tensors.items()},
        "files": {
            name: {"bytes": size} | ({"host": index.hosts[name]} if index.hosts else {})
            for name, size in index.files.items()
        },
    }
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + b"}\n"


def _tensor_data(tensor: StoredTensor) -> dict[str, Any]:
    blocks = [
        {
            "offset": list(block.box.offset),
            "sizes": list(block.box.sizes),
            "file": block.file,
            "start": block.start,
            "checksum": f"{block.checksum:016x}",
        }
        for block in tensor.blocks
    ]
    return {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "blocks": blocks}


# ---------------------------------------------------------------- reading


def parse_index(data: bytes) -> Index:
    """Parse and validate the bytes of an index file."""
    content = _mapping(_parse(data), "the index")
    version = content.get("version")
    if content.get("format") != FORMAT or version not in (*BEFORE, VERSION) or type(version) is not int:
        raise CheckpointError(
            f"the index is of format {str(content.get('format'))[:40]!r}, version {str(version)[:20]}",
            hint=f"this Shardwise reads {FORMAT!r}, versions 1 to {VERSION}",
        )
    times = ("saved",) if version == VERSION else ()
    _keys(content, ("format", "version", *times, "state", "tensors", "files"), "the index")
    saved = _number(content["saved"], "the time of the save") if times else 0
    entries = _mapping(content["files"], "files").items()
    on_disks = version == 2 or (version == VERSION and any("host" in _mapping(entry, name) for name, entry in entries))
    keys = ("bytes", "host") if on_disks else ("bytes",)
    files = {name: _file_size(name, entry, keys) for name, entry in entries}
    hosts = {name: _host(name, entry["host"]) for name, entry in entries} if on_disks else {}
    stored = _mapping(content["tensors"], "tensors").items()
    tensors = {name: _tensor(name, entry, files) for name, entry in stored}
    _check_files(files, tensors)
    return Index(files, tensors, content["state"], hashlib.sha256(data).hexdigest(), hosts, saved)


def saved_at(head: bytes) -> float | None:
    """When a checkpoint was saved, in seconds, by the first bytes of its index; None if they do not say.

    Not verified: it orders checkpoints, and the index of the one that is chosen is verified.
    """
    found = _SAVED.match(head)
    return int(found[1]) / 1e9 if found and int(found[1]) else None


def _parse(data: bytes) -> Any:
    head, body = data[:_HEAD_LENGTH], data[_HEAD_LENGTH:-2]
    if data[-2:] != b"}\n" or head != _HEAD.format(hashlib.sha256(body).hexdigest()).encode():
        raise CheckpointError(f"{INDEX} does not match its checksum", hint=_HINT)
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refused)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} is not JSON: {str(error)[:120]}", hint=_HINT) from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise CheckpointError(f"{INDEX} has a repeated key in one object", hint=_HINT)
    return made


def _refused(constant: str) -> Any:
    raise CheckpointError(f"{INDEX} contains {constant}, which is not JSON", hint=_HINT)


def _mapping(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} in {INDEX} is not an object", hint=_HINT)
    return data


def _keys(data: Any, keys: tuple[str, ...], what: str) -> dict[str, Any]:
    if set(_mapping(data, what)) != set(keys):
        raise CheckpointError(f"{what} in {INDEX} must have the keys {', '.join(keys)}", hint=_HINT)
    return data


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise CheckpointError(f"{what} is {str(value)[:40]}, not a number from 0 to 2**62", hint=_HINT)
    return value


def _numbers(value: Any, count: int | None, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_DIMS or (count is not None and len(value) != count):
        raise CheckpointError(f"{what} is not a list of {'few' if count is None else count} numbers", hint=_HINT)
    return tuple([_number(item, what) for item in value])


def _file_size(name: str, entry: Any, keys: tuple[str, ...]) -> int:
    if not _FILE.fullmatch(name):
        raise CheckpointError(
            f"the index names a file {name[:80]!r}", hint="files must be in its directory, and end in .safetensors"
        )
    return _number(_keys(entry, keys, f"file {name}")["bytes"], f"the size of {name}")


def _host(name: str, host: Any) -> str:
    if not isinstance(host, str) or not host or len(host) > LONGEST_HOST:
        raise CheckpointError(f"the host of {name} is {str(host)[:40]!r}", hint=_HINT)
    return host


def _tensor(name: str, entry: Any, files: Mapping[str, int]) -> StoredTensor:
    what = f"tensor {name}"
    content = _keys(entry, ("dtype", "shape", "blocks"), what)
    dtype = DTYPES.get(content["dtype"]) if isinstance(content["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{what} has an unknown dtype {str(content['dtype'])[:40]!r}", hint=_HINT)
    shape = _numbers(content["shape"], None, f"the shape of {what}")
    if not isinstance(content["blocks"], list):
        raise CheckpointError(f"the blocks of {what} are not a list", hint=_HINT)
    blocks = tuple([_block(what, block, shape, dtype.itemsize, files) for block in content["blocks"]])
    _check_cover(what, shape, [block.box for block in blocks])
    return StoredTensor(name, dtype, shape, blocks)


def _block(what: str, entry: Any, shape: tuple[int, ...], itemsize: int, files: Mapping[str, int]) -> StoredBlock:
    content = _keys(entry, ("offset", "sizes", "file", "start", "checksum"), f"a block of {what}")
    offset = _numbers(content["offset"], len(shape), f"the offset of a block of {what}")
    sizes = _numbers(content["sizes"], len(shape), f"the sizes of a block of {what}")
    file, checksum = content["file"], content["checksum"]
    box = Box(offset, sizes)
    if not all(n and at + n <= size for at, n, size in zip(offset, sizes, shape, strict=True)):
        raise CheckpointError(f"{what}: the block at {offset} of sizes {sizes} is not inside {shape}", hint=_HINT)
    if not isinstance(file, str) or file not in files:
        raise CheckpointError(f"{what}: its block at {offset} is in no file of the checkpoint", hint=_HINT)
    start = _number(content["start"], f"the start of a block of {what}")
    if start + box.numel * itemsize > files[file]:
        raise CheckpointError(f"{what}: the block at {offset} ends after the end of {file}", hint=_HINT)
    if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
        raise CheckpointError(f"{what}: the block at {offset} in {file} has no checksum", hint=_HINT)
    return StoredBlock(box, file, start, int(checksum, 16))


def _check_cover(what: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that each element is in exactly one block: the counts match, and no blocks overlap."""
    numel = 1
    for size in shape:
        numel *= size
    if sum(box.numel for box in boxes) != numel:
        raise CheckpointError(f"{what}: the blocks do not cover the shape {shape}", hint=_HINT)
    pair = overlapping(boxes)
    if pair is not None:
        first, second = (boxes[i].offset for i in pair)
        raise CheckpointError(f"{what}: the blocks at {first} and {second} overlap", hint=_HINT)


def _check_files(files: Mapping[str, int], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that no byte of a file belongs to two blocks, so that the blocks are not larger than the files."""
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in files}
    for tensor in tensors.values():
        for block in tensor.blocks:
            end = block.start + block.box.numel * tensor.dtype.itemsize
            spans[block.file].append((block.start, end, tensor.name))
    for file, blocks in spans.items():
        end_before, name_before = 0, ""
        for start, end, name in sorted(blocks):
            if start < end_before:
                raise CheckpointError(f"tensors {name_before} and {name} overlap in {file}", hint=_HINT)
            end_before, name_before = end, name
