"""Same words as torch: every public name of torch.distributed.tensor is here, or docs/compatibility.md says why not."""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor as theirs
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
import shardwise.debug
import shardwise.parallel

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
DATA_PARALLEL = PAGE.with_name("data_parallel.md").read_text()
ABSENT = set(re.findall(r"^\| `([\w.]+)` \| \S", PAGE.read_text(), re.MULTILINE))
MODULES: dict[str, tuple[ModuleType, Any]] = {
    "tensor": (theirs, sw),
    "tensor.debug": (torch.distributed.tensor.debug, shardwise.debug),
    "tensor.parallel": (torch.distributed.tensor.parallel, shardwise.parallel),
    "tensor.experimental": (torch.distributed.tensor.experimental, sw),
}
NAMES = [(module, name) for module, (peer, _) in MODULES.items() for name in peer.__all__]  # pyright: ignore[reportAttributeAccessIssue]


def accepts(ours: Any, peer: Any) -> list[str]:
    """What of the peer's parameters ours lacks, or demands where the peer has a default."""
    try:
        wanted, have = inspect.signature(peer).parameters, inspect.signature(ours).parameters
    except ValueError:  # built-in
        return []
    lacking = [
        name for name, p in wanted.items() if name not in have and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    strict = [
        name
        for name, p in wanted.items()
        if name in have and p.default is not p.empty and have[name].default is inspect.Parameter.empty
    ]
    moved = [
        name
        for (name, p), other in zip(wanted.items(), have, strict=False)
        if p.kind is p.POSITIONAL_OR_KEYWORD and name != other
    ]
    return lacking + strict + moved


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names(module: str, name: str) -> None:
    peer, ours = MODULES[module]
    known = f"{module}.{name}" in ABSENT
    found = getattr(ours, name, None)
    assert (found is None) == known, f"{module}.{name} is {'here' if known else 'neither here nor on the page'}"
    if found is not None and (not inspect.isclass(found) or module == "tensor.parallel"):
        assert not accepts(found, getattr(peer, name))


@pytest.mark.parametrize("name", ["from_local", "to_local", "redistribute", "full_tensor", "device_mesh", "placements"])
def test_methods_of_a_tensor(name: str) -> None:
    assert hasattr(sw.DTensor, name)
    if callable(getattr(theirs.DTensor, name)):
        assert not accepts(getattr(sw.DTensor, name), getattr(theirs.DTensor, name))


@pytest.mark.parametrize("name", [name for name in dir(DeviceMesh) if not name.startswith("_")])
def test_methods_of_a_mesh(name: str) -> None:
    assert hasattr(sw.DeviceMesh, name) != (f"DeviceMesh.{name}" in ABSENT)


def test_placements_take_what_torchs_take() -> None:
    assert sw.Shard(1).dim == theirs.Shard(1).dim
    assert sw.Shard(dim=1) == sw.Shard(1)
    for op in ("sum", "avg", "min", "max", "product"):
        assert sw.Partial(op).reduce_op == theirs.Partial(op).reduce_op
    for method in ("is_shard", "is_replicate", "is_partial"):
        for ours, peer in (
            (sw.Shard(0), theirs.Shard(0)),
            (sw.Replicate(), theirs.Replicate()),
            (sw.Partial(), theirs.Partial()),
        ):
            assert getattr(ours, method)() == getattr(peer, method)()
    assert sw.Shard(0).is_shard(dim=1) == theirs.Shard(0).is_shard(dim=1)
    lacking = {f"init_device_mesh.{name}" for name in accepts(sw.init_device_mesh, init_device_mesh)}
    assert lacking == {name for name in ABSENT if name.startswith("init_device_mesh.")}


@pytest.mark.parametrize("name", [name for name in dir(torch.distributed.fsdp.FSDPModule) if not name.startswith("_")])
def test_methods_of_a_fully_sharded_module(name: str) -> None:
    ours = getattr(shardwise.parallel.FSDPModule, name, None)
    if ours is None:
        assert f"`{name}`" in DATA_PARALLEL, f"{name} is neither here nor on the page"
    else:
        assert not accepts(ours, getattr(torch.distributed.fsdp.FSDPModule, name))


NAMES_OF_FSDP2 = (
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "fully_shard", "register_fsdp_forward_method", "share_comm_ctx",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_FSDP2)
def test_names_of_fsdp2(name: str) -> None:
    ours, peer = getattr(shardwise.parallel, name), getattr(torch.distributed.fsdp, name, None)
    if peer is not None and not inspect.isclass(peer):  # torch 2.11 has fewer names
        assert inspect.signature(peer).parameters.keys() <= inspect.signature(ours).parameters.keys()
