"""DTensors saved, pickled, copied, sent to other processes and read as memory: right, or an error that helps."""

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

S0, S1, R = sw.Shard(0), sw.Shard(1), sw.Replicate()


def values() -> torch.Tensor:
    return torch.arange(35.0).reshape(7, 5)


def tensors() -> dict[str, sw.DTensor]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        "uneven": sw.distribute_tensor(values(), mesh, [S0, S1]),
        "in another order": sw.distribute_tensor(values(), mesh, [S0, S0], shard_order=[(0, ("tp", "dp"))]),
        "replicated": sw.distribute_tensor(values(), mesh),
        "partial": sw.distribute_tensor(values(), mesh, [sw.Partial(), S1]),
        "strided": sw.distribute_tensor(values()[:4], mesh, [R, sw.StridedShard(0, 2)]),
        "empty parts": sw.distribute_tensor(values()[:1], mesh, [S0, S0]),
        "bfloat16": sw.distribute_tensor(values().bfloat16(), mesh, [S0, R]),
        "complex": sw.distribute_tensor(values() * 1j, mesh, [S0, R]),
        "of a slice": sw.distribute_tensor(values(), mesh["tp"], [S0]),
    }


def saved_and_loaded(value: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


WAYS = {
    "torch.load": lambda value: saved_and_loaded(value, True),
    "torch.load of anything": lambda value: saved_and_loaded(value, False),
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def locals_of(tensor: Any) -> list[torch.Tensor]:
    return list(tensor.to_local().tensors)


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_is_what_was_given(way: str) -> None:
    for name, tensor in tensors().items():
        for given in (tensor, nn.Parameter(tensor, requires_grad=False)):
            given.note = [name]
            again = WAYS[way](given)
            assert (type(again), again.spec, again.note) == (sw.DTensor, tensor.spec, [name])
            assert isinstance(again, nn.Parameter) == isinstance(given, nn.Parameter)
            for ours, theirs in zip(locals_of(again), locals_of(tensor), strict=True):
                assert torch.equal(ours, theirs)
                assert (ours.data_ptr() == theirs.data_ptr() != 0) == (way == "copy" and ours.numel() > 0)


@pytest.mark.parametrize("way", ["torch.load of anything", "pickle", "deepcopy"])
def test_modules_and_states(way: str) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    for layer in model:
        layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, [S0]))  # ty: ignore
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    again, states = WAYS[way]((model, optimizer.state_dict()))
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad
        assert isinstance(ours, nn.Parameter)
        torch.testing.assert_close(*(t.full_tensor() if isinstance(t, sw.DTensor) else t for t in (ours, theirs)))
    assert states["state"][0]["exp_avg"].spec is model[0].weight.spec
    loaded = saved_and_loaded(model.state_dict(), True)
    assert loaded["0.weight"].spec is model[0].weight.spec


def test_values_are_those_of_the_whole_tensor() -> None:
    for name, tensor in tensors().items():
        if name in ("bfloat16", "complex", "of a slice"):
            continue
        whole = tensor.full_tensor()
        assert np.array_equal(tensor.numpy(), whole.numpy())
        assert tensor.tolist() == whole.tolist()
        for read in (
            torch.from_dlpack(tensor),
            torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
            torch.utils.dlpack.from_dlpack(torch.to_dlpack(nn.Parameter(tensor))),  # pyright: ignore[reportAttributeAccessIssue]
            torch.from_numpy(np.from_dlpack(tensor)),
        ):
            assert type(read) is torch.Tensor
            assert torch.equal(read, whole)
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(values())), values())


def test_memory_that_is_not_there_is_refused() -> None:
    tensor = tensors()["uneven"]
    for ask in (lambda: tensor.storage(), lambda: tensor._typed_storage(), lambda: tensor.untyped_storage().tolist()):
        with pytest.raises(RuntimeError):
            ask()
    with pytest.raises(sw.CheckpointError, match=r"(?s)no memory of its own.*full_tensor\(\) or to_local\(\)"):
        tensor.storage()
    assert tensor.data_ptr() == 0
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert not tensor.is_shared()
    assert not tensor.is_pinned()
    with pytest.raises(sw.UnsupportedError, match="shared memory"):
        nn.ParameterList([nn.Parameter(tensor)]).share_memory()
    with pytest.raises(TypeError):
        memoryview(tensor)  # pyright: ignore[reportArgumentType]


def test_safetensors_says_what_to_use(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    tensor = tensors()["uneven"]
    linear = nn.Linear(5, 7)
    linear.weight = nn.Parameter(tensor)
    for write in (
        lambda: theirs.save_file({"x": tensor}, tmp_path / "x.safetensors"),
        lambda: theirs.save({"x": tensor}),
        lambda: theirs.save_model(linear, str(tmp_path / "model.safetensors")),
    ):
        with pytest.raises(sw.CheckpointError, match="export_safetensors"):
            write()
    assert not list(tmp_path.iterdir())
    theirs.save_file({"x": tensor.full_tensor()}, tmp_path / "x.safetensors")
    linear.load_state_dict({**linear.state_dict(), "weight": theirs.load_file(tmp_path / "x.safetensors")["x"]})
    assert torch.equal(linear.weight.full_tensor(), values())  # pyright: ignore[reportAttributeAccessIssue]


def test_swapped_tensors_swap_layouts() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    one, other = (sw.distribute_tensor(values() + i, mesh, [p]) for i, p in enumerate((S0, S1)))
    torch.utils.swap_tensors(one, other)
    assert (one.spec.placements, other.spec.placements) == ((S1,), (S0,))
    assert torch.equal(one.full_tensor(), values() + 1)
    assert torch.equal((other + 1).full_tensor(), values() + 1)
    with pytest.raises(RuntimeError, match="slots"):
        torch.utils.swap_tensors(one, torch.ones(2))


class Rows(Dataset[Any]):
    """A dataset that holds a DTensor, and gives rows of it as plain tensors or as they are."""

    def __init__(self, plain: bool) -> None:
        self.table = tensors()["uneven"]
        self.plain = plain

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> torch.Tensor:
        row = self.table[i]
        return row.full_tensor() if self.plain else row


@pytest.mark.parametrize("workers", [None, "fork", "spawn"])
def test_datasets_hold_dtensors(workers: str | None) -> None:
    loader = DataLoader(Rows(True), 4, num_workers=int(workers is not None), multiprocessing_context=workers)
    assert torch.equal(torch.cat(list(loader)), values())


def test_items_that_are_dtensors() -> None:
    rows = list(DataLoader(Rows(False), 7))
    assert torch.equal(rows[0].full_tensor(), values())
    with pytest.raises(sw.CheckpointError, match="full_tensor"):
        list(DataLoader(Rows(False), 7, num_workers=1, multiprocessing_context="fork"))
    gc.collect()  # the error's frames are a cycle that holds the loader, and the loader its worker
    uncollated = DataLoader(Rows(False), None, num_workers=1, multiprocessing_context="fork")
    assert torch.equal(torch.stack([row.full_tensor() for row in uncollated]), values())


def test_compiled_cuda_functions_refuse_tensors_without_memory() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    copy = torch.cuda.jiterator._create_jit_fn("template <typename T> T copy(T x) { return x; }")
    x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    for given in (x, x.to_local()):
        with pytest.raises(sw.UnsupportedError, match="jiterator cannot run on"):
            copy(given)
