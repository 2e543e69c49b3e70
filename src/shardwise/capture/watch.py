"""Python while a step is recorded: which code runs, which graphs are used up, and what cannot be repeated."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardwise.capture import recorded_states
from shardwise.capture.reachable import is_program_code
from shardwise.capture.recorded_states import is_put_back
from shardwise.fabric import rank_generators
from shardwise.rng import cpu_stream

__all__ = ["Watch"]

_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__
_VALUE_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
# Files that set random states and tell the recorder, or have generators of their own.
_KNOWN_SETTERS = frozenset(str(module.__file__) for module in (rank_generators, recorded_states, cpu_stream))
_COMPARING = ("shardwise/fabric/digests.py", "shardwise/dispatch/random_ops.py")  # ranks; nothing follows from it
_SCHEDULES = str(lr_scheduler.__file__)
_OUTPUT = frozenset({"print", "open", "input", "breakpoint"})
_CLOCKS = frozenset({
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "now", "utcnow",
    "today", "random", "getrandbits", "urandom", "rand", "randn", "randint", "uniform", "normal", "choice", "shuffle",
    "permutation", "sleep", "system", "write", "read", "readline",
})  # fmt: skip
_STATES = frozenset({"set_state", "manual_seed", "seed", "set_offset"})
_UNREPEATABLE = ("random", "_random", "numpy.random", "numpy.random.mtrand", "datetime", "_io", "io")
_NAMES = _VALUE_READS | _OUTPUT | _STATES | _CLOCKS


class Watch:
    """Notes the code that runs between `start` and `stop`.

    Args:
        is_paused: whether the current code runs as Python each time, so that it may do anything.
    """

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        self.codes: dict[types.CodeType, None] = {}
        self.spent: set[Any] = set()  # nodes of autograd
        self.problem: tuple[str, str, str] | None = None  # the problem, the line, a hint
        self.sets_state = False  # random states are put back that are not recorded
        self._is_paused = is_paused
        self._previous: Any = None
        self._collects = False
        self._seen: set[types.CodeType] = set()  # code that need not be looked at again

    def __enter__(self) -> Watch:
        self._collects = gc.isenabled()
        gc.disable()  # a collection may call functions that are not part of the step
        self._previous = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(self._previous)
        if self._collects:
            gc.enable()

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code not in self._seen:
                self._called(frame)
        elif event == "c_call" and getattr(arg, "__name__", "") in _NAMES:
            self._called_c(frame, arg)

    def _called(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code is _BACKWARD or code is _GRAD:
            self._backward(frame)
            return
        filename = code.co_filename
        if is_program_code(filename):
            if not _is_importing(frame):
                self._seen.add(code)
                self.codes[code] = None
        elif filename == _SCHEDULES and code.co_name in ("step", "get_lr", "_update_lr"):
            self._refuse(
                frame,
                "a learning rate schedule advances inside the captured function",
                "call scheduler.step() after it: learning rates are read again on each call",
            )
        elif filename.endswith("torch/_dynamo/eval_frame.py") and code.co_name == "compile_wrapper":
            self._refuse(frame, "compiled code runs", "capture the function without torch.compile inside")
        elif filename.endswith(("/random.py", "/logging/__init__.py", "/secrets.py")) and "torch" not in filename:
            self._from_program(frame.f_back, f"{code.co_name} of {filename.rsplit('/', 1)[-1]} is called")
        else:
            self._seen.add(code)

    def _called_c(self, frame: types.FrameType, function: Any) -> None:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        if name in _VALUE_READS and isinstance(owner, torch.Tensor) and not self._is_paused():
            if not frame.f_code.co_filename.endswith(_COMPARING):
                self._refuse(
                    frame,
                    f"the values of a tensor are read ({name}()), and decisions by them would be fixed",
                    "compute with the tensor, or return it and read it outside of the captured function",
                )
        elif name in _STATES and isinstance(owner, torch.Generator):
            if frame.f_code.co_filename in _KNOWN_SETTERS:
                pass
            elif name == "set_state" and is_put_back(frame):
                self.sets_state = True
            elif not self._is_paused():
                self._refuse(frame, f"the state of a random generator is set ({name})", "do that outside")
        elif name in _OUTPUT and getattr(function, "__module__", None) in ("builtins", "io", "_io"):
            self._from_program(frame, f"{name}() is called")
        else:
            module = getattr(function, "__module__", None) or getattr(owner, "__module__", None)
            if module in ("time", "_random", "posix", "datetime") or type(owner).__module__ in _UNREPEATABLE:
                self._from_program(frame, f"{name}() of {module or type(owner).__name__} is called")

    def _from_program(self, frame: types.FrameType | None, what: str) -> None:
        if frame is None or not is_program_code(frame.f_code.co_filename) or self._is_paused():
            return
        if not _is_importing(frame):
            self._refuse(frame, what + ", which a program of operators would not repeat", "do that outside")

    def _refuse(self, frame: types.FrameType, what: str, hint: str) -> None:
        if self.problem is not None:
            return
        at: types.FrameType | None = frame
        while at is not None and not is_program_code(at.f_code.co_filename):
            at = at.f_back
        line = "backward" if at is None else f"{at.f_code.co_filename}:{at.f_lineno}"
        self.problem = (what, line, hint)

    def _backward(self, frame: types.FrameType) -> None:
        given = frame.f_locals
        roots: Any = given["tensors"] if "tensors" in given else given["outputs"]
        retain = given["retain_graph"]
        if given["create_graph"] if retain is None else retain:
            return
        if isinstance(roots, torch.Tensor):
            roots = [roots]
        waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node not in self.spent:
                self.spent.add(node)
                waiting += [following for following, _ in node.next_functions if following is not None]


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether code runs because a module is imported, which is done once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
