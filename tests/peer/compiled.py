"""Compiled programs on torch's fake process group: the nodes of their graphs, and how often they are compiled.

Run in a process of its own, without run-time type checks, which would be compiled too.
"""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import shardwise as sw
import shardwise.debug
import shardwise.parallel as parallel
from bench.counting import Calls, fake_world

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
WORLD = 8


def mesh_of(*shape: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape or (2, 4))


def laid_out(*size: int, placements: Sequence[Any] = (S(0), R), mesh: sw.DeviceMesh | None = None) -> Any:
    return sw.distribute_tensor(torch.randn(*size), mesh or mesh_of(), placements).requires_grad_()


class Recorder:
    """A backend that keeps the graphs of forward and backward, runs them as they are, and counts what they move."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.moved = (0, 0.0)
        split = min_cut_rematerialization_partition  # as aot_eager and inductor have it
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=split)

    def keep(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)

        def boxed(args: list[Any]) -> Any:
            with Calls() as calls:
                result = graph.forward(*args)
            self.moved = (self.moved[0] + calls.count, self.moved[1] + calls.received)
            return result

        boxed._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return boxed

    @property
    def nodes(self) -> list[torch.fx.Node]:
        return [node for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]

    def strange(self) -> set[str]:
        """Nodes that are neither local operators nor collectives."""
        return {
            str(node.target)
            for node in self.nodes
            if node.target is not operator.getitem
            and getattr(node.target, "namespace", None) not in ("aten", "prims", "_c10d_functional")
        }

    def collectives(self) -> list[str]:
        names = [str(node.target) for node in self.nodes]
        return [name for name in names if name.startswith("_c10d_functional") and "wait_tensor" not in name]

    def dead(self) -> list[str]:
        """Collectives whose result nobody uses."""
        waits = [node for node in self.nodes if "wait_tensor" in str(node.target)]
        return [str(wait.args[0]) for wait in waits if not wait.users]


def _written_through_views(x: Any) -> Any:
    y = x.clone()
    y[3].mul_(3)  # of a sharded dim, so that the view is a copy
    y.view(-1)[5:40].add_(1)
    return y


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "gather": (lambda x: x.redistribute(placements=[R, R]) * 2, lambda: (laid_out(8, 16),)),
    "all to all": (lambda x: x.redistribute(placements=[S(1), R]) * 2, lambda: (laid_out(8, 16),)),
    "in flight": (lambda x: x.redistribute(placements=[R, S(1)], async_op=True) * 2, lambda: (laid_out(8, 16),)),
    "exchange": (
        lambda x: x.redistribute(placements=[S(1), S(0)]),
        lambda: (laid_out(8, 16, placements=(S(0), S(1))),),
    ),
    "uneven": (lambda x: (x * 2).redistribute(placements=[S(1), R]).exp(), lambda: (laid_out(7, 9),)),
    "bytes": (lambda x: x.to(torch.bfloat16).redistribute(placements=[R, R]), lambda: (laid_out(8, 16),)),
    "full": (lambda x: (x * 2).full_tensor().sin(), lambda: (laid_out(8, 16),)),
    "contraction": (
        lambda x, w: (x.redistribute(placements=[R, S(1)]) @ w).redistribute(placements=[S(0), R]),
        lambda: (laid_out(8, 16), laid_out(16, 32, placements=(R, S(0)))),
    ),
    "partial result": (
        lambda x, w: x @ w,
        lambda: (laid_out(8, 16, placements=(R, S(1))), laid_out(16, 8, placements=(R, S(0)))),
    ),
    "unused result": (
        lambda x, w: ((x @ w).sum(), x * 2),
        lambda: (laid_out(8, 16), laid_out(16, 8, placements=(R, R))),
    ),
    "from local": (
        lambda x, mesh: sw.DTensor.from_local(x, mesh, [P(), R]).redistribute(placements=[S(0), R]).to_local(),
        lambda: (torch.randn(4, 16, requires_grad=True), mesh_of()),
    ),
    "running sum": (lambda x: x.detach().cumsum(0) * x, lambda: (laid_out(40000, 16),)),
    "softmax": (lambda x: x.softmax(-1), lambda: (laid_out(8, 16, placements=(S(0), S(1))),)),
    "extremum": (lambda x: x.amax(0), lambda: (laid_out(8, 16),)),
    "views and writes": (
        lambda x: x.view(8, 4, 4).transpose(0, 1).reshape(-1, 4).clone().add_(1),
        lambda: (laid_out(8, 16),),
    ),
    "loss": (
        lambda x: F.cross_entropy(x, x.detach().argmax(-1)),
        lambda: (laid_out(8, 16, placements=(S(0), S(1))),),
    ),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: (laid_out(2, 4, 8, 16, placements=(S(0), S(1))),),
    ),
    "dropout": (lambda x: F.dropout(x, 0.5), lambda: (laid_out(8, 16),)),
    "exchange that brings this rank nothing": (
        lambda x: x.redistribute(placements=[S(0), S(0)], shard_order=[(0, (1, 0))]).exp(),
        lambda: (laid_out(8, 16, placements=(S(0), S(0))),),
    ),
    "group norm": (lambda x: F.group_norm(x, 4), lambda: (laid_out(4, 8, 6, placements=(S(0), S(1))),)),
    "norm": (lambda x: x.norm(dim=1), lambda: (laid_out(8, 16, placements=(S(0), S(1))),)),
    "backward communicates without a gradient": (lambda x: [x.amax(0), x.square()], lambda: (laid_out(8, 16),)),
    "integers": (lambda x: torch.randint_like(x, 5) * x, lambda: (laid_out(8, 16),)),
    "written through views": (_written_through_views, lambda: (laid_out(8, 16, placements=(S(0), S(1))),)),
    "made inside": (
        lambda x: x + sw.zeros(8, 16, device_mesh=x.device_mesh, placements=[S(0), R]),
        lambda: (laid_out(8, 16),),
    ),
    "asks for layouts": (
        lambda x: x * 2 if (x + 1).placements[0] == S(0) and x.device_mesh.ndim == 2 else x * 3,
        lambda: (laid_out(8, 16),),
    ),
}


def run(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The first result, and backward from it; from all of a list."""
    result = program(*args)
    wanted = result if isinstance(result, list) else [result[0] if isinstance(result, tuple) else result]
    torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])
    return wanted[0]


def structure(name: str) -> tuple[Any, ...]:
    """What is strange in the graphs, what is dead, and what is issued by eager and by compiled code."""
    program, make = PROGRAMS[name]
    torch._dynamo.reset()
    with fake_world(WORLD):
        given = make()
        with Calls() as eager:
            wanted = run(program, given)
        recorder = Recorder()
        compiled = torch.compile(program, fullgraph=True, backend=recorder.backend)
        run(compiled, make())
        recorder.moved = (0, 0.0)
        got = run(compiled, make())
        same = getattr(got, "placements", None) == getattr(wanted, "placements", None)
        return recorder.strange(), recorder.dead(), tuple(eager.moved), recorder.moved, same


def structures() -> dict[str, tuple[Any, ...]]:
    return {name: structure(name) for name in PROGRAMS}


# ---------------------------------------------------------------- how often is compiled


def compiles(program: Callable[..., Any], inputs: Sequence[Any], mark: int | None = None, **options: Any) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, fullgraph=True, backend=counter, **options)
    for given in inputs:
        if mark is not None:
            torch._dynamo.mark_dynamic(given, mark)
        got, wanted = compiled(given), program(given)
        assert got.spec is wanted.spec, (got.spec, wanted.spec)
        got.full_tensor().sum().backward()
    return counter.frame_count


def recompiles() -> dict[str, int]:
    with fake_world(WORLD):
        weight = laid_out(16, 32, placements=(R, S(1)))
        back = laid_out(32, 16, placements=(R, S(0)))

        def layer(x: Any) -> Any:
            return torch.relu(x @ weight) @ back

        def twice(x: Any) -> Any:
            return x.redistribute(placements=[R] * x.device_mesh.ndim) * 2

        sizes = (8, 16, 24, 40)
        return {
            "ten steps": compiles(layer, [laid_out(8, 16) for _ in range(10)]),
            "another placement": compiles(twice, [laid_out(8, 16), laid_out(8, 16, placements=(R, S(0)))] * 2),
            "another mesh": compiles(twice, [laid_out(8, 16), laid_out(8, 16, mesh=mesh_of(4, 2))] * 2),
            "sizes without marks": compiles(layer, [laid_out(n, 16) for n in sizes]),
            "marked sizes": compiles(layer, [laid_out(n, 16) for n in sizes], mark=0),
            "marked sizes that are gathered": compiles(twice, [laid_out(n, 16) for n in sizes], mark=0),
            "marked sizes through views": compiles(
                lambda x: (x.view(-1, 16) @ weight).view(*x.shape[:-1], -1).log_softmax(-1),
                [laid_out(n, 6, 16) for n in sizes],
                mark=0,
            ),
            "marked sizes that a view works out": compiles(
                lambda x: (x.view(-1, 4, 4) @ x.view(-1, 4, 4).transpose(1, 2)).mean(0),
                [laid_out(n, 16) for n in sizes],
                mark=0,
            ),
            "marked sizes of a loss": compiles(
                lambda x: F.mse_loss(x, x.detach() * 2) + x.var(0).mean(), [laid_out(n, 16) for n in sizes], mark=0
            ),
            "uneven sizes": compiles(twice, [laid_out(n, 16) for n in (7, 9, 9, 7)]),
        }


# ---------------------------------------------------------------- modules, checkpoints, optimizers, make_fx


def model(mesh: sw.DeviceMesh) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    for at, placement in ((0, S(0)), (2, S(1))):
        weight = sw.distribute_tensor(made[at].weight.detach(), mesh, [R, placement])
        bias = sw.distribute_tensor(made[at].bias.detach(), mesh, [R, S(0) if at == 0 else R])
        made[at].weight, made[at].bias = nn.Parameter(weight), nn.Parameter(bias)  # pyright: ignore[reportAttributeAccessIssue]
    return made


def checkpointed() -> tuple[list[str], list[str]]:
    """The collectives with and without activation checkpointing: what is computed again, communicates again."""
    with fake_world(WORLD):
        layers = model(mesh_of())

        def part(x: Any) -> Any:
            return layers(x).redistribute(placements=[S(0), R]).sin()

        found = []
        for program in (part, lambda x: checkpoint(part, x, use_reentrant=False)):
            torch._dynamo.reset()
            recorder = Recorder()
            run(torch.compile(program, fullgraph=True, backend=recorder.backend), (laid_out(8, 16),))
            assert not recorder.strange()
            found.append(recorder.collectives())
        return found[0], found[1]


def optimized() -> list[str]:
    """Optimizers whose step is compiled, on parameters of several layouts."""
    torch._dynamo.reset()
    with fake_world(WORLD):
        layouts = []
        for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"foreach": True})):
            layers = model(mesh_of())
            optimizer = kind(layers.parameters(), lr=0.1, **options)
            step = torch.compile(optimizer.step, backend="aot_eager")
            before = layers[0].weight.full_tensor().clone()
            for _ in range(2):
                layers(laid_out(8, 16)).sum().backward()
                step()
                optimizer.zero_grad()
            assert not torch.equal(before, layers[0].weight.full_tensor())
            layouts += [parameter.spec.layout for parameter in layers.parameters()]
        return layouts


def training_step_with_graph_breaks() -> str:
    """Loss, backward and optimizer in one function: Dynamo breaks it up, and leaves our own functions alone."""
    torch._dynamo.reset()
    with fake_world(WORLD):
        layers = model(mesh_of())
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        @torch.compile(backend="aot_eager")
        def step(x: Any) -> Any:
            loss = layers(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step(laid_out(8, 16))
        return step(laid_out(8, 16)).spec.layout


def locals_traced() -> list[str]:
    with fake_world(WORLD):
        mesh = mesh_of()

        def program(local: torch.Tensor) -> torch.Tensor:
            return sw.DTensor.from_local(local, mesh, [S(0), R]).redistribute(placements=[R, R]).exp().to_local()

        graph = make_fx(program)(torch.randn(4, 16))
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def dtensors_traced() -> list[str]:
    with fake_world(WORLD):

        def program(x: Any, w: Any) -> Any:
            return (x @ w).redistribute(placements=[R, R]).exp()

        found = []
        for mode in ("real", "symbolic"):
            traced = shardwise.debug.make_fx(program, tracing_mode=mode)(
                laid_out(8, 16), laid_out(16, 8, placements=(R, R))
            )
            found.append([str(node.target) for node in traced.graph.nodes if node.op == "call_function"])
        return [name for names in found for name in names]


def refused() -> dict[str, str]:
    """Errors of what cannot be compiled."""
    said = {}
    with sw.dry_run():
        dry = sw.distribute_tensor(torch.randn(8, 4), sw.init_device_mesh("cpu", (2,)), [S(0)])
    with sw.virtual():
        here = sw.distribute_tensor(torch.randn(8, 4), sw.init_device_mesh("cpu", (2,)), [S(0)])
    with fake_world(WORLD):
        mesh = mesh_of()
        programs = {
            "dry": (lambda x: x * 2, dry),
            "run_check": (lambda x: sw.DTensor.from_local(x, mesh, [R, R], run_check=True), torch.randn(2, 2)),
            "source rank": (lambda x: sw.distribute_tensor(x, mesh, [S(0), R]), torch.randn(8, 2)),
        }
        one = laid_out(8, 16).detach()
        sharing = {"view": one.view(-1), "row": one[3], "column": one[:, 2]}
        programs |= {
            f"written beside a {name}": (lambda view: (one.add_(1), view * 2), view) for name, view in sharing.items()
        }
        programs["written beside a virtual view"] = (lambda view: (here.add_(1), view * 2), here.view(-1))
        programs["written to a row"] = (lambda view: view.add_(1), sharing["row"])
        parts = [sw.DTensor.from_local(part, mesh, [S(0), R]) for part in torch.randn(2, 4, 16)]
        programs["written beside another part of a buffer"] = (lambda x: (x[0].add_(1), x[1] * 2), parts)
        for name, (program, given) in programs.items():
            torch._dynamo.reset()
            try:
                torch.compile(program, fullgraph=True, backend="aot_eager")(given)
            except Exception as error:
                said[name] = str(error)
        try:
            make_fx(lambda x: x.redistribute(placements=[R, R]))(laid_out(8, 16))
        except Exception as error:
            said["make_fx"] = str(error)
    return said


def virtual_ranks() -> list[tuple[float, str]]:
    """All ranks of a virtual mesh in one graph."""
    found = []
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (2, 2))
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x = sw.distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [S(0), S(1)])
        x.requires_grad_()

        def program(x: Any) -> Any:
            return (x * 2).redistribute(placements=[R, S(0)]).square().sum()

        loss = torch.compile(program, fullgraph=True, backend=backend)(x)
        loss.full_tensor().backward()
        found.append(
            (loss.full_tensor().item(), x.grad.spec.layout, torch.equal(x.grad.full_tensor(), 8 * x.full_tensor()))
        )
    return found


# ---------------------------------------------------------------- modules made parallel


class Dense(nn.Linear):
    """A linear layer with code of its own: Dynamo of torch 2.11 compiles no file of torch.nn on its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return F.linear(input, self.weight, self.bias)


def tensor_parallel(layers: nn.Module, mesh: sw.DeviceMesh, **options: Any) -> nn.Module:
    plan = {"0": parallel.ColwiseParallel(**options), "2": parallel.RowwiseParallel(**options)}
    return parallel.parallelize_module(layers, mesh, plan)


def fully_sharded(layers: Any, mesh: sw.DeviceMesh) -> nn.Module:
    for module in (layers[0], layers[2], layers):
        parallel.fully_shard(module, mesh=mesh)
    return layers


def replicated(layers: nn.Module, mesh: sw.DeviceMesh) -> nn.Module:
    parallel.replicate(layers, mesh)
    return layers


def losses(layers: nn.Module, program: Callable[..., Any], batches: Sequence[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    seen = []
    for batch in batches:
        result = program(batch)
        loss = (result.full_tensor() if isinstance(result, sw.DTensor) else result).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.tensors[0] if isinstance(loss, sw.RankTensor) else loss).item())
    return seen


def parallel_modules() -> dict[str, tuple[bool, int]]:
    """Whether ten steps lose as one device does, and into how many graphs the modules were compiled."""
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (2,))

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Dense(16, 32), nn.GELU(), Dense(32, 16)).double()

    batches = [torch.randn(4, 16, dtype=torch.float64) for _ in range(10)]
    plain = layers()
    wanted = losses(plain, plain, batches)
    found = {}
    for make, whole in ((tensor_parallel, True), (fully_sharded, False), (replicated, False)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        made = make(layers(), mesh)
        got = losses(made, torch.compile(made, backend=counter, fullgraph=whole), batches)
        close = torch.allclose(torch.tensor(got), torch.tensor(wanted))
        found[make.__name__] = (close, counter.frame_count)
    return found


def parallel_modules_on_a_larger_mesh() -> bool:
    """The same for a plan on one of two axes, with batches on both: of three dims, all of them symbolic."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()
    made = tensor_parallel(copy.deepcopy(plain), mesh["tp"], use_local_output=False)
    batches = [torch.randn(size, 6, 16, dtype=torch.float64) for size in (4, 8)]
    wanted = losses(plain, plain, batches)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=True)
    got = losses(made, compiled, [sw.distribute_tensor(batch, mesh, [S(0), R]) for batch in batches])
    return torch.allclose(torch.tensor(got), torch.tensor(wanted))


def _of_rows(x: Any, w: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:]) @ w.t().softmax(0)


SIZED: dict[str, tuple[Callable[..., Any], list[Any], list[tuple[int, ...]]]] = {
    "sizes that are what is left of others": (_of_rows, [S(0), S(1)], [(8, 8), (8, 8)]),
    "squares of sizes": (F.linear, [S(0)], [(8, 6, 4), (6, 4)]),
    "slices of a sharded dim": (lambda x, w: torch.cat([x, x * 2]).chunk(2, 1)[0], [S(0)], [(8, 4), (2, 2)]),
    "places of the largest": (lambda x, w: x.topk(2, 1).values, [S(0)], [(8, 4), (2, 2)]),
}


def symbolic_sizes() -> dict[str, bool]:
    """Whether programs traced with symbolic sizes compute what one device does, forward and backward."""
    torch.manual_seed(0)
    found = {}
    for name, (program, placements, sizes) in SIZED.items():
        torch._dynamo.reset()
        with sw.virtual():
            mesh = sw.init_device_mesh("cpu", (2,) * len(placements))
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
        plain = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
        given = [
            sw.distribute_tensor(t.detach(), mesh, p).requires_grad_()
            for t, p in zip(plain, (placements, [S(0), R][: mesh.ndim]), strict=True)
        ]
        wanted, got = program(*plain), compiled(*given)
        for result in (wanted, got):
            result.square().sum().backward()
        pairs = [(got.full_tensor(), wanted), (given[0].grad.full_tensor(), plain[0].grad)]
        found[name] = all(torch.allclose(ours, theirs) for ours, theirs in pairs)
    return found


def symbolic_beside_uneven() -> str:
    """A symbolic size beside an uneven one: numbers that only the way back needs are fixed on the way there."""
    torch._dynamo.reset()
    with fake_world(WORLD):
        x = laid_out(3, 8, 32)
        torch._dynamo.maybe_mark_dynamic(x, 2)
        program = torch.compile(lambda x: x.redistribute(placements=[S(0), S(1)]) * 2, backend="aot_eager")
        run(program, (x,))
        return x.grad.spec.layout


def inductor() -> tuple[str, str]:
    torch._dynamo.reset()
    with fake_world(WORLD):
        layers: Any = model(mesh_of())
        compiled = torch.compile(layers, fullgraph=True)

        def step() -> Any:
            result = compiled(laid_out(8, 16)).redistribute(placements=[S(0), R])
            result.sum().backward()
            return result

        step()
        return step().spec.layout, layers[0].weight.grad.spec.layout
