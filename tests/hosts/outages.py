"""A link between hosts that goes down and stays down, or a rank that is killed, at a chosen moment of a program.

Two hosts of two ranks, each rank an interpreter of its own. They come to the moment, the fault happens, they go on.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint
from tests.gloo.test_moe_gloo import given
from tests.gloo.test_moe_gloo import train as train_experts
from tests.hosts.host_programs import model_on, steps_of
from tests.hosts.network_hosts import Hosts, environment_of
from tests.pipelines import batch, language_model, loss_of

RANKS, HOSTS = 2, 2
WORLD = RANKS * HOSTS
TIMEOUT = 8.0  # seconds, of the process group
GRACE = 40.0  # more seconds until a rank that has not ended hangs; TCP itself notices after 15 minutes

Moment = Callable[[], None]
Fault = Callable[[Hosts, Sequence[int]], set[int]]


class Ending(NamedTuple):
    """How a rank ended: its status (negative: a signal; None: it hangs), seconds after the fault, what it raised."""

    status: int | None
    seconds: float
    error: str
    text: str
    log: str


def mesh_2d() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("dp", "tp"))


def sharded(mesh: sw.DeviceMesh) -> sw.DTensor:
    return sw.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [sw.Shard(0)] * mesh.ndim, src_data_rank=None)


# ---------------------------------------------------------------- programs


def groups(folder: Path, moment: Moment) -> None:
    """The groups of a mesh."""
    dist.barrier()
    moment()
    mesh_2d()


def second_mesh(folder: Path, moment: Moment) -> None:
    """The groups of another mesh, some of them of ranks of one host alone."""
    sharded(mesh_2d()).full_tensor()
    moment()
    mesh = sw.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    sharded(mesh).full_tensor()


def first_step(folder: Path, moment: Moment) -> None:
    """The first step of a model that is tensor parallel and fully sharded."""
    mesh = mesh_2d()
    model = model_on(mesh, language_model(2, tied=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moment()
    steps_of(model, optimizer, mesh, 0, 1)


def wide_group(folder: Path, moment: Moment) -> None:
    """A group over several axes, made on first use."""
    mesh = sw.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    x = sharded(mesh)
    moment()
    x.full_tensor()


def agreement(folder: Path, moment: Moment) -> None:
    """Ranks compare what they issue, through the store."""
    with sw.debug.check_ranks(0.2):
        x = sharded(mesh_2d())
        x.full_tensor()
        moment()
        for _ in range(3):
            x.full_tensor()


def plain_tensors(folder: Path, moment: Moment) -> None:
    """Digests of plain tensors go through the store; they are compared before a save and at the end."""
    x = sharded(mesh_2d())
    (x * torch.ones(8)).full_tensor()
    moment()
    for number in range(3):
        x = x * torch.full((8,), float(number))
    checkpoint.save({"x": x}, folder / "plain")


def plain_end(folder: Path, moment: Moment) -> None:
    """The same at the end of a program that communicates no more."""
    x = sharded(mesh_2d())
    x = x * torch.ones(8)
    moment()
    x = x * torch.ones(8)
    raise sw.LostRankError("nothing is communicated", hint="")


def saving(folder: Path, moment: Moment) -> None:
    """The exchanges of a checkpoint."""
    x = sharded(mesh_2d())
    moment()
    checkpoint.save({"x": x}, folder / "saved")


def saving_async(folder: Path, moment: Moment) -> None:
    """The group of saves in the background is made with the first of them."""
    x = sharded(mesh_2d())
    moment()
    checkpoint.async_save({"x": x}, folder / "saved").wait()


def saving_at_exit(folder: Path, moment: Moment) -> None:
    """A save in the background that the program does not wait for."""
    x = sharded(mesh_2d())
    checkpoint.async_save({"x": x}, folder / "first").wait()
    moment()
    checkpoint.async_save({"x": x}, folder / "saved")
    raise sw.LostRankError("the program ends", hint="")


def loading(folder: Path, moment: Moment) -> None:
    x = sharded(mesh_2d())
    checkpoint.save({"x": x}, folder / "saved")
    moment()
    checkpoint.load({"x": x}, folder / "saved")


def transfer(folder: Path, moment: Moment) -> None:
    """The group of transfers is made with the first of them."""
    first, second = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [2, 3])
    value = torch.arange(64.0).reshape(8, 8)
    state = {"x": sw.distribute_tensor(value, first, [sw.Shard(0)], src_data_rank=None)}
    moment()
    sw.transfer(state, second, {"x": [sw.Shard(1)]})


def pipeline(folder: Path, moment: Moment) -> None:
    """Stages tell each other shapes and failures through the store."""
    mesh = sw.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(language_model(WORLD, tied=True), mesh["pp"], microbatches=4)
    inputs, targets = batch(0, 8)
    pipe.step(inputs, targets, loss_of)
    moment()
    inputs, targets = batch(0, 4)  # other shapes: told again
    pipe.step(inputs, targets, loss_of)


def new_pipeline(folder: Path, moment: Moment) -> None:
    mesh = sw.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
    moment()
    pipe = sw.pipeline(language_model(WORLD, tied=True), mesh["pp"], microbatches=4)
    inputs, targets = batch(0, 8)
    pipe.step(inputs, targets, loss_of)


def in_flight(folder: Path, moment: Moment) -> None:
    """An error while collectives are in flight, and their groups are destroyed."""
    x = sharded(mesh_2d())
    x.full_tensor()
    moment()
    kept = [x.redistribute(placements=[sw.Replicate()] * 2, async_op=True) for _ in range(3)]
    try:
        kept[0].full_tensor()
    finally:
        dist.destroy_process_group()


def destroying(folder: Path, moment: Moment) -> None:
    """The error of a collective, handled by a program that destroys its groups."""
    x = sharded(mesh_2d())
    moment()
    try:
        x.full_tensor()
    finally:
        dist.destroy_process_group()


def scatter(folder: Path, moment: Moment) -> None:
    mesh = mesh_2d()
    moment()
    sw.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [sw.Shard(0), sw.Replicate()])


def comparing(folder: Path, moment: Moment) -> None:
    """Ranks compare facts (`from_local` with run_check)."""
    mesh = mesh_2d()
    moment()
    sw.DTensor.from_local(torch.ones(4, 4), mesh, [sw.Shard(0), sw.Shard(1)], run_check=True)


def backward(folder: Path, moment: Moment) -> None:
    """Gradients that are reduced in the backward pass."""
    mesh = mesh_2d()
    weight = sw.distribute_tensor(torch.ones(8, 8), mesh, [sw.Replicate()] * 2, src_data_rank=None).requires_grad_()
    loss = (sharded(mesh) @ weight).sum().redistribute(placements=[sw.Replicate()] * 2)
    moment()
    loss.backward()
    assert weight.grad is not None
    weight.grad.full_tensor()


def after_a_step(folder: Path, moment: Moment) -> None:
    """A later step of a model that is tensor parallel and fully sharded."""
    mesh = mesh_2d()
    model = model_on(mesh, language_model(2, tied=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer, mesh, 0, 1)
    moment()
    steps_of(model, optimizer, mesh, 1, 2)


def compiled(folder: Path, moment: Moment) -> None:
    """Collectives of a compiled function."""
    x = sharded(mesh_2d())

    @torch.compile(backend="aot_eager")
    def double(x: sw.DTensor) -> sw.DTensor:
        return (x * 2).redistribute(placements=[sw.Replicate()] * 2)

    double(x)
    moment()
    double(x).to_local()


def compiled_backward(folder: Path, moment: Moment) -> None:
    """Collectives of the backward pass of a compiled function."""
    mesh = mesh_2d()
    x, weight = sharded(mesh), sharded(mesh)
    weight.requires_grad_()

    @torch.compile(backend="aot_eager")
    def loss_of(x: sw.DTensor, weight: sw.DTensor) -> torch.Tensor:
        return (x @ weight.redistribute(placements=[sw.Replicate()] * 2)).pow(2).sum()

    loss_of(x, weight).backward()
    loss = loss_of(x, weight)
    moment()
    loss.backward()


def captured(folder: Path, moment: Moment) -> None:
    """Collectives of a captured function."""
    x = sharded(mesh_2d())

    @sw.captured
    def double(x: sw.DTensor) -> sw.DTensor:
        return (x * 2).redistribute(placements=[sw.Replicate()] * 2)

    for _ in range(3):
        double(x)
    moment()
    double(x)


def kinds(folder: Path, moment: Moment) -> None:
    """Each collective: the error of each names it."""
    mesh = mesh_2d()
    value = torch.arange(256.0).reshape(16, 16)
    layouts = {
        "all-gather": ([sw.Shard(0), sw.Replicate()], [sw.Replicate()] * 2),
        "all-reduce": ([sw.Partial(), sw.Replicate()], [sw.Replicate()] * 2),
        "reduce-scatter": ([sw.Partial(), sw.Replicate()], [sw.Shard(0), sw.Replicate()]),
        "all-to-all": ([sw.Shard(0), sw.Replicate()], [sw.Shard(1), sw.Replicate()]),
        "halo": None,
    }
    moment()
    said = []
    for name, change in layouts.items():
        try:
            if change is None:
                x = sw.distribute_tensor(value, mesh, [sw.Shard(0), sw.Replicate()], src_data_rank=None)
                torch.roll(x, 1, 0)
            else:
                begin = [sw.Replicate() if isinstance(p, sw.Partial) else p for p in change[0]]
                x = sw.distribute_tensor(value, mesh, begin, src_data_rank=None)
                if isinstance(change[0][0], sw.Partial):
                    x = sw.DTensor.from_local(x.to_local(), mesh, change[0], run_check=False)
                x.redistribute(placements=change[1])
            said.append(f"{name}: nothing")
        except sw.LostRankError as error:
            said.append(f"{name}: {str(error).splitlines()[0]}")
    raise sw.LostRankError("\n".join(said))


def experts(folder: Path, moment: Moment) -> None:
    mesh = sw.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    layouts = [sw.Shard(0), sw.Replicate(), sw.Shard(0), sw.Shard(0)]
    tensors = [sw.distribute_tensor(t, mesh, [layout]) for t, layout in zip(given(8), layouts, strict=True)]
    moment()
    train_experts(tensors, 2, None, None)


PROGRAMS = {
    f.__name__: f
    for f in (
        groups, second_mesh, first_step, wide_group, agreement, plain_tensors, plain_end, saving, saving_async,
        saving_at_exit, loading, transfer, pipeline, new_pipeline, in_flight, destroying, scatter, comparing, backward,
        after_a_step, compiled, compiled_backward, captured, kinds, experts,
    )
}  # fmt: skip


# ---------------------------------------------------------------- ranks


def main(program: str, folder: Path) -> None:
    """The process of a rank. It ends as a program does: by its exception, with exit functions and destructors."""
    warnings.simplefilter("default")
    rank = int(os.environ["RANK"])

    def moment() -> None:
        (folder / f"rank{rank}.ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

    (folder / f"rank{rank}.imported").touch()  # the timeout below is for faults, not for a rank that is started late
    while not (folder / "begin").exists():
        time.sleep(0.01)
    said = ("", "")
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
        PROGRAMS[program](folder, moment)
    except BaseException as error:
        said = (type(error).__name__, "".join(traceback.format_exception(error)))
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(said))


def cut(hosts: Hosts, pids: Sequence[int]) -> set[int]:
    """The link of the second host goes down and stays down."""
    hosts.set_link(1, up=False)
    return set()


def kill(rank: int) -> Fault:
    """A rank is killed."""

    def kill_rank(hosts: Hosts, pids: Sequence[int]) -> set[int]:
        os.kill(pids[rank], signal.SIGKILL)
        return {rank}

    return kill_rank


def freeze(rank: int) -> Fault:
    """A rank is stopped for good."""

    def stop_rank(hosts: Hosts, pids: Sequence[int]) -> set[int]:
        os.kill(pids[rank], signal.SIGSTOP)
        return {rank}

    return stop_rank


class Outage:
    """The processes of a program on hosts of their own. They import, and wait until they are to begin."""

    def __init__(self, program: str, **environment: str) -> None:
        self.hosts = Hosts(HOSTS)
        self.folder = self.hosts.shared_disk
        command = (sys.executable, "-m", "tests.hosts.outages", program, str(self.folder))
        self.ranks = [
            self.hosts.start(
                rank // RANKS,
                command,
                self.folder / f"rank{rank}.log",
                **environment_of(rank, self.hosts, RANKS),
                **environment,
            )
            for rank in range(WORLD)
        ]

    def __enter__(self) -> Outage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hosts.close()

    def endings(self, fault: Fault, meanwhile: Callable[[], object] = lambda: None) -> dict[int, Ending]:
        """The fault at the program's moment. How the ranks ended that the fault itself did not end.

        `meanwhile` is called while they wait for their timeouts.
        """
        folder, ranks = self.folder, self.ranks
        self._wait_until_all("imported")
        (folder / "begin").touch()
        self._wait_until_all("ready")
        victims = fault(self.hosts, [process.pid for process in ranks])
        (folder / "go").touch()
        begin, found = time.monotonic(), {}
        meanwhile()
        waiting = set(range(WORLD)) - victims
        while waiting and time.monotonic() < begin + TIMEOUT + GRACE:
            for rank in list(waiting):
                if ranks[rank].poll() is not None:
                    waiting.discard(rank)
                    found[rank] = ending(ranks[rank].returncode, time.monotonic() - begin, folder, rank)
            time.sleep(0.02)
        return found | {rank: ending(None, time.monotonic() - begin, folder, rank) for rank in waiting}

    def _wait_until_all(self, are: str) -> None:
        deadline = time.monotonic() + 120
        while not all((self.folder / f"rank{rank}.{are}").exists() for rank in range(WORLD)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.ranks):
                raise RuntimeError("\n".join((self.folder / f"rank{rank}.log").read_text() for rank in range(WORLD)))
            time.sleep(0.02)


def endings(program: str, fault: Fault, **environment: str) -> dict[int, Ending]:
    """Run a program with a fault at its moment. How the ranks ended that the fault itself did not end."""
    with Outage(program, **environment) as outage:
        return outage.endings(fault)


def ending(status: int | None, seconds: float, folder: Path, rank: int) -> Ending:
    report = folder / f"rank{rank}.json"
    error, text = json.loads(report.read_text()) if report.exists() else ("nothing", "")
    return Ending(status, seconds, error, text, (folder / f"rank{rank}.log").read_text(errors="replace"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
