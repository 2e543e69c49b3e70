"""Blocks of a random fill with the numbers of one CUDA device.

The number of an element depends only on its global index, so a rank computes only the elements of its block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.core.layout import Block, full_block
from shardwise.rng.cuda import philox_tensor_ops
from shardwise.rng.cuda.nvrtc import CompilerError, can_compile
from shardwise.rng.cuda.philox_kernel import BlockFill, fill_part, threads_of
from shardwise.rng.cuda.torch_kernels import (
    DROPOUT,
    FillKernel,
    TorchLaunch,
    fill_kernel_of,
    probe_numbers,
    torch_launches,
)
from shardwise.rng.random_fill import Draw

__all__ = ["draw", "reproduces"]

_MASK = 2**64 - 1
_SEED = 42  # of the draw that is compared with torch's


class _GlobalDraw(NamedTuple):
    """A draw of the global tensor: its kernel, torch's launches, and the increment of the generator's offset."""

    kernel_model: FillKernel
    launches: tuple[TorchLaunch, ...]
    increment: int


def reproduces(draw: Draw) -> bool:
    """Whether `draw` below is bitwise equal to torch's operator on this device.

    This is tested at run time: on the first use of an operator and dtype, a draw is compared with torch's.
    False while a CUDA graph is captured, because the generator's state is then unknown.

    Example:
        >>> draw = Draw(torch.ops.aten.uniform_.default, (0.0, 1.0), (4, 3), torch.float32, torch.device("cpu"))
        >>> reproduces(draw)
        False
    """
    if draw.device.type != "cuda" or torch.version.hip or torch.cuda.is_current_stream_capturing():
        return False
    kernel_model = fill_kernel_of(draw)
    if kernel_model is None:
        return False
    draw = draw._replace(device=_with_index(draw.device))
    if not can_compile(draw.device) and not _is_plain(draw, kernel_model):
        return False
    key = (draw.op, draw.dtype, draw.device, kernel_model.kernel)
    if key not in _AGREED:
        _AGREED[key] = _agrees(draw, kernel_model)
    return _AGREED[key]


_AGREED: dict[tuple[object, ...], bool] = {}


def draw(
    draw: Draw, blocks: Sequence[Block], generator: torch.Generator, outs: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The blocks of the tensor that `draw` fills, contiguous. The generator advances as after the full draw.

    Written into `outs`, one contiguous tensor for each block, if given. For `aten.native_dropout` the dtype of the
    draw is the dtype of its input, and the result is the mask.

    Example:
        >>> from shardwise.core.layout import Run
        >>> draw_ = Draw(torch.ops.aten.normal_.default, (0.0, 1.0), (4,), torch.float32, torch.device("cuda"))
        >>> half = Block((2,), (2,), ((Run(2, 2),),))
        >>> if torch.cuda.is_available():
        ...     generator = torch.Generator("cuda").manual_seed(0)
        ...     (ours,) = draw(draw_, [half], generator)
        ...     full = torch.empty(4, device="cuda").normal_(generator=generator.manual_seed(0))
        ...     assert torch.equal(ours, full[2:])
    """
    if draw.device.index is None:
        draw = draw._replace(device=_with_index(draw.device))
    kernel_model, launches, increment = _global_draw(draw)
    if not launches:
        return [torch.zeros(block.shape, dtype=kernel_model.dtype, device=draw.device) for block in blocks]
    seed, offset = generator.initial_seed() & _MASK, generator.get_offset()
    fill = fill_part if can_compile(draw.device) else philox_tensor_ops.fill_part
    parts = [BlockFill(draw.shape, block, kernel_model, launches, draw.device) for block in blocks]
    drawn = [fill(part, seed, offset // 4, out) for part, out in zip(parts, outs or [None] * len(blocks), strict=True)]
    generator.set_offset(offset + increment)
    return drawn


@lru_cache(maxsize=4096)
def _global_draw(draw: Draw) -> _GlobalDraw:
    """The global draw. Raises torch's errors for invalid arguments, by calling the operator on an empty tensor."""
    kernel_model = fill_kernel_of(draw)
    assert kernel_model is not None, f"{draw.op} on {draw.dtype} is not supported; call reproduces() first"
    if draw.op is not DROPOUT:
        draw.op(torch.empty(0, dtype=draw.dtype, device=draw.device), *draw.numbers)
    numel = math.prod(draw.shape)
    if numel == 0 or (draw.op is DROPOUT and kernel_model.numbers[0] == 0):
        return _GlobalDraw(kernel_model, (), 0)  # torch draws nothing for these
    return _GlobalDraw(kernel_model, *torch_launches(numel, draw.dtype.itemsize, kernel_model, threads_of(draw.device)))


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _is_plain(draw: Draw, kernel_model: FillKernel) -> bool:
    numel = max(math.prod(draw.shape), 1)
    return philox_tensor_ops.follows(
        kernel_model, torch_launches(numel, draw.dtype.itemsize, kernel_model, threads_of(draw.device))[0]
    )


def _agrees(wanted: Draw, kernel_model: FillKernel) -> bool:
    """Compare with torch, on enough elements for two calls of Philox in every thread."""
    numel = 2 * threads_of(wanted.device) * max(kernel_model.values, kernel_model.vector) + math.prod(wanted.shape) % 8
    numbers = probe_numbers(wanted, kernel_model) if can_compile(wanted.device) else wanted.numbers
    probe = wanted._replace(shape=(numel,), numbers=numbers)
    generator = torch.Generator(wanted.device).manual_seed(_SEED)
    try:
        (ours,) = draw(probe, [full_block((numel,))], generator)
    except CompilerError:
        return False
    theirs, state = _by_torch(probe)
    same = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return same and torch.equal(generator.get_state(), state)


def _by_torch(probe: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that torch draws from the seed, and the generator's state after it."""
    tensor = torch.empty(probe.shape, dtype=probe.dtype, device=probe.device)
    if probe.op is not DROPOUT:
        generator = torch.Generator(probe.device).manual_seed(_SEED)
        return probe.op(tensor, *probe.numbers, generator=generator), generator.get_state()
    generator = torch.cuda.default_generators[probe.device.index]  # dropout accepts no generator
    before = generator.get_state()
    try:
        generator.manual_seed(_SEED)
        return probe.op(tensor, *probe.numbers, True)[1], generator.get_state()
    finally:
        generator.set_state(before)
