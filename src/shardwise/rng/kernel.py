"""Blocks of a random fill by the kernel of philox.cu: what it is told, and what it is compiled for.

Knows nothing of generators; seed and counter are given.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.core.layout import Block
from shardwise.rng.geometry import Extent, extents_of
from shardwise.rng.nvrtc import BLOCK, Kernel, compile_kernel
from shardwise.rng.recipe import SCALARS, Piece, Recipe
from shardwise.rng.sharing import launch_of

__all__ = ["Part", "fill_part", "threads_of"]

_SOURCE = Path(__file__).with_name("philox.cu")


class Part(NamedTuple):
    """A block of a tensor of `shape`, which torch would fill so on the device."""

    shape: tuple[int, ...]
    block: Block
    recipe: Recipe
    pieces: tuple[Piece, ...]
    device: torch.device


class _Fill(ctypes.Structure):
    """The kernel's first argument, field by field."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("counter", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("base", ctypes.c_int64),
        ("spread", ctypes.c_uint64),
        ("slab", ctypes.c_uint64),
        ("inner", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
        ("groups", ctypes.c_uint64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("range", ctypes.c_uint64),
        ("low", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
    )


class _Launch(NamedTuple):
    """A launch for a block, ready but for the state of the generator and the memory to fill."""

    kernel: Kernel
    threads: int
    fill: _Fill
    calls: int
    dims: ctypes.Array[ctypes.c_uint64]
    runs: torch.Tensor  # which `fill` points to


def fill_part(part: Part, seed: int, counter: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The block, drawn from `seed`, where the tensor begins at `counter`; into `out`, contiguous, if there is one."""
    if out is None:
        out = torch.empty(part.block.shape, dtype=part.recipe.dtype, device=part.device)
    for launch in _launches(part):
        fill = _Fill.from_buffer_copy(launch.fill)  # another thread may be about the same draw
        fill.out, fill.seed, fill.counter = out.data_ptr(), seed, counter + launch.calls
        launch.kernel.launch(launch.threads, (fill, launch.dims))
    return out


@lru_cache(maxsize=1024)
def _launches(part: Part) -> tuple[_Launch, ...]:
    """One; more where torch fills the tensor by several; none for an empty block."""
    recipe, extents = part.recipe, extents_of(part.shape, part.block)
    runs = _table(extents, part.device)
    launches = []
    for piece in part.pieces:
        plan = launch_of(extents, piece, recipe.values, recipe.vector, threads_of(part.device))
        if plan is None:
            continue
        kernel = _kernel(recipe.kernel, _form(extents, plan.shared), part.device)
        numbers = (*recipe.numbers, recipe.range, recipe.low, runs.data_ptr())
        fill = _Fill(None, 0, 0, piece.start, *plan[2:], *numbers)
        launches.append(_Launch(kernel, plan.threads, fill, piece.calls, _dims(extents), runs))
    return tuple(launches)


def _dims(extents: tuple[Extent, ...]) -> ctypes.Array[ctypes.c_uint64]:
    """The kernel's second argument: size, stride, start, number of runs and their place in the table, of each dim."""
    fields: list[int] = []
    table = 0
    for extent in extents:
        fields += [extent.size, extent.stride, extent.runs[0].start, len(extent.runs), table]
        table += 2 * len(extent.runs) if len(extent.runs) > 1 else 0
    return (ctypes.c_uint64 * len(fields))(*fields)


@lru_cache(maxsize=256)
def _table(extents: tuple[Extent, ...], device: torch.device) -> torch.Tensor:
    """Of each dim with several runs: where they begin in the block, then what leads from there to the whole tensor."""
    table: list[int] = []
    for extent in extents:
        if len(extent.runs) > 1:
            begins = list(itertools.accumulate((run.length for run in extent.runs[:-1]), initial=0))
            table += begins + [run.start - begin for run, begin in zip(extent.runs, begins, strict=True)]
    return torch.tensor(table, dtype=torch.int64, device=device)


def _form(extents: tuple[Extent, ...], shared: int) -> tuple[tuple[str, object], ...]:
    """What the kernel is told of a block when it is compiled."""
    return (
        ("DIMS", len(extents)),
        ("RUNS", int(any(len(extent.runs) > 1 for extent in extents))),
        ("INDEX", "u64" if math.prod(extent.size for extent in extents) >= 2**31 else "u32"),
        ("SHARED", shared),
    )


@cache
def _kernel(kernel: tuple[object, ...], form: tuple[tuple[str, object], ...], device: torch.device) -> Kernel:
    distribution, dtype, real, values, vector = kernel
    macros = (
        ("DISTRIBUTION", distribution),
        ("SCALAR", SCALARS[dtype]),  # pyright: ignore[reportArgumentType]
        ("REAL", real),
        ("VALUES", values),
        ("VECTOR", vector),
        ("THREADS", f"{threads_of(device)}u"),
        *form,
    )
    return compile_kernel(_SOURCE.read_text(encoding="utf-8"), "fill_block", macros, device)


@cache
def threads_of(device: torch.device) -> int:
    """How many threads torch starts for a large tensor. For a small one it starts at least one for each element."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK) * BLOCK
