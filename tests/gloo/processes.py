"""Real processes for tests: run one function on every rank, within a time limit, and leave nothing behind.

Knows torch.distributed only by the name of a backend; knows nothing of Shardwise.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

START_LIMIT = 120.0  # seconds for all ranks to import torch and meet; several times what a busy machine needs
GRACE = 0.3  # seconds after the first failure in which other ranks may still report theirs
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Helpers that live until their parent exits, by design of who starts them; found in their command lines.
LASTING_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)


class RankFailed(Exception):
    """A rank raised, or died. The message holds the traceback of the rank that failed first."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeout(Exception):
    """Not every rank answered in time. The message holds the stacks of those that did not."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Failure(NamedTuple):
    """How one rank failed; sorted, the likeliest cause is first.

    A rank that died without a message sorts before those that raised: a rank that raises stays alive, so it kills no
    other, while a death breaks the connections of all the others.
    """

    raised: bool
    when: float
    rank: int
    text: str


class Rank:
    """One worker process and the parent's end of its pipe."""

    def __init__(self, rank: int, world_size: int, backend: str | None, folder: Path, port: int) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.pipe, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        command = [sys.executable, "-m", "tests.gloo.worker", str(theirs.fileno()), str(rank), str(world_size)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, backend or "none", str(folder / "store")],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is for the parent alone
            )
        theirs.close()

    def stack(self) -> str:
        """Where this rank is now, as it says itself; needs a rank that is alive."""
        start = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = self.log.read_bytes()[start:].decode(errors="replace")
            if grown and grown == text:
                break
            text = grown
        return text or "(it did not say where it is)"

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return "\n".join(lines) or "(it printed nothing)"

    def kill(self) -> None:
        """End the process and whatever it has started; it is its own process group."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ProcessPool:
    """`world_size` ranks that run one function after another; started when first needed.

    A call that fails or runs out of time ends all ranks, and the next call starts fresh ones. So does a call after one
    that left no process group where there was one.
    """

    def __init__(self, world_size: int, backend: str | None = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self.starts = 0
        self._ranks: list[Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order. `timeout` does not count starting the ranks."""
        call = pickle.dumps((*_importable(function), args))
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                _post(rank.pipe, call)
            answers = self._collect(timeout, function.__qualname__)
        except BaseException:  # an interrupt too: nothing may be left behind
            self.close()
            raise
        if not all(reusable for _, reusable in answers):
            self.close()
        return [pickle.loads(result) for result, _ in answers]

    def close(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self.starts += 1
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-ranks-")
        port = _free_port()
        for rank in range(self.world_size):
            self._ranks.append(Rank(rank, self.world_size, self.backend, Path(self._folder.name), port))
        self._collect(START_LIMIT, "start-up")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """One answer from every rank, in rank order."""
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = {rank.pipe: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcome = _receive(rank)
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    deadline = min(deadline, time.monotonic() + GRACE)
                else:
                    answers[rank.rank] = outcome
        if failures:
            raise _failed(what, sorted(failures), self.world_size)
        if waiting:
            raise _timed_out(what, timeout, list(waiting.values()), self.world_size)
        return [answers[rank] for rank in range(self.world_size)]


def run_processes(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, backend: str | None = "gloo"
) -> list[Any]:
    """`function(*args)` on `world_size` fresh processes; the results in rank order.

    `function` is one that another process can import: defined in a module, not inside a function. Each rank has
    torchrun's variables in its environment and, unless `backend` is None, a default process group.
    """
    with ProcessPool(world_size, backend) as pool:
        return pool.run(function, *args, timeout=timeout)


def child_processes() -> dict[int, str]:
    """The running children of this process: pid to command line. Linux only; elsewhere nothing is found."""
    children: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid ..."; the name may hold spaces and parentheses
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(parent) == os.getpid() and state != "Z" and not any(helper in command for helper in LASTING_HELPERS):
            children[int(folder.name)] = command
    return children


def _importable(function: Callable[..., Any]) -> tuple[str, str]:
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or "<" in qualname:
        raise TypeError(f"{module}.{qualname}: another process cannot import it; define it at the top of a module")
    return module, qualname


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _post(pipe: Connection, call: bytes) -> None:
    with contextlib.suppress(OSError):  # the rank died between calls; collecting its answer says so
        pipe.send_bytes(call)


def _receive(rank: Rank) -> Any:
    """The answer of a rank, or a Failure."""
    try:
        kind, payload = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, OSError):
        code = rank.process.wait()
        text = f"the process ended (exit status {code}) without an answer; it last printed:\n{rank.last_words()}"
        return Failure(False, time.monotonic(), rank.rank, text)
    if kind == "failed":
        when, text = payload
        return Failure(True, when, rank.rank, text)
    return payload


def _failed(what: str, failures: Sequence[Failure], world_size: int) -> RankFailed:
    first, *others = failures
    lines = [f"{what}: rank {first.rank} of {world_size} failed first", "", first.text.rstrip()]
    lines += [f"after it, rank {other.rank}: {other.text.rstrip().splitlines()[-1]}" for other in others]
    return RankFailed("\n".join(lines), first.rank)


def _timed_out(what: str, timeout: float, hanging: Sequence[Rank], world_size: int) -> RankTimeout:
    ranks = tuple(rank.rank for rank in hanging)
    lines = [f"{what}: no answer within {timeout:g} s from rank {', '.join(map(str, ranks))} of {world_size}"]
    for rank in hanging:
        lines += ["", f"rank {rank.rank} is at:", rank.stack().rstrip()]
    return RankTimeout("\n".join(lines), ranks)
