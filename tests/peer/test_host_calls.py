"""Host work is protected by counts: functions of ours that warm calls enter, and the calls of a step against FSDP2's.

One process of its own counts all of them, without the wrappers of beartype.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from bench.counting import calls, fake_world
from bench.data_parallel_ranks import moved, training_step
from bench.walk import calls as walked_calls
from bench.walk import walk
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 8
# Functions of ours that each warm call enters, at most.
LIMITS = {
    "a + b": 3,
    "sum, backward": 25,
    "mean, backward": 23,
    "cat, backward": 57,
    "layer_norm, backward": 66,
    "move, backward": 39,  # one of them refuses parameters of data parallel modules, whose gradients would be lost
    "plan, forward": 62,
    "plan, forward and backward": 93,
    "replicate step": 700,
    "fully_shard step": 2016,  # seven notice interrupted forwards, and call hooks around the steps of optimizers
}


def warm_calls(mesh: sw.DeviceMesh) -> dict[str, Callable[[], object]]:
    """What is counted. Each begins and ends as it began."""
    a = sw.distribute_tensor(torch.randn(16, 8), mesh, [sw.Shard(0)])
    b, leaf = a.clone(), a.clone().requires_grad_()
    gradient = sw.distribute_tensor(torch.randn(16, 8), mesh, [sw.Shard(1)])
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layers = parallelize_module(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), mesh, plan)
    x = torch.randn(4, 16)

    def backward(made: Callable[[], Any], grad: Any = None) -> Callable[[], None]:
        def run() -> None:
            made().backward(grad)
            leaf.grad = None

        return run

    return {
        "a + b": lambda: a + b,
        "sum, backward": backward(lambda: leaf.sum()),
        "mean, backward": backward(lambda: leaf.mean()),
        "cat, backward": backward(lambda: torch.cat([leaf, b], 1).sum()),
        "layer_norm, backward": backward(lambda: F.layer_norm(leaf, (8,)).sum()),
        "move, backward": backward(lambda: leaf.redistribute(placements=[sw.Shard(1)]), gradient),
        "plan, forward": lambda: layers(x),
        "plan, forward and backward": lambda: layers(x).sum().backward(),
        "replicate step": training_step(_outermost, mesh, width=16),
        "fully_shard step": training_step(sw.fully_shard, mesh, width=16),
    }


def _outermost(module: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    return sw.replicate(module, mesh) if isinstance(module, nn.Sequential) else module


def report() -> dict[str, Any]:
    """Visits of our functions by each warm call, the walk of a cold one; calls of a step, its collectives and bytes."""
    with fake_world(RANKS):
        mesh = sw.init_device_mesh("cpu", (RANKS,))
        visits = {}
        for name, call in warm_calls(mesh).items():
            for _ in range(3):
                call()
            visits[name] = walk(call).visits
        grid = sw.init_device_mesh("cpu", (RANKS // 2, 2))
        for call in walked_calls(grid, 3, warming=True).values():
            call()
        first = walk(walked_calls(grid, 5)["a + b, the first in these layouts"])
        steps = {
            "ours": training_step(sw.fully_shard, mesh, width=16),
            "torch's": training_step(theirs.fully_shard, init_device_mesh("cpu", (RANKS,)), width=16),
        }
        for step in steps.values():
            for _ in range(2):
                step()
        return {
            "visits": visits,
            "first": [len(first.functions), len(first.files)],
            "calls": {name: calls(step, of_c=True) for name, step in steps.items()},
            "moved": {name: list(moved(step)) for name, step in steps.items()},
        }


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("call", LIMITS)
def test_a_warm_call_enters_few_functions(counted: dict[str, Any], call: str) -> None:
    assert counted["visits"][call] <= LIMITS[call]


def test_the_first_call_of_a_signature_is_a_short_walk(counted: dict[str, Any]) -> None:
    functions, files = counted["first"]
    assert functions <= 45
    assert files <= 14


def test_a_sharded_step_makes_less_than_half_the_calls_of_torch(counted: dict[str, Any]) -> None:
    assert counted["calls"]["ours"] <= 0.4 * counted["calls"]["torch's"]


def test_a_sharded_step_communicates_as_that_of_torch(counted: dict[str, Any]) -> None:
    assert counted["moved"]["ours"] == counted["moved"]["torch's"]


if __name__ == "__main__":
    print(json.dumps(report()))
