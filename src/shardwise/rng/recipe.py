"""What torch's CUDA kernels do for each random operator: which distribution, and how an element finds its numbers.

Data and arithmetic. Knows nothing of blocks, generators or how a kernel is run.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.rng.draw import Draw

__all__ = ["SCALARS", "Piece", "Recipe", "pieces_of", "probe_numbers", "recipe_of"]

aten = torch.ops.aten

SCALARS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint16: "unsigned short",
    torch.uint32: "unsigned int",
    torch.uint64: "unsigned long long",
}
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # of a float, its hidden bit too

_FLOATS = frozenset(DIGITS)
_NUMBERS = _FLOATS | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ALL = frozenset(SCALARS)

# The distribution, the dtypes, and numbers that no other kernel would give the same results for.
REAL_OPERATORS = {
    aten.uniform_.default: ("uniform", _FLOATS, (-0.3, 1.9)),
    aten.normal_.default: ("normal", _FLOATS, (0.7, 1.3)),
    aten.log_normal_.default: ("log_normal", _FLOATS, (0.3, 0.9)),
    aten.exponential_.default: ("exponential", _FLOATS, (1.7,)),
    aten.cauchy_.default: ("cauchy", _FLOATS, (0.7, 1.3)),
    aten.geometric_.default: ("geometric", _NUMBERS, (0.3,)),
    aten.bernoulli_.float: ("bernoulli", _NUMBERS | {torch.bool}, (0.3,)),
}
INTEGER_OPERATORS = {
    aten.random_.default: _NUMBERS | {torch.bool},
    aten.random_.to: _ALL,
    getattr(aten.random_, "from"): _ALL,
}
DROPOUT = aten.native_dropout.default

_INT32_MAX = 2**31 - 1
_LOWEST, _WORD = -(2**63), 2**64
_WIDE = 2**28  # from this range on torch takes 64 bits for an integer


class Recipe(NamedTuple):
    """One operator on one dtype, as its kernel does it."""

    distribution: str
    dtype: torch.dtype  # what is stored
    real: str  # what is computed in
    values: int  # elements that one call of Philox serves
    vector: int = 1  # neighbours that a thread takes at once
    numbers: tuple[float, float] = (0.0, 0.0)  # of a real distribution
    range: int = 0  # of integers; 0 is 2^64
    low: int = 0

    @property
    def kernel(self) -> tuple[object, ...]:
        """Everything but the numbers."""
        return self[:5]


class Piece(NamedTuple):
    """A part of the whole tensor that torch fills by one launch, and the calls of Philox made before it."""

    start: int
    stop: int
    calls: int


@lru_cache(maxsize=4096)
def recipe_of(draw: Draw) -> Recipe | None:
    """How torch draws this, or None where that is not known.

    Example:
        >>> device = torch.device("cuda", 0)
        >>> recipe = recipe_of(Draw(aten.normal_.default, (0.0, 1.0), (8,), torch.float64, device))
        >>> recipe.distribution, recipe.values
        ('normal', 2)
        >>> recipe_of(Draw(aten.normal_.default, (0.0, 1.0), (8,), torch.complex64, device)) is None
        True
    """
    numbers = _with_defaults(draw)
    if draw.op in REAL_OPERATORS:
        distribution, dtypes, _ = REAL_OPERATORS[draw.op]
        if draw.dtype not in dtypes:
            return None
        real, values = ("double", 2) if draw.dtype is torch.float64 else ("float", 4)
        first, second = (*map(float, numbers), 0.0)[:2]
        return Recipe(distribution, draw.dtype, real, values, numbers=(first, second))
    if draw.op in INTEGER_OPERATORS:
        return _integers(draw, numbers) if draw.dtype in INTEGER_OPERATORS[draw.op] else None
    if draw.op is DROPOUT:
        return _dropout(draw, float(numbers[0])) if draw.dtype in _FLOATS else None
    return None


def probe_numbers(draw: Draw, recipe: Recipe) -> tuple[Any, ...]:
    """Numbers for a draw by the same kernel that show more of it than those of `draw` may.

    Example:
        >>> always = Draw(aten.bernoulli_.float, (1.0,), (8,), torch.float32, torch.device("cuda", 0))
        >>> probe_numbers(always, recipe_of(always))
        (0.3,)
    """
    if draw.op in REAL_OPERATORS:
        return REAL_OPERATORS[draw.op][2]
    if draw.op is DROPOUT:
        return (0.3,)
    if draw.op is aten.random_.default or recipe.distribution == "wide_integers":
        return draw.numbers  # their range is large already
    span = 2 if draw.dtype is torch.bool else 100
    return (span,) if draw.op is aten.random_.to else (0, span)


def _with_defaults(draw: Draw) -> tuple[Any, ...]:
    """The numbers of a draw, and the operator's own for those left out."""
    arguments = [argument for argument in draw.op._schema.arguments[1:] if not argument.kwarg_only]
    return draw.numbers + tuple(argument.default_value for argument in arguments[len(draw.numbers) :])


def _dropout(draw: Draw, p: float) -> Recipe:
    """A thread loads 16 bytes of neighbours, or fewer where the size is no multiple of that."""
    vector = 16 // draw.dtype.itemsize
    while math.prod(draw.shape) % vector:
        vector //= 2
    real = "double" if draw.dtype is torch.float64 else "float"
    values = 4 if vector == 1 else min(vector, 4)
    return Recipe("keep", torch.bool, real, values, vector, numbers=(1.0 - p, 0.0))


def _integers(draw: Draw, numbers: tuple[Any, ...]) -> Recipe | None:
    dtype = draw.dtype
    if draw.op is aten.random_.default:
        return _integer_recipe(dtype, _largest(dtype) + 1, 0, wide=dtype in (torch.float64, torch.int64))
    low, high = (0, *numbers)[-2:]  # `to` alone counts from 0
    if high is None:
        if dtype in (torch.uint16, torch.uint32, torch.uint64):
            return None
        if low == _LOWEST:
            return _integer_recipe(dtype, 0, 0, wide=True)
        high = _largest(dtype) + 1
    elif dtype in DIGITS:
        high = _moved_down(high, dtype)
    if dtype in DIGITS:
        low = _moved_up(low, dtype)
    return _integer_recipe(dtype, high - low, low, wide=high - low >= _WIDE)


def _integer_recipe(dtype: torch.dtype, span: int, low: int, *, wide: bool) -> Recipe:
    distribution, values = ("wide_integers", 2) if wide else ("integers", 4)
    return Recipe(distribution, dtype, "float", values, range=span % _WORD, low=low)


def _largest(dtype: torch.dtype) -> int:
    """The last integer that `random_` gives without an upper bound."""
    if dtype in DIGITS:
        return 2 ** DIGITS[dtype]
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _rounded(value: int, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=torch.int64).to(dtype).to(torch.int64))


def _moved_up(low: int, dtype: torch.dtype) -> int:
    """`low`, or above it where the next number would be rounded to less."""
    rounded = _rounded(low + 1, dtype)
    return rounded + _spacing(low + 1, dtype) if rounded < low else low


def _moved_down(high: int, dtype: torch.dtype) -> int:
    """`high`, or below it where the number before it would be rounded to no less."""
    rounded = _rounded(high - 1, dtype)
    return rounded - _spacing(high - 1, dtype) if rounded >= high else high


def _spacing(value: int, dtype: torch.dtype) -> int:
    return 1 << max(abs(value).bit_length() - DIGITS[dtype], 0)


@lru_cache(maxsize=4096)
def pieces_of(numel: int, itemsize: int, recipe: Recipe, threads: int) -> tuple[tuple[Piece, ...], int]:
    """The launches by which torch fills `numel` elements, and how far the generator's offset goes.

    Example:
        >>> recipe = Recipe("uniform", torch.float32, "float", 4)
        >>> pieces_of(3_000_001, 4, recipe, threads=270_336)
        ((Piece(start=0, stop=3000001, calls=0),), 12)
    """
    if recipe.distribution == "keep":
        return _pieces_of_dropout(numel, recipe, threads), 4 * _calls(numel, threads * 4)
    per_call = threads * recipe.values
    if _is_32bit(numel, itemsize):
        return (Piece(0, numel, 0),), 4 * _calls(numel, per_call)
    calls = _calls(numel, per_call)  # taken for the whole, and then again for each part of it
    pieces: list[Piece] = []
    parts = [numel]
    start = 0
    while parts:
        part = parts.pop()
        if not _is_32bit(part, itemsize):
            parts += [part - part // 2, part // 2]
            continue
        pieces.append(Piece(start, start + part, calls))
        calls += _calls(part, per_call)
        start += part
    return tuple(pieces), 4 * calls


def _pieces_of_dropout(numel: int, recipe: Recipe, threads: int) -> tuple[Piece, ...]:
    """Dropout is one launch; it is cut where all threads begin another call, so that 32 bits are enough for us."""
    calls = max(1, recipe.vector // 4)
    period = threads * (recipe.vector if recipe.vector > 1 else recipe.values)
    step = _INT32_MAX // period * period
    return tuple(Piece(start, min(start + step, numel), start // period * calls) for start in range(0, numel, step))


def _calls(numel: int, per_call: int) -> int:
    return (numel - 1) // per_call + 1


def _is_32bit(numel: int, itemsize: int) -> bool:
    """Whether torch counts the bytes of so many elements in 32 bits."""
    return numel <= _INT32_MAX and 1 + (numel - 1) * itemsize <= _INT32_MAX
