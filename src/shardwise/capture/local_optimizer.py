"""The step of torch's optimizers as part of a program: torch's own code, on locals.

Their updates are elementwise, so that the step on locals is that on DTensors of the same layouts. Learning rates and
other hyperparameters are read by that code each time; nothing of them is part of the program.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import optim

from shardwise.capture.reachable import MAKING_STATES
from shardwise.capture.tape import Ref, Tape, Unit, refused
from shardwise.events import user_line
from shardwise.fabric.rank_tensor import RankTensor, is_of_ranks, parts_of
from shardwise.optimizer_hook import after_step, before_step, install
from shardwise.tensor import DTensor

__all__ = ["LocalStep", "is_elementwise", "recording_steps", "state_shape"]

_ELEMENTWISE: tuple[type, ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta,
)  # fmt: skip


def _own_step(kind: Any) -> Any:
    """The step of a class without the wrapper that calls hooks."""
    return kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step


_STEPS = {kind: _own_step(kind) for kind in _ELEMENTWISE}


def is_elementwise(optimizer: Any) -> bool:
    """Whether the step of an optimizer works element by element, without hooks."""
    kind = type(optimizer)
    if kind not in _ELEMENTWISE or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return _own_step(kind) is _STEPS[kind]


def state_shape(optimizers: Sequence[Any]) -> list[Any]:
    """The states of optimizers. One that has never stepped has none, and makes them in its first step."""
    return [[(id(p), tuple(state)) for p, state in optimizer.state.items()] for optimizer in optimizers]


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


_parameter_local = operator.attrgetter("_local_tensor")


class LocalStep:
    """One step of an optimizer on locals, given the gradients of those parameters that have one."""

    def __init__(self, optimizer: optim.Optimizer, counts: Sequence[int]) -> None:
        self.optimizer = optimizer
        self.counts = counts  # for each parameter the number of tensors of its gradient; 0 where it has none
        self.making = self.makes_now()
        self.names: list[str | None] = []  # of the parameters, where it was read from a file
        self._held: list[Any] = []
        self._parameters: list[Any] = []
        self._shadow: Any = None
        self._step = _own_step(type(optimizer))

    def makes_now(self) -> list[list[bool]]:
        """Those hyperparameters of each group that decide which states it has."""
        return [[bool(group.get(name)) for name in MAKING_STATES] for group in self.optimizer.param_groups]

    def parameters(self) -> list[Any]:
        """The parameters of all groups."""
        return list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))

    def _current(self) -> list[Any]:
        """All that the shadow was made of."""
        optimizer = self.optimizer
        parameters = self.parameters()
        states = [optimizer.state[p] for p in parameters if p in optimizer.state]
        return [*parameters, *map(_local, parameters), *chain.from_iterable(map(dict.values, states))]

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and states, which it writes to."""
        return [item for item in self._current() if isinstance(item, torch.Tensor)]

    def _bind(self, current: list[Any]) -> None:
        """An optimizer of the same kind whose parameters and states are the locals."""
        optimizer = self.optimizer
        shadow: Any = object.__new__(type(optimizer))
        shadow.__dict__.update(optimizer.__dict__)
        shadow.param_groups = [
            {**group, "params": [_local(p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        shadow.state = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                shadow.state[_local(p)] = {name: _local(value) for name, value in optimizer.state.get(p, {}).items()}
        self._shadow, self._held = shadow, current
        self._parameters = [p for group in shadow.param_groups for p in group["params"]]

    def __call__(self, *grads: torch.Tensor) -> None:
        current = self._current()
        held = self._held
        if len(current) != len(held) or not all(map(operator.is_, current, held)):
            self._bind(current)
        for group, own in zip(self._shadow.param_groups, self.optimizer.param_groups, strict=True):
            params = group["params"]
            group.update(own)
            group["params"] = params
            # torch prefers other kernels for plain tensors than for DTensors
            if group.get("foreach") is None and not group.get("fused") and _has_subclasses(own["params"]):
                group["foreach"] = False
        before = [parameter.grad for parameter in self._parameters]  # a plain parameter is its own local
        at = 0
        for parameter, count in zip(self._parameters, self.counts, strict=True):
            if count:
                parameter.grad = RankTensor(grads[at : at + count]) if is_of_ranks(parameter) else grads[at]
                at += count
            else:
                parameter.grad = None
        try:
            self._step(self._shadow)
        finally:
            for parameter, grad in zip(self._parameters, before, strict=True):
                parameter.grad = grad


def _has_subclasses(parameters: Sequence[Any]) -> bool:
    return any(p.__class__ not in (torch.Tensor, torch.nn.Parameter) for p in parameters)


@contextlib.contextmanager
def recording_steps(tape: Tape) -> Iterator[None]:
    """Inside, the step of an elementwise optimizer is one entry of the tape."""

    def before(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not tape.is_own_thread() or not is_elementwise(optimizer):
            return
        if len(args) > 1 or kwargs:
            raise refused("an optimizer is given a closure", "compute the loss and call backward before the step")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        refs: list[Ref] = []
        counts = []
        for p in parameters:
            parts = () if p.grad is None else parts_of(_local(p.grad))
            counts.append(len(parts))
            refs += [tape.given("the step of an optimizer", part) for part in parts]
            if (
                p.grad is not None
                and isinstance(p, DTensor)
                and (not isinstance(p.grad, DTensor) or p.grad._spec.layout != p._spec.layout)
            ):
                raise refused(
                    f"the gradient of a parameter {p._spec} has another layout than the parameter",
                    "redistribute the gradient first; in strict mode that is not done implicitly",
                )
        name = f"{type(optimizer).__name__.lower()}_step"
        tape.append_unit(Unit(LocalStep(optimizer, counts), tuple(refs), user_line(), name=name))
        tape.pause()

    def after(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if tape.is_own_thread() and is_elementwise(optimizer):
            tape.resume()

    install()
    before_step.append(before)
    after_step.append(after)
    try:
        yield
    finally:
        before_step.remove(before)
        after_step.remove(after)
