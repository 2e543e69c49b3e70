"""Local shapes and global offsets against those of torch.distributed.tensor, which needs no process group for them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as peer_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, StridedShard, as_placement
from shardwise.core.spec import DTensorSpec, TensorMeta

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[theirs.Placement]]

CASES = 6000


def spec_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[theirs.Placement]) -> DTensorSpec:
    """Our spec from torch's own placement objects."""
    ranks = torch.arange(torch.Size(mesh_shape).numel()).reshape(mesh_shape)
    return DTensorSpec(DeviceMesh("cpu", ranks, fabric="virtual"), placements, TensorMeta(shape))


def random_case(rng: random.Random, kind: str) -> Case:
    mesh_shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(2 if kind == "nested" else 1, 3)))
    ndim = rng.randint(1, 3)
    if kind == "even":
        step = torch.Size(mesh_shape).numel()
        shape = tuple(step * rng.randint(0, 3) for _ in range(ndim))
    else:
        shape = tuple(rng.choice((0, 1, rng.randint(2, 12), rng.randint(2, 40))) for _ in range(ndim))
    shard_dim = rng.randrange(ndim)
    placements: list[theirs.Placement] = []
    for _ in mesh_shape:
        dim = shard_dim if kind == "nested" else rng.randrange(ndim)
        others = (theirs.Replicate(), theirs.Partial())
        placements.append(theirs.Shard(dim) if rng.random() < 0.8 else rng.choice(others))
    return shape, mesh_shape, tuple(rng.randrange(n) for n in mesh_shape), placements


def check(case: Case) -> bool:
    """Compares one case; whether its block holds anything."""
    shape, mesh_shape, coordinate, placements = case
    peer_shape, peer_offset = peer_shape_and_offset(shape, mesh_shape, coordinate, placements)
    spec = spec_of(shape, mesh_shape, placements)
    assert (spec.local_shape(coordinate), spec.global_offset(coordinate)) == (peer_shape, peer_offset), case
    return 0 not in peer_shape


@pytest.mark.parametrize("kind", ["even", "uneven", "nested"])
def test_shapes_and_offsets_are_those_of_torch(kind: str) -> None:
    rng = random.Random(f"layout {kind}")
    full = sum(check(random_case(rng, kind)) for _ in range(CASES // 3))
    assert CASES // 12 < full < CASES // 3  # both sorts of blocks came up


def test_every_coordinate_of_small_nested_layouts() -> None:
    for size in range(10):
        for mesh_shape in ((1, 3), (2, 2), (2, 4), (4, 2), (3, 3)):
            for i in range(mesh_shape[0]):
                for j in range(mesh_shape[1]):
                    check(((size,), mesh_shape, (i, j), [theirs.Shard(0), theirs.Shard(0)]))


def test_an_empty_block_begins_at_the_end_of_the_dim() -> None:
    """Also where the axes before left something: the first two ranks of dp hold 3 rows, of which the last has none."""
    shards: list[theirs.Placement] = [theirs.Shard(0), theirs.Shard(0)]
    peer = peer_shape_and_offset((5,), (2, 4), (0, 3), shards)
    assert peer == spec_of((5,), (2, 4), shards).block((0, 3))[:2] == ((0,), (5,))


def test_strided_shapes_and_offsets_are_those_of_torch() -> None:
    rng = random.Random("layout strided")
    for _ in range(1000):
        mesh_shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        placements: list[theirs.Placement] = [
            _StridedShard(0, split_factor=rng.randint(1, 4)) if rng.random() < 0.5 else theirs.Shard(0)
            for _ in mesh_shape
        ]
        check(((rng.randint(0, 40),), mesh_shape, tuple(rng.randrange(n) for n in mesh_shape), placements))


def test_an_order_is_the_strided_placement_that_torch_uses_for_it() -> None:
    """Where all is even, tp before dp is what torch writes as a strided shard on dp and a plain one on tp."""
    rng = random.Random("layout order")
    for _ in range(300):
        dp, tp = rng.randint(1, 4), rng.randint(1, 4)
        shape, coordinate = (dp * tp * rng.randint(1, 4),), (rng.randrange(dp), rng.randrange(tp))
        ranks = torch.arange(dp * tp).reshape(dp, tp)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), fabric="virtual")
        spec = DTensorSpec(mesh, [Shard(0), Shard(0)], TensorMeta(shape), [(0, ("tp", "dp"))])
        peer = peer_shape_and_offset(shape, (dp, tp), coordinate, [_StridedShard(0, split_factor=tp), theirs.Shard(0)])
        assert (spec.local_shape(coordinate), spec.global_offset(coordinate)) == peer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (theirs.Shard(0), Shard(0)),
        (theirs.Shard(-1), Shard(-1)),
        (theirs.Replicate(), Replicate()),
        (_StridedShard(1, split_factor=4), StridedShard(1, 4)),
        *((theirs.Partial(op), Partial(op)) for op in ("sum", "avg", "min", "max", "product")),
    ],
)
def test_placements_of_torch_translate(given: theirs.Placement, expected: Placement) -> None:
    assert as_placement(given) is expected
