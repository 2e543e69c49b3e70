"""The exceptions of the library: the request, the layouts in short notation, and a hint.

Every class also derives from the built-in that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AgreementError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CommunicationError",
    "ImplicitCommunicationError",
    "LayoutError",
    "LostRankError",
    "MachineFileError",
    "MemoryBoundError",
    "MeshError",
    "NotationError",
    "ParityError",
    "PipelineError",
    "PlainTensorError",
    "RuleError",
    "ShardwiseError",
    "UnsupportedError",
]


class ShardwiseError(Exception):
    """Base of every error the library raises on purpose.

    Args:
        problem: the request and why it fails, in the user's terms.
        hint: an alternative; printed on a line of its own.

    Example:
        >>> str(ShardwiseError("no such axis 'pp'", hint="the mesh has dp, tp"))
        "no such axis 'pp'\\n  hint: the mesh has dp, tp"
    """

    def __init__(self, problem: str, *, hint: str | None = None) -> None:
        super().__init__(problem if hint is None else f"{problem}\n  hint: {hint}")
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.problem, self.hint)


def _rebuild(kind: type[ShardwiseError], problem: str, hint: str | None) -> ShardwiseError:
    return kind(problem, hint=hint)


class LayoutError(ShardwiseError, ValueError):
    """A placement, shard order or shape that does not fit the tensor or the mesh."""


class MeshError(ShardwiseError, ValueError):
    """An invalid mesh, or two meshes that do not fit each other."""


class LostRankError(ShardwiseError, RuntimeError):
    """Communication failed because another rank has ended, or does not answer; names the operation and this rank."""


class MachineFileError(ShardwiseError, ValueError):
    """A machine file that cannot be read or is invalid."""


class MemoryBoundError(LayoutError):
    """No route keeps `max_bytes`; `smallest` is the smallest possible bound."""

    def __init__(self, problem: str, *, hint: str | None = None, smallest: int = 0) -> None:
        super().__init__(problem, hint=hint)
        self.smallest = smallest

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_bound, (self.problem, self.hint, self.smallest)


def _rebuild_bound(problem: str, hint: str | None, smallest: int) -> MemoryBoundError:
    return MemoryBoundError(problem, hint=hint, smallest=smallest)


class PlainTensorError(ShardwiseError, RuntimeError):
    """A plain torch.Tensor among DTensors that is refused, or that cannot be treated as replicated."""


class RuleError(ShardwiseError, ValueError):
    """A sharding rule that does not fit its operator, or gives wrong results."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """An operation that this fabric, backend or version does not support."""


class AgreementError(ShardwiseError, RuntimeError):
    """Values or decisions that must be the same on all ranks differ."""


class ParityError(ShardwiseError, AssertionError):
    """Values on the ranks differ from those of one device."""


class PipelineError(ShardwiseError, RuntimeError):
    """A stage of a pipeline has failed, on this rank or another; names the stage and the reason."""


class ImplicitCommunicationError(ShardwiseError, RuntimeError):
    """Implicit communication in strict mode."""


class CommunicationError(ShardwiseError, RuntimeError):
    """More communication than a budget or a lock file allows."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, or that is damaged, unsafe or not one at all; nothing was loaded."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint does not match the requested state; lists all differences at once.

    Args:
        problem: the complete list, as text.
        hint: an alternative.
        missing: names that only the state has.
        unexpected: names that only the checkpoint has.
        mismatched: names that differ in shape, dtype or kind.
    """

    def __init__(
        self,
        problem: str,
        *,
        hint: str | None = None,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: dict[str, str] | None = None,
    ) -> None:
        super().__init__(problem, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_mismatch, (self.problem, self.hint, self.missing, self.unexpected, self.mismatched)


def _rebuild_mismatch(problem: str, hint: str | None, *lists: Any) -> CheckpointMismatchError:
    missing, unexpected, mismatched = lists
    return CheckpointMismatchError(problem, hint=hint, missing=missing, unexpected=unexpected, mismatched=mismatched)


class NotationError(ShardwiseError, ValueError):
    """A string in our notation that cannot be read; points at the character.

    Example:
        >>> print(NotationError.at("dp:S0 tp:Q", 9, "expected R, S<dim> or P"))
        expected R, S<dim> or P
          dp:S0 tp:Q
                   ^
    """

    @classmethod
    def at(cls, text: str, position: int, problem: str, *, hint: str | None = None) -> NotationError:
        """The error for `text[position]`, with a caret under it."""
        return cls(f"{problem}\n  {text}\n  {' ' * position}^", hint=hint)
