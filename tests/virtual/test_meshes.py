"""Operands on different meshes of one grid: remapped to one of them where that is unambiguous, otherwise refused."""

import pytest
import torch

import shardwise as sw

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def per_slice(mesh: sw.DeviceMesh, values: list[torch.Tensor]) -> sw.DTensor:
    """A tensor on the slice "tp" that differs from slice to slice, rows sharded."""
    locals_ = [half for value in values for half in value.chunk(2)]
    return sw.DTensor.from_local(sw.RankTensor(locals_), mesh["tp"], [S0])


def test_a_tensor_replicated_along_the_other_axes_is_seen_in_every_slice(mesh: sw.DeviceMesh) -> None:
    values = [torch.randn(4, 3), torch.randn(4, 3)]
    x = per_slice(mesh, values)
    y = torch.randn(4, 3)
    result = x * sw.distribute_tensor(y, mesh, [R, S0])
    assert result.device_mesh is mesh["tp"]
    whole = result.redistribute(placements=[R]).to_local()
    assert isinstance(whole, sw.RankTensor)
    for rank, part in enumerate(whole.tensors):
        torch.testing.assert_close(part, values[rank // 2] * y)


def test_what_differs_over_the_slices_is_not_mixed_with_what_does_not(mesh: sw.DeviceMesh) -> None:
    x = per_slice(mesh, [torch.ones(4, 3), torch.zeros(4, 3)])
    sharded = sw.ones(4, 3, device_mesh=mesh, placements=[S0, R])
    replicated = sw.ones(4, 3, device_mesh=mesh, placements=[R, S0])
    for mixed in (lambda: x + sharded, lambda: replicated.add_(x), lambda: x + sw.ones(4, 3, device_mesh=mesh["dp"])):
        with pytest.raises(sw.MeshError, match="different meshes"):
            mixed()
    torch.testing.assert_close(replicated.full_tensor(), torch.ones(4, 3))
    with pytest.raises(sw.MeshError, match="gradient"):
        x + replicated.requires_grad_()
    other = sw.init_device_mesh("cpu", (4,))  # another view of the same ranks
    with pytest.raises(sw.MeshError, match="different meshes"):
        x + sw.ones(4, 3, device_mesh=other, placements=[S0])
    total = (x + sw.ones(4, 3, device_mesh=other)).to_local()
    assert isinstance(total, sw.RankTensor)
    assert [part.sum().item() for part in total.tensors] == [12.0, 12.0, 6.0, 6.0]


def test_the_error_names_the_parameter(mesh: sw.DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.RMSNorm(8)))
    other = sw.init_device_mesh("cpu", (4,))
    model[0][0].weight = torch.nn.Parameter(sw.ones(8, device_mesh=other, placements=[S0]))  # pyright: ignore[reportIndexIssue]
    with pytest.raises(sw.MeshError, match=r"f32\[8\] S0 \(the parameter 0\.0\.weight\)"):
        model(sw.ones(4, 8, device_mesh=mesh, placements=[S0, R]))


def test_the_same_axes_in_another_order_are_the_same_mesh_otherwise_seen(mesh: sw.DeviceMesh) -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    x = sw.distribute_tensor(a, mesh, [S0, S1])
    y = sw.distribute_tensor(b, mesh["tp", "dp"], [S1, S0])
    torch.testing.assert_close((x + y).full_tensor(), a + b)
    nested = sw.distribute_tensor(b, mesh["tp", "dp"], [S0, S0])  # tp is the major one
    torch.testing.assert_close((x + nested).full_tensor(), a + b)


def test_axes_of_one_rank_do_not_matter() -> None:
    mesh = sw.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    x = sw.distribute_tensor(torch.arange(8.0), mesh["tp"], [S0])
    y = sw.distribute_tensor(torch.arange(8.0), mesh, [S0, S0])
    torch.testing.assert_close((x + y).full_tensor(), 2 * torch.arange(8.0))


def test_a_single_number_is_a_constant(mesh: sw.DeviceMesh) -> None:
    x = sw.ones(4, 3, device_mesh=mesh, placements=[S0, S1])
    scale = sw.full((), 3.0, device_mesh=mesh["dp"])
    torch.testing.assert_close((x * scale).full_tensor(), torch.full((4, 3), 3.0))
    x.mul_(scale)
    torch.testing.assert_close(x.full_tensor(), torch.full((4, 3), 3.0))
    partial = sw.full((), 3.0, device_mesh=mesh["dp"], placements=[sw.Partial()])
    torch.testing.assert_close((x * partial).full_tensor(), torch.full((4, 3), 9.0))  # reduced first


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.filterwarnings("ignore:.*no rule")
def test_clipping_and_optimizers_take_parameters_on_several_meshes(mesh: sw.DeviceMesh, foreach: bool) -> None:
    values = [torch.randn(4, 6), torch.randn(6), torch.randn(8, 2)]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    laid = [
        torch.nn.Parameter(sw.distribute_tensor(values[0], mesh, [S0, S1])),
        torch.nn.Parameter(sw.distribute_tensor(values[1], mesh["tp"], [S0])),
        torch.nn.Parameter(sw.distribute_tensor(values[2], mesh["dp"], [S1])),
    ]
    norms = []
    for parameters in (plain, laid):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter**3).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach))
            optimizer.step()
    for want, have in zip(plain, laid, strict=True):
        whole = have.redistribute(placements=[R] * have.device_mesh.ndim).to_local()
        assert isinstance(whole, sw.RankTensor)
        for part in whole.tensors:
            torch.testing.assert_close(part, want)
