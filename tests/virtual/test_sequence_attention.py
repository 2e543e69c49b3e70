"""Attention over a sharded sequence: every algorithm against one device, its bytes and memory, and the choice."""

import copy
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.plan.propagate import OpSchema
from shardwise.plan.sequence_attention import choose_attention
from shardwise.rules import mask_reach
from shardwise.rules.attention_blocks import tiles
from shardwise.rules.mask_reach import Reach, reach_of, reach_of_function
from tests import sequence_attention as sequences
from tests.sequence_attention import (
    LAYOUTS,
    LENGTHS,
    MASKS,
    OPTIONS,
    S0,
    S1,
    S2,
    Z2,
    ZIGZAGS,
    R,
    assert_close,
    case,
    on_mesh,
    on_one_device,
)
from tests.transformer import Transformer, assert_trains_as_one_device, batch, shard_all
from tests.virtual import attention_table

WAYS = ("ring", "gather", "heads")


@pytest.mark.parametrize("mask", MASKS)
def test_as_on_one_device(mask: str) -> None:
    """A part of the table, with all algorithms, options, lengths and layouts for each mask."""
    chosen = [row for row in attention_table.rows() if row.mask == mask][::59]
    for field, every in (("way", attention_table.WAYS), ("option", OPTIONS), ("lengths", LENGTHS)):
        assert {getattr(row, field) for row in chosen} == set(every)
    assert {(row.shape, row.placements) for row in chosen} == {*LAYOUTS, *ZIGZAGS}
    _, wrong = attention_table.sweep(chosen)
    assert wrong == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", ["none", "causal", "float"])
def test_float32(mask: str, way: str) -> None:
    given = case(mask, (37, 37), torch.float32)
    assert_close(on_mesh(given, sw.init_device_mesh("cpu", (4,)), [S2], way), on_one_device(given))


@pytest.mark.parametrize("placement", [S2, Z2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9])
def test_rows_hidden_by_a_large_number_count_all_their_keys_alike(fill: float, dropout: float, placement: Any) -> None:
    """The logarithm of a sum of exponentials is lost beside such a number; blocks have different numbers of keys."""
    torch.manual_seed(0)
    mask = torch.zeros(9, 9).masked_fill_(torch.ones(9, 9).triu(1).bool(), fill)
    mask[3], mask[5], mask[6] = fill, -torch.inf, -torch.inf
    mask[5, 2:] = fill
    mask[6, 0] = 0.0
    plain = [torch.randn(2, 2, 9, 4) for _ in range(3)]

    def run(tensors: list[Any], given: Any) -> list[Any]:
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(*tensors, attn_mask=given, dropout_p=dropout)
        return [out, *torch.autograd.grad((out * out.sin()).sum(), tensors)]

    wanted = run([x.clone().requires_grad_() for x in plain], mask)
    mesh = sw.init_device_mesh("cpu", (4,))
    for way in WAYS:
        with sw.attention(prefer=way):
            got = run([sw.distribute_tensor(x, mesh, [placement]).requires_grad_() for x in plain], mask)
        assert_close(got, wanted)


def test_keys_of_one_head_expanded_to_all_with_uneven_shards() -> None:
    """The locals of broadcast heads are copied for kernels, also if their lengths differ."""
    torch.manual_seed(0)
    plain = [torch.randn(2, heads, 6, 4, dtype=torch.float64) for heads in (4, 1, 1)]

    def run(tensors: list[Any]) -> list[Any]:
        query, key, value = tensors
        out = F.scaled_dot_product_attention(query, key.expand(2, 4, 6, 4), value.expand(2, 4, 6, 4), is_causal=True)
        return [out, *torch.autograd.grad((out * out.sin()).sum(), tensors)]

    wanted = run([x.clone().requires_grad_() for x in plain])
    mesh = sw.init_device_mesh("cpu", (4,))
    for way in WAYS:
        with sw.attention(prefer=way):
            assert_close(run([sw.distribute_tensor(x, mesh, [S2]).requires_grad_() for x in plain]), wanted)


def test_half_precision_is_merged_in_float32() -> None:
    """As far from float32 as one device is, and no further."""
    wide = case("causal", (64, 64), torch.float32)
    half = wide._replace(tensors=tuple(x.bfloat16() for x in wide.tensors))
    exact = on_one_device(wide._replace(tensors=tuple(x.float() for x in half.tensors)))
    one, many = on_one_device(half), on_mesh(half, sw.init_device_mesh("cpu", (4,)), [S2], "ring")
    for mine, theirs, truth in zip(many, one, exact, strict=True):
        assert mine.dtype is torch.bfloat16
        error, allowed = ((x.float() - truth).abs().max() for x in (mine.full_tensor(), theirs))
        assert error <= 2 * allowed


@pytest.mark.parametrize("way", WAYS)
def test_masks_in_any_layout(way: str) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for name, layouts in {"float": ([S0], [S1]), "boolean": ([S2], [sw.Shard(3)], [S0])}.items():
        given = case(name, (9, 8))
        for mask in layouts:
            assert_close(on_mesh(given, mesh, [S2], way, mask), on_one_device(given))


@pytest.mark.parametrize("way", WAYS)
def test_queries_and_keys_laid_out_differently(way: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    given = case("causal", (12, 12))
    wanted = on_one_device(given)
    for layouts in (
        ([S2, S2], [S2, R]),
        ([S2, R], [R, S2]),
        ([R, R], [S2, S2]),
        ([S2, S2], [R, R]),
        ([S1, S2], [S2, S1]),
    ):
        q, k, v, g = (sw.distribute_tensor(x, mesh, layouts[i in (1, 2)]) for i, x in enumerate(given.tensors))
        with sw.attention(prefer=way):
            got = sequences.attend(given, (q, k, v), None, g)
        assert_close(got, wanted)


def test_a_gradient_that_is_constant() -> None:
    given = case("causal", (10, 10))
    leaves = [x.clone().requires_grad_() for x in given.tensors[:3]]
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True).sum(), leaves)
    mesh = sw.init_device_mesh("cpu", (4,))
    laid = [sw.distribute_tensor(x, mesh, [S2]).requires_grad_() for x in given.tensors[:3]]
    for way in WAYS:
        with sw.attention(prefer=way):
            total = F.scaled_dot_product_attention(*laid, is_causal=True).sum()
            assert_close(list(torch.autograd.grad(total, laid)), list(wanted))


def test_lower_right_causal_mask() -> None:
    from torch.nn.attention.bias import causal_lower_right

    given = case("none", (6, 10))
    mask = torch.ones(6, 10, dtype=torch.bool).tril(4)
    wanted = on_one_device(given._replace(mask=mask))
    mesh = sw.init_device_mesh("cpu", (4,))
    laid = [sw.distribute_tensor(x, mesh, [S2]) for x in given.tensors]
    with sw.attention(prefer="ring"):
        got = sequences.attend(given, laid[:3], causal_lower_right(6, 10), laid[3])
    assert_close(got, wanted)


# ---------------------------------------------------------------- bytes and memory


def test_a_ring_receives_keys_and_values_once_and_their_gradients_once() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("none", (16, 16), torch.float32)
    local = 2 * 4 * 4 * 8 * 4  # bytes of a block of keys
    laid = [sw.distribute_tensor(x, mesh, [S2]).requires_grad_() for x in given.tensors]
    with sw.attention(prefer="ring"):
        out, calls, received = sequences.counted(lambda: F.scaled_dot_product_attention(*laid[:3]))
        assert (calls, received) == (3, 3 * 2 * local)
        grads, calls, received = sequences.counted(lambda: torch.autograd.grad(out, laid[:3], laid[3].detach()))
        assert (calls, received) == (6, 3 * 4 * local)
    assert [x.placements for x in grads] == [(S2,)] * 3


def test_keys_that_no_query_attends_to_are_not_sent() -> None:
    """Five queries attend to the first five keys alone."""
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("causal", (2, 16))
    laid = [sw.distribute_tensor(x, mesh, [S2]) for x in given.tensors]
    with sw.attention(prefer="ring"):
        _, calls, _ = sequences.counted(lambda: F.scaled_dot_product_attention(*laid[:3], is_causal=True))
    assert calls == 1


def test_queries_beside_whole_keys_need_nothing_under_a_causal_mask() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("causal", (16, 16))
    layouts = [S2], [R], [R]
    q, k, v = (sw.distribute_tensor(x, mesh, p) for x, p in zip(given.tensors[:3], layouts, strict=True))
    out, calls, _ = sequences.counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert (out.placements, calls) == ((S2,), 0)
    assert_close([out], on_one_device(given)[:1])


def _dry(ranks: int, way: str, local: int = 64) -> Any:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (ranks,))
        shape, dtype = (1, 8, local * ranks, 32), torch.bfloat16
        q, k, v = (sw.zeros(*shape, dtype=dtype, device_mesh=mesh, placements=[S2]).requires_grad_() for _ in "qkv")
        with sw.attention(prefer=way):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return run


def test_memory_of_a_ring_does_not_grow_with_the_ranks() -> None:
    runs = {ranks: _dry(ranks, "ring") for ranks in (8, 64, 512)}
    peaks = {run.peak_bytes for run in runs.values()}
    assert len(peaks) == 1
    block = 8 * 64 * 32 * 2
    for ranks, run in runs.items():
        assert run.bytes == (ranks - 1) * 6 * block  # keys and values in each pass, and their gradients
        assert run.collectives["all_to_all"] == 3 * (ranks - 1)
    assert _dry(64, "gather").peak_bytes > 4 * runs[64].peak_bytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [S2, Z2], ids=repr)
@pytest.mark.parametrize(("keys", "ranks"), [(10, 4), (9, 4), (5, 7), (16, 4)])
def test_a_dry_run_of_a_mask_over_uneven_keys(keys: int, ranks: int, layout: sw.Placement, way: str) -> None:
    for dropout in (0.0, 0.5):
        with sw.dry_run(), sw.attention(prefer=way):
            mesh = sw.init_device_mesh("cpu", (ranks,))
            q, k, v = (
                sw.zeros(1, 4, length, 8, device_mesh=mesh, placements=[layout]).requires_grad_()
                for length in (3, keys, keys)
            )
            mask = sw.zeros(3, keys, device_mesh=mesh, placements=[R])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


# ---------------------------------------------------------------- which way


def _way(shape: tuple[int, ...], ranks: int, prefer: str | None = None) -> tuple[str, str]:
    """The algorithm of a call, and its text in `explain`."""
    mesh = sw.init_device_mesh("cpu", (ranks,))
    q = sw.zeros(*shape, device_mesh=mesh, placements=[S2])
    with sw.explain() as report:
        if prefer is None:
            F.scaled_dot_product_attention(q, q, q)
        else:
            with sw.attention(prefer=prefer):
                F.scaled_dot_product_attention(q, q, q)
    (record,) = [r for r in report.records if "attention" in r.name]
    return record.way, record.rule


def test_the_cheapest_way_is_taken() -> None:
    assert _way((1, 8, 4096, 16), 4)[0] == "heads"  # a quarter of the bytes
    assert _way((1, 2, 4096, 16), 4)[0] == "ring"  # two heads are too few
    assert _way((1, 2, 16, 16), 8)[0] == "gather"  # so little that two collectives are faster than seven


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_does_not_grow_with_the_ranks_by_default(device: str) -> None:
    def peak(ranks: int) -> int:
        with sw.dry_run() as run:
            mesh = sw.init_device_mesh(device, (ranks,))
            make = {"device_mesh": mesh, "placements": [S2], "dtype": torch.bfloat16, "requires_grad": True}
            q, k, v = (sw.zeros(1, 2, 64 * ranks, 16, **make) for _ in range(3))
            F.scaled_dot_product_attention(q, k, v, is_causal=True).mean().backward()
        return run.peak_bytes

    assert peak(512) == peak(64) <= peak(8)


def test_explain_says_which_way_and_why() -> None:
    way, rule = _way((1, 8, 4096, 16), 4, "ring")
    assert way == "ring"
    assert "ring was asked for" in rule
    assert "heads" in rule
    way, rule = _way((1, 2, 4096, 16), 4, "heads")
    assert way == "ring"
    assert "heads is not possible" in rule


def test_a_way_is_known_again() -> None:
    """The preference is looked at in each call, warm ones too."""
    mesh = sw.init_device_mesh("cpu", (4,))
    q = sw.zeros(1, 8, 16, 4, device_mesh=mesh, placements=[S2])

    def calls() -> int:
        return sequences.counted(lambda: F.scaled_dot_product_attention(q, q, q))[1]

    for _ in range(2):
        for way, count in {"ring": 3, "gather": 2, "heads": 4}.items():
            with sw.attention(prefer=way):
                assert calls() == count


def test_strict_mode_refuses_every_way() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    q = sw.zeros(1, 8, 16, 4, device_mesh=mesh, placements=[S2])
    for way in WAYS:
        with sw.attention(prefer=way), sw.strict(), pytest.raises(sw.ImplicitCommunicationError):
            F.scaled_dot_product_attention(q, q, q)


def test_a_bound_on_memory_is_kept() -> None:
    """Two blocks of a ring, twice as many in the backward; a gather holds seven. Heads are too few."""
    mesh = sw.init_device_mesh("cpu", (8,))
    plain = torch.randn(1, 2, 64, 16)
    block = 2 * 2 * 8 * 16 * 4  # keys and values of a rank

    def ways(**options: Any) -> tuple[list[str], str]:
        q = sw.distribute_tensor(plain, mesh, [S2]).requires_grad_()
        with sw.attention(**options), sw.explain() as report:
            F.scaled_dot_product_attention(q, q, q).sum().backward()
        found = [record for record in report.records if "flash" in record.name]
        return [record.way for record in found], found[0].rule

    assert ways(prefer="gather") == (["gather", "gather"], ways(prefer="gather")[1])
    assert ways(prefer="gather", max_bytes=7 * block)[0] == ["gather", "ring"]  # the backward holds gradients as well
    taken, why = ways(prefer="gather", max_bytes=4 * block)
    assert taken == ["ring", "ring"]
    assert "gather holds too much" in why
    assert "at most" in ways(max_bytes=5 * block)[1]
    with sw.attention(max_bytes=2 * block), sw.attention(prefer="gather"), sw.explain() as report:
        q = sw.distribute_tensor(plain, mesh, [S2])
        F.scaled_dot_product_attention(q, q, q)
    assert report.records[-1].way == "ring"
    with sw.attention(max_bytes=2 * block - 1), sw.debug.CommDebugMode() as comm:
        with pytest.raises(sw.MemoryBoundError, match=f"smallest possible bound is {2 * block:,}"):
            F.scaled_dot_product_attention(q, q, q)
        assert comm.get_total_counts() == 0
    assert ways(max_bytes=4 * block)[0] == ["ring", "ring"]  # the same signature again
    with pytest.raises(sw.UnsupportedError, match="number of bytes"), sw.attention(max_bytes=-1):
        pass


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(sw.UnsupportedError, match="'ring', 'gather', 'heads', 'halo'"), sw.attention(prefer="star"):
        pass


# ---------------------------------------------------------------- halos


def _banded(lengths: tuple[int, int], left: int, right: int, kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A call whose queries see `left` keys before their own place and `right` after it."""
    given = case("none", lengths, dtype)
    near = torch.ones(lengths, dtype=torch.bool).tril(right).triu(-left)
    if kind == "float":
        bias = torch.randn(lengths, dtype=dtype, generator=torch.Generator().manual_seed(0))
        return given._replace(mask=bias.masked_fill(~near, -torch.inf))
    if kind == "samples":
        near = near.expand(2, 1, *lengths).clone()
        near[0, 0, 3] = False  # a query that attends to nothing
    return given._replace(mask=near)


@pytest.mark.parametrize("kind", ["boolean", "float", "samples"])
def test_a_window_exchanges_halos(kind: str) -> None:
    """Also those wider than a neighbour's shard."""
    for i, (length, left, right) in enumerate([(16, 3, 0), (13, 2, 2), (37, 9, 1), (37, 0, 14), (5, 1, 1)]):
        given = _banded((length, length), left, right, kind)
        wanted = on_one_device(given)
        for shape, placements in (LAYOUTS[i], LAYOUTS[(i + 2) % len(LAYOUTS)]):
            with sw.explain() as report:
                got = on_mesh(given, sw.init_device_mesh("cpu", shape), placements, "halo")
            assert {r.way for r in report.records if "flash" in r.name} == {"halo"}
            assert_close(got, wanted)
            assert all(x.placements == placements for x in got)


def test_a_window_in_float32() -> None:
    given = _banded((64, 64), 7, 0, "boolean", torch.float32)
    assert_close(on_mesh(given, sw.init_device_mesh("cpu", (4,)), [S2], "halo"), on_one_device(given))


def test_halos_go_by_the_mask_of_each_call() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for left in (2, 5, 2):
        given = _banded((16, 16), left, 1, "float")
        assert_close(on_mesh(given, mesh, [S2], "halo"), on_one_device(given))


def _ways_of(given: Any, mesh: sw.DeviceMesh, layout: Any, way: str | None = None, mask: Any = None) -> set[str]:
    """The algorithms of a call, forward and backward, after a comparison with one device."""
    with sw.explain() as report:
        got = on_mesh(given, mesh, layout, way, mask)
    assert_close(got, on_one_device(given))
    return {record.way for record in report.records if "flash" in record.name}


def test_a_window_is_found_without_being_named() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for kind in ("boolean", "float", "samples"):
        assert _ways_of(_banded((256, 256), 5, 1, kind, torch.float32), mesh, [S2]) == {"halo"}
    with sw.dry_run() as run:  # which has no values
        mesh = sw.init_device_mesh("cpu", (4,))
        q = sw.zeros(1, 2, 64, 8, device_mesh=mesh, placements=[S2])
        near = sw.zeros(64, 64, dtype=torch.bool, device_mesh=mesh, placements=[R])
        F.scaled_dot_product_attention(q, q, q, attn_mask=near)
    assert run.bytes > 0


def _documents(lengths: Any, causal: bool = True) -> Any:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = numbers[:, None] == numbers
    return case("none", (len(numbers), len(numbers)))._replace(mask=same.tril() if causal else same)


def test_a_ring_leaves_out_turns_that_no_query_needs() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    turns = {}
    for name, given, layout in (
        ("one for each rank", _documents([8, 8, 8, 8]), [S2]),
        ("over a border", _documents([8, 12, 12]), [S2]),
        ("both ways", _documents([8, 12, 12], causal=False), [S2]),
        ("a long one", _documents([4, 24, 4]), [S2]),
        ("zigzag", _documents([8, 8, 8, 8]), [Z2]),
        ("zigzag window", _banded((32, 32), 2, 0, "boolean"), [Z2]),
    ):
        laid = [sw.distribute_tensor(x, mesh, layout).requires_grad_() for x in given.tensors]
        with sw.attention(prefer="ring"):
            out, calls, _ = sequences.counted(
                lambda laid=laid, given=given: F.scaled_dot_product_attention(*laid[:3], attn_mask=given.mask)
            )
            grads, back, _ = sequences.counted(
                lambda laid=laid, out=out: torch.autograd.grad(out, laid[:3], laid[3].detach())
            )
        assert_close([out, *grads], on_one_device(given))
        assert back == 2 * calls  # keys and values, and their gradients
        turns[name] = calls
    assert turns == {
        "one for each rank": 0, "over a border": 1, "both ways": 2, "a long one": 3, "zigzag": 2, "zigzag window": 2,
    }  # fmt: skip
    assert _ways_of(_documents([8, 8, 8, 8]), mesh, [S2], "ring") == {"local"}


def test_masks_of_one_shape_are_explained_one_by_one() -> None:
    """As in models whose layers see all tokens and near ones in turn."""
    mesh = sw.init_device_mesh("cpu", (4,))
    q = sw.distribute_tensor(torch.randn(1, 2, 512, 8), mesh, [S2])
    near = torch.ones(512, 512, dtype=torch.bool).tril().triu(-3)
    with sw.explain() as report:
        for mask in (near, near.tril().logical_not(), near):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert [record.way for record in report.records if "flash" in record.name] == ["halo", "ring", "halo"]


def test_masks_are_not_read_where_a_program_is_recorded() -> None:
    """A captured step is run again with other masks."""
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = torch.randn(1, 2, 32, 8)
    q = sw.distribute_tensor(plain, mesh, [S2])

    @sw.captured
    def step(q: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    for left in (2, 2, 2, 9, 30):
        near = torch.ones(32, 32, dtype=torch.bool).tril().triu(-left)
        wanted = F.scaled_dot_product_attention(plain, plain, plain, attn_mask=near)
        got = step(q, sw.distribute_tensor(near, mesh, [R]))
        torch.testing.assert_close(got.full_tensor(), wanted)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_what_queries_see(data: Any) -> None:
    """Bands and turns against a count of each score."""
    draw, numbers = data.draw, st.integers
    count = draw(numbers(1, 4))
    rows_, columns = draw(numbers(1, 9)), draw(numbers(1, 9))
    generator = torch.Generator().manual_seed(draw(numbers(0, 10_000)))
    mask = torch.zeros(draw(numbers(1, 2)), rows_, columns)
    mask[torch.rand(mask.shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 0.95]))] = -torch.inf
    mesh, placement = sw.init_device_mesh("cpu", (count,)), draw(st.sampled_from([S2, Z2]))
    queries, keys = (
        [sw.DTensorSpec(mesh, [placement], sw.TensorMeta((1, 1, size, 1))).runs(2, (i,)) for i in range(count)]
        for size in (rows_, columns)
    )
    seen = [(i, j) for i in range(rows_) for j in range(columns) if (mask[:, i, j] == 0).any()]
    owners = [
        {at: rank for rank, runs in enumerate(of) for run in runs for at in range(run.start, run.start + run.length)}
        for of in (queries, keys)
    ]
    turns = {(owners[0][i] - owners[1][j]) % count for i, j in seen}
    left, right = max([i - j for i, j in seen] + [0]), max([j - i for i, j in seen] + [0])
    with pytest.MonkeyPatch.context() as patch:  # cells and rows that are read at once
        patch.setattr(mask_reach, "CELL", draw(st.sampled_from([1, 2, 3, 64])))
        patch.setattr(mask_reach, "AT_ONCE", draw(st.sampled_from([1, 20, 1 << 22])))
        found = reach_of(mask, queries, keys)
        visible = mask != -torch.inf
        of_function = reach_of_function(lambda at, size: visible[:, at : at + size], rows_, queries, keys)
    wide = left >= columns - 1 or right >= columns - 1
    expected = Reach(None if wide else (left, right), tuple(sorted(turns)), right == 0)
    assert (of_function is None and wide and right and len(turns) == count) or (
        of_function == expected if of_function is None or not of_function.far else of_function[1:3] == expected[1:3]
    )
    band = (left, right) if rows_ > 1 < columns and left < rows_ - 1 and right < columns - 1 else None
    assert set(range(count) if found is None else found.turns) == turns or (found is None and len(turns) == count)
    assert found is None or found.far or found.band == band
    for reach in (found, of_function):
        if reach is None or not reach.far:
            continue
        assert reach.band is not None
        needed = [{(owners[0][i], j) for i, j in seen}, {(owners[0][i], j) for i, j in seen if _is_far(i, j, reach)}]
        given = {(p, run.start + k) for p, runs in enumerate(reach.far) for run in runs for k in range(run.length)}
        assert needed[1] <= given <= needed[0]


def _is_far(query: int, key: int, reach: Any) -> bool:
    return query - key > reach.band[0] or key - query > reach.band[1]


def test_where_there_is_no_window_another_way_is_taken() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    for given, layout, mask in (
        (case("none", (16, 16)), [S2], None),
        (case("causal", (16, 16)), [S2], None),
        (case("float", (16, 16)), [S2], None),  # every query sees every key
        (_banded((16, 16), 2, 0, "boolean"), [S2], [S0]),  # a rank cannot know the band of others
        (_banded((16, 16), 2, 0, "boolean"), [sw.Zigzag(2)], None),
        (_banded((9, 16), 2, 0, "boolean"), [S2], None),
    ):
        with sw.explain() as report:
            got = on_mesh(given, mesh, layout, "halo", mask)
        assert "halo" not in {r.way for r in report.records}
        assert_close(got, on_one_device(given))


def test_a_window_receives_less_than_one_percent_of_a_gather() -> None:
    """16,384 tokens on 8 ranks, of which a query sees 128: measured at an eighth of the size, and planned."""
    mesh = sw.init_device_mesh("cpu", (8,))
    given = _banded((2048, 2048), 15, 0, "boolean", torch.float32)
    laid = [sw.distribute_tensor(x, mesh, [S2]) for x in given.tensors[:3]]
    received = {}
    for way in ("halo", "gather"):
        with sw.attention(prefer=way):
            _, _, received[way] = sequences.counted(lambda: F.scaled_dot_product_attention(*laid, attn_mask=given.mask))
    assert received["halo"] == 2 * 15 * 2 * 4 * 8 * 4  # keys and values of 15 tokens
    assert received["halo"] < 0.01 * received["gather"]
    spec = sw.DTensorSpec(mesh, [S2], sw.TensorMeta((1, 8, 16384, 64)))
    mask = sw.DTensorSpec(mesh, [R], sw.TensorMeta((16384, 16384)))
    arguments = {"query": spec, "key": spec, "value": spec, "dropout_p": 0.0, "is_causal": False, "attn_mask": mask}
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    schema = OpSchema(op, {**arguments, "scale": None}, (spec, spec, spec, mask))
    results = (spec.tensor_meta, sw.TensorMeta((1, 8, 16384)))
    choices = {way: choose_attention(schema, results, way, Reach((127, 0), (0, 1))) for way in ("halo", "gather")}
    planned = {way: choice.received for way, choice in choices.items() if choice is not None}
    assert 0 < planned["halo"] < 0.01 * planned["gather"]


def _streaming(length: int, window: int, sinks: int, document: int = 0, kind: str = "boolean") -> Any:
    """A causal window beside the first tokens of the sequence, or of each document."""
    at = torch.arange(length)
    number, first = (at // document, at % document) if document else (at * 0, at)
    seen = (at[:, None] >= at) & (number[:, None] == number) & ((at[:, None] - at < window) | (first < sinks))
    given = case("none", (length, length), heads=2)
    bias = torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    return given._replace(mask=seen if kind == "boolean" else bias)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_sinks_beside_a_window_are_the_only_far_keys_that_travel(kind: str) -> None:
    """Uneven shards too, several axes, and a window wider than a shard."""
    for given, shape, placements, rows in (
        (_streaming(1024, 32, 4, kind=kind), (4,), [S2], 31 + 4),
        (_streaming(1000, 50, 2, kind=kind), (3,), [S2], 49 + 2),
        (_streaming(512, 16, 2, kind=kind), (2, 2), [S2, S2], 15 + 2),
        (_streaming(512, 16, 2, kind=kind), (2, 2), [S0, S2], 15 + 2),
        (_streaming(900, 200, 3, kind=kind), (8,), [S2], 199 + 3),
        (_streaming(2048, 20, 2, document=700, kind=kind), (4,), [S2], 19 + 2),
    ):
        mesh = sw.init_device_mesh("cpu", shape)
        laid = [sw.distribute_tensor(x, mesh, placements).requires_grad_() for x in given.tensors]
        with sw.explain() as report:
            out, _, received = sequences.counted(
                lambda laid=laid, given=given: F.scaled_dot_product_attention(*laid[:3], attn_mask=given.mask)
            )
            grads = torch.autograd.grad(out, laid[:3], laid[3].detach())
        assert {record.way for record in report.records if "flash" in record.name} == {"halo"}
        samples = 1 if S0 in placements else 2
        assert received <= 1.05 * rows * 2 * samples * 2 * 8 * 8  # keys and values, samples, heads, width, bytes
        assert_close([out, *grads], on_one_device(given))


def test_far_keys_that_are_many_are_no_halo() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    at = torch.arange(1024)
    every_third = (at[:, None] >= at) & ((at % 3 == 0) | (at[:, None] - at < 16))
    assert "halo" not in _ways_of(case("none", (1024, 1024))._replace(mask=every_third), mesh, [S2], "halo")


# ---------------------------------------------------------------- tiles


def test_tiles_cover_what_counts_once() -> None:
    for rows in range(5):
        for columns in range(5):
            for offset in (None, *range(-6, 7)):
                counted = torch.zeros(rows, columns)
                for tile in tiles(rows, columns, offset):
                    part = torch.ones(tile.rows, tile.columns)
                    assert not tile.causal or tile.rows == tile.columns
                    within = part.tril() if tile.causal else part
                    counted[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns] += within
                every = torch.ones(rows, columns)
                assert torch.equal(counted, every if offset is None else every.tril(offset)), (rows, columns, offset)


# ---------------------------------------------------------------- plain modules


def _place(mesh: sw.DeviceMesh, placements: Any) -> Any:
    return lambda tokens: sw.distribute_tensor(tokens, mesh, placements)


@pytest.mark.parametrize("way", ["ring", "heads"])
def test_a_transformer_trains_with_its_tokens_sharded(way: str) -> None:
    """Batch over one axis and tokens over the other, six of them on four ranks; parameters replicated."""
    mesh = sw.init_device_mesh("cpu", (2, 4))

    def wrap(model: Any) -> None:
        sw.distribute_module(model, mesh)

    with sw.attention(prefer=way):
        assert_trains_as_one_device(wrap, _place(mesh, [S0, S1]), dropout=0.0, steps=2)


def test_fully_sharded_and_checkpointed() -> None:
    """Parameters are sharded over the axis that shards the tokens too; blocks are computed again in the backward."""
    mesh = sw.init_device_mesh("cpu", (3,))

    def prepare(model: Any) -> None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

    def wrap(model: Any) -> None:
        shard_all(model, mesh)

    with sw.attention(prefer="ring"):
        assert_trains_as_one_device(wrap, _place(mesh, [S1]), dropout=0.0, steps=2)
        torch.manual_seed(1)
        reference, tokens = Transformer().double(), batch(0)[0]
        model = copy.deepcopy(reference)
        prepare(model)
        sw.distribute_module(model, mesh)
        reference(tokens).square().sum().backward()
        model(_place(mesh, [S1])(tokens)).square().sum().backward()
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)


def test_multihead_attention() -> None:
    torch.manual_seed(0)
    reference = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    model = copy.deepcopy(reference)
    mesh = sw.init_device_mesh("cpu", (2, 2))
    sw.distribute_module(model, mesh)
    x, hidden = torch.randn(2, 7, 16, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    for options in ({}, {"key_padding_mask": hidden}, {"attn_mask": causal, "is_causal": True}):
        wanted = reference(x, x, x, need_weights=False, **options)[0]
        wanted.square().sum().backward()
        laid = sw.distribute_tensor(x, mesh, [S0, S1])
        with sw.attention(prefer="ring"):
            got = model(laid, laid, laid, need_weights=False, **options)[0]
            got.square().sum().backward()
        torch.testing.assert_close(got.full_tensor(), wanted)
        for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)


def test_a_backward_without_a_gradient() -> None:
    """A function behind attention may give none back; kernels then make none."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    x: Any = sw.distribute_tensor(torch.randn(1, 2, 8, 4), sw.init_device_mesh("cpu", (4,)), [sw.Shard(2)])
    x.requires_grad_()
    Cut.apply(F.scaled_dot_product_attention(x, x, x)).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert x.grad is None


# ---------------------------------------------------------------- dropout


def _dropped(tensors: Any, grad: Any, **options: Any) -> list[Any]:
    """The result and gradients of a call with dropout, and the next random number."""
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = F.scaled_dot_product_attention(*leaves, dropout_p=0.4, **options)
    return [out, *torch.autograd.grad(out, leaves, grad), torch.rand(1)]


@pytest.mark.parametrize("way", ["ring", "gather", "heads", "halo", None])
def test_dropout_has_the_random_numbers_of_one_device(way: str | None) -> None:
    """And leaves the generator as one device does."""
    given = case("window", (13, 13), option="groups" if way == "ring" else "plain")
    options = {"enable_gqa": way == "ring"}
    for mask, causal in ((None, False), (None, True), (given.mask, False)):
        wanted = _dropped(given.tensors[:3], given.tensors[3], attn_mask=mask, is_causal=causal, **options)
        for shape, placements in (*LAYOUTS, *ZIGZAGS)[len(way or "") % 2 :: 2]:
            mesh = sw.init_device_mesh("cpu", shape)
            laid = [sw.distribute_tensor(x, mesh, placements) for x in given.tensors]
            with sw.attention(prefer=way), sw.explain() as report:
                got = _dropped(laid[:3], laid[3], attn_mask=mask, is_causal=causal, **options)
            assert torch.equal(got.pop(), wanted[-1])
            assert_close(got, wanted[:-1])
            assert all(x.placements == placements for x in got)
            taken = {record.way for record in report.records if "flex_attention" in record.name}
            assert taken
            assert way in (None, "heads", "halo") or taken == {way}


def test_dropout_of_a_long_sequence() -> None:
    """States of the generator are kept at few places; a part of the mask may begin between two of them."""
    given = case("none", (300, 300), torch.float32, heads=2)
    wanted = _dropped(given.tensors[:3], given.tensors[3], is_causal=True)
    mesh = sw.init_device_mesh("cpu", (7,))
    laid = [sw.distribute_tensor(x, mesh, [S2]) for x in given.tensors]
    with sw.attention(prefer="ring"):
        got = _dropped(laid[:3], laid[3], is_causal=True)
    assert torch.equal(got.pop(), wanted.pop())
    assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch does so for forward mode
def test_derivatives_of_dropout() -> None:
    """Second ones, of one operand alone, in forward mode, of a transformed function, and checkpointed."""
    given = case("none", (9, 9))
    mesh = sw.init_device_mesh("cpu", (4,))

    def attend(q: Any, k: Any, v: Any) -> Any:
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    def second(q: Any, k: Any, v: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))

    def of_keys(q: Any, k: Any, v: Any) -> list[Any]:
        k = k.detach().requires_grad_()
        return list(torch.autograd.grad(attend(q, k, v).square().sum(), [k]))

    def forward_mode(q: Any, k: Any, v: Any) -> list[Any]:
        with forward_ad.dual_level():
            return [forward_ad.unpack_dual(attend(forward_ad.make_dual(q, v), k, v))[1]]

    def transformed(q: Any, k: Any, v: Any) -> list[Any]:
        return [torch.func.grad(lambda k: attend(q, k, v).square().sum())(k)]

    def checkpointed(q: Any, k: Any, v: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(3)
        options = {"dropout_p": 0.4, "use_reentrant": False}
        out = checkpoint(F.scaled_dot_product_attention, *leaves, **options)
        return list(torch.autograd.grad(out.square().sum(), leaves))

    def of_one_tensor(q: Any, k: Any, v: Any) -> list[Any]:
        """Queries, keys and values are one tensor, or made of it; the result is changed in place."""
        x = q.detach().requires_grad_()
        out = attend(x, x, x.flip(2) * k)
        (first,) = torch.autograd.grad((out * out).sum(), [x], create_graph=True)
        again = attend(x, x, x)
        again[..., 1:] += 1
        (last,) = torch.autograd.grad(again.sin().sum(), [x])
        return [first.detach(), *torch.autograd.grad(first.square().sum(), [x]), last]

    plain = given.tensors[:3]
    for run in (of_one_tensor, second, of_keys, forward_mode, transformed, checkpointed):
        laid = [sw.distribute_tensor(x, mesh, [S2]) for x in plain]
        assert_close(run(*laid), run(*plain))


@pytest.mark.parametrize("is_plain", [True, False])
def test_backward_with_dropout_sees_that_its_mask_was_written(is_plain: bool) -> None:
    """It computes scores again, and so needs the mask of the forward."""
    mesh = sw.init_device_mesh("cpu", (4,))
    q = sw.distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [S2]).requires_grad_()
    mask: Any = torch.randn(8, 8)
    mask = mask if is_plain else sw.distribute_tensor(mask, mesh, [sw.Replicate()])
    out = F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.4)
    mask.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_memory_of_a_ring_with_dropout_does_not_grow_with_the_ranks() -> None:
    peaks = []
    for ranks in (8, 64, 512):
        with sw.dry_run() as run, sw.attention(prefer="ring"):
            mesh = sw.init_device_mesh("cpu", (ranks,))
            make = {"device_mesh": mesh, "placements": [S2], "requires_grad": True}
            q, k, v = (sw.zeros(1, 2, 16 * ranks, 8, **make) for _ in "qkv")
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).sum().backward()
        assert run.bytes == (ranks - 1) * 6 * 2 * 16 * 8 * 4
        peaks.append(run.peak_bytes)
    assert max(peaks) <= 1.01 * min(peaks)


def test_a_bound_holds_with_dropout_too() -> None:
    """A ring holds two blocks; where keys and values are gathered, within the bound or not at all."""
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = torch.randn(1, 2, 32, 8)
    q = sw.distribute_tensor(plain, mesh, [S2])
    torch.manual_seed(3)
    wanted = F.scaled_dot_product_attention(plain, plain, plain, dropout_p=0.5)
    torch.manual_seed(3)
    block = 2 * 2 * 8 * 8 * 4
    with sw.attention(max_bytes=2 * block), sw.explain() as report:
        got: Any = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert "ring" in {record.way for record in report.records}
    torch.testing.assert_close(got.full_tensor(), wanted)
    bias = sw.distribute_tensor(torch.zeros(32, 32), mesh, [R]).requires_grad_()
    held = 3 * block
    with sw.attention(max_bytes=held - 1), pytest.raises(sw.MemoryBoundError, match=f"{held:,} bytes"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias, dropout_p=0.5)


@pytest.mark.parametrize("kind", ["grouped heads", "one row", "rows"])
def test_memory_of_a_ring_with_groups_or_a_mask_does_not_grow_with_the_ranks(kind: str) -> None:
    """In addition to the mask itself, of which a rank has one row, or the rows of its queries."""
    peaks = set()
    for ranks in (8, 64, 512):
        with sw.dry_run() as run, sw.attention(prefer="ring"):
            mesh, length = sw.init_device_mesh("cpu", (ranks,)), 16 * ranks
            make = {"device_mesh": mesh, "placements": [S2], "requires_grad": True}
            heads = 2 if kind == "grouped heads" else 4
            q, k, v = (sw.zeros(1, count, length, 16, **make) for count in (4, heads, heads))
            options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
            held = 0
            if kind != "grouped heads":
                rows, placement = (1, R) if kind == "one row" else (length, S0)
                mask = sw.zeros(rows, length, device_mesh=mesh, placements=[placement])
                options, held = {"attn_mask": mask}, mask.spec.local_bytes
            out = F.scaled_dot_product_attention(q, k, v, **options)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        peaks.add(run.peak_bytes - held)
    assert len(peaks) == 1
