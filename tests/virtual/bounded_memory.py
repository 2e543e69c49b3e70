"""Captured functions in the least memory that recomputation reaches, and the memory that a run of a program takes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.capture.captured_function import Captured
from shardwise.capture.passes import Passes
from shardwise.capture.program import Program
from shardwise.errors import UnsupportedError


class LeastMemory(Captured[Any]):
    """A captured function whose bound is raised to what an error says can be reached."""

    def __init__(self, function: Callable[..., Any], passes: Passes = Passes(), *, verify: bool = True) -> None:  # noqa: B008
        super().__init__(function, 16, verify, None, passes._replace(max_bytes=0))
        self.refusals = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return super().__call__(*args, **kwargs)
            except UnsupportedError as error:
                found = re.search(r"\((\d+) and (\d+) bytes\)", str(error))
                if found is None:
                    raise
                assert int(found[1]) > int(found[2])
                self.passes = self.passes._replace(max_bytes=int(found[1]))
                self.refusals += 1


class Allocations(TorchDispatchMode):
    """Counts the bytes of all memory that operators return and that is not freed, besides some tensors' own."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        self.peak = max(self.peak, sum(self._live.values()))
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._given and key not in self._live:
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)


def measured_peak(program: Program, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes that the values of a program take at once when it runs."""
    with torch.no_grad(), Allocations(inputs) as counted:
        program.run(inputs)
    return counted.peak
