"""Optimizers on full matrices: one device's values, each matrix computed once, two exchanges a step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Owned, Ragged, Replicate, Shard, StridedShard, Zigzag
from shardwise.optim import Muon, by_matrix
from shardwise.optim.matrix_owners import matrix_owners

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: tuple[tuple[tuple[int, ...], list[sw.Placement]], ...] = (
    ((4,), [S0]), ((3,), [S1]), ((2, 2), [S0, S1]), ((2, 2), [R, S0]), ((2, 2), [S0, S0]), ((8,), [S0]),
    ((2, 2), [R, R]), ((3,), [Zigzag(0)]), ((2,), [StridedShard(1, 2)]), ((4,), [Ragged(0, (3, 0, 1, 4))]),
    ((2, 2), [Owned(1), S1]),
)  # fmt: skip
SHAPES = ((8, 6), (8, 12), (8, 8), (8, 3))


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
@pytest.mark.parametrize(("shape", "placements"), LAYOUTS)
def test_muon_is_that_of_one_device(shape: tuple[int, ...], placements: Any, options: dict[str, Any]) -> None:
    """Bit by bit, after several steps."""
    generator = torch.Generator().manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    plain = [nn.Parameter(torch.randn(size, generator=generator)) for size in SHAPES]
    laid: list[Any] = [nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placements)) for p in plain]
    theirs, ours = torch.optim.Muon(plain, lr=0.1, **options), Muon(laid, lr=0.1, **options)
    for _ in range(3):
        for parameter, mine in zip(plain, laid, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            mine.grad = sw.distribute_tensor(parameter.grad, mesh, placements)
        theirs.step()
        with sw.debug.CommDebugMode() as comm:
            ours.step()
        assert comm.get_total_counts() <= 2
    for parameter, mine in zip(plain, laid, strict=True):
        assert mine.placements == tuple(placements)
        assert torch.equal(mine.full_tensor(), parameter.detach())


def test_a_model_under_fully_shard() -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (3,))
    reference = nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 5, bias=False)).double()
    model = copy.deepcopy(reference)
    for module in (model[0], model[2], model):
        sw.fully_shard(module, mesh)
    x = torch.randn(6, 6, dtype=torch.float64)
    for net, optimizer, given in (
        (reference, torch.optim.Muon(reference.parameters(), lr=0.05), x),
        (model, Muon(model.parameters(), lr=0.05), sw.distribute_tensor(x, mesh, [S0])),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            net(given).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        # gradients differ in their last bits, and an update is rounded to bfloat16
        torch.testing.assert_close(mine.full_tensor(), plain.detach(), rtol=1e-2, atol=1e-3)  # pyright: ignore[reportAttributeAccessIssue]


def test_each_matrix_is_computed_once() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    seen: list[torch.Size] = []

    def function(matrix: torch.Tensor) -> torch.Tensor:
        seen.append(matrix.shape)
        return matrix.t().contiguous().t() * 2

    given = [torch.randn(size) for size in SHAPES]
    laid = [sw.distribute_tensor(x, mesh, [R, S1]) for x in given]
    for found, x in zip(by_matrix(function, laid), given, strict=True):
        assert found.placements == (R, S1)  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(found.full_tensor(), 2 * x)  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(seen) == sorted(map(torch.Size, SHAPES))


def test_sums_that_wait_and_plain_matrices() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 4)
    waiting = sw.DTensor.from_local(sw.distribute_tensor(whole, mesh, [R]).to_local() / 2, mesh, [sw.Partial()])
    found: list[Any] = by_matrix(torch.linalg.inv, [waiting, whole])
    torch.testing.assert_close(found[0].full_tensor(), found[1])


def test_work_is_balanced() -> None:
    costs = [float(cost) for cost in (5, 9, 1, 7, 3, 8, 2, 6, 4, 7, 7, 3)]
    owners = matrix_owners(costs, 4)
    load = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(load) <= 1.1 * sum(costs) / 4


def test_what_is_no_matrix_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    with pytest.raises(sw.LayoutError, match="3 dims"):
        by_matrix(torch.linalg.inv, [sw.ones(2, 2, 2, device_mesh=mesh)])
    with pytest.raises(sw.LayoutError, match="same shape"):
        by_matrix(lambda matrix: matrix[:1], [sw.ones(2, 2, device_mesh=mesh)])


def test_states_are_saved_and_loaded() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    weight = nn.Parameter(sw.ones(4, 6, device_mesh=mesh, placements=[S0]))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = sw.ones(4, 6, device_mesh=mesh, placements=[S0])
    optimizer.step()
    other = Muon([weight], lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    mine, theirs = (each.state[weight]["momentum_buffer"].full_tensor() for each in (other, optimizer))
    assert torch.equal(mine, theirs)


def test_a_dry_run_counts_two_exchanges() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (64,))
        weights = [nn.Parameter(sw.zeros(256, 128, device_mesh=mesh, placements=[S0])) for _ in range(4)]
        optimizer = Muon(weights, lr=0.1)
        for weight in weights:
            weight.grad = sw.zeros(256, 128, device_mesh=mesh, placements=[S0])
        optimizer.step()
    each = 4 * 256 * 128 * 2 / 64  # bytes of all matrices in bfloat16, on average over the ranks
    assert run.bytes == pytest.approx(2 * each * 63 / 64, rel=0.01)


# ---------------------------------------------------------------- optimizers that a user writes with it


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-9) ** -0.25) @ vectors.mT


def shampoo(parameters: list[Any], gradients: list[list[Any]], roots: Any) -> None:
    """Steps of Shampoo: a preconditioner for each side, whose roots `roots` computes for all matrices at once."""
    sides = [[torch.zeros_like(p @ p.mT), torch.zeros_like(p.mT @ p)] for p in parameters]
    for step in gradients:
        for (left, right), grad in zip(sides, step, strict=True):
            left.add_(grad @ grad.mT)
            right.add_(grad.mT @ grad)
        found = roots([side for pair in sides for side in pair])
        for at, (parameter, grad) in enumerate(zip(parameters, step, strict=True)):
            parameter.sub_(0.1 * (found[2 * at] @ grad @ found[2 * at + 1]))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def quantized(matrix: Any) -> tuple[Any, Any]:
    """Eight bits for each element, and a scale for each 4 in a row."""
    blocks = matrix.view(matrix.shape[0], -1, 4)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (blocks / scale).round().to(torch.int8), scale


def momentum_in_8_bits(parameters: list[Any], gradients: list[list[Any]], directions: Any) -> list[Any]:
    """Steps along orthogonalized momenta, which are kept in blocks of 8 bits."""
    states = [quantized(torch.zeros_like(parameter)) for parameter in parameters]
    for step in gradients:
        momenta = [
            (codes * scale).view(grad.shape) * 0.9 + grad for (codes, scale), grad in zip(states, step, strict=True)
        ]
        states = [quantized(momentum) for momentum in momenta]
        for parameter, direction in zip(parameters, directions(momenta), strict=True):
            parameter.sub_(0.1 * direction)
    return [codes for codes, _ in states]


@pytest.mark.parametrize(("shape", "placements"), [((4,), [S0]), ((3,), [S0]), ((2, 2), [R, S0]), ((2, 2), [S0, S1])])
def test_shampoo_of_a_user(shape: tuple[int, ...], placements: Any) -> None:
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    plain = [torch.randn(size, dtype=torch.float64) for size in ((8, 12), (8, 8), (9, 4))]
    steps = [[torch.randn_like(p) for p in plain] for _ in range(3)]
    laid = [sw.distribute_tensor(p, mesh, placements) for p in plain]
    laid_steps = [[sw.distribute_tensor(g, mesh, placements) for g in step] for step in steps]
    seen: list[torch.Size] = []

    def once(matrix: torch.Tensor) -> torch.Tensor:
        seen.append(matrix.shape)
        return inverse_root(matrix)

    shampoo(laid, laid_steps, lambda sides: by_matrix(once, sides))
    shampoo(plain, steps, lambda sides: [inverse_root(side) for side in sides])
    assert len(seen) == 3 * 6  # each root once in the mesh
    for mine, one in zip(laid, plain, strict=True):
        assert mine.placements == tuple(placements)
        torch.testing.assert_close(mine.full_tensor(), one)


@pytest.mark.parametrize(("shape", "placements"), [((4,), [S0]), ((3,), [S0]), ((2, 2), [S0, S0])])
def test_states_in_blocks_of_eight_bits(shape: tuple[int, ...], placements: Any) -> None:
    """Rows are not split, so no block is; codes are those of one device, bit by bit."""
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    plain = [torch.randn(size, dtype=torch.float64) for size in ((8, 12), (5, 8))]
    steps = [[torch.randn_like(p) for p in plain] for _ in range(3)]
    laid = [sw.distribute_tensor(p, mesh, placements) for p in plain]
    laid_steps = [[sw.distribute_tensor(g, mesh, placements) for g in step] for step in steps]
    codes = momentum_in_8_bits(laid, laid_steps, lambda momenta: by_matrix(orthogonal, momenta))
    wanted = momentum_in_8_bits(plain, steps, lambda momenta: [orthogonal(momentum) for momentum in momenta])
    for mine, one in zip(codes, wanted, strict=True):
        assert mine.dtype is torch.int8
        assert torch.equal(mine.full_tensor(), one)
    for mine, one in zip(laid, plain, strict=True):
        torch.testing.assert_close(mine.full_tensor(), one)


def test_matrices_of_one_shape_as_a_stack() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    given = [torch.randn(size) for size in ((4, 6), (4, 6), (6, 4), (4, 6), (4, 6))]
    calls: list[torch.Size] = []

    def doubled(stack: torch.Tensor) -> torch.Tensor:
        calls.append(stack.shape)
        return stack * 2

    laid: list[Any] = [sw.distribute_tensor(x, mesh, [S0]) for x in given]
    for found, x in zip(by_matrix(doubled, [*laid, given[0]], batched=True), [*given, given[0]], strict=True):
        torch.testing.assert_close(found.full_tensor() if isinstance(found, sw.DTensor) else found, 2 * x)
    assert sum(shape[0] for shape in calls) == 6
    assert len(calls) == 4  # two shapes on one rank, one on the other, and the plain one
    with pytest.raises(sw.LayoutError, match="same shape"):
        by_matrix(lambda stack: stack[:, :1], laid, batched=True)
