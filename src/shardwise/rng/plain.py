"""Philox in torch's own operators, for a device without a compiler: slower, and not for every distribution.

Only for what comes out the same bit for bit: products and comparisons, but no logarithm, no sine and no fused sum.
"""

from __future__ import annotations

import math

import torch

from shardwise.rng.geometry import extents_of, indices_between
from shardwise.rng.kernel import Part, threads_of
from shardwise.rng.recipe import Piece, Recipe

__all__ = ["fill_part", "follows", "philox"]

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 2**32 - 1


def follows(recipe: Recipe, pieces: tuple[Piece, ...]) -> bool:
    """Whether this can be drawn here.

    Example:
        >>> once = (Piece(0, 8, 0),)
        >>> [follows(Recipe(name, torch.float32, "float", 4), once) for name in ("bernoulli", "normal")]
        [True, False]
    """
    exact = recipe.distribution in ("bernoulli", "keep", "integers")
    return len(pieces) == 1 and (exact or (recipe.distribution == "uniform" and recipe.numbers[0] == 0))


def fill_part(part: Part, seed: int, counter: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The block, drawn from `seed`, where the tensor begins at `counter`; into `out`, if there is one."""
    extents, shape = extents_of(part.shape, part.block), part.block.shape
    index = indices_between(extents, 0, math.prod(shape), part.device).view(shape)
    thread, call, word = _call_of(index, part.recipe, threads_of(part.device))
    drawn = _drawn(philox(seed, call + counter, thread), word, part.recipe).to(part.recipe.dtype)
    return drawn if out is None else out.copy_(drawn)


def _call_of(index: torch.Tensor, recipe: Recipe, threads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each element the thread of torch's that draws it, which of its calls, and which word of that."""
    if recipe.vector == 1:
        turn = index // threads
        return index % threads, turn // recipe.values, turn % recipe.values
    turn, rest = index // (threads * recipe.vector), index % (threads * recipe.vector)
    at = rest % recipe.vector
    return rest // recipe.vector, turn * max(recipe.vector // 4, 1) + at // 4, at % 4


def philox(seed: int, counter: torch.Tensor, thread: torch.Tensor) -> Words:
    """Philox4x32-10: four words of 32 bits for each counter and thread.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(word) for word in philox(0, zero, zero)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x, y, z, w = counter & _LOW, counter >> 32 & _LOW, thread & _LOW, thread >> 32 & _LOW
    keys = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        (first_high, first_low), (second_high, second_low) = _product(_FACTORS[0], x), _product(_FACTORS[1], z)
        x, y, z, w = second_high ^ y ^ keys[0], second_low, first_high ^ w ^ keys[1], first_low
        keys = [(key + step) & _LOW for key, step in zip(keys, _STEPS, strict=True)]
    return x, y, z, w


def _product(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product, from halves, since 64 bits with a sign do not hold all of it."""
    high, low = (factor >> 16) * word, (factor & 0xFFFF) * word
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def _drawn(words: Words, word: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    first, second = recipe.numbers
    real = torch.float64 if recipe.real == "double" else torch.float32
    if recipe.distribution == "integers":
        return _pick(words, word) % recipe.range + recipe.low
    if recipe.distribution == "keep":
        return _unit(words, word, torch.float32) < torch.tensor(first, dtype=real, device=word.device)
    unit = _unit(words, word, real)
    if recipe.distribution == "bernoulli":
        return unit < torch.tensor(first, dtype=real, device=word.device)
    end = torch.tensor(second, dtype=recipe.dtype, device=word.device)
    value = (unit * end.to(real)).to(recipe.dtype)
    return torch.where(value == end, torch.zeros_like(value), value)


def _unit(words: Words, word: torch.Tensor, real: torch.dtype) -> torch.Tensor:
    """Uniform in (0, 1]."""
    if real is torch.float32:
        return _pick(words, word).to(real) * 2.0**-32 + 2.0**-33
    x, y, z, w = words
    return torch.where(word == 0, x ^ y << 21, z ^ w << 21).to(real) * 2.0**-53 + 2.0**-54


def _pick(words: Words, word: torch.Tensor) -> torch.Tensor:
    x, y, z, w = words
    return torch.where(word < 2, torch.where(word == 0, x, y), torch.where(word == 2, z, w))
