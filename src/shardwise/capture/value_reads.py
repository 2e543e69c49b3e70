"""Values that torch reads from tensors without an operator, while a step is recorded: refused, or noted.

`torch.tensor([loss, loss])`, an index by a list of tensors and the like turn tensors into Python's numbers in C++,
where no mode sees it. They do so by the methods of Python's conversions, which are replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shardwise.capture.tape import Tape
from shardwise.torch_private import gradient_edge

__all__ = ["guarding_conversions", "hooked_node", "outside_randomness"]

_CONVERSIONS = ("__float__", "__int__", "__index__", "__bool__", "__complex__")


@contextlib.contextmanager
def guarding_conversions(tape: Tape) -> Iterator[None]:
    """Inside, tensors become numbers only where the tape notes it or they were made of numbers.

    Their version is not read.
    """
    kind: Any = torch.Tensor
    own = {name: vars(kind).get(name) for name in (*_CONVERSIONS, "_version")}
    thread = threading.get_ident()

    def converting(name: str, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(self: Any) -> Any:
            if threading.get_ident() != thread or not tape.is_read(self):
                return original(self)
            count = tape.read_count
            value = original(self) if tape.guards_reads else None
            if tape.read_count == count:
                tape.refuse_read()
            return value

        convert.__name__ = name
        return convert

    version = kind._version

    def read_version(self: Any) -> int:
        if threading.get_ident() == thread:
            tape.check_version_read()
        return version.__get__(self)

    for name in _CONVERSIONS:
        setattr(kind, name, converting(name, getattr(kind, name)))
    kind._version = property(read_version)
    try:
        yield
    finally:
        for name, original in own.items():
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)


def outside_randomness() -> tuple[Any, ...]:
    """The state of numpy's random numbers, whose functions no profile shows.

    Those of Python are not compared: other libraries draw them (beartype chooses the items that it checks). `Watch`
    sees the calls of the program.
    """
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]


def hooked_node(tensor: torch.Tensor) -> bool:
    """Whether hooks were put on the node of autograd that adds to a tensor's gradient; torch does not show these."""
    if not tensor.requires_grad or not tensor.is_leaf:
        return False
    if tensor.is_inference():
        return False
    with torch.inference_mode(False), torch.enable_grad():  # the node is not shown otherwise
        node: Any = gradient_edge(tensor)
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        held = handle.hooks_dict_ref()
        handle.remove()
        if held:
            return True
    return False


def _nothing(*_: Any) -> None:
    """A hook that changes nothing."""
