"""Transfers of states between meshes, on virtual ranks. Random pairs: `python -m tests.gloo.state_transfers`."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.fabric.state_messages import rank_transfer
from shardwise.meshes import transfers
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.gloo.state_transfers import check_virtual
from tests.weight_sync import synchronised_models, trained_once

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def trainer() -> sw.DeviceMesh:
    return sw.DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))


@pytest.fixture
def generator() -> sw.DeviceMesh:
    return sw.DeviceMesh("cpu", [[8, 9, 10], [11, 12, 13]], mesh_dim_names=("replica", "tp"))


def model_on(mesh: sw.DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """A model and its copy that is trained by FSDP x TP."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 10), nn.LayerNorm(10))
    laid = copy.deepcopy(plain)
    parallelize_module(laid, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sw.fully_shard(laid, mesh["dp"])
    return plain, laid


@pytest.mark.parametrize("seed", range(24))
def test_random_pairs_are_bit_equal_and_send_the_least(seed: int) -> None:
    check_virtual(seed)


def test_a_generator_follows_training(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    plain, laid = model_on(trainer)
    plan = sw.transfer_plan(laid.state_dict(), generator, dtype=torch.bfloat16, bucket_bytes=256)
    weights: Any = None
    for step in range(3):
        for model in (plain, laid):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.ones(8, 10) * step
            batch = x if model is plain else sw.distribute_tensor(x, trainer, [S0, R])
            model(batch).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        told: list[tuple[int, int]] = []
        weights = plan.run(laid.state_dict(), into=weights, progress=lambda *counts, to=told: to.append(counts))
        assert len(told) == plan.buckets > 1
        assert told[-1] == (2 * plan.bytes, 2 * plan.bytes)  # sent and received in this one process
        for name, mine in laid.state_dict().items():
            full = mine.redistribute(placements=[R] * mine.device_mesh.ndim).to_local().tensors[0]
            assert torch.equal(weights[name].full_tensor(), full.bfloat16())
            torch.testing.assert_close(full, plain.state_dict()[name], rtol=1e-5, atol=1e-5)
    assert weights["0.weight"].placements == (R, S0)
    assert weights["3.weight"].placements == (R, R)


def test_replicas_share_the_work_and_messages_are_few(generator: sw.DeviceMesh) -> None:
    source = sw.DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))
    state = {f"{i}": sw.ones(32 + i, 6, device_mesh=source, placements=[R, S0]) for i in range(40)}
    plan = sw.transfer_plan(state, generator, [R, S1], bucket_bytes=2**12)
    sent = [count for count in plan.sent.values() if count]
    assert len(sent) == 8
    assert max(sent) <= 1.25 * min(sent)
    assert plan.messages <= plan.buckets * len(sent) * 6
    large = sw.transfer_plan(state, generator, [R, S1], bucket_bytes=2**20)
    assert large.messages <= large.buckets * len(sent) * 6 == 48
    assert plan.bytes == large.bytes == sum(value.numel() for value in state.values()) * 4 * 2


def test_the_nearest_replica_sends() -> None:
    """Two nodes of four ranks; each holds everything; the generator's ranks are on both."""
    world = sw.DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("node", "gpu"))
    source = sw.DeviceMesh("cpu", [[0, 1], [4, 5]], mesh_dim_names=("dp", "tp"))
    target = sw.DeviceMesh("cpu", [2, 6], mesh_dim_names=("tp",))
    state = {"w": sw.ones(8, 8, device_mesh=source, placements=[R, S0])}
    before = sw.set_cost_model(sw.CostModel(axes={"node": sw.Link(1e-4, 1e-8), "gpu": sw.Link(1e-6, 1e-10)}))
    try:
        for asked in ([R], [S1]):
            plan = sw.transfer_plan(state, target, asked, links=world)
            of_node = {rank: sorted(_senders(plan, rank)) for rank in (2, 6)}
            assert of_node == {2: [0, 1], 6: [4, 5]}
    finally:
        sw.set_cost_model(before)


def _senders(plan: sw.TransferPlan, rank: int) -> set[int]:
    buckets = rank_transfer(plan._transfer(), rank).buckets
    return {message.ranks[0] for bucket in buckets for message in bucket.receives}


@pytest.mark.parametrize("limit", [64, 1000, 10_000])
def test_memory_for_messages_is_bounded(trainer: sw.DeviceMesh, generator: sw.DeviceMesh, limit: int) -> None:
    value = torch.randn(64, 30)
    state = {name: sw.distribute_tensor(value, trainer, [S0, S1]) for name in "ab"}
    plan = sw.transfer_plan(state, generator, [R, S0], bucket_bytes=limit)
    for rank in range(14):
        assert rank_transfer(plan._transfer(), rank).staged <= max(limit, 4 * 64)  # one row of all ranks
    assert torch.equal(plan.run(state)["b"].full_tensor(), value)


def test_layouts_are_given_in_many_ways(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    state = {
        "layer.weight": sw.ones(6, 6, device_mesh=trainer, placements=[S0, S1]),
        "layer.bias": sw.ones(6, device_mesh=trainer, placements=[R, S0]),
        "steps": 3,
        "more": [sw.ones(2, device_mesh=trainer), torch.ones(2)],
    }
    moved = sw.transfer(state, generator, {"*.weight": [S1, S0], "layer.bias": None})
    assert moved["layer.weight"].placements == (S1, S0)
    assert moved["layer.bias"].placements == (R, S0)
    assert moved["steps"] == 3
    assert moved["more"][0].device_mesh is generator
    assert moved["more"][1] is state["more"][1]
    like = sw.transfer(state, generator, {"layer.*": [R, R]})
    assert like["layer.weight"].placements == (R, R)
    chosen = sw.transfer(state, generator, lambda name, spec: [S0, R] if name.endswith("bias") else None)
    assert chosen["layer.bias"].placements == (S0, R)
    again = sw.transfer(state, generator, {"layer.weight": moved["layer.weight"]})
    assert again["layer.weight"].spec is moved["layer.weight"].spec
    onto_slice = sw.transfer(state, generator["tp"], {"layer.weight": [S0]})
    assert onto_slice["layer.weight"].device_mesh is generator["tp"]
    assert sw.transfer({}, generator) == {}


def test_optimizer_states_are_states(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    parameter = nn.Parameter(sw.distribute_tensor(torch.randn(8, 6), trainer, [S0, S1]))
    optimizer = torch.optim.AdamW([parameter])
    parameter.pow(2).sum().backward()
    optimizer.step()
    moved = sw.transfer(optimizer.state_dict(), generator)
    want = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moved["state"][0]["exp_avg"].full_tensor(), want.full_tensor())
    assert moved["param_groups"] == optimizer.state_dict()["param_groups"]


def test_what_cannot_be_is_refused(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    state = {"w": sw.ones(8, 6, device_mesh=trainer, placements=[S0, S1])}
    with pytest.raises(sw.LayoutError, match="no tensor is named 'v'"):
        sw.transfer(state, generator, {"v": [R, R]})
    with pytest.raises(sw.LayoutError, match="Partial afterwards"):
        sw.transfer(state, generator, [sw.Partial(), R])
    with pytest.raises(sw.LayoutError, match="Partial now"):
        sw.transfer({"w": sw.ones(3, device_mesh=trainer, placements=[sw.Partial(), R])}, generator)
    with pytest.raises(sw.LayoutError, match="matched by name"):
        sw.transfer(state, sw.DeviceMesh("cpu", [1, 2]))
    with pytest.raises(sw.LayoutError, match="'w'"):
        sw.transfer(state, generator, [S0])
    ragged = sw.ones(8, device_mesh=trainer, placements=[sw.Ragged(0, [1, 2, 2, 3]), R])
    with pytest.raises(sw.LayoutError, match="is for 4 ranks"):
        sw.transfer({"w": ragged}, sw.DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",)))
    plan = sw.transfer_plan(state, generator)
    with pytest.raises(sw.LayoutError, match="nothing of that name"):
        plan.run({"v": state["w"]})
    with pytest.raises(sw.LayoutError, match="the plan is for 'w'"):
        plan.run({"w": state["w"].redistribute(placements=[R, R])})
    with pytest.raises(sw.LayoutError, match="shares its memory"):
        sw.transfer(state, trainer, into=state)
    with pytest.raises(sw.LayoutError, match=r"into\['w'\]"):
        plan.run(state, into=state)
    with pytest.raises(sw.MeshError, match="fabric"):
        sw.transfer(state, sw.DeviceMesh("cpu", [8], mesh_dim_names=("tp",), fabric="dry"))
    with pytest.raises(sw.LayoutError, match="bucket_bytes"):
        sw.transfer(state, generator, bucket_bytes=0)
    differs = sw.DTensor.from_local(sw.RankTensor([torch.full((2,), i // 2) for i in range(8)]), trainer["tp"], [S0])
    with pytest.raises(sw.AgreementError, match="differs between the slices"):
        sw.transfer({"w": differs}, generator)


def test_a_write_while_a_transfer_is_under_way_is_found(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    state = {"w": sw.distribute_tensor(torch.randn(8, 6), trainer, [S0, S1])}
    pending = sw.transfer_plan(state, generator).run(state, async_op=True)
    state["w"].add_(1)
    with pytest.raises(sw.UnsupportedError, match="'w' was written to"):
        pending.wait()
    _, laid = model_on(trainer)
    optimizer = torch.optim.SGD(laid.parameters(), lr=0.1)
    laid(sw.distribute_tensor(torch.ones(8, 10), trainer, [S0, R])).sum().backward()
    pending = sw.transfer_plan(laid.state_dict(), generator).run(laid.state_dict(), async_op=True)
    optimizer.step()
    with pytest.raises(sw.UnsupportedError, match="was written to"):
        pending.wait()


def test_what_is_written_into_counts_as_written(trainer: sw.DeviceMesh, generator: sw.DeviceMesh) -> None:
    state = {"w": sw.ones(8, 6, device_mesh=trainer, placements=[S0, S1])}
    there = sw.transfer(state, generator)
    there["w"].requires_grad_()
    loss = there["w"].pow(2).sum()
    sw.transfer(state, generator, into=there)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_explain_and_dry_runs_count_it() -> None:
    with sw.dry_run() as run:
        old = sw.DeviceMesh("cpu", range(512), mesh_dim_names=("dp",))
        new = sw.DeviceMesh("cpu", range(512, 1024), mesh_dim_names=("tp",))
        state = {"w": sw.ones(4096, 512, device_mesh=old, placements=[S0])}
        moved = sw.transfer(state, new, [S1])
    assert moved["w"].spec.mesh is new
    assert run.bytes == 4096 * 4
    assert run.collectives == {"send_recv": 1}
    first, second = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [2, 3])
    state = {"w": sw.ones(4, device_mesh=first, placements=[S0])}
    with sw.explain() as report:
        sw.transfer(state, second)
    (record,) = report.records
    assert (record.name, record.received) == ("transfer", 8)
    assert record.outputs[0].mesh is second
    assert "transfer" in str(report)


def test_weights_of_a_trainer_reach_a_generator_by_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP x TP to TP of another size, other ranks, another dtype: five times, in the background, with one plan."""
    made: list[int] = []
    plan_once = transfers.plan_buckets
    monkeypatch.setattr(transfers, "plan_buckets", lambda *args: (made.append(1), plan_once(*args))[1])
    model, other, mesh, generator = synchronised_models([[0, 1], [2, 3]], [6, 4, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights = other.state_dict()
    plan = sw.transfer_plan(model.state_dict(), generator, into=weights)
    x = torch.randn(3, 6)
    for step in range(5):
        trained_once(model, optimizer, mesh, step)
        seen: list[tuple[int, int]] = []
        pending = plan.run(
            model.state_dict(),
            into=weights,
            async_op=True,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        pending.wait()
        assert seen[-1] == (pending.bytes, pending.bytes)
        assert pending.bytes == 2 * plan.bytes  # here all ranks are in one process: sent and received
        for name, value in model.state_dict().items():
            assert torch.equal(weights[name].full_tensor(), value.full_tensor().bfloat16()), name
        plain = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 7)).bfloat16()
        plain.load_state_dict({name: value.full_tensor().bfloat16() for name, value in model.state_dict().items()})
        given = sw.distribute_tensor(x.bfloat16(), generator, [sw.Replicate()])
        result = other(given)
        result = result.full_tensor() if isinstance(result, sw.DTensor) else result.tensors[0]
        torch.testing.assert_close(result, plain(x.bfloat16()), rtol=2e-2, atol=2e-2)
    assert len(made) == 1
    # each weight once to each rank that lacks it: nobody ever has more than the new parts
    lacking = sum(spec.local_bytes * 3 for spec in plan.targets.values())
    assert plan.bytes <= lacking
