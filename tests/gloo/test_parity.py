"""Shadow parity over process groups: all ranks come to the same verdict, and raise together."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise as sw
from shardwise.rules.registry import RULES
from shardwise.tensor import forget_operators
from tests.gloo.processes import ProcessPool


def right_and_wrong() -> dict[str, Any]:
    """A step of training that is right; copies that differ on one rank; a rule that is wrong on some ranks."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard, copy = sw.Shard, sw.Replicate
    x = sw.distribute_tensor(torch.randn(8, 16), mesh, [shard(0), copy()])
    up = torch.nn.Parameter(sw.distribute_tensor(torch.randn(32, 16), mesh, [copy(), shard(0)]))
    down = torch.nn.Parameter(sw.distribute_tensor(torch.randn(16, 32), mesh, [copy(), shard(1)]))
    optimizer = torch.optim.AdamW([up, down])
    with sw.parity() as check:
        F.dropout(F.linear(F.gelu(F.linear(x, up)), down), 0.1).square().mean().backward()
        optimizer.step()
    found: dict[str, Any] = {"clean": (check.ok, sum(check.counts.values()), check.counts["unchecked"])}

    with sw.parity(stop=False) as check:
        value = torch.full((3,), 1.0 if dist.get_rank() != 3 else 2.0)
        sw.DTensor.from_local(value, mesh, [copy(), copy()]) + 1
    found["copies"] = [(one.kind, one.ranks) for one in check.findings]

    library = torch.library.Library("shardwise_gloo_parity", "DEF")
    library.define("running(Tensor x) -> Tensor")
    library.impl("running", lambda x: x.cumsum(0), "CompositeExplicitAutograd")
    running = torch.ops.shardwise_gloo_parity.running
    sw.register_sharding(running.default, "...->...")
    try:
        with sw.parity():
            running(x * 2)
    except sw.ParityError as error:
        found["rule"] = str(error)
    RULES.pop(running.default, None)
    forget_operators()
    return found


def test_all_ranks_find_the_same(gloo4: ProcessPool) -> None:
    results = gloo4.run(right_and_wrong, timeout=120)
    for found in results:
        ok, compared, unchecked = found["clean"]
        assert ok
        assert compared > 20
        assert unchecked == 0
        assert found["copies"] == [("replicas", ((1, 1),))]
        assert "running.default gave a wrong value" in found["rule"]
        assert found["rule"] == results[0]["rule"]
