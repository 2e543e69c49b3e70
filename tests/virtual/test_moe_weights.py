"""Weights of choices that are given to `dispatch`, and what else a stranger does around it: as a loop on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard

S0, S1, R = Shard(0), Shard(1), Replicate()
EXPERTS = 6


def by_loop(x: Any, ids: Any, weights: Any, experts: Any) -> torch.Tensor:
    """What a mixture is, on plain tensors."""
    rows = []
    for token, own in enumerate(ids.tolist()):
        made = [torch.tanh(x[token] @ experts[expert]) * weights[token, turn] for turn, expert in enumerate(own)]
        rows.append(sum(made[1:], made[0]))
    return torch.stack(rows)


def by_dispatch(x: Any, ids: Any, weights: Any, experts: Any, early: bool = True) -> Any:
    rows, back = sw.moe.dispatch(x, ids, experts.shape[0], weights=weights if early else None)
    outputs = torch.tanh(F.grouped_mm(rows, experts, offs=back.offs))
    return back(outputs) if early else back(outputs, weights)


def both(
    ranks: int = 4, choices: int = 2, tokens: int = 10, width: int = 8, **kwargs: Any
) -> tuple[list[Any], list[Any]]:
    """Tokens, experts of tokens, weights and experts: plain, and on a mesh."""
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    plain: list[Any] = [
        torch.randn(tokens, width, **kwargs), torch.rand(tokens, EXPERTS).topk(choices)[1],
        torch.rand(tokens, choices, **kwargs), torch.randn(EXPERTS, width, width, **kwargs) / width**0.5,
    ]  # fmt: skip
    many: list[Any] = [sw.distribute_tensor(tensor, mesh, [S0]) for tensor in plain]
    return [[t.requires_grad_() if t.is_floating_point() else t for t in side] for side in (plain, many)]  # pyright: ignore[reportReturnType]


def leaves(side: list[Any]) -> list[Any]:
    return [tensor for tensor in side if tensor.requires_grad]


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.full_tensor(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_first_and_second_derivatives_are_those_of_a_loop(ranks: int, choices: int, early: bool) -> None:
    plain, many = both(ranks, choices)
    found = []
    for side, y in ((many, by_dispatch(*many, early=early)), (plain, by_loop(*plain))):
        grads = torch.autograd.grad(y.square().sum(), leaves(side), create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves(side))
        found.append([y, *grads, *again])
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine, theirs, 1e-3)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("choices", [1, 2])
def test_gradients_go_where_they_are_wanted(choices: int, early: bool) -> None:
    for wanted in range(8):
        plain, many = both(choices=choices)
        for side in (plain, many):
            for turn, index in enumerate((0, 2, 3)):
                side[index] = side[index].detach().requires_grad_(bool(wanted >> turn & 1))
        mine, theirs = by_dispatch(*many, early=early), by_loop(*plain)
        assert_same(mine, theirs)
        assert mine.requires_grad is (wanted > 0)
        if not wanted:
            continue
        mine.sum().backward()
        theirs.sum().backward()
        for tensor, reference in zip(many, plain, strict=True):
            assert (tensor.grad is None) is (reference.grad is None)
            if reference.grad is not None:
                assert_same(tensor.grad, reference.grad)


def one_after_another(layer: Callable[..., Any], x: Any, ids: Any, weights: Any, experts: Any) -> Any:
    """Routed twice, beside something for all tokens."""
    y = layer(x, ids, weights, experts)
    return layer(x + y, (ids + 1) % EXPERTS, weights * 2, experts) + torch.sigmoid(x)


def checkpointed(reentrant: bool) -> Callable[..., Any]:
    def run(layer: Callable[..., Any], *tensors: Any) -> Any:
        return checkpoint(layer, *tensors, use_reentrant=reentrant)

    return run


def with_hooks(layer: Callable[..., Any], x: Any, *rest: Any) -> Any:
    x = x * 1
    x.register_hook(lambda grad: grad * 2)
    y = layer(x, *rest)
    y.register_hook(lambda grad: grad * 3)
    return y


def in_place(layer: Callable[..., Any], *tensors: Any) -> Any:
    return layer(*tensors).mul_(2)


PROGRAMS = {
    "twice": one_after_another, "checkpoint": checkpointed(False), "reentrant": checkpointed(True),
    "hooks": with_hooks, "in place": in_place,
}  # fmt: skip


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_around_it(name: str, choices: int) -> None:
    """Two passes, whose gradients add up."""
    plain, many = both(choices=choices)
    for scale in (0.5, 2.0):
        found = []
        for side, layer in ((many, by_dispatch), (plain, by_loop)):
            y = PROGRAMS[name](layer, side[0] * scale, *side[1:])
            y.square().sum().backward()
            found.append(y)
        assert_same(*found)
    for mine, theirs in zip(leaves(many), leaves(plain), strict=True):
        assert_same(mine.grad, theirs.grad, 1e-3)


@pytest.mark.parametrize("choices", [1, 2])
def test_parts_of_a_layer(choices: int) -> None:
    """Rows alone, results that depend on weights alone, a graph and its results used twice, hooks of rows."""
    plain, many = both(choices=choices)

    def program(x: Any, ids: Any, weights: Any, experts: Any) -> list[Any]:
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights)
        rows.register_hook(lambda grad: grad * 2)
        y = back(rows.sin()) * back(rows.detach() * 2)
        once = torch.autograd.grad(y.sum(), (x, weights), retain_graph=True)
        twice = torch.autograd.grad(y.square().sum(), (x, weights))
        (alone,) = torch.autograd.grad(sw.moe.dispatch(x, ids, EXPERTS, weights=weights)[0].exp().sum(), (x,))
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights)
        constant, of_x = torch.autograd.grad(back(rows.detach()).sum(), (weights, x), allow_unused=True)
        assert of_x is None
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights)
        scaled = back(rows * back.weights_of_rows(weights).unsqueeze(1))  # those of an input, and of a result
        return [y, *once, *twice, alone, constant, scaled]

    for mine, theirs in zip(program(*many), program(*plain), strict=True):
        assert_same(mine, theirs)


def test_without_gradients() -> None:
    """What is kept from inference does not disturb training."""
    plain, many = both()
    wanted = by_loop(*plain).detach()
    with torch.inference_mode():
        assert_same(by_dispatch(*many), wanted)
        constants = [many[0] * 1, many[1].clone(), many[2] * 1]
    with torch.no_grad():
        assert_same(by_dispatch(*many), wanted)
    assert_same(by_dispatch(*constants, many[3].detach()), wanted)
    by_dispatch(*many).sum().backward()
    by_loop(*plain).sum().backward()
    for mine, theirs in zip(leaves(many), leaves(plain), strict=True):
        assert_same(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward mode of plain tensors
@pytest.mark.parametrize("choices", [1, 2])
def test_forward_mode(choices: int) -> None:
    tangents = []
    for x, ids, weights, _ in both(3, choices):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), x.detach() * 2)
            factors = forward_ad.make_dual(weights.detach(), weights.detach() * 3)
            rows, back = sw.moe.dispatch(dual, ids, EXPERTS, weights=factors)
            tangents.append(forward_ad.unpack_dual(back(rows.sin())).tangent)
    assert_same(tangents[1], tangents[0])


@pytest.mark.parametrize("choices", [1, 2])
def test_transforms(choices: int) -> None:
    """`dispatch` is refused in torch.func; `back` is one device's."""
    plain, many = both(choices=choices)
    with pytest.raises(sw.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda weights: by_dispatch(*many[:2], weights, many[3]).sum())(many[2].detach())
    found = []
    for x, ids, weights, _ in (many, plain):
        rows, back = sw.moe.dispatch(x.detach(), ids, EXPERTS, weights=weights.detach())
        found.append(torch.func.grad(lambda rows, back=back: back(rows.sin()).square().sum())(rows))
    assert_same(*found)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("shape", [(10,), (10, 5), (10, 2, 3), (10, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rows_of_any_shape_and_weights_of_any_dtype(dtype: torch.dtype, shape: tuple[int, ...], choices: int) -> None:
    """Rows of an odd number of bytes too; the weights have a dtype of their own, and so have their gradients."""
    plain, many = both(3, choices)
    x = torch.randn(shape).to(dtype)
    own = sw.distribute_tensor(x, many[0].device_mesh, [S0])
    for of_weights in (torch.float32, torch.float16, torch.float64, torch.int64, torch.bool):
        given = (plain[2].detach() * 3).to(of_weights)
        found = []
        for tensor, ids, weights in (
            (own, many[1], sw.distribute_tensor(given, own.device_mesh, [S0])),
            (x.clone(), plain[1], given.clone()),
        ):
            inputs: Any = [t.detach().requires_grad_(t.is_floating_point()) for t in (tensor, weights)]
            rows, back = sw.moe.dispatch(inputs[0], ids, EXPERTS, weights=inputs[1])
            y = back(rows * 2)
            y.sum().backward()
            assert (y.dtype, tuple(y.shape)) == (dtype, shape)
            found.append([rows, y, inputs[0].grad, *[inputs[1].grad][: of_weights.is_floating_point]])
        for mine, theirs in zip(*found, strict=True):
            assert mine.dtype is theirs.dtype
            assert_same(mine, theirs, 0.05 if dtype is torch.bfloat16 or of_weights is torch.float16 else 1e-6)


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize(
    ("names", "shape", "placements"),
    [
        (("dp", "ep"), (3, 2), [S0, S0]), (("ep", "dp"), (2, 3), [S0, S0]), (("ep", "tp"), (2, 3), [S0, S1]),
        (("ep", "tp"), (2, 2), [Partial(), R]),
    ],
    ids=str,
)  # fmt: skip
def test_more_axes(names: tuple[str, ...], shape: tuple[int, ...], placements: list[Any], choices: int) -> None:
    """Tokens on two axes; columns that do not divide; sums that wait for a reduction."""
    plain, _ = both(choices=choices, tokens=13)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    of_experts = [S0 if name == "ep" else R for name in names]
    layouts = (placements, [R, R], [S0, R], of_experts)
    many: list[Any] = []
    for tensor, layout in zip(plain, layouts, strict=True):
        laid = sw.distribute_tensor(tensor.detach(), mesh, [p if p.is_shard() else R for p in layout])
        many.append(laid.redistribute(placements=layout).detach().requires_grad_(tensor.requires_grad))
    y, wanted = by_dispatch(*many), by_loop(*plain)
    assert_same(y, wanted)
    grads = torch.autograd.grad(y.square().sum(), leaves(many))
    for mine, theirs in zip(grads, torch.autograd.grad(wanted.square().sum(), leaves(plain)), strict=True):
        assert_same(mine, theirs, 1e-3)


def test_many_experts_and_few_tokens() -> None:
    """Numbers of experts that do not fit in a byte, or in 15 bits; ranks without tokens."""
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    for experts, tokens in ((300, 40), (16384, 6), (40000, 6), (5, 2)):
        x, ids, weights = torch.randn(tokens, 3), torch.rand(tokens, experts).topk(2)[1], torch.rand(tokens, 2)
        ids[0] = torch.tensor([experts - 1, 0])
        laid = [sw.distribute_tensor(tensor, mesh, [S0]) for tensor in (x, ids, weights)]
        rows, back = sw.moe.dispatch(laid[0], laid[1], experts, weights=laid[2])
        plain, plain_back = sw.moe.dispatch(x, ids, experts, weights=weights)
        assert torch.equal(rows.full_tensor(), plain)
        assert torch.equal(back.offs.full_tensor(), plain_back.offs)
        assert_same(back(rows.sin()), (x.sin() * weights.sum(1, keepdim=True)))


def test_large_gradients_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go in an exchange of their own, with the same values."""
    found = []
    for most in (2**30, 0):
        monkeypatch.setattr("shardwise.moe.token_sending.PACKED_BYTES", most)
        _, many = both()
        y = by_dispatch(*many)
        with sw.debug.CommDebugMode() as comm:
            grads = torch.autograd.grad(y.square().sum(), leaves(many))
        found.append((comm.get_total_counts(), [grad.full_tensor() for grad in grads]))
    assert (found[0][0], found[1][0]) == (2, 3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("capacity", [None, 2])
def test_what_is_refused(capacity: int | None, choices: int) -> None:
    for x, ids, weights, _ in both(choices=choices):
        with pytest.raises(sw.LayoutError, match="dispatch: weights of shape"):
            sw.moe.dispatch(x, ids, EXPERTS, weights=weights[:5], capacity=capacity)
        with pytest.raises(sw.LayoutError, match="unsqueeze"):
            sw.moe.dispatch(x, ids[:, 0], EXPERTS, capacity=capacity)
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights, capacity=capacity)
        with pytest.raises(sw.LayoutError, match="not to both"):
            back(rows, weights)
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights * 1j, capacity=capacity)
        with pytest.raises(sw.LayoutError, match="real weights"):
            back(rows)
        own = weights.detach().clone()
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=own, capacity=capacity)
        own.zero_()
        with pytest.raises(sw.LayoutError, match="changed in place"):
            back(rows)
    plain, many = both()
    with pytest.raises(sw.LayoutError, match="weights is a DTensor"):
        sw.moe.dispatch(plain[0], plain[1], EXPERTS, weights=many[2], capacity=capacity)
    other = sw.init_device_mesh("cpu", (2,))
    with pytest.raises(sw.MeshError, match="weights of its tokens"):
        sw.moe.dispatch(many[0], many[1], EXPERTS, weights=sw.distribute_tensor(plain[2].detach(), other, [S0]))


def test_weights_go_with_the_tokens() -> None:
    """Three exchanges forward, two backward; a row has the numbers of two experts and two weights."""
    _, (x, ids, weights, _) = both(tokens=64, width=32)
    with sw.explain() as report:
        rows, back = sw.moe.dispatch(x, ids, EXPERTS, weights=weights)
        y = back(rows)
        y.backward(x.detach())
    moves = [move for record in report.records for move in record.moves]
    crossing = int(moves[2].words.split()[1])
    kinds = ("tokens and weights", "tokens", "tokens", "tokens and weights")
    assert [move.words for move in moves[1:]] == [f"exchange {crossing} {kind} over ep" for kind in kinds]
    token = 32 * 4
    row_bytes = (token + 2 * 4 + 2 * 2, token, token, token + 2 * 4)
    assert [move.received for move in moves[1:]] == [crossing * size / 4 for size in row_bytes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("early", [False, True])
def test_gradients_of_complex_rows(dtype: torch.dtype, choices: int, early: bool) -> None:
    mesh, found = sw.init_device_mesh("cpu", (3,)), list[Any]()
    torch.manual_seed(0)
    given = torch.randn(7, 4, dtype=torch.complex128), torch.randn(7, choices, dtype=dtype)
    ids = torch.rand(7, 5).topk(choices).indices
    for place in (lambda t: t.clone(), lambda t: sw.distribute_tensor(t, mesh, [sw.Shard(0)])):
        x, weights = (place(tensor).requires_grad_() for tensor in given)
        rows, back = sw.moe.dispatch(x, place(ids), 5, weights=weights if early else None)
        y = back(rows * rows, None if early else weights)
        loss = (y * y.conj()).real.sum()
        first = torch.autograd.grad(loss, [x, weights], create_graph=True)
        second = torch.autograd.grad(sum((g * g.conj()).real.sum() for g in first), [x, weights], retain_graph=True)
        found.append([*torch.autograd.grad(loss, [x, weights]), *first, *second])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own.full_tensor(), expected)
