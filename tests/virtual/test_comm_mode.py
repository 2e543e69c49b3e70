"""CommDebugMode: counts by collective, module and phase; its tables and files."""

import json
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.debug import CommDebugMode
from tests.virtual.block import Block, batch, train

funcol = torch.ops.c10d_functional


@pytest.fixture
def counted() -> CommDebugMode:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, x = Block(mesh), batch(mesh)
    with CommDebugMode() as comm:
        train(model, x)
    return comm


def test_counts_by_collective(counted: CommDebugMode) -> None:
    assert counted.get_comm_counts() == {
        funcol.all_gather_into_tensor: 1,
        funcol.all_reduce: 1,
        funcol.reduce_scatter_tensor: 1,
    }
    assert counted.get_comm_counts()[funcol.all_to_all_single] == 0
    assert counted.get_total_counts() == 3
    assert counted.received_bytes == 384 + 768 + 384
    assert repr(counted) == "CommDebugMode(get_total_counts()=3)"


def test_counts_by_module_and_phase(counted: CommDebugMode) -> None:
    for path in ("Global", "Block"):
        assert counted.comm_module_counts[path] == {
            "forward": {funcol.all_gather_into_tensor: 1, funcol.all_reduce: 1},
            "backward": {funcol.reduce_scatter_tensor: 1},
        }
    assert "Block.mlp" not in counted.comm_module_counts


def test_parameters(counted: CommDebugMode) -> None:
    assert list(counted.get_parameter_info()) == ["Block.mlp.up", "Block.mlp.down"]
    assert list(counted.get_parameter_info()["Block.mlp.up"]) == ["weight"]
    assert counted.get_sharding_info() == {
        "Block.mlp.up.weight": (sw.Shard(0),),
        "Block.mlp.down.weight": (sw.Shard(1),),
    }


def test_the_table(counted: CommDebugMode, tmp_path: Path) -> None:
    table = counted.generate_comm_debug_tracing_table(noise_level=0)
    assert table.count("FORWARD PASS") == table.count("BACKWARD PASS") == 2  # Global and Block
    assert "        Block.mlp\n" in table
    assert "            Block.mlp.up\n" in table
    assert "*c10d_functional.all_reduce: 1" in table
    assert "aten" not in table
    middle, loud = (counted.generate_comm_debug_tracing_table(noise_level=level) for level in (1, 3))
    assert "**aten.mm.default" in middle
    assert "aten.t.default" not in middle
    assert "*weight: (Shard(0),)" in middle
    assert "**aten.t.default" in loud
    counted.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt", noise_level=3)
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_the_json_dump(counted: CommDebugMode, tmp_path: Path) -> None:
    counted.generate_json_dump(tmp_path / "log.json")
    tree = json.loads((tmp_path / "log.json").read_text())
    (top,) = tree["children"]
    assert (tree["fqn"], top["fqn"]) == ("Global", "Block")
    assert top["collectives_backward"] == [["c10d_functional.reduce_scatter_tensor", 1]]
    (mlp,) = top["children"]
    assert [part["fqn"] for part in mlp["children"]] == ["Block.mlp.up", "Block.mlp.down"]
    assert mlp["children"][0]["parameters"] == [["weight", "(Shard(0),)"]]
    assert [op["name"] for op in mlp["children"][0]["operations_forward"]] == ["aten.t.default", "aten.mm.default"]


def test_it_counts_anew_when_entered_again(counted: CommDebugMode) -> None:
    with counted:
        pass
    assert counted.get_total_counts() == 0
