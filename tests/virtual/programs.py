"""Random programs on DTensors against the same programs on plain tensors, in float64: values and derivatives.

A program is a list of lines of Python. They are made one by one, each tried on plain tensors first, so that every
program is one that torch can run. In a program `D(tensor)` is a constant, replicated on a mesh; `L(x, ...)` a copy of
a tensor in another layout; `T(x, ...)` the same by way of locals; `G(x)` a copy made of the gathered tensor; and
`C(function, x, ...)` a checkpointed region; `A(way, q, k, v, ...)` attention by a preferred way. `derivative` says what
is compared beside the first derivatives: those of a gradient penalty, a product with the Hessian (reverse over reverse,
or forward over reverse), or forward mode; or else how the program is run: with a gradient of its first input alone or
of none, as a function that is transformed, or compiled.

    python -m tests.virtual.programs --programs 10000 --jobs 2
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardwise as sw

# Derivatives that may be None on one side and zero on the other. Plain torch itself has both: of `x.prod(1)` with one
# column the second gradient is zero, and None where x holds a zero or is of a subclass, since autograd then has another
# formula, which does not depend on x.
SECOND = ("second gradient of", "Hessian product of")
MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2))
ZIGZAGS = 0.15  # how many of the inputs lie in zigzags where they would be sharded
RAGGED = 0.15  # and how many in shards of given sizes
SIZES = (1, 2, 3, 4, 4, 5, 6, 6, 8)
Variables = dict[str, Any]
MOST_SHOWN = 32  # elements of a tensor that differs


@dataclass(frozen=True)
class Input:
    """A tensor that a program begins with, and its layout."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    order: tuple[int, ...] | None = None  # of the mesh axes, where it is not the usual one

    def value(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100 + int(self.name[1:]))
        return torch.randn(self.shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Program:
    """A mesh, tensors on it, and the lines of a program on them."""

    seed: int
    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    derivative: str = "first"
    names: Callable[[Run], dict[str, Any]] | None = None  # of a side: more names that its lines use

    def script(self) -> str:
        """The program as one that can be run by hand."""
        head = ["import torch", "import torch.nn.functional as F", "import shardwise as sw", "from shardwise import *"]
        head += [f"from {__name__} import Program, Input, check", ""]
        names = ", ".join(f"Input{(i.name, i.shape, i.placements, i.order)!r}" for i in self.inputs)
        lines = ",\n    ".join(map(repr, self.lines))
        body = f"program = Program({self.seed}, {self.mesh}, ({names},), (\n    {lines},\n), {self.derivative!r})\n"
        body += "print(check(program))"
        return "\n".join([*head, body])


# ---------------------------------------------------------------- running a program


def ragged_sizes(size: int, parts: int) -> list[int]:
    """Sizes of parts that differ, with empty ones among them.

    Example:
        >>> ragged_sizes(8, 4), ragged_sizes(5, 3)
        ([5, 2, 1, 0], [3, 1, 1])
    """
    weights = [(7 * (part + 1 + size)) % 4 for part in range(parts)]
    total = sum(weights) or 1
    sizes = [size * weight // total for weight in weights]
    sizes[size % parts] += size - sum(sizes)
    return sizes


def layout_of(
    mesh: sw.DeviceMesh, shape: Sequence[int], placements: Sequence[str], order: Any = None
) -> dict[str, Any]:
    """Placements written as S0, R, P, Pmax, Z0 for a zigzag, G0 for a ragged one, or S0:2 for a strided one."""
    made: list[Any] = []
    for text in placements:
        if text.startswith("S"):
            dim, _, rows = text[1:].partition(":")
            made.append(sw.StridedShard(int(dim), int(rows)) if rows else sw.Shard(int(dim)))
        elif text.startswith("Z"):
            made.append(sw.Zigzag(int(text[1:])))
        elif text.startswith("G"):
            made.append(sw.Ragged(int(text[1:]), ragged_sizes(shape[int(text[1:])], mesh.shape[len(made)])))
        else:
            made.append(sw.Replicate() if text == "R" else sw.Partial(text[1:] or "sum"))
    for axis, placement in enumerate(
        made
    ):  # the sizes are those of all of the dim, so that no other may split it first
        if isinstance(placement, sw.Ragged):
            made[axis + 1 :] = [
                sw.Replicate() if getattr(other, "dim", None) == placement.dim else other for other in made[axis + 1 :]
            ]
    layout: dict[str, Any] = {"placements": made}
    if order is not None:
        entries = []
        for dim in range(len(shape)):
            axes = tuple(a for a in order if isinstance(made[a], sw.Shard) and made[a].dim == dim)
            if len(axes) > 1:
                entries.append(sw.ShardOrderEntry(dim, axes))
        if entries:
            layout["shard_order"] = tuple(entries)
    return layout


class Run:
    """One side of the comparison: plain tensors, or DTensors on a mesh."""

    def __init__(self, program: Program, distributed: bool, shaken: float = 0.0) -> None:
        self.program = program
        self.mesh = sw.init_device_mesh("cpu", program.mesh) if distributed else None
        self.variables: Variables = {}
        self.inputs: list[Any] = []
        for given in program.inputs:
            value = given.value(program.seed) * (1 + shaken)
            tensor: Any = value
            if self.mesh is not None:
                layout = layout_of(self.mesh, value.shape, given.placements, given.order)
                tensor = sw.distribute_tensor(value, self.mesh, **layout)
            tensor.requires_grad_(program.derivative != "none" and (program.derivative != "some" or not self.inputs))
            self.inputs.append(tensor)
            self.variables[given.name] = tensor
        self.names = {
            "torch": torch, "F": F, "D": self.constant, "L": self.laid_out, "T": self.through_locals,
            "G": self.gathered, "C": checkpointed, "A": attend,
        }  # fmt: skip
        if program.names is not None:
            self.names |= program.names(self)

    def constant(self, tensor: torch.Tensor) -> Any:
        if self.mesh is None:
            return tensor
        return sw.distribute_tensor(tensor, self.mesh, [sw.Replicate()] * self.mesh.ndim)

    def laid_out(self, tensor: Any, *placements: str) -> Any:
        if self.mesh is None:
            return tensor.clone()
        moved = tensor.redistribute(**layout_of(self.mesh, tensor.shape, placements))
        return tensor.clone() if moved is tensor else moved

    def through_locals(self, tensor: Any, *placements: str) -> Any:
        if self.mesh is None:
            return tensor.clone()
        moved = tensor.redistribute(**layout_of(self.mesh, tensor.shape, placements))
        return sw.DTensor.from_local(moved.to_local() * 1.0, self.mesh, moved.placements, shape=moved.shape)

    def gathered(self, tensor: Any) -> Any:
        if self.mesh is None:
            return tensor.clone()
        return sw.DTensor.from_local(tensor.full_tensor(), self.mesh)

    def step(self, line: str) -> None:
        exec(line, self.names, self.variables)

    def results(self) -> dict[str, torch.Tensor]:
        """Every variable's value, and derivatives of a sum of all of them with fixed weights."""
        found = {name: _whole(value) for name, value in sorted(self.variables.items())}
        total = self.total(self.variables)
        if total is not None:
            named = {given.name: tensor for given, tensor in zip(self.program.inputs, self.inputs, strict=True)}
            found |= DERIVATIVES[self.program.derivative](self, total, named)
        return found

    def total(self, variables: Variables, every: bool = False) -> Any:
        """A sum with fixed weights of variables that have gradients; `every`: of all that could have."""
        total: Any = None
        for _, value in sorted(variables.items()):
            if value.dtype.is_floating_point and (every or value.requires_grad):
                part = (value * self.weights(value)).sum()
                total = part if total is None else total + part
        return total

    def function(self) -> Callable[..., Variables]:
        """The program as a function of its inputs."""
        names = ", ".join(given.name for given in self.program.inputs)
        body = "".join(f"    {line}\n" for line in self.program.lines)
        made: dict[str, Any] = {}
        kept = [line.partition(" = ")[0] for line in self.program.lines if re.match(r"v\d+ = ", line)]
        found = ", ".join(f"{name!r}: {name}" for name in [*names.split(", "), *kept])
        exec(f"def program({names}):\n{body}    return {{{found}}}\n", self.names, made)
        return made["program"]

    def weights(self, value: Any) -> Any:
        made = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
        return self.constant(made)


def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def attend(way: str | None, *args: Any, math: bool = False, **options: Any) -> Any:
    """Attention by a preferred way; `math`: from matrix products, which have second derivatives."""
    with sw.attention(prefer=way), sdpa_kernel(SDPBackend.MATH) if math else contextlib.nullcontext():
        return F.scaled_dot_product_attention(*args, **options)


def _first(run: Run, total: Any, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    total.backward()
    return {f"gradient of {name}": _whole(x.grad) for name, x in named.items() if x.grad is not None}


def _first_with_graph(total: Any, named: dict[str, Any]) -> dict[str, Any]:
    used = torch.autograd.grad(total, list(named.values()), create_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(named, used, strict=True) if grad is not None}


def _penalty(run: Run, total: Any, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of the sum and of the squares of its gradients."""
    grads = _first_with_graph(total, named)
    found = {f"gradient of {name}": _whole(grad) for name, grad in grads.items()}
    squares = [(grad * grad * run.weights(grad)).sum() for grad in grads.values() if grad.requires_grad]
    if squares:
        sum(squares).backward()  # pyright: ignore[reportAttributeAccessIssue]
        found |= {f"second gradient of {n}": _whole(x.grad) for n, x in named.items() if x.grad is not None}
    return found


def _hessian_vector(run: Run, total: Any, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The Hessian of the sum, times a vector, by two backward passes."""
    grads = {name: grad for name, grad in _first_with_graph(total, named).items() if grad.requires_grad}
    if not grads:
        return {}
    vectors = [run.weights(grad) for grad in grads.values()]
    second = torch.autograd.grad(list(grads.values()), list(named.values()), vectors, allow_unused=True)
    return {f"Hessian product of {n}": _whole(s) for n, s in zip(named, second, strict=True) if s is not None}


DERIVATIVES: dict[str, Callable[[Run, Any, dict[str, Any]], dict[str, torch.Tensor]]] = {
    "first": _first,
    "penalty": _penalty,
    "hessian": _hessian_vector,
    "forward": lambda run, total, named: {},  # the inputs have tangents: see `run`
    "some": _first,
    "none": lambda run, total, named: {},
    "function": lambda run, total, named: {},
    "compiled": _first,
}
EAGER = ("first", "penalty", "penalty", "hessian", "forward")  # those of a program by default


def _whole(value: Any) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, sw.DTensor) else value


def run(program: Program, distributed: bool, shaken: float = 0.0, *, compiled: bool = False) -> dict[str, torch.Tensor]:
    """One side's results; `compiled`: those of plain tensors too, where the program is to be compiled."""
    torch.manual_seed(program.seed)
    side = Run(program, distributed, shaken)
    if program.derivative == "forward":
        return _forward(side)
    if program.derivative == "function":
        return _transformed(side)
    if program.derivative == "compiled" and (distributed or compiled):
        torch._dynamo.reset()
        side.variables = torch.compile(side.function(), backend="aot_eager")(*side.inputs)
        return side.results()
    for line in program.lines:
        side.step(line)
    return side.results()


def _forward(side: Run) -> dict[str, torch.Tensor]:
    """Every variable's value and tangent."""
    with forward_ad.dual_level():
        for given, tensor in zip(side.program.inputs, side.inputs, strict=True):
            plain = tensor.detach()
            side.variables[given.name] = forward_ad.make_dual(plain, side.weights(plain))
        for line in side.program.lines:
            side.step(line)
        found: dict[str, torch.Tensor] = {}
        for name, value in sorted(side.variables.items()):
            primal, tangent = forward_ad.unpack_dual(value)
            found[name] = _whole(primal)
            if tangent is not None:
                found[f"tangent of {name}"] = _whole(tangent)
    return found


def _transformed(side: Run) -> dict[str, torch.Tensor]:
    """Every variable's value, and gradients by `torch.func`."""
    function, names = side.function(), [given.name for given in side.program.inputs]

    def total(*inputs: Any) -> Any:
        made = function(*inputs)
        return side.total(made, every=True), {name: value.detach() for name, value in made.items()}

    given = [tensor.detach() for tensor in side.inputs]
    grads, made = torch.func.grad(total, tuple(range(len(given))), has_aux=True)(*given)
    found = {name: _whole(value) for name, value in made.items()}
    return found | {f"gradient of {name}": _whole(grad) for name, grad in zip(names, grads, strict=True)}


def check(program: Program) -> str | None:
    """What differs between the two sides; None if nothing does, or plain torch cannot run the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = run(program, distributed=False)
        except Exception:  # one that was cut down to what no longer runs
            return None
        try:
            have = run(program, distributed=True)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} [{place.name}]"
        told = _difference(want, have)
        if told and program.derivative == "compiled":  # plain compiled programs are not always right either
            told = _difference(run(program, distributed=False, compiled=True), have)
        # sums in another order are rounded otherwise: a program that turns that into another result tells nothing
        rounding = any(_difference(want, run(program, False, shaken)) for shaken in (1e-14, -1e-14)) if told else False
    return None if rounding else told


def _difference(want: dict[str, torch.Tensor], have: dict[str, torch.Tensor]) -> str | None:
    for name in sorted(want.keys() | have.keys()):
        if name not in want or name not in have:
            if name.startswith(SECOND) and not _is_nonzero(want.get(name, have.get(name))):
                continue
            return f"{name} is missing on {'plain tensors' if name in have else 'DTensors'}"
        value, other = want[name], have[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name}: {other.dtype} {tuple(other.shape)} is not {value.dtype} {tuple(value.shape)}"
        largest = 1 + value.abs().nan_to_num(0, 0, 0).amax() if value.numel() and value.is_floating_point() else 1
        if not torch.allclose(value, other, rtol=1e-12, atol=1e-12 * float(largest), equal_nan=True):
            both = f":\n{other}\nis not\n{value}" if value.numel() <= MOST_SHOWN else ""
            return f"{name} differs by {(value - other).abs().max()}{both}"
    return None


def _is_nonzero(value: torch.Tensor) -> bool:
    return not torch.allclose(value, torch.zeros_like(value), rtol=0, atol=1e-8)


# ---------------------------------------------------------------- making a program

Maker = Callable[["Choices"], str]


class Choices:
    """What a line may be made of: the variables there are, and a source of randomness."""

    def __init__(self, rng: random.Random, variables: Variables, axes: int) -> None:
        self.rng = rng
        self.variables = variables
        self.axes = axes

    def name(self, *, ndim: int = 0, floating: bool = True) -> str:
        """A variable with at least this many dims."""
        names = [
            name
            for name, value in self.variables.items()
            if value.dim() >= ndim and (value.dtype.is_floating_point or not floating) and value.numel() <= 4096
        ]
        return self.rng.choice(names)

    def inner(self, *, ndim: int = 0) -> str:
        """One that is no leaf, so that it can be written to."""
        names = [name for name, value in self.variables.items() if name[0] != "x" and value.dim() >= ndim]
        return self.rng.choice([name for name in names if self.variables[name].dtype.is_floating_point])

    def shape(self, name: str) -> torch.Size:
        return self.variables[name].shape

    def dim(self, name: str) -> int:
        return self.rng.randrange(-self.variables[name].dim(), self.variables[name].dim())

    def pick(self, *given: Any) -> Any:
        return self.rng.choice(given)

    def like(self, name: str) -> str:
        """Something that broadcasts with a variable, made of another one."""
        shape = self.shape(name)
        others = [n for n, v in self.variables.items() if v.dtype.is_floating_point and v.shape == shape]
        options = [self.rng.choice(others)]
        for other, value in self.variables.items():
            if value.dtype.is_floating_point and value.dim() <= len(shape):
                with contextlib.suppress(RuntimeError):
                    if torch.broadcast_shapes(value.shape, shape) == shape:
                        options.append(other)
        if len(shape):
            options.append(f"{name}.mean({self.dim(name)}, keepdim=True)")
        return self.rng.choice(options)

    def apart(self, name: str, written: str) -> str:
        """A variable, or what `like` has made, copied where it shares memory with another: what torch copies from a
        tensor onto memory that it shares with it depends on the order of the copy."""
        value, other = self.variables.get(name), self.variables[written]
        is_shared = value is not None and value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        return f"{name}.clone()" if is_shared and name != written else name

    def part(self, name: str) -> str:
        """An index into a variable."""
        items = []
        for size in self.shape(name):
            kind = self.rng.randrange(4)
            if kind == 0 and size:
                items.append(str(self.rng.randrange(-size, size)))
            elif kind == 1 and size > 1:
                begin = self.rng.randrange(size - 1)
                items.append(f"{begin}:{self.rng.randrange(begin + 1, size + 1)}")
            elif kind == 2:
                items.append(f"::{self.rng.choice((1, 2, 3))}")
            else:
                items.append(":")
        return ", ".join(items) or "..."

    def split(self, count: int) -> list[int]:
        """Sizes whose product is `count`."""
        sizes = [1] * self.rng.randrange(1, 4)
        left, prime = count, 2
        while left > 1:
            while left % prime:
                prime += 1
            sizes[self.rng.randrange(len(sizes))] *= prime
            left //= prime
        return sizes

    def placements(self, ndim: int) -> list[str]:
        return [self.rng.choice(["R", *(f"S{d}" for d in range(ndim))]) for _ in range(self.axes)]


def _function(c: Choices) -> str:
    x = c.name()
    return c.pick(
        f"{x}.tanh()", f"{x}.sigmoid()", f"{x}.relu()", f"-{x}", f"{x}.abs()", f"F.gelu({x})", f"{x}.sin()",
        f"{x} + 1.5", f"2 - {x}", f"{x} * 3", f"{x} / 2", f"{x}.square()", f"{x}.clamp(-0.5, 0.7)", f"F.silu({x})",
        f"({x}.abs() + 1).log()", f"({x}.abs() + 0.5).sqrt()", f"1 / ({x}.abs() + 1)", f"{x}.clone()", f"{x} ** 3",
        f"F.softplus({x})", f"{x}.contiguous()", f"{x}.to(torch.float32).to(torch.float64)", f"F.hardtanh({x})",
    )  # fmt: skip


def _binary(c: Choices) -> str:
    x = c.name()
    y = c.like(x)
    return c.pick(
        f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{y} * {x}", f"{x} / ({y}.abs() + 1)", f"torch.maximum({x}, {y})",
        f"torch.where({x} > {y}, {x}, {y})", f"torch.where({x} > 0, {y}, 0.5)", f"{x}.masked_fill({y} > 0, -1.0)",
        f"torch.add({x}, {y}, alpha=0.5)", f"torch.lerp({x}, {y}.expand_as({x}), 0.3)", f"torch.minimum({y}, {x})",
        f"torch.addcmul({x}, {y}, {y}, value=0.1)", f"torch.hypot({x}, {y})", f"F.mse_loss({x}, {y}.expand_as({x}))",
    )  # fmt: skip


def _reduction(c: Choices) -> str:
    x = c.name(ndim=1)
    dim, keep = c.dim(x), c.pick(True, False)
    return c.pick(
        f"{x}.sum({dim}, keepdim={keep})", f"{x}.mean({dim}, keepdim={keep})", f"{x}.sum()", f"{x}.mean()",
        f"{x}.amax({dim}, keepdim={keep})", f"{x}.amin({dim})", f"{x}.max({dim}).values", f"{x}.min()",
        f"{x}.var({dim}, correction=0, keepdim={keep})", f"({x}.var(correction=0) + 0.1).sqrt()",
        f"{x}.logsumexp({dim})",
        f"{x}.norm()", f"torch.linalg.vector_norm({x}, 1, {dim})", f"{x}.prod({dim})", f"{x}.cumsum({dim})",
        f"{x}.argmax({dim})", f"({x} > 0).any({dim})", f"({x} > 0).sum({dim})",
        f"{x}.contiguous().median({dim}).values", f"{x}.cumprod({dim})", f"torch.count_nonzero({x} > 0.3)",
        f"{x}.nansum({dim})",
    )  # fmt: skip


def _product(c: Choices) -> str:
    x = c.name(ndim=2)
    n = c.shape(x)[-1]
    fitting = [
        name for name, v in c.variables.items() if v.dtype.is_floating_point and v.dim() == 2 and v.shape[0] == n
    ]
    other = c.rng.choice([*fitting, f"{x}.transpose(-1, -2)"])
    weight = f"D(torch.linspace(-1, 1, {3 * n}, dtype=torch.float64).reshape(3, {n}))"
    return c.pick(
        f"{x} @ {other}", f"F.linear({x}, {weight})", f"torch.einsum('...ij,...kj->...ik', {x}, {x})",
        f"F.linear({x}, {weight}, D(torch.ones(3, dtype=torch.float64)))", f"torch.einsum('...ij->...ji', {x})",
        f"torch.matmul({x}, {x}.mean(-2).flatten()[:{n}])", f"torch.einsum('...ij->...i', {x})",
    )  # fmt: skip


def _view(c: Choices) -> str:
    x = c.name(ndim=1)
    shape, dim = c.shape(x), c.dim(x)
    size = shape[dim]
    sizes = c.split(shape.numel()) if shape.numel() else [0]
    two = c.rng.sample(range(len(shape)), 2) if len(shape) > 1 else [0, 0]
    order = c.rng.sample(range(len(shape)), len(shape))
    return c.pick(
        f"{x}.transpose({two[0]}, {two[1]})", f"{x}.permute({order})", f"{x}.reshape({sizes})", f"{x}.flatten()",
        f"{x}.unsqueeze({dim})", f"{x}.squeeze()", f"{x}.squeeze({dim})", f"{x}.unflatten({dim}, {c.split(size or 1)})",
        f"{x}[{c.part(x)}]", f"{x}[{c.part(x)}]", f"{x}.narrow({dim}, 0, {max(size - 1, 0)})",
        f"{x}.select({dim}, {size - 1})",
        f"{x}.chunk(2, {dim})[0]", f"{x}.split(2, {dim})[-1]", f"{x}.unbind({dim})[0]", f"{x}.view({sizes})",
        f"{x}.unsqueeze(0).expand(3, *{list(shape)})", f"{x}.movedim({two[0]}, {two[1]})", f"{x}.diagonal()",
        f"{x}.flatten({min(two)}, {max(two)})", f"{x}.unfold({dim}, {max(1, size // 2)}, 1)", f"{x}.t()",
    )  # fmt: skip


def _movement(c: Choices) -> str:
    x = c.name(ndim=1)
    dim, n = c.dim(x), c.shape(x)
    size = n[dim]
    index = [c.rng.randrange(size) for _ in range(3)] if size else []
    at, one = (f"D(torch.tensor({chosen}, dtype=torch.int64))" for chosen in (index, index[:1]))
    return c.pick(
        f"torch.cat([{x}, {x}], {dim})", f"torch.stack([{x}, {c.like(x)}.expand_as({x})], {dim})", f"{x}.flip({dim})",
        f"{x}.roll(1, {dim})", f"{x}.repeat({[c.pick(1, 2) for _ in n]})", f"F.pad({x}, (1, 2))", f"{x}.tril()",
        f"{x}.triu(1)",
        f"{x}.index_select({dim}, {at})", f"{x}.sort({dim}).values",
        f"{x}.gather({dim}, {x}.argsort({dim}))", f"{x}.topk(1, {dim}).values", f"{x}[{at}]",
        f"{x}.repeat_interleave(2, {dim})", f"torch.take_along_dim({x}, {x}.argmax({dim}, keepdim=True), {dim})",
        f"torch.cat([{x}, {x}.narrow({dim}, 0, {size // 2})], {dim})", f"F.pad({x}, (0, 1), value=0.5)",
        f"{x}.scatter({dim}, {x}.argsort({dim}), {c.like(x)}.expand_as({x}))", f"{x}.diff(dim={dim})",
        f"{x}.index_add({dim}, {one}, {x}.narrow({dim}, 0, {min(size, 1)}))",
    )  # fmt: skip


def _norm(c: Choices) -> str:
    x = c.name(ndim=1)
    dim, last = c.dim(x), c.shape(x)[-1]
    weight = f"D(torch.linspace(0.5, 1.5, {last}, dtype=torch.float64))"
    return c.pick(
        f"{x}.softmax({dim})", f"{x}.log_softmax({dim})", f"F.layer_norm({x}, [{last}], {weight}, {weight})",
        f"F.rms_norm({x}, [{last}], {weight}, 1e-5)", f"F.normalize({x}, dim={dim}, eps=1e-3)",
        f"F.layer_norm({x}, [{last}])", f"F.group_norm({x}[None], 1) if {x}.dim() > 1 else {x}", f"F.glu({x}, {dim})",
        f"F.softmin({x}, {dim})",
    )  # fmt: skip


def _random(c: Choices) -> str:
    x = c.name()
    return c.pick(
        f"F.dropout({x}, 0.3)", f"{x} + torch.rand_like({x})", f"{x} * torch.randn_like({x})",
        f"torch.empty_like({x}).uniform_()",
        f"torch.bernoulli({x}.sigmoid().detach())", f"torch.normal({x}.detach(), 1.0)", f"F.alpha_dropout({x}, 0.3)",
    )  # fmt: skip


def _layout(c: Choices) -> str:
    x = c.name()
    placements = ", ".join(map(repr, c.placements(len(c.shape(x)))))
    return c.pick(f"L({x}, {placements})", f"L({x}, {placements})", f"T({x}, {placements})", f"G({x})")


def _region(c: Choices) -> str:
    x = c.name()
    placements = ", ".join(map(repr, c.placements(len(c.shape(x)))))
    return c.pick(
        f"C(lambda t: (t * 2).tanh() * t, {x})", f"C(lambda t: L(t.sin(), {placements}).exp().clamp(max=2), {x})",
        f"C(lambda t: T(t.square(), {placements}) + {x}, {x})", f"C(lambda t: F.dropout(t, 0.3).sigmoid(), {x})",
    )  # fmt: skip


def _write(c: Choices) -> str:
    x = c.inner()
    y = c.like(x)
    part = f"{x}[{c.part(x)}]"
    swapped = f"{x}.transpose(0, -1)" if c.shape(x) else x
    return c.pick(
        f"{x}.add_({y})", f"{x}.mul_(0.5)", f"{x}.sub_({y}, alpha=0.3)", f"{x}.mul_({y})", f"{part} = 0.25",
        f"{part}.mul_(2)", f"{part}.add_(1)", f"{part}.zero_()", f"{x}.copy_({c.apart(y, x)})", f"{x}.clamp_(-1, 1)",
        f"{x}.tanh_()",
        f"{swapped}.add_(1)", f"{swapped}.mul_(0.5)", f"{x}.masked_fill_({x} > 0.5, 0.1)", f"{x}.fill_(0.75)",
        f"{part} = {part} * 2 + 1", f"{x}.view(-1).add_(0.5)", f"{x}.neg_()", f"{x}.addcmul_({y}, {y}, value=0.1)",
        f"{x}.lerp_({y}.expand_as({x}), 0.2)", f"{x}.relu_()",
    )  # fmt: skip


class MakerSet(NamedTuple):
    """Makers of lines, each with a weight: of expressions, and of statements that write to variables."""

    values: tuple[tuple[Maker, int], ...]
    writes: tuple[tuple[Maker, int], ...]


DEFAULT = MakerSet(
    (
        (_function, 3), (_binary, 4), (_reduction, 3), (_product, 2), (_view, 4), (_movement, 3), (_norm, 2),
        (_random, 1), (_layout, 2), (_region, 1),
    ),
    ((_write, 4),),
)  # fmt: skip


def make(seed: int) -> Program:
    """The program of a seed: 2 to 4 tensors, 5 to 12 lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _make(seed)


def _make(seed: int) -> Program:
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    inputs = tuple(_input(rng, mesh, f"x{i}") for i in range(rng.randint(2, 4)))
    program = Program(seed, mesh, inputs, (), rng.choice(EAGER))
    return make_of(program, rng, DEFAULT, None)


def make_of(program: Program, rng: random.Random, made_of: MakerSet, count: int | None) -> Program:
    """A program with lines: so many, or 5 to 12."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_lines(program, rng, made_of, count)


def _with_lines(program: Program, rng: random.Random, made_of: MakerSet, count: int | None) -> Program:
    seed, mesh = program.seed, program.mesh
    torch.manual_seed(seed)
    plain = Run(program, distributed=False)
    lines: list[str] = []
    makers, weights = zip(*made_of.values, *made_of.writes, strict=True)
    writes = [maker for maker, _ in made_of.writes]
    count = rng.randint(5, 12) if count is None else count
    for _ in range(8 * count):
        if len(lines) == count:
            break
        choices = Choices(rng, plain.variables, len(mesh))
        maker: Maker = rng.choices(makers, weights)[0]
        try:
            line = maker(choices)
            line = line if maker in writes else f"v{len(lines)} = {line}"
            plain.step(line)
            if not all(torch.isfinite(v).all() and v.abs().sum() < 1e6 for v in plain.variables.values()):
                raise FloatingPointError
            if maker in writes:  # what was written in place may be what a gradient needs
                run(replace(program, lines=(*lines, line)), distributed=False)
        except Exception:  # not a line that torch can run: start again from the lines so far
            torch.manual_seed(seed)
            plain = Run(program, distributed=False)
            for known in lines:
                plain.step(known)
            continue
        lines.append(line)
    while lines:  # a line after a write may need what was there before: the lines before can be differentiated
        made = replace(program, lines=tuple(lines))
        try:
            run(made, distributed=False)
        except RuntimeError:
            lines.pop()
        else:
            return made
    return program


def _input(rng: random.Random, mesh: tuple[int, ...], name: str) -> Input:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 3))))
    kinds = ["R", "P", "Pavg", *(f"S{d}" for d in range(len(shape)) for _ in range(3))]
    placements = tuple(rng.choice(kinds) for _ in mesh)
    if rng.random() < 0.1:
        placements = tuple("Pmax" if p.startswith("P") else p for p in placements)
    if rng.random() < 0.1:
        placements = (f"S0:{rng.choice((2, 3))}", *("R" for _ in mesh[1:]))
    order = tuple(rng.sample(range(len(mesh)), len(mesh))) if rng.random() < 0.2 else None
    if rng.random() < ZIGZAGS:
        placements = tuple(p.replace("S", "Z") if ":" not in p else p for p in placements)
    if rng.random() < RAGGED:
        placements = tuple(p.replace("S", "G") if ":" not in p else p for p in placements)
    return Input(name, shape, placements, order)


# ---------------------------------------------------------------- making it small


def smaller(program: Program) -> Program:
    """A program that still fails, with fewer lines, simpler layouts and a smaller mesh."""
    while True:
        for candidate in _simpler(program):
            if check(candidate) is not None:
                program = candidate
                break
        else:
            return program


def _simpler(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
    for i in range(len(program.inputs)):
        if not any(program.inputs[i].name in line for line in program.lines) and len(program.inputs) > 1:
            yield replace(program, inputs=program.inputs[:i] + program.inputs[i + 1 :])
    if len(program.mesh) > 1 and not any("L(" in line or "T(" in line for line in program.lines):
        for axis in range(len(program.mesh)):
            kept = [a for a in range(len(program.mesh)) if a != axis]
            inputs = tuple(
                replace(i, placements=tuple(i.placements[a] for a in kept), order=None) for i in program.inputs
            )
            yield replace(program, mesh=tuple(program.mesh[a] for a in kept), inputs=inputs)
    if program.derivative != "first":
        yield replace(program, derivative="first")
    for i, given in enumerate(program.inputs):
        for axis, placement in enumerate(given.placements):
            if placement != "R":
                changed = (*given.placements[:axis], "R", *given.placements[axis + 1 :])
                inputs = (*program.inputs[:i], replace(given, placements=changed), *program.inputs[i + 1 :])
                yield replace(program, inputs=inputs)


def failure(program: Program) -> str | None:
    """The smallest failing program that can be made of one, as a script; None where it gives what plain torch gives."""
    if check(program) is None:
        return None
    small = smaller(program)
    return f"seed {program.seed}: {check(small)}\n{small.script()}\n"


def _failures(make: Callable[[int], Program], seeds: Sequence[int]) -> tuple[list[str], int, int]:
    """Of the programs of these seeds: those that fail, how many there are, and how many lines they have."""
    torch.set_num_threads(1)
    programs = list(map(make, seeds))
    found = [text for text in map(failure, programs) if text is not None]
    return found, len(programs), sum(len(program.lines) for program in programs)


def run_seeds(make: Callable[[int], Program], seed: int, count: int, jobs: int, at_once: int = 20) -> int:
    """Check the programs of `count` seeds in several processes, print those that fail; returns the exit status.

    Args:
        make: the program of a seed; a function that another process can import.
        seed: the first one.
        count: the number of programs.
        jobs: the number of processes.
        at_once: the number of programs that a process is given.
    """
    seeds = range(seed, seed + count)
    chunks = [seeds[i : i + at_once] for i in range(0, len(seeds), at_once)]
    found = ran = lines = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for failures, programs, length in pool.map(functools.partial(_failures, make), chunks):
            for text in failures:
                print(text, flush=True)
            found, ran, lines = found + len(failures), ran + programs, lines + length
    print(f"{ran} programs of {lines} lines in all from seed {seed}: {found} differ")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    return run_seeds(make, options.seed, options.programs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
