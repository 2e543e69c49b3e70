"""State dicts: plain values and those of other layouts loaded into DTensors; state dicts by names with every option."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

S0, S1, R = sw.Shard(0), sw.Shard(1), sw.Replicate()
FULL = StateDictOptions(full_state_dict=True)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
}


class Net(nn.Module):
    """Uneven shards, a frozen parameter, tied ones, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 5)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.up.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.norm(self.up(x)).relu()))


def by_hand(net: Net) -> Net:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None:
                placements = [S0, S1] if p.dim() == 2 else [R, S0]
                new = made.setdefault(
                    id(p), nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements), p.requires_grad)
                )
                module._parameters[name] = new
    return net


def planned(net: Net) -> Any:
    mesh = sw.init_device_mesh("cpu", (4,))
    del net.last
    net.last = nn.Identity()
    return parallelize_module(
        net, mesh, {"up": ColwiseParallel(output_layouts=R), "down": RowwiseParallel(input_layouts=R)}
    )


def sharded(net: Net) -> Any:
    return sw.fully_shard(net, sw.init_device_mesh("cpu", (3,)))


def replicated(net: Net) -> Any:
    return sw.replicate(net, sw.init_device_mesh("cpu", (2,)))


def distributed(net: Net) -> Any:
    return sw.distribute_module(net, sw.init_device_mesh("cpu", (2,)))


MODELS = {f.__name__: f for f in (by_hand, planned, sharded, replicated, distributed)}


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def values_for(model: nn.Module) -> dict[str, torch.Tensor]:
    """A plain state dict with other values, for a model of this shape."""
    torch.manual_seed(7)
    made: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        made[key] = torch.randn(value.shape)
    if "last.weight" in made:
        made["last.weight"] = made["up.weight"]
    return made


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, sw.DTensor) else value


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    held = model.state_dict()
    assert held.keys() == expected.keys()
    for key, value in held.items():
        torch.testing.assert_close(whole(value), expected[key], rtol=0, atol=0)


def layouts(model: nn.Module) -> dict[str, Any]:
    return {name: p.spec for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, sw.DTensor)}


@pytest.fixture(params=[False, True], ids=["", "swapping"])
def swapping(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


# ---------------------------------------------------------------- load_state_dict


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_plain_state_dict_is_loaded_in_parts(kind: str, assign: bool, swapping: bool) -> None:
    model = MODELS[kind](net())
    before, given = layouts(model), values_for(model)
    frozen = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    kept = {key: value.clone() for key, value in given.items()}
    model.load_state_dict(given, assign=assign)
    assert layouts(model) == before
    assert before
    assert frozen == [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    assert_holds(model, kept)
    assert all(given[key] is not None and torch.equal(given[key], kept[key]) for key in kept)
    one = net()
    if kind == "planned":
        one.last = nn.Identity()
    one.load_state_dict(kept)
    x = torch.randn(12, 5)
    if kind == "by_hand" or kind == "distributed":
        batch: Any = sw.distribute_tensor(x, model.up.weight.device_mesh)
    elif kind == "planned":
        batch = x
    else:
        batch = sw.distribute_tensor(x, model.up.weight.device_mesh, [S0])
    torch.testing.assert_close(whole(model(batch)), one(x))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_state_dict_of_another_layout_is_loaded(kind: str, assign: bool) -> None:
    source = sw.fully_shard(net(1), sw.init_device_mesh("cpu", (4,)))
    model = MODELS[kind](net())
    state = {key: value for key, value in source.state_dict().items() if key in model.state_dict()}
    before = layouts(model)
    model.load_state_dict(state, assign=assign)
    assert before.items() <= layouts(model).items()
    assert_holds(model, {key: whole(value) for key, value in state.items()})


def test_a_sharded_state_dict_is_loaded_into_a_plain_model() -> None:
    source = by_hand(net(1))
    one = net()
    one.load_state_dict(source.state_dict())
    assert_holds(one, {key: whole(value) for key, value in source.state_dict().items()})


def test_what_does_not_fit_is_said_by_names() -> None:
    model = by_hand(net())
    given = values_for(model)
    shorter = {key: value for key, value in given.items() if key != "down.bias"}
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*down\.bias"):
        model.load_state_dict(shorter)
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for up\.weight.*\[9, 9\].*\[7, 5\]"):
        model.load_state_dict({**given, "up.weight": torch.ones(9, 9), "last.weight": torch.ones(7, 5)})
    said = model.load_state_dict({**shorter, "more": torch.ones(2)}, strict=False)
    assert (said.missing_keys, said.unexpected_keys) == (["down.bias"], ["more"])
    with pytest.raises(sw.UnsupportedError, match="from_local"):
        model.load_state_dict(
            {**given, "down.bias": sw.RankTensor([torch.full((5,), float(rank)) for rank in range(4)])}
        )


def test_dtypes_are_those_of_the_parameters_or_of_what_is_assigned() -> None:
    model = by_hand(net())
    given = {key: value.bfloat16() for key, value in values_for(model).items()}
    model.load_state_dict(given)
    assert model.up.weight.dtype is torch.float32
    assert_holds(model, {key: value.float() for key, value in given.items()})
    model.load_state_dict(given, assign=True)
    assert model.up.weight.dtype is torch.bfloat16
    assert_holds(model, given)


def test_a_model_on_the_meta_device_is_assigned() -> None:
    with torch.device("meta"):
        model = by_hand(Net())
    assert model.up.weight.is_meta
    given = values_for(model)
    model.load_state_dict(given, assign=True)
    assert (model.up.weight.device.type, model.up.weight.placements) == ("cpu", (S0, S1))
    assert_holds(model, given)


def test_hooks_that_rename_come_first() -> None:
    model = by_hand(net())
    given = values_for(model)

    def rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")

    model.down.register_load_state_dict_pre_hook(rename)
    for assign in (False, True):
        old = {("down.w" if key == "down.weight" else key): value for key, value in given.items()}
        model.load_state_dict(old, assign=assign)
        assert_holds(model, given)
        assert isinstance(model.down.weight, sw.DTensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_state_dict_of_an_optimizer_is_loaded_in_parts(name: str) -> None:
    one, model = net(), by_hand(net())
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (one, model)]
    step(one, optimizers[0])
    model.load_state_dict(one.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for state in optimizers[1].state.values():
        assert all(isinstance(v, sw.DTensor) for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    for _ in range(2):
        for m, optimizer in zip((one, model), optimizers, strict=True):
            step(m, optimizer)
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step with gradients that depend on the parameter's number alone."""
    for i, p in enumerate(model.parameters()):
        torch.manual_seed(i)
        gradient = torch.randn(p.shape)
        if p.requires_grad:
            mesh = p.device_mesh if isinstance(p, sw.DTensor) else None
            p.grad = gradient if mesh is None else sw.distribute_tensor(gradient, mesh, p.placements)
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- state dicts by names


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_got_can_be_set(name: str, full: bool, flat: bool) -> None:
    model = sharded(net())
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat, cpu_offload=full)
    states = get_state_dict(model, optimizer, options=options)
    kinds = {isinstance(v, sw.DTensor) for v in states[0].values()}
    assert kinds == ({False} if full else {True, False})
    new = sharded(net(3))
    again = OPTIMIZERS[name](new.parameters())
    for group in again.param_groups:
        group["lr"] = 17.0
    set_state_dict(new, again, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    assert layouts(new) == layouts(model)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for _ in range(2):
        step(model, optimizer)
        step(new, again)
    for ours, theirs in zip(new.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)


def test_an_optimizer_without_a_state_is_left_without_one() -> None:
    model = sharded(net())
    model.up.bias.grad = gradient = torch.ones_like(model.up.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {key: whole(value).clone() for key, value in model.state_dict().items()}
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert state["up.weight"]["exp_avg"].spec is model.up.weight.spec
    assert state["up.weight"]["step"].item() == 0
    assert not optimizer.state
    assert model.up.bias.grad is gradient
    assert model.up.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_holds(model, before)


def test_tied_parameters_on_the_meta_device_stay_tied() -> None:
    full = get_model_state_dict(sharded(net(1)), options=FULL)
    for broadcast in (False, True):
        with torch.device("meta"):
            model = sharded(Net())
        scale = model.scale
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, full, options=options)
        assert model.last.weight is model.up.weight
        assert isinstance(model.up.weight, nn.Parameter)
        assert (model.scale.device.type, model.scale is scale) == ("cpu", False)
        assert_holds(model, full)
        assert not model.norm.bias.requires_grad
        x = torch.randn(6, 5)
        batch = sw.distribute_tensor(x, model.up.weight.device_mesh, [S0])
        one = net()
        one.load_state_dict(full)
        torch.testing.assert_close(model(batch).full_tensor(), one(x))


def test_parameters_that_are_there_are_filled_and_others_made() -> None:
    full = get_model_state_dict(sharded(net(1)), options=FULL)
    model = sharded(net())
    adapter, weight = torch.device("meta"), model.up.weight
    model.norm.weight = nn.Parameter(torch.empty_like(model.norm.weight, device=adapter))
    set_model_state_dict(model, full, options=FULL)
    assert model.up.weight is weight
    assert_holds(model, full)


def test_names_are_those_without_wrappers() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4)))
    mesh = sw.init_device_mesh("cpu", (2,))
    model: Any = nn.Sequential(nn.Linear(3, 4), checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4))))
    for layer in (model[0], model[1]._checkpoint_wrapped_module[0]):
        layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, [S0]))
    compiled = nn.ModuleDict({"_orig_mod": model})  # as torch.compile names it, without compiling
    optimizer = torch.optim.AdamW(model.parameters())
    expected = values_for(plain)
    set_model_state_dict(compiled, expected)
    found = get_model_state_dict(compiled, options=FULL)
    assert found.keys() == plain.state_dict().keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key])
    states = get_optimizer_state_dict(compiled, optimizer, options=FULL)
    assert set(states["state"]) == set(plain.state_dict())
    set_optimizer_state_dict(compiled, optimizer, states, options=FULL)
    assert optimizer.state[model[0].weight]["exp_avg"].spec is model[0].weight.spec


class Renaming(nn.Module):
    """A state dict that leaves a child out of its names, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self._register_state_dict_hook(self._leave_out)
        self.register_load_state_dict_pre_hook(self._put_in)

    def hidden(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}

    @staticmethod
    def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}inner.{name}")

    @staticmethod
    def _put_in(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}inner.{name}"] = state.pop(prefix + name)


def test_children_that_are_left_out_of_names() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    model = nn.Sequential(Renaming())
    inner = model[0].inner
    inner.weight = nn.Parameter(sw.distribute_tensor(inner.weight.detach(), mesh, [S0]))
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(full_state_dict=True, dsd_fqn_modifiers="hidden")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    assert set(of_model) == set(of_optimizer["state"]) == {"0.weight", "0.bias"}
    changed = {key: value + 1 for key, value in of_model.items()}
    set_state_dict(model, optimizer, model_state_dict=changed, optim_state_dict=of_optimizer, options=options)
    torch.testing.assert_close(inner.weight.full_tensor(), changed["0.weight"])
    assert optimizer.state[inner.weight]["exp_avg"].spec is inner.weight.spec


def test_parts_of_a_model() -> None:
    model = sharded(net())
    names = get_model_state_dict(model, submodules={model.up}, options=StateDictOptions(keep_submodule_prefixes=False))
    assert set(names) == {"weight", "bias"}
    assert set(get_model_state_dict(model, submodules={model.up, model.down})) == {
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }
    assert "norm.bias" not in get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    given = {model.up: {"weight": torch.ones(7, 5), "bias": torch.ones(7)}}
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, strict=False))
    assert model.up.weight.full_tensor().eq(1).all()


def test_groups_and_several_optimizers() -> None:
    model = sharded(net())
    others = [p for n, p in model.named_parameters() if not n.startswith("up") and p.requires_grad]
    make = lambda m: [  # noqa: E731
        torch.optim.AdamW([{"params": [m.up.weight], "lr": 0.5}, {"params": [m.up.bias], "weight_decay": 0.0}]),
        torch.optim.SGD([p for n, p in m.named_parameters() if not n.startswith("up") and p.requires_grad], lr=0.3),
    ]
    optimizers = make(model)
    assert len(others) == 3
    for flat in (False, True):
        for optimizer in optimizers:
            step(model, optimizer)
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        state = get_optimizer_state_dict(model, optimizers, options=options)
        new = sharded(net(2))
        again = make(new)
        for optimizer in again:
            for group in optimizer.param_groups:
                group.update(lr=9.0)
        set_optimizer_state_dict(new, again, state, options=options)
        assert [g["lr"] for o in again for g in o.param_groups] == [0.5, 1e-3, 0.3]
        assert again[0].param_groups[1]["weight_decay"] == 0.0
        moment = again[0].state[new.up.weight]["exp_avg"]
        torch.testing.assert_close(moment.full_tensor(), optimizers[0].state[model.up.weight]["exp_avg"].full_tensor())
    joined = torch.optim.AdamW([new.up.weight, new.up.bias])
    of_two = get_optimizer_state_dict(model, optimizers[0], options=FULL)
    with pytest.raises(sw.CheckpointError, match="groups of different settings"):
        set_optimizer_state_dict(new, joined, of_two, options=FULL)


def test_a_numbered_state_dict_is_taken_for_one_optimizer() -> None:
    one, model = net(), sharded(net())
    first, second = (torch.optim.AdamW(m.parameters()) for m in (one, model))
    step(one, first)
    set_optimizer_state_dict(model, second, first.state_dict(), options=FULL)
    moment = second.state[model.down.weight]["exp_avg"]
    torch.testing.assert_close(moment.full_tensor(), first.state[one.down.weight]["exp_avg"])
    assert moment.spec is model.down.weight.spec


def test_states_are_not_shared_with_what_was_given() -> None:
    model, new = sharded(net()), sharded(net())
    first, second = (torch.optim.AdamW(m.parameters()) for m in (model, new))
    step(model, first)
    set_optimizer_state_dict(new, second, get_optimizer_state_dict(model, first))
    step(model, first)
    assert second.state[new.up.weight]["step"].item() == 1
    assert not torch.equal(
        second.state[new.up.weight]["exp_avg"].full_tensor(), first.state[model.up.weight]["exp_avg"].full_tensor()
    )


def test_errors_say_what_to_do() -> None:
    model = sharded(net())
    optimizer = torch.optim.AdamW(model.parameters())
    full = get_model_state_dict(model, options=FULL)
    states = get_optimizer_state_dict(model, optimizer, options=FULL)
    with pytest.raises(sw.CheckpointError, match="full_state_dict=True as well"):
        set_model_state_dict(model, full, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(sw.CheckpointError, match="empty"):
        set_model_state_dict(model, {})
    with pytest.raises(sw.CheckpointError, match="empty"):
        set_optimizer_state_dict(model, optimizer, {})
    del states["state"]["up.bias"]
    with pytest.raises(sw.CheckpointError, match=r"no state for up\.bias.*"):
        set_optimizer_state_dict(model, optimizer, states, options=FULL)
    set_optimizer_state_dict(model, optimizer, states, options=StateDictOptions(full_state_dict=True, strict=False))
    assert not optimizer.state[model.up.bias]
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        set_model_state_dict(model, {**full, "up.weight": torch.ones(1)}, options=FULL)
    other = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(sw.CheckpointError, match="not in the model"):
        get_optimizer_state_dict(model, other)


def test_slices_that_differ_have_no_full_state_dict() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    linear = nn.Linear(4, 4, bias=False)
    tp = mesh["tp"]
    same = sw.distribute_tensor(linear.weight.detach(), tp, [S0])
    linear.weight = nn.Parameter(same)
    full = get_model_state_dict(linear, options=FULL)["weight"]
    assert type(full) is torch.Tensor
    different = sw.RankTensor([torch.full((2, 4), float(rank)) for rank in range(4)])
    linear.weight = nn.Parameter(sw.DTensor.from_local(different, tp, [S0]))
    with pytest.raises(sw.CheckpointError, match="slice"):
        get_model_state_dict(linear, options=FULL)


def test_torchs_functions_take_our_models() -> None:
    from torch.distributed.checkpoint import state_dict as theirs

    model = sharded(net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    for ours, peers in zip(
        get_state_dict(model, optimizer, options=options),
        theirs.get_state_dict(model, optimizer, options=options),
        strict=True,
    ):
        assert ours.keys() == peers.keys()
    states = theirs.get_state_dict(model, optimizer, options=options)
    new = sharded(net(4))
    again = torch.optim.AdamW(new.parameters())
    theirs.set_state_dict(
        new, again, model_state_dict=states[0], optim_state_dict=states[1], options=theirs.StateDictOptions(True)
    )
    assert_holds(new, states[0])
    assert again.state[new.up.weight]["exp_avg"].spec is new.up.weight.spec
    assert theirs.get_model_state_dict(nn.Linear(2, 2)).keys() == {"weight", "bias"}


def test_what_is_wrapped_in_torch_is_there() -> None:
    """Fails where a version of torch has moved what load_state_dict and its state dict functions go through."""
    from torch.distributed.checkpoint import state_dict as theirs

    sw.init_device_mesh("cpu", (2,))
    wrapped = [nn.Module._load_from_state_dict, torch.optim.Optimizer._process_value_according_to_param_policy]
    wrapped += [
        getattr(theirs, f"_{verb}_{kind}_state_dict") for verb in ("get", "load") for kind in ("model", "optim")
    ]
    for function in wrapped:
        original = inspect.unwrap(function)
        assert original.__module__.startswith("torch.")
        assert original.__code__ is not function.__code__, original.__qualname__


def test_full_tensors_of_a_slice_of_a_mesh_load() -> None:
    """`full_tensor()` on one axis of two gives each rank of the other axis a value; all are the same."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer, other = (nn.Linear(4, 6, bias=False) for _ in range(2))
    wanted = layer.weight.detach().clone()
    for each in (layer, other):
        each.weight = nn.Parameter(sw.distribute_tensor(each.weight.detach(), mesh["tp"], [sw.Shard(0)]))
    state = {name: value.full_tensor() for name, value in layer.state_dict().items()}
    assert isinstance(state["weight"], sw.RankTensor)
    other.load_state_dict(state)
    assert other.weight.placements == (sw.Shard(0),)
    loaded = other.weight.full_tensor()
    assert all(torch.equal(part, wanted) for part in loaded.tensors)
