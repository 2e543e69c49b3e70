"""Redistribution on a CUDA device: virtual ranks that share it, and a world of one NCCL rank."""

from __future__ import annotations

import contextlib
import random
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import DeviceMesh, DTensor, DTensorSpec, MaskPartial, Partial, RankTensor, Replicate, Shard, StridedShard
from shardwise.core.spec import default_shard_order
from shardwise.fabric.c10d import c10d
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def mesh_of(*shape: int) -> DeviceMesh:
    with sw.virtual():
        return sw.init_device_mesh("cuda", shape)


def random_placements(rng: random.Random, axes: int, ndim: int, op: str | None) -> list[Any]:
    found = []
    for _ in range(axes):
        choices: list[Any] = [Replicate()]
        if ndim:
            choices += [Shard(rng.randrange(ndim)), Shard(rng.randrange(ndim))]
            choices += [StridedShard(rng.randrange(ndim), rng.randint(1, 3))]
        if op is not None:
            choices += [Partial(op)]
        if op in ("sum", "avg"):
            choices += [MaskPartial()]
        found.append(rng.choice(choices))
    return found


def random_order(rng: random.Random, placements: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    return [(dim, tuple(rng.sample(axes, len(axes)))) for dim, axes in default_shard_order(placements)]


def test_values_and_gradients_on_virtual_ranks() -> None:
    rng = random.Random(0)
    for case in range(200):
        mesh = mesh_of(*rng.choice([(4,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]))
        shape = [rng.choice([0, 1, 2, 3, 4, 5, 7, 8]) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice(DTYPES)
        op = rng.choice(["sum", "avg", "product"] if dtype.is_complex else ["sum", "avg", "min", "max", "product"])
        before, after = (random_placements(rng, mesh.ndim, len(shape), reduction) for reduction in (op, None))
        orders = random_order(rng, before), random_order(rng, after)
        told = f"case {case}: {dtype} {shape} {mesh}: {before} {orders[0]} -> {after} {orders[1]}"
        differentiable = dtype.is_floating_point or dtype.is_complex
        x = torch.randint(0, 4, shape, device="cuda").to(dtype).requires_grad_(differentiable)
        tensor = sw.distribute_tensor(x, mesh, before, shard_order=orders[0])
        whole = tensor.redistribute(placements=after, shard_order=orders[1]).full_tensor()
        tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6  # an average over three is not exact
        assert whole.device.type == "cuda", told
        assert torch.allclose(whole.detach(), x.detach(), rtol=tolerance, atol=0), told
        if differentiable:
            weight = torch.randint(0, 4, shape, device="cuda").to(dtype)
            whole.backward(weight)
            assert torch.allclose(tensor.grad.full_tensor(), weight, rtol=tolerance, atol=0), told


def test_between_two_virtual_meshes() -> None:
    x = torch.arange(15.0, device="cuda").reshape(5, 3)
    with sw.virtual():
        line, pair = DeviceMesh("cuda", [3, 0, 2, 1]), DeviceMesh("cuda", [2, 5])
    tensor = sw.distribute_tensor(x, mesh_of(2, 2), [Shard(0), Partial("avg")])
    for mesh in (line, pair):
        moved = tensor.redistribute(mesh, [Shard(1)])
        assert len(moved.to_local().tensors) == mesh.size()
        assert torch.allclose(moved.full_tensor(), x)


def test_gradients_of_parts() -> None:
    reductions = {"sum": torch.sum, "avg": torch.mean, "min": torch.amin, "max": torch.amax, "product": torch.prod}
    for op, reduce in reductions.items():
        parts = torch.randint(-1, 2, (3, 5, 2), device="cuda").double().requires_grad_()
        weight = torch.randn(5, 2, device="cuda", dtype=torch.float64)
        reduce(parts, 0).backward(weight)
        local = RankTensor([part.detach().clone() for part in parts]).requires_grad_()
        DTensor.from_local(local, mesh_of(3), [Partial(op)]).redistribute(placements=[Shard(0)]).full_tensor().backward(
            weight
        )
        assert torch.allclose(torch.stack(local.grad.tensors), parts.grad), op


def test_a_plain_tensor_is_brought_to_the_device() -> None:
    tensor = sw.distribute_tensor(torch.arange(4.0), mesh_of(2), [Shard(0)])
    assert tensor.device.type == "cuda"
    assert {part.device.type for part in tensor.to_local().tensors} == {"cuda"}
    assert sw.ones(4, device_mesh=mesh_of(2), placements=[Partial()]).full_tensor().tolist() == [1.0] * 4


# ---------------------------------------------------------------- NCCL


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    if not dist.is_available() or not dist.is_nccl_available():
        raise unittest.SkipTest("torch was built without NCCL")
    if dist.is_initialized():
        raise unittest.SkipTest("a process group is up already")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(
            "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", torch.cuda.current_device())
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_a_world_of_one_nccl_rank() -> None:
    with world_of_one():
        mesh = sw.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        assert mesh.fabric == "c10d"
        x = torch.arange(12.0, device="cuda").reshape(4, 3).requires_grad_()
        for before in (Shard(0), Replicate(), Partial(), Partial("max")):
            tensor = sw.distribute_tensor(x, mesh, [before])
            moved = tensor.redistribute(placements=[Shard(1)], async_op=True)
            assert moved.to_local().device.type == "cuda"
            assert torch.equal(moved.full_tensor(), x)
            moved.full_tensor().backward(torch.ones_like(x))
            assert torch.equal(tensor.grad.full_tensor(), torch.ones_like(x))
        assert DTensor.from_local(x, mesh, [Shard(0)], run_check=True).shape == (4, 3)


def test_every_collective_is_taken_by_nccl() -> None:
    """On one rank a collective gives back what it was given; the point is that NCCL takes the call and the dtype."""
    with world_of_one():
        mesh = sw.init_device_mesh("cuda", (1,))
        for dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int16,
            torch.bool,
            torch.complex64,
        ):
            x = torch.randint(0, 4, (4, 3), device="cuda").to(dtype)
            split = DTensorSpec(mesh, [Shard(0)], sw.TensorMeta((4, 3), dtype=dtype))
            other, whole = split.with_placements([Shard(1)]), split.with_placements([Replicate()])
            steps = [AllGather(split, whole, 0, (0,)), AllToAll(split, other, 0, 1, (0,)), Exchange(split, other, (0,))]
            for op in ("sum", "avg", "max", "product"):
                if dtype.is_complex and op in ("max", "product"):
                    continue
                partial = split.with_placements([Partial(op)])
                steps += [AllReduce(partial, whole, (0,)), ReduceScatter(partial, split, 0, (0,))]
            for step in steps:
                result = c10d.bind(step)(x)
                assert result.dtype is dtype, step.describe()
                assert torch.equal(result, x), f"{dtype}: {step.describe()}"
                waiting = c10d.start(step)(x)
                assert torch.equal(waiting(), x), f"{dtype}: {step.describe()}"
