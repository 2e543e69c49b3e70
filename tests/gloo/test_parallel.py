"""Plans on real processes: the example's transformer, and layers whose shards are uneven.

`torchrun --nproc-per-node 4 -m tests.virtual.training` runs all plans.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.gloo.processes import ProcessPool
from tests.plans import Adapted, spread_plain
from tests.virtual.training import Case, Sort, Step, assert_same_steps, make_model, train, train_under, whole

STEPS = 10
SORT = Sort(dropout=0.1)
CASES = (Case("tp", (4,)), Case("tp+sp", (2, 2)), Case("fsdp-tp", (2, 2)))
PLAIN = (Case("fsdp-tp", (2, 2), plain=True), Case("ddp-tp", (2, 2), plain=True))


def trained(steps: int) -> dict[Case, list[Step]]:
    """On a line or on a square of processes; with dropout, where batches are global."""
    return {
        **{case: train_under(case, SORT, steps) for case in CASES},
        **{case: train_under(case, Sort(), steps) for case in PLAIN},
    }


def odd_layers() -> list[str]:
    """Sizes that four ranks do not divide; which layers then differ from one device, on plain tensors and DTensors."""
    mesh = sw.init_device_mesh("cpu", (4,))
    rows = RowwiseParallel(use_local_output=False)
    scattered = RowwiseParallel(output_layouts=sw.Shard(1), use_local_output=False)
    wrong = []
    for bias in (True, False):
        for last in (rows, scattered, RowwiseParallel()):
            torch.manual_seed(0)
            one = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 10, bias=bias), nn.GELU(), nn.Linear(10, 7, bias=bias))
            one = one.double()
            spread = copy.deepcopy(one)
            parallelize_module(spread, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(), "3": last})
            x = torch.randn(3, 5, 7, dtype=torch.float64)
            want, got = one(x), spread(sw.distribute_tensor(x, mesh, [sw.Shard(1)]))
            want.square().sum().backward()
            got.square().sum().backward()
            pairs: list[tuple[str, Any, Any]] = [("result", got, want)]
            pairs += [
                (n, p.grad, q.grad) for (n, p), q in zip(spread.named_parameters(), one.parameters(), strict=True)
            ]
            wrong += [f"{name} {bias} {last}" for name, a, b in pairs if not torch.allclose(whole(a), b, atol=1e-12)]
    return wrong


def test_plans(gloo4: ProcessPool) -> None:
    with_dropout, without = train(make_model(SORT), STEPS), train(make_model(Sort()), STEPS)
    for found in gloo4.run(trained, STEPS, timeout=240):
        assert len(found) == len(CASES + PLAIN)
        for case, steps in found.items():
            assert_same_steps(steps, without if case.plain else with_dropout, rtol=1e-9, atol=1e-9)


def made_on_the_meta_device() -> list[Any]:
    """A fully sharded and tensor parallel model: how much this rank holds of it, and all of its values."""
    world = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = make_model(Sort())
    spread_plain("fsdp-tp", model, world)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    _reset(model)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return [held, {name: whole(parameter) for name, parameter in model.named_parameters()}]


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


def test_a_model_on_the_meta_device(gloo4: ProcessPool) -> None:
    reference = make_model(Sort())
    torch.manual_seed(7)
    _reset(reference)
    total = sum(parameter.numel() for parameter in reference.parameters())
    for held, values in gloo4.run(made_on_the_meta_device):
        assert held < 0.27 * total  # norms are split over dp alone
        for name, parameter in reference.named_parameters():
            assert torch.equal(values[name], parameter)


def test_uneven_layers(gloo4: ProcessPool) -> None:
    assert gloo4.run(odd_layers, timeout=120) == [[]] * 4


def adapted_layers() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Layers of a plan with adapters, and the same without the plan: results and gradients."""
    mesh, found = sw.init_device_mesh("cpu", (4,)), []
    for is_parallel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5)).double()
        if is_parallel:
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model.requires_grad_(False)
        torch.manual_seed(1)
        model[0], model[2] = Adapted(model[0]).double(), Adapted(model[2]).double()
        out = model(torch.randn(7, 6, dtype=torch.float64))
        out.square().mean().backward()
        found.append((out.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    return found


def test_adapters_around_layers_of_a_plan(gloo4: ProcessPool) -> None:
    for (out, gradients), (wanted, theirs) in gloo4.run(adapted_layers):
        torch.testing.assert_close(out, wanted)
        assert len(gradients) == len(theirs) == 4
        for a, b in zip(gradients, theirs, strict=True):
            assert type(a) is torch.Tensor
            torch.testing.assert_close(a, b)


def functional_collectives() -> list[tuple[float, float, list[int]]]:
    """torch's functional collectives over our meshes: of one axis, of an axis of two, and inside compiled code."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, name = torch.tensor([float(mesh.get_rank())]), dist.ReduceOp.SUM.name
    over_dp = funcol.all_reduce(mine, reduceOp=name, group=mesh["dp"])
    over_tp = funcol.all_reduce(mine, reduceOp=name, group=(mesh, 1))
    joined = funcol.all_gather_tensor(mine, 0, group=mesh["dp", "tp"]._flatten("all"))
    return [(over_dp.item(), over_tp.item(), joined.int().tolist())]


def test_functional_collectives_take_meshes(gloo4: ProcessPool) -> None:
    found = [result for (result,) in gloo4.run(functional_collectives)]
    assert found == [(0.0 + 2 + 2 * (rank % 2), 1.0 + 4 * (rank // 2), [0, 1, 2, 3]) for rank in range(4)]
