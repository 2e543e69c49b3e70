"""Bounded caches: never more than the limit, the newest always there, the oldest gone first."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.cache import BoundedCache


@given(st.integers(1, 9), st.lists(st.integers(0, 20)))
def test_the_newest_stay_and_the_limit_holds(limit: int, keys: list[int]) -> None:
    cache: BoundedCache[int, str] = BoundedCache(limit)
    for key in keys:
        before = list(cache)
        assert cache.keep(key, str(key)) == cache[key] == str(key)
        after = list(cache)
        assert len(after) <= limit
        assert after == (before if key in before else [*before, key])[-len(after) :]


def test_a_limit_that_shrinks_is_kept_from_then_on() -> None:
    cache: BoundedCache[int, None] = BoundedCache(100)
    for key in range(100):
        cache.keep(key, None)
    cache.limit = 8
    cache.keep(100, None)
    assert list(cache) == [93, 94, 95, 96, 97, 98, 99, 100]


def test_threads_may_keep_at_once() -> None:
    cache: BoundedCache[int, int] = BoundedCache(64)
    failures: list[BaseException] = []

    def fill(first: int) -> None:
        try:
            for key in range(first, first + 5000):
                cache.keep(key, key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fill, args=(10_000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(cache) <= 64 + len(threads)  # each may have been about to put one in
