"""The numbers that one CUDA device would have drawn for a whole tensor, for those who hold blocks of it.

An element's number depends on its index in the whole tensor and on nothing drawn before it, so each block costs its own
elements and no more. Knows nothing of meshes or DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.core.layout import Block, whole_block
from shardwise.rng import plain
from shardwise.rng.draw import Draw
from shardwise.rng.kernel import Part, fill_part, threads_of
from shardwise.rng.nvrtc import CompilerError, can_compile
from shardwise.rng.recipe import DROPOUT, Piece, Recipe, pieces_of, probe_numbers, recipe_of

__all__ = ["draw", "reproduces"]

_MASK = 2**64 - 1
_SEED = 42  # of what is drawn to see that it is the same


class _Whole(NamedTuple):
    """A draw of the whole tensor: how, by which launches of torch's, and how far the generator goes."""

    recipe: Recipe
    pieces: tuple[Piece, ...]
    increment: int


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
    draw = draw._replace(device=_with_index(draw.device))
    if not can_compile(draw.device) and not _is_plain(draw, recipe):
        return False
    key = (draw.op, draw.dtype, draw.device, recipe.kernel)
    if key not in _AGREED:
        _AGREED[key] = _agrees(draw, recipe)
    return _AGREED[key]


_AGREED: dict[tuple[object, ...], bool] = {}


def draw(
    draw: Draw, blocks: Sequence[Block], generator: torch.Generator, outs: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The part of each block of the tensor that `draw` fills, contiguous. The generator goes on as after all of it.

    Into `outs`, one contiguous tensor for each block, if they are given. For `aten.native_dropout` the dtype of the
    draw is that of the tensor dropped from, and the result is the mask.

    Example:
        >>> from shardwise.core.layout import Run
        >>> draw_ = Draw(torch.ops.aten.normal_.default, (0.0, 1.0), (4,), torch.float32, torch.device("cuda"))
        >>> half = Block((2,), (2,), ((Run(2, 2),),))
        >>> if torch.cuda.is_available():
        ...     generator = torch.Generator("cuda").manual_seed(0)
        ...     (ours,) = draw(draw_, [half], generator)
        ...     whole = torch.empty(4, device="cuda").normal_(generator=generator.manual_seed(0))
        ...     assert torch.equal(ours, whole[2:])
    """
    if draw.device.index is None:
        draw = draw._replace(device=_with_index(draw.device))
    recipe, pieces, increment = _whole(draw)
    if not pieces:
        return [torch.zeros(block.shape, dtype=recipe.dtype, device=draw.device) for block in blocks]
    seed, offset = generator.initial_seed() & _MASK, generator.get_offset()
    fill = fill_part if can_compile(draw.device) else plain.fill_part
    parts = [Part(draw.shape, block, recipe, pieces, draw.device) for block in blocks]
    drawn = [fill(part, seed, offset // 4, out) for part, out in zip(parts, outs or [None] * len(blocks), strict=True)]
    generator.set_offset(offset + increment)
    return drawn


@lru_cache(maxsize=4096)
def _whole(draw: Draw) -> _Whole:
    """Raises what torch would: what it has to say about the numbers it says about an empty tensor too."""
    recipe = recipe_of(draw)
    assert recipe is not None, f"{draw.op} on {draw.dtype} is not known here; ask reproduces() first"
    if draw.op is not DROPOUT:
        draw.op(torch.empty(0, dtype=draw.dtype, device=draw.device), *draw.numbers)
    numel = math.prod(draw.shape)
    if numel == 0 or (draw.op is DROPOUT and recipe.numbers[0] == 0):
        return _Whole(recipe, (), 0)  # torch draws nothing for these
    return _Whole(recipe, *pieces_of(numel, draw.dtype.itemsize, recipe, threads_of(draw.device)))


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _is_plain(draw: Draw, recipe: Recipe) -> bool:
    numel = max(math.prod(draw.shape), 1)
    return plain.follows(recipe, pieces_of(numel, draw.dtype.itemsize, recipe, threads_of(draw.device))[0])


def _agrees(wanted: Draw, recipe: Recipe) -> bool:
    """Draw enough for every thread to make two calls, by torch and here."""
    numel = 2 * threads_of(wanted.device) * max(recipe.values, recipe.vector) + math.prod(wanted.shape) % 8
    numbers = probe_numbers(wanted, recipe) if can_compile(wanted.device) else wanted.numbers
    probe = wanted._replace(shape=(numel,), numbers=numbers)
    generator = torch.Generator(wanted.device).manual_seed(_SEED)
    try:
        (ours,) = draw(probe, [whole_block((numel,))], generator)
    except CompilerError:
        return False
    theirs, state = _by_torch(probe)
    same = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return same and torch.equal(generator.get_state(), state)


def _by_torch(probe: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch draws from that seed, and the generator's state after that."""
    tensor = torch.empty(probe.shape, dtype=probe.dtype, device=probe.device)
    if probe.op is not DROPOUT:
        generator = torch.Generator(probe.device).manual_seed(_SEED)
        return probe.op(tensor, *probe.numbers, generator=generator), generator.get_state()
    generator = torch.cuda.default_generators[probe.device.index]  # dropout takes no other
    before = generator.get_state()
    try:
        generator.manual_seed(_SEED)
        return probe.op(tensor, *probe.numbers, True)[1], generator.get_state()
    finally:
        generator.set_state(before)
