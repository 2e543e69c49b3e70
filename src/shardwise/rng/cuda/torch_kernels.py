"""A model of torch's random CUDA kernels: distribution of each operator, and the Philox call of each element.

Data and arithmetic only.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.rng.random_fill import Draw

__all__ = ["SCALARS", "FillKernel", "TorchLaunch", "fill_kernel_of", "probe_numbers", "torch_launches"]

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
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # mantissa bits with hidden bit

_FLOATS = frozenset(DIGITS)
_NUMBERS = _FLOATS | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ALL = frozenset(SCALARS)

# Distribution, dtypes, and arguments for which no other kernel gives the same results.
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
_WIDE = 2**28  # for larger ranges torch uses 64 random bits for an integer


class FillKernel(NamedTuple):
    """The kernel of one operator on one dtype."""

    distribution: str
    dtype: torch.dtype  # of the result
    real: str  # type of the computation
    values: int  # elements computed from one call of Philox
    vector: int = 1  # consecutive elements that a thread processes together
    numbers: tuple[float, float] = (0.0, 0.0)  # arguments of a real distribution
    range: int = 0  # of an integer distribution; 0 is 2^64
    low: int = 0

    @property
    def kernel(self) -> tuple[object, ...]:
        """The fields that select a compiled kernel: all but the arguments."""
        return self[:5]


class TorchLaunch(NamedTuple):
    """The elements of the global tensor that torch fills in one launch, and the Philox calls before it."""

    start: int
    stop: int
    calls: int


@lru_cache(maxsize=4096)
def fill_kernel_of(draw: Draw) -> FillKernel | None:
    """The kernel of a draw, None if it is not modelled.

    Example:
        >>> device = torch.device("cuda", 0)
        >>> kernel = fill_kernel_of(Draw(aten.normal_.default, (0.0, 1.0), (8,), torch.float64, device))
        >>> kernel.distribution, kernel.values
        ('normal', 2)
        >>> fill_kernel_of(Draw(aten.normal_.default, (0.0, 1.0), (8,), torch.complex64, device)) is None
        True
    """
    numbers = _with_defaults(draw)
    if draw.op in REAL_OPERATORS:
        distribution, dtypes, _ = REAL_OPERATORS[draw.op]
        if draw.dtype not in dtypes:
            return None
        real, values = ("double", 2) if draw.dtype is torch.float64 else ("float", 4)
        first, second = (*map(float, numbers), 0.0)[:2]
        return FillKernel(distribution, draw.dtype, real, values, numbers=(first, second))
    if draw.op in INTEGER_OPERATORS:
        return _integers(draw, numbers) if draw.dtype in INTEGER_OPERATORS[draw.op] else None
    if draw.op is DROPOUT:
        return _dropout(draw, float(numbers[0])) if draw.dtype in _FLOATS else None
    return None


def probe_numbers(draw: Draw, kernel_model: FillKernel) -> tuple[Any, ...]:
    """Arguments for a test of the same kernel, which may reveal more differences than those of `draw`.

    Example:
        >>> always = Draw(aten.bernoulli_.float, (1.0,), (8,), torch.float32, torch.device("cuda", 0))
        >>> probe_numbers(always, fill_kernel_of(always))
        (0.3,)
    """
    if draw.op in REAL_OPERATORS:
        return REAL_OPERATORS[draw.op][2]
    if draw.op is DROPOUT:
        return (0.3,)
    if draw.op is aten.random_.default or kernel_model.distribution == "wide_integers":
        return draw.numbers  # their range is already large
    span = 2 if draw.dtype is torch.bool else 100
    return (span,) if draw.op is aten.random_.to else (0, span)


def _with_defaults(draw: Draw) -> tuple[Any, ...]:
    """The arguments of a draw, with the operator's defaults for missing ones."""
    arguments = [argument for argument in draw.op._schema.arguments[1:] if not argument.kwarg_only]
    return draw.numbers + tuple(argument.default_value for argument in arguments[len(draw.numbers) :])


def _dropout(draw: Draw, p: float) -> FillKernel:
    """A thread loads 16 consecutive bytes, or fewer if the size is not a multiple of 16."""
    vector = 16 // draw.dtype.itemsize
    while math.prod(draw.shape) % vector:
        vector //= 2
    real = "double" if draw.dtype is torch.float64 else "float"
    values = 4 if vector == 1 else min(vector, 4)
    return FillKernel("keep", torch.bool, real, values, vector, numbers=(1.0 - p, 0.0))


def _integers(draw: Draw, numbers: tuple[Any, ...]) -> FillKernel | None:
    dtype = draw.dtype
    if draw.op is aten.random_.default:
        return _integer_kernel(dtype, _largest(dtype) + 1, 0, wide=dtype in (torch.float64, torch.int64))
    low, high = (0, *numbers)[-2:]  # random_.to starts at 0
    if high is None:
        if dtype in (torch.uint16, torch.uint32, torch.uint64):
            return None
        if low == _LOWEST:
            return _integer_kernel(dtype, 0, 0, wide=True)
        high = _largest(dtype) + 1
    elif dtype in DIGITS:
        high = _moved_down(high, dtype)
    if dtype in DIGITS:
        low = _moved_up(low, dtype)
    return _integer_kernel(dtype, high - low, low, wide=high - low >= _WIDE)


def _integer_kernel(dtype: torch.dtype, span: int, low: int, *, wide: bool) -> FillKernel:
    distribution, values = ("wide_integers", 2) if wide else ("integers", 4)
    return FillKernel(distribution, dtype, "float", values, range=span % _WORD, low=low)


def _largest(dtype: torch.dtype) -> int:
    """The largest integer of `random_` without an upper bound."""
    if dtype in DIGITS:
        return 2 ** DIGITS[dtype]
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _rounded(value: int, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=torch.int64).to(dtype).to(torch.int64))


def _moved_up(low: int, dtype: torch.dtype) -> int:
    """`low`, or a larger number if `low + 1` is rounded to less than `low`."""
    rounded = _rounded(low + 1, dtype)
    return rounded + _spacing(low + 1, dtype) if rounded < low else low


def _moved_down(high: int, dtype: torch.dtype) -> int:
    """`high`, or a smaller number if `high - 1` is rounded to at least `high`."""
    rounded = _rounded(high - 1, dtype)
    return rounded - _spacing(high - 1, dtype) if rounded >= high else high


def _spacing(value: int, dtype: torch.dtype) -> int:
    return 1 << max(abs(value).bit_length() - DIGITS[dtype], 0)


@lru_cache(maxsize=4096)
def torch_launches(
    numel: int, itemsize: int, kernel_model: FillKernel, threads: int
) -> tuple[tuple[TorchLaunch, ...], int]:
    """The launches by which torch fills `numel` elements, and the increment of the generator's offset.

    Example:
        >>> kernel = FillKernel("uniform", torch.float32, "float", 4)
        >>> torch_launches(3_000_001, 4, kernel, threads=270_336)
        ((TorchLaunch(start=0, stop=3000001, calls=0),), 12)
    """
    if kernel_model.distribution == "keep":
        return _dropout_launches(numel, kernel_model, threads), 4 * _calls(numel, threads * 4)
    per_call = threads * kernel_model.values
    if _is_32bit(numel, itemsize):
        return (TorchLaunch(0, numel, 0),), 4 * _calls(numel, per_call)
    calls = _calls(numel, per_call)  # torch counts the full tensor, and then each part again
    launches: list[TorchLaunch] = []
    parts = [numel]
    start = 0
    while parts:
        part = parts.pop()
        if not _is_32bit(part, itemsize):
            parts += [part - part // 2, part // 2]
            continue
        launches.append(TorchLaunch(start, start + part, calls))
        calls += _calls(part, per_call)
        start += part
    return tuple(launches), 4 * calls


def _dropout_launches(numel: int, kernel_model: FillKernel, threads: int) -> tuple[TorchLaunch, ...]:
    """Dropout is one launch; it is split where all threads begin another call, so that 32-bit indices suffice."""
    calls = max(1, kernel_model.vector // 4)
    period = threads * (kernel_model.vector if kernel_model.vector > 1 else kernel_model.values)
    step = _INT32_MAX // period * period
    return tuple(
        TorchLaunch(start, min(start + step, numel), start // period * calls) for start in range(0, numel, step)
    )


def _calls(numel: int, per_call: int) -> int:
    return (numel - 1) // per_call + 1


def _is_32bit(numel: int, itemsize: int) -> bool:
    """Whether torch indexes the bytes of `numel` elements with 32 bits."""
    return numel <= _INT32_MAX and 1 + (numel - 1) * itemsize <= _INT32_MAX
