"""An exception at every step of saves and loads, on one of four ranks: all ranks raise, none waits, the next one works.

A step is a function of the checkpoint package; the exception is raised when it is first entered. Left out are the
functions that hold the exchanges themselves, whose failure nobody could be told of.
`python -m tests.gloo.checkpoint_faults` goes through all of them; the tests take one of EVERY.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.io import host_memory
from shardwise.checkpoint.partition.boxes import held_boxes
from tests.gloo.processes import ProcessPool
from tests.virtual.checkpoints import mesh_of

FOLDER = str(Path(checkpoint.__file__).parent)
CHANNEL = ("process_exchange.py", "background_save.py")  # the exchanges, and the thread that a save runs on
EXCHANGING = {
    "save", "async_save", "prepare_save", "execute_save", "load", "_load", "retry_replaced", "_agreed_match",
    "_read_and_verify", "change_all", "export_safetensors", "load_safetensors", "reshard", "_reshard",
    "load.<locals>.<lambda>", "load_safetensors.<locals>.<lambda>", "reshard.<locals>.<lambda>",
    "async_save.<locals>.write_in_background", "_written", "latest",
    "OpenDirectory.__exit__", "FileReader.__exit__",  # after the last exchange
    "_by_rows",  # before the first
    "_is_dead", "_start_time", "_machine", "_machine_digest",  # with an error there, a process counts as alive
}  # fmt: skip
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: MemoryError("injected"),
    lambda: OSError(28, "injected: no space left on device"),
    lambda: torch.OutOfMemoryError("injected"),
    lambda: KeyboardInterrupt("injected"),
)


class Steps:
    """The functions that are entered, in order; an error when the one named `at` is."""

    def __init__(self, at: str | None = None, error: BaseException | None = None) -> None:
        self.seen: dict[str, None] = {}
        self._at = at
        self._error = error

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        file, name = code.co_filename, code.co_qualname
        if event != "call" or not file.startswith(FOLDER) or Path(file).name in CHANNEL or name in EXCHANGING:
            return
        if name.endswith(("comp>", "<genexpr>")):  # a part of the function that it is in
            return
        step = f"{Path(file).stem}.{name}"
        self.seen[step] = None
        if step == self._at and self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def happened(self) -> bool:
        return self._at is not None and self._error is None

    def watch(self, action: Callable[[], Any]) -> BaseException | None:
        """What the action raises."""
        held_boxes.cache_clear()  # a step that is remembered would not be entered
        host_memory._kept.clear()
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            action()
        except BaseException as error:
            return error
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        return None


class Plain:
    """Something with a state dict without tensors, as a scheduler is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def state_of(value: float) -> dict[str, Any]:
    mesh = mesh_of((4,))
    weight = torch.nn.Parameter(sw.full((8, 2), value, device_mesh=mesh, placements=[sw.Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=value, momentum=0.9)
    weight.grad = sw.full((8, 2), value, device_mesh=mesh, placements=[sw.Shard(0)])
    optimizer.step()
    strided = sw.full((8,), value, device_mesh=mesh, placements=[sw.StridedShard(0, 2)])
    own = {f"of {dist.get_rank()}": torch.full((2,), value)}
    return {"w": weight, "o": optimizer, "s": strided, "p": Plain(int(value)), "own": own, "n": [value, (1,)]}


def actions(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is interrupted; each writes to a place of its own, if it writes."""
    model = {"a": sw.ones(8, 4, device_mesh=mesh_of((4,)), placements=[sw.Shard(1)]), "b": torch.ones(3)}
    return {
        "save": lambda: checkpoint.save(state_of(2.0), folder / "new-7", keep=1),
        "overwrite": lambda: checkpoint.save(state_of(2.0), folder / "old", overwrite=True),
        "async_save": lambda: checkpoint.async_save(state_of(2.0), folder / "new-8").wait(),
        "save with base": lambda: checkpoint.save(state_of(2.0), folder / "new-6", base=folder / "old"),
        "save to a URL": lambda: checkpoint.save(state_of(2.0), f"file://{folder}/new-5"),
        "latest": lambda: checkpoint.latest(folder),
        "load": lambda: checkpoint.load(state_of(3.0), folder / "old"),
        "load unstaged": lambda: checkpoint.load(state_of(3.0), folder / "old", staged=False),
        "reshard": lambda: checkpoint.reshard(folder / "plain", folder / "new-9", mesh_of((2, 2))),
        "export": lambda: checkpoint.export_safetensors(model, folder / "new-hf", 64),
        "load_safetensors": lambda: checkpoint.load_safetensors(model, folder / "hf"),
    }


def interrupt_all(place: str, action: str, every: int) -> int:
    """On every rank: go through the steps of one action, on the first rank and on another; how many there were."""
    folder, rank = Path(place), dist.get_rank()
    beside = dist.new_group()  # so that an exchange that somebody did not take part in shows where it is
    run = actions(folder)[action]
    if action == "load":
        checkpoint.save(state_of(1.0), folder / "old")
        checkpoint.save({"x": torch.arange(12.0)}, folder / "plain")
        model = {"a": torch.ones(8, 4), "b": torch.ones(3)}
        checkpoint.export_safetensors(model, folder / "hf", 64)
    trials = 0
    for victim in (0, 2):
        cleaned(folder, beside)
        steps = Steps()
        error = steps.watch(run)
        assert error is None, error
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, list(steps.seen), group=beside)
        for number, step in enumerate(found[victim]):
            if (number + victim) % every:
                continue
            cleaned(folder, beside)
            trials += 1
            steps = Steps(step, ERRORS[number % len(ERRORS)]()) if rank == victim else Steps()
            (folder / ".trial").write_text(f"{action}, {step} on rank {victim}")  # for whoever looks at a hang
            interrupted(run, steps, beside, f"{action}, {step} on rank {victim}")
            look(folder, beside)
    cleaned(folder, beside)
    assert Steps().watch(run) is None
    return trials


def cleaned(folder: Path, beside: Any) -> None:
    dist.barrier(beside)
    if dist.get_rank() == 0:
        for path in folder.glob("new*"):
            shutil.rmtree(path)
    dist.barrier(beside)


def interrupted(run: Callable[[], Any], steps: Steps, beside: Any, what: str) -> None:
    """One trial: the error is raised on the rank it was made on, and one about it on the others."""
    caught = steps.watch(run)
    answers: list[Any] = [None] * 4
    text = None if caught is None else f"{type(caught).__name__}: {caught}"
    dist.all_gather_object(answers, (steps.happened, text), group=beside)
    assert any(happened for happened, _ in answers), f"{what}: it was not entered"
    assert all(text is not None for _, text in answers), f"{what}: it reached {answers}"


def look(folder: Path, beside: Any) -> None:
    """Whatever has its name is whole."""
    dist.barrier(beside)
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            if not path.name.startswith(".") and not path.name.endswith("hf"):
                assert checkpoint.verify(path) == [], path
    dist.barrier(beside)


TIMEOUT = 300.0  # seconds for one action, all steps of it
EVERY = 9
NAMES = (
    "load", "load unstaged", "save", "overwrite", "async_save", "save with base", "save to a URL", "latest", "reshard",
    "export", "load_safetensors",
)  # fmt: skip


def run_all(pool: ProcessPool, folder: str, every: int) -> dict[str, int]:
    """How many steps of each action were interrupted; `load` goes first: it makes what others read."""
    return {action: pool.run(interrupt_all, folder, action, every, timeout=TIMEOUT)[0] for action in NAMES}


if __name__ == "__main__":
    from tests.gloo import checkpoint_faults  # by the name that the ranks know

    with tempfile.TemporaryDirectory() as scratch, ProcessPool(4) as ranks:
        counts = checkpoint_faults.run_all(ranks, scratch, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    print(f"{sum(counts.values())} steps interrupted on one rank of 4, every rank raised: {counts}")
