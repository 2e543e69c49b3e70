"""The numbers that one CUDA device would have drawn for a whole tensor, for those who hold blocks of it.

An element's number depends on its index in the whole tensor and on nothing drawn before it, so each block costs its own
elements and no more. Knows nothing of meshes or DTensors.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.core.layout import Block, Run
from shardwise.rng.draw import Draw
from shardwise.rng.geometry import Extent, extents_of
from shardwise.rng.nvrtc import BLOCK, CompilerError, Kernel, compile_kernel
from shardwise.rng.recipe import DROPOUT, SCALARS, Piece, Recipe, pieces_of, probe_numbers, recipe_of
from shardwise.rng.sharing import launch_of

__all__ = ["draw", "reproduces"]

_SOURCE = Path(__file__).with_name("philox.cu")
_MASK = 2**64 - 1


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
        ("groups", ctypes.c_uint64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("range", ctypes.c_uint64),
        ("low", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
    )


def reproduces(draw: Draw) -> bool:
    """Whether `draw` below gives, bit for bit, what torch's operator gives on this device.

    This is not taken on trust: the first time for an operator and dtype, some numbers are drawn both ways and compared.
    Not while a CUDA graph is captured, when the generator's state is not known here.

    Example:
        >>> draw = Draw(torch.ops.aten.uniform_.default, (0.0, 1.0), (4, 3), torch.float32, torch.device("cpu"))
        >>> reproduces(draw)
        False
    """
    if draw.device.type != "cuda" or torch.version.hip or torch.cuda.is_current_stream_capturing():
        return False
    recipe = recipe_of(draw)
    if recipe is None:
        return False
    key = (draw.op, draw.dtype, _with_index(draw.device), recipe.kernel)
    if key not in _CHECKED:
        _CHECKED[key] = _agrees(draw, recipe)
    return _CHECKED[key]


_CHECKED: dict[tuple[object, ...], bool] = {}


def draw(draw: Draw, blocks: Sequence[Block], generator: torch.Generator) -> list[torch.Tensor]:
    """The part of each block of the tensor that `draw` fills, contiguous. The generator goes on as after all of it.

    For `aten.native_dropout` the dtype of the draw is that of the tensor dropped from, and the result is the mask.
    """
    recipe = recipe_of(draw)
    assert recipe is not None, f"{draw.op} on {draw.dtype} is not known here; ask reproduces() first"
    device = _with_index(draw.device)
    _raise_as_torch(draw.op, draw.numbers, draw.dtype, device)
    outs = [torch.empty(block.shape, dtype=recipe.dtype, device=device) for block in blocks]
    numel = math.prod(draw.shape)
    if not numel or (recipe.distribution == "keep" and recipe.numbers[0] == 0):
        return [out.zero_() for out in outs]  # torch draws nothing for these
    pieces, increment = pieces_of(numel, draw.dtype.itemsize, recipe, _threads(device))
    seed, offset = generator.initial_seed() & _MASK, generator.get_offset()
    for block, out in zip(blocks, outs, strict=True):
        if out.numel():
            _fill(out, extents_of(draw.shape, block), recipe, pieces, seed, offset // 4)
    generator.set_offset(offset + increment)
    return outs


def _fill(
    out: torch.Tensor, extents: tuple[Extent, ...], recipe: Recipe, pieces: Sequence[Piece], seed: int, counter: int
) -> None:
    threads = _threads(out.device)
    runs = _table(extents, out.device)
    for piece in pieces:
        launch = launch_of(extents, piece, recipe.values, recipe.vector, threads)
        if launch is None:
            continue
        kernel = _kernel(recipe.kernel, _form(extents, launch.shared), out.device)
        fill = _Fill(
            *(out.data_ptr(), seed, counter + piece.calls, piece.start, *launch[2:]),
            *(*recipe.numbers, recipe.range, recipe.low, runs.data_ptr()),
        )
        kernel.launch(launch.threads, (fill, _dims(extents)))


@lru_cache(maxsize=4096)
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
            begins = [sum(run.length for run in extent.runs[:at]) for at in range(len(extent.runs))]
            table += begins + [run.start - begin for run, begin in zip(extent.runs, begins, strict=True)]
    return torch.tensor(table, dtype=torch.int64, device=device)


@lru_cache(maxsize=4096)
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
        ("THREADS", f"{_threads(device)}u"),
        *form,
    )
    return compile_kernel(_SOURCE.read_text(encoding="utf-8"), "fill_block", macros, device)


@cache
def _threads(device: torch.device) -> int:
    """How many threads torch starts for a large tensor. For a small one it starts at least one for each element."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK) * BLOCK


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


@lru_cache(maxsize=4096)
def _raise_as_torch(op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    """What torch has to say about the numbers it says about an empty tensor too, and draws nothing for one."""
    if op is not DROPOUT:
        op(torch.empty(0, dtype=dtype, device=device), *numbers)


def _agrees(wanted: Draw, recipe: Recipe) -> bool:
    """Draw enough for every thread to make two calls, by torch and here."""
    device = _with_index(wanted.device)
    numel = 2 * _threads(device) * max(recipe.values, recipe.vector) + math.prod(wanted.shape) % 8
    probe = wanted._replace(shape=(numel,), numbers=probe_numbers(wanted, recipe))
    whole = Block((numel,), (0,), ((Run(0, numel),),))
    generator = torch.Generator(device).manual_seed(42)
    try:
        (ours,) = draw(probe, [whole], generator)
    except CompilerError:
        return False
    theirs, state = _by_torch(probe, device)
    same = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return same and torch.equal(generator.get_state(), state)


def _by_torch(probe: Draw, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch draws from the seed 42, and the generator's state after that."""
    tensor = torch.empty(probe.shape, dtype=probe.dtype, device=device)
    if probe.op is not DROPOUT:
        generator = torch.Generator(device).manual_seed(42)
        return probe.op(tensor, *probe.numbers, generator=generator), generator.get_state()
    generator = torch.cuda.default_generators[device.index]  # dropout takes no other
    before = generator.get_state()
    try:
        generator.manual_seed(42)
        with torch.cuda.device(device):
            mask = probe.op(tensor, *probe.numbers, True)[1]
        return mask, generator.get_state()
    finally:
        generator.set_state(before)
