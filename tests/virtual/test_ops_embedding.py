"""Look-up in tables against one device: rows, columns and indices sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode
from tests.virtual.free import S0, S1, S2, P, R, collectives, tensor
from tests.virtual.parity import assert_parity

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")

t = tensor
MASKED = sw.MaskPartial()


def indices(rows: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(1))


TABLE, WORDS = t(7, 5), indices(7, 4, 6)
FLAT, OFFSETS = indices(7, 11), torch.tensor([0, 3, 3, 8])


def look_up(**options: Any) -> Callable[..., Any]:
    return lambda w, i: F.embedding(i, w, **options)


def bag(mode: str) -> Callable[..., Any]:
    return lambda w, i, o: F.embedding_bag(i, w, o, mode=mode)


CASES: dict[str, tuple[Any, ...]] = {
    "look-up": (look_up(), TABLE, WORDS),
    "of a vector": (look_up(), TABLE, WORDS[0]),
    "of one": (look_up(), TABLE, WORDS[0, 0]),
    "of none": (look_up(), TABLE, WORDS[:0]),
    "fewer rows than ranks": (look_up(), t(3, 2), indices(3, 2, 3)),
    "padding": (look_up(padding_idx=2), TABLE, WORDS),
    "by frequency": (look_up(scale_grad_by_freq=True), TABLE, WORDS),
    "normed": (lambda w, i: F.embedding(i, w.detach().clone(), max_norm=1.0), TABLE, WORDS),
    "then a product": (lambda w, i, m: F.embedding(i, w) @ m, TABLE, WORDS, t(5, 3)),
    "then a function": (lambda w, i: F.embedding(i, w).relu(), TABLE, WORDS),
    "then mixed, then a function": (lambda w, i, m: (m @ F.embedding(i, w)).relu(), TABLE, WORDS, t(4, 3, 6)),
    "tied": (lambda w, i: F.linear(F.embedding(i, w).tanh(), w), TABLE, WORDS),
    "bags of sums": (bag("sum"), TABLE, FLAT, OFFSETS),
    "bags of means": (bag("mean"), TABLE, FLAT, OFFSETS),
    "bags of maxima": (bag("max"), TABLE, FLAT, OFFSETS),
    "bags with weights": (
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p), TABLE, FLAT, OFFSETS, t(11),
    ),
    "bags with padding": (lambda w, i, o: F.embedding_bag(i, w, o, mode="mean", padding_idx=2), TABLE, FLAT, OFFSETS),
    "bags with their end": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum", include_last_offset=True), TABLE, FLAT,
        torch.tensor([0, 3, 8, 11]),
    ),
    "bags of rows of indices": (lambda w, i: F.embedding_bag(i, w, mode="mean"), TABLE, WORDS),
    "sums of rows of indices, weighted": (
        lambda w, i, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p, padding_idx=2), TABLE, WORDS, t(4, 6),
    ),
    "bags of one length, in many rows": (
        lambda w, i: F.embedding_bag(i, w, mode="mean", padding_idx=1), TABLE, indices(7, 64, 3),
    ),
    "one hot": (lambda i: F.one_hot(i, 7), WORDS),
    "one hot, classes counted": (F.one_hot, WORDS),
    "one hot, empty shards": (lambda i: F.one_hot(i, 7), WORDS[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], limit=8)


@pytest.mark.parametrize(
    ("placements", "result"),
    [
        ((S0, R), MASKED),  # rows: each rank contributes its own
        ((S1, R), S2),  # columns
        ((R, S0), S0),  # indices: the gradient is a sum
        ((R, S1), S1),
        ((P, R), P),
    ],
)
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_without_communication(placements: Any, result: Any, rows: int) -> None:
    args = t(rows, 4), indices(rows, 4, 6)
    assert collectives(look_up(), args, placements) == ((result,), 0)


def test_two_axes_without_communication() -> None:
    assert collectives(look_up(), (t(8, 4), WORDS), ([S0, S1], [R, R]), (2, 2)) == ((MASKED, S2), 0)
    assert collectives(look_up(), (t(8, 4), WORDS), ([R, S0], [S0, R]), (2, 2)) == ((S0, MASKED), 0)
    assert collectives(look_up(), (t(7, 4), WORDS), ([S0, S0], [R, R]), (2, 2)) == ((MASKED, MASKED), 0)


def test_gradient_of_a_table_is_a_sum_over_the_indices() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    table = sw.distribute_tensor(TABLE, mesh, [R]).requires_grad_()
    F.embedding(sw.distribute_tensor(WORDS, mesh, [S0]), table).sum().backward()
    assert table.grad is not None
    expected = torch.bincount(WORDS.flatten(), minlength=7).double().unsqueeze(1).expand(7, 5)
    torch.testing.assert_close(table.grad.full_tensor(), expected)


@pytest.mark.parametrize("bad", [7, -1])
def test_index_outside_of_a_sharded_table_is_an_error(bad: int) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    table = sw.distribute_tensor(TABLE, mesh, [S0])
    words = sw.distribute_tensor(torch.tensor([0, bad]), mesh, [R])
    with pytest.raises(RuntimeError, match="not in the table of 7 rows"):
        F.embedding(words, table)


@pytest.mark.parametrize("table", [S0, S1, R])
@pytest.mark.parametrize("words", [S0, R])
def test_the_gradient_of_a_table_that_asks_for_a_sparse_one_is_dense(table: Any, words: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = TABLE.clone().requires_grad_()
    F.embedding(WORDS, plain, sparse=True, padding_idx=2).square().sum().backward()
    weight = sw.distribute_tensor(TABLE, mesh, [table]).requires_grad_()
    F.embedding(
        sw.distribute_tensor(WORDS, mesh, [words]), weight, sparse=True, padding_idx=2
    ).square().sum().backward()
    assert plain.grad is not None
    assert plain.grad.is_sparse  # of plain tensors it stays sparse
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad.to_dense())


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("shape", [(3,), (4,), (2, 2), (9,)], ids=str)
def test_each_rank_makes_its_rows_of_the_gradient(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    plain = TABLE.clone().requires_grad_()
    (F.embedding(WORDS, plain, **options) ** 2).sum().backward()
    table = sw.distribute_tensor(TABLE, mesh, [S0] * mesh.ndim).requires_grad_()
    words = sw.distribute_tensor(WORDS, mesh, [R] * mesh.ndim)
    taken = F.embedding(words, table, **options).redistribute(placements=[R] * mesh.ndim)
    with CommDebugMode() as comm:
        (taken**2).sum().backward()
    assert not comm.get_total_counts()
    assert table.grad is not None
    assert table.grad.placements == table.placements
    torch.testing.assert_close(table.grad.full_tensor(), plain.grad)


def test_gradient_of_a_table_of_rows_and_columns() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    plain = TABLE.clone().requires_grad_()
    (F.embedding(WORDS, plain) ** 2).sum().backward()
    table = sw.distribute_tensor(TABLE, mesh, [S0, S1]).requires_grad_()
    words = sw.distribute_tensor(WORDS, mesh, [R, R])
    taken = F.embedding(words, table).redistribute(placements=[R, S2])
    (taken**2).sum().backward()
    assert table.grad is not None
    assert table.grad.placements == table.placements
    torch.testing.assert_close(table.grad.full_tensor(), plain.grad)
