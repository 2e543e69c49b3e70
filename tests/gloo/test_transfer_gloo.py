"""Transfers of states between meshes of processes; more of them: `python -m tests.gloo.state_transfers`."""

from typing import Any

import torch

import shardwise as sw
from shardwise.meshes import transfers
from tests.gloo.processes import ProcessPool
from tests.gloo.state_transfers import check_processes
from tests.weight_sync import synchronised_models, trained_once

S0, S1 = sw.Shard(0), sw.Shard(1)


def test_random_pairs_are_bit_equal_and_send_the_least(gloo4: ProcessPool) -> None:
    assert check_processes(gloo4, list(range(1000, 1008))) > 0


def synchronise() -> list[Any]:
    """Two trainers, one generator, and one rank that is in neither mesh and goes on with its own work."""
    trainer = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    generator = sw.DeviceMesh("cpu", [2], mesh_dim_names=("tp",))
    rank = torch.distributed.get_rank()
    values = torch.arange(24.0).reshape(6, 4)
    state: dict[str, Any] = {"w": sw.distribute_tensor(values, trainer, [S0], src_data_rank=None)}
    if rank >= 2:  # outside of the mesh the spec is enough
        state = {"w": state["w"].spec}
    plan = sw.transfer_plan(state, generator, dtype=torch.float64, bucket_bytes=32)
    weights: Any = None
    pending: Any = None
    for _ in range(3):
        pending = plan.run(state, into=weights, async_op=True)
        weights = pending.wait()
        if rank < 2:
            state["w"].add_(1)
    return [weights["w"].to_local().tolist(), pending.bytes_done, pending.bytes]


def test_a_rank_in_neither_mesh_does_nothing(gloo4: ProcessPool) -> None:
    answers = gloo4.run(synchronise)
    assert answers[2] == [(torch.arange(24.0).reshape(6, 4) + 2).tolist(), 96, 96]
    assert [answer[0] for answer in answers[:2]] == [[], []]
    assert [answer[1:] for answer in answers[:2]] == [[48, 48], [48, 48]]
    assert answers[3] == [[], 0, 0]


def in_turn() -> list[Any]:
    """Several transfers in flight between the same ranks arrive in the order in which they were started."""
    world = sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("a",))
    states = [{"w": sw.full((8, 4), float(i), device_mesh=world, placements=[S0])} for i in range(4)]
    plan = sw.transfer_plan(states[0], world, [S1])
    flights = [plan.run(state, async_op=True) for state in states]
    return [flight.wait()["w"].full_tensor().unique().tolist() for flight in reversed(flights)]


def test_transfers_in_flight_do_not_mix(gloo4: ProcessPool) -> None:
    assert gloo4.run(in_turn) == [[[3.0], [2.0], [1.0], [0.0]]] * 4


def train_and_generate() -> list[Any]:
    """Two ranks train, two others generate; the plan is made once."""
    made: list[int] = []
    plan_once = transfers.plan_buckets
    transfers.plan_buckets = lambda *args: (made.append(1), plan_once(*args))[1]
    try:
        model, other, mesh, generator = synchronised_models([[0], [1]], [2, 3])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        weights = other.state_dict()
        plan = sw.transfer_plan(model.state_dict(), generator, into=weights)
        rank, moved = torch.distributed.get_rank(), []
        for step in range(4):
            if rank < 2:
                trained_once(model, optimizer, mesh, step)
            pending = plan.run(model.state_dict(), into=weights, async_op=True)
            pending.wait()
            moved.append(pending.bytes_done)
        source = model.state_dict() if rank < 2 else weights
        return [{name: value.full_tensor().float() for name, value in source.items()}, moved, len(made)]
    finally:
        transfers.plan_buckets = plan_once


def test_weights_of_a_trainer_reach_a_generator_by_one_plan(gloo4: ProcessPool) -> None:
    answers = gloo4.run(train_and_generate)
    assert [answer[2] for answer in answers] == [1] * 4
    for rank in (2, 3):
        assert len(set(answers[rank][1])) == 1
        assert answers[rank][1][0] > 0
        for name, value in answers[0][0].items():
            assert torch.equal(answers[rank][0][name], value.bfloat16().float()), name
