"""from_torch and to_torch on four real processes: layouts, storage, shard order, gradients, and what is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise import interop
from shardwise.core.spec import DTensorSpec, TensorMeta
from tests.gloo.processes import ProcessPool
from tests.torch_version import TORCH

R, P = theirs.Replicate(), theirs.Partial()
S = theirs.Shard

# mesh, global shape, placements
CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[theirs.Placement]]] = [
    ((4,), (8, 3), [R]),
    ((4,), (8, 3), [S(0)]),
    ((4,), (7, 3), [S(0)]),
    ((4,), (2, 5), [S(1)]),
    ((4,), (3,), [S(0)]),
    ((4,), (8, 3), [P]),
    ((4,), (8, 3), [theirs.Partial("avg")]),
    ((4,), (8, 3), [theirs.Partial("max")]),
    ((4,), (), [R]),
    ((4,), (8, 3), [_StridedShard(0, split_factor=2)]),
    ((2, 2), (8, 6), [S(0), S(1)]),
    ((2, 2), (5, 3), [S(1), S(0)]),
    ((2, 2), (8, 6), [S(0), S(0)]),
    ((2, 2), (7, 6), [S(0), S(0)]),
    ((2, 2), (8, 6), [S(1), R]),
    ((2, 2), (8, 6), [P, S(0)]),
    ((2, 2), (8, 6), [P, P]),
    ((2, 2), (8, 6), [R, theirs.Partial("min")]),
    ((2, 2), (8, 6), [_StridedShard(0, split_factor=2), S(0)]),
    ((2, 2), (4, 8), [_StridedShard(1, split_factor=2), S(1)]),
    ((2, 2), (7, 6), [_StridedShard(0, split_factor=2), S(0)]),
]


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


def their_tensor(mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[theirs.Placement]) -> Any:
    mesh = theirs.init_device_mesh("cpu", mesh_shape)
    whole = [R if p.is_partial() else p for p in placements]
    tensor = theirs.distribute_tensor(values(shape), mesh, whole, src_data_rank=None)
    if whole == placements:
        return tensor
    # the same local on every rank: what its value is, is for torch to say
    return theirs.DTensor.from_local(
        tensor.to_local(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def round_trip(case: int) -> None:
    given = their_tensor(*CASES[case])
    ours = interop.from_torch(given)
    assert type(ours) is sw.DTensor
    assert (ours.shape, ours.stride(), ours.dtype) == (given.shape, given.stride(), given.dtype)
    assert ours.to_local().data_ptr() == given.to_local().data_ptr()
    assert torch.equal(ours.full_tensor(), given.full_tensor())

    back: Any = interop.to_torch(ours)
    assert type(back) is theirs.DTensor
    assert back.placements == given.placements
    assert back.device_mesh == given.device_mesh
    assert (back.shape, back.stride(), back.dtype) == (given.shape, given.stride(), given.dtype)
    assert back.to_local().data_ptr() == given.to_local().data_ptr()
    assert torch.equal(back.full_tensor(), given.full_tensor())
    assert interop.from_torch(back).spec is ours.spec


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][1]} {CASES[i][2]}")
def test_round_trip(gloo4: ProcessPool, case: int) -> None:
    mesh_shape, _, placements = CASES[case]
    if TORCH < (2, 13) and len(mesh_shape) == 1 and isinstance(placements[0], _StridedShard):
        pytest.skip(f"torch {torch.__version__} does not redistribute a strided shard without a shard beside it")
    gloo4.run(round_trip, case)


def order_both_ways() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = sw.distribute_tensor(values((8, 6)), mesh, [sw.Shard(0), sw.Shard(0)], shard_order=[(0, ("tp", "dp"))])
    given: Any = interop.to_torch(ours)
    assert given.placements == (_StridedShard(0, split_factor=2), S(0))
    assert torch.equal(given.full_tensor(), values((8, 6)))
    back = interop.from_torch(given)
    assert back.spec is ours.spec
    assert repr(back.spec) == "f32[8,6] dp:S0 tp:S0 order 0:tp>dp"
    assert given.device_mesh.mesh_dim_names == ("dp", "tp")


def test_shard_order_is_a_strided_shard_there(gloo4: ProcessPool) -> None:
    gloo4.run(order_both_ways)


def strided_is_no_order() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    ours = sw.distribute_tensor(values((8, 6)), mesh, [sw.StridedShard(0, 2), sw.Shard(0)])
    given: Any = interop.to_torch(ours)
    assert given._spec.use_strided_shard_as_shard_order is False
    assert interop.from_torch(given).spec is ours.spec
    with pytest.raises(sw.LayoutError, match="beside other strided shards"):
        interop.to_torch(
            sw.distribute_tensor(values((8, 6)), mesh, [sw.StridedShard(0, 2), sw.Shard(0)], shard_order=[(0, (1, 0))])
        )
    if TORCH < (2, 13):
        return  # torch 2.11 refuses the view
    view = theirs.distribute_tensor(values((4, 4, 2)), interop.to_torch(ours).device_mesh, [R, S(1)]).view(16, 2)
    if any(isinstance(p, _StridedShard) for p in view.placements):
        assert interop.from_torch(view).placements == (sw.Replicate(), sw.StridedShard(0, 4))
        assert torch.equal(interop.from_torch(view).full_tensor(), values((16, 2)))


def test_a_strided_shard_of_ours_stays_one(gloo4: ProcessPool) -> None:
    gloo4.run(strided_is_no_order)


def explicit_order() -> None:
    """torch's own field for the order, which its private callers use."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as TheirSpec
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TheirMeta

    mesh = theirs.init_device_mesh("cpu", (2, 2))
    meta = TheirMeta(torch.Size((8,)), (1,), torch.float32)
    spec = TheirSpec(mesh, (S(0), S(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
    made = theirs.DTensor(torch.zeros(2), spec, requires_grad=False)
    assert repr(interop.from_torch(made).spec) == "f32[8] S0 S0 order 0:1>0"


def test_an_order_that_torch_holds_in_its_field(gloo4: ProcessPool) -> None:
    gloo4.run(explicit_order)


def mask_partial() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    local = torch.zeros(4) if mesh.get_local_rank() else torch.ones(4)
    given: Any = sw.DTensor.from_local(local, mesh, [sw.MaskPartial()]).to_torch()
    assert given.placements == (P,)
    assert torch.equal(given.full_tensor(), torch.ones(4))


def test_a_mask_partial_is_a_sum_there(gloo4: ProcessPool) -> None:
    gloo4.run(mask_partial)


def sliced_mesh() -> None:
    mesh = theirs.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given = theirs.distribute_tensor(values((6,)), mesh["tp"], [S(0)])
    ours = sw.DTensor.from_torch(given)
    assert ours.device_mesh is interop.as_mesh(mesh)["tp"]
    back: Any = ours.to_torch()
    assert back.device_mesh == mesh["tp"]
    assert torch.equal(back.full_tensor(), values((6,)))


def test_a_slice_of_a_mesh(gloo4: ProcessPool) -> None:
    gloo4.run(sliced_mesh)


def gradients_there_and_back(case: int) -> None:
    """A leaf of torch's, used here, with a loss there."""
    mesh_shape, shape, placements = CASES[case]
    leaf = their_tensor(mesh_shape, shape, placements).detach().requires_grad_()
    ours = interop.from_torch(leaf)
    assert ours.requires_grad
    back: Any = interop.to_torch(ours * 3)
    back.full_tensor().square().sum().backward()
    grad = leaf.grad
    assert type(grad) is theirs.DTensor
    assert grad.placements == tuple(R if p.is_partial() else p for p in placements)
    assert torch.equal(grad.full_tensor(), 18 * leaf.full_tensor().detach())


def gradients_here_and_back(case: int) -> None:
    """A leaf of ours, used there, with a loss here."""
    mesh_shape, shape, placements = CASES[case]
    leaf = interop.from_torch(their_tensor(mesh_shape, shape, placements)).detach().requires_grad_()
    given: Any = interop.to_torch(leaf)
    assert given.requires_grad
    back = interop.from_torch(given * 3)
    (back.full_tensor() ** 2).sum().backward()
    grad = leaf.grad
    assert type(grad) is sw.DTensor
    assert grad.placements == tuple(sw.Replicate() if p.is_partial() else p for p in leaf.placements)
    assert torch.equal(grad.full_tensor(), 18 * leaf.full_tensor().detach())


@pytest.mark.parametrize("case", [1, 2, 5, 6, 10, 13, 15, 18], ids=lambda i: f"{CASES[i][1]} {CASES[i][2]}")
@pytest.mark.parametrize("way", [gradients_there_and_back, gradients_here_and_back])
def test_gradients(gloo4: ProcessPool, way: Any, case: int) -> None:
    gloo4.run(way, case)


def gradient_in_another_layout() -> None:
    """The gradient of what is sharded here comes back sharded, whatever the layout of its uses there."""
    mesh = sw.init_device_mesh("cpu", (4,))
    leaf = sw.distribute_tensor(values((8, 4)), mesh, [sw.Shard(0)]).requires_grad_()
    given: Any = leaf.to_torch()
    given.redistribute(placements=[S(1)]).sum().backward()
    assert leaf.grad.placements == (sw.Shard(0),)
    assert torch.equal(leaf.grad.full_tensor(), torch.ones(8, 4))


def test_a_gradient_is_laid_out_as_its_tensor(gloo4: ProcessPool) -> None:
    gloo4.run(gradient_in_another_layout)


def without_gradients() -> None:
    given = theirs.distribute_tensor(values((8,)), theirs.init_device_mesh("cpu", (4,)), [S(0)]).requires_grad_()
    with torch.no_grad():
        ours = interop.from_torch(given)
        assert not ours.requires_grad
        assert not interop.to_torch(ours).requires_grad
        assert ours.to_local().data_ptr() == given._local_tensor.data_ptr()
    ours = interop.from_torch(given)
    assert ours.to_local().data_ptr() == given._local_tensor.data_ptr()
    assert interop.to_torch(ours)._local_tensor.data_ptr() == given._local_tensor.data_ptr()


def test_storage_is_shared_with_and_without_gradients(gloo4: ProcessPool) -> None:
    gloo4.run(without_gradients)


def wrong_arguments() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises(sw.PlainTensorError, match=r"needs a torch\.distributed\.tensor\.DTensor, got a DTensor"):
        interop.from_torch(sw.zeros(4, device_mesh=mesh))
    with pytest.raises(sw.PlainTensorError, match=r"needs a shardwise\.DTensor, got a DTensor"):
        interop.to_torch(their_tensor((4,), (8,), [S(0)]))


def test_wrong_arguments_are_refused(gloo4: ProcessPool) -> None:
    gloo4.run(wrong_arguments)


def virtual_mesh(sizes: tuple[int, ...]) -> sw.DeviceMesh:
    return sw.DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).reshape(sizes), fabric="virtual")


def test_an_uneven_order_with_two_meanings_is_refused() -> None:
    """Of nine elements over 4 x 2, torch's distribute_tensor and redistribute give the last one to different ranks."""
    mesh = virtual_mesh((4, 2))
    strided = (sw.StridedShard(0, 2), sw.Shard(0))
    with pytest.raises(sw.LayoutError, match="are ambiguous"):
        interop._ordered(mesh, strided, TensorMeta((9,)))
    ordered = DTensorSpec(mesh, [sw.Shard(0), sw.Shard(0)], TensorMeta((9,)), [(0, (1, 0))])
    with pytest.raises(sw.LayoutError, match="if sizes do not divide evenly"):
        interop._their_placements(ordered)
    assert interop._ordered(mesh, strided, TensorMeta((8,))) is ordered.with_meta(TensorMeta((8,)))


@pytest.mark.parametrize("sizes", [(2, 3, 4), (4, 3, 2), (2, 2, 2)])
def test_every_order_of_three_axes_is_what_torch_makes_of_it(sizes: tuple[int, ...]) -> None:
    """Both directions against torch's own conversion, which needs nothing of a mesh but its sizes."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as TheirSpec
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    class Sizes:
        def size(self, axis: int) -> int:
            return sizes[axis]

    mesh = virtual_mesh(sizes)
    meta = TensorMeta((48,))
    for axes in itertools.permutations(range(3)):
        spec = DTensorSpec(mesh, [sw.Shard(0)] * 3, meta, [(0, axes)])
        peer = TheirSpec._convert_shard_order_to_StridedShard((ShardOrderEntry(0, axes),), (S(0), S(0), S(0)), Sizes())
        assert interop._their_placements(spec) == peer
        assert interop._ordered(mesh, tuple(map(interop.as_placement, peer)), meta) is spec


@pytest.mark.parametrize("make", [sw.virtual, sw.dry_run])
def test_a_mesh_without_processes_is_refused(make: Any) -> None:
    with make():
        mesh = sw.init_device_mesh("cpu", (2,))
        tensor = sw.zeros(4, device_mesh=mesh)
    with pytest.raises(sw.MeshError, match=rf"it is of the {mesh.fabric} fabric\n  hint: .*torchrun"):
        interop.to_torch(tensor)


def test_importing_the_adapter_does_not_import_torch_distributed_tensor() -> None:
    program = "import sys, shardwise.interop; print('torch.distributed.tensor' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == "False"
