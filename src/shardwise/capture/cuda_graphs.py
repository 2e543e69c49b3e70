"""Runs of operators as CUDA graphs: one launch for all of their kernels.

A graph reads and writes fixed addresses. An input that has another address in a later call is copied from then on;
results that leave the program are copied, because the next replay writes over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Replayed", "capture_on_device"]

Run = Callable[..., Sequence[torch.Tensor]]
Captured = tuple[Callable[[], Any], Sequence[torch.Tensor]]
MOST_CAPTURES = 4


def capture_on_device(run: Run, given: Sequence[torch.Tensor], pool: Any) -> Captured:
    """The replay of a CUDA graph of `run(*given)`, and the results that it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = run(*given)
    return graph.replay, made


class Replayed:
    """A run of operators that is captured at its second call and replayed from then on.

    Args:
        run: the operators.
        leaves: for each result, whether it leaves the program.
        pool: the memory pool of the program's graphs, which are captured in the order in which they run.
        capture: makes a graph; another one in tests.
    """

    def __init__(
        self, run: Run, leaves: Sequence[bool], pool: Any = None, capture: Callable[..., Captured] = capture_on_device
    ) -> None:
        self.run, self.leaves, self.pool, self.capture = run, leaves, pool, capture
        self.captures = 0
        self._first = True
        self._copied: set[int] = set()
        self._given: list[torch.Tensor] = []  # keeps the memory that the graph reads
        self._addresses: list[int] = []
        self._made: Sequence[torch.Tensor] = ()
        self._replay: Callable[[], Any] | None = None

    def __call__(self, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._first or self.captures > MOST_CAPTURES:
            return self._plainly(given)
        addresses = [tensor.data_ptr() for tensor in given]
        moved = {
            at
            for at, (now, was) in enumerate(zip(addresses, self._addresses, strict=False))
            if now != was and at not in self._copied
        }
        if self._replay is None or moved:
            self._copied |= moved
            self.captures += 1
            if self.captures > MOST_CAPTURES:
                self._replay, self._given, self._made = None, [], ()
                return self._plainly(given)
            self._bind(given, addresses)
        for at in self._copied:
            self._given[at].copy_(given[at])
        assert self._replay is not None
        self._replay()
        return [made.clone() if leaves else made for made, leaves in zip(self._made, self.leaves, strict=True)]

    def _bind(self, given: Sequence[torch.Tensor], addresses: list[int]) -> None:
        self._given = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            if at in self._copied
            else tensor
            for at, tensor in enumerate(given)
        ]
        self._addresses = addresses
        # memory that is free now may be written to by graphs of the pool that were captured later
        self._replay, self._made = self.capture(self.run, self._given, self.pool if self.captures == 1 else None)

    def _plainly(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the operators. Where they write to what they are given, they are never captured."""
        counted = not any(tensor.is_inference() for tensor in given)  # such tensors count no writes
        before = [tensor._version for tensor in given] if counted else []
        made = self.run(*given)
        if not counted or before != [tensor._version for tensor in given]:
            self.captures = MOST_CAPTURES + 1
        self._first = False
        return made
