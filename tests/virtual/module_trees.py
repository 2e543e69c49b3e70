"""Random trees of data parallel modules, called in random patterns, against the same on one device.

`run_model(seed)` draws a tree (linear, low-rank and feed-forward parts, parts that share a module, return a parameter,
hide their output or write to it), what is frozen, hooked, checkpointed, split by a plan and wrapped, and how it is
called in three steps of training. It raises where a gradient or a parameter is not that of one device.

`python -m tests.virtual.module_trees --models 2000 --seed 0 --jobs 8` runs many, each job in a process of its own, so
that one that crashes is reported with its seed; `--gloo` runs each on 4 processes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import ColwiseParallel, FSDPModule, RowwiseParallel, parallelize_module
from tests.gloo.processes import run_processes
from tests.transformer import assert_same, whole

WIDTH, ROWS, STEPS = 4, 12, 3
SHAPES = {"virtual": [(2,), (3,), (4,), (2, 2)], "gloo": [(4,), (2, 2)]}


class Stop(Exception):
    """Raised by a model that is told to fail."""


class Found(dict[str, Any]):
    """A dict that torch's trees do not look into."""


class Hidden:
    """An object that nobody can look into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def opened(value: Any) -> Any:
    if isinstance(value, Found):
        return opened(value["value"])
    return opened(value.value) if isinstance(value, Hidden) else value


class Part(nn.Module):
    """What all parts have: the way they give their result, and whether they fail."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.gives = draw.choice(["tensor"] * 4 + ["dict", "hidden", "view", "attribute"])
        self.extra: Any = None
        self.fails = False

    def forward(self, x: Any) -> Any:
        if self.fails:
            raise Stop
        y = self.compute(x)
        if self.gives == "dict":
            return Found(value=y)
        if self.gives == "hidden":
            return Hidden(y)
        if self.gives == "attribute":
            self.extra = y.pow(2).mean()
        return y.view(y.shape)[:, :] if self.gives == "view" else y

    def compute(self, x: Any) -> Any:
        raise NotImplementedError


class Linear(Part):
    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)
        self.detached = draw.random() < 0.2

    def compute(self, x: Any) -> Any:
        if self.detached:
            x = torch.tanh(F.linear(x, self.layer.weight.detach()))
        return self.layer(x)


class LowRank(Part):
    """A frozen weight with a product of small ones added to it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 2), nn.Parameter(torch.randn(WIDTH, 2) / 2)

    def compute(self, x: Any) -> Any:
        return F.linear(x, self.base + self.b @ self.a)


class FeedForward(Part):
    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


class Weight(nn.Module):
    """Gives its parameter, or a view of it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.turned = draw.random() < 0.5

    def forward(self) -> Any:
        return self.weight.t() if self.turned else self.weight


class Borrower(Part):
    """Computes with what another module gives it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.lender = Weight(draw)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def compute(self, x: Any) -> Any:
        return F.linear(x, self.lender()) * self.scale


class Chain(Part):
    """Parts one after the other: some twice, some checkpointed, some beside a shortcut."""

    def __init__(self, draw: random.Random, depth: int, known: list[nn.Module]) -> None:
        super().__init__(draw)
        self.parts = nn.ModuleList(part(draw, depth - 1, known) for _ in range(draw.randint(1, 3)))
        self.gain = nn.Parameter(torch.ones(WIDTH)) if draw.random() < 0.5 else None
        ways = ["call", "call", "twice", "checkpoint", "reentrant", "shortcut", "in place", "part of"]
        self.ways = [draw.choice(ways) for _ in self.parts]

    def compute(self, x: Any) -> Any:
        for one, way in zip(self.parts, self.ways, strict=True):
            x = torch.tanh(self.run(one, way, x))
        return x if self.gain is None else x * self.gain

    def run(self, one: Any, way: str, x: Any) -> Any:
        if way in ("checkpoint", "reentrant"):
            return checkpoint(lambda value: opened(one(value)), x, use_reentrant=way == "reentrant")
        if way == "part of":  # what is repeated is a piece of this module's own forward
            gain = (lambda y: y) if self.gain is None else (lambda y: y * self.gain)
            return checkpoint(lambda value: gain(opened(one(value))), x, use_reentrant=False)
        y = opened(one(x))
        if way == "twice":
            return opened(one(torch.tanh(y)))
        if way == "in place":
            y = y * 1 if y.is_leaf or one.__class__.__name__.endswith("Weight") else y
            y.mul_(0.5)
            return y
        return x + y if way == "shortcut" else y


def part(draw: random.Random, depth: int, known: list[nn.Module]) -> nn.Module:
    if known and draw.random() < 0.15:
        return draw.choice(known)  # shared with another place of the tree
    if depth > 0 and draw.random() < 0.5:
        made: nn.Module = Chain(draw, depth, known)
    else:
        made = draw.choice([Linear, Linear, LowRank, FeedForward, Borrower])(draw)
    known.append(made)
    return made


def children_first(tree: nn.Module) -> list[nn.Module]:
    """The modules of a tree, each once, after those that it holds."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for one in module.children():
            visit(one)
        found.setdefault(module)

    visit(tree)
    return list(found)


# ---------------------------------------------------------------- one model


class Model:
    """A tree on one device and the same data parallel, with what they are given."""

    def __init__(self, seed: int, backend: str) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        self.alone = Chain(draw, 2, []).double()
        for parameter in self.alone.parameters():
            if parameter.requires_grad and draw.random() < 0.15:
                parameter.requires_grad_(False)
        places = Counter(module for _, module in self.alone.named_modules(remove_duplicate=False))
        self.is_shared = max(places.values()) > 1
        self.spread: Any = copy.deepcopy(self.alone)
        self.shape = draw.choice(SHAPES[backend])
        self.is_dtensor = draw.random() < 0.5
        self.input_grad = draw.random() < 0.5
        kind = draw.choice(["fully_shard"] * 4 + ["replicate"])
        self.data, self.mesh = self._meshes(kind)
        self._wrap(kind)
        # what can be called on its own: others have no parameters to compute with while nothing around them runs
        wrapped = {name for name, module in self.spread.named_modules() if isinstance(module, FSDPModule)}
        self.names = [n for n, module in self.alone.named_modules() if isinstance(module, Part) and n in wrapped - {""}]
        self.given: list[dict[str, Any]] = [{}, {}]
        self.with_hooks = draw.random() < 0.4
        self.calls: list[list[str]] = [[], []]
        if self.with_hooks:
            for number, model in enumerate((self.alone, self.spread)):
                self._hook(model, self.calls[number])
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (self.alone, self.spread)]

    def _meshes(self, kind: str) -> tuple[Any, Any]:
        if len(self.shape) == 1:
            mesh = sw.init_device_mesh("cpu", self.shape, mesh_dim_names=("dp",))
            return mesh, mesh
        if self.draw.random() < 0.5 and kind == "fully_shard":
            mesh = sw.init_device_mesh("cpu", self.shape, mesh_dim_names=("replicas", "dp"))
            return mesh, mesh
        world = sw.init_device_mesh("cpu", self.shape, mesh_dim_names=("dp", "tp"))
        split = {
            name: FeedForward
            for name, module in self.spread.named_modules(remove_duplicate=True)
            if isinstance(module, FeedForward)
        }
        plan: dict[str, Any] = {}
        for name in split:
            plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        if plan:
            parallelize_module(self.spread, world["tp"], plan)
        return world["dp"], world

    def _wrap(self, kind: str) -> None:
        if kind == "replicate":
            sw.replicate(self.spread, self.data, bucket_cap_mb=self.draw.choice([25.0, 0.0001]))
            return
        modules = [m for m in children_first(self.spread) if isinstance(m, Part | Weight) and m is not self.spread]
        places = Counter(module for _, module in self.spread.named_modules(remove_duplicate=False))
        for module in modules:
            if places[module] > 1 or self.draw.random() < 0.5:
                sw.fully_shard(module, self.data, reshard_after_forward=self.draw.choice([None, True, False]))
        sw.fully_shard(self.spread, self.data, reshard_after_forward=self.draw.choice([None, None, True]))

    def _hook(self, model: nn.Module, calls: list[str]) -> None:
        def halved(grad: Any) -> Any:
            return grad / 2

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(halved)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))

    def place(self, x: Tensor) -> Any:
        """A batch as the spread model gets it."""
        placements = [sw.Shard(0) if axis in self.data.axes else sw.Replicate() for axis in self.mesh.axes]
        if self.is_dtensor:
            return sw.distribute_tensor(x, self.mesh, placements)
        chunks = x.chunk(self.data.size())
        if dist.is_initialized():
            return chunks[self._number(self.data.get_coordinate())]
        return sw.RankTensor([chunks[self._number(row)] for row in self.data.coordinates.tolist()])

    def _number(self, coordinate: Any) -> int:
        return int(torch.arange(self.data.size()).reshape(self.data.shape)[tuple(coordinate)])

    def step(self, step: int) -> None:
        pattern = [self.draw.choice(list(PATTERNS)) for _ in range(self.draw.randint(1, 3))]
        seeds = [self.draw.random() for _ in pattern]
        said = [self.run(number, step, list(zip(pattern, seeds, strict=True))) for number in range(2)]
        if said[0] or said[1]:
            assert all(said), (step, pattern, said)
            raise Stop
        self.compare(f"step {step}, {pattern}")
        for optimizer in self.optimizers:
            optimizer.step()
        assert_same(self.spread, self.alone, lambda parameter: parameter.detach())
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def run(self, number: int, step: int, patterns: list[tuple[str, float]]) -> str:
        """Run the patterns of a step; what autograd says of writes to what it has saved, which must be said of both."""
        for at, (name, seed) in enumerate(patterns):
            x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + at))
            given = (self.place(x) if number else x).requires_grad_(self.input_grad)
            try:
                PATTERNS[name](self, self.spread if number else self.alone, given, random.Random(seed))
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                return str(error)
        return ""

    def compare(self, where: str) -> None:
        try:
            assert_same(self.spread, self.alone, lambda parameter: parameter.grad)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
        for name, expected in self.given[0].items():
            have = self.given[1][name].grad
            assert (have is None) == (expected.grad is None), (where, name)
            if have is not None:
                torch.testing.assert_close(whole(have), expected.grad, rtol=0, atol=1e-9, msg=f"{where}, {name}")
        if self.with_hooks:
            assert set(self.calls[0]) == set(self.calls[1]), where
            for calls in self.calls:
                calls.clear()


# ---------------------------------------------------------------- patterns of calls


def loss_of(model: nn.Module, x: Any) -> Any:
    """The mean of squares of a result, and what parts have kept as attributes."""
    total = opened(model(x)).pow(2).mean()
    for module in model.modules():
        if isinstance(module, Part) and module.extra is not None:
            total = total + module.extra / 10
            module.extra = None
    return total


def backward(loss: Any, **options: Any) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def child(model: Model, tree: nn.Module, draw: random.Random) -> nn.Module:
    return tree.get_submodule(draw.choice(model.names)) if model.names else tree


def forgotten(tree: nn.Module) -> None:
    for module in tree.modules():
        if isinstance(module, Part):
            module.extra = None


def root(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    backward(loss_of(tree, x))


def alone(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    backward(loss_of(child(model, tree, draw), x))


def between(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    one, other = child(model, tree, draw), child(model, tree, draw)
    first = loss_of(one, x)
    second = loss_of(tree, x)
    backward(first + second + loss_of(other, x))


def two_backwards(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    losses = [loss_of(tree, x), loss_of(child(model, tree, draw), x)]
    for loss in losses:
        backward(loss)


def retained(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    loss = loss_of(tree, x)
    backward(loss, retain_graph=True)
    backward(loss)


def without_gradient(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    with torch.no_grad():
        tree(x)
        child(model, tree, draw)(x)
    forgotten(tree)


def without_backward(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    tree(x)
    forgotten(tree)


def failing(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    part: Any = child(model, tree, draw)
    part.fails = True
    with contextlib.suppress(Stop):
        tree(x)
    part.fails = False
    forgotten(tree)


def accumulated(model: Model, tree: Any, x: Any, draw: random.Random) -> None:
    if model.with_hooks:  # which are called once for each reduction
        return root(model, tree, x, draw)
    with tree.no_sync() if tree is model.spread else contextlib.nullcontext():
        backward(loss_of(tree, x))
    backward(loss_of(tree, x))
    return None


def functional(model: Model, tree: nn.Module, x: Any, draw: random.Random) -> None:
    """With other tensors as some of the parameters, which get gradients; nothing of them may stay in the module.

    Checkpoints and shared modules are left out: with these one device fails, or keeps a tensor that was given.
    """
    ways = {way for module in tree.modules() if isinstance(module, Chain) for way in module.ways}
    if ways & {"checkpoint", "reentrant", "part of"} or model.is_shared:
        return root(model, tree, x, draw)
    given = {name: (p.detach() * 0.5).requires_grad_() for name, p in tree.named_parameters() if draw.random() < 0.5}
    model.given[int(tree is model.spread)] = given
    before = dict(tree.named_parameters())
    backward(opened(functional_call(tree, given, (x,))).pow(2).mean())
    assert all(parameter is before[name] for name, parameter in tree.named_parameters())
    forgotten(tree)
    return None


def penalty(model: Model, tree: Any, x: Any, draw: random.Random) -> None:
    """The norm of the gradient of the inputs, differentiated; reentrant checkpoints allow none."""
    if not x.requires_grad or any("reentrant" in m.ways for m in tree.modules() if isinstance(m, Chain)):
        return root(model, tree, x, draw)
    out = opened(tree(x)).pow(2).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    forgotten(tree)
    backward(grad.pow(2).mean())
    return None


PATTERNS: dict[str, Callable[[Model, nn.Module, Any, random.Random], None]] = {
    function.__name__: function
    for function in (
        root, alone, between, two_backwards, retained, without_gradient, without_backward, failing, accumulated,
        functional, penalty,
    )
}  # fmt: skip


def run_model(seed: int, backend: str = "virtual") -> None:
    """Train one model for some steps, and compare."""
    model = Model(seed, backend)
    with contextlib.suppress(Stop):
        for step in range(STEPS):
            model.step(step)


# ---------------------------------------------------------------- many models


def run_models(seeds: Sequence[int], backend: str = "virtual") -> list[str]:
    """What went wrong, a line for each model."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reentrant checkpoints warn where nothing wants a gradient
        for seed in seeds:
            print(f"seed {seed}", flush=True)
            try:
                run_model(seed, backend)
            except Exception as error:
                found.append(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return found


def _worker(seeds: Sequence[int], gloo: bool) -> None:
    if gloo:
        importable = importlib.import_module(__spec__.name).run_models  # other processes cannot import from __main__
        found = run_processes(importable, 4, seeds, "gloo", timeout=60 + 20 * len(seeds))[0]
    else:
        found = run_models(seeds)
    for line in found:
        print(f"failed {line}", flush=True)


def _in_process(seeds: list[int], gloo: bool) -> list[str]:
    """Run models in another process; after a crash the rest in a new one."""
    found: list[str] = []
    while seeds:
        command = [sys.executable, "-m", __spec__.name, *(["--gloo"] if gloo else []), "--worker", *map(str, seeds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        found += [line.removeprefix("failed ") for line in lines if line.startswith("failed ")]
        if done.returncode == 0:
            break
        last = [int(line.removeprefix("seed ")) for line in lines if line.startswith("seed ")]
        at = seeds.index(last[-1]) if last else 0
        reason = (done.stderr.strip().splitlines() or [""])[-1]
        found.append(f"seed {seeds[at]}: the process ended with {done.returncode}: {reason}")
        seeds = seeds[at + 1 :]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--gloo", action="store_true", help="on 4 processes instead of virtual ranks")
    parser.add_argument("--worker", type=int, nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        _worker(asked.worker, asked.gloo)
        return 0
    seeds = range(asked.seed, asked.seed + asked.models)
    chunks = [list(seeds[at : at + 50]) for at in range(0, asked.models, 50)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = [line for lines in pool.map(lambda chunk: _in_process(chunk, asked.gloo), chunks) for line in lines]
    print("\n".join([*found, f"{asked.models} models from seed {asked.seed}: {len(found)} failed"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
