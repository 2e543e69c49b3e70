"""One device against many layouts: `full(op(shard(x))) == op(x)`, values and gradients, for every legal placement.

Knows nothing of any particular operator.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import shardwise as sw
from shardwise.fabric import routes

MESHES = ((4,), (2, 2), (2, 3))


def layouts(
    shapes: Sequence[Sequence[int]], axes: int, rng: random.Random, limit: int, partial: bool = True
) -> Iterator[list[list[Any]]]:
    """Placements for tensors of these shapes: all replicated, each sharded on each dim, all alike, partial, random ones."""
    replicated = [sw.Replicate()] * axes
    yield [replicated for _ in shapes]
    found: list[list[list[Any]]] = []
    for i, shape in enumerate(shapes):
        for dim, axis in itertools.product(range(len(shape)), range(axes)):
            one = [sw.Shard(dim) if a == axis else sw.Replicate() for a in range(axes)]
            found.append([one if j == i else replicated for j in range(len(shapes))])
        if partial:
            found.append([[sw.Partial()] * axes if j == i else replicated for j in range(len(shapes))])
    for dim in range(max([0, *map(len, shapes)])):
        alike = [[sw.Shard(min(dim, len(s) - 1))] * axes if s else replicated for s in map(tuple, shapes)]
        found.append(alike)
    for _ in range(limit):
        found.append([[_any(shape, rng, partial) for _ in range(axes)] for shape in shapes])
    rng.shuffle(found)
    yield from found[:limit]


def _any(shape: Sequence[int], rng: random.Random, partial: bool) -> Any:
    choices: list[Any] = [sw.Replicate(), *(sw.Shard(d) for d in range(len(shape)))]
    return rng.choice(choices + ([sw.Partial()] if partial else []))


def bytes_moved(fn: Callable[[], Any]) -> tuple[Any, int, float]:
    """What `fn` gives, and how many collectives and bytes it issued."""
    seen: list[Any] = []
    routes.observers.append(seen.append)
    try:
        result = fn()
    finally:
        routes.observers.remove(seen.append)
    return result, sum(route.collectives for route in seen), sum(route.received for route in seen)


def whole(value: Any) -> Any:
    """Every DTensor in a structure made a plain tensor; and every virtual rank must agree on replicated ones."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, sw.DTensor):
            local = leaf.detach().redistribute(placements=[sw.Replicate()] * leaf.device_mesh.ndim).to_local()
            for other in local.tensors[1:]:
                assert torch.equal(torch.nan_to_num(local.tensors[0]), torch.nan_to_num(other)), "ranks diverge"
            assert local.tensors[0].shape == leaf.shape, f"{tuple(local.tensors[0].shape)} is not {tuple(leaf.shape)}"
            return local.tensors[0]
        return leaf

    return tree_map(one, value, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))


def assert_same(got: Any, wanted: Any, what: str, **tolerance: Any) -> None:
    """Equal structure, dtype, shape and values up to the rounding of reordered sums."""
    got_leaves, _ = tree_flatten(got)
    wanted_leaves, _ = tree_flatten(wanted)
    assert len(got_leaves) == len(wanted_leaves), f"{what}: {len(got_leaves)} results instead of {len(wanted_leaves)}"
    for a, b in zip(got_leaves, wanted_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance)  # noqa: B023
        else:
            assert a == b or (a != a and b != b), f"{what}: {a} is not {b}"


def assert_parity(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    limit: int = 24,
    partial: bool = True,
    gradients: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """`fn` on DTensors of many layouts gives what it gives on plain tensors, and so do its gradients.

    Args:
        fn: the function; gets the arguments with each tensor distributed.
        args: its arguments, plain tensors among them (also inside lists).
        meshes: the shapes of the meshes.
        limit: how many layouts on each mesh.
        partial: whether Partial layouts are among them.
        gradients: compare gradients of the floating-point tensors too.
        seed: of the random layouts.
        kwargs: keyword arguments.
    """
    leaves, tree = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor | None]]:
        new = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            new[i] = tensor
        new_args, new_kwargs = tree_unflatten(new, tree)
        result = fn(*new_args, **new_kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        if not gradients or not outputs:
            return result, []
        loss = sum((_weighted(t) for t in outputs), start=torch.zeros((), dtype=torch.float64))
        sources = [t for t in tensors if t.requires_grad]
        return result, list(torch.autograd.grad(loss, sources, allow_unused=True))

    plain = [_leaf(leaves[i]) for i in at]
    wanted, wanted_grads = call(plain)
    wanted = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, wanted)
    for shape in meshes:
        mesh = sw.init_device_mesh("cpu", shape)
        rng = random.Random(seed)
        for chosen in layouts([leaves[i].shape for i in at], len(shape), rng, limit, partial):
            what = f"mesh {shape}, {chosen}"
            try:
                tensors = []
                for i, placements in zip(at, chosen, strict=True):
                    legal = _legal(leaves[i], placements)
                    tensors.append(sw.distribute_tensor(_leaf(leaves[i]).detach(), mesh, legal))
                    tensors[-1].requires_grad_(_leaf(leaves[i]).requires_grad)
                got, grads = call(tensors)
                assert_same(whole(got), wanted, what)
                assert_same(whole(grads), wanted_grads, f"gradient, {what}")
            except Exception as error:
                error.add_note(f"on {what}")
                raise


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _legal(tensor: torch.Tensor, placements: Sequence[Any]) -> list[Any]:
    """Without Partial(sum) for bool, which has no sum."""
    return [sw.Replicate() if isinstance(p, sw.Partial) and tensor.dtype is torch.bool else p for p in placements]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar of a result whose gradient is different for each element."""
    full = tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor
    weights = torch.arange(1, full.numel() + 1, dtype=torch.float64).reshape(full.shape).sin()
    real = torch.view_as_real(full.resolve_conj()).sum(-1) if full.is_complex() else full
    return (real.double() * weights).sum()
