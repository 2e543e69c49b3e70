"""Saved programs: loaded, they give the bits of eager; what does not fit, is damaged or is no program is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import LayoutError, UnsupportedError
from tests.virtual.saved_programs import made, train_saved


def mesh_of(size: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def test_a_training_step(tmp_path: Path) -> None:
    train_saved(tmp_path / "step", mesh_of(2))
    assert [file.name for file in (tmp_path / "step").iterdir()] == ["rank0.json"]


def test_an_inference(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    weight = sw.randn(4, 8, device_mesh=mesh, placements=[sw.Shard(1)])
    shift = sw.randn(4, device_mesh=mesh)

    def function(x: Any, *, low: float) -> Any:
        return [(x @ weight.t() + shift).clamp(min=low).full_tensor(), torch.full((2,), float("inf"))]

    step = sw.captured(function)
    x = sw.randn(3, 8, device_mesh=mesh)
    for _ in range(3):
        step(x, low=0.5)
    step.save(tmp_path, state={"weight": weight, "shift": shift})
    others = [weight * 2, shift + 1]
    loaded = sw.load_captured(tmp_path, state={"weight": others[0], "shift": others[1]})
    weight, shift = others
    for _ in range(2):
        x = sw.randn(3, 8, device_mesh=mesh)
        assert all(map(torch.equal, loaded(x, low=0.5), function(x, low=0.5)))
    for args, kwargs in (((x,), {"low": 0.25}), ((x,), {}), ((x, x), {"low": 0.5}), ((1.0,), {"low": 0.5})):
        with pytest.raises(LayoutError):
            loaded(*args, **kwargs)
    for other in (sw.randn(4, 8, device_mesh=mesh), sw.randn(3, 8, device_mesh=mesh, placements=[sw.Shard(0)]),
                  sw.randn(3, 8, device_mesh=mesh).double(), torch.randn(3, 8)):  # fmt: skip
        with pytest.raises(LayoutError, match="argument"):
            loaded(other, low=0.5)
    with pytest.raises(UnsupportedError, match="no function"), sw.explain():
        loaded(x, low=0.5)


def test_objects_that_do_not_fit(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    model, optimizer, train = made(mesh)
    step = sw.captured(train)
    x = torch.randn(4, 8)
    for _ in range(4):
        step(x, 2.0)
    with pytest.raises(UnsupportedError, match="no object that was given holds"):
        step.save(tmp_path, optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="was not named"):
        step.save(tmp_path, model=model)
    assert not list(tmp_path.iterdir())
    step.save(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(LayoutError, match="AdamW"):
        sw.load_captured(tmp_path, model=model)
    with pytest.raises(LayoutError, match="AdamW"):
        sw.load_captured(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(LayoutError, match="no states yet"):
        sw.load_captured(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(LayoutError, match="mesh"):
        sw.load_captured(tmp_path, optimizer=optimizer)
    wide, wide_optimizer, _ = made(mesh_of(4))
    with pytest.raises(LayoutError, match="mesh"):
        sw.load_captured(tmp_path, model=wide, optimizer=wide_optimizer)
    model.get_parameter("up.weight").requires_grad_(False)
    with pytest.raises(LayoutError, match="requires_grad"):
        sw.load_captured(tmp_path, model=model, optimizer=optimizer)


def _with_gradient(model: Any, optimizer: Any) -> None:
    weight = model.get_parameter("up.weight")
    weight.grad = torch.ones_like(weight)


def _other_states(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def _untied(model: Any, optimizer: Any) -> None:
    model.up.weight = torch.nn.Parameter(model.tied.detach() * 2)


def _tied(model: Any, optimizer: Any) -> None:
    model.get_parameter("other").data = model.get_parameter("up.weight").data


def _more_parameters(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def _other_parameters(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_gradient, "has a gradient, and had none"),
        (_other_states, "amsgrad or centered or momentum of AdamW was turned on or off"),
        (_untied, "up.weight is another tensor than model.tied"),
        (_tied, "shares memory with"),
        (_more_parameters, "parameters, and had"),
        (_other_parameters, "no parameter of the AdamW that is given, or another one"),
    ],
)
def test_objects_that_are_related_in_another_way(change: Any, message: str, tmp_path: Path) -> None:
    """Each is as it was; gradients, states and which tensors are one are not."""
    model, optimizer, train = made(mesh_of(2))
    weight = model.get_parameter("up.weight")
    model.register_parameter("tied", weight)
    model.register_parameter("other", torch.nn.Parameter(torch.ones_like(weight)))
    x = torch.randn(4, 8)

    def function(x: Any, scale: float) -> Any:
        return train(x, scale)["loss"].detach() + sum(
            model.get_parameter(name).detach().sum() for name in ("other", "tied")
        )

    step = sw.captured(function)
    for _ in range(4):
        step(x, 2.0)
    step.save(tmp_path, model=model, optimizer=optimizer)
    loaded = sw.load_captured(tmp_path, model=model, optimizer=optimizer)
    loaded(x, 2.0)
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(LayoutError, match=message):
        loaded(x, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_zero_has_a_sign(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    step = sw.captured(lambda x, divisor: x / divisor)
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    for _ in range(3):
        step(x, 0.0)
    step.save(tmp_path)
    loaded = sw.load_captured(tmp_path, mesh=mesh)
    assert loaded(x, 0.0).full_tensor().tolist() == [float("inf")] * 4
    with pytest.raises(LayoutError, match=r"-0\.0"):
        loaded(x, -0.0)


def test_files_that_are_no_programs(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    weight = sw.ones(4, device_mesh=mesh)
    step = sw.captured(lambda: weight.exp())
    for _ in range(3):
        step()
    step.save(tmp_path, weight=weight)
    file = tmp_path / "rank0.json"
    good = json.loads(file.read_text())

    def changed(**changes: Any) -> None:
        file.write_text(json.dumps(good | changes))

    marker = tmp_path / "marker"
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    call = good["calls"][0]
    cases: list[dict[str, Any]] = [
        {"format": "other"},
        {"name": f"f(x): {evil}\ndef g"},
        {"calls": [{**call, "op": "aten.from_file.default"}]},
        {"calls": [{**call, "op": f"aten.exp.default({evil})"}]},
        {"calls": [{**call, "op": "os.system.default"}]},
        {"calls": [{**call, "args": [{"v": evil}]}]},
        {"calls": [{**call, "args": [{"code": evil}]}]},
        {"calls": [{**call, "kwargs": {evil: 1}}]},
        {"calls": [{**call, "kwargs": {f"x=1); {evil}; print(v": 1}}]},
        {"schemas": dict.fromkeys(good["schemas"], "other")},
        {"wanted": [evil]},
    ]
    for case in cases:
        changed(**case)
        with pytest.raises((UnsupportedError, LayoutError)):
            sw.load_captured(tmp_path, weight=weight)
    changed(calls=[{**each, "at": [f"x\n{evil}", 1, "", "forward", f"\n{evil}"]} for each in good["calls"]])
    assert torch.equal(sw.load_captured(tmp_path, weight=weight)().full_tensor(), torch.ones(4).exp())
    file.write_text("{")
    with pytest.raises(UnsupportedError, match="damaged"):
        sw.load_captured(tmp_path, weight=weight)
    file.unlink()
    with pytest.raises(UnsupportedError, match="cannot be read"):
        sw.load_captured(tmp_path, weight=weight)
    assert not marker.exists()


def test_programs_that_a_file_cannot_hold(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    notes: list[Any] = [None]

    def noted() -> None:
        notes[0] = x * 2

    step = sw.captured(noted)
    for _ in range(4):
        step()
    with pytest.raises(UnsupportedError, match="cannot hold"):
        step.save(tmp_path, x=x)
    assert not list(tmp_path.iterdir())


def test_a_step_that_changes_a_list_is_not_saved(tmp_path: Path) -> None:
    counts = [0]

    def counted(x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return x + 1

    step = sw.captured(counted)
    for _ in range(4):
        step(torch.ones(1))
    with pytest.raises(UnsupportedError, match="replaces, which a file cannot hold"):
        step.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"x": x}])
def test_one_container_in_two_places_is_not_saved(make: Any, tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> Any:
        held = make(x + 1)
        return held, (held, 1)

    def copied(x: torch.Tensor) -> Any:
        pair = (x + 1, 1)
        return make(pair), make(pair), pair

    step, other = sw.captured(function), sw.captured(copied)
    for _ in range(4):
        step(torch.ones(1))
        other(torch.ones(1))
    with pytest.raises(UnsupportedError, match="in two places"):
        step.save(tmp_path)
    assert not list(tmp_path.iterdir())
    other.save(tmp_path)
    assert sw.load_captured(tmp_path)(torch.ones(1)) == copied(torch.ones(1))


def test_random_numbers(tmp_path: Path) -> None:
    x = sw.ones(8, device_mesh=mesh_of(2), placements=[sw.Shard(0)])

    def drawn() -> Any:
        return torch.nn.functional.dropout(x)

    step = sw.captured(drawn)
    for _ in range(3):
        step()
    step.save(tmp_path, x=x)
    loaded = sw.load_captured(tmp_path, x=x)
    for seed in range(3):
        torch.manual_seed(seed)
        found = loaded().full_tensor()
        torch.manual_seed(seed)
        assert torch.equal(found, drawn().full_tensor())


@pytest.mark.parametrize(("name", "value"), [("made", 7), ("args", []), ("args", [7])])
def test_a_damaged_name_of_a_value_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    mesh = mesh_of(2)
    weight = torch.nn.Parameter(sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]))
    step = sw.captured(lambda x: (x * weight.detach()).relu().detach())
    for _ in range(3):
        step(sw.ones(4, device_mesh=mesh))
    step.save(tmp_path, weight=weight)
    file = tmp_path / "rank0.json"
    document = json.loads(file.read_text())
    calls = [call for call in document["calls"] if call.get("op") == "aten.detach.default"]
    assert calls
    calls[0][name] = value
    file.write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match="damaged"):
        sw.load_captured(tmp_path, weight=weight)
