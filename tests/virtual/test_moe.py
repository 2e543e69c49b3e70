"""Mixtures of experts: tokens and results, gradients and training as on one device; each token sent once to a rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.fabric import virtual as virtual_module
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.virtual import expert_programs

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], list[sw.Placement], int]] = {
    "ep": ((4,), ("ep",), [S0], 13),
    "ep of 3, replicated": ((3,), ("ep",), [R], 7),
    "by columns": ((4,), ("ep",), [S1], 5),
    "dp x ep": ((2, 2), ("dp", "ep"), [S0, S0], 13),
    "ep x dp": ((2, 2), ("ep", "dp"), [S0, S0], 13),
    "ep x tp": ((2, 2), ("ep", "tp"), [S0, S1], 10),
    "columns x rows": ((2, 2), ("ep", "tp"), [S1, S0], 10),
    "sums": ((2, 2), ("ep", "tp"), [Partial(), Partial()], 10),
    "dp x ep x tp": ((2, 2, 2), ("dp", "ep", "tp"), [S0, S0, S0], 13),
}
ROUTES = ((1, 4), (2, 6), (8, 64))  # choices and experts


def routed(tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Different experts for each token."""
    return torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])


def laid(tensor: torch.Tensor, mesh: sw.DeviceMesh, placements: Sequence[Any] | None = None) -> Any:
    made = sw.distribute_tensor(tensor.detach(), mesh, placements or [R] * mesh.ndim)
    return made.requires_grad_() if tensor.requires_grad else made


@pytest.mark.parametrize(("choices", "experts"), ROUTES)
@pytest.mark.parametrize("name", MESHES)
def test_rows_and_gradients_are_those_of_one_device(name: str, choices: int, experts: int) -> None:
    shape, names, placements, tokens = MESHES[name]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    x = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for skewed in (False, True):
        ids = torch.full((tokens, choices), experts - 1) if skewed else routed(tokens, choices, experts)
        ours = [laid(x, mesh, placements), laid(weights, mesh), laid(scale, mesh)]
        rows, back = sw.moe.dispatch(ours[0], laid(ids, mesh), experts)
        wanted, wanted_back = sw.moe.dispatch(x, ids, experts)
        assert torch.equal(rows.full_tensor(), wanted)
        assert torch.equal(wanted, x[torch.sort(ids.flatten(), stable=True)[1] // choices])
        assert torch.equal(back.offs.full_tensor(), wanted_back.offs)
        assert torch.equal(back.counts.full_tensor(), torch.bincount(ids.flatten(), minlength=experts))
        y = back((rows * ours[2]).sin(), ours[1])
        torch.testing.assert_close(y.full_tensor(), by_loop(x, ids, weights, scale))
        grads = torch.autograd.grad(y.square().sum(), ours)
        wanted_grads = torch.autograd.grad(by_loop(x, ids, weights, scale).square().sum(), (x, weights, scale))
        for grad, plain in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad.full_tensor(), plain)


def by_loop(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same without sorting: the outputs do not depend on the expert here, but on what was weighted."""
    assert ids.shape == weights.shape
    return (x * scale).sin() * weights.sum(1, keepdim=True)


@pytest.mark.parametrize("name", ["ep", "ep of 3, replicated", "dp x ep", "ep x tp", "dp x ep x tp"])
@pytest.mark.parametrize("capacity", [None, 2])
def test_experts_by_grouped_products(name: str, capacity: int | None) -> None:
    """Products stay where the experts are: no collective but those of dispatch and back."""
    shape, names, placements, _ = MESHES[name]
    placements = [R if names[axis] == "tp" else p for axis, p in enumerate(placements)]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    up, down = [R] * mesh.ndim, [R] * mesh.ndim
    for axis, each in enumerate(names):
        if each != "dp":
            up[axis], down[axis] = (S0, S0) if each == "ep" else (S2, S1)
    torch.manual_seed(1)
    for experts, choices in ((8, 2), (6, 1)):
        plain = [torch.randn(16, 8), torch.rand(16, choices), torch.randn(experts, 8, 16), torch.randn(experts, 16, 8)]
        plain = [tensor.requires_grad_() for tensor in plain]
        layouts = (placements, [R] * mesh.ndim, up, down)
        ours = [laid(tensor, mesh, p) for tensor, p in zip(plain, layouts, strict=True)]
        ids = routed(16, choices, experts)
        shared = 1
        for axis, each in enumerate(names):
            shared *= mesh.shape[axis] if each != "tp" else 1

        def layer(x: Any, ids: Any, weights: Any, up: Any, down: Any, groups: int | None) -> Any:
            rows, back = sw.moe.dispatch(x, ids, len(up), capacity=capacity, groups=groups)
            return back(F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=back.offs)), down, offs=back.offs), weights)

        with sw.debug.CommDebugMode() as comm:
            y = layer(ours[0], laid(ids, mesh, placements), *ours[1:], None)
        exchanges = 2 if capacity else 3 + (choices > 1)  # counts; weights, which are given to back
        assert comm.get_total_counts() == exchanges, comm.get_comm_counts()
        wanted = layer(plain[0], ids, *plain[1:], shared if capacity else None)
        torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(y.square().sum(), ours)
        for grad, plain_grad in zip(grads, torch.autograd.grad(wanted.square().sum(), plain), strict=True):
            torch.testing.assert_close(grad.full_tensor(), plain_grad, rtol=1e-3, atol=1e-4)
        assert grads[2].placements[names.index("ep")] is S0


def test_what_a_capacity_drops() -> None:
    """Of each rank's tokens the first ones stay; dropped choices give nothing and get no gradient."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x = torch.arange(1.0, 9).view(8, 1).requires_grad_()
    ids = torch.tensor([[0], [0], [0], [1], [1], [0], [1], [1]])
    ours = laid(x, mesh, [S0])
    rows, back = sw.moe.dispatch(ours, laid(ids, mesh, [S0]), 2, capacity=2)
    assert rows.full_tensor().flatten().tolist() == [1, 2, 6, 0, 4, 0, 5, 7]
    assert back.counts.full_tensor().tolist() == [4, 4]
    y = back(rows * 10)
    assert y.full_tensor().flatten().tolist() == [10, 20, 0, 40, 50, 60, 70, 0]
    y.sum().backward()
    assert ours.grad.full_tensor().flatten().tolist() == [10, 10, 0, 10, 10, 10, 10, 0]
    one, one_back = sw.moe.dispatch(x, ids, 2, capacity=2, groups=2)
    assert torch.equal(one, rows.full_tensor())
    assert torch.equal(one_back(one), sw.moe.dispatch(ours, laid(ids, mesh), 2, capacity=2)[1](rows).full_tensor())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward mode of plain tensors
def test_derivatives_of_higher_order_and_in_forward_mode() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    x, weights = (torch.randn(7, n, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    ids = routed(7, 2, 5)

    def penalty(x: Any, weights: Any, ids: Any) -> Any:
        rows, back = sw.moe.dispatch(x, ids, 5)
        y = back(rows.sin() * rows, weights)
        grads = torch.autograd.grad(y.square().sum(), (x, weights), create_graph=True)
        return torch.autograd.grad(grads[0].square().sum() + grads[1].square().sum(), (x, weights))

    found = penalty(laid(x, mesh, [S0]), laid(weights, mesh, [S0]), laid(ids, mesh, [S0]))
    for mine, theirs in zip(found, penalty(x, weights, ids), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)

    tangents = []
    for inputs in ((x, weights, ids), (laid(x, mesh, [S0]), laid(weights, mesh), laid(ids, mesh))):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[0].detach(), inputs[0].detach() * 2)
            rows, back = sw.moe.dispatch(dual, inputs[2], 5)
            tangents.append(forward_ad.unpack_dual(back(rows.sin(), inputs[1].detach())).tangent)
    torch.testing.assert_close(tangents[1].full_tensor(), tangents[0])


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("choices", "experts", "shape"), [(1, 8, (4,)), (2, 8, (4,)), (8, 64, (4,)), (2, 7, (3,)), (2, 8, (2, 2))]
)
def test_bytes_are_those_of_tokens_that_cross_once(
    choices: int, experts: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that ranks send, numbers of rows included: at most 1.02 of a row for each token and other rank it goes to."""
    counted = [0]
    swapped = virtual_module._swapped_items  # pyright: ignore[reportPrivateUsage]

    def counting(step: Any, sent: Any) -> Any:
        for me, items in enumerate(sent):
            counts = items.counts.tolist() if isinstance(items.counts, torch.Tensor) else items.counts
            for tensor in items.tensors:
                row = tensor[0].nbytes if len(tensor) else 0
                counted[0] += row * sum(n for to, n in enumerate(counts) if to != me)
        return swapped(step, sent)

    names = ("dp", "ep")[-len(shape) :]
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    tokens, width = 256 * mesh.size(), 256
    x, ids = torch.randn(tokens, width), routed(tokens, choices, experts)
    rows_of = [S0] * mesh.ndim
    ours, where, weights = laid(x, mesh, rows_of), laid(ids, mesh, rows_of), laid(torch.rand(ids.shape), mesh, rows_of)
    monkeypatch.setattr(virtual_module, "_swapped_items", counting)
    with sw.debug.CommDebugMode() as comm:
        rows, back = sw.moe.dispatch(ours, where, experts)
        back(rows, weights)
    holder = torch.empty(tokens * choices, dtype=torch.int64)  # of each row, sorted by expert
    for rank, coordinate in enumerate(mesh.coordinates.tolist()):
        (run,) = rows.spec.block(coordinate).runs[0]
        holder[run.start : run.start + run.length] = rank
    order = torch.sort(ids.flatten(), stable=True)[1]
    pairs = {(int(row) // choices, int(rank)) for row, rank in zip(order, holder, strict=True)}
    crossing = sum(token // (tokens // mesh.size()) != rank for token, rank in pairs)
    ideal = 2 * crossing * width * 4
    assert ideal <= counted[0] <= 1.02 * ideal
    assert comm.received_bytes * mesh.size() == pytest.approx(counted[0], rel=1e-3)


# ---------------------------------------------------------------- around it


@pytest.mark.parametrize("early", [False, True])
def test_slices_of_a_virtual_mesh_have_their_own_tokens(early: bool) -> None:
    """Each slice of the experts' axis its own batch, as under data parallelism; sizes differ from slice to slice."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    torch.manual_seed(0)
    parts = [torch.randn(3, 4) for _ in range(4)]
    ids = [torch.randint(0, 4, (3, 2)) for _ in range(4)]
    weights = torch.randn(4, 4, 8)
    x = sw.DTensor.from_local(sw.RankTensor(parts), mesh, [S0]).requires_grad_()
    where = sw.DTensor.from_local(sw.RankTensor(ids), mesh, [S0])
    chances = torch.rand(3, 2)  # of the tokens of each rank
    scale = sw.DTensor.from_local(sw.RankTensor([chances] * 4), mesh, [S0]) if early else None
    rows, back = sw.moe.dispatch(x, where, 4, weights=scale)
    y = back(F.grouped_mm(rows, laid(weights, mesh, [S0]), offs=back.offs).cos())
    y.sum().backward()
    assert x.grad is not None
    for at in (0, 2):
        plain = torch.cat(parts[at : at + 2]).requires_grad_()
        scale = chances.repeat(2, 1) if early else None
        one, one_back = sw.moe.dispatch(plain, torch.cat(ids[at : at + 2]), 4, weights=scale)
        wanted = one_back(F.grouped_mm(one, weights, offs=one_back.offs).cos())
        wanted.sum().backward()
        for found, expected in ((y, wanted), (x.grad, plain.grad)):
            assert expected is not None
            torch.testing.assert_close(torch.cat(found.to_local().tensors[at : at + 2]), expected.detach())


def test_a_dry_run_expects_equal_experts() -> None:
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (8, 4), mesh_dim_names=("ep", "tp"))
        x = sw.zeros(4096, 64, device_mesh=mesh, placements=[S0, R]).requires_grad_()
        ids = sw.zeros(4096, 2, dtype=torch.int64, device_mesh=mesh, placements=[S0, R])
        up = sw.zeros(16, 64, 256, device_mesh=mesh, placements=[S0, S2]).requires_grad_()
        rows, back = sw.moe.dispatch(x, ids, 16)
        h = F.grouped_mm(rows, up, offs=back.offs)
        back(h.sum(1, keepdim=True) * rows).sum().backward()
    assert str(rows.spec.layout) == f"ep:S0({','.join(['1024'] * 8)}) tp:R"
    tokens = 512 * 8 * (1 - 14 * 13 / (16 * 15)) * 7 / 8  # of 512 on a rank, to other ranks
    exchanged = [r.cost.received for r in run.steps if r.step.describe().endswith("tokens over ep")]
    sent = tokens * (64 * 4 + 2 * 2)  # with the numbers of two experts
    assert exchanged == [pytest.approx(row, rel=0.01) for row in (sent, *[tokens * 64 * 4] * 3)]


def test_explain_shows_tokens_and_bytes() -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    x = laid(torch.randn(64, 16), mesh, [S0])
    ids = laid(torch.arange(64).view(64, 1) % 8, mesh, [S0])
    with sw.explain() as report:
        rows, back = sw.moe.dispatch(x, ids, 8)
        back(rows)
    moves = [move for record in report.records for move in record.moves]
    assert [move.words for move in moves][1:] == ["exchange 48 tokens over ep"] * 2
    assert moves[1].received == 48 * 16 * 4 / 4
    assert "48 tokens" in str(report)
    assert "test_moe.py" in str(report)


def test_what_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, ids = laid(torch.randn(8, 4), mesh), laid(torch.zeros(8, 2, dtype=torch.int64), mesh)
    with pytest.raises(sw.MeshError, match="which axis"):
        sw.moe.dispatch(x, ids, 4)
    with pytest.raises(IndexError, match="8 entries"):
        sw.moe.dispatch(x, laid(torch.tensor([[0, 4]] * 8), mesh), 4, axis="a")
    with pytest.raises(RuntimeError, match="experts are 0 to 3"):
        sw.moe.dispatch(x, laid(torch.tensor([[0, -1]] * 8), mesh), 4, axis="a", capacity=2)
    with pytest.raises(IndexError, match="1 entries"):
        sw.moe.dispatch(torch.ones(1, 2), torch.tensor([[7]]), 4)
    with pytest.raises(sw.LayoutError, match="expert_ids"):
        sw.moe.dispatch(x, ids[:4], 4, axis="a")
    rows, back = sw.moe.dispatch(x, ids, 4, axis="b")
    with pytest.raises(sw.LayoutError, match="16 dispatched rows"):
        back(rows[:3])
    with pytest.raises(sw.LayoutError, match="weights"):
        back(rows, torch.ones(8, 3))
    experts, other = laid(torch.randn(4, 4, 4), mesh, [R, S0]), sw.moe.dispatch(x, ids + 1, 4, axis="b")[1]
    with pytest.raises(sw.LayoutError, match="offs"):  # those of another dispatch
        F.grouped_mm(sw.moe.dispatch(x, ids + 3, 4, axis="b")[0], experts, offs=other.offs)


def test_random_mixtures_are_those_of_a_loop() -> None:
    """`python -m tests.virtual.expert_programs` for more of them."""
    wrong = expert_programs.run(range(40))
    assert not wrong, wrong


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("capacity", [None, 3])
def test_ids_of_few_bits(shape: tuple[int, ...], capacity: int | None) -> None:
    """Bytes would be masks where they index, and 256 is no byte."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
    torch.manual_seed(0)
    x, split = torch.randn(16, 2), [S0] * mesh.ndim
    for dtype, experts in ((torch.uint8, 256), (torch.uint8, 4), (torch.int8, 4), (torch.int16, 5), (torch.int32, 5)):
        ids = torch.randint(0, experts, (16, 1))
        order = ids.flatten().sort(stable=True)[1]
        plain, _ = sw.moe.dispatch(x, ids.to(dtype), experts, capacity=capacity, groups=4)
        rows, _ = sw.moe.dispatch(laid(x, mesh, split), laid(ids.to(dtype), mesh, split), experts, capacity=capacity)
        assert torch.equal(rows.full_tensor(), plain)
        if capacity is None:
            assert torch.equal(plain, x[order])


def test_a_mask_is_no_list_of_experts() -> None:
    x, mask = torch.randn(8, 4), torch.ones(8, 4, dtype=torch.bool)
    mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises(sw.LayoutError, match="mask"):
        sw.moe.dispatch(x, mask, 4)
    with pytest.raises(sw.LayoutError, match="mask"):
        sw.moe.dispatch(laid(x, mesh, [S0]), laid(mask, mesh, [S0]), 4, capacity=2)


# ---------------------------------------------------------------- modules and plans


class Mixture(nn.Module):
    """A mixture as models have them: a router, a shared expert, a loss for balance. `by`: how rows are multiplied."""

    def __init__(
        self, experts: int, choices: int, by: str, capacity: int | None = None, groups: int | None = None
    ) -> None:
        super().__init__()
        self.choices, self.by, self.capacity, self.groups = choices, by, capacity, groups
        self.router, self.shared = nn.Linear(8, experts, bias=False), nn.Linear(8, 8)
        self.up = nn.Parameter(torch.randn(experts, 8, 16) / 3)
        self.down = nn.Parameter(torch.randn(experts, 16, 8) / 4)

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(0, -2)
        chances = self.router(tokens).softmax(-1)
        weights, ids = chances.topk(self.choices)
        experts = len(self.up)
        if self.by == "one device":
            y = self.without_dispatch(tokens, weights, ids)
            used = F.one_hot(ids, experts).sum((0, 1))
        else:
            groups = None if isinstance(tokens, sw.DTensor) else self.groups
            rows, back = sw.moe.dispatch(tokens, ids, experts, axis=None, capacity=self.capacity, groups=groups)
            y, used = back(self.multiplied(rows, back.offs), weights), back.counts
        balance = experts * (used / (len(tokens) * self.choices) * chances.mean(0)).sum()
        return x + (y + self.shared(tokens)).view(x.shape), balance

    def multiplied(self, rows: Any, offs: Any) -> Any:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=offs)), self.down, offs=offs)

    def without_dispatch(self, tokens: Any, weights: Any, ids: Any) -> Any:
        """All tokens through all experts, by plain operators alone."""
        each = torch.bmm(F.silu(torch.bmm(tokens.expand(len(self.up), -1, -1), self.up)), self.down)
        chosen = (F.one_hot(ids, len(self.up)) * weights.unsqueeze(-1)).sum(1)
        return (each * chosen.t().unsqueeze(-1)).sum(0)


def trained(model: Any, batches: Sequence[Any], lr: float = 0.3) -> tuple[list[Any], list[Any]]:
    """Ten steps: losses, and the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, first = [], []
    for x in batches:
        y, balance = model(x)
        loss = (y - 1).square().mean() + 0.1 * balance
        loss.backward()
        first = first or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, first


PLANS = (
    ((4,), ("ep",), [S0], 8, 2, "grouped products", torch.float32),
    ((3,), ("ep",), [S0], 7, 1, "grouped products", torch.float32),
    ((4,), ("ep",), [S0], 64, 8, "grouped products", torch.float32),
    ((4,), ("ep",), [S0], 6, 2, "grouped products", torch.bfloat16),
    ((4,), ("ep",), [S0], 6, 2, "one device", torch.float64),
    ((2, 2), ("dp", "ep"), [S0, S0], 5, 2, "grouped products", torch.float32),
    ((2, 2), ("ep", "tp"), [S0, R], 4, 1, "grouped products", torch.float32),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_trains_as_one_device(plan: Any) -> None:
    """Ten steps: losses, gradients and parameters. In bfloat16 one step: another sum may choose other experts."""
    shape, names, placements, experts, choices, by, dtype = plan
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(3)
    plain = Mixture(experts, choices, by).to(dtype)
    ours = copy.deepcopy(plain)
    style = ExpertParallel(tp_mesh=mesh["tp"], tp_dims={"up": 2, "down": 1}) if "tp" in names else ExpertParallel()
    parallelize_module(ours, mesh["ep"] if len(names) > 1 else mesh, style)
    assert ours.up.placements[0] is S0  # pyright: ignore[reportAttributeAccessIssue]
    steps, tolerance = (1, 0.05) if dtype is torch.bfloat16 else (10, 1e-4 if dtype is torch.float32 else 1e-11)
    batches = [torch.randn(8, 3, 8, dtype=dtype) for _ in range(steps)]
    wanted, wanted_grads = trained(plain, batches)
    found, grads = trained(ours, [laid(x, mesh, placements) for x in batches])
    for mine, theirs in zip([*found, *grads], [*wanted, *wanted_grads], strict=True):
        assert_near(mine.full_tensor(), theirs, tolerance)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_near(mine.full_tensor().detach(), theirs.detach(), tolerance)  # pyright: ignore[reportAttributeAccessIssue]


def assert_near(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert (mine - theirs).double().norm() <= tolerance * theirs.double().norm() + tolerance * 1e-3


def test_a_capacity_in_a_plan() -> None:
    """Tokens that are dropped go by the shared expert alone, as on one device with as many groups."""
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    plain = Mixture(6, 2, "grouped products", capacity=3, groups=4)
    ours = parallelize_module(copy.deepcopy(plain), mesh, ExpertParallel())
    batches = [torch.randn(8, 3, 8) for _ in range(4)]
    wanted, _ = trained(plain, batches)
    found, _ = trained(ours, [laid(x, mesh, [S0]) for x in batches])
    torch.testing.assert_close([loss.full_tensor() for loss in found], wanted)


def test_plain_inputs_and_fully_sharded_experts() -> None:
    """Each rank its own batch as a plain tensor; experts over one axis, fully sharded over the other."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(3)
    plain = Mixture(6, 2, "grouped products")
    ours = parallelize_module(copy.deepcopy(plain), mesh["ep"], ExpertParallel())
    sw.fully_shard(ours, mesh=mesh["dp"])
    parts = [torch.randn(2, 3, 8) for _ in range(4)]
    y, balance = ours(sw.RankTensor(parts))
    assert balance.tensors[0].dim() == 0
    ((y - 1).square().mean() / 2).backward()  # the loss of a slice is the sum over its two ranks; of slices the mean
    wanted = Mixture.forward(plain, torch.cat(parts))[0]
    torch.testing.assert_close(torch.cat(y.tensors), wanted)
    (wanted - 1).square().mean().backward()
    for name, parameter in ours.named_parameters():
        grad, expected = parameter.grad, plain.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-3, atol=1e-4)  # pyright: ignore[reportAttributeAccessIssue]


class Outputs(NamedTuple):
    y: Any
    counts: Any


class Counting(nn.Module):
    """Experts that return their counts too, in some structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        self.router, self.up, self.structure = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 4, 4)), structure

    def forward(self, x: Any) -> Any:
        weights, ids = self.router(x).softmax(-1).topk(2)
        rows, back = sw.moe.dispatch(x, ids, 8, weights=weights)
        y, counts = back(F.grouped_mm(rows, self.up, offs=back.offs)), back.counts
        return {"named": Outputs(y, counts), "dict": {"y": y, "counts": counts}, "list": [y, (counts,)]}[self.structure]


@pytest.mark.parametrize("structure", ["named", "dict", "list"])
def test_plain_outputs_of_any_structure(structure: str) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    plain = Counting(structure)
    ours = parallelize_module(copy.deepcopy(plain), mesh, ExpertParallel())
    parts = [torch.randn(3, 4) for _ in range(4)]
    found, wanted = ours(sw.RankTensor(parts)), plain(torch.cat(parts))
    assert type(found) is type(wanted)
    (y, counts), (plain_y, plain_counts) = (tree_leaves(made) for made in (found, wanted))
    torch.testing.assert_close(torch.cat(y.tensors), plain_y)
    assert all(torch.equal(each, plain_counts) for each in counts.tensors)


def test_an_output_that_may_be_rows_or_not_is_refused() -> None:
    """Eight experts and eight tokens: each rank would get the counts of two experts as those of its tokens."""
    mesh = sw.init_device_mesh("cpu", (4,))
    ours = parallelize_module(Counting("named"), mesh, ExpertParallel())
    with pytest.raises(sw.LayoutError, match="as many rows as the input"):
        ours(sw.RankTensor([torch.randn(2, 4) for _ in range(4)]))


class Products(nn.Module):
    """Experts by one einsum, whose result the planner may leave as sums of ranks. Some statistics of all tokens."""

    def __init__(self, features: int, returns: str = "rows") -> None:
        super().__init__()
        self.up, self.router, self.returns = nn.Parameter(torch.randn(6, 16, features)), nn.Linear(16, 6), returns

    def forward(self, x: Any) -> Any:
        chances = self.router(x).softmax(-1)
        y = torch.einsum("...d,edf,...e->...f", x, self.up, chances)
        if self.returns == "unregistered":
            return Named([y])
        return (y, chances.flatten(0, -2).sum(0)) if self.returns == "counts" else y


class Named(list[Any]):
    """A list that torch takes as one value."""


@pytest.mark.parametrize(("tokens", "features"), [(4, 6), (4, 96), (64, 32), (64, 512)])
def test_rows_that_the_planner_does_not_split_are_split(tokens: int, features: int) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    plain, x = Products(features), torch.randn(tokens, 16)
    ours = parallelize_module(copy.deepcopy(plain), mesh, ExpertParallel())
    torch.testing.assert_close(torch.cat(ours(sw.RankTensor(list(x.chunk(2)))).tensors), plain(x))


@pytest.mark.parametrize("batch", [3, 6])
def test_statistics_of_an_input_split_along_its_sequence_are_whole(batch: int) -> None:
    """Six experts: a batch of six has as many rows as there are counts."""
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    plain, x = Products(8, "counts"), torch.randn(batch, 4, 16)
    ours = parallelize_module(copy.deepcopy(plain), mesh, ExpertParallel(input_layouts=Shard(1)))
    y, counts = ours(sw.RankTensor([part.contiguous() for part in x.chunk(2, 1)]))
    wanted, wanted_counts = plain(x)
    torch.testing.assert_close(torch.cat(y.tensors, 1), wanted)
    for each in counts.tensors:
        torch.testing.assert_close(each, wanted_counts)


def test_outputs_in_structures_that_torch_does_not_know_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    ours = parallelize_module(Products(8, "unregistered"), mesh, ExpertParallel())
    with pytest.raises(sw.LayoutError, match="DTensors inside a Named"):
        ours(sw.RankTensor([torch.randn(4, 16)] * 2))


def test_a_plan_names_what_does_not_fit() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    with pytest.raises(sw.LayoutError, match="stacked parameters"):
        parallelize_module(nn.Linear(4, 4), mesh["ep"], ExpertParallel())
    style = ExpertParallel(tp_mesh=mesh["tp"], tp_dims={"middle": 1})
    with pytest.raises(sw.LayoutError, match="matches no stacked parameter"):
        parallelize_module(Mixture(4, 1, "grouped products"), mesh["ep"], style)
    with pytest.raises(sw.LayoutError, match="go together"):
        ExpertParallel(tp_dims={"up": 1})
