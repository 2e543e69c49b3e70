"""Methods of modules under both kinds of data parallelism: whether backward reduces gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardwise.compilers import never_traced
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.parallel.data_parallel.module_tree import STATE, states_under
from shardwise.parallel.data_parallel.schedule import ModuleState, leave_forwards, thread_state
from shardwise.parallel.data_parallel.waiting_gradients import follow_waiting_gradients

__all__ = ["DataParallelModule"]


class DataParallelModule:
    """The methods that `fully_shard` and `replicate` both add to a module: whether backward reduces gradients.

    Example:
        >>> import torch, shardwise as sw
        >>> isinstance(sw.replicate(torch.nn.Linear(4, 4), sw.init_device_mesh("cpu", (2,))), DataParallelModule)
        True
    """

    _shown_as = ""  # before the name of the class in a repr, as torch shows it; the class itself keeps its name

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class: `model[:2]` of a Sequential, or `type(model)(config)`, is not parallel."""
        if not (args or kwargs):
            return super().__new__(cls)  # a copy, whose state follows
        original = next(kind for kind in cls.__mro__ if not issubclass(kind, DataParallelModule))
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        if is_dynamo_compiling():  # a caller is compiled
            return parent.__call__(*args, **kwargs)
        running = len(thread_state.frames)
        try:
            return parent.__call__(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                leave_forwards(running)
            raise

    def __repr__(self) -> str:
        return f"{self._shown_as}{super().__repr__()}"

    def _states(self, recurse: bool = True) -> list[ModuleState]:
        return list(states_under(self, recurse=recurse))  # pyright: ignore[reportArgumentType]  # it is a Module too

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not, they accumulate locally, without communication."""
        if not requires_gradient_sync:
            follow_waiting_gradients()
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of the ranks' gradients of this module's own parameters.

        The default is the number of ranks for plain inputs, and 1 for DTensors, whose loss is that of the global batch.
        """
        getattr(self, STATE).gradient_divide_factor = factor

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients locally and reduces nothing."""
        states = self._states()
        before = [state.requires_gradient_sync for state in states]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.requires_gradient_sync = value


never_traced(DataParallelModule.__call__, callees=True)  # so that it sees interrupts of compiled modules, too
