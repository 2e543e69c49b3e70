"""Which block of a tensor a coordinate holds, against torch.chunk applied one axis after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardwise.core.layout import (
    Block,
    Cut,
    Division,
    Run,
    chunk,
    dense_strides,
    equal_chunks,
    intersect,
    longest,
    normalize_dim,
    runs_of,
)
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import MaskPartial, Owned, Partial, Ragged, Replicate, Shard, StridedShard, Zigzag
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError
from tests.pure.strategies import LAYOUT_KINDS, composite, shapes, specs

layouts = specs(kinds=LAYOUT_KINDS)
few = settings(max_examples=50)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose elements are their own row-major positions."""
    return torch.arange(math.prod(shape)).reshape(shape)


def coordinates(spec: DTensorSpec) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, spec.mesh.shape))


def indices(block: Block) -> list[torch.Tensor]:
    """For each dim the global indices that the runs of `block` name."""
    return [torch.tensor([i for r in runs for i in range(r.start, r.start + r.length)]).long() for runs in block.runs]


def take(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, index in enumerate(indices(block)):
        tensor = tensor.index_select(dim, index)
    return tensor


def put(tensor: torch.Tensor, block: Block, local: torch.Tensor) -> None:
    if tensor.ndim == 0:
        tensor.copy_(local)
    else:
        tensor[torch.meshgrid(*indices(block), indexing="ij")] = local


# ---------------------------------------------------------------- the oracle: torch.chunk and torch.cat


def chunk_of(tensor: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    """torch.chunk may give fewer chunks than asked for: the missing ones are empty."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def expected_local(tensor: torch.Tensor, spec: DTensorSpec, coordinate: tuple[int, ...]) -> torch.Tensor:
    for dim, axes in spec.shard_order:
        for axis in axes:
            parts, index, placement = spec.mesh.shape[axis], coordinate[axis], spec.placements[axis]
            if isinstance(placement, StridedShard):
                rows = tensor.chunk(placement.split_factor, dim)
                tensor = torch.cat([chunk_of(row, parts, dim, index) for row in rows], dim)
            elif isinstance(placement, Zigzag):
                rows, ends = tensor.chunk(placement.split_factor, dim), (index, 2 * parts - 1 - index)
                tensor = torch.cat([chunk_of(row, 2 * parts, dim, block) for row in rows for block in ends], dim)
            elif isinstance(placement, Ragged):
                blocks, order = tensor.split(placement.sizes, dim), placement.blocks or range(parts)
                each = len(order) // parts
                tensor = torch.cat([blocks[block] for block in sorted(order[index * each : (index + 1) * each])], dim)
            elif isinstance(placement, Owned):
                tensor = tensor if index == placement.rank else tensor.narrow(dim, 0, 0)
            else:
                tensor = chunk_of(tensor, parts, dim, index)
    return tensor


# ---------------------------------------------------------------- properties of every layout


@given(layouts)
def test_blocks_are_nested_chunks(spec: DTensorSpec) -> None:
    whole = numbered(spec.shape)
    for coordinate in coordinates(spec):
        block, expected = spec.block(coordinate), expected_local(whole, spec, coordinate)
        assert block.shape == spec.local_shape(coordinate) == tuple(expected.shape)
        assert torch.equal(take(whole, block), expected)
        assert block.offset == spec.global_offset(coordinate)
        if expected.numel():
            first = int(expected.flatten()[0])
            assert block.offset == tuple(int(i) for i in torch.unravel_index(torch.tensor(first), spec.shape))


@given(layouts)
def test_blocks_tile_the_tensor_once_a_replica(spec: DTensorSpec) -> None:
    held = torch.zeros(spec.shape, dtype=torch.int64)
    for coordinate in coordinates(spec):
        block = spec.block(coordinate)
        put(held, block, take(held, block) + 1)
    replicated = [n for n, p in zip(spec.mesh.shape, spec.placements, strict=True) if isinstance(p, Replicate)]
    assert bool((held == math.prod(replicated)).all())


@few
@given(layouts)
def test_replicas_coincide(spec: DTensorSpec) -> None:
    split = [a for a, p in enumerate(spec.placements) if not isinstance(p, Replicate)]
    seen: dict[tuple[int, ...], Block] = {}
    for coordinate in coordinates(spec):
        block = spec.block(coordinate)
        assert seen.setdefault(tuple(coordinate[a] for a in split), block) == block


@few
@given(layouts)
def test_scattered_and_put_back_is_the_same(spec: DTensorSpec) -> None:
    whole = numbered(spec.shape)
    blocks = {coordinate: spec.block(coordinate) for coordinate in coordinates(spec)}
    locals_ = {coordinate: take(whole, block) for coordinate, block in blocks.items()}
    again = torch.full_like(whole, -1)
    for coordinate, block in blocks.items():
        put(again, block, locals_[coordinate])
    assert torch.equal(again, whole)
    assert all(torch.equal(take(again, block), locals_[coordinate]) for coordinate, block in blocks.items())


@few
@given(layouts)
def test_runs_are_tidy(spec: DTensorSpec) -> None:
    """In ascending disjoint pieces, none touching the next, none empty unless it is the only one."""
    for coordinate in coordinates(spec):
        block = spec.block(coordinate)
        for size, offset, length, runs in zip(spec.shape, block.offset, block.shape, block.runs, strict=True):
            assert runs
            assert offset == (runs[0].start if length else size)
            assert length == sum(run.length for run in runs)
            assert all(0 <= run.start <= run.start + run.length <= size for run in runs)
            assert len(runs) == 1 or all(run.length for run in runs)
            assert all(a.start + a.length < b.start for a, b in itertools.pairwise(runs))


@few
@given(specs(kinds=("replicate", "shard")))
def test_no_plain_block_exceeds_the_largest(spec: DTensorSpec) -> None:
    check_largest(spec)


# 7 is cut into 4 and 3. Three rows of 4 are 2, 2, 0, their first halves 1, 1, 0: two.
# Three rows of 3 are 1, 1, 1, their first halves 1, 1, 1: three.
LATER_IS_LARGER = DTensorSpec(
    DeviceMesh("cpu", [[0, 1], [2, 3]], fabric="virtual"), [Shard(0), StridedShard(0, 3)], TensorMeta((7,))
)


def test_a_later_block_may_be_larger_after_a_strided_cut() -> None:
    assert [LATER_IS_LARGER.local_shape(c) for c in coordinates(LATER_IS_LARGER)] == [(2,), (2,), (3,), (0,)]


@example(LATER_IS_LARGER)
@given(layouts)
def test_no_block_exceeds_the_largest(spec: DTensorSpec) -> None:
    check_largest(spec)


def test_the_largest_is_found_for_each_dim() -> None:
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2), fabric="virtual")
    spec = DTensorSpec(mesh, [Shard(0), StridedShard(0, 3), Shard(1)], TensorMeta((7, 5)))
    assert (spec.largest_local_shape, spec.local_bytes) == ((3, 3), 36)
    assert spec.largest_local_shape is spec.largest_local_shape


def test_the_largest_of_many_ranks_is_found_at_once() -> None:
    mesh = DeviceMesh("cpu", torch.arange(512 * 64).reshape(512, 64), fabric="virtual")
    spec = DTensorSpec(mesh, [Shard(0), StridedShard(0, 4)], TensorMeta((10**6,)))
    runs_of.cache_clear()
    assert spec.largest_local_shape == (32,)
    assert runs_of.cache_info().misses < 1000


def check_largest(spec: DTensorSpec) -> None:
    local_shapes = [spec.local_shape(coordinate) for coordinate in coordinates(spec)]
    assert all(n <= most for shape in local_shapes for n, most in zip(shape, spec.largest_local_shape, strict=True))
    assert spec.local_bytes == max(map(math.prod, local_shapes)) * spec.tensor_meta.dtype.itemsize


@pytest.mark.parametrize("coordinate", [(), (0,), (0, 0, 0), (2, 0), (0, -1), (7, 7)])
def test_coordinates_that_are_not_there(coordinate: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="has no coordinate") as caught:
        LATER_IS_LARGER.block(coordinate)
    assert caught.value.hint == "one number for each axis, less than the axis's size: (2, 2)"


def test_coordinates_of_numpy() -> None:
    spec = DTensorSpec(LATER_IS_LARGER.mesh, [Shard(0), Shard(0)], TensorMeta((13,)))
    block = spec.block(np.array([1, 1]))
    assert block is spec.block((1, 1))
    assert type(block.offset[0]) is type(block.shape[0]) is int


def test_partial_axes_hold_the_whole() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    spec = DTensorSpec(mesh, [Partial(), MaskPartial()], TensorMeta((3, 5)))
    assert {spec.block(c) for c in coordinates(spec)} == {Block((3, 5), (0, 0), ((Run(0, 3),), (Run(0, 5),)))}


# ---------------------------------------------------------------- the arithmetic underneath


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    whole = torch.arange(size)
    for index in range(parts):
        start, length = chunk(size, parts, index)
        assert torch.equal(whole.narrow(0, start, length), chunk_of(whole, parts, 0, index))


@given(st.integers(0, 60), st.lists(st.integers(1, 5), max_size=3))
def test_equal_chunks_are_nested_chunks_of_torch(size: int, parts: list[int]) -> None:
    found: dict[tuple[int, ...], list[int]] = {}
    for levels, length in equal_chunks(size, parts):
        for index in itertools.product(*[range(level.first, level.first + level.count) for level in levels]):
            places = zip(index, levels, strict=True)
            start = sum(level.start + (at - level.first) * level.extent for at, level in places)
            found[index] = list(range(start, start + length))
    expected: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(size)}
    for count in parts:
        expected = {(*at, i): each for at, t in expected.items() for i, each in enumerate(t.chunk(count))}
    assert found == {at: each.tolist() for at, each in expected.items() if each.numel()}


@composite
def divisions(draw: DrawFn) -> Division:
    """Ordinary divisions, by rows, and by permutations of one to three blocks for each part."""
    parts = draw(st.integers(1, 4))
    rows = draw(st.none() | st.integers(1, 4))
    if rows is None or draw(st.booleans()):
        return Division(parts, rows)
    return Division(parts, rows, tuple(draw(st.permutations(range(parts * draw(st.integers(1, 3)))))))


@composite
def nested_cuts(draw: DrawFn) -> tuple[Cut, ...]:
    """Up to three cuts, major first."""
    found = draw(st.lists(divisions(), max_size=3))
    return tuple(Cut(d.parts, draw(st.integers(0, d.parts - 1)), d.rows, d.blocks) for d in found)


cuts = nested_cuts()


@few
@given(st.integers(0, 30), cuts, cuts)
def test_intersect_finds_the_common_indices(size: int, cuts_a: tuple[Cut, ...], cuts_b: tuple[Cut, ...]) -> None:
    a, b = runs_of(size, cuts_a), runs_of(size, cuts_b)
    list_a, list_b = ([i for r in runs for i in range(r.start, r.start + r.length)] for runs in (a, b))
    pieces = intersect(a, b)
    found = [(at_a + i, at_b + i) for at_a, at_b, length in pieces for i in range(length)]
    assert sorted(found) == sorted((list_a.index(i), list_b.index(i)) for i in set(list_a) & set(list_b))
    assert all(length for *_, length in pieces)


@given(st.integers(0, 40), st.lists(divisions(), max_size=3))
def test_the_longest_part_is_the_longest_of_all(size: int, splits: list[Division]) -> None:
    choices = itertools.product(*(range(split.parts) for split in splits))
    cuts = [tuple(Cut(n, at, *how) for (n, *how), at in zip(splits, chosen, strict=True)) for chosen in choices]
    assert longest(size, splits) == max(sum(run.length for run in runs_of(size, each)) for each in cuts)


@given(shapes())
def test_dense_strides_are_torch_strides(shape: tuple[int, ...]) -> None:
    assert dense_strides(shape) == torch.empty(shape).stride()


@given(st.lists(st.integers(2, 5), max_size=4).flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))))
def test_dense_strides_keep_the_order_of_dims(case: tuple[list[int], list[int]]) -> None:
    shape, order = case
    tensor = torch.empty(shape).permute(order)
    assert dense_strides(tensor.shape, like=tensor.stride()) == tensor.stride()


def test_local_stride_follows_the_global_tensor() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    transposed = torch.empty(4, 7).t()
    spec = DTensorSpec(mesh, [Shard(0)], TensorMeta.of(transposed))
    assert [spec.local_stride((i,)) for i in range(3)] == [(1, 3), (1, 3), (1, 1)]
    assert spec.local_shape((2,)) == (1, 4)


@given(st.integers(-6, 6), st.integers(0, 4))
def test_normalize_dim_is_indexing(dim: int, ndim: int) -> None:
    try:
        expected = list(range(ndim))[dim]
    except IndexError:
        expected = None
    assert normalize_dim(dim, ndim) == expected
