"""Failures of the collectives of compiled programs in the user's terms.

Compiled code calls torch's functional collectives itself: an operator starts a collective, `wait_tensor` waits for it
and raises the error of the process group, without the collective. So the operators note what they start until it is
waited for. A kernel in Python could not do this: it would hold the interpreter's lock while it waits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import traceback as fx_traceback

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import dtype_name
from shardwise.events import is_library_file
from shardwise.fabric.base import on_new_world
from shardwise.fabric.lost_ranks import SHOWN, is_communication_failure, lost_rank_error
from shardwise.torch_private import wrap_call

__all__ = ["NamedCollective", "NamedWait", "name_compiled_failures", "note_traced_line"]

NamedGroup = tuple[str, Sequence[int]]  # "over tp", and its ranks
MAX_STARTED, MAX_TRACED = 4096, 4096
STARTS = (
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out", "all_reduce",
    "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_to_all_single", "broadcast", "broadcast_",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out",
)  # fmt: skip
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class Started(NamedTuple):
    """A collective that compiled code has started."""

    name: str  # of the operator
    dtype: torch.dtype
    shape: torch.Size  # of this rank's tensor, the first one of several
    options: tuple[Any, ...]  # the other arguments, without tensors

    @property
    def group(self) -> Any:
        """The name of the process group, or the group."""
        return self.options[-1]

    @property
    def kind(self) -> str:
        """The operator without its variants: in place, with a given result, of several tensors."""
        return re.sub(r"(_coalesced|_out)?_?$", "", self.name)

    def described(self, over: str) -> str:
        """The collective as errors call it."""
        kind = re.sub(r"(_into)?_(tensor|single)$", "", self.kind).replace("_", "-")
        reduction = f" ({self.options[0]})" if "reduce" in self.kind else ""
        sizes = ",".join(map(str, self.shape))
        lines = self._traced_lines()
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        where = f" of {' or '.join(lines[:SHOWN])}{more}" if lines else ""
        return f"{kind}{reduction} {over} of local tensors {dtype_name(self.dtype)}[{sizes}] in compiled code{where}"

    def _traced_lines(self) -> list[str]:
        """The lines for which such a collective was traced; none for code from a cache on disk."""
        found: dict[str, None] = {}
        for (kind, group, sizes), lines in tuple(_traced.items()):
            alike = kind == self.kind and group == self.group and len(sizes) == len(self.shape)
            if alike and all(size in (None, own) for size, own in zip(sizes, self.shape, strict=True)):
                found |= dict.fromkeys(lines)
        return list(found)


_started: BoundedCache[int, Started] = BoundedCache(MAX_STARTED)  # by the memory that is waited for
# The lines of traced collectives, by kind, group, and sizes of a local tensor (None: a symbolic size).
_traced: BoundedCache[tuple[str, str, tuple[int | None, ...]], tuple[str, ...]] = BoundedCache(MAX_TRACED)
on_new_world.append(_traced.clear)


def note_traced_line(name: str, local: torch.Tensor, group: str) -> None:
    """Remember the user's line for which a compiler traces a collective.

    Args:
        name: of the operator.
        local: its input.
        group: the name of its process group.
    """
    frames = _FRAME.findall(fx_traceback.current_meta.get("stack_trace") or "")
    lines = [f"{file}:{line}" for file, line in frames if not is_library_file(file)]
    if lines:
        key = (name, group, tuple(size if isinstance(size, int) else None for size in local.shape))
        _traced.keep(key, tuple(dict.fromkeys((*_traced.get(key, ()), lines[-1]))))


class NamedCollective:
    """The call of an operator of functional collectives, whose failures name it.

    Args:
        name: of the operator.
        group: describes a process group by its name.
        call: torch's own call of the operator.
    """

    __slots__ = ("call", "group", "name")

    def __init__(self, name: str, group: Callable[[Any], NamedGroup], call: Callable[..., Any]) -> None:
        self.name, self.group, self.call = name, group, call

    def __hash__(self) -> int:  # that of the operator, which is a key of tables of torch
        return hash(self.call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            found = self.call(*args, **kwargs)
        except RuntimeError as error:
            if is_communication_failure(error):
                self._raise_named(error, _started_by(self.name, args, kwargs))
            raise
        results = found if found.__class__ is list else (found,)
        if results and results[0].__class__ is torch.Tensor:  # else it is traced
            started = _started_by(self.name, args, kwargs)
            for result in results:
                _started.keep(_memory(result), started)
        return found

    def _raise_named(self, error: RuntimeError, started: Started | None) -> None:
        operation, ranks = "a functional collective", ()
        if started is not None:
            over, ranks = self.group(started.group)
            operation = started.described(over)
        named = lost_rank_error(error, operation, ranks)
        if named is not None:
            raise named from error


class NamedWait(NamedCollective):
    """The call of `wait_tensor`."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waited: Any = args[0] if args else kwargs.get("tensor")
        started = _started.pop(_memory(waited), None) if waited.__class__ is torch.Tensor else None
        try:
            return self.call(*args, **kwargs)
        except RuntimeError as error:
            self._raise_named(error, started)
            raise


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _started_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
    given = (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args
    first = given[0][0] if given[0].__class__ is list else given[0]
    return Started(name, first.dtype, first.shape, given[1:])


def name_compiled_failures(group: Callable[[Any], NamedGroup]) -> None:
    """Let the failures of functional collectives name the collective, its mesh axis and its ranks.

    Args:
        group: describes a process group by its name.
    """
    for name in (*STARTS, "wait_tensor"):
        overload = getattr(getattr(torch.ops._c10d_functional, name, None), "default", None)
        if overload is not None and not isinstance(overload.op, NamedCollective):
            kind = NamedWait if name == "wait_tensor" else NamedCollective
            wrap_call(overload, functools.partial(kind, name, group))
