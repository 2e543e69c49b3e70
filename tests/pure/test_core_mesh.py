"""Meshes against plain numpy: slices, flattened axes, coordinates, groups; and what cannot be a mesh."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core import mesh as mesh_module
from shardwise.core.factors import common_factors
from shardwise.core.mesh import DeviceMesh, current_mesh, on_one_grid
from shardwise.errors import MeshError, UnsupportedError
from tests.pure.strategies import AXIS_NAMES, any_meshes, composite, meshes, rank_grids


def grid_of(mesh: DeviceMesh) -> np.ndarray:
    """The ranks of the full grid."""
    return np.array(list(mesh.grid_ranks)).reshape(mesh.grid_shape)


def named(grid: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", grid, mesh_dim_names=names or None, fabric="virtual")


@composite
def selections(draw: st.DrawFn) -> tuple[np.ndarray, list[list[int]], DeviceMesh]:
    """A grid, the axes of the grid that each axis of a slice consists of, and the slice."""
    grid = draw(rank_grids())
    whole = named(grid, *AXIS_NAMES[: grid.ndim])
    order = draw(st.permutations(range(grid.ndim)))
    chosen = list(order[: draw(st.integers(1, grid.ndim))])
    if draw(st.booleans()):
        return grid, [chosen], whole.flatten(chosen)
    return grid, [[a] for a in chosen], whole[tuple(AXIS_NAMES[a] for a in chosen)]


# ---------------------------------------------------------------- against numpy


@given(rank_grids(), st.booleans())
def test_a_mesh_is_its_grid(grid: np.ndarray, has_names: bool) -> None:
    names = AXIS_NAMES[: grid.ndim] if has_names else None
    mesh = DeviceMesh("cpu", grid.tolist(), mesh_dim_names=names, fabric="virtual")
    assert (mesh.shape, mesh.ndim, mesh.size(), mesh.grid_size) == (grid.shape, grid.ndim, grid.size, grid.size)
    assert mesh.mesh_dim_names == names
    assert [mesh.size(a) for a in range(-grid.ndim, grid.ndim)] == [*grid.shape, *grid.shape]
    assert torch.equal(mesh.mesh, torch.tensor(grid.tolist()))
    assert mesh.root is mesh
    for place, rank in np.ndenumerate(grid):
        assert mesh.coordinate_of(int(rank)) == place
        assert mesh.position_of(int(rank)) == np.ravel_multi_index(place, grid.shape)


@given(any_meshes(), st.integers(-3, 400))
def test_a_rank_outside_has_no_place(mesh: DeviceMesh, rank: int) -> None:
    if rank in set(mesh.grid_ranks):
        assert grid_of(mesh).flatten()[mesh.position_of(rank)] == rank
    else:
        assert mesh.position_of(rank) is None
        assert mesh.coordinate_of(rank) is None
        with pytest.raises(MeshError, match=f"rank {rank} is not in"):
            mesh.ranks_along(0, rank)


@given(selections())
def test_parts_see_the_axes_they_stand_for(case: tuple[np.ndarray, list[list[int]], DeviceMesh]) -> None:
    grid, axes, part = case
    assert part.shape == tuple(int(np.prod([grid.shape[g] for g in axis])) for axis in axes)
    assert part.mesh_dim_names == tuple("_".join(AXIS_NAMES[g] for g in axis) for axis in axes)
    assert part.grid_size == grid.size
    assert part.root is named(grid, *AXIS_NAMES[: grid.ndim])
    for place, rank in np.ndenumerate(grid):
        expected = []
        for axis in axes:
            index = 0
            for g in axis:
                index = index * grid.shape[g] + place[g]
            expected.append(index)
        assert part.coordinate_of(int(rank)) == tuple(expected)
    assert part.coordinates.tolist() == [list(part.coordinate_of(int(rank))) for rank in grid.flatten()]


@given(selections())
def test_groups_are_the_lines_of_the_grid(case: tuple[np.ndarray, list[list[int]], DeviceMesh]) -> None:
    grid, axes, part = case
    positions = np.arange(grid.size).reshape(grid.shape)
    for count in range(1, part.ndim + 1):
        for chosen in itertools.permutations(range(part.ndim), count):
            inside = [g for a in chosen for g in axes[a]]
            outside = [g for g in range(grid.ndim) if g not in inside]
            expected = []
            for fixed in itertools.product(*(range(grid.shape[g]) for g in outside)):
                line = positions
                for g, index in sorted(zip(outside, fixed, strict=True), reverse=True):
                    line = line.take(index, axis=g)
                expected.append(line.transpose(np.argsort(np.argsort(inside)).tolist()).flatten().tolist())
            assert part.groups(chosen).tolist() == expected
    everything = part.groups(tuple(range(part.ndim)))
    assert sorted(everything.flatten().tolist()) == list(range(grid.size))


@settings(max_examples=50)
@given(selections())
def test_ranks_along_an_axis_have_its_coordinates(case: tuple[np.ndarray, list[list[int]], DeviceMesh]) -> None:
    grid, axes, part = case
    where = {int(rank): place for place, rank in np.ndenumerate(grid)}
    assert part.mesh_dim_names is not None
    for axis, stands_for in enumerate(axes):
        for place, rank in itertools.islice(np.ndenumerate(grid), 0, None, 5):
            line = part.ranks_along(axis, int(rank))
            assert line == part.ranks_along(part.mesh_dim_names[axis], int(rank))
            assert rank in line
            assert [(part.coordinate_of(r) or ())[axis] for r in line] == list(range(part.shape[axis]))
            others = [g for g in range(grid.ndim) if g not in stands_for]
            assert all(where[r][g] == place[g] for r in line for g in others)


def test_ranks_need_not_be_consecutive() -> None:
    mesh = named([[10, 3], [7, 0]], "dp", "tp")
    assert [mesh.coordinate_of(rank) for rank in (10, 3, 7, 0, 1)] == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    assert mesh.ranks_along("dp", 0) == [3, 0]
    assert mesh["tp"].ranks_along("tp", 7) == [7, 0]
    assert mesh.flatten(["tp", "dp"]).ranks_along(0, 3) == [10, 7, 3, 0]
    assert repr(mesh) == "DeviceMesh(cpu dp=2 tp=2, ranks [10, 3, 7, 0], virtual)"


def test_a_thousand_ranks_are_kept_as_a_range() -> None:
    mesh = named(np.arange(16384).reshape(128, 128), "dp", "tp")
    assert mesh.grid_ranks == range(16384)
    assert mesh["tp"].ranks_along("tp", 129)[:2] == [128, 129]
    assert mesh.flatten().coordinate_of(16383) == (16383,)


@settings(max_examples=50)
@given(meshes())
def test_axes_by_name_and_number(mesh: DeviceMesh) -> None:
    for axis in range(mesh.ndim):
        assert mesh.axis(axis) == mesh.axis(axis - mesh.ndim) == axis
        if mesh.mesh_dim_names:
            assert mesh.axis(mesh.mesh_dim_names[axis]) == axis
        else:
            assert mesh.axis_name(axis) == str(axis)


# ---------------------------------------------------------------- what depends on my rank


class HostOf:
    """A host that says it is `rank`."""

    name = "virtual"
    many_ranks = True

    def __init__(self, rank: int) -> None:
        self.mine = rank

    def rank(self) -> int:
        return self.mine

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        return ("group", mesh, axes)


@pytest.fixture
def rank_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mesh_module.hosts, "virtual", HostOf(4))


@pytest.mark.usefixtures("rank_four")
def test_a_slice_is_the_one_through_my_rank() -> None:
    mesh = named([[0, 1, 2], [3, 4, 5]], "dp", "tp")
    assert mesh.get_rank() == 4
    assert mesh["tp"].mesh.tolist() == [3, 4, 5]
    assert mesh["dp"].mesh.tolist() == [1, 4]
    assert mesh["tp", "dp"].mesh.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert mesh.flatten(["tp", "dp"]).mesh.tolist() == [0, 3, 1, 4, 2, 5]
    assert (mesh.get_coordinate(), mesh["tp"].get_coordinate()) == ((1, 1), (1,))
    assert (mesh.get_local_rank("dp"), mesh["tp"].get_local_rank()) == (1, 1)
    assert mesh.get_group("tp") == ("group", mesh, (1,))
    assert mesh["tp"].get_group() == ("group", mesh["tp"], (0,))
    assert mesh.get_all_groups() == [("group", mesh, (0,)), ("group", mesh, (1,))]


@pytest.mark.usefixtures("rank_four")
def test_a_mesh_that_my_rank_is_not_in() -> None:
    mesh = named([[0, 1], [2, 3]], "dp", "tp")
    assert mesh.get_coordinate() is None
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(MeshError, match="rank 4 is not in DeviceMesh"):
        mesh.get_local_rank("dp")
    with pytest.raises(MeshError, match="has no slice"):
        _ = mesh["tp"].mesh


@pytest.mark.usefixtures("rank_four")
def test_one_of_several_axes_must_be_said() -> None:
    mesh = named([[0, 1, 4]], "dp", "tp")
    for ask in (mesh.get_group, mesh.get_local_rank):
        with pytest.raises(MeshError, match="has 2 axes\n  hint: pass mesh_dim"):
            ask()


def test_an_unknown_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mesh_module.hosts, "virtual", HostOf(0))
    with pytest.raises(MeshError, match=r"no fabric named 'nowhere'\n  hint: there are .*virtual"):
        DeviceMesh("cpu", [0, 1], fabric="nowhere").get_rank()


def test_the_fabric_is_chosen_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "choose_fabric", [])
    assert DeviceMesh("cpu", [0, 1]).fabric == "virtual"
    monkeypatch.setattr(mesh_module, "choose_fabric", [lambda: "dry"])
    assert DeviceMesh("cpu", [0, 1]).fabric == "dry"
    assert DeviceMesh("cpu", [0, 1], fabric="c10d").fabric == "c10d"


# ---------------------------------------------------------------- how it prints


@pytest.mark.parametrize(
    ("mesh", "shown"),
    [
        (named([0, 1]), "DeviceMesh(cpu 2, virtual)"),
        (named([[0, 1, 2]], "dp", "tp"), "DeviceMesh(cpu dp=1 tp=3, virtual)"),
        (named([[0, 1], [2, 3]], "dp", "tp")["tp"], "DeviceMesh(cpu tp=2 of 4, virtual)"),
        (named([[0, 1], [2, 3]], "dp", "tp").flatten(), "DeviceMesh(cpu dp_tp=4, virtual)"),
        (named([4, 5]), "DeviceMesh(cpu 2, ranks [4, 5], virtual)"),
    ],
)
def test_repr(mesh: DeviceMesh, shown: str) -> None:
    assert repr(mesh) == shown


# ---------------------------------------------------------------- names that are made


def test_a_flattened_axis_has_the_name_asked_for() -> None:
    mesh = named([[0, 1], [2, 3]], "dp", "tp")
    assert mesh.flatten(name="world").mesh_dim_names == ("world",)
    assert mesh.flatten(["tp"], name="model").mesh_dim_names == ("model",)
    assert named([0, 1], "dp").flatten(name="world").mesh_dim_names == ("world",)
    assert named([[0, 1], [2, 3]]).flatten(name="world").mesh_dim_names == ("world",)


def test_an_axis_without_a_name_takes_the_one_asked_for() -> None:
    mesh = named([0, 1]).flatten(name="world")
    assert mesh.mesh_dim_names == ("world",)
    assert mesh.flatten() is mesh["world"] is mesh


def test_numbers_of_axes_are_no_names() -> None:
    assert named([0, 1]).flatten() is named([0, 1])
    assert named(GRID)[0, 1] is named(GRID)
    assert named(GRID).flatten().mesh_dim_names == ("0_1",)


@pytest.mark.parametrize("name", ["a b", "0", "a:b", "a>b", ""])
def test_a_flattened_axis_cannot_have_any_name(name: str) -> None:
    with pytest.raises(MeshError, match="cannot name an axis"):
        named([[0, 1], [2, 3]], "dp", "tp").flatten(name=name)


# ---------------------------------------------------------------- what cannot be a mesh

GRID = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "names", "problem", "hint"),
    [
        ([0, 1, 0], None, "ranks [0] are in the mesh more than once", "name each rank once"),
        ([[5, 2], [2, 5]], None, "ranks [2, 5] are in the mesh more than once", "name each rank once"),
        (GRID, ("dp", "dp"), "axis names repeat in ('dp', 'dp')", "must be different"),
        (GRID, ("dp",), "1 names ('dp',) for a mesh of 2 axes", "one name for each axis"),
        (GRID, ("dp", "tp", "cp"), "3 names ('dp', 'tp', 'cp') for a mesh of 2 axes", "one name for each axis"),
        (GRID, "dp", "1 names ('dp',) for a mesh of 2 axes", "one name for each axis"),
        (GRID, ("dp", "t p"), "'t p' cannot name an axis", "use a word"),
        (GRID, ("dp", "0"), "'0' cannot name an axis", "use a word"),
        (GRID, ("dp", ""), "'' cannot name an axis", "use a word"),
        ([[0, 1], [2]], None, "[[0, 1], [2]] is not a grid of ranks", "rows must have one length"),
        ([[0, 1], 2], None, "[[0, 1], 2] is not a grid of ranks", "rows must have one length"),
        ([], None, "[] is not a grid of ranks", "at least one integer rank"),
        ([[]], None, "[[]] is not a grid of ranks", "at least one integer rank"),
        ([0.0, 1.0], None, "[0.0, 1.0] is not a grid of ranks", "integer rank"),
        ([True, False], None, "[True, False] is not a grid of ranks", "integer rank"),
        (["0", "1"], None, "['0', '1'] is not a grid of ranks", "integer rank"),
        (None, None, "None is not a grid of ranks", "integer rank"),
        (torch.empty(2), None, "is not a grid of ranks", "integer rank"),
        ([-1, 0, 1], None, "got -1", "its number in the world"),
        ([3, -2], None, "got -2", "its number in the world"),
    ],
)
def test_what_is_no_mesh(ranks: Any, names: Any, problem: str, hint: str) -> None:
    with pytest.raises(MeshError) as caught:
        DeviceMesh("cpu", ranks, mesh_dim_names=names, fabric="virtual")
    check_error(caught.value, problem, hint)


@pytest.mark.parametrize(
    ("ask", "problem", "hint"),
    [
        (lambda m: m["pp"], "DeviceMesh(cpu dp=2 tp=2, virtual) has no axis 'pp'", "it has dp, tp"),
        (lambda m: m["dp", "pp"], "has no axis 'pp'", "it has dp, tp"),
        (lambda m: m["tp"]["dp"], "DeviceMesh(cpu tp=2 of 4, virtual) has no axis 'dp'", "it has tp"),
        (lambda m: m.axis(2), "has no axis 2", "it has 2 axes"),
        (lambda m: m.axis(-3), "has no axis -3", "it has 2 axes"),
        (lambda m: m.size("pp"), "has no axis 'pp'", "it has dp, tp"),
        (lambda m: m.ranks_along("pp", 0), "has no axis 'pp'", "it has dp, tp"),
        (lambda m: m[()], "an empty selection of axes", 'mesh["dp"]'),
        (lambda m: m["dp", "dp"], "an axis is named twice in ('dp', 'dp')", "each axis once"),
        (lambda m: m.flatten([]), "cannot flatten the axes []", "each axis once"),
        (lambda m: m.flatten(["dp", 0]), "cannot flatten the axes ['dp', 0]", "each axis once"),
        (lambda m: m.flatten(["pp"]), "has no axis 'pp'", "it has dp, tp"),
        (lambda m: named(GRID)["dp"], "DeviceMesh(cpu 2 2, virtual) has no axis 'dp'", "it has no names"),
    ],
)
def test_what_a_mesh_has_not(ask: Any, problem: str, hint: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask(named(GRID, "dp", "tp"))
    check_error(caught.value, problem, hint)


def check_error(error: MeshError, problem: str, hint: str) -> None:
    assert problem in error.problem
    assert isinstance(error, ValueError)
    assert error.hint is not None
    assert hint in error.hint


# ---------------------------------------------------------------- torch's names for these


@given(any_meshes())
@settings(max_examples=60)
def test_an_axis_split_counts_the_same_ranks(mesh: DeviceMesh) -> None:
    for axis in range(mesh.ndim if mesh.mesh_dim_names is not None or mesh.ndim == 1 else 0):
        size = mesh.shape[axis]
        for first in (n for n in range(1, size + 1) if size % n == 0):
            if common_factors([mesh.grid_shape[g] for g in mesh.axes[axis]], (first, size // first)) is None:
                with pytest.raises(MeshError, match="does not split"):  # it cuts across axes
                    mesh._unflatten(axis, (first, size // first), ("first", "second"))
                continue
            split = mesh._unflatten(axis, (first, size // first), ("first", "second"))
            assert split.shape == (*mesh.shape[:axis], first, size // first, *mesh.shape[axis + 1 :])
            assert split["first", "second"].flatten().shape == (size,)
            for rank in mesh.grid_ranks:
                before, after = mesh.coordinate_of(rank), split.coordinate_of(rank)
                assert before is not None
                assert after is not None
                assert (*after[:axis], after[axis] * (size // first) + after[axis + 1], *after[axis + 2 :]) == before


def test_splitting_a_whole_mesh_gives_the_mesh_of_that_shape() -> None:
    world = named(range(8), "world")
    shape = (1, 2, 1, 4)
    whole = DeviceMesh("cpu", np.arange(8).reshape(shape), mesh_dim_names=("a", "b", "c", "d"), fabric="virtual")
    assert world._unflatten("world", shape, ("a", "b", "c", "d")) is whole
    assert whole._unflatten("d", (2, 2), ("x", "y")).shape == (1, 2, 1, 2, 2)
    assert world._unflatten(0, (2, 4), ("dp", "tp"), backend_override={"dp": "fake"})["tp"].shape == (4,)
    for wrong in ((3, 3), (2, 2), (5, 2)):
        with pytest.raises(MeshError, match="does not split"):
            world._unflatten(0, wrong, ("dp", "tp"))
    with pytest.raises(UnsupportedError, match="backend"):
        world._unflatten(0, (2, 4), ("dp", "tp"), backend_override={"dp": "nccl"})


def test_flattened_axes_are_known_by_their_name() -> None:
    mesh = DeviceMesh("cpu", np.arange(16).reshape(2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"), fabric="virtual")
    data = mesh["a", "b"]._flatten("data")
    assert data is mesh["data"]
    assert data is mesh["a", "b"]._flatten("data")
    assert mesh["data", "d"].shape == (4, 2)
    assert mesh["b", "c"]._flatten().mesh_dim_names == ("b_c",)
    assert mesh["b_c", "d"].shape == (4, 2)
    assert mesh["a"]._flatten("a") is mesh["a"]
    assert mesh["a", "b"]["data"] is data
    for name in ("data", "d"):
        with pytest.raises(MeshError, match="another axis"):
            mesh["c", "d"]._flatten(name)
    for names in (("a", "data"), ("data", "b_c")):
        with pytest.raises(MeshError, match="twice"):
            mesh[names]
    with pytest.raises(MeshError, match="no axis"):
        mesh["c", "d"]["data"]


@given(any_meshes(), any_meshes())
@settings(max_examples=60)
def test_two_meshes_on_one_grid_keep_their_coordinates(first: DeviceMesh, second: DeviceMesh) -> None:
    found = on_one_grid(first, second)
    if found is None:
        return
    assert found[0].root is found[1].root
    for before, after in zip((first, second), found, strict=True):
        assert before.shape == after.shape
        assert (before.coordinates == after.coordinates).all()


def test_a_mesh_is_current_inside_its_with_statement() -> None:
    outer, inner = named(range(4), "dp"), named(range(2), "tp")
    assert current_mesh() is None
    with outer as entered:
        assert entered is outer
        with inner, outer:
            assert current_mesh() is outer
        assert current_mesh() is outer
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert current_mesh() is outer
    assert current_mesh() is None
