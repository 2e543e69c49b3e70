"""Routes in pieces on processes: the values of the route of equal links, for every change of layout that is cut."""

import itertools
import math

import torch

import shardwise as sw
from shardwise.core.notation import parse_spec
from shardwise.fabric.base import fabric_of
from tests.gloo.processes import ProcessPool

LINKS = sw.HostLinks(2, sw.Link(1e-9, 1e-9), sw.Link(1e-9, 1e-8), sw.Link(1e-9, 1e-8))
MODEL = sw.CostModel(hosts={"cpu": LINKS})
CHANGES = (
    ("4", ("P", "P(max)", "P(min)", "P(avg)", "P(product)", "S0", "S1"), ("R", "S0", "S2")),
    ("dp=2,tp=2", ("P R", "S0 R", "P P", "S0 S0", "R P", "P S1"), ("R R", "R S1", "S0 R")),
)


def every_change() -> dict[str, int]:
    """The routes that were cut, with the number of pieces."""
    cut = {}
    torch.manual_seed(0)
    for axes, sources, targets in CHANGES:
        shape, names = ((2, 2), ("dp", "tp")) if "=" in axes else ((4,), None)
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        coordinate = mesh.coordinate_of(mesh.get_rank())
        assert coordinate is not None
        dtypes = ("f32", "i64", "bf16")
        for old, new, dtype in itertools.product(sources, targets, dtypes):
            if old == "P(avg)" and dtype == "i64":
                continue
            before, after = (parse_spec(f"{dtype}[32,64,16] {layout}", mesh) for layout in (old, new))
            shape_here = before.local_shape(coordinate)
            salt = sum(at for at, layout in zip(coordinate, before.placements, strict=True) if layout != sw.Replicate())
            local = (torch.arange(math.prod(shape_here)) % 3 + 1 + salt).reshape(shape_here)
            local = local.to(before.tensor_meta.dtype)
            wanted, found = (
                fabric_of(mesh).bind_route(sw.DTensorRedistributePlanner(model).plan(before, after))(local.clone())
                for model in (sw.CostModel(), MODEL)
            )
            assert torch.equal(wanted, found), (old, new, dtype)
            assert found.is_contiguous()
            pieces = sw.DTensorRedistributePlanner(MODEL).plan(before, after).pieces
            if pieces is not None:
                cut[f"{axes} {old} -> {new}"] = pieces.number
    return cut


def test_values_are_those_of_the_route_of_equal_links(gloo4: ProcessPool) -> None:
    for cut in gloo4.run(every_change, timeout=240):
        assert {"4 P -> R", "4 S0 -> R", "4 P -> S0", "dp=2,tp=2 P R -> R R"} <= set(cut), cut
        assert set(cut.values()) <= {2, 4, 8}


def training(checked: bool) -> list[torch.Tensor]:
    """Gradients of a sharded product, with routes of both models."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    found = []
    for model in (sw.CostModel(), MODEL):
        before = sw.set_cost_model(model)
        try:
            torch.manual_seed(1)
            weight = sw.distribute_tensor(torch.randn(64, 64), mesh, [sw.Shard(0)]).requires_grad_()
            data = sw.distribute_tensor(torch.randn(64, 64), mesh, [sw.Shard(0)])
            with sw.debug.check_ranks(0.2) if checked else torch.enable_grad():
                full = weight.redistribute(placements=[sw.Replicate()], async_op=True)
                loss = (data @ full).square().mean()
                loss.backward()
                assert weight.grad is not None
                found += [loss.detach().full_tensor(), weight.grad.full_tensor()]
        finally:
            sw.set_cost_model(before)
    return found


def test_gradients_and_checks(gloo4: ProcessPool) -> None:
    for checked in (False, True):
        for flat, flat_grad, cut, cut_grad in gloo4.run(training, checked, timeout=120):
            torch.testing.assert_close(cut, flat)
            torch.testing.assert_close(cut_grad, flat_grad)
