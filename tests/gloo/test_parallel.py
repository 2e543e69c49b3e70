"""Plans on real processes: the example's transformer, and layers whose shards are uneven."""

import copy
import itertools
from typing import Any

import torch
from torch import nn

import shardwise as sw
from examples.llama import PLANS
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.gloo.processes import ProcessPool
from tests.virtual.training import NAMES, Step, assert_same_steps, make_model, train, train_under, whole

STEPS = 10


def trained() -> dict[str, list[Step]]:
    """Every plan on a line or on a square of processes, in float64 with dropout."""
    model = make_model(torch.float64, 0.1)
    found = {}
    for (name, plan), shape in zip(PLANS.items(), itertools.cycle(((4,), (2, 2))), strict=False):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
        found[f"{name} on {shape}"] = train_under(plan, mesh, model, STEPS)
    return found


def odd_layers() -> list[str]:
    """Sizes that four ranks do not divide; which layers then differ from one device, on plain tensors and DTensors."""
    mesh = sw.init_device_mesh("cpu", (4,))
    rows = RowwiseParallel(use_local_output=False)
    scattered = RowwiseParallel(output_layouts=sw.Shard(1), use_local_output=False)
    wrong = []
    for bias in (True, False):
        for last in (rows, scattered, RowwiseParallel()):
            torch.manual_seed(0)
            one = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 10, bias=bias), nn.GELU(), nn.Linear(10, 7, bias=bias))
            one = one.double()
            spread = copy.deepcopy(one)
            parallelize_module(spread, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(), "3": last})
            x = torch.randn(3, 5, 7, dtype=torch.float64)
            want, got = one(x), spread(sw.distribute_tensor(x, mesh, [sw.Shard(1)]))
            want.square().sum().backward()
            got.square().sum().backward()
            pairs: list[tuple[str, Any, Any]] = [("result", got, want)]
            pairs += [
                (n, p.grad, q.grad) for (n, p), q in zip(spread.named_parameters(), one.parameters(), strict=True)
            ]
            wrong += [f"{name} {bias} {last}" for name, a, b in pairs if not torch.allclose(whole(a), b, atol=1e-12)]
    return wrong


def test_plans(gloo4: ProcessPool) -> None:
    expected = train(make_model(torch.float64, 0.1), STEPS)
    for found in gloo4.run(trained, timeout=240):
        for name, steps in found.items():
            assert steps, name
            assert_same_steps(steps, expected, rtol=1e-9, atol=1e-9)


def test_uneven_layers(gloo4: ProcessPool) -> None:
    assert gloo4.run(odd_layers, timeout=120) == [[]] * 4
