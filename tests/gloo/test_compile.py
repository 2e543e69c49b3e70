"""Compiled programs on real processes: ten steps of training against one device; moves; random numbers."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise.fabric import c10d as process_groups

FLOAT = torch.float64
STEPS = 10
R, S, P = sw.Replicate(), sw.Shard, sw.Partial


class Block(nn.Module):
    """An embedding, attention by heads, a norm and a wide layer: what a transformer has."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(12, width, dtype=FLOAT)
        self.norm = nn.LayerNorm(width, dtype=FLOAT)
        self.q = nn.Linear(width, width, bias=False, dtype=FLOAT)
        self.out = nn.Linear(width, width, dtype=FLOAT)
        self.wide = nn.Linear(width, 3 * width, dtype=FLOAT)
        self.narrow = nn.Linear(3 * width, width, dtype=FLOAT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        y = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.narrow(F.gelu(self.wide(x)))


COLUMN, ROW, WHOLE = S(0), S(1), R
LAYOUT = {"q.weight": COLUMN, "out.weight": ROW, "wide.weight": COLUMN, "wide.bias": COLUMN, "narrow.weight": ROW}


def lay_out(model: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    """The model with parameters replicated along all axes but the last, which they are sharded over."""
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        placements = [*[R] * (mesh.ndim - 1), LAYOUT.get(name, WHOLE)]
        made = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, placements))
        owner.register_parameter(name.rpartition(".")[2], made)
    return model


def train(step: Callable[..., Any], model: nn.Module, batches: list[Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for batch in batches:
        loss = step(batch)
        loss.backward()
        seen.append(whole(loss))
        seen += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor).detach().clone()


def train_both(shape: tuple[int, ...], batch: int, backend: str) -> int:
    """Trains one device and the mesh; returns how often was compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", shape)
    model = Block(8, 4)
    tokens = [torch.randint(0, 12, (batch, 6)) for _ in range(STEPS)]
    plain = copy.deepcopy(model)
    wanted = train(lambda given: plain(given).square().mean(), plain, tokens)
    laid_out = lay_out(model, mesh)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(lambda given: laid_out(given).square().mean(), fullgraph=True, backend=counter)
    split = [S(0), *[R] * (mesh.ndim - 1)] if mesh.ndim > 1 else [R]
    got = train(step, laid_out, [sw.distribute_tensor(each, mesh, split) for each in tokens])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    return counter.frame_count


def training() -> list[int]:
    return [train_both((4,), 2, "aot_eager"), train_both((2, 1, 2), 3, "aot_eager")]


def test_ten_steps_on_meshes_of_one_to_three_axes_even_and_uneven(gloo4):
    assert gloo4.run(training, timeout=240) == [[1, 1]] * 4


def one_function(backend: str) -> None:
    torch._dynamo.reset()
    mesh = sw.init_device_mesh("cpu", (4,))
    x = torch.arange(40, dtype=FLOAT).reshape(8, 5) / 40
    w = torch.arange(20, dtype=FLOAT).reshape(5, 4) / 20

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        columns = a.redistribute(placements=[S(1)], async_op=True).sin()
        return (columns @ b.redistribute(placements=[S(0)])).redistribute(placements=[S(0)]).to_local().exp()

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for _ in range(2):
        a, b = (sw.distribute_tensor(t, mesh, [S(0)]).requires_grad_() for t in (x, w))
        compiled(a, b).sum().backward()
        pa, pb = x.clone().requires_grad_(), w.clone().requires_grad_()
        (pa.sin() @ pb).exp().sum().backward()
        torch.testing.assert_close(whole(a.grad), pa.grad)
        torch.testing.assert_close(whole(b.grad), pb.grad)


def functions() -> None:
    for backend in ("eager", "aot_eager"):
        one_function(backend)


def test_moves_inside_a_compiled_function_on_every_backend(gloo4):
    gloo4.run(functions, timeout=240)


def grouped_products() -> None:
    """Experts or tokens sharded, in the one dtype that torch compiles."""
    mesh = sw.init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(0)
    rows, experts = (torch.randn(*size, generator=generator).bfloat16() for size in ((12, 8), (4, 16, 8)))
    ends = torch.tensor([2, 2, 9, 12], dtype=torch.int32)

    def program(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b.transpose(-2, -1), offs=offs).relu()

    plain = rows.clone().requires_grad_(), experts.clone().requires_grad_()
    wanted = program(*plain, ends)
    grads = torch.autograd.grad(wanted.sum(), plain)
    for first, second in ((R, S(0)), (S(0), R), (S(1), S(2))):
        torch._dynamo.reset()
        a, b = (sw.distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in ((rows, first), (experts, second)))
        got = torch.compile(program, fullgraph=True, backend="aot_eager")(a, b, sw.distribute_tensor(ends, mesh, [R]))
        found = torch.autograd.grad(got.sum(), (a, b))
        for x, y in zip((got, *found), (wanted, *grads), strict=True):
            torch.testing.assert_close(whole(x), y.detach(), rtol=2e-2, atol=1e-1)


def test_grouped_products(gloo4):
    gloo4.run(grouped_products, timeout=120)


def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.dropout(x, 0.4), torch.rand_like(x), torch.randn_like(x), x.clone().normal_()


def draws() -> list[torch.Tensor]:
    torch._dynamo.reset()
    mesh = sw.init_device_mesh("cpu", (2, 2))
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    x = sw.distribute_tensor(torch.ones(5, 6), mesh, [S(0), S(1)])
    torch.manual_seed(3)
    return [tensor.full_tensor() for _ in range(2) for tensor in compiled(x)]


def test_random_numbers_are_those_of_one_device(gloo4):
    torch.manual_seed(3)
    wanted = [tensor for _ in range(2) for tensor in draw(torch.ones(5, 6))]
    for drawn in gloo4.run(draws, timeout=120):
        assert all(torch.equal(a, b) for a, b in zip(drawn, wanted, strict=True))


def normalized_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Forward needs no collective here, backward a sum over the second axis."""
    return a.softmax(-1) @ b


def from_inductor() -> int:
    """Values and gradients against one device, from inductor; returns how much of the code was found on disk."""
    torch._dynamo.reset()
    counters.clear()
    mesh = sw.init_device_mesh("cpu", (2, 2))
    given = torch.arange(8, dtype=FLOAT).reshape(4, 2).sin(), torch.arange(6, dtype=FLOAT).reshape(2, 3).cos()
    a, b = (
        sw.distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(given, ([S(0), R], [R, S(1)]), strict=True)
    )
    plain = [t.clone().requires_grad_() for t in given]
    wanted = normalized_rows(*plain)
    wanted.sum().backward()
    got = torch.compile(normalized_rows, fullgraph=True, options={"cpp.simdlen": 1})(a, b)  # shortest to compile
    got.backward(torch.ones_like(got))
    for ours, theirs in ((got, wanted), (a.grad, plain[0].grad), (b.grad, plain[1].grad)):
        torch.testing.assert_close(whole(ours), theirs)
    return counters["aot_autograd"]["autograd_cache_hit"]


def inductor_twice(folder: str) -> list[int]:
    """In two worlds, each as in a new process: no group has been made. The second time the code is on disk."""
    found: list[int] = []
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1"):
        for world in range(2):
            rank, size = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            process_groups.c10d._made.clear()
            store = dist.FileStore(f"{folder}/store{world}", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            found.append(from_inductor())
    return found


def test_inductor_on_uneven_shards_compiled_and_from_disk(gloo4, tmp_path: Path):
    assert gloo4.run(inductor_twice, str(tmp_path), timeout=240) == [[0, 1]] * 4
