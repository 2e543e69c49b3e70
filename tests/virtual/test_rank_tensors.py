"""Locals of virtual ranks among plain tensors: what N processes would do, or an error that changes nothing."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import AgreementError, UnsupportedError
from shardwise.fabric import rank_tensor
from shardwise.fabric.nondeterministic import share_results
from shardwise.fabric.shared_writes import agree, written_arguments

RANKS = 4
ROOT = Path(__file__).parents[2]


def alike() -> sw.RankTensor:
    return sw.RankTensor([torch.tensor([1.0, 2.0, 3.0]) for _ in range(RANKS)])


def differing() -> sw.RankTensor:
    return sw.RankTensor([torch.full((3,), float(rank)) for rank in range(RANKS)])


def same_on_all(tensor: torch.Tensor) -> bool:
    first, *others = tensor.tensors  # pyright: ignore[reportAttributeAccessIssue]
    return all(agree(first, other) for other in others)


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (RANKS,))


# ---------------------------------------------------------------- writes to plain tensors

INDEX = torch.tensor([0, 2, 2])
WRITES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "add_": lambda t, x: t.add_(x),
    "mul_": lambda t, x: t.mul_(x),
    "+=": lambda t, x: t.__iadd__(x.sum()),
    "copy_": lambda t, x: t.copy_(x),
    "lerp_": lambda t, x: t.lerp_(x, 0.5),
    "addcdiv_": lambda t, x: t.addcdiv_(x, torch.ones(3)),
    "addcmul_ of itself": lambda t, x: t.addcmul_(t, x),
    "index_add_": lambda t, x: t.index_add_(0, INDEX, x),
    "scatter_add_": lambda t, x: t.scatter_add_(0, INDEX, x),
    "index_put_": lambda t, x: t.__setitem__(INDEX[:2], x[:2]),
    "masked": lambda t, x: t.__setitem__(x > 1.5, 7.0),
    "item": lambda t, x: t.__setitem__(1, x[1]),
    "view": lambda t, x: t.view(3, 1)[1:].add_(x[1:, None]),
    "out": lambda t, x: torch.add(x, 1.0, out=t),
    "foreach": lambda t, x: torch._foreach_add_([t], [x]),
    "foreach twice": lambda t, x: torch._foreach_add_([t, t], [x, x]),
    "foreach overlapping": lambda t, x: torch._foreach_add_([t, t[1:]], [x, x[1:]]),
    "bernoulli_": lambda t, x: t.bernoulli_(x / 4),
    "where out": lambda t, x: torch.where(x > 1.5, x, t, out=t),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_locals_to_a_plain_tensor_happens_once(name: str) -> None:
    write, local = WRITES[name], alike()
    written, expected = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([5.0, 6.0, 7.0])
    torch.manual_seed(0)
    write(written, local)
    torch.manual_seed(0)
    write(expected, local.tensors[0])
    assert written.tolist() == expected.tolist()
    before = written.clone()
    with pytest.raises(AgreementError, match="RankTensor"):
        write(written, differing())
    assert written.tolist() == before.tolist()


def test_an_operator_gives_back_the_plain_tensor_that_it_wrote_to() -> None:
    total = torch.zeros(3)
    assert total.add_(alike()) is total
    values, indices = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    given = torch.max(alike(), 0, out=(values, indices))
    assert given[0] is values
    assert given[1] is indices
    assert (values.item(), indices.item()) == (3.0, 2)


def test_out_of_another_size_and_shared_memory() -> None:
    empty = torch.empty(0)
    torch.outer(alike(), torch.ones(2), out=empty)
    assert empty.tolist() == [[1, 1], [2, 2], [3, 3]]
    array = np.zeros(3, dtype=np.float32)
    torch.from_numpy(array).add_(alike())
    assert array.tolist() == [1, 2, 3]
    base = torch.zeros(2, 3)
    base.t()[:, 1].copy_(alike())
    assert base.tolist() == [[0, 0, 0], [1, 2, 3]]


def test_nan_agrees_with_nan_alone() -> None:
    total = torch.zeros(2)
    total.add_(sw.RankTensor([torch.tensor([1.0, float("nan")])] * RANKS))
    assert total[0].item() == 1
    assert total[1].isnan()
    mixed = sw.RankTensor([torch.tensor(1.0), torch.tensor(float("nan"))])
    with pytest.raises(UnsupportedError):
        mixed.item()


def test_a_failed_write_changes_no_local_either() -> None:
    local, plain = differing(), torch.zeros(3)
    with pytest.raises(AgreementError):
        torch._foreach_add_([local, plain], [differing(), differing()])
    assert [t.tolist() for t in local.tensors] == [t.tolist() for t in differing().tensors]
    torch._foreach_add_([local, plain], [differing(), alike()])
    assert plain.tolist() == [1, 2, 3]
    assert local.tensors[3].tolist() == [6, 6, 6]


def test_one_tensor_for_several_ranks_is_written_once() -> None:
    memory = torch.zeros(3)
    local = sw.RankTensor([memory] * RANKS)
    local.add_(alike())
    assert memory.tolist() == [1, 2, 3]
    with pytest.raises(AgreementError):
        local.add_(differing())
    parts = torch.zeros(RANKS, 3)
    sw.RankTensor(list(parts)).add_(differing())  # memory of one tensor, but not the same
    assert parts[:, 0].tolist() == [0, 1, 2, 3]


def test_gradients_between_plain_tensors_and_locals(mesh: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.ones(RANKS, 3), mesh, [sw.Shard(0)]).requires_grad_()
    total = torch.zeros(3)
    total += x.to_local()[0]
    (total * torch.arange(3.0)).sum().backward()  # a plain gradient comes back to the locals
    assert x.grad is not None
    assert x.grad.full_tensor().tolist() == [[0, 1, 2]] * RANKS  # pyright: ignore[reportAttributeAccessIssue]
    y = sw.ones(3, device_mesh=mesh, placements=[sw.Replicate()]).requires_grad_()
    (y.full_tensor() * differing()).sum().backward()  # gradients of each rank come back to a plain tensor
    assert y.grad is not None
    assert [g[0].item() for g in y.grad.to_local().tensors] == [0, 1, 2, 3]  # pyright: ignore[reportAttributeAccessIssue]


def test_data_and_sizes_of_locals_change_on_every_rank() -> None:
    local = differing()
    local.data = alike()
    assert [t.tolist() for t in local.tensors] == [[1, 2, 3]] * RANKS
    with pytest.raises(UnsupportedError, match="share its memory"):
        local.data = torch.zeros(3)
    local.unsqueeze_(0)
    assert local.shape == (1, 3)
    assert (local + torch.ones(1, 3)).shape == (1, 3)
    local.resize_(5)
    assert local.shape == local.tensors[3].shape == (5,)


def test_a_gathered_replica_has_memory_of_its_own(mesh: sw.DeviceMesh) -> None:
    x = sw.ones(3, device_mesh=mesh, placements=[sw.Replicate()])
    x.full_tensor().zero_()
    assert x.full_tensor().tolist() == [1, 1, 1]


def test_gradients_of_plain_leaves_are_those_of_each_rank() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * differing()).sum().backward()
    assert isinstance(weight.grad, sw.RankTensor)
    assert [g.tolist() for g in weight.grad.tensors] == [[r] * 3 for r in range(RANKS)]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(AgreementError):
        optimizer.step()
    optimizer.zero_grad()
    (weight * alike()).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0, -1, -2]


def test_the_sum_of_losses_has_the_gradient_of_one(mesh: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.ones(RANKS, 3), mesh, [sw.Shard(0)]).requires_grad_()
    total = torch.zeros(())
    for _ in range(2):
        total += (x.to_local() ** 2).sum()
    assert total.item() == 6
    total.backward()
    assert x.grad is not None
    assert x.grad.full_tensor().tolist() == [[4.0] * 3] * RANKS


NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "batch_norm": functools.partial(nn.functional.batch_norm, training=True),
    "native": lambda x, mean, var: torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
    "legit": lambda x, mean, var: torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5),
    "update": lambda x, mean, var: torch.ops.aten._batch_norm_with_update(x, None, None, mean, var, 0.1, 1e-5),
    "instance_norm": nn.functional.instance_norm,
    "statistics": lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 0.1),
}


@pytest.mark.parametrize("name", NORMS)
def test_running_statistics(name: str) -> None:
    norm, x = NORMS[name], torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    mean, var = torch.zeros(3), torch.ones(3)
    norm(sw.RankTensor([x.clone() for _ in range(RANKS)]), mean, var)
    expected = torch.zeros(3), torch.ones(3)
    norm(x, *expected)
    assert mean.tolist() == expected[0].tolist()
    assert var.tolist() == expected[1].tolist()
    with pytest.raises(AgreementError):
        norm(sw.RankTensor([x + rank for rank in range(RANKS)]), mean, var)
    assert mean.tolist() == expected[0].tolist()
    assert var.tolist() == expected[1].tolist()


def test_running_statistics_of_a_data_parallel_module(mesh: sw.DeviceMesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    expected = nn.BatchNorm1d(6)
    expected(x)
    norm = sw.fully_shard(nn.BatchNorm1d(6), mesh)
    norm(x)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()  # pyright: ignore[reportOptionalMemberAccess]
    assert norm.running_var.tolist() == expected.running_var.tolist()  # pyright: ignore[reportOptionalMemberAccess]
    norm.eval()
    norm(sw.RankTensor([x + rank for rank in range(RANKS)]))  # reads them alone


def test_every_running_statistic_is_known_to_be_written() -> None:
    """Operators that update running statistics, by trying those that the schema does not say it of."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition("::")[2].partition(".")
        if not name.startswith("aten::") or overload or any(word in base for word in ("backward", "functional", "no_")):
            continue
        op = getattr(torch.ops.aten, base).default
        if any(argument.name == "running_mean" for argument in op._schema.arguments):
            found.append(op)
    composite = {"batch_norm", "instance_norm", "_batch_norm_impl_index"}
    unknown = {op._schema.name.partition("::")[2] for op in found if not written_arguments(op)}
    assert unknown == composite


# ---------------------------------------------------------------- uneven locals

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0).square().sum(),
    "softmax": lambda x: x.softmax(0).square().sum(),
    "reshape": lambda x: x.reshape(-1).square().mean(),
    "linear": lambda x: nn.functional.linear(x, torch.ones(2, 3)).square().mean(),
    "matmul": lambda x: (x @ x.t()).square().sum(),
    "cat": lambda x: torch.cat([x, 2 * x]).square().mean(),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (3,)).pow(3).sum(),
    "expand": lambda x: x[:, None].expand(-1, 2, -1).square().mean(),
    "size": lambda x: x.sum() / x.shape[0] * x.numel(),
    "view": lambda x: x.view(x.shape[0], 3, 1).square().mean(),
}


@pytest.mark.parametrize("rows", [(2, 2, 2, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_uneven_locals_compute_with_their_own_sizes(name: str, rows: tuple[int, ...]) -> None:
    parts = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in rows]
    local = sw.RankTensor([part.detach().clone() for part in parts]).requires_grad_()
    loss = LOSSES[name](local)
    loss.backward()
    for i, part in enumerate(parts):
        expected = LOSSES[name](part)
        expected.backward()
        assert torch.allclose(loss.tensors[i], expected)  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.allclose(local.grad.tensors[i], part.grad)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def test_a_size_that_differs_is_no_plain_number() -> None:
    local = sw.RankTensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert local.shape[1] == 3
    for use in (len, lambda x: torch.arange(x.shape[0]), lambda x: range(x.shape[0]), lambda x: bool(x.shape[0] == 1)):
        with pytest.raises(AgreementError, match=r"2/1|False/True"):
            use(local)
    with pytest.raises(AgreementError, match="results"):
        list(local.unbind())
    with pytest.raises(sw.LayoutError, match="dims"):
        sw.RankTensor([torch.ones(2), torch.ones(1, 3)])
    assert (local * local.shape[0]).tensors[1].tolist() == [[1, 1, 1]]  # pyright: ignore[reportAttributeAccessIssue]


def test_replicas_that_differ_are_not_one_tensor(mesh: sw.DeviceMesh) -> None:
    x = sw.ones(3, device_mesh=mesh, placements=[sw.Replicate()])
    x.to_local().add_(differing())
    with pytest.raises(AgreementError, match="replicas"):
        x.full_tensor()


# ---------------------------------------------------------------- DTensors into plain tensors


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("form", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_plain_parameters_with_gradients_of_dtensors(
    mesh: sw.DeviceMesh, optimizer: Any, form: dict[str, bool]
) -> None:
    gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    plain, expected = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    ours, theirs = (optimizer([p], lr=0.1, **form) for p in (plain, expected))
    for _ in range(2):
        with sw.implicit_replication():
            (plain * sw.distribute_tensor(gradient, mesh, [sw.Shard(0)])).sum().backward()
            ours.step()
        expected.grad = gradient.clone()
        theirs.step()
        ours.zero_grad()
    assert plain.tolist() == expected.tolist()


def test_foreach_of_dtensors_into_plain_tensors(mesh: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
    plain, beside = torch.zeros(6), sw.zeros(6, device_mesh=mesh, placements=[sw.Shard(0)])
    with sw.implicit_replication():
        torch._foreach_add_([plain], [x])
        assert plain.tolist() == list(range(6))
        torch._foreach_addcmul_([plain, beside], [x, x], [x, x], 2.0)
    assert plain.tolist() == [i + 2 * i * i for i in range(6)]
    assert beside.full_tensor().tolist() == [2 * i * i for i in range(6)]


# ---------------------------------------------------------------- random numbers

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x, 2),
    "multinomial with replacement": lambda x: torch.multinomial(x, 5, replacement=True),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "bernoulli": lambda x: torch.bernoulli(x / 4),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: x.clone().normal_(),
    "new_empty": lambda x: x.new_empty(5).exponential_(),
    "rrelu": lambda x: nn.functional.rrelu(-x, training=True),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x),
    "generator": lambda x: x.clone().uniform_(generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_rank_draws_from_the_same_state(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(0)
    drawn, after = draw(alike()), torch.rand(2)
    torch.manual_seed(0)
    expected, then = draw(alike().tensors[0]), torch.rand(2)
    assert same_on_all(drawn)
    assert agree(drawn.tensors[0], expected)
    assert agree(after, then)


def test_a_generator_cannot_hold_states_that_differ() -> None:
    uneven = sw.RankTensor([torch.ones(3), torch.ones(2)])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(AgreementError, match="random numbers"):
        uneven.normal_()
    assert uneven.tensors[0].tolist() == [1, 1, 1]
    assert torch.equal(torch.get_rng_state(), state)
    torch.poisson(alike())  # draws by values, which are the same
    with pytest.raises(AgreementError):
        torch.poisson(sw.RankTensor([torch.full((50,), 20.0), torch.full((50,), 0.1)]))


def test_a_checkpointed_region_draws_again_what_it_drew() -> None:
    local = alike().requires_grad_()
    torch.manual_seed(0)
    region = functools.partial(nn.functional.dropout, p=0.5)
    result = checkpoint(lambda x: region(x) * region(x * x), local, use_reentrant=False)
    result.sum().backward()
    torch.manual_seed(0)
    plain = alike().tensors[0].clone().requires_grad_()
    expected = region(plain) * region(plain * plain)
    expected.sum().backward()
    assert local.grad is not None
    assert plain.grad is not None
    assert same_on_all(local.grad)
    assert agree(local.grad.tensors[0], plain.grad)


def test_locals_and_dtensors_draw_from_one_generator(mesh: sw.DeviceMesh) -> None:
    torch.manual_seed(0)
    drawn = [torch.rand_like(alike()).tensors[2], sw.rand(6, device_mesh=mesh, placements=[sw.Shard(0)]).full_tensor()]  # pyright: ignore[reportAttributeAccessIssue]
    drawn.append(torch.rand(2))
    torch.manual_seed(0)
    expected = [torch.rand(3), torch.rand(6), torch.rand(2)]
    assert all(map(agree, drawn, expected))


# ---------------------------------------------------------------- under a compiler


def compiled_and_not(function: Callable[..., Any], *args: Callable[[], torch.Tensor]) -> None:
    """A function of locals and plain tensors, compiled and not: values, what was written to, gradients."""
    outcomes: list[list[torch.Tensor]] = []
    for run in (function, torch.compile(function, backend="aot_eager")):
        given = [make() for make in args]
        torch.manual_seed(0)
        result = run(*given)
        results = result if isinstance(result, tuple) else (result,)
        if any(t.requires_grad for t in given):
            sum([(r * r).sum() for r in results[:1]]).backward()  # pyright: ignore[reportAttributeAccessIssue]
        held = [*results, *given, *[t.grad for t in given if t.grad is not None]]
        outcomes.append([part for t in held for part in getattr(t, "tensors", [t] * RANKS)])
    torch._dynamo.reset()
    assert len(outcomes[0]) == len(outcomes[1])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_compiled_functions_of_locals() -> None:
    local, weight = lambda: differing().requires_grad_(), lambda: torch.ones(3, requires_grad=True)
    compiled_and_not(lambda x, w: (x * w, x.sin()), local, weight)  # one output without a gradient
    compiled_and_not(lambda x: nn.functional.dropout(x, 0.5), local)
    compiled_and_not(lambda t, x: t.add_(x) * 2, lambda: torch.zeros(3), alike)
    torch._dynamo.reset()


def test_compiled_code_of_another_layout_whose_locals_have_other_sizes() -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = (x @ w).tanh()
        return result.sum(), result

    torch._dynamo.reset()
    mesh, compiled = sw.init_device_mesh("cpu", (4,)), torch.compile(product, backend="aot_eager")
    plain = [torch.randn(8, 4, requires_grad=True), torch.randn(4, 8, requires_grad=True)]
    total, result = product(*plain)
    (total + result.square().sum()).backward()
    for placements in ((sw.Shard(0), sw.Replicate()), (sw.Shard(1), sw.Shard(0)), (sw.Replicate(), sw.Shard(1))):
        pairs = zip(plain, placements, strict=True)
        given = [sw.distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in pairs]
        total, result = compiled(*given)
        (total + result.square().sum()).backward()
        for one, other in zip(given, plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    torch._dynamo.reset()


def test_compiled_code_raises_when_ranks_write_different_values() -> None:
    compiled = torch.compile(lambda t, x: t.add_(x), backend="aot_eager")
    with pytest.raises(RuntimeError, match="a different value on virtual rank 1"):
        compiled(torch.zeros(3), differing())
    torch._dynamo.reset()


@pytest.mark.parametrize("given", [["--backend", "aot_eager"], ["--backend", "inductor", "--plans", "columns"]])
def test_compiled_plans_with_local_outputs(given: list[str]) -> None:
    command = [sys.executable, "-m", "tests.virtual.compiled_locals", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "differs by" in done.stdout


def test_compiled_uneven_shards() -> None:
    command = [sys.executable, "-m", "tests.virtual.compiled_uneven"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the rest is refused" in done.stdout


# ---------------------------------------------------------------- operators that give other bits each time


def test_ranks_with_equal_operands_share_the_result_of_a_nondeterministic_operator() -> None:
    calls: list[float] = []

    def call(row: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(calls))
        return row[0].add_(row[1] * len(calls)), torch.tensor(calls)

    rows = [[torch.zeros(2), torch.full((2,), value)] for value in (1.0, 2.0, 1.0, 2.0, 1.0)]
    results = share_results(rows, call, [(0, "self")])
    assert len(calls) == 2
    for (target, value), (written, counted) in zip(rows, results, strict=True):
        assert written is target
        assert torch.equal(target, value * value)  # 1 on the first call, 2 * 2 on the second
        assert counted.numel() == value[0]
    assert len({result[1].data_ptr() for result in results}) == len(rows)


def sharing_noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each nondeterministic call from now on the number of ranks, and how often the kernel runs."""
    shared: list[tuple[int, int]] = []

    def noting(rows: Any, call: Any, written: Any, unread: int | None) -> Any:
        calls: list[int] = []
        results = share_results(rows, lambda row: (calls.append(1), call(row))[1], written, unread)
        shared.append((len(rows), len(calls)))
        return results

    monkeypatch.setattr(rank_tensor, "share_results", noting)
    return shared


@pytest.mark.parametrize("run", [
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),  # one operand in front
    lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),  # two
    lambda x: F.adaptive_avg_pool2d(x, 2),  # two, of which one is read for its shape
    lambda x: x.cummax(-1).values,  # whose rule gives each rank arguments of its own
])  # fmt: skip
def test_replicas_share_the_results_of_short_calls_too(
    run: Callable[[Any], Any], mesh: sw.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = sharing_noted(monkeypatch)
    x = sw.distribute_tensor(torch.randn(2, 3, 4, 4), mesh, [sw.Replicate()]).requires_grad_()
    summed = sw.DTensor.from_local(
        sw.RankTensor([torch.randn(2, 3, 4, 4) for _ in range(RANKS)]), mesh, [sw.Partial()]
    ).requires_grad_()
    run(x).sin().sum().backward()
    run(summed).full_tensor().sin().sum().backward()
    assert shared, "no operator on the way is known as nondeterministic"
    assert {calls for _, calls in shared} == {1}, "equal operands are computed with once"


def test_replicas_share_what_runs_before_a_row_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = sharing_noted(monkeypatch)
    grid = sw.init_device_mesh("cpu", (2, 2))
    plain = torch.randn(1, 8, 8, 64, dtype=torch.float64, requires_grad=True)
    x = sw.distribute_tensor(plain.detach(), grid, [sw.Shard(3), sw.Replicate()]).requires_grad_()
    for image in (plain, x):
        F.pad(image, (1, 1, 1, 1), mode="reflect").sin().sum().backward()
    assert torch.allclose(x.grad.full_tensor(), plain.grad)
    assert (4, 2) in shared, "two shards, each on two ranks"
    assert all(calls <= 2 for _, calls in shared)


@pytest.mark.filterwarnings("ignore::shardwise.modes.ReplicationWarning")
def test_least_squares_of_replicas_are_one_value(mesh: sw.DeviceMesh) -> None:
    """torch's driver reads uninitialized memory, so its results differ in the last bits from call to call."""
    for size in range(8):
        memory = [torch.randn(3 + size) for _ in range(5)]
        a = sw.distribute_tensor(torch.randn(6, 3), mesh, [sw.Shard(1)])
        b = sw.distribute_tensor(torch.randn(6, 2), mesh, [sw.Replicate()])
        solution = torch.linalg.lstsq(a, b, driver="gelsy").solution.full_tensor()
        assert torch.allclose(solution, torch.linalg.lstsq(a.full_tensor(), b.full_tensor()).solution, atol=1e-4)
        del memory[size % 5]
