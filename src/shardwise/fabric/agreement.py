"""Rank agreement: every rank tells the others, beside the process groups, which collectives it issues.

A thread in each rank publishes the rank's state in the store and reads those of others: a rank whose sequence parts
from another's, that waits for one that has ended, or in a circle, is an error on all ranks instead of a hang.
Collectives are waited for by looking whether they are done, so that the error can be raised in the middle of one.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from shardwise.errors import AgreementError
from shardwise.fabric.sequence import GroupLog, Ranks, caller, difference_text, first_difference, ranks_name

__all__ = ["CheckedGroup", "RankCheck"]

T = TypeVar("T")
WINDOW = 64  # digests of a group that are published each time
SILENCE = 8.0  # seconds without a word after which a rank is taken to be dead
SETTLED = 3  # looks at which ranks must be seen waiting for the same before a circle is believed


class RankCheck:
    """This rank's part in the agreement.

    Args:
        store: where ranks publish; used by this object alone.
        rank: of this process.
        world: how many there are.
        interval: seconds between looks.
        give_up: lets the process end although collectives are in flight; called where ranks have parted.
    """

    def __init__(
        self, store: Any, rank: int, world: int, interval: float = 1.0, give_up: Callable[[], object] = lambda: None
    ) -> None:
        self.rank, self.world, self.interval = rank, world, interval
        self.verdict: str | None = None
        self._store, self._give_up = store, give_up
        self._logs: dict[Ranks, GroupLog] = {}
        self._status, self._beat = "running", 0
        self._waits: tuple[Ranks, int, float] | None = None  # the group, the number of the collective, since when
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of a rank, and when it was new
        self._circles: dict[tuple[Any, ...], int] = {}
        self._stop, self._main = threading.Event(), threading.main_thread().ident
        self._hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="shardwise-agreement", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the program's side

    def enter(self, ranks: Ranks, text: str) -> None:
        """A collective is about to be issued. Raises if the ranks have parted."""
        self._raise_if_parted()
        log = self._logs.get(ranks)
        if log is None:
            log = self._logs[ranks] = GroupLog()
        log.add(text, caller())

    def until(self, done: Callable[[], bool], ranks: Ranks) -> None:
        """Wait for something that the ranks do together. Raises if they have parted."""
        pause = 1e-5
        self._waits = (ranks, self._logs[ranks].count, time.monotonic())
        try:
            while not done():
                self._raise_if_parted()
                time.sleep(pause)
                pause = min(pause * 1.5, 2e-3)
        finally:
            self._waits = None

    def run(self, function: Callable[[], T], ranks: Ranks, text: str) -> T:
        """Run what blocks where nothing can be raised, in another thread, and wait for it here."""
        self.enter(ranks, text)
        result: list[Any] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def work() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                result.append((function(), None))
            except BaseException as error:
                result.append((None, error))

        threading.Thread(target=work, daemon=True).start()
        self.until(lambda: bool(result), ranks)
        value, error = result[0]
        if isinstance(error, RuntimeError):
            self.explain_failure(ranks)
        if error is not None:
            raise error
        return value

    def explain_failure(self, ranks: Ranks) -> None:
        """A collective has failed, as it does when another rank's process ends: raise what is known about that."""
        deadline = time.monotonic() + SILENCE + 5 * self.interval
        self.until(lambda: time.monotonic() > deadline, ranks)

    def _raise_if_parted(self) -> None:
        if self.verdict is not None:
            raise AgreementError(self.verdict, hint="every rank must issue the same collectives in the same order")

    # ---------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._look()
            except Exception as error:  # the store is gone, and with it the rank that held it
                if self._stop.is_set() or self.verdict is not None:
                    return
                if self._waits is not None:
                    self.verdict = f"the ranks' store cannot be reached, so the rank that holds it has ended: {error}"
                    return

    def _look(self) -> None:
        self._publish()
        said = self._read("verdict")
        if said is not None:
            self._take(said)
            return
        suspects = self._read("suspects")
        if suspects is not None:
            self._testify(tuple(suspects["group"]), suspects["ranks"])
            return
        for ranks in list(self._logs):
            self._compare(ranks)
        self._look_at_wait()

    def _publish(self) -> None:
        self._beat += 1
        waits = self._waits
        groups = {_key(ranks): log.summary(WINDOW) for ranks, log in list(self._logs.items())}
        state = {
            "beat": self._beat,
            "status": self._status,
            "waits": None if waits is None else [list(waits[0]), waits[1]],
            "at": self._where(),
            "groups": groups,
        }
        self._store.set(f"rank{self.rank}", json.dumps(state))

    def _where(self) -> str:
        """The line at which the program is, or that of the collective it waits in."""
        waits = self._waits
        if waits is not None and self._logs[waits[0]].entries:
            last = self._logs[waits[0]].entries[-1]
            return f"{last.text}, at {last.line}"
        return caller(sys._current_frames().get(self._main or 0))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _state(self, rank: int) -> Any:
        state = self._read(f"rank{rank}")
        if state is not None:
            beat, _ = self._heard.get(rank, (-1, 0.0))
            if state["beat"] != beat:
                self._heard[rank] = (state["beat"], time.monotonic())
        return state

    def _compare(self, ranks: Ranks) -> None:
        """My sequence in a group against that of the rank before me, so that each pair of neighbours is compared."""
        other = ranks[ranks.index(self.rank) - 1]
        state = self._state(other) if other != self.rank else None
        theirs = None if state is None else state["groups"].get(_key(ranks))
        if theirs is not None and first_difference(self._logs[ranks].summary(WINDOW), theirs) is not None:
            suspects = json.dumps({"group": list(ranks), "ranks": sorted((self.rank, other))})
            self._store.compare_set("suspects", "", suspects)

    def _testify(self, group: Ranks, suspects: list[int]) -> None:
        """The two ranks whose sequences differ say all they know; the first of them tells everyone."""
        if self.rank in suspects:
            self._store.set(f"evidence{self.rank}", json.dumps(self._logs[group].evidence()))
        if self.rank == suspects[0]:
            evidence = {rank: self._read(f"evidence{rank}") for rank in suspects}
            if all(evidence.values()):
                self._tell(difference_text(group, evidence))

    # ---------------------------------------------------------------- waiting for nothing

    def _look_at_wait(self) -> None:
        """Whether what I wait for cannot come: its rank has ended, or waits for me."""
        waits = self._waits
        if waits is None:
            return
        circle = self._circle([self.rank], waits[0], waits[1])
        if circle is None:
            return
        key = tuple(circle)
        self._circles = {key: self._circles.get(key, 0) + 1}
        if self._circles[key] >= SETTLED:
            self._tell(f"the ranks wait for each other in different collectives, and none can go on:\n{circle[-1]}")

    def _circle(self, trail: list[int], ranks: Ranks, number: int) -> list[Any] | None:
        """Ranks that wait for each other, found by asking whom each waits for; the last item tells what for."""
        for rank in ranks:
            if rank == self.rank and len(trail) == 1:
                continue
            state = self._state(rank)
            reached = 0 if state is None else state["groups"].get(_key(ranks), {"count": 0})["count"]
            if state is None or reached >= number:
                continue
            if gone := self._gone(rank, state):
                self._tell(f"{gone}, but {self._text_of(trail[-1])}")
                return None
            if rank in trail:
                circle = trail[trail.index(rank) :]
                return [*circle, "\n".join(f"  {self._text_of(each)}" for each in sorted(circle))]
            if state["waits"] is not None:
                found = self._circle([*trail, rank], tuple(state["waits"][0]), state["waits"][1])
                if found is not None:
                    return found
        return None

    def _gone(self, rank: int, state: Mapping[str, Any]) -> str | None:
        """How a rank ended, if it did."""
        if state["status"] != "running":
            return f"rank {rank} {state['status']}"
        silent = time.monotonic() - self._heard[rank][1]
        if silent > max(SILENCE, 5 * self.interval):
            return f"rank {rank} has not been heard of for {silent:.0f} s (it was last at {state['at']})"
        return None

    def _text_of(self, rank: int) -> str:
        state = self._state(rank)
        waits = None if state is None else state["waits"]
        where = "" if waits is None else f" with {ranks_name(waits[0])}"
        return f"rank {rank} waits{where} in {state['at']}" if state is not None else f"rank {rank} waits"

    # ---------------------------------------------------------------- telling everyone

    def _tell(self, text: str) -> None:
        self._store.compare_set("verdict", "", json.dumps(text))
        self._take(self._read("verdict"))

    def _take(self, text: str) -> None:
        self.verdict = text
        self._store.add("heard", 1)
        self._stop.set()

    def _failed(self, kind: Any, error: Any, trace: Any) -> None:
        """An exception that nobody caught: the others are told what it was."""
        if not isinstance(error, AgreementError):
            self._status = f"ended with {kind.__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._hook(kind, error, trace)

    def close(self) -> None:
        """The program ends: the others are told, and whoever holds the store stays until they have heard."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._failed:
            sys.excepthook = self._hook
        if self._status == "running":
            self._status = "has ended its program"
        self._stop.set()
        try:
            self._publish()
            deadline = time.monotonic() + 4 * self.interval
            while self.verdict is not None and time.monotonic() < deadline and self._store.add("heard", 0) < self.world:
                time.sleep(0.05)
        except Exception:  # the store may be gone already, and nobody is left to tell
            pass

    def _at_exit(self) -> None:
        self.close()
        if self.verdict is not None:  # a collective that will never end must not keep the process
            self._give_up()


class _CheckedWork:
    """A collective in flight that is waited for by looking."""

    def __init__(self, check: RankCheck, work: Any, ranks: Ranks) -> None:
        self._check, self._work, self._ranks = check, work, ranks

    def wait(self) -> Any:
        self._check.until(self._work.is_completed, self._ranks)
        try:
            return self._work.wait()
        except RuntimeError:
            self._check.explain_failure(self._ranks)
            raise


class CheckedGroup:
    """A process group whose collectives are told to a check before they are issued; one for each bound step."""

    def __init__(self, check: RankCheck, group: Any, ranks: Ranks, text: str) -> None:
        self._check, self._group, self._ranks, self._text = check, group, ranks, text

    def size(self) -> int:
        """How many ranks it has."""
        return self._group.size()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        def issue(*args: Any) -> _CheckedWork:
            self._check.enter(self._ranks, self._text)
            return _CheckedWork(self._check, method(*args), self._ranks)

        return issue


def _key(ranks: Ranks) -> str:
    return ",".join(map(str, ranks))
