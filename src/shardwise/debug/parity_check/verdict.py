"""The outputs of an operator, part by part, and their comparison with one device's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.debug.parity_check.gather_for_check import Coordinate, gather_for_check, local_block, local_parts
from shardwise.debug.parity_check.rounding import Gap, gap_between, same
from shardwise.fabric.rank_tensor import part_at, parts_of
from shardwise.schema import OpInfo
from shardwise.tensor import DTensor
from shardwise.torch_private import tree_leaves

__all__ = ["EQUAL", "ROUNDING", "WRONG", "Output", "Verdict", "all_same", "dtensors", "outputs_of", "worst"]

EQUAL, ROUNDING, WRONG = 0, 1, 2
_NO_GAP = Gap(0.0, 0.0, ())


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor and its parts in this process. A Partial one is reduced first, and has no coordinate."""

    tensor: torch.Tensor
    parts: tuple[tuple[Coordinate | None, torch.Tensor], ...]
    largest: float = 0.0  # the largest magnitude of a Partial one's addends

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Output:
        """The parts of a tensor. Collective if it is Partial: all ranks must call it."""
        if not isinstance(tensor, DTensor):
            return cls(tensor, ((None, tensor),))
        if not tensor._spec.partial_axes:
            return cls(tensor, tuple((coordinate, part.detach()) for coordinate, part in local_parts(tensor)))
        full, _, largest = gather_for_check(tensor)
        return cls(tensor, tuple((None, part) for part in parts_of(full)), largest)

    @property
    def spec(self) -> DTensorSpec | None:
        """Its spec, None for a plain tensor."""
        return self.tensor._spec if isinstance(self.tensor, DTensor) else None

    @property
    def text(self) -> str:
        """Its spec as text."""
        spec = self.spec
        return str(spec) if spec is not None else f"a plain tensor {tuple(self.tensor.shape)}"

    def beside(self, reference: torch.Tensor) -> Iterator[tuple[Coordinate | None, torch.Tensor, torch.Tensor]]:
        """Each part with the corresponding block of a global tensor."""
        for position, (coordinate, part) in enumerate(self.parts):
            full = part_at(reference, position)
            spec = self.spec
            fits = coordinate is not None and spec is not None and full.shape == spec.shape
            yield coordinate, part, local_block(full, spec, coordinate) if fits else full  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison: a level, and the worst element with its value and the expected one."""

    level: int = EQUAL
    gap: Gap = _NO_GAP
    output: int = 0
    coordinate: Coordinate | None = None
    value: complex = 0.0
    expected: complex = 0.0

    @property
    def badness(self) -> tuple[int, float]:
        """The sort key of verdicts, worst last."""
        return self.level, self.gap.excess


def dtensors(value: Any) -> Iterator[DTensor]:
    """All DTensors in nested arguments."""
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from dtensors(item)
    elif isinstance(value, Mapping):
        yield from dtensors(list(value.values()))


def outputs_of(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[torch.Tensor]:
    """All outputs of an operator: its results, numbers as tensors, and the arguments it wrote to."""
    leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
    found = [leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf) for leaf in leaves]
    for name in info.writes:
        index = info.names.index(name)
        written = args[index] if index < len(args) else kwargs.get(name)
        found += [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
    return list({id(tensor): tensor for tensor in found}.values())


def all_same(outputs: Sequence[Output], references: Sequence[torch.Tensor]) -> bool:
    """Whether every part in this process is bitwise equal to the reference."""
    return all(
        same(part, expected)
        for output, reference in zip(outputs, references, strict=True)
        for _, part, expected in output.beside(reference)
    )


def worst(
    outputs: Sequence[Output],
    plain: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    allowed: Sequence[torch.Tensor],
) -> Verdict:
    """The verdict on the worst element: wrong if its error is larger than allowed."""
    found = Verdict()
    for number, output in enumerate(outputs):
        columns = zip(*(output.beside(reference[number]) for reference in (plain, exact, allowed)), strict=True)
        for (coordinate, part, expected), (_, _, value), (_, _, bound) in columns:
            verdict = _verdict(number, coordinate, part, expected, value, bound)
            found = max(found, verdict, key=lambda one: one.badness)
    return found


def _verdict(
    number: int,
    coordinate: Coordinate | None,
    part: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor,
    allowed: torch.Tensor,
) -> Verdict:
    if part.shape != exact.shape:
        return Verdict(WRONG, Gap(math.inf, 0.0, ()), number, coordinate)
    gap = gap_between(part, exact, allowed)
    if gap.error == 0:
        return Verdict()
    level = WRONG if gap.excess > 1 else ROUNDING
    return Verdict(level, gap, number, coordinate, complex(part[gap.at]), complex(expected[gap.at]))
