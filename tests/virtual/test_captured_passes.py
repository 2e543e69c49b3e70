"""Passes over captured programs: dead and joined collectives, recomputation; alone, together, and with the others."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.capture import captured
from shardwise.capture.memory_plan import memory_plan
from shardwise.capture.passes import Passes
from shardwise.errors import UnsupportedError
from tests.transformer import Transformer, loss_of, tensor_parallel
from tests.virtual import captured_data_parallel, joined_collectives
from tests.virtual.bounded_memory import LeastMemory, measured_peak
from tests.virtual.captured_copies import compare_bounded
from tests.virtual.saved_programs import train_saved

# ---------------------------------------------------------------- recomputation


@pytest.mark.parametrize("seed", [2, 9, 31])
@pytest.mark.parametrize("options", [{}, {"remove_copies": False}, {"overlap": True}])
def test_random_programs_in_the_least_memory(seed: int, options: dict[str, Any]) -> None:
    compare_bounded(seed, **options)


def test_the_bound_saves_memory() -> None:
    counts = [compare_bounded(seed) for seed in range(8)]
    assert sum(after for _, after in counts) < 0.95 * sum(before for before, _ in counts)


@pytest.mark.parametrize("name", ["dropout", "tensor parallel", "accumulating", "checkpointed dropout"])
@pytest.mark.parametrize("passes", [Passes(), Passes(overlap=True, remove_copies=False)])
def test_data_parallel_steps_in_the_least_memory(name: str, passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[LeastMemory] = []

    def least(function: Any) -> LeastMemory:
        steps.append(LeastMemory(function, passes))
        return steps[-1]

    monkeypatch.setattr(captured_data_parallel, "captured", least)
    ran, _ = captured_data_parallel.compare_virtual(name, of_ranks=False, calls=4)
    assert ran >= 1
    assert steps[0].refusals >= 1
    assert steps[0].explain().operators["recompute"] > 0


class Blocks(torch.nn.Module):
    """Linear layers, activations and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(32) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.nn.functional.gelu(layer(norm(x)))
        return x


def measured(step: Any, x: torch.Tensor) -> int:
    step(x)
    binding = step._binding
    return measured_peak(step._last.program, [*binding.inputs, x])


def test_memory_that_is_measured_meets_the_bound() -> None:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(256, 32)
    plain = captured(train)
    wanted = [plain(x).item() for _ in range(4)]
    least = LeastMemory(train)
    assert [least(x).item() for _ in range(4)] == wanted
    bound = least.passes.max_bytes
    assert bound is not None
    before, after = measured(plain, x), measured(least, x)
    assert before == plain.explain().memory.peak
    assert after == bound == least.explain().memory.peak < 0.5 * before
    report = least.explain()
    assert report.operators["recompute"] > 4
    assert not report.collectives
    assert "recomputed: " in least.source()
    between = captured(train, max_bytes=(bound + before) // 2)
    assert [between(x).item() for _ in range(4)] == wanted
    assert bound < measured(between, x) <= (bound + before) // 2


def test_what_is_written_or_random_is_not_recomputed() -> None:
    def function(x: Any) -> Any:
        noise = torch.rand_like(x)  # random
        buffer = x * 2
        buffer.add_(1)  # written
        source = x * 3
        doubled = source * 2
        source.mul_(0)  # what `doubled` comes from is changed
        big = (x.t() @ x).expand(64, 32, 32).sin() + 1
        small = big.sum((1, 2))
        return noise * 2 + buffer * 3 + doubled * 4 + small.view(64, 1)

    x = torch.randn(64, 32)
    torch.manual_seed(0)
    wanted = [function(x) for _ in range(4)]
    step = LeastMemory(function, verify=False)
    torch.manual_seed(0)
    found = [step(x) for _ in range(4)]
    assert all(map(torch.equal, found, wanted))


def test_bounds_that_cannot_be_met_change_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))

    def train(x: Any) -> Any:
        loss = (x @ weight).relu().square().sum()
        loss.backward()
        with torch.no_grad():
            weight.add_(1)
        return loss.detach()

    step = captured(train, max_bytes=16)
    step(torch.ones(4, 8))
    before = weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"at the least.*max_bytes is 16 B"):
        step(torch.ones(4, 8))
    assert torch.equal(weight, before)


def test_a_compiled_program_has_no_bound() -> None:
    with pytest.raises(UnsupportedError, match="does not keep to max_bytes"):
        captured(lambda x: x, backend="inductor", max_bytes=10)


def test_a_bounded_program_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sw, "captured", LeastMemory)
    train_saved(tmp_path / "step", sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


# ---------------------------------------------------------------- collectives, on one rank of a fake world


@pytest.fixture
def world() -> Iterator[sw.DeviceMesh]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def kinds_of(function: Any, *given: Any, **options: Any) -> list[str]:
    step = captured(function, verify=False, **options)  # there are no values of other ranks
    for _ in range(3):
        step(*given)
    return [found.kind for found in step.explain().collectives]


def test_dead_collectives_go_with_what_only_they_need(world: sw.DeviceMesh) -> None:
    def function(x: Any) -> Any:
        whole = x.redistribute(placements=[sw.Replicate(), sw.Replicate()])
        spread = (whole * 2).redistribute(placements=[sw.Replicate(), sw.Shard(0)])
        (spread + 1).redistribute(placements=[sw.Replicate(), sw.Replicate()])  # dead, and all above
        return x * 2

    x = sw.ones(8, 4, device_mesh=world, placements=[sw.Replicate(), sw.Shard(0)])
    assert kinds_of(function, x) == ["all_gather", "all_gather"]
    assert kinds_of(function, x, remove_dead=True) == []


def test_collectives_that_write_to_the_caller_stay(world: sw.DeviceMesh) -> None:
    def function(x: Any) -> Any:
        dist.all_reduce(x)
        other = x * 2
        dist.all_reduce(other)  # dead
        mine = torch.zeros(4)
        dist.all_reduce(mine[:2])  # a view of what is returned
        return mine

    kept = kinds_of(function, torch.ones(4), remove_dead=True)
    assert kept == ["all_reduce", "all_reduce"]


def gathers(x: Any) -> Any:
    shards = [x * k for k in range(4)]
    wholes = [shard.redistribute(placements=[sw.Replicate(), sw.Replicate()]) for shard in shards]
    return wholes[0] + wholes[1] + wholes[2] + wholes[3]


def test_small_gathers_are_one_within_the_bound(world: sw.DeviceMesh) -> None:
    x = sw.ones(8, 4, device_mesh=world, placements=[sw.Replicate(), sw.Shard(0)])
    size = 8 * 4 * 4
    assert len(kinds_of(gathers, x)) == 4
    assert len(kinds_of(gathers, x, bucket=10**6)) == 1
    assert len(kinds_of(gathers, x, bucket=2 * size)) == 2
    assert len(kinds_of(gathers, x, bucket=4 * size - 1)) == 2
    assert len(kinds_of(gathers, x, bucket=size - 1)) == 4


def test_a_gather_that_needs_another_is_not_joined_with_it(world: sw.DeviceMesh) -> None:
    def function(x: Any) -> Any:
        whole = x.redistribute(placements=[sw.Replicate(), sw.Replicate()])
        spread = (whole * 2).redistribute(placements=[sw.Replicate(), sw.Shard(0)])
        return spread.redistribute(placements=[sw.Replicate(), sw.Replicate()])

    x = sw.ones(8, 4, device_mesh=world, placements=[sw.Replicate(), sw.Shard(0)])
    assert len(kinds_of(function, x, bucket=10**6)) == 2


def test_what_a_gather_reads_is_not_written_before_it(world: sw.DeviceMesh) -> None:
    def function(x: Any) -> Any:
        one, other = x * 2, x * 3
        first = one.redistribute(placements=[sw.Replicate(), sw.Replicate()])
        one.add_(1)
        second = other.redistribute(placements=[sw.Replicate(), sw.Replicate()])
        return first + second

    x = sw.ones(8, 4, device_mesh=world, placements=[sw.Replicate(), sw.Shard(0)])
    assert len(kinds_of(function, x, bucket=10**6)) == 2


@pytest.mark.parametrize(("axis", "joined"), [("tp", True), ("both", False)])
def test_sums_of_more_than_two_ranks_are_joined_on_request(world: sw.DeviceMesh, axis: str, joined: bool) -> None:
    mesh = world["tp"] if axis == "tp" else sw.init_device_mesh("cpu", (4,))

    def function(x: Any) -> Any:
        partial = [x * k for k in (1, 2, 3)]
        found = [each.redistribute(placements=[sw.Replicate()]) for each in partial]
        return found[0] + found[1] + found[2]

    x = sw.DTensor.from_local(torch.ones(4), mesh, [sw.Partial()])
    assert len(kinds_of(function, x, bucket=10**6)) == (1 if joined else 3)
    assert len(kinds_of(function, x, bucket=10**6, bucket_sums=True)) == 1


def test_ranks_with_another_order_raise(world: sw.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.fabric.c10d import C10dFabric

    def other(self: Any, mesh: Any, facts: Any, tensor: Any) -> list[Any]:
        return [facts, facts | {"order": "something else"}]

    monkeypatch.setattr(C10dFabric, "agree", other)
    x = sw.ones(8, 4, device_mesh=world, placements=[sw.Replicate(), sw.Shard(0)])
    kinds_of(gathers, x, remove_dead=True)  # moves nothing
    with pytest.raises(UnsupportedError, match="would not issue the same collectives with bucket"):
        kinds_of(gathers, x, bucket=10**6)


def test_gradients_of_norms_are_reduced_as_one(world: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Transformer(2)
    tensor_parallel(model, world["tp"])

    def train(tokens: Any) -> None:
        loss_of(model(tokens), tokens).backward()
        model.zero_grad()

    tokens = torch.arange(24).reshape(4, 6) % 7
    without = kinds_of(train, tokens)
    joined = kinds_of(train, tokens, bucket=2**20)
    assert set(joined) == set(without)
    assert len(joined) < len(without)


# ---------------------------------------------------------------- on virtual ranks


@pytest.mark.parametrize("shape", [(4,), (2, 2), (3,)])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_passes_on_virtual_ranks(shape: tuple[int, ...], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    passes = Passes(overlap, share_gathers=10**6, remove_dead=True, bucket=10**6)
    monkeypatch.setattr(
        joined_collectives, "captured", lambda function, verify: LeastMemory(function, passes, verify=verify)
    )
    for seed in (1, 2):
        plan = memory_plan(joined_collectives.compare(seed, mesh))
        monkeypatch.setattr(joined_collectives, "captured", functools.partial(captured, remove_copies=False))
        assert plan.peak <= memory_plan(joined_collectives.compare(seed, mesh)).peak
