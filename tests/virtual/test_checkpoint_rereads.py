"""A load reads files twice, for the checksums and for the values: what happens to them in between is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import load, save
from shardwise.checkpoint.io import box_reader
from shardwise.checkpoint.io.range_reader import FileReader
from shardwise.checkpoint.operations import load_checkpoint as loading
from tests.virtual.checkpoints import mesh_of

FILE = "blocks-00001.safetensors"


def after_verification(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run an action after the checksums of all files were compared."""

    def checked(*arguments: Any) -> None:
        box_reader.check_sums(*arguments)
        action()

    monkeypatch.setattr(loading, "check_sums", checked)


def saved(tmp_path: Path, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], Path]:
    values = {name: torch.arange(24).reshape(6, 4).to(dtype) + at for at, name in enumerate("ab")}
    mesh = mesh_of((2,))
    save({name: sw.distribute_tensor(value, mesh, [sw.Shard(0)]) for name, value in values.items()}, tmp_path / "c")
    return values, tmp_path / "c"


def flip(file: Path, at: int, bits: int = 4) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    with file.open("r+b") as same:  # the same file: it is open in the reader
        same.write(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("placement", [sw.Shard(1), sw.StridedShard(0, 2), sw.Replicate()])
def test_damage_after_verification_is_an_error(
    dtype: torch.dtype, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, path = saved(tmp_path, dtype)
    block = 12 * dtype.itemsize  # of either tensor; the last byte of b is damaged
    after_verification(monkeypatch, lambda: flip(path / FILE, 4096 + 2 * block - 1))
    state = {
        name: sw.distribute_tensor(torch.zeros_like(value), mesh_of((2,)), [placement])
        for name, value in values.items()
    }
    with pytest.raises(sw.CheckpointError, match=rf"b: {FILE} has changed since its block at \(3, 0\)") as caught:
        load(state, path)
    assert "the state is partly loaded" in str(caught.value)
    assert torch.equal(state["a"].full_tensor(), values["a"])


def test_signs_of_two_numbers_after_verification_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of pairs does not see these bits; the checksum does, and is compared if a file was written to."""
    values, path = saved(tmp_path, torch.float64)

    def negate_two() -> None:
        flip(path / FILE, 4096 + 96 + 7, 128)
        flip(path / FILE, 4096 + 96 + 15, 128)

    after_verification(monkeypatch, negate_two)
    with pytest.raises(sw.CheckpointError, match=rf"b: {FILE} has changed since its block at \(3, 0\)"):
        load({name: torch.zeros_like(value) for name, value in values.items()}, path)


def test_a_file_that_is_touched_after_verification_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, path = saved(tmp_path)
    after_verification(monkeypatch, lambda: os.utime(path / FILE))
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    load(state, path)
    assert all(torch.equal(state[name], values[name]) for name in values)


def test_a_file_that_is_cut_after_verification_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, path = saved(tmp_path)
    after_verification(monkeypatch, lambda: os.truncate(path / FILE, 4100))
    with pytest.raises(sw.CheckpointError, match=r"partly loaded(.|\n)*ends at byte 4,100"):
        load({name: torch.zeros_like(value) for name, value in values.items()}, path)


def test_a_checkpoint_that_is_removed_after_verification_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, path = saved(tmp_path)
    after_verification(monkeypatch, lambda: shutil.rmtree(path))
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    load(state, path)
    assert all(torch.equal(state[name], values[name]) for name in values)


@pytest.mark.parametrize("most", [1, 2])
def test_more_files_than_stay_open_are_staged(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, path = saved(tmp_path)
    monkeypatch.setattr(loading, "MOST_OPEN", most)
    reads = []
    original = FileReader._read
    monkeypatch.setattr(FileReader, "_read", lambda self, *rest: (reads.append(1), original(self, *rest))[1])
    after_verification(monkeypatch, lambda: shutil.rmtree(path))
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    load(state, path)
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert len(reads) == 2 * 2 * most  # two tensors in two files; once if staged


def test_nothing_changes_before_all_is_verified(tmp_path: Path) -> None:
    values, path = saved(tmp_path)
    flip(path / FILE, 4096 + 2 * 48 - 1)  # in the last tensor
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    with pytest.raises(sw.CheckpointError, match="nothing was loaded"):
        load(state, path)
    assert not any(value.any() for value in state.values())
