"""Ranks as threads of one process, one running at a time. A rank that waits for others gives up its turn.

The state of a process that belongs to a rank (its environment, random states, modules of the program, torch's
process groups) is exchanged with the turn, so a script written for N processes runs as it is. The order of turns is
that of the ranks, so a run can be repeated.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from shardwise.errors import AgreementError, UnsupportedError
from shardwise.events import LIBRARIES, user_line
from shardwise.fabric.base import rank_state
from shardwise.fabric.rank_operators import operators_of_ranks

__all__ = ["RankThreads", "rank_threads", "torchrun_environment"]

# `exchange(state)` sets the state of one rank (None for a new one) and returns the state of the previous one.
Exchange = Callable[[Any], Any]

END = 1.0  # seconds that a thread may take to drop its objects
POLL = 1e-3  # seconds between two polls of a thread that is not a rank, or of ranks that all poll


def _wait_for_end(thread: threading.Thread) -> None:
    """Wait until a thread has gone from the system, on Linux.

    `join` returns before the thread drops its objects in torch. That needs the interpreter's lock, and a thread that
    waits for it while the interpreter shuts down aborts the process.
    """
    for _ in range(round(END / POLL)):
        if not os.path.exists(f"/proc/self/task/{thread.native_id}"):
            return
        time.sleep(POLL)


class _Stopped(BaseException):
    """Raised in a waiting rank after another one has failed."""


class _Wait(NamedTuple):
    """A rank's wait: its description and the user's line."""

    ready: Callable[[], bool]
    text: str
    line: str


class RankThreads:
    """The threads of some ranks. Rank 0 is the thread that calls `run`.

    Args:
        size: the number of ranks.
        roots: directories of the program. Each rank imports its own copy of the program's modules; other modules are
            shared.
        environment: variables of each rank in addition to `os.environ`.
    """

    def __init__(self, size: int, roots: Sequence[str] = (), environment: Sequence[Mapping[str, str]] = ()) -> None:
        self.size = size
        self.shared: dict[Any, Any] = {}  # data that ranks exchange, by its owner
        self.failure: tuple[int, BaseException] | None = None  # of the rank that failed first
        self._modules = _RankModules(roots)
        self._exchanges = [*_of_processes(self._modules), *rank_state]
        self._states: list[list[Any]] = [[None] * len(self._exchanges) for _ in range(size)]
        for state, beside in zip(self._states, environment, strict=False):
            state[0] = {**os.environ, **beside}
        self._outside: list[Any] = []
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._all_ended = threading.Semaphore(0)
        self._ranks: dict[int, int] = {}  # by thread
        self._running: int | None = None
        self._waits: dict[int, _Wait] = {}
        self._errors: dict[int, BaseException] = {}  # to be raised by the rank when its turn comes
        self._ended: set[int] = set()

    # ---------------------------------------------------------------- the turns

    def run(self, program: Callable[[int], object]) -> tuple[int, BaseException] | None:
        """Run `program(rank)` on every rank; returns the first failure, if there is one.

        When a rank fails, the others end at their next wait. A `SystemExit` with no status, or 0, is not a failure.
        """
        threads = [
            threading.Thread(target=self._work, args=(rank, program), name="shardwise-rank", daemon=True)
            for rank in range(1, self.size)
        ]
        operators = operators_of_ranks(lambda: self._running)
        with self._modules.imported_by_each_rank(), operators, _running(self):
            for thread in threads:
                thread.start()
            self._outside = [exchange(own) for exchange, own in zip(self._exchanges, self._states[0], strict=True)]
            self._run_rank(0, program)
            self._acquire(self._all_ended)
            for thread in threads:
                thread.join()
                _wait_for_end(thread)
        return self.failure

    def _work(self, rank: int, program: Callable[[int], object]) -> None:
        self._turns[rank].acquire()
        self._run_rank(rank, program)

    def _run_rank(self, rank: int, program: Callable[[int], object]) -> None:
        self._ranks[threading.get_ident()], self._running = rank, rank
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a backward runs on the thread of its rank
                if self.failure is None:
                    program(rank)
        except _Stopped:
            pass
        except SystemExit as end:
            if end.code:
                self._fail(rank, end)
        except BaseException as error:
            self._fail(rank, error)
        self._ended.add(rank)
        self._waits.pop(rank, None)
        if len(self._ended) == self.size:
            self._exchange(rank, self._outside)
            self._all_ended.release()
        else:
            self._give_turn(rank, self._next(rank))

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = rank, error

    def _next(self, rank: int) -> int:
        """The rank whose turn is next: the next one that can continue."""
        order = [(rank + 1 + i) % self.size for i in range(self.size)]
        left = [other for other in order if other not in self._ended]
        for other in left:
            if self.failure is not None or other not in self._waits or self._waits[other].ready():
                return other
        first = min(left)
        self._errors[first] = AgreementError(
            "every rank that has not ended waits for others: " + "; ".join(map(self._where, range(self.size))),
            hint="all ranks of a group must call its collectives, in the same order",
        )
        return first

    def _where(self, rank: int) -> str:
        if rank in self._ended:
            return f"rank {rank} has ended"
        return f"rank {rank} waits for {self._waits[rank].text} at {self._waits[rank].line}"

    def _give_turn(self, rank: int, to: int) -> None:
        self._exchange(rank, self._states[to])
        self._running = to
        self._turns[to].release()

    def _exchange(self, rank: int, state: list[Any]) -> None:
        """Activate the state of another rank and save that of this one."""
        self._states[rank] = [exchange(own) for exchange, own in zip(self._exchanges, state, strict=True)]

    def _acquire(self, turn: threading.Semaphore) -> None:
        """Wait for a turn. Ctrl-C always reaches the first thread."""
        try:
            turn.acquire()
        except KeyboardInterrupt as error:
            self._fail(self._running or 0, error)
            for thread, rank in tuple(self._ranks.items()):
                if rank == self._running and rank not in self._ended:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
                    )
            turn.acquire()

    # ---------------------------------------------------------------- waiting

    def wait_until(self, ready: Callable[[], bool], text: str) -> None:
        """Return when `ready()` holds; other ranks run meanwhile. Raises if no rank can continue.

        Args:
            ready: whether to continue. Called by other ranks too.
            text: the reason of the wait.
        """
        rank = self._ranks.get(threading.get_ident())
        if rank is None:  # a thread that a rank has started
            while not ready():
                self._raise_if_stopped()
                time.sleep(POLL)
            return
        self._raise_if_stopped()
        if not ready():
            self._refuse_imports()
            self._waits[rank] = _Wait(ready, text, user_line())
            self._let_others_run(rank)

    def let_others_run(self) -> None:
        """Give a turn to every other rank that can continue."""
        rank = self._ranks.get(threading.get_ident())
        self._raise_if_stopped()
        if rank is None or self._next(rank) == rank:
            time.sleep(POLL)
        else:
            self._let_others_run(rank)

    def _let_others_run(self, rank: int) -> None:
        after = self._next(rank)
        if after != rank:
            self._give_turn(rank, after)
            self._acquire(self._turns[rank])
        self._waits.pop(rank, None)
        error = self._errors.pop(rank, None)
        if error is not None:
            raise error
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self.failure is not None:
            raise _Stopped

    def _refuse_imports(self) -> None:
        """Raise if a module communicates during its import: it would hold the lock that other ranks need for it."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
                raise UnsupportedError(
                    f"the module {frame.f_locals.get('name')} communicates while it is imported, at {user_line()}",
                    hint="ranks that are threads of one process cannot wait there: do it in a function",
                )
            frame = frame.f_back


_current: list[RankThreads] = []


def rank_threads() -> RankThreads | None:
    """The rank threads that are running; None where each rank has a process, or all are virtual.

    Example:
        >>> rank_threads() is None
        True
    """
    return _current[-1] if _current else None


@contextlib.contextmanager
def _running(threads: RankThreads) -> Iterator[None]:
    if _current:
        raise UnsupportedError("ranks are running as threads already", hint="run one program after the other")
    _current.append(threads)
    try:
        yield
    finally:
        _current.remove(threads)


def torchrun_environment(size: int) -> list[dict[str, str]]:
    """The variables that torchrun sets on one machine, for each rank.

    Example:
        >>> [each["RANK"] for each in torchrun_environment(2)]
        ['0', '1']
    """
    alike = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    return [{**alike, **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))} for rank in range(size)]


# ---------------------------------------------------------------- the state of a process


def _of_processes(modules: _RankModules) -> list[Exchange]:
    """The exchanged state of Python and torch. A rank begins with the current state."""
    made = distributed_c10d
    fresh: dict[str, Callable[[], Any]] = {
        "_world": made._World,
        **dict.fromkeys(
            ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"), dict
        ),
        "_group_count": int,
    }
    attributes: list[tuple[Any, str]] = [
        (sys, "argv"),
        (sys, "stdout"),
        (sys, "stderr"),
        (sys, "excepthook"),
        (builtins, "print"),
        (made, "_backend"),
        (made, "_default_pg_init_method"),
        (logging.Logger.manager, "disable"),
    ]
    return [
        _exchange_environment,
        modules.exchange,
        *(_attribute(made, name, make) for name, make in fresh.items()),
        *(_attribute(owner, name, _always(getattr(owner, name))) for owner, name in attributes),
        _attribute(
            logging.Logger.manager, "loggerDict", lambda known=dict(logging.Logger.manager.loggerDict): {**known}
        ),
        _logging_of(logging.root),
        _random_states(torch.get_default_dtype()),
    ]


def _always(value: Any) -> Callable[[], Any]:
    return lambda: list(value) if isinstance(value, list) else value


def _attribute(owner: Any, name: str, begin: Callable[[], Any]) -> Exchange:
    def exchange(state: Any) -> Any:
        former = (getattr(owner, name),)
        setattr(owner, name, begin() if state is None else state[0])
        return former

    return exchange


def _exchange_environment(state: Any) -> Any:
    former = dict(os.environ)
    if state is not None and state != former:
        for name in former.keys() - state.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in state.items() if former.get(name) != value})
    return former


def _logging_of(root: logging.Logger) -> Exchange:
    first = root.level, list(root.handlers), list(root.filters), root.disabled

    def exchange(state: Any) -> Any:
        former = root.level, root.handlers, root.filters, root.disabled
        level, handlers, filters, root.disabled = state or first
        root.handlers, root.filters = (handlers, filters) if state else (list(handlers), list(filters))
        if level != root.level:
            root.setLevel(level)  # clears the caches of loggers
        return former

    return exchange


def _random_states(dtype: torch.dtype) -> Exchange:
    """CPU generators start with a different seed in every process, torch's CUDA generators with the same seed."""

    def exchange(state: Any) -> Any:
        numpy: Any = sys.modules.get("numpy.random")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        former = (
            torch.get_rng_state(),
            torch.get_default_dtype(),
            random.getstate(),
            numpy and numpy.get_state(legacy=False),
            cuda,
        )
        if state is None:
            torch.set_default_dtype(dtype)
            for seed in (torch.default_generator.seed, random.seed, *([numpy.seed] if numpy else ())):
                seed()
            return former
        torch.set_rng_state(state[0])
        torch.set_default_dtype(state[1])
        random.setstate(state[2])
        if state[3] is not None:
            numpy.set_state(state[3])
        if state[4] is not None:
            torch.cuda.set_rng_state(state[4])
        return former

    return exchange


class _RankModules(importlib.abc.MetaPathFinder):
    """The modules of the program, one copy for every rank, because their top level may depend on the rank."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).resolve() for root in roots]
        self._names: dict[str, None] = {"__main__": None}
        self._first = {"__main__": sys.modules["__main__"]}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        root = fullname.partition(".")[0]
        if root != fullname and root not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and (root in self._names or self._is_of_program(spec)):
            self._names[fullname] = None
        return spec

    def _is_of_program(self, spec: importlib.machinery.ModuleSpec) -> bool:
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        for place in places:
            file = Path(place or "").resolve()
            installed = {"site-packages", "dist-packages"} & set(file.parts) or str(file).startswith(LIBRARIES)
            if not installed and any(root in file.parents for root in self._roots):
                return True
        return False

    def exchange(self, state: Any) -> Any:
        former = {name: sys.modules.pop(name) for name in self._names if name in sys.modules}
        sys.modules.update(self._first if state is None else state)
        return former

    @contextlib.contextmanager
    def imported_by_each_rank(self) -> Iterator[None]:
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
