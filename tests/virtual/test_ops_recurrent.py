"""Kernels of recurrent layers, called as torch calls them. Which machine uses which kernel, torch decides."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.rules.recurrent import cudnn
from shardwise.rules.registry import Call

aten = torch.ops.aten
TIME, BATCH, FEATURES, HIDDEN = 3, 8, 3, 5
R, S1 = sw.Replicate(), sw.Shard(1)


def forward(x: Any, weights: list[Any], h: Any, c: Any) -> Any:
    return aten.mkldnn_rnn_layer(x, *weights, h, c, False, [], 2, HIDDEN, 1, True, False, False, True)


def backward(x: Any, weights: list[Any], h: Any, c: Any, made: Any, gradients: list[Any]) -> Any:
    return aten.mkldnn_rnn_layer_backward(
        x, *weights, h, c, *made[:3], *gradients, False, 2, HIDDEN, 1, True, True, False, [], False, made[3]
    )


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_gradients_of_a_layer_in_any_layout(shape: tuple[int, ...]) -> None:
    """The workspace of forward belongs to the shards of forward, whatever the layout of the gradients."""
    mesh = sw.init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    x, state, cell = torch.randn(TIME, BATCH, FEATURES), torch.randn(1, BATCH, HIDDEN), torch.randn(1, BATCH, HIDDEN)
    weights = [torch.randn(4 * HIDDEN, FEATURES), torch.randn(4 * HIDDEN, HIDDEN), *torch.randn(2, 4 * HIDDEN)]
    made = forward(x, weights, state, cell)
    gradients = [torch.randn_like(t) for t in made[:3]]
    wanted = backward(x, weights, state, cell, made, gradients)

    def spread(tensor: torch.Tensor, placements: Any = None) -> Any:
        return sw.distribute_tensor(tensor, mesh, placements or [R] * len(shape))

    kinds = list(itertools.product([R, S1], repeat=len(shape)))
    for entered, left in itertools.product(kinds, repeat=2):
        given = spread(x, entered), [spread(w) for w in weights], spread(state), spread(cell)
        result = forward(*given)
        assert result[0].placements == entered
        for ours, theirs in zip(result[:3], made, strict=False):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        found = backward(*given, result, [spread(gradients[0], left), spread(gradients[1]), spread(gradients[2], left)])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
        assert found[0].placements == entered


def test_batch_that_leaves_a_rank_without_samples() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    layer = torch.nn.LSTM(FEATURES, HIDDEN, num_layers=2)
    x = torch.randn(TIME, 3, FEATURES, requires_grad=True)
    layer(x)[0].square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    spread: Any = sw.distribute_tensor(x.detach(), mesh, [S1]).requires_grad_()
    sw.distribute_module(layer, mesh)(spread)[0].square().sum().backward()
    torch.testing.assert_close(spread.grad.full_tensor(), x.grad)
    for ours, theirs in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_dropout_of_cudnn_is_refused_before_it_is_drawn() -> None:
    arguments = {"dropout": 0.5, "train": True}
    with pytest.raises(sw.UnsupportedError, match="cuDNN uses a random state of its own"):
        cudnn(Call(aten._cudnn_rnn.default, arguments, (), ()))
    cudnn(Call(aten._cudnn_rnn.default, arguments | {"train": False}, (), ()))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "num_layers": 2, "bidirectional": True}])
def test_networks_without_kernels_of_their_own(kind: Any, options: dict[str, Any]) -> None:
    mesh, dim = sw.init_device_mesh("cpu", (2, 2)), 0 if options else 1
    network = kind(3, HIDDEN, **options).double()
    parallel = sw.distribute_module(copy.deepcopy(network), mesh)
    x = torch.randn((7, TIME, 3) if options else (TIME, 7, 3), dtype=torch.float64)
    given: Any = sw.distribute_tensor(x, mesh, [sw.Shard(dim), R])
    with torch.backends.mkldnn.flags(enabled=False):
        found, wanted = parallel(given), network(x)
    assert found[0].placements == given.placements
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    sum(t.sin().sum() for t in tree_leaves(found)).full_tensor().backward()
    sum(t.sin().sum() for t in tree_leaves(wanted)).backward()
    for ours, theirs in zip(parallel.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.nn.LSTM, {"proj_size": 2, "num_layers": 2}),
        (torch.nn.LSTM, {"batch_first": True, "bidirectional": True}),
        (torch.nn.GRU, {"num_layers": 2}),
        (torch.nn.RNN, {"batch_first": True}),
        (torch.nn.LSTMCell, {}),
        (torch.nn.GRUCell, {}),
        (torch.nn.RNNCell, {}),
    ],
)
def test_first_states_are_not_of_the_global_batch(
    kind: Any, options: dict[str, Any], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, is_cell = sw.init_device_mesh("cpu", shape), issubclass(kind, torch.nn.RNNCellBase)
    dim = 0 if is_cell or options.get("batch_first") else 1
    network = kind(FEATURES, HIDDEN, **options).double()
    x = torch.randn([7, FEATURES] if is_cell else [7, TIME, FEATURES] if dim == 0 else [TIME, 7, FEATURES]).double()
    wanted = network(x)
    parallel = sw.distribute_module(copy.deepcopy(network), mesh)
    zeros, sizes = torch.zeros, list[int]()

    def counted_zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append((made := zeros(*size, **kwargs)).numel())
        return made

    monkeypatch.setattr(torch, "zeros", counted_zeros)
    found = parallel(sw.distribute_tensor(x, mesh, [sw.Shard(dim)] + [R] * (len(shape) - 1)))
    monkeypatch.undo()
    assert not {7 * HIDDEN, 14 * HIDDEN} & set(sizes)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
        assert any(placement.is_shard() for placement in ours.placements)
    sum(t.sin().sum() for t in tree_leaves(found)).full_tensor().backward()
    sum(t.sin().sum() for t in tree_leaves(wanted)).backward()
    for ours, theirs in zip(parallel.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def states_of(left: Any) -> list[Any]:
    return [*left] if isinstance(left, tuple) else [left]


def check_network(layer: Any, x: torch.Tensor, placements: list[Any], run: Any) -> None:
    """Results, gradients and the random numbers after a call are those of one device."""
    mesh = sw.init_device_mesh("cpu", (2,))
    spread: Any = sw.distribute_module(copy.deepcopy(layer), mesh)
    found = []
    for model, batch in ((layer, x), (spread, sw.distribute_tensor(x, mesh, placements))):
        torch.manual_seed(5)
        output, left = run(model, batch)
        (output.square().sum() + sum(state.sum() for state in states_of(left))).backward()
        found.append([output, *states_of(left), *[p.grad for p in model.parameters()], torch.rand(2)])
    for theirs, ours in zip(*found, strict=True):
        whole = ours.full_tensor() if isinstance(ours, sw.DTensor) else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_networks_with_dropout_and_without_given_states(
    dropout: float, batch_first: bool, kind: str, dtype: torch.dtype
) -> None:
    """torch's decomposition leaves dropout out; oneDNN's backward reads memory of states, and zeros are stored once."""
    torch.manual_seed(0)
    for bidirectional, placement in itertools.product([False, True], [R, sw.Shard(0 if batch_first else 1)]):
        options = {"batch_first": batch_first, "bidirectional": bidirectional, "dtype": dtype}
        layer = getattr(torch.nn, kind)(FEATURES, HIDDEN, num_layers=3, dropout=dropout, **options)
        check_network(layer, torch.randn(4, 5, FEATURES, dtype=dtype), [placement], lambda model, x: model(x))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_with_dropout(kind: str) -> None:
    def run(model: Any, x: Any) -> Any:
        output, left = model(torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 1])))
        return torch.nn.utils.rnn.pad_packed_sequence(output)[0], left

    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(FEATURES, HIDDEN, num_layers=2, dropout=0.4, dtype=torch.float64)
    check_network(layer, torch.randn(4, 3, FEATURES, dtype=torch.float64), [S1], run)
