"""CommDebugMode against torch's: the same methods, and on the same program the same counts, module by module."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode as TheirMode

import shardwise as sw
from bench.counting import fake_world
from shardwise.debug import CommDebugMode as OurMode

METHODS = [
    name for name, value in vars(TheirMode).items() if not name.startswith("_") and callable(value)
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_and_their_parameters(name: str) -> None:
    wanted, have = (inspect.signature(getattr(mode, name)).parameters for mode in (TheirMode, OurMode))
    assert list(have) == list(wanted)
    assert [p.default for p in have.values()] == [p.default for p in wanted.values()]


class Mlp(nn.Module):
    """Column- and row-parallel, in either library."""

    def __init__(self, library: Any, mesh: Any) -> None:
        super().__init__()
        self.library = library
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        for layer, dim in ((self.up, 0), (self.down, 1)):
            sharded = library.distribute_tensor(layer.weight.detach(), mesh, [library.Shard(dim)])
            layer.weight = nn.Parameter(sharded)

    def forward(self, x: Any) -> Any:
        x = x.redistribute(placements=[self.library.Replicate()])
        return self.down(torch.relu(self.up(x))).redistribute(placements=[self.library.Shard(0)])


def counted(library: Any, mode: Any, mesh: Any) -> Any:
    model = Mlp(library, mesh)
    x = library.distribute_tensor(torch.randn(8, 8), mesh, [library.Shard(0)]).requires_grad_()
    with mode() as comm:
        model(x).sum().backward()
    return comm


def test_counts_are_those_of_torch() -> None:
    with fake_world(4):
        peer = counted(theirs, TheirMode, init_device_mesh("cpu", (4,)))
        ours = counted(sw, OurMode, sw.init_device_mesh("cpu", (4,)))
    assert dict(ours.get_comm_counts()) == dict(peer.get_comm_counts())
    assert ours.get_total_counts() == peer.get_total_counts() == 3
    assert {name: dict(counts) for name, counts in ours.comm_module_counts["Mlp"].items()} == {
        name: dict(counts) for name, counts in peer.comm_module_counts["Mlp"].items()
    }
    assert {k: str(v) for k, v in ours.get_sharding_info().items()} == {
        k: str(v).replace("dim=", "") for k, v in peer.get_sharding_info().items()
    }
    assert list(ours.get_parameter_info()) == list(peer.get_parameter_info())
    # Not the passes of backward: torch counts what an outer module moves there for the inner one that ran last, too.
    headings = [
        [line.strip() for line in mode.generate_comm_debug_tracing_table(0).splitlines() if "*" not in line]
        for mode in (ours, peer)
    ]
    kept = [[line for line in lines if line != "BACKWARD PASS"] for lines in headings]
    assert kept[0] == kept[1] == ["Global", "FORWARD PASS", "Mlp", "FORWARD PASS", "Mlp.up", "Mlp.down"]
