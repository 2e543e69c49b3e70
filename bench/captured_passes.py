"""Captured training steps with and without passes: calls, copied bytes, collectives, memory, seconds.

One rank of one, a llama of two blocks: what `fully_shard` and tensor parallelism add to the plain step. One rank of a
fake world of 8: all-gathers that are shared within a bound of memory. Two gloo processes: each pass that changes
collectives. One process: memory and time with recomputation.

    python -m bench captured_passes
"""

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from bench import captured_h200
from bench.captured_h200 import Setting, step_of
from bench.dry_prediction import Llama, Sizes, fully_sharded, tensor_parallel
from bench.figures import figure
from shardwise.capture.copy_propagation import copied_bytes
from shardwise.text import human_bytes

SIZES = Sizes(2, 128, 4, 2, 512, 256)
BLOCKS = 8


def on_one_rank() -> None:
    """Calls and copied bytes of steps on one rank."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29514")
    dist.init_process_group("gloo", rank=0, world_size=1)
    setting = Setting("cpu", SIZES, 2, 32)
    print("one rank: calls that are no views, and bytes copied")
    try:
        for kind in ("plain", "fsdp", "tp", "tp x fsdp"):
            found = []
            for remove in (False, True):
                captured_h200.OPTIONS["remove_copies"] = remove
                step: Any = step_of(kind, "captured", setting)
                for _ in range(4):
                    step()
                found.append((computing(step._last.program), copied_bytes(step._last.program)))
            (before, bytes_before), (after, bytes_after) = found
            print(f"  {kind:12}{before:6} -> {after:<6}{human_bytes(bytes_before):>10} -> {human_bytes(bytes_after)}")
            figure(f"bytes copied by a captured step on one rank, {kind}", bytes_after, 0)
    finally:
        captured_h200.OPTIONS.clear()
        dist.destroy_process_group()


def computing(program: Any) -> int:
    return sum(
        not (hasattr(call, "op") and (call.op.is_view or "view" in call.op._opname)) for _, call in program.calls
    )


def shared() -> None:
    """All-gathers of a fully sharded llama, for bounds of memory."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    print(f"8 ranks, fully_shard, {BLOCKS} blocks: share_gathers, all-gathers, received, own memory at the peak")
    try:
        mesh = sw.init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        for bound in (0, 2**20, 2**22, 2**30):
            report = captured_step(mesh, bound).explain()
            gathers = report.by_collective["all_gather"]
            print(
                f"  {human_bytes(bound):>10}{gathers.collectives:6}{human_bytes(gathers.received):>12}"
                f"{human_bytes(report.memory.peak):>12}"
            )
    finally:
        dist.destroy_process_group()


def captured_step(mesh: sw.DeviceMesh, bound: int) -> Any:
    torch.manual_seed(0)
    model = Llama(Sizes(BLOCKS, 128, 4, 2, 512, 256))
    fully_sharded(model, mesh)
    tokens = torch.randint(256, (2, 32))

    def train() -> None:
        model(tokens).square().mean().backward()
        model.zero_grad()

    step: Callable[[], None] = sw.captured(train, share_gathers=bound, verify=False)  # there are no other ranks
    for _ in range(3):
        step()
    return step


# ---------------------------------------------------------------- two processes


def trained(wrap: Callable[[Any, sw.DeviceMesh], Any], unused: bool = False) -> Callable[[], Any]:
    """A training step of a llama over all ranks; `unused`: it gathers weights for a norm that nobody reads."""
    torch.manual_seed(0)
    model = Llama(Sizes(4, 128, 4, 2, 512, 256))
    wrap(model, sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (2, 32))

    def train() -> Any:
        logits = model(tokens)
        if unused:
            sum(p.full_tensor().square().sum() for p in model.parameters() if isinstance(p, sw.DTensor))
        loss = logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def small_gathers() -> Callable[[], Any]:
    """48 small sharded tensors, each gathered and used."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    parts: list[Any] = [sw.distribute_tensor(torch.randn(256), mesh, [sw.Shard(0)]) for _ in range(48)]

    def use() -> Any:
        gathered = [(part * 2).redistribute(placements=[sw.Replicate()]) for part in parts]
        return sum(each.sum() for each in gathered)

    return use


CASES: list[tuple[str, Callable[[], Callable[[], Any]], dict[str, Any]]] = [
    ("remove_dead, tensor parallel, unused norm", lambda: trained(tensor_parallel, True), {"remove_dead": True}),
    ("bucket=1 MiB, tensor parallel", lambda: trained(tensor_parallel), {"bucket": 2**20}),
    ("bucket=1 MiB, 48 gathers of 1 KiB", small_gathers, {"bucket": 2**20}),
    ("share_gathers=1 GiB, fully_shard", lambda: trained(fully_sharded), {"share_gathers": 2**30}),
    ("overlap, fully_shard", lambda: trained(fully_sharded), {"overlap": True}),
]


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, make, options in CASES:
        sides = [make_side(make, chosen) for chosen in ({}, options)]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for step, found in zip(sides, times, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                step()
                found.append(time.perf_counter() - begin)
        if rank == 0:
            total = [step.explain().total for step in sides]
            median = [statistics.median(found) * 1e3 for found in times]
            print(
                f"  {name:46}{total[0].collectives:4} -> {total[1].collectives:<4}"
                f"{human_bytes(total[0].received):>10} -> {human_bytes(total[1].received):<10}"
                f"{total[0].seconds * 1e6:8.0f} -> {total[1].seconds * 1e6:<6.0f}{median[0]:8.1f} -> {median[1]:.1f}"
            )
    dist.destroy_process_group()


ROUNDS = 15


def make_side(make: Callable[[], Callable[[], Any]], options: dict[str, Any]) -> Any:
    step: Any = sw.captured(make(), **options)
    for _ in range(4):
        step()
    return step


def on_two_processes() -> None:
    """Collectives, bytes, modelled and measured time."""
    print("two gloo processes: collectives, bytes received, modelled us of collectives, measured ms of a step")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(str(Path(folder).absolute()),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]


# ---------------------------------------------------------------- recomputation


def bounded() -> None:
    """Memory at the peak, operators that run again, and time, for bounds of memory."""
    print(
        "one process, plain llama of 4 blocks, 8 x 128 tokens: bound, own memory at the peak, recomputed, ms of a step"
    )
    torch.manual_seed(0)
    model = Llama(Sizes(4, 128, 4, 2, 512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (8, 128))

    def train() -> Any:
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step: Any = sw.captured(train)
    for _ in range(3):
        step()
    whole = step.explain().memory.peak
    least: Any = sw.captured(train, max_bytes=0)
    try:
        for _ in range(3):
            least()
        raise AssertionError("a program takes no memory")
    except sw.errors.UnsupportedError as error:
        found = re.search(r"\((\d+) and", str(error))
        assert found is not None
        reached = int(found[1])
    for bound in (whole, (whole + reached) // 2, reached):
        step = sw.captured(train, max_bytes=bound)
        for _ in range(3):
            step()
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        report = step.explain()
        print(
            f"  {human_bytes(bound):>12}{human_bytes(report.memory.peak):>12}{report.operators.get('recompute', 0):6}"
            f"{statistics.median(times) * 1e3:9.1f}"
        )


def main() -> None:
    """Print the counts."""
    bounded()
    on_two_processes()
    torch.set_flush_denormal(True)  # the fake group leaves in its outputs whatever was there
    on_one_rank()
    shared()


if __name__ == "__main__":
    main()
