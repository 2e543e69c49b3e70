"""torch.distributed.checkpoint.state_dict: our functions and torch's on our models, against torch's on torch's."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
import torch.distributed.fsdp as their_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.checkpoint import state_dict as ours
from tests.gloo.processes import ProcessPool

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
}


class Net(nn.Module):
    """Tied and frozen parameters, a buffer, extra state, uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = "new"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.up(self.table(tokens)).relu())
        return self.out(hidden * self.scale.sum())

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


class Side(NamedTuple):
    """One of the two libraries: whose models, and whose functions."""

    shard: Callable[..., Any]
    mesh: Any
    functions: Any


def sides() -> list[Side]:
    mesh = sw.init_device_mesh("cpu", (4,))
    return [
        Side(their_fsdp.fully_shard, init_device_mesh("cpu", (4,)), theirs),
        Side(sw.fully_shard, mesh, ours),
        Side(sw.fully_shard, mesh, theirs),
    ]


def model_of(side: Side, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = Net()
    side.shard(net.up, mesh=side.mesh)
    return side.shard(net, mesh=side.mesh)


def trained(side: Side, kind: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = model_of(side, seed)
    groups = [{"params": [model.table.weight], "lr": 0.05}, {"params": [*model.up.parameters()]}]
    optimizer = OPTIMIZERS[kind](groups)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randint(0, 11, (8, 3))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.note = "trained"
    return model, optimizer


def plain(value: Any) -> Any:
    """A state as plain values; a DTensor, of either library, is marked as one."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "full_tensor"):
        return "sharded", value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def options_of(side: Side, **options: Any) -> Any:
    return side.functions.StateDictOptions(**options)


GETTING: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "rank 0": {"full_state_dict": True, "cpu_offload": True},
    "offloaded": {"cpu_offload": True},
    "trained only": {"ignore_frozen_params": True, "full_state_dict": True},
}


def got(side: Side, kind: str) -> dict[str, Any]:
    """What each way of getting gives."""
    model, optimizer = trained(side, kind)
    found: dict[str, Any] = {}
    for name, options in GETTING.items():
        for flat in (False, True):
            chosen = options_of(side, flatten_optimizer_state_dict=flat, **options)
            if not (options.get("full_state_dict") or options.get("cpu_offload")):
                found[name, flat] = plain(side.functions.get_state_dict(model, optimizer, options=chosen))
                continue
            model.note = 7  # torch takes numbers and strings alone here
            found[name, flat] = plain(side.functions.get_state_dict(model, optimizer, options=chosen))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for keep in (True, False):
            chosen = options_of(side, keep_submodule_prefixes=keep)
            found["submodule", keep] = plain(
                side.functions.get_model_state_dict(model, submodules={model.up}, options=chosen)
            )
    return found


def resumed(side: Side, kind: str, how: str) -> dict[str, Any]:
    """A model and an optimizer after what was saved has been loaded into new ones, in one of the ways."""
    model, optimizer = trained(side, kind)
    full, flat = how.startswith(("full", "sent")), "flat" in how
    chosen = options_of(
        side, full_state_dict=full, cpu_offload=how.startswith("sent"), flatten_optimizer_state_dict=flat
    )
    saved = copy.deepcopy(side.functions.get_state_dict(model, optimizer, options=chosen))
    if how.startswith("sent"):
        assert all(bool(part) == (torch.distributed.get_rank() == 0) for part in saved)
    new = model_of(side, seed=1)
    if "meta" in how:
        with torch.device("meta"):
            new = model_of(side, seed=1)
    loading = options_of(side, full_state_dict=full, broadcast_from_rank0=how.startswith("sent"))
    said = side.functions.set_model_state_dict(new, dict(saved[0]), options=loading)
    assert (list(said.missing_keys), list(said.unexpected_keys)) == ([], [])
    groups = [{"params": [new.table.weight], "lr": 3.0}, {"params": [*new.up.parameters()], "lr": 4.0}]
    again = OPTIMIZERS[kind](groups)
    side.functions.set_optimizer_state_dict(new, again, copy.deepcopy(saved[1]), options=loading)
    if "meta" in how:
        new.scratch.data = torch.zeros(2) if not new.scratch.is_meta else new.scratch.data
    assert hasattr(new.table.weight, "placements"), "the parameters are sharded still"
    if "meta" not in how:
        assert new.out.weight is new.table.weight
    torch.manual_seed(9)
    tokens = torch.randint(0, 11, (8, 3))
    losses = []
    for _ in range(2):
        loss = new(tokens).square().mean()
        loss.backward()
        again.step()
        again.zero_grad()
        losses.append(loss.item())
    return {"state": plain(new.state_dict()), "optimizer": plain(again.state_dict()), "losses": losses}


def assert_same(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: {one.keys()} and {other.keys()}"
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, msg=lambda text: f"{where}: {text}")
    else:
        assert one == other, where


def compared(function: Callable[..., Any], *args: Any) -> None:
    reference, *others = (function(side, *args) for side in sides())
    for which, other in zip(("ours", "torch's on ours"), others, strict=True):
        assert_same(other, reference, which)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_getting_gives_what_torch_gives(gloo4: ProcessPool, kind: str) -> None:
    gloo4.run(compared, got, kind, timeout=120)


@pytest.mark.parametrize("how", ["sharded", "sharded flat", "full", "full flat", "sent", "sent flat"])
def test_resuming_is_as_in_torch(gloo4: ProcessPool, how: str) -> None:
    gloo4.run(compared, resumed, "adamw", how, timeout=120)
