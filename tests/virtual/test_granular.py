"""`fully_shard(granularity=)`: parameters are split between granules alone; everything else is as on one device."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, MixedPrecisionPolicy, RowwiseParallel, fully_shard, parallelize_module
from shardwise.parallel.data_parallel.granular_params import granular_placements

shapes = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=6)


@given(shapes, st.lists(st.integers(1, 5), min_size=6, max_size=6), st.integers(1, 7))
def test_ranks_cut_between_granules_and_hold_about_equally_much(
    shapes: list[list[int]], granules: list[int], ranks: int
) -> None:
    placed = granular_placements(shapes, granules[: len(shapes)], ranks)
    held, largest = [0] * ranks, 0
    for shape, granule, placement in zip(shapes, granules, placed, strict=False):
        inner = math.prod(shape[1:])
        assert sum(placement.sizes) == shape[0]
        ends = list(itertools.accumulate(placement.sizes))
        assert all(end % granule == 0 or end == shape[0] for end in ends) or not math.prod(shape)
        held = [have + size * inner for have, size in zip(held, placement.sizes, strict=True)]
        largest = max(largest, min(granule, shape[0]) * inner)
    total = sum(map(math.prod, shapes))
    assert sum(held) == total
    assert max(held) <= total / ranks + largest


def model_of(experts: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4 * experts), nn.GELU(), nn.Linear(4 * experts, 7), nn.LayerNorm(7)).double()


def assert_trains_alike(model: Any, plain: nn.Module, batch: Any, steps: int = 3) -> None:
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (plain, model)]
    for _ in range(steps):
        x = torch.randn(12, 6, dtype=torch.float64)
        norms = []
        for each, optimizer, given_ in zip((plain, model), optimizers, (x, batch(x)), strict=True):
            optimizer.zero_grad()
            each(given_).square().mean().backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, sw.DTensor) else norm)
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0])
    for want, have in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(have.full_tensor(), want.detach())


@pytest.mark.parametrize("shape", [(2,), (3,), (5,), (2, 2)], ids=str)
@pytest.mark.parametrize("inputs", ["dtensor", "plain"])
def test_training_is_that_of_one_device(shape: tuple[int, ...], inputs: str) -> None:
    """Also with plain batches of each rank's own, and over replicas."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    plain = model_of()
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh, granularity=4)
    fully_shard(model, mesh, granularity=lambda parameter: 2 if parameter.dim() == 1 else None)
    weight: Any = model[0].weight
    sizes = weight.placements[-1].sizes
    assert all(size % 4 == 0 for size in sizes)
    ranks = math.prod(shape)

    def batch(x: torch.Tensor) -> Any:
        if inputs == "dtensor":
            return sw.distribute_tensor(x, mesh, [sw.Shard(0)] * mesh.ndim)
        return sw.RankTensor([x] * ranks)  # the mean of equal losses is the loss

    assert_trains_alike(model, plain, batch)


def test_beside_tensor_parallelism() -> None:
    mesh = sw.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    plain = model_of(4)
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh["dp"], granularity=4)
    weight: Any = model[0].weight
    assert weight.spec.layout.startswith("dp:S0(")
    assert_trains_alike(model, plain, lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Replicate()]))


def test_parameters_without_gradients_and_accumulation() -> None:
    """A bucket of some of the parameters, and gradients of two backwards."""
    mesh = sw.init_device_mesh("cpu", (3,))
    plain = model_of()
    model: Any = copy.deepcopy(plain)
    fully_shard(model, mesh, granularity=4)
    x = torch.randn(6, 6, dtype=torch.float64)
    for each, given_ in ((plain, x), (model, sw.distribute_tensor(x, mesh, [sw.Shard(0)]))):
        each[0].weight.requires_grad_(False)
        for _ in range(2):
            each(given_).square().mean().backward()
    assert model[0].weight.grad is None
    for want, have in zip(plain.parameters(), model.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(have.grad.full_tensor(), want.grad)


def test_mixed_precision_computes_in_it() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fully_shard(model_of().float(), mesh, granularity=4, mp_policy=policy)
    even: Any = fully_shard(model_of().float(), mesh, mp_policy=policy)
    x = sw.distribute_tensor(torch.randn(6, 6), mesh, [sw.Shard(0)])
    losses = [each(x).float().square().mean() for each in (model, even)]
    assert torch.equal(losses[0].full_tensor(), losses[1].full_tensor())
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(model.parameters(), even.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


def test_checkpoints_and_state_dicts(tmp_path: Path) -> None:
    """From granules on three ranks to even shards on four, and back by a state dict."""
    first: Any = fully_shard(model_of(), sw.init_device_mesh("cpu", (3,)), granularity=4)
    sw.checkpoint.save(first.state_dict(), tmp_path / "saved")
    second: Any = fully_shard(model_of(), sw.init_device_mesh("cpu", (4,)))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    state = second.state_dict()
    sw.checkpoint.load(state, tmp_path / "saved")
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    whole = {name: parameter.full_tensor() + 1 for name, parameter in first.state_dict().items()}
    first.load_state_dict(whole)
    for parameter, value in zip(first.parameters(), whole.values(), strict=True):
        assert torch.equal(parameter.full_tensor(), value)


def test_one_collective_each_way() -> None:
    """And no more bytes than even shards padded by a granule on each rank."""
    mesh = sw.init_device_mesh("cpu", (4,))
    model: Any = fully_shard(model_of(8), mesh, granularity=4)
    x = sw.distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [sw.Shard(0)])
    with sw.debug.CommDebugMode() as comm:
        model(x).sum().backward()
    counts = {str(name): count for name, count in comm.get_comm_counts().items()}
    assert sorted(counts.values()) == [1, 1], counts
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = 4 * 32  # four rows of the second weight
    assert comm.received_bytes <= 2 * 3 * (total / 4 + largest) * 8


def test_what_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(sw.UnsupportedError, match="granules are of the first dim"):
        fully_shard(nn.Linear(4, 4), mesh["dp"], granularity=2, shard_placement_fn=lambda p: sw.Shard(p.dim() - 1))
    with pytest.raises(sw.LayoutError, match="granularity is 0"):
        fully_shard(nn.Linear(4, 4), mesh["dp"], granularity=0)
    layer = parallelize_module(nn.Linear(4, 5), mesh["tp"], ColwiseParallel())
    with pytest.raises(sw.LayoutError, match="needs even shards"):
        fully_shard(layer, mesh["dp"], granularity=2)
