"""Rank agreement: ranks exchange the list of collectives they issue, beside the process groups.

A thread in each rank publishes the rank's state in the store and reads those of others: diverging sequences, a wait for
a rank that has ended, and circular waits become an error on all ranks instead of a hang. Collectives are polled, so
that the error can be raised in the middle of one. At the end of a program ranks meet and compare once more, and a
difference becomes the exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing.process
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from shardwise.errors import AgreementError
from shardwise.events import user_line
from shardwise.fabric.collective_log import GroupLog, Ranks, difference_text, ranks_name

__all__ = ["CheckedGroup", "RankCheck", "exit_with"]

T = TypeVar("T")
# seconds of silence after which a rank is considered dead; one that holds Python's lock for long is silent, too
SILENCE = float(os.environ.get("SHARDWISE_CHECK_SILENCE", "20"))
FAILED_SILENCE = min(SILENCE, 6.0)  # the same after a collective has failed, which must have a reason on some rank
SIGHTINGS = 3  # how many times ranks must be found waiting for the same collectives before a circle is reported
SIGHTINGS_THREADS = 10  # the same if several threads issue collectives: another thread may be about to issue one
HINT = "every rank must issue the same collectives in the same order"
ENDED = "has ended its program"

_exit_status: list[int] = []


def exit_with(status: int) -> None:
    """Let the ending process exit with this status."""
    _exit_status[:] = [status]


def _end_with_status() -> None:
    """Exit with the status of a difference that was found when the program had ended."""
    if _exit_status:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


atexit.register(_end_with_status)  # registered early, so it runs after the programs' own functions


class RankCheck:
    """One rank's side of the agreement.

    Args:
        store: where ranks publish; used by this object alone.
        rank: of this process.
        world: how many there are.
        interval: seconds between looks.
        give_up: lets the process end although collectives are in flight; called when ranks have diverged.
    """

    def __init__(
        self, store: Any, rank: int, world: int, interval: float = 1.0, give_up: Callable[[], object] = lambda: None
    ) -> None:
        self.rank, self.world, self.interval = rank, world, interval
        self.verdict: str | None = None
        self.raised = False  # whether the program got the verdict
        self.issuing = threading.RLock()  # held while a collective is noted and issued, so that both have one order
        self._store, self._give_up = store, give_up
        self._logs: dict[str, GroupLog] = {}
        self._members: dict[str, Ranks] = {}
        self._status, self._beat = "running", 0
        self._waits: dict[int, tuple[str, int]] = {}  # by thread: the group, and the number of the collective
        self._failures: list[str] = []  # the groups of collectives that failed and are being explained
        self._threads: set[int] = set()  # those that issue collectives
        self._backward: set[int] = set()  # of them, autograd's: the thread that started the backward waits meanwhile
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of a rank, and when it was new
        self._circles: dict[tuple[Any, ...], int] = {}
        self._helpers: list[threading.Thread] = []
        self._stop, self._main = threading.Event(), threading.main_thread().ident
        self._hook = sys.excepthook
        sys.excepthook = self._failed
        store.add("started", 1)
        atexit.register(self._at_exit)
        if multiprocessing.process.parent_process() is not None:  # forked ones end without atexit
            multiprocessing.util.Finalize(None, self._at_exit_of_child, exitpriority=0)
        self._thread = threading.Thread(target=self._watch, name="shardwise-agreement", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the program's side

    def enter(self, ranks: Ranks, text: str, channel: str = "") -> str:
        """Log a collective that is about to be issued. Raises if the ranks have diverged. Returns the name of its
        sequence.

        Args:
            ranks: those that issue it.
            text: a description, the same on all of them.
            channel: the name of another sequence of these ranks, for a separate group in another thread.
        """
        self._raise_if_parted()
        key = _key(ranks, channel)
        line, thread = user_line(), threading.current_thread()
        self._threads.add(thread.ident or 0)
        if thread.ident == self._main:
            line = "exit" if line == "backward" else line  # no user code is running
        elif line == "backward":
            self._backward.add(thread.ident or 0)
        else:
            line = f"{line} in thread {thread.name}"
        with self.issuing:
            log = self._logs.get(key)
            if log is None:
                self._members[key] = ranks
                log = self._logs[key] = GroupLog()
            log.add(text, line)
        return key

    def until(self, done: Callable[[], bool], key: str) -> None:
        """Wait for a joint operation of the ranks. Raises if they have diverged."""
        pause, thread = 1e-5, threading.get_ident()
        self._waits[thread] = (key, self._logs[key].count)
        try:
            while not done():
                self._raise_if_parted()
                time.sleep(pause)
                pause = min(pause * 1.2, 5e-4)
        finally:
            self._waits.pop(thread, None)

    def run(self, function: Callable[[], T], ranks: Ranks, text: str, channel: str = "") -> T:
        """Run a blocking call in another thread, because nothing can be raised inside it, and wait for it here."""
        key = self.enter(ranks, text, channel)
        result: list[Any] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def work() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                result.append((function(), None))
            except BaseException as error:
                result.append((None, error))

        self.start_thread(work)
        self.until(lambda: bool(result), key)
        value, error = result[0]
        if isinstance(error, RuntimeError):
            self.explain_failure(key)
        if error is not None:
            raise error
        return value

    def start_thread(self, function: Callable[[], object]) -> threading.Thread:
        """Start a thread that may wait for ever; it does not keep the process alive."""
        thread = threading.Thread(target=function, name="shardwise-collective", daemon=True)
        self._helpers = [*(helper for helper in self._helpers if helper.is_alive()), thread]
        thread.start()
        return thread

    def meet(self, ranks: Ranks, text: str, final: bool = False) -> None:
        """Wait until all of these ranks call this, and compare now. Raises on all of them if they have diverged.

        Args:
            ranks: those that must come.
            text: the reason of the meeting.
            final: whether nothing follows, so that sequences must also be equal in length.
        """
        key = self.enter(ranks, text)
        place = f"{key} {self._logs[key].count}"
        wanted = min(len(ranks), self._store.add("started", 0)) if final else len(ranks)
        self._publish()
        self._gather(place, wanted, key)
        for mine in list(self._logs):
            self._compare(mine, final)
        self._gather(f"{place} compared", wanted, key)
        if self._store.check(["suspects"]):
            self._gather(f"{place} parted", wanted + 1, key)  # no rank joins; the verdict is raised

    def _gather(self, place: str, wanted: int, key: str) -> None:
        """Wait until this many ranks have arrived; poll meanwhile, at shorter intervals."""
        self._store.add(place, 1)
        now = time.monotonic()
        next_poll, next_look = now, now + min(self.interval, 0.2)

        def arrived() -> bool:
            nonlocal next_poll, next_look
            now = time.monotonic()
            if now < next_poll:
                return False
            if now > next_look:
                self._look()
                next_look = now + min(self.interval, 0.2)
            next_poll = now + 0.005
            return self._store.add(place, 0) >= wanted

        self.until(arrived, key)

    def explain_failure(self, key: str) -> None:
        """Raise the reason of a failed collective, if known, for example that another rank's process ended."""
        deadline = time.monotonic() + FAILED_SILENCE + 5 * self.interval
        self._failures.append(key)
        try:
            self.until(lambda: time.monotonic() > deadline, key)
        finally:
            self._failures.remove(key)

    def _raise_if_parted(self) -> None:
        if self.verdict is not None:
            self.raised = True
            raise AgreementError(self.verdict, hint=HINT)

    # ---------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._look()
            except Exception as error:  # the store does not answer
                if self._stop.is_set() or self.verdict is not None:
                    return
                if self._waits:
                    self.verdict = (
                        f"rank {self.rank} of {socket.gethostname()} cannot reach the store: {error.__cause__ or error}"
                    )
                    return

    def _look(self) -> None:
        self._publish()
        said = self._read("verdict")
        if said is not None:
            self._take(said)
            return
        suspects = self._read("suspects")
        if suspects is not None:
            self._testify(suspects["group"], suspects["ranks"])
            return
        for key in list(self._logs):
            self._compare(key)
        self._look_at_waits()

    def _publish(self) -> None:
        self._beat += 1
        alive, waiting = self._threads & set(sys._current_frames()), set(self._waits)
        stuck = len(alive - waiting) <= len(self._backward & waiting)  # otherwise a running thread may still issue one
        state = {
            "beat": self._beat,
            "host": socket.gethostname(),
            "status": self._status,
            "waits": list(self._waits.values()) if stuck else [],
            "threads": len(alive - self._backward),
            "at": self._where(),
            "groups": {key: log.summary() for key, log in list(self._logs.items())},
        }
        self._store.set(f"rank{self.rank}", json.dumps(state))

    def _where(self) -> str:
        """The program's current line, or that of the collective it waits in."""
        for key, _ in list(self._waits.values()):
            if self._logs[key].entries:
                last = self._logs[key].entries[-1]
                return f"{last.text}, at {last.line}"
        return user_line(sys._current_frames().get(self._main or 0))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _state(self, rank: int) -> Any:
        state = self._read(f"rank{rank}")
        if state is not None:
            beat, _ = self._heard.get(rank, (-1, 0.0))
            if state["beat"] != beat:
                self._heard[rank] = (state["beat"], time.monotonic())
        return state

    def _compare(self, key: str, final: bool = False) -> None:
        """Compare this rank's sequence in a group with the previous rank's. All ranks do, so all pairs are compared."""
        ranks, log = self._members[key], self._logs[key]
        other = ranks[ranks.index(self.rank) - 1]
        state = self._state(other) if other != self.rank else None
        theirs = None if state is None else state["groups"].get(key, GroupLog().summary() if final else None)
        if theirs is not None and (log.differs_from(theirs) or (final and theirs["count"] != log.count)):
            suspects = json.dumps({"group": key, "ranks": sorted((self.rank, other))})
            self._store.compare_set("suspects", "", suspects)

    def _testify(self, key: str, suspects: list[int]) -> None:
        """The two ranks whose sequences differ publish their logs; the first of them informs all ranks."""
        if self.rank in suspects:
            self._store.set(f"evidence{self.rank}", json.dumps(self._logs.get(key, GroupLog()).evidence()))
        if self.rank == suspects[0]:
            evidence = {rank: self._read(f"evidence{rank}") for rank in suspects}
            if all(evidence.values()):
                self._tell(difference_text(_ranks(key), evidence))

    # ---------------------------------------------------------------- waiting for nothing

    def _look_at_waits(self) -> None:
        """Detect a wait that cannot end: the other rank has ended, or waits for this one."""
        for key in list(self._failures):  # a rank that ended inside the collective had reached it
            for rank in _ranks(key):
                if rank != self.rank and (gone := self._gone(rank, self._state(rank), FAILED_SILENCE)):
                    self._tell(f"{gone}, but {self._text_of(self.rank)}")
                    return
        for key, number in list(self._waits.values()):
            circle = self._circle([self.rank], key, number)
            if circle is not None:
                break
        else:
            return
        members = tuple(circle)
        self._circles = {members: self._circles.get(members, 0) + 1}
        threads = max([len(self._threads), *(self._state(rank)["threads"] for rank in circle[:-1])])
        if self._circles[members] >= (SIGHTINGS if threads < 2 else SIGHTINGS_THREADS):
            self._tell(f"the ranks wait for each other in different collectives, and none can go on:\n{circle[-1]}")

    def _circle(self, trail: list[int], key: str, number: int) -> list[Any] | None:
        """Ranks that wait for each other, found by following their waits; the last item is the reason."""
        for rank in _ranks(key):
            if rank == self.rank and len(trail) == 1:
                continue
            state = self._state(rank)
            reached = 0 if state is None else state["groups"].get(key, {"count": 0})["count"]
            if state is None or reached >= number:
                continue
            if gone := self._gone(rank, state):
                self._tell(f"{gone}, but {self._text_of(trail[-1])}")
                return None
            if rank in trail:
                circle = trail[trail.index(rank) :]
                return [*circle, "\n".join(f"  {self._text_of(each)}" for each in sorted(circle))]
            for waits in state["waits"]:
                found = self._circle([*trail, rank], *waits)
                if found is not None:
                    return found
        return None

    def _gone(self, rank: int, state: Mapping[str, Any] | None, silence: float = SILENCE) -> str | None:
        """How a rank ended, if it did; a rank without any message has not started."""
        if state is None:
            return None
        if state["status"] != "running":
            return f"rank {rank} {state['status']}"
        silent = time.monotonic() - self._heard[rank][1]
        if silent > max(silence, 5 * self.interval):
            who = f"rank {rank} of {state['host']}"
            return f"{who} has not been heard of for {silent:.0f} s (it was last at {state['at']})"
        return None

    def _text_of(self, rank: int) -> str:
        state = self._state(rank)
        waits = [] if state is None else state["waits"]
        where = f" with {ranks_name(_ranks(waits[0][0]))}" if waits else ""
        return f"rank {rank} waits{where} in {state['at']}" if state is not None else f"rank {rank} waits"

    # ---------------------------------------------------------------- telling everyone

    def _tell(self, text: str) -> None:
        self._store.compare_set("verdict", "", json.dumps(text))
        self._take(self._read("verdict"))

    def _take(self, text: str) -> None:
        self.verdict = text
        self._store.add("heard", 1)
        self._stop.set()

    # ---------------------------------------------------------------- the end

    def _failed(self, kind: Any, error: Any, trace: Any) -> None:
        """Inform the others of an uncaught exception."""
        self.fail(error)
        self._hook(kind, error, trace)

    def fail(self, error: BaseException) -> None:
        """Inform the others that the program ends with this error; nothing is compared. sys.exit(0) is no error."""
        if not isinstance(error, AgreementError) and not (isinstance(error, SystemExit) and not error.code):
            said = str(error).partition("\n")[0]
            self._status = f"ended with {type(error).__name__}{': ' if said else ''}{said}"

    def compare_all(self, text: str) -> None:
        """Called when nothing more is issued: compare all sequences with the other ranks'. Raises if they differ."""
        if self._status == "running" and not self.raised:
            self.meet(tuple(range(self.world)), text, final=True)

    def close(self) -> None:
        """End the check: inform the others. The owner of the store stays until they have read it."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._failed:
            sys.excepthook = self._hook
        if self._status == "running":
            self._status = ENDED
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * self.interval)
        with contextlib.suppress(Exception):  # the store may be gone already, and the other ranks too
            self._publish()
            key, wanted = ("heard", self.world) if self.verdict is not None else ("left", self._store.add("started", 0))
            self._store.add("left", 1)
            # the first rank may hold the store: it leaves last
            deadline = time.monotonic() + 4 * min(self.interval, 5.0)
            stays = self.verdict is not None or (self.rank == 0 and self._status == ENDED)
            while stays and time.monotonic() < deadline and self._store.add(key, 0) < wanted:
                time.sleep(0.02)

    def _at_exit(self) -> None:
        told = self.raised or self._status != "running"
        with contextlib.suppress(Exception):  # a difference is in the verdict; without a store nothing can be compared
            self.compare_all("the end of the program")
        self.close()
        if self.verdict is not None:
            if not told:
                print(f"shardwise: rank {self.rank}: {AgreementError(self.verdict, hint=HINT)}", file=sys.stderr)
                exit_with(1)
            self._give_up()  # a collective that will never end must not keep the process
            if any(helper.is_alive() for helper in self._helpers):  # torch aborts if the interpreter ends first
                _exit_status[:] = [1]

    def _at_exit_of_child(self) -> None:
        """At the end of a process of multiprocessing, whose status is that of SystemExit."""
        if self._status == ENDED:
            return
        error = sys.exc_info()[1]
        if error is not None:
            self.fail(error)
        self._at_exit()
        if _exit_status:
            raise SystemExit(_exit_status[0])


class _CheckedWork:
    """A collective in flight that is polled."""

    def __init__(self, check: RankCheck, work: Any, key: str, silent: bool) -> None:
        self._check, self._work, self._key, self._silent = check, work, key, silent

    def wait(self) -> Any:
        self._check.until(self._is_done(), self._key)
        try:
            return self._work.wait()
        except RuntimeError:
            self._check.explain_failure(self._key)
            raise

    def _is_done(self) -> Callable[[], bool]:
        """Whether it is done. gloo's reduce-scatters report this only to waiters, so a thread waits."""
        if not self._silent:
            return self._work.is_completed

        def wait_quietly() -> None:
            with contextlib.suppress(RuntimeError):  # raised again where the program waits
                self._work.wait()

        waiting = self._check.start_thread(wait_quietly)
        return lambda: not waiting.is_alive()


class CheckedGroup:
    """A process group whose collectives are logged before they are issued; one for each bound step."""

    def __init__(self, check: RankCheck, group: Any, ranks: Ranks, text: str) -> None:
        self._check, self._group, self._ranks, self._text = check, group, ranks, text

    def size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        def issue(*args: Any) -> _CheckedWork:
            with self._check.issuing:
                key = self._check.enter(self._ranks, self._text)
                silent = "reduce_scatter" in name and _first_tensor(args).device.type == "cpu"
                return _CheckedWork(self._check, method(*args), key, silent)

        return issue


def _first_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else _first_tensor(value[0])


def _key(ranks: Ranks, channel: str = "") -> str:
    """The name of a sequence: the ranks, and the channel if it has one."""
    return ",".join(map(str, ranks)) + (f"/{channel}" if channel else "")


def _ranks(key: str) -> Ranks:
    return tuple(map(int, key.partition("/")[0].split(",")))
