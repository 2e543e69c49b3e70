"""Checkpoints of real processes: who writes and reads what, errors of one rank on all of them, states that differ."""

from __future__ import annotations

import contextlib
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import async_save, export_safetensors, load, load_safetensors, read, reshard, save
from shardwise.checkpoint.operations import save_checkpoint as writing
from shardwise.checkpoint.operations.load_checkpoint import open_index
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes
from shardwise.fabric.c10d import c10d
from tests.gloo import checkpoint_faults
from tests.gloo.processes import ProcessPool
from tests.virtual.checkpoints import OBJECTS, Trained, full, laid_out, mesh_of, same_bits, values, zeroed

# ---------------------------------------------------------------- run on every rank


def saves_and_loads(folder: str, seed: int) -> None:
    """Between processes, to and from virtual ranks, and in the background."""
    place, rng = Path(folder), random.Random(seed)
    tensors = values(seed)
    for shape, other in (((4,), (2, 2)), ((2, 2), (4,))):
        name = "x".join(map(str, shape))
        save({"tensors": laid_out(tensors, mesh_of(shape), rng), "objects": OBJECTS}, place / name)
        target = zeroed(laid_out(tensors, mesh_of(other), rng))
        load({"tensors": target, "objects": {}}, place / name, strict=False)
        assert all(same_bits(full(target[key]), tensor) for key, tensor in tensors.items())
    with sw.virtual():
        state = {"tensors": laid_out(tensors, mesh_of((2, 3)), rng)}
        if dist.get_rank() == 0:
            save(state, place / "virtual")
    dist.barrier()
    target = zeroed(laid_out(tensors, mesh_of((2, 2)), rng))
    load({"tensors": target}, place / "virtual")
    assert all(same_bits(full(target[key]), tensor) for key, tensor in tensors.items())
    saving = async_save({"tensors": target}, place / "behind-1", keep=1)
    zeroed(target)
    assert full(target["t3"]).count_nonzero() == 0  # collectives go on beside those of the thread
    async_save({"tensors": target}, place / "behind-2", keep=1).wait()
    assert saving.done
    reshard(place / "virtual", place / "again", mesh_of((4,)))


def settles_after_a_rank_saved_alone(folder: str) -> list[bool]:
    """Plain tensors are compared before a save, among the processes that save; whether each comparison was made."""
    x = sw.ones(8, device_mesh=mesh_of((4,)), placements=[sw.Shard(0)])
    _ = x + torch.ones(8)
    settled: list[bool] = []

    def compared() -> None:
        assert c10d._plain is not None
        settled.append(c10d._plain._compared == c10d._comparisons)

    with sw.virtual():
        state = {"x": sw.ones(8, device_mesh=mesh_of((2, 3)), placements=[sw.Replicate(), sw.Replicate()])}
        if dist.get_rank() == 0:
            save(state, Path(folder) / "virtual")
    save({"x": x}, Path(folder) / "all")
    compared()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        save({"y": torch.ones(2)}, Path(folder) / "some", process_group=group)
        compared()
    save({"x": x}, Path(folder) / "all", overwrite=True)
    compared()
    return settled


def trains(folder: str) -> tuple[list[float], list[float]]:
    first = Trained(mesh_of((2, 2)))
    first.train(2)
    first.save(Path(folder) / "trained")
    resumed = Trained(mesh_of((2, 2)), seed=1)
    resumed.load(Path(folder) / "trained")
    return first.train(2), resumed.train(2)


def reads_its_part(folder: str) -> tuple[int, int]:
    mesh = mesh_of((4,))
    whole = torch.arange(128 * 2048).float().reshape(128, 2048)
    save({"w": sw.distribute_tensor(whole, mesh, [sw.Shard(0)])}, Path(folder) / "rows")
    target = sw.zeros(128, 2048, device_mesh=mesh, placements=[sw.Shard(1)])
    loaded = load({"w": target}, Path(folder) / "rows")
    assert torch.equal(target.full_tensor(), whole)
    return loaded.bytes_read, target.to_local().nbytes


def exchanges(folder: str) -> tuple[int, list[int]]:
    """How many collectives a load takes, and the lengths of long and short messages that arrived."""
    mesh, path = mesh_of((4,)), Path(folder) / "exchanged"
    state = {"w": sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])}
    save(state, path)
    calls: list[int] = []
    original = dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    dist.all_gather = counted
    try:
        load(state, path)
        taken = len(calls)
        outcome = Outcome()
        outcome.value = b"x" * (0, 3000, 4084, 50_000)[dist.get_rank()]
        return taken, [len(value) for value in Processes(dist.group.WORLD).exchange(outcome)]
    finally:
        dist.all_gather = original


def a_rank_fails(folder: str) -> list[str]:
    """Each of these goes wrong on one rank; what every rank is told."""
    place, told = Path(folder), []
    rank, mesh = dist.get_rank(), mesh_of((4,))
    x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])

    def attempt(action: Any) -> None:
        try:
            action()
            told.append("nothing")
        except Exception as error:
            told.append("\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))))

    attempt(lambda: save({"x": x, "odd": object() if rank == 2 else 1}, place / "a"))
    original = writing.write_blocks

    def full_disk(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 3:
        writing.write_blocks = full_disk
    attempt(lambda: save({"x": x}, place / "b"))
    attempt(lambda: async_save({"x": x}, place / "b").wait())
    writing.write_blocks = original
    attempt(lambda: save({"x": x}, place / f"c{rank}"))
    save({"x": x}, place / "d")
    file = place / "d" / "blocks-00001.safetensors"
    dist.barrier()
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    target = sw.zeros(8, device_mesh=mesh, placements=[sw.Shard(0)])
    attempt(lambda: load({"x": target}, place / "d"))
    assert target.to_local().count_nonzero() == 0
    attempt(lambda: load({"x": target}, place / ("d" if rank else "none")))
    attempt(lambda: load({"x": target}, place / "nowhere"))
    attempt(lambda: load({"x": target, **({"y": 1} if rank == 1 else {})}, place / "d"))
    return told


def states_differ(folder: str) -> None:
    """As in a pipeline: each half of the ranks has layers of its own, and some entries are everybody's."""
    rank, place = dist.get_rank(), Path(folder)
    half = sw.DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
    stage = f"stage{rank // 2}"
    weight = sw.distribute_tensor(torch.arange(6.0) + rank // 2, half, [sw.Shard(0)])
    save({stage: {"w": weight, "plain": torch.full((2,), float(rank // 2)), "n": rank // 2}, "step": 5}, place / "p")
    target = sw.zeros(6, device_mesh=half, placements=[sw.Replicate()])
    state = {stage: {"w": target, "plain": torch.zeros(2), "n": -1}, "step": 0}
    loaded = load(state, place / "p")
    assert not loaded.missing
    assert not loaded.unexpected
    assert state[stage]["n"] == rank // 2
    assert torch.equal(target.full_tensor(), torch.arange(6.0) + rank // 2)


def exports(folder: str) -> None:
    place, mesh = Path(folder), mesh_of((2, 2))
    whole = torch.arange(12 * 8).float().reshape(12, 8)
    model = {
        "qkv": sw.distribute_tensor(whole, mesh, [sw.Shard(1), sw.StridedShard(0, 3)]),
        "norm": torch.ones(3, dtype=torch.bfloat16),
    }
    parts = {"qkv": sw.checkpoint.Fused(("q", "k", "v"), (4, 4, 4))}
    export_safetensors(model, place / "hf", 150, parts)
    target = {"qkv": sw.zeros(12, 8, device_mesh=mesh_of((4,)), placements=[sw.Shard(0)]), "norm": torch.zeros(3)}
    loaded = load_safetensors(target, place / "hf", parts)
    assert torch.equal(target["qkv"].full_tensor(), whole)
    assert torch.equal(target["norm"], torch.ones(3))
    assert loaded.bytes_read == 12 * 8 + 3 * 2


def groups_differ(folder: str) -> list[str]:
    """Ranks that know different numbers of groups save together; what only some of them can do is an error on all."""
    place, rank = Path(folder), dist.get_rank()
    first = dist.new_group([0, 1])
    for i in range(2):
        if rank < 2:
            async_save({"x": torch.full((2,), i)}, place / f"first{i}", process_group=first).wait()
        async_save({"x": torch.full((2,), i)}, place / f"all{i}").wait()
    with sw.virtual():
        locals_of_ranks = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).to_local()
    told = []
    for action in (
        lambda: save({"x": locals_of_ranks if rank == 2 else torch.ones(1)}, place / "none"),
        lambda: load({"x": torch.zeros(2)}, place / ("all0" if rank == 1 else "all1")),
        lambda: load({}, place / "none", process_group=first),
    ):
        try:
            action()
            told.append("nothing")
        except sw.ShardwiseError as error:
            told.append(error.problem)
    return told


def readers_beside_writers(folder: str, count: int) -> int:
    """Two ranks save over one checkpoint again and again, two load it: every load is of one save."""
    place, rank = Path(folder) / "last", dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, mesh = groups[rank // 2], sw.DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
    save({"x": torch.zeros(2**14), "n": 0}, place)
    for number in range(1, count + 1):
        x = sw.full((2**14,), float(number), device_mesh=mesh, placements=[sw.Shard(0)])
        state = {"x": x, "n": number}
        if rank < 2:
            save(state, place, overwrite=True, process_group=group)
        else:
            load(state, place, process_group=group, staged=number % 2 == 0)
            assert (x.to_local() == state["n"]).all()
    return count


def builds_on_another(folder: str) -> tuple[str | None, int]:
    """Another number of ranks that write, and files of the base that several ranks use."""
    mesh, place = mesh_of((4,)), Path(folder)
    for step in range(3):
        frozen = sw.distribute_tensor(torch.arange(65536.0), mesh, [sw.Shard(0)])
        moving = sw.full((8,), float(step), device_mesh=mesh, placements=[sw.Shard(0)])
        replicated = torch.ones(5000)  # divided among the ranks
        state = {"frozen": frozen, "moving": moving, "replicated": replicated, "step": step}
        before = sw.checkpoint.latest(place)
        saving = sw.checkpoint.async_save(state, place / f"step-{step}", keep=2, base=before)
        saving.wait()
    other = {"frozen": sw.zeros(65536, device_mesh=mesh, placements=[sw.Replicate()])}
    loaded = load(other, place / "step-2", strict=False)
    assert torch.equal(other["frozen"].to_local(), torch.arange(65536.0))
    return sw.checkpoint.latest(place), len(loaded.unexpected)


def uses_a_url(folder: str) -> None:
    mesh = mesh_of((4,))
    x = sw.distribute_tensor(torch.arange(64.0), mesh, [sw.Shard(0)])
    save({"x": x}, f"file://{folder}/url/step-1", keep=1)
    save({"x": x}, f"file://{folder}/url/step-2", keep=1)
    y = sw.zeros(64, device_mesh=mesh, placements=[sw.Replicate()])
    assert sw.checkpoint.latest(f"file://{folder}/url") == f"file://{folder}/url/step-2"
    load({"x": y}, f"file://{folder}/url/step-2")
    assert torch.equal(y.to_local(), torch.arange(64.0))
    with pytest.raises(sw.CheckpointError, match="all processes must write to the same file system"):
        save({"x": x}, "memory://of-one-process/c")


def listening() -> set[str]:
    """The addresses that this process listens on."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (kind.startswith("udp") or fields[3] == "0A"):
                found.add(f"{kind} {fields[1]}")
    return found


def listens(folder: str) -> tuple[set[str], set[str], set[str]]:
    """The sockets before Shardwise is used, after torch's own groups, and after training and saving."""
    before = listening()
    dist.new_group(list(range(4)), backend="gloo")
    torch_own = {address.rpartition(":")[0] for address in listening()}
    model = Trained(mesh_of((2, 2)))
    model.train(1)
    model.save(Path(folder) / "c")
    sw.checkpoint.async_save({"x": torch.ones(3)}, Path(folder) / "d").wait()
    return before, torch_own, {address.rpartition(":")[0] for address in listening()}


# ---------------------------------------------------------------- tests


def test_checkpoints_build_on_another(gloo4: ProcessPool, tmp_path: Path) -> None:
    assert gloo4.run(builds_on_another, str(tmp_path)) == [(str(tmp_path / "step-2"), 3)] * 4
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert sw.checkpoint.verify(second) == []
    shared = {file.stat().st_ino for file in first.iterdir()} & {file.stat().st_ino for file in second.iterdir()}
    assert len(shared) == 4
    assert torch.equal(read(second)["moving"], torch.full((8,), 2.0))


def test_processes_and_a_url(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(uses_a_url, str(tmp_path))
    assert os.listdir(tmp_path / "url") == ["step-2"]


def test_nothing_listens_on_other_addresses(gloo4: ProcessPool, tmp_path: Path) -> None:
    """Groups of ours, as torch's own, listen on the address of the process group alone; nothing else does."""
    for before, torch_own, after in gloo4.run(listens, str(tmp_path)):
        assert torch_own, "gloo listens"
        assert after <= torch_own | {address.rpartition(":")[0] for address in before}


def test_processes_save_and_load(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(saves_and_loads, str(tmp_path), 5)
    tensors = values(5)
    for name in ("4", "2x2", "virtual", "again"):
        assert all(same_bits(read(tmp_path / name)["tensors"][key], tensor) for key, tensor in tensors.items())
    behind = read(tmp_path / "behind-2")["tensors"]
    assert all(same_bits(behind[key], torch.zeros_like(tensor)) for key, tensor in tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2x2", "4", "again", "behind-2", "virtual"]
    assert len(open_index(tmp_path / "again").files) == 4


def test_processes_that_save_compare_plain_tensors(gloo4: ProcessPool, tmp_path: Path) -> None:
    assert gloo4.run(settles_after_a_rank_saved_alone, str(tmp_path)) == [
        [True] * 3,
        [True] * 3,
        [True] * 2,
        [True] * 2,
    ]


def test_training_goes_on(gloo4: ProcessPool, tmp_path: Path) -> None:
    for kept, resumed in gloo4.run(trains, str(tmp_path)):
        assert kept == resumed


def test_a_load_takes_four_collectives(gloo4: ProcessPool, tmp_path: Path) -> None:
    for calls, lengths in gloo4.run(exchanges, str(tmp_path)):
        assert calls == 4
        assert lengths == [0, 3000, 4084, 50_000]


def test_a_rank_reads_its_part_alone(gloo4: ProcessPool, tmp_path: Path) -> None:
    for bytes_read, needed in gloo4.run(reads_its_part, str(tmp_path)):
        assert bytes_read == needed


def test_an_error_of_one_rank_is_raised_on_all(gloo4: ProcessPool, tmp_path: Path) -> None:
    for told in gloo4.run(a_rank_fails, str(tmp_path)):
        odd, disk, behind, paths, damaged, none, nowhere, more = told
        assert "odd is of type builtins.object" in odd
        assert "No space left" in disk
        assert "No space left" in behind
        assert "rank 3" in disk
        assert "the ranks save to different paths" in paths
        assert "tensor x: its block at (2,) in blocks-00001.safetensors" in damaged
        assert "there is no checkpoint" in none
        assert "nowhere" in nowhere
        assert re.search(r"raised by rank \d on \S", nowhere)
        assert "missing from the checkpoint: y" in more
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_an_error_at_any_step_of_one_rank_is_raised_on_all(gloo4: ProcessPool, tmp_path: Path) -> None:
    counts = checkpoint_faults.run_all(gloo4, str(tmp_path), checkpoint_faults.EVERY)
    assert counts.pop("latest") > 2  # a short one: the first process looks
    assert min(counts.values()) > 5
    assert sum(counts.values()) > 100


def test_ranks_that_know_different_groups(gloo4: ProcessPool, tmp_path: Path) -> None:
    for rank, (locals_of_ranks, different, outside) in enumerate(gloo4.run(groups_differ, str(tmp_path))):
        assert "the state contains a RankTensor" in locals_of_ranks
        assert "the ranks find different checkpoints at" in different
        assert ("is not in its process_group" if rank > 1 else "there is no checkpoint") in outside
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all0", "all1", "first0", "first1"]


def test_ranks_read_beside_others_that_write(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(readers_beside_writers, str(tmp_path), 20)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_states_may_differ_as_in_a_pipeline(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(states_differ, str(tmp_path))
    state = read(tmp_path / "p")
    assert [state[f"stage{i}"]["n"] for i in (0, 1)] == [0, 1]
    assert torch.equal(state["stage1"]["w"], torch.arange(6.0) + 1)


def test_export_by_slices(gloo4: ProcessPool, tmp_path: Path) -> None:
    gloo4.run(exports, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir())[-1] == "model.safetensors.index.json"
    one = {name: torch.zeros(4, 8) for name in "qkv"} | {"norm": torch.zeros(3)}
    load_safetensors(one, tmp_path / "hf")
    assert torch.equal(torch.cat([one[name] for name in "qkv"]), torch.arange(12 * 8).float().reshape(12, 8))
