"""Checkpoints on virtual ranks: any layout to any other bit by bit, what is refused, what is left on disk."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
import re
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import torch

import shardwise as sw
from shardwise.checkpoint import async_save, export_safetensors, load, load_safetensors, read, save
from shardwise.checkpoint.io import atomic_directory as atomic
from shardwise.checkpoint.io.atomic_directory import Staging
from shardwise.checkpoint.operations import save_checkpoint as writing
from shardwise.checkpoint.operations.load_checkpoint import open_index
from shardwise.fabric.base import fabric_of
from tests.virtual.checkpoints import (
    MESHES,
    OBJECTS,
    Trained,
    full,
    laid_out,
    mesh_of,
    same_bits,
    values,
    zeroed,
)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(MESHES, MESHES)))
def test_any_mesh_to_any_other(before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path) -> None:
    rng = random.Random(f"{before} {after}")
    tensors = values(rng.randrange(100))
    save({"tensors": laid_out(tensors, mesh_of(before), rng), "objects": OBJECTS}, tmp_path / "c")
    target = zeroed(laid_out(tensors, mesh_of(after), rng))
    staged = rng.random() < 0.5
    loaded = load({"tensors": target, "objects": forgotten(OBJECTS)}, tmp_path / "c", staged=staged)
    for name, tensor in tensors.items():
        assert same_bits(full(target[name]), tensor), name
        assert replicas_agree(target[name]), name
    plain = read(tmp_path / "c")
    assert all(same_bits(plain["tensors"][name], tensor) for name, tensor in tensors.items())
    assert repr(plain["objects"]) == repr(loaded.state["objects"]) == repr(OBJECTS)


def forgotten(value: Any) -> Any:
    """The same dicts without what is in them."""
    return {key: forgotten(item) for key, item in value.items()} if isinstance(value, dict) else None


def replicas_agree(value: Any) -> bool:
    """Whether all ranks that hold a block hold the same; the whole tensor is made of one of each."""
    if not isinstance(value, sw.DTensor):
        return True
    blocks: dict[Any, torch.Tensor] = {}
    for coordinate, part in fabric_of(value.device_mesh).parts(value.device_mesh, value.to_local()):
        if not same_bits(blocks.setdefault(value.spec.block(coordinate), part), part):
            return False
    return True


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4,), (1,)])
def test_training_goes_on_as_if_it_had_not_stopped(shape: tuple[int, ...], tmp_path: Path) -> None:
    first = Trained(mesh_of((2, 2)))
    first.train(3)
    first.save(tmp_path / "step-3")
    whole = {name: full(p.detach()) for name, p in first.parameters.items()}
    resumed = Trained(mesh_of(shape), seed=1)
    resumed.load(tmp_path / "step-3")
    for name, parameter in resumed.parameters.items():
        assert same_bits(full(parameter.detach()), whole[name])
        ours, theirs = (t.optimizer.state[t.parameters[name]] for t in (resumed, first))
        assert ours["exp_avg"].spec.layout == parameter.spec.layout
        assert all(same_bits(full(ours[key]), full(theirs[key])) for key in theirs)
    assert resumed.train(3) == pytest.approx(first.train(3), rel=1e-6 if shape != (2, 2) else 0, abs=0)


def test_a_module_an_optimizer_and_the_random_state(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer

    model, optimizer = make()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}, tmp_path / "c")
    drawn = torch.rand(3)
    other, other_optimizer = make()
    state = {"model": other, "optimizer": other_optimizer, "random": torch.get_rng_state()}
    assert load(state, tmp_path / "c").state["model"] is other
    torch.set_rng_state(state["random"])  # pyright: ignore[reportArgumentType]
    assert torch.equal(torch.rand(3), drawn)
    for ours, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert repr(other_optimizer.state_dict()) == repr(optimizer.state_dict())


class WithExtra(torch.nn.Module):
    """An extra state that is a tensor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 2), value))
        self.extra = torch.full((2,), value)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state.clone()


class InHalf(torch.nn.Linear):
    """A state dict that has other tensors than the module."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2, bias=False)
        torch.nn.init.constant_(self.weight, value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **options).items()}


def with_hook(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)

    def copied(module: Any, state: dict[str, Any], *rest: Any) -> None:
        state.update({name: tensor.clone() for name, tensor in state.items()})

    model._register_state_dict_hook(copied)
    return model


@pytest.mark.parametrize("make", [WithExtra, InHalf, with_hook])
@pytest.mark.parametrize("staged", [True, False])
def test_modules_whose_state_dict_has_copies(make: Any, staged: bool, tmp_path: Path) -> None:
    save({"model": make(5.0)}, tmp_path / "c")
    model = make(0.0)
    load({"model": model}, tmp_path / "c", staged=staged)
    assert model.weight.eq(5).all()
    assert getattr(model, "extra", model.weight).eq(5).all()


@pytest.mark.parametrize("sharded", [True, False])
def test_tied_tensors_get_values_of_one_tensor(sharded: bool, tmp_path: Path) -> None:
    def laid(value: float) -> torch.Tensor:
        plain = torch.full((4, 2), value)
        return sw.distribute_tensor(plain, mesh_of((4,)), [sw.Shard(1)]) if sharded else plain

    one = laid(1.0)
    save({"a": one, "b": one.detach(), "empty": torch.zeros(0, 2)}, tmp_path / "tied")
    save({"a": laid(2.0), "b": laid(3.0), "empty": torch.zeros(0, 2)}, tmp_path / "untied")
    target = laid(0.0)
    state = {"a": target, "b": target.detach(), "empty": torch.zeros(0, 2)}
    load(state, tmp_path / "tied")
    assert full(target).eq(1).all()
    with pytest.raises(sw.CheckpointMismatchError, match="b has the memory of a in the state"):
        load(state, tmp_path / "untied")
    assert full(target).eq(1).all()
    assert set(load(state, tmp_path / "untied", strict=False).mismatched) == {"b"}
    assert full(target).eq(2).all()


# ---------------------------------------------------------------- who writes and reads what


def test_replicas_are_written_once_and_spread_evenly(tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    big = sw.distribute_tensor(torch.arange(2**19).float(), mesh, [sw.Replicate(), sw.Replicate()])
    rows = sw.distribute_tensor(torch.rand(64, 64), mesh, [sw.Replicate(), sw.Shard(0)])
    save({"big": big, "rows": rows, "plain": torch.rand(64, 32), "same": torch.rand(64, 32)}, tmp_path / "c")
    index = open_index(tmp_path / "c")
    sizes = list(index.files.values())
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) == 0
    assert sum(sizes) - 4 * 4096 == sum(tensor.nbytes for tensor in index.tensors.values())
    assert {block.file for block in index.tensors["big"].blocks} == set(index.files)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([sw.Shard(0), sw.Shard(0)], [sw.Shard(1), sw.Shard(1)]),
        ([sw.Shard(1), sw.Shard(1)], [sw.Shard(0), sw.Shard(0)]),
        ([sw.Shard(1), sw.Shard(0)], [sw.Shard(0), sw.Replicate()]),
        ([sw.Replicate(), sw.StridedShard(0, 3)], [sw.StridedShard(1, 2), sw.Shard(0)]),
        ([sw.Shard(1), sw.Zigzag(0)], [sw.Zigzag(1), sw.Shard(0)]),
        ([sw.Zigzag(0, blocks=(2, 1, 0, 3)), sw.Replicate()], [sw.Shard(0), sw.Zigzag(0)]),
    ],
)
def test_a_rank_reads_what_it_needs_and_no_more(before: list[Any], after: list[Any], tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    x = torch.rand(66, 8192)  # gaps of at least a page: shorter ones are read
    save({"x": sw.distribute_tensor(x, mesh, before)}, tmp_path / "c")
    target = sw.distribute_tensor(torch.zeros_like(x), mesh, after)
    loaded = load({"x": target}, tmp_path / "c")
    assert loaded.bytes_read == sum(part.nbytes for part in target.to_local().tensors)
    assert torch.equal(target.full_tensor(), x)


def test_any_safetensors_reader_can_read_the_blocks(tmp_path: Path) -> None:
    tensors = values(3)
    save({"tensors": laid_out(tensors, mesh_of((2, 3)), random.Random(1))}, tmp_path / "c")
    index = open_index(tmp_path / "c")
    for stored in index.tensors.values():
        whole = tensors[stored.name.removeprefix("tensors/")]
        for block in stored.blocks:
            with safetensors.safe_open(tmp_path / "c" / block.file, "pt") as file:
                data = file.get_tensor(f"{stored.name}@{','.join(map(str, block.box.offset))}")
            part = whole[tuple(slice(a, a + n) for a, n in zip(block.box.offset, block.box.sizes, strict=True))]
            assert same_bits(data, torch.view_as_real(part) if data.dtype is torch.float64 else part)


# ---------------------------------------------------------------- kinds of values


class Pair(NamedTuple):
    a: int
    b: int


class Renamed(dict[str, int]):
    """A dict of a kind that a checkpoint does not know."""


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        OrderedDict({3: OrderedDict(), "$x": (OrderedDict(a=None),)}),
        defaultdict(list, {"a": [1], "b": []}),
        defaultdict(None, {1: 2}),
        defaultdict(OrderedDict, a=OrderedDict(b=[defaultdict(int)])),
        Counter("abca"),
        [OrderedDict(a=1), {"b": Counter({5: -1})}],
    ],
)
def test_kinds_of_dicts_come_back(value: Any, tmp_path: Path) -> None:
    save({"value": value, "beside": OrderedDict(t=torch.ones(1), x=[value])}, tmp_path / "c")
    back = read(tmp_path / "c")
    assert type(back["beside"]) is OrderedDict
    for again in (back["value"], back["beside"]["x"][0]):
        assert again == value
        assert repr(again) == repr(value)
        assert type(again) is type(value)
    target = {"value": copy.deepcopy(value), "beside": {"t": torch.zeros(1), "x": None}}
    loaded = load(target, tmp_path / "c").state
    assert repr(loaded["value"]) == repr(value)
    assert repr(loaded["beside"]["x"]) == repr([value])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 2)[:1, 0],
        torch.arange(6.0).reshape(2, 3)[:, 1],
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(3.0).expand(2, 3),
        torch.tensor(5, dtype=torch.uint16),
        torch.zeros(0, 3)[:, 1:],
        torch.zeros(3, 0).T,
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).imag.neg(),
        torch._neg_view(torch.tensor([1.0, -2.0])),
        torch.ones(2, 2, dtype=torch.bool)[0, :1],
        torch.ones(3, 3).to(torch.float8_e5m2)[1:2, 2],
        torch.ones(2, requires_grad=True)[:1],
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}{t.stride()}",
)
def test_views_of_all_kinds(tensor: torch.Tensor, tmp_path: Path) -> None:
    values = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    for name, saving in (("a", save), ("b", lambda *args: async_save(*args).wait())):
        saving({"x": tensor}, tmp_path / name)
        assert same_bits(read(tmp_path / name)["x"], values)
        for staged in (True, False):
            base = torch.zeros([2 * n + 1 for n in tensor.shape], dtype=tensor.dtype)
            view = base[tuple(slice(1, None, 2) for _ in tensor.shape)]  # with gaps between its elements
            load({"x": view}, tmp_path / name, staged=staged)
            assert same_bits(view, values)
            view.zero_()
            assert same_bits(base, torch.zeros_like(base))  # nothing beside it was written


def test_names_of_all_kinds(tmp_path: Path) -> None:
    state: dict[Any, Any] = {"a.b": 1, "a": {"b": torch.ones(1), "": torch.zeros(1)}, "ä/ö~": torch.ones(2), 7: {}}
    state["n" * 5000] = torch.ones(3)
    save(state, tmp_path / "c")
    assert repr(read(tmp_path / "c")) == repr(state)
    save({}, tmp_path / "empty")
    assert read(tmp_path / "empty") == {}


def test_very_many_small_tensors(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((2,), i) for i in range(1000)}
    save(state, tmp_path / "c")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(target, tmp_path / "c")
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a/b is of type builtins.object"),
        ([1, {2, 3}], "a/b/1 is of type builtins.set"),
        (b"bytes", "a/b is of type builtins.bytes"),
        (1j, "a/b is of type builtins.complex"),
        (np.float32(1), "a/b is of type numpy.float32"),
        ({1.5: 2}, "a/b has the key 1.5"),
        ({0: 1, "0": 2}, "two entries of the state have the name a/b/0"),
        (Pair(1, 2), "a/b is of type tests.virtual.test_checkpoint.Pair"),
        (Renamed(a=1), "a/b is of type tests.virtual.test_checkpoint.Renamed"),
        (defaultdict(lambda: 3), "a/b is a defaultdict of <function"),
        (torch.eye(3).to_sparse(), "a/b is a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "a/b is on the meta device"),
    ],
)
def test_what_a_checkpoint_cannot_hold(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match=re.escape(message)):
        save({"a": {"b": value}}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_partial_nested_dry_and_rank_tensors_are_refused(tmp_path: Path) -> None:
    mesh = mesh_of((2,))
    partial = sw.distribute_tensor(torch.ones(2), mesh, [sw.Partial()])
    with pytest.raises(sw.CheckpointError, match=r"x is f32\[2\] dp:P: its value is not yet reduced"):
        save({"x": partial}, tmp_path / "c")
    save({"x": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(sw.CheckpointMismatchError, match="a Partial cannot be filled"):
        load({"x": partial}, tmp_path / "c")
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(sw.CheckpointError, match="nested more than"):
        save({"x": nested}, tmp_path / "d")
    with pytest.raises(sw.UnsupportedError, match="RankTensor"):
        save({"x": partial.to_local()}, tmp_path / "d")
    with sw.dry_run():
        dry = sw.ones(2, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        with pytest.raises(sw.UnsupportedError, match="a dry run has no values"):
            save({"x": dry}, tmp_path / "d")


def _conjugate(mesh: Any) -> tuple[Any, Any]:
    base = sw.distribute_tensor(torch.tensor([1 + 2j, 3 - 1j]), mesh, [sw.Shard(0)])
    return base, base.conj()


def _other_rows(mesh: Any) -> tuple[Any, Any]:
    base = sw.distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [sw.Shard(0)])
    return base, base.view(4, 3)


@pytest.mark.parametrize("make", [_conjugate, _other_rows])
def test_views_that_share_no_memory_with_their_base(make: Any, tmp_path: Path) -> None:
    """They have the values of their base when they are saved, and what is filled in them would not reach it."""
    base, view = make(mesh_of((4,)))
    base.mul_(2)
    save({"x": view}, tmp_path / "c")
    assert torch.equal(read(tmp_path / "c")["x"], view.full_tensor())
    before = base.full_tensor()
    with pytest.raises(sw.CheckpointMismatchError, match="a view in the state that shares no memory with its base"):
        load({"x": view}, tmp_path / "c")
    safetensors_of = tmp_path / "model"
    if not view.is_complex():
        export_safetensors({"x": view}, safetensors_of)
        with pytest.raises(sw.CheckpointMismatchError, match="shares no memory with its base"):
            load_safetensors({"x": view}, safetensors_of)
    assert torch.equal(base.full_tensor(), before)
    copy_of_it = torch.zeros_like(view.clone())
    load({"x": copy_of_it}, tmp_path / "c")
    assert torch.equal(copy_of_it.full_tensor(), view.full_tensor())


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": torch.ones(2), "c": {"d": 1, "e": torch.ones(3)}, "f": 1}, tmp_path / "c")
    a, b = torch.zeros(2), torch.zeros(3)
    state = {"a": a, "b": b, "c": {"d": torch.ones(1), "e": torch.zeros(3).half()}, "g": 1, "h": torch.ones(1)}
    with pytest.raises(sw.CheckpointMismatchError) as caught:
        load(state, tmp_path / "c")
    assert caught.value.missing == ("g", "h")
    assert caught.value.unexpected == ("f",)
    assert set(caught.value.mismatched) == {"b", "c/d", "c/e"}
    for line in (
        "missing from the checkpoint: g",
        "in the checkpoint, not in the state: f",
        "b is f32[2] in the checkpoint, f32[3] in the state",
        "c/d is a plain object in the checkpoint, a tensor in the state",
        "c/e is f32[3] in the checkpoint, f16[3] in the state",
    ):
        assert line in str(caught.value)
    assert torch.equal(a, torch.zeros(2))
    assert pickle.loads(pickle.dumps(caught.value)).missing == ("g", "h")
    loaded = load(state, tmp_path / "c", strict=False)
    assert loaded.missing == ("g", "h")
    assert loaded.unexpected == ("f",)
    assert set(loaded.mismatched) == {"b", "c/d", "c/e"}
    assert torch.equal(a, torch.ones(2))
    assert torch.equal(b, torch.zeros(3))


# ---------------------------------------------------------------- what is on disk


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path / "deep" / "c")
    with pytest.raises(sw.CheckpointError, match="exists already"):
        save({"x": torch.zeros(2)}, tmp_path / "deep" / "c")
    assert torch.equal(read(tmp_path / "deep" / "c")["x"], torch.ones(2))
    save({"x": torch.zeros(2)}, tmp_path / "deep" / "c", overwrite=True)
    assert torch.equal(read(tmp_path / "deep" / "c")["x"], torch.zeros(2))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(sw.CheckpointError, match="not a checkpoint"):
        save({}, tmp_path / "mine", overwrite=True)


def test_keep_removes_the_oldest_of_the_family_alone(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()  # not a checkpoint, so not ours to remove
    left = Staging(tmp_path / "step-8", "0" * 16)  # what a killed save left
    left.directory.mkdir()
    left.owner.write_text(json.dumps(atomic._this_process() | {"started": 1}))
    save({"i": -1}, tmp_path / "other-1")
    for i in (30, 10, 20):
        save({"i": i}, tmp_path / f"step-{i}", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other-1", "step-10", "step-20", "step-7"]
    with pytest.raises(sw.CheckpointError, match="keep=0"):
        save({}, tmp_path / "step-40", keep=0)
    with pytest.raises(sw.CheckpointError, match="names end in a number"):
        save({}, tmp_path / "last", keep=1)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_blocks", broken)
    with pytest.raises(sw.CheckpointError, match=r"cannot be written: No space left"):
        save({"x": torch.ones(2)}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_async_save_holds_what_was_there_at_the_call(tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    x = sw.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [sw.Shard(0), sw.Shard(1)])
    state = {"x": x, "plain": torch.ones(3), "list": [1]}
    saving = async_save(state, tmp_path / "c")
    x.zero_()
    state["plain"].zero_()
    state["list"].append(2)
    saving.wait()
    saving.wait()
    assert saving.done
    plain = read(tmp_path / "c")
    assert torch.equal(plain["x"], torch.arange(12.0).reshape(4, 3))
    assert torch.equal(plain["plain"], torch.ones(3))
    assert plain["list"] == [1]


def test_an_error_of_async_save_is_raised_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_blocks", lambda *args: 1 / 0)
        async_save({"x": torch.ones(2)}, tmp_path / "a").done  # noqa: B018
        with pytest.raises(ZeroDivisionError):
            save({"x": torch.ones(2)}, tmp_path / "b")
    save({"x": torch.ones(2)}, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_modules_with_tensors_without_memory(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    model.register_buffer("adjacent", torch.eye(2).to_sparse(), persistent=False)
    save({"model": {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}}, tmp_path / "c")
    load({"model": model}, tmp_path / "c", strict=False)
    assert model[0].weight.eq(1).all()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def test_an_optimizer_by_names_resumes_without_a_state_of_an_unused_parameter(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, sw.checkpoint.NamedOptimizer]:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = torch.optim.AdamW(model.named_parameters())
        return model[0], optimizer, sw.checkpoint.NamedOptimizer(model, optimizer)

    used, optimizer, named = make()
    used(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not any(name.endswith("param_names") for name in named.state_dict())
    save({"optimizer": named}, tmp_path / "c")
    _, other, fresh = make()
    load({"optimizer": fresh}, tmp_path / "c")
    assert len(other.state) == 2
    assert repr(other.state_dict()) == repr(optimizer.state_dict())
    before = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    load({"optimizer": named}, tmp_path / "c")
    assert before == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]  # filled, not copied


@pytest.mark.parametrize("to_stages", [True, False])
def test_states_of_tied_parameters_by_names(to_stages: bool, tmp_path: Path) -> None:
    def make(staged: bool) -> tuple[Any, dict[str, Any], torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(4)]
        layers[3].weight = layers[0].weight
        model: Any = torch.nn.Sequential(*layers)
        if staged:
            mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            model = sw.pipeline(model, mesh["pp"], microbatches=1)
        optimizer = torch.optim.AdamW(model.parameters())
        named = sw.checkpoint.NamedOptimizer(model.module if staged else model, optimizer)
        return model, {"model": model, "optimizer": named}, optimizer

    model, state, optimizer = make(not to_stages)
    inputs, loss = torch.randn(4, 4), torch.nn.functional.mse_loss
    if to_stages:
        loss(model(inputs), torch.zeros(4, 4)).backward()
    else:
        model.step(inputs, torch.zeros(4, 4), loss)
    optimizer.step()
    save(state, tmp_path / "c")
    _, other, _ = make(to_stages)
    load(other, tmp_path / "c")
    expected, got = (each["optimizer"].state_dict() for each in (state, other))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        if name.endswith("exp_avg"):
            torch.testing.assert_close(full(got[name]), full(value))
