"""Whatever a captured function reads: a change of it is noticed, or the function is refused by name."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from tests.virtual.captured_reads import REFUSED, SAME, compare, on_mesh


@pytest.mark.parametrize("name", SAME)
def test_changes_are_noticed(name: str) -> None:
    eager, found = compare(name)
    assert found == eager


@pytest.mark.parametrize("name", REFUSED)
def test_reads_that_cannot_be_followed_are_refused(name: str) -> None:
    _, found = compare(name)
    assert all(isinstance(each, UnsupportedError) for each in found[1:]), found


def test_arguments_in_one_memory() -> None:
    """Two arguments that share memory in one call and not in the next are different calls."""
    step = captured(lambda u, v: u * 3 + v.data * 2)
    shared = torch.ones(4)
    for _ in range(3):
        assert torch.equal(step(shared, shared.detach()), torch.full((4,), 5.0))
    for _ in range(3):
        assert torch.equal(step(torch.ones(4), torch.full((4,), 7.0)), torch.full((4,), 17.0))
    assert len(step.programs) == 2


def test_other_threads_are_not_recorded() -> None:
    weight = nn.Parameter(on_mesh(torch.ones(4, 4), sw.Shard(0)))
    other = nn.Parameter(torch.ones(4))
    optimizer, others = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([other], lr=0.5)
    done, taken = threading.Event(), [0]

    def elsewhere() -> None:
        while not done.is_set():
            other.grad = torch.ones(4)
            others.step()
            taken[0] += 1

    def function(x: Any) -> Any:
        (x @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone()

    x = on_mesh(torch.ones(2, 4))
    steps = [captured(function) for _ in range(4)]
    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        for step in steps:
            for _ in range(4):
                step(x)
    finally:
        done.set()
        thread.join()
    assert taken[0] > 0
    assert all(len(step.programs) == 1 and step.source().count("sgd_step") == 1 for step in steps)
    assert torch.equal(weight.full_tensor(), torch.full((4, 4), 1.0 - 16 * 0.5 * 2))
    assert torch.equal(other.detach(), torch.full((4,), 1.0 - taken[0] * 0.5))
