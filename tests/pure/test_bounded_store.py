"""Stores whose calls end: torch's own answers, a limit for each call, and one error for all calls after a failure."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import LostRankError
from shardwise.fabric.bounded_store import BoundedStore, address_of, run_bounded


class Stuck:
    """A store that answers one call after `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.calls: list[str] = []

    def get(self, key: str) -> bytes:
        self.calls.append(key)
        self.free.wait(60)
        return b"late"

    def add(self, key: str, amount: int) -> int:
        self.calls.append(key)
        return amount


def bounded(store: Any, seconds: float = 30.0) -> BoundedStore:
    return BoundedStore(store, seconds, "comparing ranks", [0, 1])


def test_calls_are_those_of_the_store() -> None:
    plain = dist.HashStore()
    store = bounded(plain)
    store.set("a", "1")
    assert store.get("a") == plain.get("a") == b"1"
    assert (store.check(["a"]), store.check(["a", "b"])) == (True, False)
    assert (store.add("n", 3), store.add("n", 4)) == (3, 7)
    assert store.compare_set("a", "2", "3") == b"1"
    assert store.compare_set("a", "1", "3") == b"3"
    assert (store.delete_key("a"), store.delete_key("a")) == (True, False)


def test_a_call_without_an_answer_ends_and_later_calls_are_not_sent() -> None:
    stuck = Stuck()
    store = bounded(stuck, seconds=0.1)
    try:
        for _ in range(2):
            with pytest.raises(LostRankError, match=r"comparing ranks failed on[\s\S]*has not answered for 0\.1 s"):
                store.get("a")
        with pytest.raises(LostRankError):
            store.add("n", 1)
        assert stuck.calls == ["a"]
    finally:
        stuck.free.set()


def test_errors_of_the_store_itself_are_raised_unchanged() -> None:
    class Broken:
        def get(self, key: str) -> bytes:
            raise KeyError(key)

    with pytest.raises(KeyError, match="a"):
        bounded(Broken()).get("a")


def test_the_thread_ends_with_the_store() -> None:
    before = set(threading.enumerate())
    store = bounded(dist.HashStore())
    store.set("a", "1")
    (thread,) = set(threading.enumerate()) - before
    del store
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_function_is_bounded_and_its_error_raised() -> None:
    assert run_bounded(lambda: 5, 30, "a rank") == 5
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 // 0, 30, "a rank")
    free = threading.Event()
    with pytest.raises(dist.DistStoreError, match=r"timed out: a rank has not answered for 0\.05 s"):
        run_bounded(free.wait, 0.05, "a rank")
    free.set()


def test_the_address_is_that_of_the_server() -> None:
    server = dist.TCPStore("localhost", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    for store in (server, dist.PrefixStore("a", dist.PrefixStore("b", server))):
        assert address_of(store) == f" at [localhost]:{server.port}"
    assert address_of(dist.HashStore()) == ""
