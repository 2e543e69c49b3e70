"""Failures of the collectives of compiled programs in the user's terms.

Compiled code calls torch's functional collectives itself: an operator starts a collective, `wait_tensor` waits for it
and raises the error of the process group, without the collective. So the operators note what they start until it is
waited for. A kernel in Python could not do this: it would hold the interpreter's lock while it waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import traceback as fx_traceback

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import dtype_name
from shardwise.events import is_library_file
from shardwise.fabric.lost_ranks import SHOWN, lost_rank_error

__all__ = ["NamedCollective", "name_compiled_failures", "note_traced_line"]

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
    shape: tuple[int, ...]  # of this rank's tensor, the first one of several
    reduction: str  # empty if there is none
    group: Any  # the name of the process group, or the group

    @property
    def kind(self) -> str:
        """The operator without its variants: in place, with a given result, of several tensors."""
        return re.sub(r"(_coalesced|_out)?_?$", "", self.name)

    def described(self, over: str) -> str:
        """The collective as errors call it."""
        kind = re.sub(r"(_into)?_(tensor|single)$", "", self.kind).replace("_", "-")
        reduction = f" ({self.reduction})" if self.reduction else ""
        sizes = ",".join(map(str, self.shape))
        lines = _traced.get((self.kind, self.group, self.shape), ())
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        where = f" of {' or '.join(lines[:SHOWN])}{more}" if lines else ""
        return f"{kind}{reduction} {over} of local tensors {dtype_name(self.dtype)}[{sizes}] in compiled code{where}"


_started: BoundedCache[int, Started] = BoundedCache(MAX_STARTED)  # by the memory that is waited for
_traced: BoundedCache[tuple[str, str, tuple[int, ...]], tuple[str, ...]] = BoundedCache(MAX_TRACED)


def note_traced_line(name: str, local: torch.Tensor, group: str) -> None:
    """Remember the user's line for which a compiler traces a collective.

    Args:
        name: of the operator.
        local: its input.
        group: the name of its process group.
    """
    shape = tuple(local.shape)
    found = [(file, line) for file, line in _FRAME.findall(fx_traceback.current_meta.get("stack_trace") or "")]
    lines = [f"{file}:{line}" for file, line in found if not is_library_file(file)]
    if lines and all(isinstance(size, int) for size in shape):
        key = (name, group, shape)
        _traced.keep(key, tuple(dict.fromkeys((*_traced.get(key, ()), lines[-1]))))


class NamedCollective:
    """The call of an operator of functional collectives, whose failures name it.

    Args:
        name: of the operator.
        call: torch's own call of it.
        group: describes a process group by its name.
    """

    __slots__ = ("call", "group", "name")

    def __init__(self, name: str, call: Callable[..., Any], group: Callable[[Any], NamedGroup]) -> None:
        self.name, self.call, self.group = name, call, group

    def __hash__(self) -> int:  # that of the operator, which is a key of tables of torch
        return hash(self.call)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            found = self.call(*args, **kwargs)
        except RuntimeError as error:
            self._raise_named(error, _started_by(self.name, args, kwargs))
            raise
        first = found[0] if found.__class__ is list and found else found
        if first.__class__ is torch.Tensor:
            started = _started_by(self.name, args, kwargs)
            for result in found if found.__class__ is list else (found,):
                _started.keep(_memory(result), started)
        return found

    def _raise_named(self, error: RuntimeError, started: Started | None) -> None:
        operation, ranks = "a collective of compiled code", ()
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
        waited = args[0] if args else kwargs.get("tensor")
        started = _started.pop(_memory(waited), None) if waited.__class__ is torch.Tensor else None
        try:
            return self.call(*args, **kwargs)
        except RuntimeError as error:
            self._raise_named(error, started)
            raise


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _started_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
    given = (*args, *(value for key, value in kwargs.items() if key != "out"))
    first = given[0][0] if given[0].__class__ is list else given[0]
    return Started(name, first.dtype, tuple(first.shape), given[1] if isinstance(given[1], str) else "", given[-1])


def name_compiled_failures(group: Callable[[Any], NamedGroup]) -> None:
    """Let the failures of functional collectives name the collective, its mesh axis and its ranks.

    Args:
        group: describes a process group by its name.
    """
    for name in (*STARTS, "wait_tensor"):
        overload = getattr(getattr(torch.ops._c10d_functional, name, None), "default", None)
        if overload is not None and not isinstance(overload._op, NamedCollective):
            overload._op = (NamedWait if name == "wait_tensor" else NamedCollective)(name, overload._op, group)
