"""Layouts written and read: the printed form reads back as the same object, and errors point at the character."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_axes, parse_meta, parse_spec
from shardwise.core.placement import Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import NotationError
from tests.pure.strategies import dtypes, shapes, specs

MESH = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="virtual")
UNNAMED = DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual")
META = TensorMeta((8, 32))


# ---------------------------------------------------------------- there and back


@given(st.lists(st.integers(1, 31), min_size=1, max_size=4))
def test_axes_read_back(sizes: list[int]) -> None:
    names = tuple("abcd"[: len(sizes)])
    assert parse_axes("x".join(map(str, sizes))) == (tuple(sizes), None)
    assert parse_axes(", ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))) == (tuple(sizes), names)


@given(specs(dtype=dtypes()))
def test_what_is_printed_reads_back(spec: DTensorSpec) -> None:
    assert parse_spec(repr(spec), spec.mesh) is spec
    assert parse_spec(spec.layout, spec.mesh, meta=spec.tensor_meta) is spec


@settings(max_examples=50)
@given(specs(dtype=dtypes()), st.text(" \t", max_size=3), st.integers(1, 3))
def test_white_space_does_not_matter(spec: DTensorSpec, before: str, between: int) -> None:
    text = before + repr(spec).replace(" ", " " * between) + before
    assert parse_spec(text, spec.mesh) is spec


@settings(max_examples=50)
@given(specs(), st.text("ab:[ ", max_size=5))
def test_reading_may_begin_later(spec: DTensorSpec, before: str) -> None:
    assert parse_spec(before + repr(spec), spec.mesh, start=len(before)) is spec


@given(shapes(), dtypes())
def test_metas_read_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    meta = TensorMeta(shape, dtype=dtype)
    assert parse_meta(repr(meta)) is meta


@pytest.mark.parametrize("dtype", sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
def test_metas_of_every_dtype_read_back(dtype: torch.dtype) -> None:
    meta = TensorMeta((2, 3), dtype=dtype)
    assert parse_meta(repr(meta)) is meta
    assert parse_meta(f"{str(dtype).removeprefix('torch.')}[2,3]") is meta


def test_a_part_of_a_mesh_without_names_reads_back() -> None:
    part = UNNAMED.flatten([1])
    spec = DTensorSpec(part, [Shard(0)], META)
    assert parse_spec(repr(spec), part) is spec
    assert parse_spec("f32[8,32] 0:S0", part) is spec


@pytest.mark.parametrize(
    ("text", "mesh", "same_as"),
    [
        ("f32[8,32]", MESH, "f32[8,32] dp:R tp:R"),
        ("f32[8,32] tp:S1", MESH, "f32[8,32] dp:R tp:S1"),
        ("f32[8,32] tp:S1 dp:P", MESH, "f32[8,32] dp:P tp:S1"),
        ("f32[ 8 , 32 ]   dp:S0", MESH, "f32[8,32] dp:S0 tp:R"),
        ("f32[8,32] S0 R", MESH, "f32[8,32] dp:S0 tp:R"),
        ("f32[8,32] S0", UNNAMED, "f32[8,32] S0 R"),
        ("f32[8,32] 1:S0", UNNAMED, "f32[8,32] R S0"),
        ("f32[8,32] dp:S-1", MESH, "f32[8,32] dp:S1 tp:R"),
        ("f32[8,32] dp:P(sum) tp:P()", MESH, "f32[8,32] dp:P tp:P"),
        ("f32[8,32] dp:S0 tp:S0 order 0:dp>tp", MESH, "f32[8,32] dp:S0 tp:S0"),
        ("f32[8,32] dp:S0 tp:S0 order 0:1>0", MESH, "f32[8,32] dp:S0 tp:S0 order 0:tp>dp"),
        ("f32[] dp:P(max)", MESH, "f32[] dp:P(max) tp:R"),
        ("f32[0] dp:S0/3", MESH, "f32[0] dp:S0/3 tp:R"),
    ],
)
def test_other_ways_to_write_it(text: str, mesh: DeviceMesh, same_as: str) -> None:
    assert repr(parse_spec(text, mesh)) == same_as


def test_the_text_wins_over_the_meta_given() -> None:
    assert repr(parse_spec("i64[3] dp:S0", MESH, meta=META)) == "i64[3] dp:S0 tp:R"


# ---------------------------------------------------------------- errors point at the character


def column_of(error: NotationError) -> int:
    """The position of the caret in the given text."""
    (caret,) = [line for line in error.problem.split("\n") if line.strip() == "^"]
    return caret.index("^") - 2


# in each text a ! precedes the character that the error must point at
POINTED = [
    ("!", "expected a dtype and sizes"),
    ("  !", "expected a dtype and sizes"),
    ("!dp:S0", "expected a dtype and sizes"),
    ("!f32", "expected a dtype and sizes"),
    ("!f32[8", "expected a dtype and sizes"),
    ("  !F32[8]", "expected a dtype and sizes"),
    ("!q32[8] dp:S0", "unknown dtype 'q32'"),
    ("  !q32[8] dp:S0", "unknown dtype 'q32'"),
    ("f32[8,!x]", "expected a size, found 'x'"),
    ("f32[8, !x]", "expected a size, found 'x'"),
    ("f32[!-8]", "expected a size, found '-8'"),
    ("f32[8,!]", "expected a size, found ''"),
    ("f32[8,!,3]", "expected a size, found ''"),
    ("f32[!8.5,3]", "expected a size, found '8.5'"),
    ("f32[8,32] !pp:S0", "the mesh has no axis 'pp'"),
    ("f32[8,32] dp:R !pp:S0", "the mesh has no axis 'pp'"),
    ("f32[8,32] !2:S0", "the mesh has no axis '2'"),
    ("f32[8,32] !:S0", "the mesh has no axis ''"),
    ("f32[8,32] dp:!Q", "expected a placement, found 'Q'"),
    ("f32[8,32] dp:S0 tp:!Q", "expected a placement, found 'Q'"),
    ("f32[8,32] dp:!", "expected a placement, found ''"),
    ("f32[8,32] dp:!S", "expected a placement, found 'S'"),
    ("f32[8,32] dp:!s0", "expected a placement, found 's0'"),
    ("f32[8,32] dp:!S0/", "expected a placement, found 'S0/'"),
    ("f32[8,32] dp:!S0/2/2", "expected a placement"),
    ("f32[8,32] dp:!S(0)", "expected a placement"),
    ("f32[8,32] dp:!O0(0,1)", "expected a placement"),
    ("f32[8,32] dp:!Z", "expected a placement, found 'Z'"),
    ("f32[8,32] dp:!Z0(0,2)", "each block once"),
    ("f32[8,32] dp:!Z0/0", "split_factor of at least 1"),
    ("f32[8,32] dp:!R1", "expected a placement"),
    ("f32[8,32] dp:!R(sum)", "expected a placement"),
    ("f32[8,32] dp:!M(sum)", "expected a placement"),
    ("f32[8,32] dp:!P1", "expected a placement"),
    ("f32[8,32] dp:!P(max", "expected a placement"),
    ("f32[8,32] tp:!P(mean)", "unknown reduction"),
    ("f32[8,32] tp:!S0/0", "split_factor of at least 1"),
    ("f32[8,32] !what", "expected a placement, found 'what'"),
    ("f32[8,32] dp:R !dp:S0", "axis dp is named twice"),
    ("f32[8,32] R S0 !R", "more placements than the mesh has axes (2)"),
    ("f32[8,32] dp:S0 order !tp>dp", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order !0:", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order !x:dp", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order !-1:dp", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order 0:!pp", "the mesh has no axis 'pp'"),
    ("f32[8,32] dp:S0 tp:S0 order 0:!pp>dp", "the mesh has no axis 'pp'"),
    ("f32[8,32] dp:S0 tp:S0 order 0:dp>!pp", "the mesh has no axis 'pp'"),
    ("f32[8,32] dp:S0 tp:S0 order 0:dp>!>tp", "the mesh has no axis ''"),
    ("f32[8,32] dp:S0 tp:!S5", "Shard(5) on axis 'tp'"),
    ("f32[] dp:R tp:!S0", "a 0-d tensor has no dims"),
    ("f32[8,32] dp:S0 tp:!S-3/2", "StridedShard(-3, split_factor=2) on axis 'tp'"),
    ("f32[8,32] dp:S0 tp:S0 order !0:tp", "the shard order says"),
    ("f32[8,32] dp:S0 tp:S1 order 0:dp !1:dp", "the shard order says that dim 1"),
    ("f32[8,32] dp:S0 tp:S0 order !2:tp>dp", "the tensor has dims 0 to 1"),
    ("f32[8,32] dp:S0 tp:S0 order 0:tp>dp !0:tp>dp", "dim 0 is ordered twice"),
    ("f32[8,32] dp:S0 tp:S0 order 0:tp>dp order !00:dp>tp", "dim 0 is ordered twice"),
    ("f32[8,32] dp:S0 order!", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order !order 0:dp", "expected dim:axis>axis"),
    ("f32[8,32] dp:S0 order 0:dp order!", "expected dim:axis>axis"),
    ("f32[8,32] dp:!S0:1", "expected a placement, found 'S0:1'"),
    (f"f32[!{10**18}]", "expected a size"),
    (f"f32[!{'9' * 5000}]", "expected a size"),
    (f"f32[8] !{'9' * 5000}:S0", "the mesh has no axis"),
    (f"f32[8] dp:!S{'9' * 5000}", "expected a placement"),
    (f"f32[8] dp:!S0/{'9' * 5000}", "expected a placement"),
    (f"f32[8] dp:S0 order !{'9' * 5000}:dp", "expected dim:axis>axis"),
]


@pytest.mark.parametrize(("marked", "problem"), POINTED)
def test_errors_point_at_the_character(marked: str, problem: str) -> None:
    text = marked.replace("!", "")
    with pytest.raises(NotationError) as caught:
        parse_spec(text, MESH)
    assert caught.value.problem.startswith(problem) or problem in caught.value.problem.split("\n")[0]
    assert f"\n  {text}\n" in caught.value.problem
    assert column_of(caught.value) == marked.index("!")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("marked", "problem"), POINTED[4:12] + POINTED[14:])
def test_errors_point_into_the_whole_text(marked: str, problem: str) -> None:
    text = "add: " + marked.replace("!", "")
    with pytest.raises(NotationError) as caught:
        parse_spec(text, MESH, start=5)
    assert f"\n  {text}\n" in caught.value.problem
    assert column_of(caught.value) == marked.index("!") + 5


def test_layouts_that_do_not_fit_are_notation_errors_too() -> None:
    for text in ("dp:S5", "dp:P tp:P(max)", "dp:S0 order 0:tp", "dp:S0 tp:S0 order 0:tp"):
        with pytest.raises(NotationError) as caught:
            parse_spec(text, MESH, meta=META)
        assert caught.value.hint is not None


@pytest.mark.parametrize("text", ["f32[²] dp:R", "f32[8] ²:S0", "f32[8] dp:S0 order ²:dp", "f32[8] dp:S0 order 0:²"])
def test_digits_that_are_no_numbers(text: str) -> None:
    with pytest.raises(NotationError):
        parse_spec(text, MESH)


@given(st.text("f32[,] dptR:S0/1-P(max)>order\n", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    for given_meta in (None, META):
        with contextlib.suppress(NotationError):
            parse_spec(text, MESH, meta=given_meta)
