"""Faults at random points of programs on hosts: each run ends with the right values, or with a clear error in time.

`python -m tests.hosts.fault_campaign COUNT [SEED] --results FILE --write docs/hosts.md`. This process imports torch
once and forks the ranks of each trial into network namespaces: two hosts of two ranks. A fault of a random kind happens
at a random moment of a random program. Afterwards every checkpoint that has its name is verified and read.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint
from shardwise.events import route_started
from tests.hosts.host_programs import model_on, steps_of
from tests.hosts.network_hosts import Hosts, environment_of
from tests.pipelines import language_model, one_device, whole

RANKS, HOSTS = 2, 2  # ranks of a host, hosts
TIMEOUT = 10.0  # seconds, of the process group
GRACE = 50.0  # more seconds until a rank that has not ended counts as hanging, also on a loaded machine
STEPS = 6
KINDS = (
    "kill a process", "kill a host", "freeze a process", "freeze a host", "link down, 5 s", "link down, 60 s",
    "link down for good", "a slow rank", "full disk", "directory removed", "clock jumps", "kill while groups are made",
    "kill in the first collective",
)  # fmt: skip
ENDS_ITSELF = ("kill while groups are made", "kill in the first collective")
PROGRAMS = ("training", "saving", "loading", "transferring", "planning", "compiled")
PATIENCE = 240.0  # seconds, of the process group while ranks compile
CLEAR = (sw.LostRankError, sw.CheckpointError, sw.PipelineError, sw.AgreementError)
COLUMNS = ("injected", "continued", "refused", "unclear", "hang", "lost", "wrong")

# ---------------------------------------------------------------- programs of a rank


class Rank:
    """What the programs of one rank share: a place to report to, and faults that a rank has itself."""

    def __init__(self, rank: int, folder: Path, reported: Path, reference: dict[str, Any]) -> None:
        self.rank, self.folder, self.reported, self.reference = rank, folder, reported, reference
        self.ready: Callable[[], object] = lambda: None  # called when the fault may happen
        self.pause = 0.0
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "pause", 0.3))
        signal.signal(signal.SIGUSR2, lambda *_: self.jump())

    def jump(self) -> None:
        """Let the clock of this process jump by an hour."""
        real = time.time
        time.time = lambda: real() - 3600.0

    def end_at(self, kind: str, begun: bool) -> None:
        """Kill this process when it makes its first group, before or after the others have it, or communicates."""

        def end(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def make_group(*args: Any, **options: Any) -> Any:
            if begun:
                original(*args, **options)
            end()

        original = dist.new_group
        if kind == "kill while groups are made":
            dist.new_group = make_group
        else:
            route_started.append(end)

    def between_steps(self) -> None:
        if self.pause:
            time.sleep(self.pause)

    def saved(self, path: Path) -> None:
        if self.rank == 0:
            with self.reported.open("a") as file:
                file.write(f"{path.name}\n")

    # ------------------------------------------------------------ programs

    def training(self, saves: bool = False) -> None:
        mesh = sw.init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("dp", "tp"))
        model = model_on(mesh, language_model(2, tied=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            losses += steps_of(model, optimizer, mesh, step, step + 1)
            if saves:
                path = self.folder / f"step-{step}"
                state = {"model": model, "optimizer": optimizer, "step": step}
                if step % 2:
                    checkpoint.async_save(state, path, keep=3).wait()
                else:
                    checkpoint.save(state, path, keep=3)
                self.saved(path)
            self.between_steps()
        torch.testing.assert_close(torch.tensor(losses), self.reference["losses"], rtol=1e-4, atol=1e-5)
        for name, value in model.named_parameters():
            torch.testing.assert_close(whole(value), self.reference["parameters"][name], rtol=1e-3, atol=1e-4)

    def saving(self) -> None:
        self.training(saves=True)

    def loading(self) -> None:
        mesh = sw.init_device_mesh("cpu", (HOSTS * RANKS,))
        value = torch.arange(4096.0).reshape(64, 64)
        source = sw.distribute_tensor(value, mesh, [sw.Shard(0)])
        checkpoint.save({"x": source}, self.folder / "step-0")
        self.saved(self.folder / "step-0")
        for step in range(2 * STEPS):
            target = sw.zeros(64, 64, device_mesh=mesh, placements=[sw.Shard(step % 2)])
            checkpoint.load({"x": target}, self.folder / "step-0")
            assert torch.equal(target.full_tensor(), value)
            self.between_steps()

    def transferring(self) -> None:
        everyone = range(HOSTS * RANKS)
        first, second = sw.DeviceMesh("cpu", list(everyone)[:RANKS]), sw.DeviceMesh("cpu", list(everyone)[RANKS:])
        sw.init_device_mesh("cpu", (HOSTS * RANKS,))
        value = torch.arange(65536.0).reshape(256, 256)
        state = {"x": sw.distribute_tensor(value, first, [sw.Shard(0)], src_data_rank=None)}
        for step in range(2 * STEPS):
            there, layout = (second, sw.Shard(1)) if step % 2 == 0 else (first, sw.Shard(0))
            state = sw.transfer(state, there, {"x": [layout]}, bucket_bytes=1 << 14)
            if self.rank in there.grid_ranks:
                at = there.grid_ranks.index(self.rank) if not isinstance(there.grid_ranks, range) else (
                    self.rank - there.grid_ranks.start
                )  # fmt: skip
                assert torch.equal(state["x"].to_local(), value.chunk(RANKS, layout.dim)[at])
            self.between_steps()

    def compiled(self) -> None:
        """Training with a compiled forward and backward pass. It begins when everything is compiled."""
        mesh = sw.init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("dp", "tp"))
        values = torch.arange(64.0).reshape(8, 8) / 64, torch.arange(32.0).reshape(4, 8) / 32
        layouts = [sw.Replicate(), sw.Shard(1)], [sw.Shard(0), sw.Replicate()]
        weight, x = (sw.distribute_tensor(v, mesh, p, src_data_rank=None) for v, p in zip(values, layouts, strict=True))

        def loss_of(x: Any, weight: Any) -> Any:
            return ((x @ weight).relu() @ weight).pow(2).mean()

        def train(x: Any, weight: Any, loss: Callable[..., Any]) -> torch.Tensor:
            weight = weight.detach().requires_grad_()
            for _ in range(5 * STEPS):
                (grad,) = torch.autograd.grad(loss(x, weight), weight)
                weight = (weight - 0.1 * grad).detach().requires_grad_()
            return weight.detach()

        @torch.compile(backend="aot_eager")
        def compiled(x: Any, weight: Any) -> Any:
            return loss_of(x, weight).redistribute(placements=[sw.Replicate()] * 2)

        train(x, weight, compiled)
        dist.barrier()
        for group in (dist.group.WORLD, mesh["dp"].get_group(), mesh["tp"].get_group()):
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), group)
        self.ready()
        for _ in range(STEPS):
            found = train(x, weight, compiled)
            torch.testing.assert_close(found.full_tensor(), train(values[1], values[0], loss_of), rtol=1e-4, atol=1e-5)
            self.between_steps()

    def planning(self) -> None:
        rng = random.Random(7)
        for step in range(2 * STEPS):
            shape = rng.choice([(4,), (2, 2), (4, 1)])
            mesh = sw.init_device_mesh("cpu", shape)
            sizes = (rng.randint(1, 9), rng.randint(1, 9) * 4)
            value = torch.arange(float(sizes[0] * sizes[1])).reshape(sizes)
            layouts = [[rng.choice([sw.Shard(0), sw.Shard(1), sw.Replicate()]) for _ in shape] for _ in range(3)]
            x = sw.distribute_tensor(value, mesh, layouts[0])
            for layout in layouts[1:]:
                x = x.redistribute(placements=layout)
            assert torch.equal((x * 2).sum(0).full_tensor(), (value * 2).sum(0)), step
            self.between_steps()


def reported_on(hosts: Hosts) -> Path:
    """The names of checkpoints that were reported as saved; not on the disk that is filled."""
    return hosts.folder / "done"


def run_rank(
    rank: int,
    hosts: Hosts,
    port: int,
    program: str,
    folder: Path,
    report: Path,
    ready: int,
    prepare: Callable[[Rank], None],
) -> None:
    """The process of a rank, from its host to its report."""
    warnings.simplefilter("default")  # pytest makes errors of them, and they would hide the one that is looked for
    hosts.enter(rank // RANKS)
    os.environ.update(environment_of(rank, hosts, RANKS) | {"MASTER_PORT": str(port)})
    text, kind = "", "right"
    own = Rank(rank, folder, reported_on(hosts), torch.load(report.parent / "reference.pt"))
    try:
        own.ready = lambda: os.write(ready, b".")
        patience = PATIENCE if program == "compiled" else TIMEOUT
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=patience))
        dist.barrier()
        prepare(own)
        if program != "compiled":
            own.ready()
        getattr(own, program)()
    except CLEAR as error:
        text = "".join(traceback.format_exception_only(error))
        kind = "refused" if re.search(r"\brank \d", text) and re.search(r"\bhost\d", text) else "unclear"
    except AssertionError:
        text, kind = traceback.format_exc(), "wrong"
    except BaseException:
        text, kind = traceback.format_exc(), "unclear"
    report.with_suffix(".new").write_text(json.dumps({"kind": kind, "text": text}))
    report.with_suffix(".new").rename(report)
    os._exit(0 if kind == "right" else 1)


# ---------------------------------------------------------------- trials


class Trial(NamedTuple):
    """One injected fault, how it ended, and the error that a rank raised."""

    kind: str
    program: str
    outcome: str
    text: str


def one_trial(hosts: Hosts, number: int, rng: random.Random, kind: str) -> Trial:
    program = "saving" if kind == "full disk" else rng.choice(PROGRAMS)
    if kind == "directory removed":
        program = rng.choice(("saving", "loading"))
    if kind == "kill while groups are made":  # the others use the group of all ranks alone, or not at first
        program = rng.choice(("training", "saving", "transferring"))
    if kind == "kill in the first collective":
        program = rng.choice(PROGRAMS[:-1])  # of the compiled one it is in the tracer
    work = hosts.folder / f"trial{number}"
    folder = hosts.shared_disk / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    (hosts.shared_disk / "filler").unlink(missing_ok=True)
    reported_on(hosts).unlink(missing_ok=True)
    folder.mkdir()
    work.mkdir()
    shutil.copy(hosts.folder / "reference.pt", work / "reference.pt")
    receive, ready = os.pipe()
    doomed = {rng.randrange(HOSTS * RANKS)} if kind in ENDS_ITSELF else set[int]()
    begun_groups = rng.random() < 0.5
    reports = [work / f"rank{rank}.json" for rank in range(HOSTS * RANKS)]
    pids = []
    for rank, report in enumerate(reports):
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                log = os.open(work / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                prepare = (lambda own: own.end_at(kind, begun_groups)) if rank in doomed else (lambda own: None)
                run_rank(rank, hosts, 20000 + number % 20000, program, folder, report, ready, prepare)
            os._exit(2)
        pids.append(pid)
    os.close(ready)
    try:
        begun = 0
        while begun < len(pids) and (got := os.read(receive, 16)):
            begun += len(got)
        time.sleep(rng.uniform(0, 2.5) * rng.random())
        victims = inject(kind, hosts, pids, folder, rng) | doomed
        hanging = wait_for(pids, victims, TIMEOUT + GRACE)
        if hanging and kind == "link down, 60 s":
            for host in range(HOSTS):
                hosts.set_link(host, up=True)
            hanging = wait_for(pids, victims | (set(range(len(pids))) - hanging), TIMEOUT + GRACE)
    finally:
        os.close(receive)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for host in range(HOSTS):
            hosts.set_link(host, up=True)
        (hosts.shared_disk / "filler").unlink(missing_ok=True)
    return Trial(kind, program, *judge(kind, hosts, folder, reports, victims, hanging))


def inject(kind: str, hosts: Hosts, pids: list[int], folder: Path, rng: random.Random) -> set[int]:
    """Let the fault happen. Returns the ranks that it ends, or that stay frozen."""
    rank, host = rng.randrange(len(pids)), rng.randrange(HOSTS)
    of_host = {r for r in range(len(pids)) if r // RANKS == host}

    def send(ranks: set[int], what: int) -> None:
        for one in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[one], what)

    match kind:
        case "kill a process":
            send({rank}, signal.SIGKILL)
            return {rank}
        case "kill a host":
            send(of_host, signal.SIGKILL)
            return of_host
        case "freeze a process" | "freeze a host":
            ranks = {rank} if kind == "freeze a process" else of_host
            send(ranks, signal.SIGSTOP)
            if rng.random() < 0.5:  # for a while
                time.sleep(rng.uniform(0.2, 3.0))
                send(ranks, signal.SIGCONT)
                return set()
            return ranks
        case "link down, 5 s":
            hosts.set_link(host, up=False)
            time.sleep(5)
            hosts.set_link(host, up=True)
        case "link down, 60 s":
            hosts.set_link(host, up=False)  # up again when a minute has passed, or all ranks have ended
        case "link down for good":
            hosts.set_link(host, up=False)
        case "a slow rank":
            send({rank}, signal.SIGUSR1)
        case "clock jumps":
            send({rank}, signal.SIGUSR2)
        case "full disk":
            with contextlib.suppress(OSError), (hosts.shared_disk / "filler").open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
        case "directory removed":
            shutil.rmtree(folder, ignore_errors=True)
    return set()


def wait_for(pids: list[int], victims: set[int], seconds: float) -> set[int]:
    """The ranks that have not ended in time."""
    left, deadline = {rank for rank in range(len(pids)) if rank not in victims}, time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        for rank in list(left):
            if os.waitpid(pids[rank], os.WNOHANG)[0]:
                left.discard(rank)
        time.sleep(0.02)
    return left


def judge(
    kind: str, hosts: Hosts, folder: Path, reports: list[Path], victims: set[int], hanging: set[int]
) -> tuple[str, str]:
    """How a trial ended, and the text of what went wrong."""
    if hanging:
        logs = "\n".join((report.with_suffix(".log")).read_text()[-1500:] for report in reports)
        return "hang", f"ranks {sorted(hanging)}\n{logs}"
    found = []
    for rank, report in enumerate(reports):
        if rank in victims:
            continue
        if not report.exists():
            return "wrong", f"rank {rank} ended without a report: {report.with_suffix('.log').read_text()[-2000:]}"
        found.append(json.loads(report.read_text()))
    for outcome in ("wrong", "unclear"):
        for one in found:
            if one["kind"] == outcome:
                return outcome, one["text"]
    if kind != "directory removed" and (text := lost_checkpoints(hosts, folder)):
        return "lost", text
    refusals = [one["text"] for one in found if one["kind"] == "refused"]
    return ("refused", refusals[0]) if refusals else ("continued", "")


def lost_checkpoints(hosts: Hosts, folder: Path) -> str:
    """Every checkpoint that has a name must be whole, and the last one that was reported must be there."""
    reported = reported_on(hosts)
    done = reported.read_text().split() if reported.exists() else []
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in names:
        if damage := checkpoint.verify(folder / name):
            return f"{name}: {damage}"
    newest = max((int(name.split("-")[1]) for name in done), default=-1)
    return "" if all(f"step-{n}" in names for n in range(max(0, newest - 1), newest + 1) if newest >= 0) else (
        f"reported {done}, found {sorted(names)}"
    )  # fmt: skip


# ---------------------------------------------------------------- the campaign


def make_reference(path: Path) -> None:
    """Losses and parameters of one device, computed in a process of its own: this one forks and has one thread."""
    pid = os.fork()
    if not pid:
        losses, parameters = one_device(language_model(2, tied=False), 12, STEPS)
        torch.save({"losses": torch.tensor(losses), "parameters": parameters}, path)
        os._exit(0)
    os.waitpid(pid, 0)


def warm_up(folder: Path) -> None:
    """Import what the programs import, before ranks are forked: a step on virtual ranks."""
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (HOSTS, RANKS), mesh_dim_names=("dp", "tp"))
        model = model_on(mesh, language_model(2, tied=False))
        checkpoint.save({"model": model}, folder / "warm")
        checkpoint.load({"model": model}, folder / "warm")
        line = sw.init_device_mesh("cpu", (HOSTS * RANKS,))
        x = sw.distribute_tensor(torch.arange(64.0).reshape(8, 8), line, [sw.Shard(0)])
        sw.transfer({"x": x}, mesh, {"x": [sw.Shard(0), sw.Shard(1)]})
        assert (x.redistribute(placements=[sw.Shard(1)]) * 2).sum(0).full_tensor().numel() == 8
        torch.compile(lambda x: x * 2, backend="aot_eager")(x)
    shutil.rmtree(folder / "warm")


def run(
    count: int, seed: int, kinds: tuple[str, ...] = KINDS, report: Callable[[Trial], object] = print
) -> list[Trial]:
    """`count` trials, the kinds in turn."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    trials = []
    with Hosts(HOSTS) as hosts:
        make_reference(hosts.folder / "reference.pt")
        warm_up(hosts.folder)
        mounted = subprocess.run(
            ("mount", "-t", "tmpfs", "-o", "size=8m", "none", str(hosts.shared_disk)), check=False
        ).returncode  # a small disk
        try:
            for number in range(count):
                trial = one_trial(hosts, number, rng, kinds[number % len(kinds)])
                trials.append(trial)
                report(trial)
        finally:
            if not mounted:
                subprocess.run(("umount", "-l", str(hosts.shared_disk)), check=False)
    return trials


def table(trials: list[tuple[str, str]]) -> str:
    """Kinds and outcomes, counted, as a table of Markdown."""
    lines = [f"| fault | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for kind in (*KINDS, "all"):
        own = [outcome for fault, outcome in trials if kind in (fault, "all")]
        cells = [str(len(own) if column == "injected" else own.count(column)) for column in COLUMNS]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--results", type=Path, help="a file to which the outcome of each trial is appended")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced by all results of the file")
    given = parser.parse_args()

    def note(trial: Trial) -> None:
        print(f"{trial.kind}, {trial.program}: {trial.outcome}", trial.text[-3000:].strip(), flush=True)
        if given.results is not None:
            with given.results.open("a") as file:
                file.write(json.dumps([trial.kind, trial.outcome]) + "\n")

    trials = [(trial.kind, trial.outcome) for trial in run(given.count, given.seed, report=note)]
    if given.results is not None:
        trials = [tuple(json.loads(line)) for line in given.results.read_text().splitlines()]
    print(table(trials))
    if given.write is not None:
        page = given.write.read_text()
        begin, end = page.index("| fault |"), page.index("\n\n", page.index("| fault |"))
        given.write.write_text(page[:begin] + table(trials) + page[end:])
    sys.exit(any(outcome in ("unclear", "hang", "lost", "wrong") for _, outcome in trials))


if __name__ == "__main__":
    main()
