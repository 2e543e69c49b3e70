"""explain: each record against programs whose communication was counted by hand."""

import json
import os
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug.recording.records import Record
from shardwise.tensor import DTensor
from tests.virtual import block
from tests.virtual.block import HIDDEN, ROWS, WIDTH, Block, batch, line_of, train

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
WHOLE = ROWS * WIDTH * 4  # bytes of what goes in and out of the block
# What a rank of n = 4 receives: three of four blocks; in an all-reduce, twice that.
GATHERED = SCATTERED = 3 / 4 * WHOLE
ALL_REDUCED = 2 * 3 / 4 * WHOLE


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def put(tensor: torch.Tensor, mesh: sw.DeviceMesh, *placements: sw.Placement) -> DTensor:
    return sw.distribute_tensor(tensor, mesh, list(placements))


def names(report: sw.debug.Report) -> list[str]:
    return [record.name for record in report.records]


def moving(report: sw.debug.Report) -> list[Record]:
    return [record for record in report.records if record.moves]


def check_block(report: sw.debug.Report) -> None:
    """By hand: rows are gathered, the sum of the second layer is made for tanh; the gradient is scattered again."""
    gather, tanh, back = moving(report)
    for record in (gather, tanh, back):
        (move,) = record.moves
        assert (move.axis, move.group, record.module) == ("tp", 4, "Block")
        assert (record.where.file, record.where.function) == (block.__file__, "Block.forward")

    assert (gather.name, gather.kind, gather.phase) == ("redistribute", "explicit", "forward")
    assert (gather.moves[0].collective, gather.received) == ("all_gather", GATHERED)
    assert (str(gather.operands[0].spec), str(gather.outputs[0])) == ("f32[8,16] tp:S0", "f32[8,16] tp:R")
    assert gather.where.line == line_of("gather")

    assert (tanh.name, tanh.kind, tanh.phase, tanh.way) == ("aten.tanh.default", "operator", "forward", "rule")
    assert (tanh.moves[0].collective, tanh.received) == ("all_reduce", ALL_REDUCED)
    assert (str(tanh.operands[0].spec), str(tanh.wanted[0])) == ("f32[8,16] tp:P", "f32[8,16] tp:R")
    assert (tanh.where.line, tanh.called.line) == (line_of("tanh"), 0)

    assert (back.name, back.phase) == ("redistribute", "backward")
    assert (back.moves[0].collective, back.received) == ("reduce_scatter", SCATTERED)
    assert (back.where.line, back.called.line) == (line_of("gather"), line_of("backward"))
    assert report.record_at(back.cause) is gather


def test_a_tensor_parallel_block_cold_and_warm(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    for _ in range(2):
        with sw.explain() as report:
            train(model, x)
        check_block(report)
        assert report.total.collectives == 3
        assert report.by_phase["forward"].received == GATHERED + ALL_REDUCED
        assert report.by_phase["backward"].received == SCATTERED
        assert set(report.by_axis) == {"tp"}
        assert set(report.by_module) == {"Block"}
        assert {os.path.basename(line): total.received for line, total in report.by_line.items()} == {
            f"block.py:{line_of('gather')}": GATHERED + SCATTERED,
            f"block.py:{line_of('tanh')}": ALL_REDUCED,
        }


def test_operators_of_the_block_stand_with_their_modules(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    with sw.explain() as report:
        train(model, x)
    matmuls = [record for record in report.records if record.name == "aten.mm.default"]
    assert [(r.phase, r.module) for r in matmuls] == [
        ("forward", "Block.mlp.up"),
        ("forward", "Block.mlp.down"),
        *[("backward", "Block.mlp.down")] * 2,
        *[("backward", "Block.mlp.up")] * 2,
    ]
    up, down = matmuls[:2]
    assert [str(o.spec) for o in up.operands] == ["f32[8,16] tp:R", f"f32[{WIDTH},{HIDDEN}] tp:S1"]
    assert [o.owner for o in up.operands] == ["", "Block.mlp.up.weight"]
    assert str(up.outputs[0]) == "f32[8,32] tp:S1"
    assert str(down.outputs[0]) == "f32[8,16] tp:P"
    assert {r.way for r in matmuls} == {"rule"}
    assert (up.rule, down.rule) == ("mk,kn->mn; tp: R, S1 -> S1", "mk,kn->mn; tp: S1, S0 -> P")
    made = report.record_at(down.operands[0].made_by)
    assert made is not None
    assert made.name == "aten.relu.default"


def test_backward_on_another_thread_is_recorded(mesh: sw.DeviceMesh) -> None:
    model, x = Block(mesh), batch(mesh)
    with sw.explain() as report:
        loss = model(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    *_, back = moving(report)
    assert (back.phase, back.where.line, back.module) == ("backward", line_of("gather"), "Block")


def test_nothing_is_left_when_it_ends(mesh: sw.DeviceMesh) -> None:
    kept = {
        name: DTensor.__dict__[name] for name in ("__torch_dispatch__", "redistribute", "full_tensor", "from_local")
    }
    hooks = torch.nn.modules.module
    x = put(torch.randn(4, 4), mesh, S0)
    with sw.explain() as report:
        _ = x + x
        assert DTensor.__dict__["__torch_dispatch__"] is not kept["__torch_dispatch__"]
    _ = x + x
    assert names(report) == ["aten.add.Tensor"]
    with pytest.raises(ZeroDivisionError), sw.explain():
        raise ZeroDivisionError
    assert {name: DTensor.__dict__[name] for name in kept} == kept
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks


def test_reports_nest(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(4, 4), mesh, S0)
    with sw.explain() as outer:
        _ = x + x
        with sw.explain() as inner:
            _ = x.full_tensor()
        _ = x * x
    assert names(outer) == ["aten.add.Tensor", "full_tensor", "aten.mul.Tensor"]
    assert names(inner) == ["full_tensor"]
    assert inner.to_json()["records"][0]["index"] == 0


def test_it_goes_together_with_parity(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(4, 4), mesh, S0)
    ordinary = DTensor.__dict__["__torch_dispatch__"]
    with sw.explain() as around:
        with sw.parity() as found:
            _ = x + x
        _ = x * x
    with sw.parity() as other:
        with sw.explain() as inside:
            _ = x - x
        _ = x / 2
    assert names(around) == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert names(inside) == ["aten.sub.Tensor"]
    assert (sum(found.counts.values()), sum(other.counts.values())) == (1, 2)
    assert DTensor.__dict__["__torch_dispatch__"] is ordinary


def test_moves_that_were_asked_for(mesh: sw.DeviceMesh) -> None:
    with sw.explain() as report:
        x = sw.distribute_tensor(torch.randn(8, 4), mesh, [S0])
        y = x.redistribute(placements=[S1])
        z = y.redistribute(placements=[R]).redistribute(placements=[S0])  # a slice moves nothing
        whole = z.full_tensor()
        again = DTensor.from_local(whole[:2], mesh, [S0])
        again.to_local()
    found = [(record.name, [move.collective for move in record.moves]) for record in report.records]
    assert found == [
        ("distribute_tensor", ["scatter"]),
        ("redistribute", ["all_to_all"]),
        ("redistribute", ["all_gather"]),
        ("redistribute", []),
        ("full_tensor", ["all_gather"]),
        ("from_local", []),
        ("to_local", []),
    ]
    assert report.records[0].received == 2 * 4 * 4
    assert report.records[1].received == 3 / 4 * 2 * 4 * 4
    assert report.records[2].received == 3 * 8 * 4
    assert {record.where.function for record in report.records} == {"test_moves_that_were_asked_for"}


def test_routes_have_their_local_steps_too() -> None:
    two = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = put(torch.randn(8, 8), two, S0, R)
    with sw.explain() as report:
        x.redistribute(placements=[R, S0])
    (record,) = report.records
    (route,) = record.routes
    assert (str(route.source), route.target.layout) == ("f32[8,8] dp:S0 tp:R", "dp:R tp:S0")
    (shown,) = report.to_json()["records"][0]["routes"]
    assert [step["words"] for step in shown["steps"]] == [step.describe() for step in route.steps]
    assert sum(step["received_bytes"] for step in shown["steps"]) == record.received


def test_the_way_back_of_a_redistribute_is_recorded(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 4), mesh, S0).requires_grad_()
    with sw.explain() as report:
        y = x.redistribute(placements=[S1])
        (y * y).sum().backward()
    forward, backward = moving(report)
    assert (forward.name, backward.name) == ("redistribute", "redistribute")
    assert (backward.phase, backward.where) == ("backward", forward.where)
    assert [m.words for m in backward.moves] == ["all-to-all dim 1 -> dim 0 over tp"]


def test_an_operator_computed_from_others_names_them(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 2**15), mesh, S1)
    with sw.explain() as report:
        torch.softmax(x, 1)
    outer, *parts = report.records
    assert (outer.name, outer.way, outer.moves) == ("aten._softmax.default", "decomposed", [])
    assert outer.children == [part.index for part in parts if part.parent == outer.index]
    assert "aten.amax.default" in [part.name for part in parts]
    assert {part.where for part in parts} == {outer.where}
    assert report.total.collectives == sum(len(part.moves) for part in parts) > 0


def test_an_operator_on_whole_tensors_says_so(mesh: sw.DeviceMesh) -> None:
    @torch.library.custom_op("shardwise_test_explain::flipped", mutates_args=())
    def flipped(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    flipped.register_fake(torch.empty_like)
    x = put(torch.randn(8, 8), mesh, S0)
    with pytest.warns(sw.ReplicationWarning), sw.explain() as report:
        flipped(x)
    (record,) = moving(report)
    assert (record.way, [str(spec) for spec in record.wanted]) == ("replicated operands", ["f32[8,8] tp:R"])
    assert record.received == 3 * 2 * 8 * 4
    assert "register_sharding" in report.advice(record)


def test_random_operators_lists_and_views(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 4), mesh, S0)
    with sw.explain() as report:
        torch.rand_like(x)
        x.uniform_()
        torch._foreach_add_([x, x.clone()], 1.0)
        x.view(4, 2, 4)
        x.t_()
    ways = {record.name: record.way for record in report.records}
    assert ways["aten.rand_like.default"] == ways["aten.uniform_.default"] == "random"
    assert ways["aten._foreach_add_.Scalar"] == "rule"
    assert ways["aten.t_.default"] == "view in place"
    lists = next(record for record in report.records if record.name == "aten._foreach_add_.Scalar")
    assert [operand.name for operand in lists.operands] == ["self[0]", "self[1]"]
    assert str(report.records[-2].outputs[0] if report.records[-1].parent is not None else x.spec) == "f32[4,8] tp:S1"
    assert report.total.collectives == 0


def test_a_checkpointed_forward_is_marked(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 4), mesh, S0).requires_grad_()

    def part(value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value).sin()

    with sw.explain() as report:
        checkpoint(part, x, use_reentrant=False).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    again = [record for record in report.records if record.phase == "recompute"]
    assert "aten.tanh.default" in [record.name for record in again]
    assert {record.where.function.rpartition(".")[2] for record in again} == {"part"}
    backward = next(record for record in report.records if record.name == "aten.tanh_backward.default")
    assert backward.phase == "backward"


def test_an_error_is_the_programs_own(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 8), mesh, S1)
    with sw.explain() as report:
        with sw.plain_tensors("refuse"), pytest.raises(sw.PlainTensorError):
            _ = x + torch.arange(8.0)
        with sw.strict(), pytest.raises(sw.ImplicitCommunicationError):
            _ = x @ x
        _ = x @ x
    assert [record.error for record in report.records] == ["ImplicitCommunicationError", ""]
    assert [record.collectives for record in report.records] == [0, 1]


def test_plain_tensors_made_inside_operators_are_still_told_apart(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 4), mesh, S0).requires_grad_()
    target = put(torch.randint(4, (8,)), mesh, S0)
    with sw.explain() as report:
        nn.functional.cross_entropy(x, target, label_smoothing=0.1).backward()
        nn.functional.dropout(x, 0.5)
    assert x.grad is not None
    assert len(report.records) > 5


def test_inference_mode_and_dry_runs() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (64, 8), mesh_dim_names=("dp", "tp"))
        with sw.explain() as report, torch.inference_mode():
            x = sw.zeros(1024, 64, device_mesh=mesh, placements=[S0, S1])
            x.t().sum(0).exp()
    assert report.total.collectives == sum(run.collectives.values()) > 0
    assert report.total.received == run.bytes


def test_a_module_that_fails_is_left(mesh: sw.DeviceMesh) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    x = put(torch.randn(4, 4), mesh, S0)
    with sw.explain() as report:
        with pytest.raises(ZeroDivisionError):
            Failing()(x)
        _ = x + x
    assert [record.module for record in report.records] == [""]


# ---------------------------------------------------------------- why


def test_advice_names_a_change_with_which_nothing_moves(mesh: sw.DeviceMesh) -> None:
    a, b = put(torch.randn(8, 8), mesh, S1), put(torch.randn(8, 8), mesh, S1)
    with sw.explain() as report:
        _ = a @ b
    (record,) = report.records
    best, *others = report.changes(record)
    assert (best.operand, best.spec.layout, [str(o.layout) for o in best.outputs]) == (0, "tp:R", ["tp:S1"])
    assert ("tp:S0", ["tp:P"]) in [(c.spec.layout, [o.layout for o in c.outputs]) for c in others]
    assert "self is tp:S1, mat2 is tp:S1. With self as tp:R, nothing moves" in report.advice(record)
    for change in (best, *others):  # each of them is true
        operands = [a, b]
        operands[change.operand] = operands[change.operand].redistribute(placements=change.spec.placements)
        with sw.explain() as tried:
            result = operands[0] @ operands[1]
        assert tried.total.collectives == 0
        assert result.spec.layout == change.outputs[0].layout


def test_candidates_with_their_costs(mesh: sw.DeviceMesh) -> None:
    a, b = put(torch.randn(8, 8), mesh, S1), put(torch.randn(8, 8), mesh, S1)
    with sw.explain(candidates=True) as report:
        _ = a @ b
    found = report.to_json()["records"][0]["candidates"]
    rows = {tuple(candidate["inputs"]): candidate for candidate in found}
    assert set(rows) == {("S0", "R"), ("S1", "S0"), ("R", "S1"), ("P", "R"), ("R", "P"), ("R", "R")}
    (chosen,) = [candidate for candidate in found if candidate["chosen"]]
    reachable = [candidate["seconds"] + candidate["owed"] for candidate in found if candidate["seconds"] is not None]
    assert chosen["seconds"] == min(reachable) == report.total.seconds
    assert rows["S1", "S0"]["seconds"] < chosen["seconds"] < rows["S1", "S0"]["owed"]
    assert rows["P", "R"]["seconds"] is None
    assert "candidates" in report.table()


def test_a_sum_that_has_to_be_made_is_called_that(mesh: sw.DeviceMesh) -> None:
    x = put(torch.randn(8, 8), mesh, S1)
    with sw.explain() as report:
        x.sum(1).exp()
    text = report.advice(report.records[1])
    assert "and must be reduced before aten.exp" in text
    assert "is a result of aten.sum at test_explain.py:" in text
    assert "Redistributing it to tp:S0 costs less: reduce-scatter (sum) onto dim 0 over tp, 24 B." in text


# ---------------------------------------------------------------- forms


@pytest.fixture
def report(mesh: sw.DeviceMesh) -> sw.debug.Report:
    model, x = Block(mesh), batch(mesh)
    with sw.explain(candidates=True) as found:
        train(model, x)
    return found


def test_the_table_keeps_to_its_width(report: sw.debug.Report) -> None:
    for width in (80, 120):
        lines = report.table(width=width).splitlines()
        assert max(map(len, lines)) <= width
    plain = str(report)
    assert "\x1b" not in plain
    assert "\x1b[" in report.table(color=True)
    for word in ("3 collectives", "all_reduce tp", f"block.py:{line_of('tanh')}", "backward", "how to avoid it"):
        assert word in plain


def test_long_module_names_are_broken_at_dots(mesh: sw.DeviceMesh) -> None:
    inner = nn.Sequential(OrderedDict(output=nn.Softmax(dim=1)))
    model = nn.Sequential(OrderedDict(an_encoder_of_text=nn.Sequential(OrderedDict(layers_of_attention=inner))))
    x = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(1)])
    with sw.explain() as report:
        model(x)
    shown = report.table(width=80)
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("layers_of_attention.", "output"):
        assert part in shown


def test_json_is_plain_and_adds_up(report: sw.debug.Report) -> None:
    data = json.loads(json.dumps(report.to_json()))
    moves = [move for record in data["records"] for move in record["moves"]]
    assert data["total"]["collectives"] == len(moves) == 3
    for sums in data["totals"].values():
        assert sum(total["received_bytes"] for total in sums.values()) == data["total"]["received_bytes"]
    for record in data["records"]:
        assert record["forward"] is None or data["records"][record["forward"]]["phase"] == "forward"


def test_the_trace_is_valid(report: sw.debug.Report, tmp_path: Path) -> None:
    report.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert all((event["pid"], event["tid"]) in named for event in slices)
    moved = [event for event in slices if named[event["pid"], event["tid"]] == "over tp"]
    assert sum(event["args"]["received_bytes"] for event in moved) == report.total.received
    assert sum(event["dur"] for event in moved) == pytest.approx(report.total.seconds * 1e6, abs=0.01)


def test_notebooks_show_reports_and_tensors(report: sw.debug.Report, mesh: sw.DeviceMesh) -> None:
    shown = report._repr_html_()
    assert "3 collectives" in shown
    assert "all-reduce (sum) over tp" in shown
    x = put(torch.randn(8, 4), mesh, S0)
    with sw.explain() as looked:
        text = x._repr_html_()
    assert not looked.records
    assert "f32[8,4] tp:S0" in text


def test_an_empty_report_has_all_forms(tmp_path: Path) -> None:
    with sw.explain() as report:
        pass
    assert "nothing was moved" in str(report)
    report.to_html(tmp_path / "page.html")
    report.to_chrome_trace(tmp_path / "trace.json")
    assert report.to_json()["total"]["collectives"] == 0
