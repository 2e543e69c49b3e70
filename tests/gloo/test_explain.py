"""explain on real processes: every rank records the same, as virtual ranks do."""

import json
from typing import Any

import torch

import shardwise as sw
from shardwise.debug import CommDebugMode
from tests.gloo.processes import ProcessPool
from tests.virtual.block import Block, batch, train


def without_times(report: sw.debug.Report) -> str:
    """What does not depend on the clock, nor on the fabric."""
    data = report.to_json()
    for record in data["records"]:
        del record["measured"]
    for mesh in data["meshes"]:
        del mesh["fabric"]
    return json.dumps(data, sort_keys=True)


def look(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with sw.explain() as making:
        model, x = Block(mesh), batch(mesh)
    with CommDebugMode() as comm, sw.explain() as report:
        train(model, x)
    asynchronous = x.detach().redistribute(placements=[sw.Replicate()], async_op=True)
    with sw.explain() as waiting:
        moved = x.detach().redistribute(placements=[sw.Replicate()], async_op=True)
        assert torch.equal((moved + 0).to_local(), (asynchronous + 0).to_local())
    report.to_html(f"{folder}/report.html")  # all ranks at once
    found: dict[str, Any] = {
        "report": without_times(report),
        "made": [(record.name, record.received) for record in making.records if record.moves],
        "counts": comm.get_total_counts(),
        "waiting": [(record.name, [move.collective for move in record.moves]) for record in waiting.records[1:3]],
    }
    try:
        with sw.comm_budget(collectives=1):
            train(model, x)
    except sw.CommunicationError as error:
        found["error"] = str(error)
    return found


def test_ranks_record_alike_and_as_virtual_ranks_do(gloo4: ProcessPool, tmp_path: Any) -> None:
    first, *others = gloo4.run(look, str(tmp_path), timeout=120)
    assert all(other == first for other in others)
    with sw.virtual():
        here = look(str(tmp_path))
    assert first == here
    assert first["counts"] == 3
    assert [name for name, _ in first["made"]] == ["distribute_tensor"] * 3
    assert first["waiting"] == [("redistribute", ["all_gather"]), ("aten.add.Tensor", [])]
    assert "aten.tanh in forward" in first["error"]
    assert "</html>" in (tmp_path / "report.html").read_text()
