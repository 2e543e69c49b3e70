"""Python while a step is recorded: which code runs, which graphs are used up, and what cannot be repeated."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.optim import lr_scheduler

from shardwise.capture import recorded_states
from shardwise.capture.program_code import is_own_code, is_program_code, is_standard
from shardwise.capture.recorded_states import is_put_back
from shardwise.fabric import rank_generators
from shardwise.rng import cpu_stream
from shardwise.torch_private import gradient_edge

__all__ = ["Watch"]

# torch's own, also where data parallel modules have wrapped them (parallel/data_parallel/asked_gradients.py)
_BACKWARD, _GRAD = (inspect.unwrap(each).__code__ for each in (torch.autograd.backward, torch.autograd.grad))
_VALUE_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
# Files that set random states and tell the recorder, or have generators of their own.
_KNOWN_SETTERS = frozenset(str(module.__file__) for module in (rank_generators, recorded_states, cpu_stream))
_COMPARING = ("shardwise/fabric/digests.py", "shardwise/dispatch/random_ops.py")  # ranks; nothing follows from it
_IMPORTING = "<frozen importlib"  # runs code of modules, once
# Runs layers on empty tensors for their layouts, with a backward that is none of the program.
_PROBING = "shardwise/parallel/tensor_parallel/forward_layouts.py"
_SCHEDULES = str(lr_scheduler.__file__)
_OUTPUT = frozenset({"print", "open", "input", "breakpoint"})
_UNFOLLOWED = frozenset({"globals", "eval", "exec", "locals"})  # they read names that cannot be followed
_STATES = frozenset({"set_state", "manual_seed", "seed", "set_offset"})
_TORCH_READS = frozenset({
    "initial_seed", "get_num_threads", "set_num_threads", "set_flush_denormal", "data_ptr", "_cuda_memoryStats",
    "get_num_interop_threads", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32",
    "_cuda_get_cudnn_benchmark_limit", "_get_cudnn_depthwise_kernel", "_get_mkldnn_deterministic",
    "_get_onednn_allow_tf32", "_get_fp32_precision_getter",
})  # fmt: skip
_OUTSIDE = frozenset({  # modules in C whose functions read or change something outside of the program
    "time", "posix", "nt", "_random", "random", "_io", "io", "_socket", "select", "_posixsubprocess", "_uuid",
    "_contextvars", "numpy.random", "numpy.random.mtrand", "numpy.random._generator", "fcntl", "mmap", "resource",
})  # fmt: skip
_PURE = frozenset({"fspath", "getpid", "cpu_count", "sched_getaffinity", "text_encoding"})
_THREADS = frozenset({"get_ident", "get_native_id", "_count"})
_NOW = frozenset({"now", "utcnow", "today"})
_ONLY_SHOWN = ("/warnings.py", "/linecache.py", "/traceback.py", "/tokenize.py", "/dataclasses.py", "/reprlib.py")
_TORCH_READING = ("torch/_tensor_str.py", "torch/_tensor.py")
_READING = frozenset({"_str", "_str_intern", "__array__", "__dlpack__"})
_FROM_ANYWHERE = _VALUE_READS | _STATES  # refused also where code of a library calls them
# As the standard library does.
_CALLING_FOR_PROGRAM = ("torch/random.py", "torch/cuda/memory.py", "torch/backends/__init__.py")


_FRAMES = frozenset({"_getframe", "_current_frames"})  # by which variables of the caller are read
_COUNTS = frozenset({"get_threshold", "get_count", "get_objects", "get_referrers", "get_stats", "isenabled"})
_NAMED: dict[Any, frozenset[str]] = {
    "datetime": _NOW, "_thread": _THREADS, "gc": _COUNTS, "sys": _FRAMES | {"getrecursionlimit", "getrefcount"},
    "decimal": frozenset({"getcontext"}),
}  # fmt: skip


class Watch:
    """Notes the code that runs between `start` and `stop`.

    Args:
        is_paused: whether the current code runs as Python each time, so that it may do anything.
    """

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        self.codes: dict[types.CodeType, None] = {}
        self.spent: set[Any] = set()  # nodes of autograd
        self.problem: tuple[str, str, str] | None = None  # the problem, the line, a hint
        self.variables: dict[ContextVar[Any], str] = {}  # those that code of the program used, with a line
        self.sets_state = False  # random states are put back that are not recorded
        self._is_paused = is_paused
        self._previous: Any = None
        self._collects = False
        self._seen: set[types.CodeType] = set()  # code that need not be looked at again
        self._libraries: dict[types.CodeType, bool] = {}  # whether what code calls in C is no call of the program

    def __enter__(self) -> Watch:
        self._collects = gc.isenabled()
        gc.disable()  # a collection may call functions that are not part of the step
        self._previous = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._previous is None or callable(self._previous):
            sys.setprofile(self._previous)
        else:  # a profiler in C, which is no function
            self._previous.enable()
        if self._collects:
            gc.enable()

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code not in self._seen:
                self._called(frame)
        elif event == "c_call" and (arg.__name__ in _FROM_ANYWHERE or not self._is_of_library(frame.f_code)):
            self._called_c(frame, arg)

    def _is_of_library(self, code: types.CodeType) -> bool:
        """Whether calls of this code are none of the program; see `_calling`."""
        found = self._libraries.get(code)
        if found is None:
            filename = code.co_filename
            found = not (is_program_code(filename) or is_standard(filename) or filename.endswith(_CALLING_FOR_PROGRAM))
            self._libraries[code] = found
        return found

    def _called(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code is _BACKWARD or code is _GRAD:
            if not _is_inside(frame, _PROBING):
                self._backward(frame)
            return
        filename = code.co_filename
        if filename == "<string>" and not _is_generated_for_program(frame):
            self._seen.add(code)
        elif is_program_code(filename):
            if not _is_inside(frame, _IMPORTING):
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
        elif filename.endswith(_TORCH_READING) and code.co_name in _READING:
            if not self._is_paused():
                self._refuse(
                    frame,
                    f"the values of a tensor are read ({code.co_name}), and decisions by them would be fixed",
                    "compute with the tensor, or return it and read it outside of the captured function",
                )
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
        elif name in _TORCH_READS:
            if isinstance(owner, torch.Tensor | torch.Generator | types.ModuleType):
                self._from_program(frame, f"{name}() of torch is called")
        else:
            self._called_outside(frame, function, name, owner)

    def _called_outside(self, frame: types.FrameType, function: Any, name: str, owner: Any) -> None:
        module = getattr(function, "__module__", None)
        if (name in _UNFOLLOWED and module == "builtins") or (name in _OUTPUT and module in ("builtins", "io", "_io")):
            self._from_program(frame, f"{name}() is called")
        elif module is None and isinstance(owner, type):
            module = owner.__module__
        elif module is None and owner is not None:
            module = type(owner).__module__
        if isinstance(owner, ContextVar):  # a part of the key, if it was reached
            caller = self._calling(frame)
            if caller is not None:
                self.variables.setdefault(owner, f"{caller.f_code.co_filename}:{caller.f_lineno}")
        elif module in _NAMED and is_own_code(frame.f_code.co_filename):
            pass  # layers of a plan compare the threads that call them
        elif (module in _OUTSIDE and name not in _PURE) or (name in _NAMED.get(module, ())):
            self._from_program(frame, f"{name}() of {module} is called")

    def _calling(self, frame: types.FrameType | None) -> types.FrameType | None:
        """The code of the program that makes a call, also by way of the standard library."""
        while frame is not None and not is_program_code(frame.f_code.co_filename):
            filename = frame.f_code.co_filename
            if filename.endswith(_ONLY_SHOWN) or not (is_standard(filename) or filename.endswith(_CALLING_FOR_PROGRAM)):
                return None
            frame = frame.f_back
        return None if frame is None or self._is_paused() or _is_inside(frame, _IMPORTING) else frame

    def _from_program(self, frame: types.FrameType | None, what: str) -> None:
        """Refuse what code of the program calls."""
        frame = self._calling(frame)
        if frame is not None:
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
        found: dict[Any, list[Any]] = {}  # nodes with those that follow in backward
        while waiting:
            node = waiting.pop()
            if node not in found:
                found[node] = [following for following, _ in node.next_functions if following is not None]
                waiting += found[node]
        inputs = given["inputs"]
        if isinstance(inputs, torch.Tensor | GradientEdge):
            inputs = [inputs]
        elif not isinstance(inputs, Sequence):  # a generator can be read once, by autograd
            inputs = None
        self.spent |= _leading_to(inputs, found) if inputs else found.keys()


def _leading_to(inputs: Iterable[Any], graph: dict[Any, list[Any]]) -> set[Any]:
    """The nodes of a graph that backward runs if it is asked for the gradients of these tensors alone."""
    goals = {
        each.node if isinstance(each, GradientEdge) else gradient_edge(each)
        for each in inputs
        if isinstance(each, GradientEdge) or each.requires_grad
    }
    before: dict[Any, list[Any]] = {}
    for node, following in graph.items():
        for each in following:
            before.setdefault(each, []).append(node)
    found: set[Any] = set()
    waiting = [node for goal in goals for node in before.get(goal, ())]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += before.get(node, ())
    return found


def _is_generated_for_program(frame: types.FrameType) -> bool:
    """Whether code that was made of text, as methods of dataclasses are, belongs to a module of the program."""
    names = frame.f_globals
    if str(names.get("__name__", "")).startswith("namedtuple_"):
        return False
    filename = str(names.get("__file__") or "<string>")
    return is_program_code(filename) and not is_own_code(filename)


def _is_inside(frame: types.FrameType | None, filename: str) -> bool:
    """Whether code runs below code of a file with this in its name."""
    while frame is not None:
        if filename in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
