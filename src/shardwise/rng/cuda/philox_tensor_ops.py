"""Philox in torch operators, for devices without a compiler: slower, and not for every distribution.

Only for distributions that are bitwise reproducible: products and comparisons, but no logarithm, sine or fused sum.
"""

from __future__ import annotations

import math

import torch

from shardwise.rng.block_geometry import extents_of, indices_between
from shardwise.rng.cuda.philox_kernel import BlockFill, threads_of
from shardwise.rng.cuda.torch_kernels import FillKernel, TorchLaunch

__all__ = ["fill_part", "follows", "philox"]

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 2**32 - 1


def follows(kernel_model: FillKernel, launches: tuple[TorchLaunch, ...]) -> bool:
    """Whether a draw is supported here.

    Example:
        >>> once = (TorchLaunch(0, 8, 0),)
        >>> [follows(FillKernel(name, torch.float32, "float", 4), once) for name in ("bernoulli", "normal")]
        [True, False]
    """
    exact = kernel_model.distribution in ("bernoulli", "keep", "integers")
    return len(launches) == 1 and (exact or (kernel_model.distribution == "uniform" and kernel_model.numbers[0] == 0))


def fill_part(part: BlockFill, seed: int, counter: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The block, drawn from `seed`; the tensor starts at `counter`. Written into `out`, if given."""
    extents, shape = extents_of(part.shape, part.block), part.block.shape
    index = indices_between(extents, 0, math.prod(shape), part.device).view(shape)
    thread, call, word = _call_of(index, part.kernel_model, threads_of(part.device))
    drawn = _drawn(philox(seed, call + counter, thread), word, part.kernel_model).to(part.kernel_model.dtype)
    return drawn if out is None else out.copy_(drawn)


def _call_of(
    index: torch.Tensor, kernel_model: FillKernel, threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each element: the thread of torch that draws it, the number of its Philox call, and the word."""
    if kernel_model.vector == 1:
        turn = index // threads
        return index % threads, turn // kernel_model.values, turn % kernel_model.values
    turn, rest = index // (threads * kernel_model.vector), index % (threads * kernel_model.vector)
    at = rest % kernel_model.vector
    return rest // kernel_model.vector, turn * max(kernel_model.vector // 4, 1) + at // 4, at % 4


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
    """The high and the low 32 bits of a product, computed from halves, since it may overflow a signed 64-bit word."""
    high, low = (factor >> 16) * word, (factor & 0xFFFF) * word
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def _drawn(words: Words, word: torch.Tensor, kernel_model: FillKernel) -> torch.Tensor:
    first, second = kernel_model.numbers
    real = torch.float64 if kernel_model.real == "double" else torch.float32
    if kernel_model.distribution == "integers":
        return _pick(words, word) % kernel_model.range + kernel_model.low
    if kernel_model.distribution == "keep":
        return _unit(words, word, torch.float32) < torch.tensor(first, dtype=real, device=word.device)
    unit = _unit(words, word, real)
    if kernel_model.distribution == "bernoulli":
        return unit < torch.tensor(first, dtype=real, device=word.device)
    end = torch.tensor(second, dtype=kernel_model.dtype, device=word.device)
    value = (unit * end.to(real)).to(kernel_model.dtype)
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
