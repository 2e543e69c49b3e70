"""Random layers, layouts, plans and sizes: compiled programs on four processes against one device.

    python -m tests.gloo.compiled_sizes --programs 200 --seed 0 --jobs 2 [--virtual]

A program is a stack of layers, laid out at random or by a plan, and batches of several sizes, even and uneven, that go
through one compiled module. Results and gradients of every batch are compared with plain tensors on one device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import importlib
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.gloo.processes import ProcessPool, RankFailed, RankTimeout

RANKS = 4
TIME_LIMIT = 300.0  # seconds for one program
MESHES = ((4,), (2, 2), (2, 2))
WIDTHS = (4, 6, 8)
R, S = sw.Replicate(), sw.Shard


class Pair(nn.Module):
    """Two linear layers with a function between them; a plan shards them by columns and by rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Program:
    """A mesh, layers with the placements of their parameters (None: a plan), the input, and the sizes of batches."""

    seed: int
    mesh: tuple[int, ...]
    layers: tuple[tuple[str, int, int], ...]
    placements: tuple[tuple[sw.Placement, ...], ...] | None
    given: tuple[sw.Placement, ...]
    length: int | None  # of a dim between the batch and the features
    sizes: tuple[int, ...]
    dynamic: bool | None

    @classmethod
    def of(cls, seed: int) -> Program:
        rng = random.Random(seed)
        mesh, width = rng.choice(MESHES), rng.choice(WIDTHS)
        first, layers = width, []
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(("linear", "layer_norm", "rms_norm", "pair"))
            out = rng.choice(WIDTHS) if kind == "linear" else rng.choice((8, 12)) if kind == "pair" else width
            layers.append((kind, width, out))
            width = out if kind == "linear" else width
        planned = len(mesh) == 2 and rng.random() < 0.3
        count = sum(1 for _ in _model(layers).parameters())
        placements = (
            None if planned else tuple(tuple(rng.choice((R, R, S(0), S(-1))) for _ in mesh) for _ in range(count))
        )
        length = rng.choice((None, None, 3, 4))
        dims = (R, S(0), S(0)) if length is None else (R, S(0), S(0), S(1))
        given = (rng.choice(dims), R) if planned else tuple(rng.choice(dims) for _ in mesh)
        sizes = tuple(rng.sample(range(2, 12), rng.randint(2, 4)))
        return cls(seed, mesh, ((layers[0][0], first, layers[0][2]), *layers[1:]), placements, given, length, sizes,
                   rng.choice((None, None, None, True)))  # fmt: skip


def _model(layers: Sequence[tuple[str, int, int]]) -> nn.Sequential:
    made = {
        "linear": lambda width, out: nn.Linear(width, out),
        "layer_norm": lambda width, out: nn.LayerNorm(width),
        "rms_norm": lambda width, out: nn.RMSNorm(width),
        "pair": Pair,
    }
    return nn.Sequential(*(made[kind](width, out) for kind, width, out in layers))


def laid_out(program: Program, plain: nn.Sequential, mesh: sw.DeviceMesh) -> nn.Module:
    """A copy of the model in its layout."""
    model = copy.deepcopy(plain)
    if program.placements is None:
        plan: dict[str, Any] = {}
        for i, layer in enumerate(model):
            if isinstance(layer, Pair):
                plan |= {f"{i}.up": ColwiseParallel(use_local_output=False)}
                plan |= {f"{i}.down": RowwiseParallel(use_local_output=False)}
            elif isinstance(layer, nn.LayerNorm):
                plan[str(i)] = SequenceParallel(sequence_dim=0 if program.length is None else 1)
        parallelize_module(model, mesh["tp"], plan)
        return sw.distribute_module(model, mesh)
    for (name, parameter), placements in zip(plain.named_parameters(), program.placements, strict=True):
        owner, _, last = name.rpartition(".")
        fitting = [p if parameter.dim() > 1 or isinstance(p, sw.Replicate) else S(0) for p in placements]
        made = nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, fitting))
        model.get_submodule(owner).register_parameter(last, made)
    return model


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, sw.DTensor) else tensor).detach()


def run(program: Program, backend: str) -> str | None:
    """The error of a program on this process, or None."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch.manual_seed(program.seed)
    mesh = sw.init_device_mesh("cpu", program.mesh, mesh_dim_names=("dp", "tp")[-len(program.mesh) :])
    plain = _model(program.layers).double()
    model = laid_out(program, plain, mesh)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=program.dynamic)
    for size in program.sizes:
        shape = (size, program.layers[0][1]) if program.length is None else (size, program.length, program.layers[0][1])
        x = torch.randn(shape, dtype=torch.float64)
        theirs = x.clone().requires_grad_()
        ours = sw.distribute_tensor(x, mesh, program.given).requires_grad_()
        wanted, got = plain(theirs), compiled(ours)
        weights = torch.randn_like(wanted)
        (wanted * weights).sum().backward()
        (got * weights).sum().backward()
        pairs = [("result", got, wanted), ("input", ours.grad, theirs.grad)]
        pairs += [(n, model.get_parameter(n).grad, p.grad) for n, p in plain.named_parameters()]
        for name, mine, one in pairs:
            error = _difference(name, mine, one)
            if error is not None:
                return f"batch of {size}: {error}"
        model.zero_grad()
        plain.zero_grad()
    return None


def _difference(name: str, mine: Any, one: Any) -> str | None:
    if mine is None or tuple(mine.shape) != tuple(one.shape):
        return f"{name}: {None if mine is None else tuple(mine.shape)} instead of {tuple(one.shape)}"
    found = whole(mine)  # every rank takes part
    return None if torch.allclose(found, one, rtol=1e-8, atol=1e-9) else f"{name} is wrong"


def check(seeds: Sequence[int], pool: ProcessPool, backend: str = "aot_eager") -> list[str]:
    """The programs that fail, each with how."""
    failures = []
    for seed in seeds:
        program = Program.of(seed)
        try:
            found = next((error for error in pool.run(run, program, backend, timeout=TIME_LIMIT) if error), None)
        except (RankFailed, RankTimeout) as problem:
            found = str(problem)
        if found is not None:
            failures.append(f"{program}\n{found}")
    return failures


def check_alone(seeds: Sequence[int], backend: str) -> list[str]:
    """The same on processes of its own."""
    torch.set_num_threads(1)
    with ProcessPool(RANKS) as pool:
        return check(seeds, pool, backend)


def check_virtual(seeds: Sequence[int], backend: str) -> list[str]:
    """The same on virtual ranks of this process."""
    torch.set_num_threads(1)
    failures = []
    for program in map(Program.of, seeds):
        try:
            found = run(program, backend)
        except Exception as problem:
            found = f"{type(problem).__name__}: {problem}"
        if found is not None:
            failures.append(f"{program}\n{found}")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gloo.compiled_sizes", description=__doc__)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="groups of four processes at a time")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--virtual", action="store_true", help="on virtual ranks instead of processes")
    options = parser.parse_args(argv)
    started = time.monotonic()
    seeds = range(options.seed, options.seed + options.programs)
    shares = [seeds[i :: options.jobs] for i in range(options.jobs)]
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        named = importlib.import_module("tests.gloo.compiled_sizes")  # not __main__, which the processes do not have
        check_share = named.check_virtual if options.virtual else named.check_alone
        found = list(pool.map(check_share, shares, [options.backend] * options.jobs))
    failures = [failure for share in found for failure in share]
    for failure in failures:
        print(failure, end="\n\n")
    print(f"{len(seeds)} programs in {time.monotonic() - started:.0f} s: {len(failures)} fail")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
