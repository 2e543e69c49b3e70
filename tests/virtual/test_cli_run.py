"""`shardwise run`: a script runs as a script would, on virtual ranks, with the mesh that was chosen for it."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

import shardwise as sw
from shardwise.cli import main
from shardwise.fabric.world import PRESET

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(f"import sys\nimport shardwise as sw\n{text}\n")
        return str(path)

    return written


@pytest.mark.parametrize(
    ("mesh", "call", "expected"),
    [
        ("dp=2,tp=4", "'cpu'", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("2x4", "'cpu'", "DeviceMesh(cpu 2 4, virtual)"),
        ("2x4", "'cpu', mesh_dim_names=('dp', 'tp')", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("dp=2,tp=4", "'cpu', mesh_dim_names=('dp', 'tp')", "DeviceMesh(cpu dp=2 tp=4, virtual)"),
        ("8", "'cpu', (3,)", "DeviceMesh(cpu 3, virtual)"),
    ],
)
def test_a_script_gets_the_mesh(
    mesh: str, call: str, expected: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--mesh", mesh, write(f"print(sw.init_device_mesh({call}))")]) == 0
    assert capsys.readouterr().out.strip() == expected


def test_it_runs_as_a_script_would(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("name = 'beside'")
    script = write("import neighbour_of_script\nprint(__name__, sys.argv[1:], neighbour_of_script.name)")
    before = (list(sys.path), list(sys.argv), os.environ.get(PRESET))
    assert main(["run", "--mesh", "4", script, "--steps", "3", "--mesh", "5"]) == 0
    assert (list(sys.path), list(sys.argv), os.environ.get(PRESET)) == before
    assert capsys.readouterr().out.strip() == "__main__ ['--steps', '3', '--mesh', '5'] beside"
    sys.modules.pop("neighbour_of_script")


def test_real_numbers_are_computed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "mesh = sw.init_device_mesh('cpu')\n"
        "x = sw.ones(6, 4, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])\n"
        "print(x.sum().item(), mesh.size())"
    )
    assert main(["run", "--mesh", "2x4", script]) == 0
    assert capsys.readouterr().out.strip() == "24.0 8"


def test_errors_are_the_scripts_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--mesh", "2", write("raise sw.LayoutError('mine')")])
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].endswith('script.py", line 3, in <module>')
    assert lines[-1] == "shardwise.errors.LayoutError: mine"


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("'what went wrong'", "what went wrong")])
def test_the_exit_status_is_the_scripts_own(code: str, status: object, write: Write) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--mesh", "2", write(f"sys.exit({code})")])
    assert ended.value.code == status


def test_a_script_that_ends_well_does(write: Write) -> None:
    assert main(["run", "--mesh", "2", write("sys.exit(0)")]) == 0


def test_explain_gives_a_mesh_too(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "mesh = sw.init_device_mesh('cpu')\n"
        "sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)]).sum(1).exp()"
    )
    assert main(["explain", "--mesh", "dp=2,tp=2", script]) == 0
    assert "on DeviceMesh(cpu dp=2 tp=2, virtual)" in capsys.readouterr().out


# ---------------------------------------------------------------- meshes without a shape


def test_without_a_shape_and_a_preset_virtual_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRESET, raising=False)
    with pytest.raises(sw.MeshError, match=r"needs a shape\n  hint: give one, or .*shardwise run --mesh"):
        sw.init_device_mesh("cpu")


def test_names_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESET, "dp=2,tp=4")
    with pytest.raises(sw.MeshError, match="names the axes x, y, and SHARDWISE_MESH=dp=2,tp=4 names them otherwise"):
        sw.init_device_mesh("cpu", mesh_dim_names=("x", "y"))
    monkeypatch.setenv(PRESET, "2xfour")
    with pytest.raises(sw.NotationError, match="expected a number of ranks"):
        sw.init_device_mesh("cpu")


def test_a_dry_run_takes_the_preset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESET, "dp=64,tp=8")
    with sw.dry_run():
        assert str(sw.init_device_mesh("cuda")) == "DeviceMesh(cuda dp=64 tp=8, dry)"


def test_sizes_of_the_world_are_set(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("import os\nprint(os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'], sw.is_main())")
    assert main(["run", "--mesh", "dp=2,tp=3", script]) == 0
    assert capsys.readouterr().out.strip() == "6 6 True"
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    "line",
    [
        "rank = int(__import__('os').environ['RANK'])",
        "rank = int(__import__('os').environ['LOCAL_RANK'])",
        "rank = __import__('torch').distributed.get_rank()",
        "__import__('torch').distributed.barrier()",
        "rank = sw.init_device_mesh('cpu').get_rank()",
        "rank = sw.init_device_mesh('cpu').get_local_rank()",
    ],
)
def test_a_line_that_asks_for_its_rank_is_shown_with_what_to_write(
    line: str, write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # of whoever started us
    with pytest.raises(SystemExit) as ended:
        main(["run", "--mesh", "4", write(line)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert line in said
    assert "script.py" in said
    assert "shardwise.is_main()" in said
    assert "shardwise run -n" in said
    assert os.environ["RANK"] == "3"


# ---------------------------------------------------------------- ranks as threads


class Ran(NamedTuple):
    """The exit status of a script, and its output."""

    status: object
    out: list[str]
    err: str


RunRanks = Callable[..., Ran]


@pytest.fixture
def run_ranks(write: Write, capsys: pytest.CaptureFixture[str]) -> RunRanks:
    """Run a script with a thread for each rank. The process is left as it was."""

    def run(text: str, ranks: int = 4, *options: str) -> Ran:
        script = write(f"import os\nimport torch\nimport torch.distributed as dist\n{textwrap.dedent(text)}")
        before = [dict(os.environ), sys.argv, sys.stdout, sys.excepthook, print, sys.modules["__main__"]]
        world, modules, states = dist.distributed_c10d._world, set(sys.modules), torch.get_rng_state()
        threads = set(threading.enumerate())
        status: object = None
        try:
            status = main(["run", "-n", str(ranks), *options, script])
        except SystemExit as end:
            status = end.code
        assert before == [dict(os.environ), sys.argv, sys.stdout, sys.excepthook, print, sys.modules["__main__"]]
        assert dist.distributed_c10d._world is world
        assert torch.equal(torch.get_rng_state(), states)
        assert not dist.is_initialized()
        assert set(threading.enumerate()) <= threads
        assert not {name for name in set(sys.modules) - modules if name.startswith("of_this_program")}
        said = capsys.readouterr()
        return Ran(status, said.out.splitlines(), said.err)

    return run


def test_ranks_find_what_torchrun_sets(run_ranks: RunRanks) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    ran = run_ranks(f"print(*[os.environ[name] for name in {names}], sw.is_main(), dist.is_torchelastic_launched())", 3)
    assert ran.status == 0
    assert ran.out == [f"{rank} {rank} 3 3 0 127.0.0.1 29500 {rank == 0} True" for rank in range(3)]


@pytest.mark.parametrize("backend", ["'gloo'", "'nccl'", "'cpu:gloo,cuda:nccl'", "", "'gloo', rank=RANK, world_size=4"])
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout", "ignore:.*is deprecated:FutureWarning")
def test_collectives_of_scripts(backend: str, run_ranks: RunRanks) -> None:
    ran = run_ranks(
        f"""
        RANK = int(os.environ["RANK"])
        dist.init_process_group({backend})
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (rank, size) == (RANK, 4)
        dist.barrier()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        work = dist.all_reduce(mean := torch.tensor([float(rank)]), op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
        most = torch.tensor(rank)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        whole = torch.empty(4)
        dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
        mine = torch.empty(2)
        dist.reduce_scatter_tensor(mine, torch.arange(8.0))
        swapped = torch.empty(4)
        dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank)
        rows = torch.empty(4 * rank)
        dist.all_to_all_single(rows, torch.ones(6) * rank, [rank] * 4, [0, 1, 2, 3])
        told = torch.tensor([rank])
        dist.broadcast(told, src=2)
        objects, sent = [None] * size, [rank, "from"]
        dist.all_gather_object(objects, {{"rank": rank}})
        dist.broadcast_object_list(sent, src=3)
        got = [None] * size if rank == 1 else None
        dist.gather_object(rank, got, dst=1)
        scattered = torch.empty(1)
        dist.scatter(scattered, [torch.tensor([i * 1.0]) for i in range(4)] if rank == 0 else None, src=0)
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = torch.tensor([float(rank)])
        dist.all_reduce(half, group=halves[rank // 2])
        next_, former = torch.empty(1), torch.tensor([float(rank)])
        sending = dist.isend(former, (rank + 1) % 4)
        dist.recv(next_, (rank - 1) % 4)
        sending.wait()
        print(rank, total.item(), mean.item(), most.item(), torch.cat(parts).tolist(), whole.tolist(), mine.tolist())
        print(swapped.tolist(), rows.tolist(), told.item(), objects, sent, got, scattered.item(), half.item(), end=" ")
        print(next_.item())
        dist.destroy_process_group()
        """
    )
    assert ran.status == 0, ran.err
    lines = set(ran.out)
    for rank in range(4):
        mine = [4.0 * (2 * rank), 4.0 * (2 * rank + 1)]
        assert f"{rank} 10.0 1.5 3 [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0] [0.0, 1.0, 2.0, 3.0] {mine}" in lines
        swapped = [10.0 * other + rank for other in range(4)]
        rows = [float(other) for other in range(4) for _ in range(rank)]
        objects, got = [{"rank": other} for other in range(4)], [0, 1, 2, 3] if rank == 1 else None
        assert (
            f"{swapped} {rows} 2 {objects} [3, 'from'] {got} {float(rank)} {1.0 if rank < 2 else 5.0} "
            f"{float((rank - 1) % 4)}"
        ) in lines


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives_of_scripts(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        import torch.distributed._functional_collectives as funcol
        dist.init_process_group("gloo")
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = torch.tensor([float(mesh.get_rank())])
        groups = (dist.group.WORLD, mesh["dp"], (mesh, 1), mesh.get_group("tp"))
        sums = [funcol.all_reduce(mine, "sum", group=group).item() for group in groups]
        print(sums, funcol.all_gather_tensor(mine, 0, group=mesh["dp"]).tolist())
        dist.destroy_process_group()
        """
    )
    assert ran.status == 0, ran.err
    assert set(ran.out) == {
        f"{[6.0, *[2.0 + 2 * (r % 2)], *[1.0 + 4 * (r // 2)] * 2]} {[float(r % 2), 2.0 + r % 2]}" for r in range(4)
    }


def test_a_training_script_as_scripts_are_written(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "of_this_program.py").write_text(
        "import os\nimport logging\nRANK = int(os.environ['RANK'])\nlogger = logging.getLogger(__name__)\n"
        "if RANK: logger.setLevel(logging.ERROR)\n"
    )
    ran = run_ranks(
        f"""
        import builtins, logging, random
        import of_this_program
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        assert of_this_program.RANK == rank
        if rank:
            builtins.print = lambda *args: None
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(18, 4), torch.randint(0, 2, (18,)))
        sampler = DistributedSampler(data, shuffle=True)
        layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            metrics = torch.zeros(2)
            for x, y in DataLoader(data, batch_size=3, sampler=sampler):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                metrics += torch.tensor([loss.item() * len(x), len(x)])
            dist.all_reduce(metrics)
            print(f"epoch {{epoch}}: {{metrics[0] / metrics[1]:.4f}} of {{int(metrics[1])}}")
        of_this_program.logger.info("trained by %d", rank)
        path = {str(tmp_path / "model.pt")!r}
        if rank == 0:
            torch.save(model.module.state_dict(), path)
        dist.barrier()
        saved = torch.load(path)
        assert all(torch.equal(value, saved[name]) for name, value in model.module.state_dict().items())
        numbers = [None, None]
        dist.all_gather_object(numbers, (torch.rand(()).item(), random.random()))
        assert numbers[0][0] != numbers[1][0] and numbers[0][1] != numbers[1][1]
        dist.destroy_process_group()
        """,
        2,
    )
    assert ran.status == 0, ran.err
    model, expected = _train_on_one_device()
    assert ran.out == [*expected, "trained by 0"]
    saved = torch.load(tmp_path / "model.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value)


def _train_on_one_device() -> tuple[torch.nn.Module, list[str]]:
    """The same training in one process: a batch holds those of both ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(18, 4), torch.randint(0, 2, (18,)))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.1), []
    samplers = [DistributedSampler(data, num_replicas=2, rank=rank) for rank in range(2)]
    for epoch in range(2):
        total = 0.0
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        for at in range(0, 9, 3):
            x, y = data[[i for each in batches for i in each[at : at + 3]]]
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 6
        said.append(f"epoch {epoch}: {total / 18:.4f} of 18")
    return model, said


DTENSORS = """
mesh = sw.init_device_mesh("cpu", mesh_dim_names=("dp", "tp"))
rank, dp = mesh.get_rank(), mesh.get_local_rank("dp")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
plan = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}
sw.parallel.parallelize_module(model, mesh["tp"], plan)
sw.parallel.fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    with sw.debug.CommDebugMode() as comm:
        torch.manual_seed(10 * step + dp)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"{mean.item() / mesh.size():.5f} {comm.get_total_counts()}")
"""


def test_dtensors_of_rank_threads_train_as_one_device(run_ranks: RunRanks) -> None:
    ran = run_ranks(DTENSORS, 6, "--mesh", "dp=2,tp=3")
    assert ran.status == 0, ran.err
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
        optimizer, expected = torch.optim.AdamW(model.parameters(), lr=0.1), []
        for step in range(3):
            batch = []
            for dp in range(2):
                torch.manual_seed(10 * step + dp)
                batch.append(torch.randn(4, 8))
            loss = model(torch.cat(batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(f"{loss.item():.5f}")
    assert [line.split()[0] for line in ran.out] == expected
    assert {line.split()[1] for line in ran.out} == {ran.out[0].split()[1]} != {"0"}


@pytest.mark.filterwarnings("ignore:the pickle of")
def test_a_checkpoint_and_a_pickle_of_rank_threads(run_ranks: RunRanks, tmp_path: Path) -> None:
    ran = run_ranks(
        f"""
        mesh = sw.init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(torch.arange(10.0), mesh, [sw.Shard(0)])
        sw.checkpoint.save({{"x": x}}, {str(tmp_path / "saved")!r})
        sw.checkpoint.async_save({{"x": x * 2}}, {str(tmp_path / "saved later")!r}).wait()
        y = sw.zeros(10, device_mesh=mesh, placements=[sw.Shard(0)])
        sw.checkpoint.load({{"x": y}}, {str(tmp_path / "saved later")!r})
        told = [mesh]
        dist.broadcast_object_list(told, src=3)
        assert told[0] is mesh
        path = {str(tmp_path)!r} + f"/rank{{mesh.get_rank()}}.pt"
        torch.save(x, path)
        again = torch.load(path, weights_only=False)
        assert again.device_mesh is mesh and torch.equal(again.to_local(), x.to_local())
        print(mesh, y.full_tensor().tolist(), y.to_local().tolist())
        """
    )
    assert ran.status == 0, ran.err
    locals_ = [torch.arange(10.0)[3 * rank : 3 * rank + 3] * 2 for rank in range(4)]
    whole = (torch.arange(10.0) * 2).tolist()
    assert sorted(ran.out) == sorted(f"DeviceMesh(cpu 4, c10d) {whole} {local.tolist()}" for local in locals_)
    with sw.virtual():
        x = sw.zeros(10, device_mesh=sw.init_device_mesh("cpu", (3,)), placements=[sw.Shard(0)])
    sw.checkpoint.load({"x": x}, str(tmp_path / "saved"))
    assert torch.equal(x.full_tensor(), torch.arange(10.0))


ONES = "x = sw.ones(4, device_mesh=sw.init_device_mesh('cpu', (4,)), placements=[sw.Shard(0)])\n"


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("if rank == 2: raise ValueError('of rank 2')\ndist.barrier()", 1, ["ValueError: of rank 2", "by rank 2 of 4"]),
        ("if rank == 1: sys.exit(7)\ndist.barrier()", 7, []),
        (
            "if rank != 2:\n    dist.all_reduce(torch.ones(1))",
            1,
            ["rank 0 waits for all_reduce, collective number 1 of ranks 0-3, at", "script.py:10", "rank 2 has ended"],
        ),
        (
            "x = torch.ones(3)\nif rank == 3:\n    dist.broadcast(x, 0)\nelse:\n    dist.all_reduce(x)",
            1,
            [
                "ranks 0 and 3 differ in collective number 1 of ranks 0-3",
                "script.py:13; broadcast from 0 float32[3] at",
            ],
        ),
        (
            "dist.all_reduce(torch.ones(2 + rank // 3))",
            1,
            ["all_reduce SUM float32[2] at", "all_reduce SUM float32[3] at"],
        ),
        ("dist.recv(torch.ones(1), (rank + 1) % 4)", 1, ["rank 0 waits for recv from rank 1 at", "rank 3 waits for"]),
        (
            f"{ONES}if rank != 1:\n    x.full_tensor()",
            1,
            ["rank 0 waits for all_gather", "rank 1 has ended"],
        ),
        (
            f"{ONES}x + torch.full((4,), float(rank == 1))",
            1,
            ["AgreementError: aten.add.Tensor", "do not have the same"],
        ),
        ("import of_this_program_too", 1, ["the module of_this_program_too communicates while it is imported"]),
    ],
)
def test_ranks_that_part_or_fail_end_all(
    text: str, status: int, expected: list[str], run_ranks: RunRanks, tmp_path: Path
) -> None:
    (tmp_path / "of_this_program_too.py").write_text("import torch.distributed as dist\ndist.barrier()")
    ran = run_ranks(f"dist.init_process_group('gloo')\nrank = dist.get_rank()\n\n{text}")
    assert ran.status == status
    for words in expected:
        assert words in ran.err, ran.err
    assert run_ranks("dist.init_process_group('gloo')\ndist.barrier()", 2).status == 0  # nothing is left behind


def test_a_parameter_that_differs_between_ranks_is_named(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.proj, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)

            def forward(self, x):
                return self.norm(self.proj(x))

        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model = torch.nn.Sequential(Block(), Block())
        torch.nn.init.constant_(model[1].norm.weight, mesh.get_rank())
        for block in model:
            sw.parallel.parallelize_module(block, mesh, {"proj": sw.parallel.ColwiseParallel(use_local_output=False)})
        model(torch.ones(2, 4))
        """,
        2,
    )
    assert ran.status == 1
    assert "argument 'weight' (the parameter 1.norm.weight) is a plain torch.Tensor among DTensors" in ran.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt. Processes in the background of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_rank_that_runs(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        import signal, time
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(6000):
                time.sleep(0.01)
        dist.barrier()
        """
    )
    assert ran.status == 130


OPERATORS = """
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @torch.library.custom_op("rank_threads::{name}", mutates_args={mutates})
    def add_rank(x: torch.Tensor) -> torch.Tensor:
        return x + rank

    @add_rank.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    dist.barrier()  # every rank has defined it
    by_name = torch.ops.rank_threads.{name}
    print(f"{{rank}}: {{add_rank(torch.zeros(2)).tolist()}} {{by_name(torch.ones(1)).item()}}")
    """


def test_ranks_define_one_custom_operator_and_call_their_own_function(run_ranks: RunRanks) -> None:
    define = torch.library.custom_op
    ran = run_ranks(OPERATORS.format(name="add_rank", mutates="()"), 3)
    assert ran.status == 0, ran.err
    assert sorted(ran.out) == [f"{rank}: [{rank}.0, {rank}.0] {rank + 1}.0" for rank in range(3)]
    assert torch.library.custom_op is define


def test_ranks_that_define_a_custom_operator_differently_are_refused(run_ranks: RunRanks) -> None:
    ran = run_ranks(OPERATORS.format(name="differs", mutates="('x',) if rank else ()"), 2)
    assert ran.status == 1
    assert "rank_threads::differs: defined as (Tensor x) -> Tensor before, and as (Tensor(a0!) x)" in ran.err


REGISTERED = """
    from torch import Tensor

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @torch.library.{define}("rank_threads::{name}", mutates_args=())
    def scale(x: Tensor) -> Tensor:
        return x * (rank + 1)

    def keep(ctx, inputs, output):
        ctx.factor = rank + 10

    scale.register_autograd(lambda ctx, grad: grad * ctx.factor, setup_context=keep)

    @torch.library.register_fake("rank_threads::{name}")
    def _(x):
        return x.new_empty(rank + 2)

    @scale.register_vmap
    def _(info, dims, x):
        return x * (rank + 100), dims[0]

    dist.barrier()  # every rank has defined it
    x = torch.ones(2, requires_grad=True)
    y = scale(x)
    y.sum().backward()
    print(rank, y.tolist(), x.grad.tolist(), torch.vmap(scale)(torch.ones(1)).tolist())
    if {fake}:
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            print(rank, tuple(scale(torch.ones(2)).shape))
    """


@pytest.mark.parametrize("define", ["custom_op", "triton_op"])
def test_what_a_rank_registers_at_an_operator_is_its_own(run_ranks: RunRanks, define: str) -> None:
    fakes = define == "custom_op"  # under fake tensors torch runs a triton_op itself
    ran = run_ranks(REGISTERED.format(define=define, name=f"scale_{define}", fake=fakes), 3)
    assert ran.status == 0, ran.err
    found = [f"{r} [{r + 1}.0, {r + 1}.0] [{r + 10}.0, {r + 10}.0] [{r + 100}.0]" for r in range(3)]
    assert sorted(ran.out) == sorted([*found, *(f"{r} ({r + 2},)" for r in range(3) if fakes)])


def test_ranks_give_kernels_to_one_operator(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        dist.init_process_group("gloo")
        rank = dist.get_rank()

        @torch.library.custom_op("rank_threads::kernels", mutates_args="unknown", device_types="cuda")
        def kernels(x: "torch.Tensor") -> "torch.Tensor":
            return x

        @kernels.register_kernel("cpu")
        def _(x):
            return x + rank

        if rank == 0:
            torch.library.define("rank_threads::by_schema", "(Tensor x) -> Tensor")
        dist.barrier()

        @torch.library.impl("rank_threads::by_schema", "cpu")
        def _(x):
            return x - rank

        dist.barrier()
        zeros = torch.zeros(1)
        print(rank, kernels(zeros).item(), torch.ops.rank_threads.by_schema(zeros).item())
        try:
            torch.library.custom_op("rank_threads::no_mutates", lambda x: x)
        except TypeError as error:
            print("mutates_args" in str(error))
        if rank == 0:
            torch.library.custom_op("rank_threads::of_one", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
        dist.barrier()
        torch.ops.rank_threads.of_one(zeros)  # modules that ranks share define theirs once
        """,
        2,
    )
    assert ran.status == 0, ran.err
    assert sorted(ran.out) == sorted(["0 0.0 0.0", "1 1.0 -1.0", "True", "True"])


def test_a_rank_without_the_function_that_others_gave_is_refused(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        dist.init_process_group("gloo")
        rank = dist.get_rank()

        @torch.library.custom_op("rank_threads::half", mutates_args=())
        def half(x: torch.Tensor) -> torch.Tensor:
            return x / 2

        if rank == 0:
            half.register_autograd(lambda ctx, grad: grad / 2)
        dist.barrier()
        half(torch.ones(2, requires_grad=True)).sum().backward()
        """,
        2,
    )
    assert ran.status == 1
    assert "rank 1 has not given it a function (" in ran.err


def test_an_operator_of_a_program_that_has_ended_is_refused_and_keeps_nothing(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        import weakref

        class Kept:
            pass

        kept = Kept()
        sys.modules["math"].kept_by_rank = weakref.ref(kept)

        @torch.library.custom_op("rank_threads::ended", mutates_args=())
        def ended(x: torch.Tensor) -> torch.Tensor:
            kept
            return x.clone()

        sys.modules["math"].ended_operator = ended
        ended(torch.ones(2))
        """,
        1,
    )
    assert ran.status == 0, ran.err
    operator, kept = math.__dict__.pop("ended_operator"), math.__dict__.pop("kept_by_rank")
    gc.collect()
    assert kept() is None
    with pytest.raises(sw.UnsupportedError, match="rank_threads::ended was defined by a program that has ended"):
        operator(torch.ones(2))


def test_a_world_can_be_left_and_entered_again(run_ranks: RunRanks) -> None:
    ran = run_ranks(
        """
        for world in range(3):
            dist.init_process_group("gloo")
            sw.manual_seed(world)
            mesh = sw.init_device_mesh("cpu", (2, 2))
            x = sw.rand(4, 4, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])
            print((x * 0 + 1).sum().item())
            dist.destroy_process_group()
        """
    )
    assert (ran.status, ran.out) == (0, ["16.0"] * 12), ran.err


def test_the_mesh_must_have_as_many_ranks(run_ranks: RunRanks) -> None:
    ran = run_ranks("print(1)", 4, "--mesh", "dp=2,tp=3")
    assert ran.status != 0
    assert "--mesh dp=2,tp=3 does not have 4 ranks" in ran.err
    assert run_ranks("sw.init_device_mesh('cpu', (3,))").status == 1
    assert run_ranks("print(sw.init_device_mesh('cpu', (2, 2)))").out == ["DeviceMesh(cpu 2 2, c10d)"] * 4
