"""Masks of dropout and biases of attention, tile by tile, against the mask of one device."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.counting import calls
from shardwise.rng import dropout_tiles
from shardwise.rng.dropout_tiles import DropoutMask, MaskTile, _runs
from shardwise.rules.attention_blocks import ScoreTile
from shardwise.rules.dropout_blocks import DropoutFunctions
from shardwise.rules.flex_blocks import Positions

SHAPE = (2, 3, 10, 7)  # samples, heads, queries, keys


def one_device(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape).bernoulli_(0.5, generator=torch.Generator().manual_seed(5)).bool()


@given(
    st.lists(st.integers(0, 9), min_size=1, unique=True),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6), st.integers(1, 7)), max_size=3),
)
def test_tiles_are_parts_of_the_mask_of_one_device(rows: list[int], found: list[tuple[int, ...]]) -> None:
    clipped = [(min(row, len(rows)), count, first, columns) for row, count, first, columns in found]
    tiles = [MaskTile(r, min(n, len(rows) - r), first, min(columns, 7 - first)) for r, n, first, columns in clipped]
    mask, expected = DropoutMask(SHAPE, 0.5, torch.Generator().manual_seed(5)), one_device(SHAPE)
    for tile, part in zip(tiles, mask.parts([1], [0, 2], rows, tiles), strict=True):
        queries = rows[tile.row : tile.row + tile.rows]
        columns = slice(tile.first, tile.first + tile.columns)
        assert torch.equal(part, expected[1:2][:, [0, 2]][:, :, queries][..., columns])


@given(st.lists(st.integers(0, 1), min_size=1, unique=True), st.lists(st.integers(0, 39), min_size=1, unique=True))
def test_a_rank_stores_the_states_of_its_own_rows(samples: list[int], rows: list[int]) -> None:
    """They are computed by jumps, in any order, and the generator ends where one device's does."""
    shape, generator, plain = (2, 3, 40, 17), torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    expected = torch.empty(shape).bernoulli_(0.3, generator=plain).bool()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dropout_tiles, "JUMP", 400)  # 12 rows of a sample and head
        mask = DropoutMask(shape, 0.3, generator)
    assert torch.equal(generator.get_state(), plain.get_state())
    assert not mask.states
    for _ in range(2):
        (part,) = mask.parts(samples, [2, 0], rows, [MaskTile(0, len(rows), 5, 11)])
        assert torch.equal(part, expected[samples][:, [2, 0]][:, :, rows][..., 5:16])
    steps = {row // mask.step for row in rows}
    assert len(mask.states) <= 2 * len(samples) * len(steps)
    assert {plane // 3 for plane, _ in mask.states} == set(samples)


def test_a_large_mask_takes_as_many_calls_for_more_samples() -> None:
    """Samples of other ranks cost nothing; the polynomials of jumps are computed at the first use."""

    def draw(samples: int) -> None:
        mask = DropoutMask((samples, 2, 512, 512), 0.5, torch.Generator())
        mask.parts([samples // 2], [0, 1], [64, 65], [MaskTile(0, 2, 0, 512)])

    counts = []
    for samples in (8, 512):
        draw(samples)
        counts.append(calls(lambda: draw(samples), of_c=True))  # noqa: B023
    assert counts[1] <= counts[0] + 10


@pytest.mark.parametrize("planes", [1, 3, 100, 700, 1024, 2000])
def test_stored_states_are_bounded(planes: int) -> None:
    """At most 1,024, unless there are more samples and heads, and at most 16 of each of these."""
    mask = DropoutMask((1, planes, 64, 2), 0.5, torch.Generator())
    assert len(mask.states) <= max(planes, dropout_tiles.MOST_STATES)
    assert len(mask.states) <= planes * dropout_tiles.OF_EACH
    assert len(mask.states) >= min(planes * dropout_tiles.OF_EACH, dropout_tiles.MOST_STATES) // 2


def test_rows_are_drawn_in_runs() -> None:
    assert _runs([(3, 0), (4, 1), (5, 3), (8, 4), (9, 5)]) == [(3, 0, 2), (5, 3, 1), (8, 4, 2)]


@pytest.mark.parametrize("sizes", list(itertools.product(*((1, n) for n in SHAPE))))
def test_a_bias_of_any_broadcast_shape_is_that_of_its_positions(sizes: tuple[int, ...]) -> None:
    """Rows of the bias of some samples, heads, queries and keys, relative to their largest; also with fewer dims."""
    bias = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    samples, heads, queries, keys = (torch.tensor(x) for x in ([1], [0, 2], [9, 3], [2, 4, 6]))
    expected = (bias - bias.amax(-1, keepdim=True)).expand(SHAPE)[samples][:, heads][:, :, queries][..., keys]
    products = torch.zeros(1, 2, 2, 3)
    while True:
        made = DropoutFunctions(max, None, max, bias=bias).modified(products, (samples, heads, queries, keys))
        assert torch.equal(made.expand(expected.shape), expected)
        if bias.dim() == 2 or bias.shape[0] > 1:
            return
        bias = bias[0]


def test_only_the_tiles_being_computed_are_stored() -> None:
    functions = DropoutFunctions(max, None, max, dropout=DropoutMask(SHAPE, 0.5, torch.Generator()), keep=0.5)
    positions = Positions(torch.tensor([0]), torch.tensor([0]), torch.arange(10))
    for row in (0, 5):
        tile = ScoreTile(row, 5, 0, 7, False, 0)
        functions.begin([tile], positions)
        assert list(functions.current) == [tile]
