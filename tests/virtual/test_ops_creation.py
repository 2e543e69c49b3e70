"""New tensors after others, and operators on lists of tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from tests.virtual.parity import assert_parity, bytes_moved, whole
from tests.virtual.partials import KINDS, held, mesh_of

X = torch.arange(5 * 6, dtype=torch.float64).reshape(5, 6).sin()
MESHES = ((4,), (2, 3))

MADE: dict[str, Callable[[Any], Any]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x: torch.full_like(x, 2.5),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones": lambda x: x.new_ones((3, 7, 2)),
    "new_full": lambda x: x.new_full((6, 5), 3),
    "new_full same": lambda x: x.new_full((5, 6), 3, dtype=torch.float32),
    "new_empty": lambda x: x.new_empty((5, 6)).fill_(1),
    "new_empty_strided": lambda x: x.new_empty_strided((5, 6), (1, 5)).copy_(x),
    "new_empty_strided other": lambda x: x.new_empty_strided((2, 3), (3, 1)).zero_(),
    "empty_like": lambda x: torch.empty_like(x).copy_(x) * x,
    "fill": lambda x: torch.fill(x, 2.0),
    "fill_": lambda x: (x * 1).fill_(2.0) * x,
    "fill tensor": lambda x: (x * 1).fill_(x[0, 0]),
    "zero_": lambda x: (x * 1).zero_() + x,
    "to": lambda x: x.to(torch.float32) * 2,
    "to format": lambda x: x[None, None].to(memory_format=torch.channels_last),
    "type_as": lambda x: x.type_as(torch.zeros((), dtype=torch.float16)),
}


@pytest.mark.parametrize("name", MADE)
def test_made(name: str) -> None:
    assert_parity(MADE[name], X, limit=5, meshes=MESHES)


@pytest.mark.parametrize("kind", [*KINDS, Shard(0), Replicate()], ids=str)
def test_made_without_communication(kind: Any) -> None:
    x = held((4, 6), kind) if isinstance(kind, Partial) else sw.distribute_tensor(torch.ones(4, 6), mesh_of(3), [kind])
    after = Replicate() if isinstance(kind, Partial) else kind
    for fn in (
        torch.ones_like,
        torch.zeros_like,
        lambda x: torch.full_like(x, 2),
        lambda x: x.new_ones(4, 6),
        torch.empty_like,
    ):
        got, collectives, _ = bytes_moved(lambda fn=fn: fn(x))
        assert (collectives, got.placements) == (0, (after,))
    got, collectives, _ = bytes_moved(lambda: x.new_zeros(2))
    assert (collectives, got.placements) == (0, (Replicate(),))


# ---------------------------------------------------------------- lists

SHAPES = ((5, 6), (4,), (3, 2, 4), (1,))


def plain(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5 for shape in SHAPES]


LISTS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=2),
    "add scalar": lambda a, b, c: torch._foreach_add(a, 2),
    "add scalars": lambda a, b, c: torch._foreach_add(a, [1.0, 2.0, 3.0, 4.0]),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "mul tensor": lambda a, b, c: torch._foreach_mul([t.detach() for t in a], b[3].detach().sum()),
    "div": lambda a, b, c: torch._foreach_div(a, b),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "neg": lambda a, b, c: torch._foreach_neg(a),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "maximum scalar": lambda a, b, c: torch._foreach_maximum(a, 0.7),
    "pow": lambda a, b, c: (torch._foreach_pow(a, 2), torch._foreach_pow(a, b), torch._foreach_pow(2.0, a)),
    "lerp": lambda a, b, c: (torch._foreach_lerp(a, b, 0.3), torch._foreach_lerp(a, b, c)),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, 0.5),
    "addcdiv scalars": lambda a, b, c: _in_place(torch._foreach_addcdiv_, a, b, c, [1.0, 2.0, 3.0, 4.0]),
    "norm": lambda a, b, c: (torch._foreach_norm(a), torch._foreach_norm(a, 1), torch._foreach_norm(a, torch.inf)),
    "max": lambda a, b, c: torch._foreach_max(a),
    "add_": lambda a, b, c: _in_place(torch._foreach_add_, a, b, alpha=2),
    "mul_": lambda a, b, c: _in_place(torch._foreach_mul_, a, 2),
    "addcdiv_": lambda a, b, c: _in_place(torch._foreach_addcdiv_, a, b, c, -0.1),
    "lerp_": lambda a, b, c: _in_place(torch._foreach_lerp_, a, b, 0.1),
    "copy_": lambda a, b, c: _in_place(torch._foreach_copy_, a, b),
    "zero_": lambda a, b, c: _in_place(torch._foreach_zero_, a),
    "maximum_": lambda a, b, c: _in_place(torch._foreach_maximum_, a, b),
    "clamp": lambda a, b, c: torch._foreach_clamp_min(a, b),
}


def _in_place(fn: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    copies = [tensor.detach().clone() for tensor in tensors]
    others = [[getattr(t, "data", t) for t in a] if isinstance(a, list) else a for a in args]
    fn(copies, *others, **kwargs)
    return copies


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    assert_parity(LISTS[name], plain(0), plain(1), plain(2), limit=4, meshes=((2, 3),))


def laid(tensors: list[torch.Tensor], *placements: Any) -> list[sw.DTensor]:
    return [sw.distribute_tensor(tensor, mesh_of(4), list(placements)) for tensor in tensors]


def test_one_call_on_the_lists_of_locals() -> None:
    a, b, c = (laid(plain(seed), Shard(0)) for seed in range(3))
    for fn in (
        lambda: torch._foreach_addcdiv_(a, b, c, -0.1),
        lambda: torch._foreach_mul(a, b),
        lambda: torch._foreach_sqrt_(b),
        lambda: torch._foreach_lerp_(a, b, 0.1),
    ):
        before = sw.cache_info().misses
        _, collectives, _ = bytes_moved(fn)
        assert collectives == 0
        assert sw.cache_info().misses <= before + 1


def test_norms_of_a_model_take_one_collective() -> None:
    gradients = laid(plain(0) * 20, Shard(0))
    got, collectives, _ = bytes_moved(lambda: torch._foreach_norm(gradients))
    assert collectives == 0  # they wait
    _, collectives, _ = bytes_moved(lambda: torch.stack(list(got)) + 1)
    assert collectives == 1
    torch.testing.assert_close(whole(list(got)), list(torch._foreach_norm(plain(0) * 20)))


def test_clipping() -> None:
    parameters = [torch.nn.Parameter(t) for t in plain(0)]
    shards = [torch.nn.Parameter(t) for t in laid(plain(0), Shard(0))]
    for parameter, shard, gradient in zip(parameters, shards, plain(1), strict=True):
        parameter.grad, shard.grad = gradient, sw.distribute_tensor(gradient, mesh_of(4), [Shard(0)])
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    got = torch.nn.utils.clip_grad_norm_(shards, 1.0)
    torch.testing.assert_close(whole(got), wanted)
    torch.testing.assert_close(whole([p.grad for p in shards]), [p.grad for p in parameters])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("gradients", [Shard(0), Replicate(), Partial()], ids=str)
def test_optimizers(name: str, gradients: Any) -> None:
    parameters = [torch.nn.Parameter(t) for t in plain(0)]
    shards = [torch.nn.Parameter(t) for t in laid(plain(0), Shard(0))]
    one, many = OPTIMIZERS[name](parameters), OPTIMIZERS[name](shards)
    for step in range(3):
        for parameter, shard, gradient in zip(parameters, shards, plain(step + 1), strict=True):
            parameter.grad, shard.grad = gradient, sw.distribute_tensor(gradient, mesh_of(4), [gradients])
        one.step()
        many.step()
    torch.testing.assert_close(whole([p.detach() for p in shards]), [p.detach() for p in parameters])
    assert all(p.placements == (Shard(0),) for p in shards)


def test_gradients_are_unscaled_and_checked_on_all_ranks() -> None:
    for bad in (False, True):
        values = plain(0)
        if bad:
            values[0][4, 5] = torch.inf  # only the last rank holds it
        gradients = laid(values, Shard(0))
        found, scale = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        assert found.item() == bad
        torch.testing.assert_close(whole(gradients[1]), values[1] * 0.5)
