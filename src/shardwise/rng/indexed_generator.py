"""A counter-based generator: element i of the global tensor is a function of i and a seed, on every mesh.

The numbers are the same for any layout, and a rank computes only its part, but they differ from torch's generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.layout import Block
from shardwise.errors import UnsupportedError
from shardwise.rng.block_geometry import extents_of, indices_between
from shardwise.rng.random_fill import Draw

__all__ = ["draw"]

BLOCK = {"cpu": 1 << 15}  # elements processed at a time: they fit into the CPU cache
LARGE_BLOCK = 1 << 22  # on other devices, because of launch overhead
aten = torch.ops.aten


def draw(wanted: Draw, blocks: Sequence[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The blocks. One number of the generator is the seed."""
    make = DISTRIBUTIONS.get(wanted.op)
    if make is None:
        raise UnsupportedError(
            f"the indexed generator does not support {wanted.op}",
            hint='use the default, use_rng("one_device")',
        )
    seed = int(torch.empty((), dtype=torch.int64, device=wanted.device).random_(generator=generator))
    parts = [torch.empty(block.shape, dtype=wanted.dtype, device=wanted.device) for block in blocks]
    for part, block in zip(parts, blocks, strict=True):
        flat, extents = part.view(-1), extents_of(wanted.shape, block)
        for low, high in _spans(part.numel(), BLOCK.get(wanted.device.type, LARGE_BLOCK)):
            words = _Words(seed, indices_between(extents, low, high, wanted.device), wanted.dtype)
            flat[low:high] = make(words, *wanted.numbers)
    return parts


def _spans(count: int, block: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + block, count)) for low in range(0, count, block))


def _signed(word: int) -> int:
    """A 64-bit word as a signed integer."""
    return word - (1 << 64) if word >= 1 << 63 else word


GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(word: torch.Tensor) -> torch.Tensor:
    """The mixing function of SplitMix64 (Steele, Lea and Flood, 2014), in place."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        word ^= (word >> shift) & ((1 << (64 - shift)) - 1)
        word *= factor
    word ^= (word >> 31) & ((1 << 33) - 1)
    return word


class _Words:
    """Independent random words for given elements."""

    def __init__(self, seed: int, index: torch.Tensor, dtype: torch.dtype) -> None:
        self.index = index
        self.dtype = dtype
        self.stream = _mixed(torch.tensor(seed, device=index.device))

    def word(self) -> torch.Tensor:
        """63 random bits for each element."""
        self.stream = _mixed(self.stream + GOLDEN)
        return _mixed(self.index * GOLDEN + self.stream) & ((1 << 63) - 1)

    def unit(self) -> torch.Tensor:
        """Uniform in [0, 1), with the precision of the result's dtype."""
        if self.dtype is torch.float64:
            return (self.word() >> 10).double() * 2.0**-53
        return (self.word() >> 39).float() * 2.0**-24

    def normal(self) -> torch.Tensor:
        """Standard normal, by Box and Muller."""
        radius = (-2 * torch.log1p(-self.unit())).sqrt_()
        return radius * torch.cos(2 * math.pi * self.unit())


def _bound(dtype: torch.dtype) -> int:
    """The exclusive upper bound of `random_` without arguments for a dtype."""
    if dtype is torch.bool:
        return 2
    return int(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max + 1


def _random(words: _Words, low: int = 0, high: int | None = None) -> torch.Tensor:
    if high is None:
        high = _bound(words.dtype)
    return low + words.word() % (high - low) if high - low < 1 << 63 else words.word()


def _geometric(words: _Words, p: float) -> torch.Tensor:
    return torch.ceil(torch.log1p(-words.unit()) / math.log1p(-p)).clamp_(min=1)


DISTRIBUTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.uniform_.default: lambda words, low=0.0, high=1.0: low + (high - low) * words.unit(),
    aten.normal_.default: lambda words, mean=0.0, std=1.0: mean + std * words.normal(),
    aten.log_normal_.default: lambda words, mean=1.0, std=2.0: torch.exp(mean + std * words.normal()),
    aten.exponential_.default: lambda words, rate=1.0: -torch.log1p(-words.unit()) / rate,
    aten.cauchy_.default: lambda words, median=0.0, sigma=1.0: (
        median + sigma * torch.tan(math.pi * (words.unit() - 0.5))
    ),
    aten.geometric_.default: _geometric,
    aten.bernoulli_.float: lambda words, p=0.5: words.unit() < p,
    aten.random_.default: _random,
    aten.random_.to: lambda words, high: _random(words, 0, high),
    getattr(aten.random_, "from"): _random,
}
