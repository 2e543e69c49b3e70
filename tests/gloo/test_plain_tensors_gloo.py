"""Plain tensors among DTensors of processes: taken as replicated, and compared beside the groups."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.fabric.c10d import c10d
from tests.gloo.processes import LOOPBACK, ProcessPool, _free_port
from tests.gloo.rank_programs import check_afresh

LIMIT = 40  # seconds within which every rank must have ended


def sharded(mesh: sw.DeviceMesh, *shape: int) -> sw.DTensor:
    placements = [sw.Shard(0)] + [sw.Replicate()] * (mesh.ndim - 1)
    return sw.distribute_tensor(torch.arange(16.0).reshape(*shape), mesh, placements, src_data_rank=None)


def here(lines_back: int = 1) -> str:
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno - lines_back}"


# ---------------------------------------------------------------- ranks that agree


def agreeing() -> dict[str, bool]:
    """Values and gradients are one device's, and nothing is raised, however ranks take their time."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    data, plain = torch.randn(8, 4), torch.randn(4, 4)
    found = {}
    for name, on in (("whole", mesh), ("slice", mesh["tp"])):
        x = sw.distribute_tensor(data, on, [sw.Shard(0)] * on.ndim, src_data_rank=None)
        one, p1, p = data.clone().requires_grad_(), plain.clone().requires_grad_(), plain.clone().requires_grad_()
        x.requires_grad_()
        for a, b in ((one, p1), (x, p)):
            (g,) = torch.autograd.grad(torch.tanh(a @ b).sum(), b, create_graph=True)
            assert g.__class__ is torch.Tensor
            (g.square().sum() + b.sum()).backward()
        found[name] = torch.allclose(p.grad, p1.grad, atol=1e-5) and torch.allclose(
            x.grad.full_tensor(), one.grad, atol=1e-5
        )
    x = sharded(mesh, 16)
    before = dist.distributed_c10d._get_default_store().num_keys()  # groups leave theirs
    for step in range(40):
        x = x * 1 + torch.full((16,), float(step))
        if step == 7 and dist.get_rank() == 2:
            time.sleep(0.3)
    if dist.get_rank() == 0:  # a way through the program that others do not take
        x * torch.arange(16.0)
    started = time.monotonic()
    c10d.settle_checks()
    assert time.monotonic() - started < 20
    check = c10d._plain
    found["compared"] = check is not None and not check.verdict and len(check._streams) == 2
    # each key was read by one neighbour, and deleted
    found["few keys left"] = dist.distributed_c10d._get_default_store().num_keys() - before < 100
    return found


def test_ranks_that_agree_compute_as_one_device(gloo4: ProcessPool) -> None:
    for found in gloo4.run(agreeing):
        assert all(found.values()), found


def counting() -> list[int]:
    """Only sampled uses of a line are posted; those of replicate, and operators on DTensors alone, never."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x, p = sharded(mesh, 16), torch.ones(16)
    x + p
    check = c10d._plain
    assert check is not None
    posted, counts = [], []
    ordinary, check._post = check._post, lambda *args: posted.append(args)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for _ in range(100):
            x * p
        counts.append(len(posted))
        with sw.implicit_replication():
            for _ in range(10):
                x - p
        for _ in range(10):
            x + x
        counts.append(len(posted))
    finally:
        check._post = ordinary
    return counts


def test_few_uses_are_compared(gloo4: ProcessPool) -> None:
    assert gloo4.run(counting) == [[7, 7]] * 4


# ---------------------------------------------------------------- ranks that do not


def until_raised(program: Callable[[], object], more: Callable[[], object]) -> str:
    """The error that a program gets, if not by itself then by what it computes next."""
    deadline = time.monotonic() + LIMIT
    try:
        program()
        while time.monotonic() < deadline:
            time.sleep(0.01)
            more()
    except sw.AgreementError as error:
        return str(error)
    return "no error"


def at_first_use(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)
    p = torch.full((4, 4), float(rank == 2))
    said = until_raised(lambda: x + p, lambda: x * 2.0)
    return said, here()


def at_a_later_use(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)

    def train() -> None:
        for step in range(8):
            torch.where(x > 0, torch.full((4, 4), float(step + (step == 7 and rank == 1))), x)

    said = until_raised(train, lambda: x * 2.0)
    return said, here(3)


def in_backward(rank: int) -> tuple[str, str]:
    """The gradient is the plain tensor that differs."""
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4).requires_grad_()

    def backward() -> None:
        (x * 2).backward(torch.full((4, 4), 1.0 + (rank == 3)))

    said = until_raised(backward, lambda: x * 2.0)
    return said, here(3)


def at_a_checkpoint(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/state"

    def save() -> None:
        sw.checkpoint.save({"x": x}, path, overwrite=True)

    said = until_raised(lambda: x + torch.full((4, 4), float(rank == 0)), save)
    return said, here()


def on_a_slice(rank: int) -> tuple[str, str]:
    """Along tp ranks must agree, and along dp they need not."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = sharded(mesh["tp"], 4, 4)
    x - torch.full((4, 4), float(mesh.get_local_rank("dp")))
    c10d.settle_checks()
    dist.barrier()
    said = until_raised(lambda: x + torch.full((4, 4), float(rank == 3)), lambda: x * 2.0)
    return said, here()


def a_single_number(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)
    said = until_raised(lambda: x * torch.tensor(float(rank)), lambda: x * 2.0)
    return said, here()


def of_other_shapes(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)
    said = until_raised(lambda: x * torch.ones(4 if rank else 1, 4), lambda: x + 2.0)
    return said, here()


def at_a_collective(rank: int) -> tuple[str, str]:
    x = sharded(sw.init_device_mesh("cpu", (4,)), 4, 4)

    def collective() -> None:
        check, deadline = c10d._plain, time.monotonic() + LIMIT
        assert check is not None
        while not check.verdict and time.monotonic() < deadline:  # all must have heard: one that has not would wait
            time.sleep(0.01)
        x.full_tensor()

    said = until_raised(lambda: x + torch.full((4, 4), float(rank == 2)), collective)
    return said, here()


CASES = {
    at_first_use: ("aten.add.Tensor", "argument 'other'", "of ranks 0-3", "use number 1 of", "float32[4, 4]"),
    at_a_later_use: ("aten.where.self", "argument 'self'", "use number 8 of"),
    in_backward: ("backward at", "argument 'gradient'", "ranks 0-3"),
    on_a_slice: ("aten.add.Tensor", "of ranks 2, 3", "and ranks 2 and 3 do not"),
    a_single_number: ("aten.mul.Tensor", "argument 'other'", "float32[]"),
    of_other_shapes: ("aten.mul.Tensor", "float32[1, 4]", "float32[4, 4]"),
    at_a_collective: ("aten.add.Tensor", "argument 'other'"),
    at_a_checkpoint: ("aten.add.Tensor", "argument 'other'"),
}


def outcomes() -> list[tuple[str, str]]:
    """Each case with a check of its own."""
    found = []
    for program in CASES:
        found.append(program(dist.get_rank()))
        check_afresh()
    return found


def test_a_disagreement_is_an_error_on_all_ranks(gloo4: ProcessPool) -> None:
    results = gloo4.run(outcomes, timeout=5 * LIMIT)
    for case, ranks in zip(CASES, zip(*results, strict=True), strict=True):
        for said, line in ranks:
            assert all(part in said for part in CASES[case]), (case, said)
            assert line in said
            assert "hint:" in said
        assert len({said for said, _ in ranks}) == 1


PROGRAM = """
import sys
import torch
import shardwise as sw

mesh = sw.init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
bias = torch.ones(6) + (mesh.get_rank() == 1 and sys.argv[1] == "differs")
for step in range(3):
    x = x * 1.5
y = x + bias
print("done", flush=True)
while sys.argv[2] == "loop":
    x.full_tensor()
if sys.argv[2] == "destroy":
    torch.distributed.destroy_process_group()
"""


def start(script: Path, *how: str) -> list[subprocess.Popen[str]]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, str(script), *how],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


PROGRAMS = (("differs", "destroy"), ("differs", "loop"), ("agrees", "leave"))


def test_programs_that_end_or_go_on_all_end_with_the_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    groups = {how: start(script, *how) for how in PROGRAMS}
    try:
        said = {how: [rank.communicate(timeout=5 * LIMIT) for rank in ranks] for how, ranks in groups.items()}
    finally:
        for ranks in groups.values():
            for rank in ranks:
                rank.kill()
                rank.wait()
    for how, ranks in groups.items():
        failed = how[0] == "differs"
        assert [rank.returncode for rank in ranks] == [int(failed)] * 2, said[how]
        for out, text in said[how]:
            assert "done" in out
            assert failed == ("AgreementError: aten.add.Tensor" in text), text
            assert not failed or f"{script}:11: argument 'other' is a plain torch.Tensor" in text
