"""Pictures of layouts agree with the spec, in characters and in SVG."""

import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.core.notation import parse_spec
from shardwise.debug import visualize_sharding
from shardwise.debug.pictures.draw_text import picture_text
from shardwise.debug.pictures.tiles import Face, face_of

SVG = "{http://www.w3.org/2000/svg}"
MESHES = {"dp=4": (4,), "dp=2,tp=2": (2, 2), "dp=2,tp=3": (2, 3), "dp=2,tp=2,cp=2": (2, 2, 2)}
LAYOUTS = [
    ("dp=4", "f32[5] dp:S0"),
    ("dp=4", "f32[] dp:P"),
    ("dp=4", "f32[2,3] dp:S1"),
    ("dp=2,tp=2", "f32[10,7] dp:S0 tp:S1"),
    ("dp=2,tp=2", "f32[10,7] dp:P tp:S1"),
    ("dp=2,tp=2", "f32[9,7] dp:S0 tp:S0 order 0:tp>dp"),
    ("dp=2,tp=3", "f32[12,8] dp:S0/3 tp:S1"),
    ("dp=2,tp=3", "f32[7,4] dp:P(max) tp:R"),
    ("dp=2,tp=3", "f32[1,13] dp:S0 tp:S1"),
    ("dp=2,tp=3", "f32[6,5,4] dp:S0 tp:R"),
    ("dp=2,tp=2,cp=2", "f32[5,4,6] dp:S0 tp:S1 cp:S2"),
    ("dp=2,tp=2,cp=2", "f32[5,4] dp:M tp:S1 cp:R"),
]


def mesh_of(text: str) -> sw.DeviceMesh:
    names = [part.partition("=")[0] for part in text.split(",")]
    shape = [int(part.partition("=")[2]) for part in text.split(",")]
    ranks = np.arange(np.prod(shape)).reshape(shape)
    return sw.DeviceMesh("cpu", ranks, mesh_dim_names=names, fabric="dry")


def held(face: Face) -> dict[int, set[tuple[int, ...]]]:
    """For each rank the indices that the tiles give it."""
    spec = face.spec
    found: dict[int, set[tuple[int, ...]]] = {rank: set() for rank in range(spec.mesh.size())}
    for panel in face.panels():
        for rows, columns in itertools.product(face.rows, face.columns):
            spans = dict([(face.row_dim, rows), (face.column_dim, columns), *panel.fixed])
            ranges = [
                range(spans[dim].start, spans[dim].start + spans[dim].length)
                if dim in spans
                else range(spec.shape[dim])
                for dim in range(spec.ndim)
            ]
            for rank in panel.tile(rows, columns).holders.ranks:
                found[rank] |= set(itertools.product(*ranges))
    return found


@pytest.mark.parametrize(("mesh", "text"), LAYOUTS)
def test_tiles_are_what_the_spec_says(mesh: str, text: str) -> None:
    spec = parse_spec(text, mesh_of(mesh))
    face = face_of(spec)
    for rank, indices in held(face).items():
        coordinate = spec.mesh.coordinate_of(rank)
        runs = [
            [i for run in dim for i in range(run.start, run.start + run.length)] for dim in spec.block(coordinate).runs
        ]
        assert indices == set(itertools.product(*runs)), f"rank {rank}"
    assert face.idle_ranks == [rank for rank, indices in held(face).items() if not indices]


def rectangles(svg: str) -> list[tuple[set[int], tuple[float, ...]]]:
    """The tiles of a picture: their ranks and x, y, width, height."""
    root = ElementTree.fromstring(svg)
    assert not root.findall(f".//{SVG}script")
    return [
        (
            {int(rank) for rank in one.attrib["data-ranks"].split(",")},
            tuple(float(one.attrib[k]) for k in ("x", "y", "width", "height")),
        )
        for one in root.iter(f"{SVG}rect")
        if one.get("class") == "tile"
    ]


@pytest.mark.parametrize(
    ("mesh", "text"), [entry for entry in LAYOUTS if "/" not in entry[1] and "cp:S2" not in entry[1]]
)
def test_rectangles_are_true_to_size(mesh: str, text: str) -> None:
    """Every rank's rectangle has the offset and shape of its block, on one scale for each dim."""
    spec = parse_spec(text, mesh_of(mesh))
    face, tiles = face_of(spec), rectangles(sw.draw(spec).svg)
    left, top = min(box[0] for _, box in tiles), min(box[1] for _, box in tiles)
    wide, high = max(box[0] + box[2] for _, box in tiles) - left, max(box[1] + box[3] for _, box in tiles) - top
    drawn = set().union(*(ranks for ranks, _ in tiles))
    assert drawn == set(range(spec.mesh.size())) - set(face.idle_ranks)
    for ranks, box in tiles:
        for rank in ranks:
            block = spec.block(spec.mesh.coordinate_of(rank))
            for dim, start, length, whole, origin in (
                (face.column_dim, box[0], box[2], wide, left),
                (face.row_dim, box[1], box[3], high, top),
            ):
                if dim is not None:
                    unit = whole / spec.shape[dim]
                    assert (start - origin) / unit == pytest.approx(block.offset[dim], abs=1e-2)
                    assert length / unit == pytest.approx(block.shape[dim], abs=1e-2)


@pytest.mark.parametrize(("mesh", "text"), LAYOUTS)
def test_text_is_80_columns_and_names_every_rank(mesh: str, text: str) -> None:
    spec = parse_spec(text, mesh_of(mesh))
    lines = picture_text(spec)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(str(spec))
    ElementTree.fromstring(sw.draw(spec).svg)


def labels(lines: Sequence[str]) -> list[str]:
    return [cell.strip() for line in lines if "│" in line for cell in line.split("│")[1:-1] if cell.strip()]


@pytest.mark.parametrize(
    ("mesh", "text", "expected", "note"),
    [
        ("dp=2,tp=2", "f32[10,7] dp:S0 tp:S1", ["0", "1", "2", "3"], None),
        ("dp=2,tp=2", "f32[10,7] dp:S0 tp:R", ["0,1", "2,3"], "replicated over tp: 2 replicas of each block"),
        ("dp=2,tp=2", "f32[10,7] dp:P tp:S0", ["0+2", "1+3"], "partial over dp: a block is the sum of"),
        ("dp=2,tp=2", "f32[4] dp:P(max) tp:R", ["max(0,2), max(1,3)"], "partial over dp: a block is the max of"),
        ("dp=4", "f32[5] dp:S0", ["0", "1", "2"], "rank 3 has no elements"),
        ("dp=2,tp=2", "f32[8,2] dp:S0/2 tp:R", ["0,1", "2,3", "0,1", "2,3"], None),
    ],
)
def test_labels(mesh: str, text: str, expected: list[str], note: str | None) -> None:
    lines = picture_text(parse_spec(text, mesh_of(mesh)))
    assert labels(lines) == expected
    assert note is None or any(line.startswith(note) for line in lines)


def test_many_ranks() -> None:
    spec = parse_spec("f32[64,64] dp:S0 tp:S1", mesh_of("dp=8,tp=8"))
    assert {rank for ranks, _ in rectangles(sw.draw(spec).svg) for rank in ranks} == set(range(64))
    assert labels(picture_text(spec)) == list(map(str, range(64)))
    spec = parse_spec("f32[4096,4096] dp:S0 tp:S1", mesh_of("dp=128,tp=128"))
    picture = sw.draw(spec)
    assert "16,384 blocks" in picture.svg
    assert len(picture.svg) < 100_000
    assert {0, 127, 16383} <= {rank for ranks, _ in rectangles(picture.svg) for rank in ranks}
    assert max(map(len, picture_text(spec))) <= 80
    assert len(rectangles(sw.draw(spec.mesh).svg)) < 200


def test_a_route_shows_its_states_and_bytes() -> None:
    mesh = mesh_of("dp=2,tp=2")
    source, target = parse_spec("f32[4,4] dp:P tp:S0", mesh), parse_spec("f32[4,4] dp:R tp:S1", mesh)
    route = sw.DTensorRedistributePlanner().plan(source, target)
    texts = [text.text for text in ElementTree.fromstring(sw.draw(route).svg).iter(f"{SVG}text")]
    assert [spec.layout for spec in (source, *(step.after for step in route.steps))] == [
        text for text in texts if text and text in {step.after.layout for step in route.steps} | {source.layout}
    ]
    for step, cost in zip(route.steps, route.costs, strict=True):
        assert step.describe().split()[0] in texts
        assert f"{cost.received:.0f} B" in texts
    nothing = sw.DTensorRedistributePlanner().plan(source, source)
    assert "nothing to do" in sw.draw(nothing).svg


def test_a_mesh_shows_its_axes_and_ranks() -> None:
    mesh = sw.DeviceMesh("cpu", [[[3, 1], [0, 2]], [[4, 5], [6, 7]]], mesh_dim_names=("pp", "dp", "tp"), fabric="dry")
    svg = sw.draw(mesh).svg
    assert [min(ranks) for ranks, _ in rectangles(svg)] == [3, 1, 0, 2, 4, 5, 6, 7]
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"pp=0", "pp=1", "dp", "tp"} <= set(texts)
    assert len(rectangles(sw.draw(mesh["tp"]).svg)) == 2


def test_a_slice_of_a_mesh_is_drawn_once() -> None:
    spec = parse_spec("f32[4] tp:S0", mesh_of("dp=2,tp=2")["tp"])
    assert "the first of 2 slices" in picture_text(spec)[0]
    assert labels(picture_text(spec)) == ["0", "1"]


@pytest.mark.parametrize("rich", [False, True])
def test_visualize_sharding_prints(rich: bool, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = sw.distribute_tensor(torch.zeros(4, 6), mesh, [sw.Shard(0), sw.Shard(1)])
    visualize_sharding(x, header="weights", use_rich=rich)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "weights"
    assert labels(lines) == ["0", "1", "2", "3"]
    visualize_sharding(x[:0])
    assert "no elements" in capsys.readouterr().out


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(sw.LayoutError, match="needs a mesh"):
        sw.draw("f32[4] S0")
    wrong: Any = 3
    with pytest.raises(sw.LayoutError, match="does not support int"):
        sw.draw(wrong)
    with pytest.raises(sw.LayoutError, match="draws DTensors"):
        visualize_sharding(torch.ones(3))


def test_a_drawing_is_saved_and_shown(tmp_path: Any) -> None:
    picture = sw.draw("f32[4] S0", mesh=sw.init_device_mesh("cpu", (2,)))
    picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == picture.svg == picture._repr_svg_()


def test_the_command_prints_and_writes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    layout, mesh = "f32[10,7] dp:S0 tp:S1", ["--mesh", "dp=2,tp=2"]
    assert main(["draw", layout, *mesh]) == 0
    assert labels(capsys.readouterr().out.splitlines()) == ["0", "1", "2", "3"]
    for words in ([layout], ["f32[10,7] dp:S0 -> tp:S1"], []):
        assert main(["draw", *words, *mesh, "--svg", str(tmp_path / "a.svg")]) == 0
        ElementTree.parse(tmp_path / "a.svg")
    assert main(["draw", *mesh]) == 2
    assert main(["draw", layout, *mesh, "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err


# ---------------------------------------------------------------- rings


def area(points: str) -> float:
    """Of a polygon, by its corners."""
    corners = [tuple(map(float, point.split(","))) for point in points.split()]
    return abs(sum(a * d - b * c for (a, b), (c, d) in zip(corners, corners[1:] + corners[:1], strict=True))) / 2


@pytest.mark.parametrize(("text", "share"), [("cp:S2", 1.73), ("cp:Z2", 1.0)])
def test_a_ring_is_drawn_turn_by_turn(text: str, share: float) -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    picture = sw.debug.draw_ring(parse_spec(f"f32[1,2,32,8] {text}", mesh)).svg
    root = ElementTree.fromstring(picture)
    tiles = list(root.iter(f"{SVG}polygon"))
    side = 150.0
    assert sum(area(tile.attrib["points"]) for tile in tiles) == pytest.approx(side * side / 2, rel=1e-4)
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [word for word in words if word.startswith("turn")] == [f"turn {turn}" for turn in range(4)]
    assert f"the busiest rank computes {share:.2f} times the average" in words
    whole = ElementTree.fromstring(sw.debug.draw_ring(parse_spec(f"f32[1,2,32,8] {text}", mesh), causal=False).svg)
    assert sum(area(t.attrib["points"]) for t in whole.iter(f"{SVG}polygon")) == pytest.approx(side * side, rel=1e-4)


def test_rings_that_cannot_be_drawn() -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    for text in ("f32[1,2,32,8] cp:S1", "f32[32,8] cp:S0"):
        with pytest.raises(sw.LayoutError, match="tokens are sharded"):
            sw.debug.draw_ring(parse_spec(text, mesh))
    with pytest.raises(sw.LayoutError, match="tokens are sharded"):
        sw.debug.draw_ring(torch.zeros(1, 2, 32, 8))
