"""Compiled programs on a CUDA device: inductor, with a world of one NCCL rank."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from examples.llama import Llama, tensor_parallel
from shardwise.core.opaque import why_not_constant

R, S = sw.Replicate(), sw.Shard


@contextlib.contextmanager
def nccl_world() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def laid_out(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        placements = [R, S(0)] if parameter.dim() > 1 else [R, R]
        made = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, placements))
        owner.register_parameter(name.rpartition(".")[2], made)
    return model


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).cuda()


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor).detach()


def check_constants() -> None:
    """A clean start, on a torch that takes our classes as constants."""
    torch._dynamo.reset()
    assert why_not_constant() is None, "this torch does not take our classes as constants"


def test_training() -> None:
    check_constants()
    with nccl_world():
        mesh = sw.init_device_mesh("cuda", (1, 1))
        plain, model = layers(), laid_out(layers(), mesh)
        compiled = torch.compile(model, fullgraph=True)
        graphs: set[int] = set()
        for _ in range(10):
            x = torch.randn(8, 32, device="cuda")
            wanted = plain(x).square().mean()
            wanted.backward()
            given = sw.distribute_tensor(x, mesh, [S(0), R])
            loss = compiled(given).square().mean()
            loss.backward()
            torch.testing.assert_close(whole(loss), wanted.detach(), rtol=1e-4, atol=1e-5)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-3, atol=1e-5)
                with torch.no_grad():
                    ours.sub_(ours.grad, alpha=0.1)
                    theirs.sub_(theirs.grad, alpha=0.1)
                ours.grad = theirs.grad = None
            graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(graphs) == 1, "it was compiled again"


def test_moves_and_dynamic_sizes() -> None:
    check_constants()
    with nccl_world():
        mesh = sw.init_device_mesh("cuda", (1,))

        def program(local: torch.Tensor) -> torch.Tensor:
            rows = sw.DTensor.from_local(local, mesh, [S(0)])
            return (rows.redistribute(placements=[S(1)], async_op=True).sin() * 2).full_tensor()

        compiled = torch.compile(program, fullgraph=True)
        for rows in (8, 16, 24):
            local = torch.randn(rows, 12, device="cuda", requires_grad=True)
            compiled(local).sum().backward()
            torch.testing.assert_close(local.grad, 2 * local.detach().cos())


def test_blocks_compiled_one_by_one() -> None:
    """All blocks share a graph, for one length and for any other; heads, which differ in number, are one dim of it."""
    check_constants()
    torch._dynamo.utils.counters.clear()
    sizes: dict[str, Any] = {"dim": 256, "blocks": 16, "heads": 4, "kv_heads": 2, "hidden": 512, "longest": 128}
    with nccl_world():
        mesh = sw.init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = Llama(**sizes).to("cuda", torch.bfloat16)
        wanted = copy.deepcopy(model).float()
        tensor_parallel(model, mesh)
        for block in model.blocks:
            block.compile()
        for length in (128, 64, 96):
            tokens = torch.randint(256, (2, length), device="cuda")
            given = sw.distribute_tensor(tokens, mesh, [R])
            ours, theirs = model(given).float().square().mean(), wanted(tokens).square().mean()
            torch.testing.assert_close(whole(ours), theirs.detach(), rtol=2e-2, atol=1e-3)
            ours.backward()
            theirs.backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
        for mine, own in zip(model.parameters(), wanted.parameters(), strict=True):
            # of the length of the gradient, eight bits of precision through sixteen blocks
            assert own.grad is not None
            error = (whole(mine.grad).float() - own.grad).norm() / own.grad.norm()
            assert error < 0.1, error


def test_strides_of_symbolic_results() -> None:
    """The strides of attention's result hold maxima of sizes."""
    check_constants()

    def program(x: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 128, -1, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with nccl_world():
        mesh = sw.init_device_mesh("cuda", (1,))
        compiled = torch.compile(program, dynamic=True, backend="aot_eager")
        for width in (256, 512, 128):
            x = torch.randn(2, 128, width, device="cuda", dtype=torch.bfloat16)
            wanted, got = program(x), compiled(sw.distribute_tensor(x, mesh, [R]).requires_grad_())
            assert got.stride() == wanted.stride()
            torch.testing.assert_close(whole(got), wanted)
            got.sum().backward()


def test_dropout_on_aot_eager_is_that_of_one_device() -> None:
    check_constants()
    with nccl_world():
        mesh = sw.init_device_mesh("cuda", (1,))
        x = torch.ones(64, 96, device="cuda")
        compiled = torch.compile(lambda t: F.dropout(t, 0.3), fullgraph=True, backend="aot_eager")
        given = sw.distribute_tensor(x, mesh, [S(0)])
        torch.cuda.manual_seed(5)
        wanted = F.dropout(x, 0.3)
        torch.cuda.manual_seed(5)
        assert torch.equal(whole(compiled(given)), wanted)
