"""Dry runs: shapes, bytes and seconds of thousands of ranks, against arithmetic by hand."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.plan.cost import CostModel, Link, set_cost_model

RANKS = 16_384
SIDE = 128
ROWS, COLUMNS = 32_768, 8_192  # of bf16: 512 MiB in all
WHOLE = ROWS * COLUMNS * 2
ALPHA, BETA = 1e-5, 1e-11


@pytest.fixture(autouse=True)
def model():
    before = set_cost_model(CostModel(devices={"cuda": Link(ALPHA, BETA), "cpu": Link(ALPHA, BETA)}))
    yield
    set_cost_model(before)


def big_mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cuda", (SIDE, SIDE), mesh_dim_names=("dp", "tp"))


def test_a_mesh_of_cuda_ranks_needs_no_cuda() -> None:
    with sw.dry_run():
        mesh = big_mesh()
        assert (mesh.fabric, mesh.device_type, mesh.size()) == ("dry", "cuda", RANKS)
        x = sw.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert x.shape == (ROWS, COLUMNS)
    assert x.to_local().device.type == "meta"
    assert x.to_local().shape == (ROWS // SIDE, COLUMNS // SIDE)
    assert sw.init_device_mesh("cpu", (2,)).fabric == "virtual"


def test_bytes_and_seconds_of_a_route() -> None:
    with sw.dry_run() as run:
        x = sw.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device_mesh=big_mesh(), placements=[Shard(0), Replicate()])
        assert (run.bytes, run.seconds, run.steps) == (0, 0, [])
        y = x.redistribute(placements=[Shard(1), Replicate()])
    received = (SIDE - 1) * WHOLE // SIDE // SIDE
    assert y.to_local().shape == (ROWS, COLUMNS // SIDE)
    assert run.bytes == received
    assert run.seconds == pytest.approx(ALPHA + received * BETA)
    assert run.collectives == Counter(all_to_all=1)
    (record,) = run.steps
    assert record.step.describe() == "all-to-all dim 0 -> dim 1 over dp"


def test_a_gathered_dim_and_a_reduced_sum() -> None:
    with sw.dry_run() as run:
        mesh = big_mesh()
        x = sw.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0), Shard(0)])
        x.redistribute(placements=[Replicate(), Replicate()])
        gathered = run.bytes
        y = sw.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device_mesh=mesh, placements=[Partial(), Partial()])
        y.redistribute(placements=[Shard(0), Shard(0)])
    assert gathered == (RANKS - 1) * WHOLE // RANKS
    assert run.bytes - gathered == (RANKS - 1) * WHOLE // RANKS
    assert run.collectives == Counter(all_gather=1, reduce_scatter=1)
    assert run.seconds == pytest.approx(2 * ALPHA + run.bytes * BETA)


def test_the_peak_is_that_of_what_lives_at_once() -> None:
    shard, half = WHOLE // RANKS, WHOLE // SIDE
    with sw.dry_run() as run:
        x = sw.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device_mesh=big_mesh(), placements=[Shard(0), Shard(1)])
        assert (run.live_bytes, run.peak_bytes) == (shard, shard)
        y = x.redistribute(placements=[Shard(0), Replicate()])
        assert (run.live_bytes, run.peak_bytes) == (shard + half, shard + half)
        del y
        gc.collect()
        assert (run.live_bytes, run.peak_bytes) == (shard, shard + half)
        z = x.redistribute(placements=[Shard(1), Shard(0)])
        assert (run.live_bytes, run.peak_bytes) == (2 * shard, shard + half)
        del x, z
        gc.collect()
    assert (run.live_bytes, run.peak_bytes) == (0, shard + half)


def test_a_tensor_of_the_users_is_only_measured() -> None:
    with sw.dry_run() as run:
        x = sw.distribute_tensor(torch.ones(1024, 4), big_mesh(), [Shard(0), Replicate()])
        assert x.to_local().device.type == "meta"
        assert x.full_tensor().shape == (1024, 4)
    assert run.bytes == (SIDE - 1) * 8 * 4 * 4


def test_uneven_shards_count_as_the_largest() -> None:
    with sw.dry_run() as run:
        x = sw.zeros(1001, device_mesh=sw.init_device_mesh("cpu", (10,)), placements=[Shard(0)])
    assert x.to_local().shape == (101,)
    assert run.peak_bytes == 101 * 4


def test_gradients_are_counted_too() -> None:
    with sw.dry_run() as run:
        x = sw.zeros(ROWS, COLUMNS, device_mesh=big_mesh(), placements=[Shard(0), Replicate()], requires_grad=True)
        y = x.redistribute(placements=[Shard(1), Replicate()])
        forward = run.bytes
        y.to_local().backward(torch.empty_like(y.to_local()))
    assert run.bytes == 2 * forward > 0
    assert x.grad.shape == (ROWS, COLUMNS)
    assert x.grad.to_local().device.type == "meta"


def test_runs_inside_runs_each_see_what_is_theirs() -> None:
    with sw.dry_run() as outer:
        x = sw.zeros(8, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[Shard(0)])
        x.full_tensor()
        with sw.dry_run() as inner:
            x.full_tensor()
        x.full_tensor()
    assert (outer.collectives["all_gather"], inner.collectives["all_gather"]) == (3, 1)


def test_dry_ranks_have_no_groups() -> None:
    with sw.dry_run():
        mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises(sw.UnsupportedError, match="has no process groups"):
        mesh.get_group()


def test_a_source_outside_the_mesh_is_refused_as_it_would_be_for_real() -> None:
    with sw.dry_run(), pytest.raises(sw.MeshError, match="src_data_rank=4 is not in"):
        sw.distribute_tensor(torch.ones(4), sw.init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=4)


# ---------------------------------------------------------------- memory as the device would need it

MiB = 2**20
WORKSPACES = 33 * MiB


def one_rank() -> sw.DeviceMesh:
    return sw.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))


def test_plain_operators_on_locals_are_counted_and_meta_initialisation_is_not() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (4,))
        unused = torch.empty(1000, device="meta") * 2
        assert run.live_bytes == 0
        x = sw.zeros(400, device_mesh=mesh, placements=[Shard(0)])
        y = x.to_local() + 1
        assert run.live_bytes == 2 * 100 * 4
        view = y.view(10, 10)
        del y
        gc.collect()
        assert run.live_bytes == 2 * 100 * 4  # the view keeps the storage
        del view
        gc.collect()
    assert (run.live_bytes, unused.shape) == (100 * 4, (1000,))


def test_what_autograd_saves_lives_until_backward() -> None:
    with sw.dry_run() as run:
        x = sw.zeros(400, device_mesh=sw.init_device_mesh("cpu", (4,)), placements=[Shard(0)], requires_grad=True)
        total = x.to_local().exp().sum()  # saves its result, which no variable holds
        gc.collect()
        assert run.live_bytes == 2 * 100 * 4 + 4
        total.backward()
        x.grad = None
        del total
        gc.collect()
        assert run.live_bytes == 100 * 4


def attention_peak(dtype: torch.dtype, mask: torch.Tensor | None = None, **options: bool) -> int:
    with sw.dry_run() as run:
        mesh = one_rank()
        q = sw.zeros(1, 8, 4096, 64, dtype=dtype, device_mesh=mesh, placements=[Replicate()], requires_grad=True)
        k = sw.zeros(1, 2 if options else 8, 4096, 64, dtype=dtype, device_mesh=mesh, placements=[Replicate()])
        torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, **options).sum().backward()
    return run.peak_bytes


def test_attention_holds_no_scores_where_a_gpu_would_not() -> None:
    scores = 8 * 4096 * 4096
    assert attention_peak(torch.bfloat16) < 64 * MiB
    assert attention_peak(torch.bfloat16, enable_gqa=True) < 64 * MiB
    assert attention_peak(torch.float32) < 128 * MiB  # memory-efficient attention
    assert attention_peak(torch.float32, enable_gqa=True) > 4 * scores  # which has no shared heads
    mask = torch.ones(4096, 4096, dtype=torch.bool, device="meta")
    assert attention_peak(torch.bfloat16, mask) < scores
    assert attention_peak(torch.float64) > 8 * scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "heads", "options"),
    [
        ((2, 4, 64, 8), 4, {}),
        ((2, 4, 64, 8), 4, {"is_causal": True, "scale": 0.5}),
        ((2, 4, 64, 8), 2, {"enable_gqa": True}),
        ((2, 4, 64, 8), 4, {"dropout_p": 0.1}),
        ((2, 4, 64, 8), 4, {"attn_mask": (64, 64)}),
        ((2, 4, 64, 8), 4, {"attn_mask": (2, 1, 64, 64)}),
        ((2, 4, 64, 8), 4, {"attn_mask": (4, 64, 64)}),
        ((4, 64, 8), 4, {}),
    ],
)
def test_on_cpu_ranks_attention_holds_scores_where_torch_does_there(
    dtype: torch.dtype, shape: tuple[int, ...], heads: int, options: dict[str, Any]
) -> None:
    sizes = {"q": shape, "k": (*shape[:-3], heads, *shape[-2:])}

    def attend(make: Callable[..., Any], call: Callable[..., Any]) -> Any:
        q, k = (make(sizes[name], dtype=dtype) for name in ("q", "k"))
        given = {name: make(size, dtype=torch.bool) if name == "attn_mask" else size for name, size in options.items()}
        return call(q, k, k, **given)

    by_scores = attend(torch.zeros, torch._fused_sdp_choice) == SDPBackend.MATH.value
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (1,))
        make = functools.partial(sw.zeros, device_mesh=mesh, placements=[Replicate()])
        attend(make, torch.nn.functional.scaled_dot_product_attention)
    held = run.peak_bytes > math.prod(shape[:-2]) * 64 * 64 * dtype.itemsize
    assert held == by_scores


def test_a_norm_on_a_gpu_saves_its_input_alone() -> None:
    with sw.dry_run() as run:
        mesh = one_rank()
        norm = torch.nn.RMSNorm(1024, device="meta", dtype=torch.bfloat16)
        sw.fully_shard(norm, mesh=mesh)
        x = sw.zeros(1024, 1024, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])
        out = norm(x.to_local())
        gc.collect()
        saved = run.live_bytes - 2 * x.to_local().nbytes  # beside the input and the result
        assert saved < 64 * 1024
        out.sum().backward()
    assert norm.weight.grad is not None


def test_allocations_are_rounded_and_workspaces_counted_on_cuda_ranks() -> None:
    with sw.dry_run() as run:
        mesh = one_rank()
        x = sw.zeros(10, 10, device_mesh=mesh, placements=[Replicate()], requires_grad=True)
        assert run.live_bytes == 512
        y = x @ x
        assert run.live_bytes == 2 * 512 + WORKSPACES
        y = y @ x
        gc.collect()
        assert run.live_bytes == 3 * 512 + WORKSPACES
        y.sum().backward()
    assert run.live_bytes >= 2 * WORKSPACES  # backward has a thread, and a workspace, of its own


def test_a_run_that_is_left_out_of_order_counts_no_more() -> None:
    first, second = sw.dry_run(), sw.dry_run()
    one, other = first.__enter__(), second.__enter__()
    x = sw.zeros(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    first.__exit__(None, None, None)
    y = x.to_local() + 1
    assert (one.live_bytes, other.live_bytes) == (8, 16)
    second.__exit__(None, None, None)
    z = y + 1
    assert (one.live_bytes, other.live_bytes) == (8, 16)
    assert torch._C._len_torch_dispatch_stack() == 0 == torch._C._len_torch_function_stack()
    assert z.shape == (2,)


DEPENDENT = {
    "masked": lambda x, i: x[x > 0],
    "masked with a gradient": lambda x, i: x.requires_grad_()[x > 0].sum().backward(),
    "put by a mask": lambda x, i: x.__setitem__(x > 0, x[x > 0]),
    "nonzero": lambda x, i: x.nonzero(),
    "where": lambda x, i: torch.where(x > 0),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "bincount": lambda x, i: i.bincount(),
    "unique": lambda x, i: i.unique(return_inverse=True),
    "unique rows": lambda x, i: x.unique(dim=0),
    "unique_consecutive": lambda x, i: i.unique_consecutive(),
    "corrcoef": lambda x, i: torch.corrcoef(x),
    "cov": lambda x, i: torch.cov(x),
    "cov with weights": lambda x, i: torch.cov(x.t(), fweights=i),
    "equal": lambda x, i: torch.equal(x, x.clone()),
    "allclose": lambda x, i: torch.allclose(x, x.clone()),
    "item": lambda x, i: x.sum().item(),
    "bool": lambda x, i: 1 if (x > 0).any() else 0,
    "index": lambda x, i: x[i[0] :],
    "tolist": lambda x, i: x.tolist(),
    "a tensor of numbers": lambda x, i: torch.tensor([x.sum(), 1.0]),
    "numpy": lambda x, i: x.numpy(),
    "an array": lambda x, i: np.asarray(x),
    "dlpack": lambda x, i: torch.from_dlpack(x),
    "numpy of a gathered tensor": lambda x, i: x.full_tensor().numpy(),
    "repeat_interleave": lambda x, i: x.repeat_interleave(i, 0),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i),
    "tensor_split": lambda x, i: torch.tensor_split(x, i),
    "histogram": lambda x, i: torch.histogram(x.reshape(-1), 10),
    "lstsq": lambda x, i: torch.linalg.lstsq(x, x),
    "a local": lambda x, i: x.to_local().nonzero(),
    "a gathered tensor": lambda x, i: float(x.full_tensor().sum()),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", DEPENDENT)
def test_what_depends_on_values_is_refused(name: str, placement: sw.Placement) -> None:
    with sw.dry_run() as run:
        layout = {"device_mesh": sw.init_device_mesh("cpu", (4,)), "placements": [placement]}
        x, i = sw.zeros(16, 4, **layout), sw.zeros(16, dtype=torch.int64, **layout)
        with pytest.raises(sw.UnsupportedError, match=r"a dry run .*\n  hint: use a form whose sizes are known"):
            DEPENDENT[name](x, i)
        assert (x + 1).sum().shape == ()  # goes on
    assert run.peak_bytes > 0


def test_forms_whose_sizes_are_known_run() -> None:
    with sw.dry_run():
        layout = {"device_mesh": sw.init_device_mesh("cpu", (4,)), "placements": [Shard(0)]}
        x, i = sw.zeros(16, 4, **layout), sw.zeros(16, dtype=torch.int64, **layout)
        assert torch.where(x > 0, x, 0.0).shape == (16, 4)
        assert torch.nn.functional.one_hot(i, 10).shape == (16, 10)
        assert x.repeat_interleave(i.redistribute(placements=[Replicate()]), 0, output_size=100).shape == (100, 4)
        assert x.masked_fill(x > 0, 1.0).shape == x[i].shape == (16, 4)
        with pytest.raises(RuntimeError, match=r"broadcast|size of tensor"):  # errors of torch stay
            torch.add(x.to_local(), torch.zeros(7, device="meta"))
