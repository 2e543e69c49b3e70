"""One device against many layouts: `full(op(shard(x))) == op(x)`, values and gradients, for every legal placement.

Knows nothing of any particular operator.
"""

import itertools
import math
import random
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import shardwise as sw
from shardwise.events import route_started

MESHES = ((4,), (2, 2), (2, 3))
# What each rank of an axis holds of a Partial(sum), as multiples of the value: powers of two, so that nothing is
# rounded, and of both signs, so that only a linear operator gives the right sum.
SHARES = {1: (1,), 2: (2, -1), 3: (2, -2, 1), 4: (2, -1, -2, 2)}
LARGE = 1e5  # a value that one rank has


class Diverged(AssertionError):
    """Ranks that must hold the same hold different values."""


class Inconsistent(AssertionError):
    """The locals of ranks do not agree with the spec of the DTensor."""


# ---------------------------------------------------------------- layouts


def plain_layouts(shapes: Sequence[Sequence[int]], axes: int, partial: bool = True) -> Iterator[list[list[Any]]]:
    """The layouts that any operator must take: all replicated, each tensor sharded on each dim, partial, all alike."""
    replicated = [sw.Replicate()] * axes
    yield [replicated for _ in shapes]
    for i, shape in enumerate(shapes):
        for dim, axis in itertools.product(range(len(shape)), range(axes)):
            one = [sw.Shard(dim) if a == axis else sw.Replicate() for a in range(axes)]
            yield [one if j == i else replicated for j in range(len(shapes))]
        if partial:
            yield [[sw.Partial()] * axes if j == i else replicated for j in range(len(shapes))]
    for dim in range(max([0, *map(len, shapes)])):
        yield [[sw.Shard(min(dim, len(s) - 1))] * axes if s else replicated for s in map(tuple, shapes)]


def random_layout(
    shapes: Sequence[Sequence[int]], axes: int, rng: random.Random, partial: bool = True
) -> list[list[Any]]:
    """Any placement for each tensor and axis."""
    return [[_any(shape, rng, partial) for _ in range(axes)] for shape in shapes]


def layouts(
    shapes: Sequence[Sequence[int]], axes: int, rng: random.Random, limit: int, partial: bool = True
) -> Iterator[list[list[Any]]]:
    """Placements for tensors of these shapes: all replicated, then `limit` of the plain ones and random ones."""
    replicated, *found = plain_layouts(shapes, axes, partial)
    yield replicated
    found.extend(random_layout(shapes, axes, rng, partial) for _ in range(limit))
    rng.shuffle(found)
    yield from found[:limit]


def _any(shape: Sequence[int], rng: random.Random, partial: bool) -> Any:
    choices: list[Any] = [sw.Replicate(), *(sw.Shard(d) for d in range(len(shape)))]
    return rng.choice(choices + ([sw.Partial()] if partial else []))


# ---------------------------------------------------------------- to DTensors and back


def distribute(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> sw.DTensor:
    """A DTensor of this value; for Partial(sum) ranks have different addends, whose sum is exact."""
    placements = _legal(tensor, placements)
    summed = [axis for axis, p in enumerate(placements) if isinstance(p, sw.Partial) and p.reduce_op == "sum"]
    if not summed:
        return sw.distribute_tensor(tensor, mesh, placements)
    whole_here = [sw.Replicate() if axis in summed else p for axis, p in enumerate(placements)]
    held = sw.distribute_tensor(tensor, mesh, whole_here)
    shares = [
        _share(local, math.prod(SHARES[mesh.shape[a]][at[a]] for a in summed), all(at[a] == 0 for a in summed))
        for local, at in zip(held.to_local().tensors, mesh.coordinates.tolist(), strict=True)
    ]
    return sw.DTensor.from_local(sw.RankTensor(shares), mesh, placements, shape=held.shape, stride=held.stride())


def _share(local: torch.Tensor, times: int, first: bool) -> torch.Tensor:
    """A rank's multiple of a value. Values that are not finite, or would not be, or are large are with the first rank.

    Sums of some multiples are rounded (five times a value needs three bits more): by 0.25 at a million in float32, and
    an exponential makes a factor of that.
    """
    if not (local.is_floating_point() or local.is_complex()):
        return local * times
    is_shared = (local * 16).isfinite() & (local.abs() < LARGE)
    return torch.where(is_shared, local * times, local if first else torch.zeros_like(local))


def _legal(tensor: torch.Tensor, placements: Sequence[Any]) -> list[Any]:
    """Without Partial for bool and floats of eight bits, which have no sum."""
    summable = tensor.dtype is not torch.bool and not (tensor.is_floating_point() and tensor.dtype.itemsize == 1)
    return [sw.Replicate() if isinstance(p, sw.Partial) and not summable else p for p in placements]


def whole(value: Any, exact: bool = True) -> Any:
    """Every DTensor in a structure made a plain tensor; every rank must hold what the spec says, and replicas agree.

    Args:
        value: the structure.
        exact: replicas agree in every bit; otherwise up to rounding.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, sw.DTensor):
            return leaf
        with torch.no_grad():
            leaf = leaf.detach()
            check_locals(leaf)
            local = leaf.redistribute(placements=[sw.Replicate()] * leaf.device_mesh.ndim).to_local()
        first = local.tensors[0]
        for rank, other in enumerate(local.tensors):
            if not same_bits(first, other) and (exact or not torch.allclose(first, other, rtol=1e-4, equal_nan=True)):
                raise Diverged(f"ranks diverge: {leaf.spec}: rank 0 has {first}, rank {rank} has {other}")
        return first

    return tree_map(one, value, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))


def check_locals(tensor: Any) -> None:
    """Each rank's local has the shape and dtype of the spec."""
    spec = tensor.spec
    for local, at in zip(tensor._local_tensor.tensors, spec.mesh.coordinates.tolist(), strict=True):
        shape = tuple(spec.local_shape(tuple(at)))
        if local.dtype is not spec.tensor_meta.dtype:
            raise Inconsistent(f"{spec}: the local at {tuple(at)} is of {local.dtype}")
        if tuple(local.shape) != shape:
            raise Inconsistent(f"{spec}: the local at {tuple(at)} has shape {tuple(local.shape)}, not {shape}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape and values, NaN equal to NaN."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() and a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    same = a == b
    return bool((same | ((a != a) & (b != b))).all())


def bytes_moved(fn: Callable[[], Any]) -> tuple[Any, int, float]:
    """What `fn` gives, and how many collectives and bytes it issued."""
    seen: list[Any] = []
    listen = seen.append
    route_started.append(listen)
    try:
        result = fn()
    finally:
        route_started.remove(listen)
    return result, sum(route.collectives for route in seen), sum(route.received for route in seen)


# ---------------------------------------------------------------- the comparison


def assert_same(got: Any, wanted: Any, what: str, **tolerance: Any) -> None:
    """Equal structure, dtype, shape and values up to the rounding of reordered sums."""
    got_leaves, _ = tree_flatten(got)
    wanted_leaves, _ = tree_flatten(wanted)
    assert len(got_leaves) == len(wanted_leaves), f"{what}: {len(got_leaves)} results instead of {len(wanted_leaves)}"
    for a, b in zip(got_leaves, wanted_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance)
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
        return result, gradients_of(result, tensors) if gradients else []

    plain = [_leaf(leaves[i]) for i in at]
    try:
        wanted, wanted_grads = call(plain)
    except RuntimeError as error:
        if "derivative for" in str(error) and "is not implemented" in str(error):  # by this version of torch
            raise unittest.SkipTest(f"torch {torch.__version__}: {error}") from None
        raise
    wanted = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, wanted)
    for shape in meshes:
        mesh = sw.init_device_mesh("cpu", shape)
        rng = random.Random(seed)
        for chosen in layouts([leaves[i].shape for i in at], len(shape), rng, limit, partial):
            what = f"mesh {shape}, {chosen}"
            try:
                tensors = []
                for i, placements in zip(at, chosen, strict=True):
                    tensors.append(distribute(leaves[i].detach().clone(), mesh, placements))
                    tensors[-1].requires_grad_(_leaf(leaves[i]).requires_grad)
                got, grads = call(tensors)
                assert_same(whole(got), wanted, what)
                assert_same(whole(grads), wanted_grads, f"gradient, {what}")
            except Exception as error:
                error.add_note(f"on {what}")
                raise


def gradients_of(result: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a scalar made of every result, by those of `tensors` that require them; none without any."""
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    sources = [t for t in tensors if t.requires_grad]
    if not outputs or not sources:
        return []
    loss = sum((_weighted(t) for t in outputs), start=torch.zeros((), dtype=torch.float64, device=outputs[0].device))
    return list(torch.autograd.grad(loss, sources, allow_unused=True))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar of a result whose gradient is different for each element."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    weights = torch.arange(1, full.numel() + 1, dtype=torch.float64, device=full.device).reshape(full.shape).sin()
    real = torch.view_as_real(full.resolve_conj()).sum(-1) if full.is_complex() else full
    return (real.double() * weights).sum()
