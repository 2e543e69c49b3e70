"""Fills blocks with the kernel of philox.cu: its arguments, its compile-time constants, and its launches."""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.core.layout import Block
from shardwise.rng.block_geometry import Extent, extents_of
from shardwise.rng.cuda.nvrtc import BLOCK, Kernel, compile_kernel
from shardwise.rng.cuda.torch_kernels import SCALARS, FillKernel, TorchLaunch
from shardwise.rng.cuda.work_sharing import block_launch

__all__ = ["BlockFill", "fill_part", "threads_of"]

_SOURCE = Path(__file__).with_name("philox.cu")


class BlockFill(NamedTuple):
    """A block of a tensor of `shape`, and torch's kernel and launches for that tensor."""

    shape: tuple[int, ...]
    block: Block
    kernel_model: FillKernel
    launches: tuple[TorchLaunch, ...]
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
    """A prepared launch; only the generator's state and the output memory are missing."""

    kernel: Kernel
    threads: int
    fill: _Fill
    calls: int
    dims: ctypes.Array[ctypes.c_uint64]
    runs: torch.Tensor  # keeps alive the memory that `fill` points to


def fill_part(part: BlockFill, seed: int, counter: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The block, drawn from `seed`; the tensor starts at `counter`. Written into `out`, contiguous, if given."""
    if out is None:
        out = torch.empty(part.block.shape, dtype=part.kernel_model.dtype, device=part.device)
    for launch in _launches(part):
        fill = _Fill.from_buffer_copy(launch.fill)  # another thread may use the same launch
        fill.out, fill.seed, fill.counter = out.data_ptr(), seed, counter + launch.calls
        launch.kernel.launch(launch.threads, (fill, launch.dims))
    return out


@lru_cache(maxsize=1024)
def _launches(part: BlockFill) -> tuple[_Launch, ...]:
    """One launch for each launch of torch that touches the block."""
    kernel_model, extents = part.kernel_model, extents_of(part.shape, part.block)
    runs = _table(extents, part.device)
    launches = []
    for torch_launch in part.launches:
        plan = block_launch(extents, torch_launch, kernel_model.values, kernel_model.vector, threads_of(part.device))
        if plan is None:
            continue
        kernel = _kernel(kernel_model.kernel, _form(extents, plan.shared), part.device)
        numbers = (*kernel_model.numbers, kernel_model.range, kernel_model.low, runs.data_ptr())
        fill = _Fill(None, 0, 0, torch_launch.start, *plan[2:], *numbers)
        launches.append(_Launch(kernel, plan.threads, fill, torch_launch.calls, _dims(extents), runs))
    return tuple(launches)


def _dims(extents: tuple[Extent, ...]) -> ctypes.Array[ctypes.c_uint64]:
    """The kernel's second argument: size, stride, start, number of runs and their offset in the table, for each dim."""
    fields: list[int] = []
    table = 0
    for extent in extents:
        fields += [extent.size, extent.stride, extent.runs[0].start, len(extent.runs), table]
        table += 2 * len(extent.runs) if len(extent.runs) > 1 else 0
    return (ctypes.c_uint64 * len(fields))(*fields)


@lru_cache(maxsize=256)
def _table(extents: tuple[Extent, ...], device: torch.device) -> torch.Tensor:
    """For each dim with several runs: their starts in the block, then the offsets from there to global indices."""
    table: list[int] = []
    for extent in extents:
        if len(extent.runs) > 1:
            begins = list(itertools.accumulate((run.length for run in extent.runs[:-1]), initial=0))
            table += begins + [run.start - begin for run, begin in zip(extent.runs, begins, strict=True)]
    return torch.tensor(table, dtype=torch.int64, device=device)


def _form(extents: tuple[Extent, ...], shared: int) -> tuple[tuple[str, object], ...]:
    """The compile-time constants that depend on the block."""
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
    """The number of threads that torch starts for a large tensor. For a small one, at least one for each element."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK) * BLOCK
