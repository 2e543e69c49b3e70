"""Processes killed at each call of the file system in a save: the next save removes all that they left."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import read, save
from shardwise.checkpoint.io import atomic_directory as atomic

CALLS = ("mkdir", "rename", "open", "write", "fsync", "unlink", "rmdir")


def killed_at(number: int, target: Path) -> bool:
    """Save in a forked process that is killed at its n-th call of the file system. Whether it came to it."""
    pid = os.fork()
    if not pid:
        left = [number]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **options: Any) -> Any:
                result = call(*args, **options)
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return count

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        opened = Path.open
        Path.open = counted(opened)  # type: ignore[method-assign]
        atomic._rename = counted(atomic._rename)
        try:
            save({"x": torch.ones(4), "number": number}, target, overwrite=True)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("replacing", [False, True])
def test_a_kill_at_any_call_leaves_nothing_for_long(replacing: bool, tmp_path: Path) -> None:
    target, kills, number = tmp_path / "last", 0, 0
    for number in range(1, 200):
        shutil.rmtree(target, ignore_errors=True)
        if replacing:
            save({"x": torch.zeros(4), "number": 0}, target)
        killed = killed_at(number, target)
        save({"number": -1}, tmp_path / "after", overwrite=True)
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
        assert not left, (number, left)
        if target.exists():
            assert read(target)["number"] in (0, number)
        if not killed:
            break
        kills += 1
    assert kills > 8, kills
    assert read(target)["number"] == number


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the number of a system call")
def test_a_process_is_dead_when_its_last_thread_is(tmp_path: Path) -> None:
    """The thread of `async_save` may be inside a rename when the main thread has ended."""
    pid = os.fork()
    if not pid:
        atomic.prepare(tmp_path / "one")
        threading.Thread(target=time.sleep, args=(600,)).start()
        (tmp_path / "ready").touch()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # ends this thread alone
    try:
        while not (tmp_path / "ready").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.001)
        save({"number": 1}, tmp_path / "two")
        assert sorted(path.suffix[:7] for path in tmp_path.glob(".*")) == [".owner", ".saving"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    save({"number": 2}, tmp_path / "three")
    assert not list(tmp_path.glob(".*"))


def test_a_directory_that_gains_a_file_while_it_is_removed_keeps_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process counts as dead while one of its threads still ends a call."""
    pid = os.fork()
    if not pid:
        atomic.prepare(tmp_path / "one")
        os._exit(0)
    os.waitpid(pid, 0)
    (staged,) = (path for path in tmp_path.iterdir() if path.is_dir())
    original = shutil.rmtree

    def remove_and_gain(path: Any, *args: Any, **options: Any) -> None:
        if Path(path) == staged and not (staged / "late").exists():
            (staged / "late").touch()
            return
        original(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_and_gain)
    save({"number": 1}, tmp_path / "two")
    assert staged.exists()
    save({"number": 2}, tmp_path / "three")
    assert {path.name for path in tmp_path.iterdir()} == {"two", "three"}
