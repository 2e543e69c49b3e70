"""The layouts `Ragged` and `Owned`: one device's values on every operator, and exactly the missing bytes moved."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import Owned, Ragged, Replicate, Shard, Zigzag
from tests.virtual.layout_operators import OPERATORS, assert_as_on_one_device

S0, S1, R = Shard(0), Shard(1), Replicate()
LAYOUTS = (
    ((4,), (Ragged(1, (5, 0, 8, 3)),), 16), ((3,), (Ragged(1, (0, 13, 0)),), 13), ((2, 2), (S0, Ragged(1, (3, 7))), 10),
    ((2, 2), (Ragged(1, (9, 2)), S1), 11), ((2, 2), (S1, Ragged(1, (2, 3))), 10),
    ((2, 2), (Ragged(1, (1, 11)), Ragged(2, (3, 1))), 12), ((4,), (Ragged(0, (0, 1, 1, 0)),), 6),
    ((4,), (Owned(2, 1),), 9), ((2, 2), (Owned(1), Ragged(1, (0, 8))), 8),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")  # boolean masks, as on other dims than the first
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_values_of_one_device(name: str) -> None:
    """And their gradients."""
    start = sorted(OPERATORS).index(name)
    for layout in LAYOUTS[start % 3 :: 3]:  # each operator in a third of the layouts, each layout with a third of them
        assert_as_on_one_device(name, layout)


# ---------------------------------------------------------------- redistribution


def random_sizes(rng: random.Random, size: int, parts: int) -> list[int]:
    """Sizes of parts, with empty ones among them."""
    bounds = [0, *sorted(rng.choices(range(size + 1), k=parts - 1)), size]
    return [high - low for low, high in itertools.pairwise(bounds)]


def random_layout(rng: random.Random, mesh: sw.DeviceMesh, shape: tuple[int, ...]) -> list[sw.Placement]:
    """Ragged dims among others; each split by one axis alone."""
    dims = rng.sample(range(len(shape)), len(shape))
    made: list[sw.Placement] = []
    for ranks in mesh.shape:
        if not dims:
            made.append(R)
            continue
        dim = dims.pop()
        kinds = (Ragged(dim, random_sizes(rng, shape[dim], ranks)),) * 3 + (Owned(rng.randrange(ranks), dim),)
        made.append(rng.choice((*kinds, Shard(dim), Zigzag(dim), R)))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts_become_each_other(seed: int) -> None:
    """Values and gradients; ranks receive exactly the missing bytes, on average."""
    rng = random.Random(seed)
    for _ in range(40):
        mesh = sw.init_device_mesh("cpu", rng.choice(((4,), (2, 2), (3,))))
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        x = torch.randn(shape, dtype=torch.float64)
        before, after = random_layout(rng, mesh, shape), random_layout(rng, mesh, shape)
        laid = sw.distribute_tensor(x, mesh, before).requires_grad_()
        with sw.debug.CommDebugMode() as comm:
            moved = laid.redistribute(placements=after)
        assert torch.equal(moved.full_tensor(), x)
        weights = torch.randn(shape, dtype=torch.float64)
        moved.backward(sw.distribute_tensor(weights, mesh, random_layout(rng, mesh, shape)))
        assert laid.grad is not None
        assert torch.equal(laid.grad.full_tensor(), weights)
        assert abs(comm.received_bytes - missing_bytes(laid.spec, moved.spec)) < 1, (before, after)  # it is rounded


def missing_bytes(before: sw.DTensorSpec, after: sw.DTensorSpec) -> float:
    """The bytes of its block afterwards that a rank does not hold before, on average; by counting elements."""
    missing = 0
    for coordinate in before.mesh.coordinates.tolist():
        held = [torch.zeros(before.shape, dtype=torch.bool) for _ in range(2)]
        for mask, spec in zip(held, (before, after), strict=True):
            dims = spec.block(coordinate).runs
            indices = [torch.cat([torch.arange(run.start, run.start + run.length) for run in runs]) for runs in dims]
            mask[torch.meshgrid(*indices, indexing="ij")] = True
        missing += int((held[1] & ~held[0]).sum())
    return missing * before.tensor_meta.dtype.itemsize / before.mesh.size()


def test_an_owner_gives_what_others_lack() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Owned(2)])
    assert [part.numel() for part in x.to_local().tensors] == [0, 0, 8, 0]  # pyright: ignore[reportAttributeAccessIssue]
    with sw.debug.CommDebugMode() as comm:
        y = x.redistribute(placements=[S0])
    assert (comm.get_total_counts(), comm.received_bytes) == (1, 6 * 4 / 4)
    assert torch.equal(y.full_tensor(), torch.arange(8.0))


# ---------------------------------------------------------------- what keeps the layout


def test_what_is_computed_token_by_token_keeps_the_layout() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x = sw.distribute_tensor(torch.randn(10, 8), mesh, [R, Ragged(0, (7, 3))])
    with sw.debug.CommDebugMode() as comm:
        heads = F.linear(F.rms_norm(x, (8,)), torch.randn(8, 8)).unflatten(-1, (2, 4)) * 2
        flat = x.flatten()
        again = flat.unflatten(0, (10, 8)).sum(1)
    assert comm.get_total_counts() == 0
    layouts = (heads.spec.layout, flat.spec.layout, again.spec.layout)
    assert layouts == ("dp:R ep:S0(7,3)", "dp:R ep:S0(56,24)", "dp:R ep:S0(7,3)")


def test_training_keeps_parameters_where_they_are() -> None:
    """A layer whose rows are ragged and one that a rank owns, with momentum, against one device."""
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (3,))
    plain = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    laid: Any = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    laid.load_state_dict(plain.state_dict())
    kinds = iter((Ragged(0, (4, 0, 3)), Ragged(0, (0, 2, 5)), Owned(1), Owned(2)))
    for module in (laid[0], laid[2]):
        for name, parameter in list(module.named_parameters()):
            placed = sw.distribute_tensor(parameter.detach(), mesh, [next(kinds)])
            module.register_parameter(name, nn.Parameter(placed))
    layouts = [p.spec for p in laid.parameters()]
    x = torch.randn(4, 6, dtype=torch.float64)
    for model, given in ((plain, x), (laid, sw.distribute_tensor(x, mesh, [S0]))):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert [p.spec for p in laid.parameters()] == layouts
    for mine, theirs in zip(laid.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach(), rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64)

    def penalty(x: Any) -> Any:
        (grad,) = torch.autograd.grad((x.cumsum(1) * x.softmax(1)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    laid: Any = sw.distribute_tensor(x, sw.init_device_mesh("cpu", (3,)), [Ragged(1, (1, 0, 6))])
    torch.testing.assert_close(penalty(laid.requires_grad_()).full_tensor(), penalty(x.requires_grad_()))


def test_written_in_place() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    x = torch.arange(12.0).reshape(6, 2)
    laid = sw.distribute_tensor(x, mesh, [Ragged(0, (1, 5, 0))])
    for tensor in (laid, x):
        tensor.mul_(2)[2:4].fill_(0.5)
        tensor[:, 1] += 1
    assert torch.equal(laid.full_tensor(), x)
    assert laid.placements == (Ragged(0, (1, 5, 0)),)


@pytest.mark.parametrize("placement", [Ragged(0, (4, 0, 2)), Owned(1)])
def test_random_numbers_are_those_of_one_device(placement: sw.Placement) -> None:
    x = sw.distribute_tensor(torch.ones(6, 4), sw.init_device_mesh("cpu", (3,)), [placement])
    torch.manual_seed(0)
    wanted = F.dropout(torch.ones(6, 4), 0.4)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(x, 0.4).full_tensor(), wanted)


def test_compiled() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    laid = sw.distribute_tensor(x, sw.init_device_mesh("cpu", (3,)), [Ragged(0, (4, 0, 2))]).requires_grad_()

    def step(x: Any) -> Any:
        return (x.softmax(0) * x.sum(1, keepdim=True)).square().sum()

    torch._dynamo.reset()
    torch.compile(step, backend="aot_eager", fullgraph=True)(laid).backward()
    plain = x.clone().requires_grad_()
    step(plain).backward()
    assert laid.grad is not None
    torch.testing.assert_close(laid.grad.full_tensor(), plain.grad)


# ---------------------------------------------------------------- around it


def test_saved_and_loaded(tmp_path: Path) -> None:
    x = torch.randn(10, 14)
    pairs = (([Ragged(1, (9, 0, 5, 0))], [S0]), ([S0], [Ragged(0, (0, 3, 7))]), ([Owned(3)], [Ragged(0, (5, 5, 0))]),
             ([Ragged(0, (1, 2, 3, 4))], [Owned(1, 1)]))  # fmt: skip
    for i, (save, load) in enumerate(pairs):
        before, after = sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (3,))
        sw.checkpoint.save({"x": sw.distribute_tensor(x, before, save)}, tmp_path / str(i))
        state = {"x": sw.distribute_tensor(torch.zeros(10, 14), after, load)}
        sw.checkpoint.load(state, tmp_path / str(i))
        assert torch.equal(state["x"].full_tensor(), x)
        torch.save(state, tmp_path / f"{i}.pt")
        assert torch.equal(torch.load(tmp_path / f"{i}.pt", weights_only=True)["x"].full_tensor(), x)


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("ep",))
    x = sw.distribute_tensor(torch.zeros(8), mesh, [Ragged(0, (5, 0, 3))])
    sw.debug.visualize_sharding(x)
    assert "f32[8] ep:S0(5,0,3)" in capsys.readouterr().out
    assert "S0(5,0,3)" in sw.draw(x).svg


def test_locals_come_and_go() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    x = torch.arange(24.0).reshape(8, 3)
    laid = sw.distribute_tensor(x, mesh, [Ragged(0, (5, 0, 3))])
    again = sw.DTensor.from_local(laid.to_local() * 2, mesh, [Ragged(0, (5, 0, 3))])
    assert torch.equal(again.full_tensor(), 2 * x)
    owned = sw.distribute_tensor(x, mesh, [Owned(1)])
    with pytest.raises(sw.LayoutError, match="Owned"):
        sw.DTensor.from_local(owned.to_local(), mesh, [Owned(1)])
    assert torch.equal(sw.DTensor.from_local(owned.to_local(), mesh, [Owned(1)], shape=(8, 3)).full_tensor(), x)


def test_a_dry_run_counts() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (4,))
        x = sw.zeros(1000, 64, device_mesh=mesh, placements=[Ragged(0, (700, 0, 200, 100))])
        (x * 2).redistribute(placements=[S0])
    assert run.peak_bytes >= 2 * 700 * 64 * 4


def test_sizes_that_do_not_fit_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises(sw.LayoutError, match="3 sizes"):
        sw.distribute_tensor(torch.zeros(8), mesh, [Ragged(0, (4, 4, 0))])
    with pytest.raises(sw.LayoutError, match="are 7 indices in all, and dim 0 has 8"):
        sw.distribute_tensor(torch.zeros(8), mesh, [Ragged(0, (4, 1, 1, 1))])
    with pytest.raises(sw.LayoutError, match="at least 0"):
        Ragged(0, (4, -1))
    with pytest.raises(sw.LayoutError, match="which has 4 ranks"):
        sw.distribute_tensor(torch.zeros(8), mesh, [Owned(4)])
    with pytest.raises(sw.LayoutError, match="0-d tensor"):
        sw.distribute_tensor(torch.zeros(()), mesh, [Owned(1)])


@pytest.mark.parametrize("sizes", [(1, 3, 1, 1), (0, 4, 2, 0), (2, 2, 2, 0)], ids=str)
@pytest.mark.parametrize("layout", ["ragged", "even"])
def test_grouped_products_of_ragged_groups(sizes: tuple[int, ...], layout: str) -> None:
    """The matrices may be sharded evenly, unlike the ends of the groups: then they are moved."""
    mesh = sw.init_device_mesh("cpu", (4,))
    rows = [3 * size for size in sizes]
    x, weight = torch.randn(18, 8), torch.randn(6, 8, 16)
    ends = torch.arange(3, 19, 3, dtype=torch.int32)
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    split = Ragged(0, sizes) if layout == "ragged" else S0
    laid: list[Any] = [
        sw.distribute_tensor(x, mesh, [Ragged(0, rows)]).requires_grad_(),
        sw.distribute_tensor(weight, mesh, [split]).requires_grad_(),
    ]
    got, wanted = (
        F.grouped_mm(*laid, offs=sw.distribute_tensor(ends, mesh, [Ragged(0, sizes)])),
        F.grouped_mm(*plain, offs=ends),
    )
    torch.testing.assert_close(got.full_tensor(), wanted)
    grads, plain_grads = (torch.autograd.grad(y.square().sum(), z) for y, z in ((got, laid), (wanted, plain)))
    for grad, plain_grad in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(grad.full_tensor(), plain_grad, rtol=1e-4, atol=1e-4)


def test_ends_of_groups_must_match_the_rows_of_their_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.randn(18, 8), mesh, [Ragged(0, (3, 9, 3, 3))])
    weight = sw.distribute_tensor(torch.randn(6, 8, 16), mesh, [Ragged(0, (1, 3, 1, 1))])
    for ends in ([4, 6, 9, 12, 15, 18], [3, 2, 9, 12, 15, 18], [3, 6, 9, 12, 15, 17]):
        offs = torch.tensor(ends, dtype=torch.int32)
        with pytest.raises(sw.LayoutError, match="do not match the rows"):
            F.grouped_mm(x, weight, offs=sw.distribute_tensor(offs, mesh, [Ragged(0, (1, 3, 1, 1))]))
