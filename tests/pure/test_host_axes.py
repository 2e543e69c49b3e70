"""Axes that cross hosts are split; routes over them are chosen where links differ; machine files are validated."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.cli.arguments import parse_change, parse_mesh
from shardwise.core.notation import parse_spec
from shardwise.errors import MachineFileError
from shardwise.fabric.link_measurements import RankHosts, fit_link
from shardwise.fabric.machine_file import Machine, Measurement, load_machine, parse_machine, read_machine, write_machine
from shardwise.plan.cost import CostModel, HostLinks, Link
from shardwise.plan.host_axes import on_split_mesh, split_by_hosts
from shardwise.plan.route import DTensorRedistributePlanner

FAST, SLOW = Link(1e-4, 1e-9), Link(1e-4, 1e-8)
HOSTS = HostLinks(4, FAST, SLOW, SLOW)
MODEL = CostModel(hosts={"cpu": HOSTS})


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("8", ((0, 1),)),
        ("dp=2,tp=4", None),
        ("dp=4,tp=2", ((0, 1), (2,))),
        ("tp=2,dp=4", None),  # both axes go from host to host, or stay
        ("pp=2,dp=2,tp=2", None),
        ("dp=16,tp=2", ((0, 1), (2,))),
        ("dp=6", ((0, 1),)),  # pairs stay on a host
        ("dp=5", None),
        ("dp=4", None),
    ],
)
def test_axes_over_several_ranks_of_several_hosts_are_split(mesh: str, parts: object) -> None:
    split = split_by_hosts(parse_mesh(mesh), HOSTS)
    assert (None if split is None else split.parts) == parts


def test_a_slice_of_a_mesh_is_split_within_its_grid() -> None:
    mesh = parse_mesh("dp=4,tp=2")
    split = split_by_hosts(mesh["dp"], HOSTS)
    assert split is not None
    assert split.mesh.shape == (2, 2)
    for axis in (0, 1):
        for line in split.mesh.groups((axis,)).tolist():
            hosts = {rank // 4 for rank in line}
            assert len(hosts) == (2 if axis == 0 else 1)


@pytest.mark.parametrize(
    ("mesh", "change", "steps"),
    [
        ("8", "f32[64,64] P -> R", ("reduce_scatter", "all_reduce", "all_gather")),
        ("8", "f32[64,64] S0 -> R", ("all_to_all", "all_gather", "all_gather")),
        ("8", "f32[64,64] S0 -> S1", ("all_to_all",)),  # crosses in any case
        ("8", "f32[63,64] S0 -> R", ("all_to_all",)),  # uneven
        ("8", "f32[64,64] P(norm2) -> R", ("all_reduce",)),
        ("dp=2,tp=4", "f32[64,64] dp:P -> R R", ("all_reduce", "all_gather")),
    ],
)
def test_routes_go_inside_first(mesh: str, change: str, steps: tuple[str, ...]) -> None:
    quick = CostModel(hosts={"cpu": HostLinks(4, Link(1e-9, 1e-9), Link(1e-9, 1e-8), Link(1e-9, 1e-8))})
    source, target = parse_change(change, parse_mesh(mesh))
    route = DTensorRedistributePlanner(quick).plan(source, target)
    assert tuple(step.collective for step in route.steps if step.collective) == steps
    assert route.source is source
    assert route.target is target


QUICK = HostLinks(4, Link(1e-9, 1e-9), Link(1e-9, 1e-8), Link(1e-9, 1e-8))


@pytest.mark.parametrize(
    ("mesh", "change", "pieces"),
    [
        ("8", "f32[256,64] P -> R", (0, 8)),
        ("8", "f32[256,64] S0 -> R", (1, 8)),
        ("8", "f32[256,64] P -> S0", (1, 8)),
        ("8", "f32[256,16] S0 -> R", (1, 2)),  # pieces of dim 1 that are no longer even over all ranks
        ("8", "f32[256,12] S0 -> R", None),
        ("8", "f32[256] S0 -> R", None),  # no dim that both ends have in full
        ("dp=2,tp=4", "f32[256,64] dp:P -> R R", (0, 8)),
        ("dp=2,tp=4", "f32[256,64] tp:P -> R R", None),  # inside a host alone
    ],
)
def test_steps_on_different_links_run_in_pieces(mesh: str, change: str, pieces: object) -> None:
    model = CostModel(hosts={"cpu": QUICK})
    source, target = parse_change(change, parse_mesh(mesh))
    route = DTensorRedistributePlanner(model).plan(source, target)
    assert route.pieces == pieces
    if pieces is not None:
        bounded = DTensorRedistributePlanner(model).plan(source, target, max_bytes=1 << 30)
        assert bounded.pieces is None  # pieces in flight need memory
        assert bounded.steps == route.steps
        crossing = [
            cost.seconds for step, cost in zip(bounded.steps, bounded.costs, strict=True)
            if step.collective and QUICK.link(step.before.mesh, step.axes) is not QUICK.inside
        ]  # fmt: skip
        assert sum(crossing) < route.seconds < bounded.seconds  # no faster than the link between hosts
        assert route.received == bounded.received


def test_latency_limits_the_number_of_pieces() -> None:
    source, target = parse_change("f32[1024,1024] P -> R", parse_mesh("8"))
    numbers = []
    for alpha in (1e-9, 1e-3, 4e-3):
        links = HostLinks(4, Link(alpha, 1e-9), Link(alpha, 1e-8), Link(alpha, 1e-8))
        pieces = DTensorRedistributePlanner(CostModel(hosts={"cpu": links})).plan(source, target).pieces
        numbers.append(1 if pieces is None else pieces.number)
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 8
    assert numbers[-1] == 1


def test_small_tensors_take_one_collective() -> None:
    source, target = parse_change("f32[8,8] P -> R", parse_mesh("8"))
    assert DTensorRedistributePlanner(MODEL).plan(source, target).collectives == 1


def test_uneven_shards_have_no_layout_on_the_split_mesh() -> None:
    mesh = parse_mesh("8")
    split = split_by_hosts(mesh, HOSTS)
    assert split is not None
    assert on_split_mesh(parse_spec("f32[12,8] S0", mesh), split) is None
    even = on_split_mesh(parse_spec("f32[16,8] S0", mesh), split)
    assert even is not None
    for position in range(8):
        coordinate = tuple(split.mesh.coordinates[position].tolist())
        assert even.block(coordinate) == parse_spec("f32[16,8] S0", mesh).block((position,))


def test_slower_collectives_are_priced() -> None:
    link = Link(0.0, 1e-9, (("reduce_scatter", 1.5),))
    model = CostModel(hosts={"cpu": HostLinks(8, link, link, link)})
    source, target = parse_change("f32[64,64] P -> S0", parse_mesh("8"))
    route = DTensorRedistributePlanner(model).plan(source, target)
    assert route.seconds == pytest.approx(1.5 * route.received * 1e-9)


@pytest.mark.parametrize(
    ("names", "count"), [("aabb", 2), ("abab", None), ("aaab", None), ("aaaa", 4), ("abcd", 1), ("aba", None)]
)
def test_ranks_of_hosts(names: str, count: int | None) -> None:
    assert RankHosts(tuple(names)).ranks_per_host == count


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_is_found(alpha: float, beta: float) -> None:
    points = [Measurement("inside", 4, "all_gather", r, alpha + beta * r) for r in (1e3, 1e5, 1e7)]
    link = fit_link(points)
    for point in points:
        assert link.seconds("all_gather", point.received) == pytest.approx(point.seconds, rel=1e-3)


# ---------------------------------------------------------------- files

MACHINE = Machine("cpu", ("a", "b"), 4, FAST, Link(1e-4, 1e-8, (("all_to_all", 2.0),)), SLOW,
                  (Measurement("inside", 4, "all_reduce", 1e3, 1e-3),))  # fmt: skip


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    write_machine(MACHINE, tmp_path / "m.json")
    assert read_machine(tmp_path / "m.json") == MACHINE
    model = load_machine(tmp_path / "m.json")
    mesh = parse_mesh("8")
    assert model.link(mesh, (0,)) == SLOW
    assert model.link(parse_mesh("2x4"), (1,)) == FAST
    assert model.link(parse_mesh("2x4"), (0,)) == MACHINE.across


def test_plan_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_machine(MACHINE, tmp_path / "m.json")
    command = ["plan", "f32[4096,4096] P -> R", "--mesh", "8", "--json", "--machine", str(tmp_path / "m.json")]
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["route"]["steps"]) == 3
    assert main([*command[:-1], str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_machine(MACHINE, tmp_path / "m.json")
    good = json.loads((tmp_path / "m.json").read_text())
    wrong = [
        ("version", 2), ("device_type", "tpu"), ("hosts", []), ("hosts", [1]), ("ranks_per_host", 0),
        ("ranks_per_host", True), ("ranks_per_host", 1.5), ("inside", None), ("inside", {"alpha": 1, "beta": 1}),
        ("inside", {"alpha": -1, "beta": 1, "factors": []}), ("inside", {"alpha": 1, "beta": "1", "factors": []}),
        ("inside", {"alpha": 1, "beta": 1, "factors": [["all_reduce", 0.5]]}),
        ("inside", {"alpha": 1, "beta": 1, "factors": [["gossip", 2]]}), ("measurements", None),
        ("measurements", [{}]), ("measurements", [{**good["measurements"][0], "seconds": None}]),
    ]  # fmt: skip
    for field, value in wrong:
        with pytest.raises(MachineFileError):
            parse_machine(json.dumps({**good, field: value}).encode())
    for data in (b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, json.dumps({**good, "more": 1}).encode(), b'{"a": NaN}'):
        with pytest.raises(MachineFileError):
            parse_machine(data)
    text = json.dumps({**good, "inside": {"alpha": float("nan"), "beta": 1, "factors": []}})
    with pytest.raises(MachineFileError):
        parse_machine(text.encode())


def test_calibrate_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path / "m.json")]) == 2
    assert "torchrun" in capsys.readouterr().err
