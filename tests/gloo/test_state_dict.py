"""State dicts on real processes: rank 0 gets or sends everything, plain values are cut, errors reach all ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.gloo.processes import ProcessPool, RankFailed
from tests.virtual.test_state_dict import Net, by_hand, layouts, net, planned, step, values_for

RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def model_of(kind: str, made: Net) -> Any:
    if kind == "fully_shard":
        return sw.fully_shard(made, sw.init_device_mesh("cpu", (4,)))
    return (by_hand if kind == "by hand" else planned)(made)


def plain_into_parts(kind: str) -> None:
    for assign in (False, True):
        model = model_of(kind, net())
        before, given = layouts(model), values_for(model)
        model.load_state_dict(given, assign=assign)
        assert layouts(model) == before
        for key, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, sw.DTensor) else value
            torch.testing.assert_close(whole, given[key], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["by hand", "planned", "fully_shard"])
def test_a_plain_state_dict_is_loaded_in_parts(gloo4: ProcessPool, kind: str) -> None:
    gloo4.run(plain_into_parts, kind, timeout=120)


def through_rank_0(kind: str) -> None:
    model = model_of(kind, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    full = get_model_state_dict(model, options=RANK0)
    states = get_optimizer_state_dict(model, optimizer, options=RANK0)
    if dist.get_rank() == 0:
        assert all(type(value) is torch.Tensor for value in full.values())
    else:
        assert (full, states) == ({}, {})
    for on_meta in (False, True):
        if on_meta:
            with torch.device("meta"):
                new = model_of(kind, Net())
        else:
            new = model_of(kind, net(5))
        set_model_state_dict(new, copy.deepcopy(full), options=SENT)
        again = torch.optim.AdamW(new.parameters(), lr=3.0)
        set_optimizer_state_dict(new, again, copy.deepcopy(states), options=SENT)
        assert layouts(new) == layouts(model)
        assert again.param_groups[0]["lr"] == 0.1
        kept = copy.deepcopy(optimizer.state_dict())
        for ours, theirs in zip(new.parameters(), model.parameters(), strict=True):
            whole = (p.full_tensor() if isinstance(p, sw.DTensor) else p for p in (ours, theirs))
            torch.testing.assert_close(*whole, rtol=0, atol=0)
            for key, value in again.state[ours].items():
                other = optimizer.state[theirs][key]
                assert isinstance(value, sw.DTensor) == isinstance(other, sw.DTensor)
                whole = (v.full_tensor() if isinstance(v, sw.DTensor) else v for v in (value, other))
                torch.testing.assert_close(*whole, rtol=0, atol=0)
        optimizer.load_state_dict(kept)


@pytest.mark.parametrize("kind", ["by hand", "planned", "fully_shard"])
def test_rank_0_gets_and_sends_everything(gloo4: ProcessPool, kind: str) -> None:
    gloo4.run(through_rank_0, kind, timeout=120)


def given_to_rank_0_alone(what: str) -> None:
    model = model_of("fully_shard", net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    if what == "sharded":
        set_model_state_dict(model, get_model_state_dict(model), options=SENT)
    elif what == "model":
        set_model_state_dict(
            model, get_model_state_dict(model, options=RANK0), options=StateDictOptions(full_state_dict=True)
        )
    else:
        states = get_optimizer_state_dict(model, optimizer, options=RANK0)
        set_optimizer_state_dict(model, optimizer, states, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(
    ("what", "said"),
    [("sharded", "full_state_dict=True"), ("model", "broadcast_from_rank0=True"), ("optimizer", "some ranks")],
)
def test_what_would_hang_is_an_error_on_all_ranks(gloo4: ProcessPool, what: str, said: str) -> None:
    with pytest.raises(RankFailed, match=said) as failed:
        gloo4.run(given_to_rank_0_alone, what, timeout=120)
    assert all(f"rank {rank}" in str(failed.value) for rank in range(4))


def wrong_shapes() -> str:
    model = model_of("fully_shard", net())
    full = get_model_state_dict(model, options=RANK0)
    if full:
        full["up.bias"] = torch.ones(3)
        full["more"] = torch.ones(3)
    try:
        set_model_state_dict(model, full, options=SENT)
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_hear_what_does_not_fit(gloo4: ProcessPool) -> None:
    said = gloo4.run(wrong_shapes, timeout=120)
    assert len(set(said)) == 1
    assert "size mismatch for up.bias" in said[0]
    assert '"more"' in said[0]


def optimizer_of_one_device() -> None:
    one, model = net(), by_hand(net())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, model)]
    step(one, optimizers[0])
    model.load_state_dict(one.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for m, optimizer in zip((one, model), optimizers, strict=True):
        step(m, optimizer)
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
        momentum = optimizers[1].state[ours].get("momentum_buffer")
        assert momentum is None or momentum.spec is ours.spec


def test_a_plain_state_dict_of_an_optimizer_is_loaded_in_parts(gloo4: ProcessPool) -> None:
    gloo4.run(optimizer_of_one_device, timeout=120)
