"""Random states of virtual ranks: each rank draws as a process with its own generator would.

Processes with equal seeds draw the same numbers. So every virtual rank begins at the state of the one plain generator,
and all ranks must leave it in the same state: one generator cannot hold several states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from shardwise.errors import AgreementError, UnsupportedError
from shardwise.fabric.shared_writes import is_traced
from shardwise.rng.draw_blocks import default_generator
from shardwise.rng.random_fill import fills
from shardwise.torch_private import OpOverload

__all__ = ["StateListener", "are_states_recorded", "draws", "draws_alike", "listen_to_states"]


class StateListener(Protocol):
    """A listener for saving and restoring random states: a recorder that repeats it later."""

    def kept(self, generators: Sequence[torch.Generator]) -> None:
        """Random states were saved."""
        ...

    def put_back(self) -> None:
        """The states saved last were restored."""
        ...

    def same(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
        """Whether states are equal."""
        ...


_listener: StateListener | None = None


@contextlib.contextmanager
def listen_to_states(listener: StateListener) -> Iterator[None]:
    """Inside, `listener` is notified."""
    global _listener
    previous, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = previous


def are_states_recorded() -> bool:
    """Whether a listener repeats later what happens to random states."""
    return _listener is not None


def draws(op: Any) -> bool:
    """Whether an operator may draw numbers from a generator.

    Example:
        >>> draws(torch.ops.aten.native_dropout.default), draws(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def draws_alike(op: OpOverload, rows: Sequence[Sequence[Any]], call: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Each rank's result of a random operator, all from the same random state.

    Args:
        op: the operator.
        rows: the arguments of each rank. Numbers come from the generators among them, else from those of the devices.
        call: runs the operator on a row.
    """
    if any(is_traced(leaf) for leaf in rows[0] if isinstance(leaf, torch.Tensor)):
        return _drawn_in_graph(op, rows, call)
    generators = _generators(rows[0])
    before = [generator.get_state() for generator in generators]
    if _listener is not None:
        _listener.kept(generators)
    after: list[torch.Tensor] = []
    results = []
    for rank, row in enumerate(rows):
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        if _listener is not None:
            _listener.put_back()
        results.append(call(row))
        left = [generator.get_state() for generator in generators]
        if rank == 0:
            after = left
        elif not (_same(left, after) if _listener is None else _listener.same(left, after)):
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            raise AgreementError(
                f"{op} draws more random numbers on virtual rank {rank} than on rank 0, or fewer: one generator "
                "replaces every rank's own, and cannot hold different states",
                hint="draw as many numbers on every rank: from tensors of the same shape, or on the DTensor itself, "
                "which draws the numbers of one device",
            )
    return results


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def _drawn_in_graph(op: OpOverload, rows: Sequence[Sequence[Any]], call: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """The results in a compiled program, which has no random states: all ranks get the numbers of the first one."""
    arguments = dict(zip([argument.name for argument in op._schema.arguments], rows[0], strict=False))
    if arguments.get("train") is False or arguments.get("dropout_p") == 0:  # nothing is drawn
        return [call(row) for row in rows]
    shapes = {row[0].shape for row in rows}
    if len(shapes) > 1 or not (fills(op) or op is torch.ops.aten.native_dropout.default):
        raise UnsupportedError(
            f"{op} on the locals of virtual ranks, inside a compiled program: only fills and dropout of locals of one "
            "shape draw the same numbers on every rank there",
            hint="call it outside of compiled code, or on the DTensor itself",
        )
    first = call(rows[0])
    if fills(op):
        in_place = first is rows[0][0]
        return [first, *[row[0].copy_(first) if in_place else first.clone() for row in rows[1:]]]
    p, mask = arguments["p"], first[1]
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return [first, *[(row[0] * mask * scale, mask.clone()) for row in rows[1:]]]


def _generators(leaves: Iterable[Any]) -> list[torch.Generator]:
    held = list(leaves)
    given = [leaf for leaf in held if isinstance(leaf, torch.Generator)]
    devices = dict.fromkeys(leaf.device for leaf in held if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
    return given or [default_generator(device) for device in devices]
