"""Random functions of DTensors, captured and eager, while their inputs and all that they read change between calls.

The operators are those of `tests.virtual.programs`; lines that read and write state of Python, modules and buffers come
on top, and gradients are computed inside. Results, layouts, memory that is shared, inputs and state that are written
to, gradients and random states must have the same bits after each call. A seed decides everything.

    python -m tests.virtual.captured_programs --programs 10000
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_tensor import parts_of
from tests.virtual.captured_comparison import bits, refusal, run_seeds
from tests.virtual.programs import DEFAULT, SIZES, Choices, Input, MakerSet, Program, Run, _whole, layout_of, make_of

CALLS = 5
CHANGED = 3  # the call before which something may change; before the next it may change back
MESHES = ((1,), *[(2,)] * 6, (3,), (3,), (4,), (2, 2), (2, 2), (1, 2), (2, 3))  # small ones more often
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16)
DERIVATIVES = ("none", "none", "first", "penalty", "hessian")
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {}, {"verify": False}, {"verify": False}, {"verify": False, "overlap": True}, {"remove_copies": False},
    {"verify": False, "share_gathers": 1 << 20}, {"verify": False, "remove_dead": True}, {"reads": "guard"},
)  # fmt: skip


# ---------------------------------------------------------------- what functions read besides their inputs


class Layer(nn.Module):
    """A module with a parameter, a buffer and a number."""

    def __init__(self, place: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.gain = nn.Parameter(place(torch.tensor(1.5, dtype=torch.float64)))
        self.register_buffer("seen", place(torch.zeros((), dtype=torch.float64)))
        self.slope = 0.1

    def forward(self, x: Any) -> Any:
        return F.leaky_relu(x, self.slope) * self.gain.to(x.dtype)


class State:
    """Python values, tensors and a generator."""

    def __init__(self, side: Run) -> None:
        self.scale, self.flag = 1.5, True
        self.table = {"a": 1.25, "b": 0.5}
        self.order = ["relu", "tanh"]
        self.kept: Any = None
        self.calls = 0
        self.layer = Layer(side.constant)
        self.generator = torch.Generator().manual_seed(5)
        self.factor = 2.0
        self.number = 0.25


def names_of(side: Run) -> dict[str, Any]:
    """The names by which lines use a state."""
    state = State(side)
    factor = state.factor

    def scaled(x: Any) -> Any:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    def ordered(x: Any) -> Any:
        for name in state.order:
            x = getattr(torch, name)(x)
        for value in state.table.values():
            x = x * value + 0.5
        return x

    return {"S": state, "M": state.layer, "scaled": scaled, "ordered": ordered, "set_factor": set_factor, "NUMBER": 2.0}


def _reading(c: Choices) -> str:
    x = c.name()
    return c.pick(
        f"{x} * S.scale", f"{x}.relu() if S.flag else {x}.tanh()", f"{x} + S.table['a']", f"M({x})", f"scaled({x})",
        f"ordered({x})", f"{x} * NUMBER", f"{x} + M.seen", f"S.layer({x}) - S.table.get('b', 3.0)",
        f"{x} + D(torch.rand((), generator=S.generator, dtype=torch.float64))", f"{x} * (S.number if S.flag else 2)",
        f"C(M, {x})", f"sum({x} * value for value in (1, S.scale))",
    )  # fmt: skip


def _detached(c: Choices) -> str:
    x, y = c.name(), c.name()
    return c.pick(
        f"{x}.detach()", f"{x}.detach().view_as({x})", f"{x}.detach().clone()", f"{x}.data", f"{y}.detach()",
        f"torch.empty_like({x}).copy_({x}.detach())", f"torch.zeros_like({x})", f"torch.ones_like({x}).tril()",
        f"{x}.detach().t()", f"{x}.detach()[0]", f"{x}.detach()[..., 1:]",
    )  # fmt: skip


def _effect(c: Choices) -> str:
    """A write to the state, or to an input."""
    x = c.name()
    part = f"{x}.detach()[{c.part(x)}]"
    return c.pick(
        f"M.seen.add_({x}.detach().mean())", f"M.seen.lerp_({x}.detach().sum().to(torch.float64), 0.1)",
        f"S.kept = {x}.detach()", f"S.kept = {x}.detach().clone()", "S.scale = S.scale", f"{x}.detach().mul_(0.5)",
        f"{part}.add_(0.5)", f"{part}.zero_()", f"{x}.data.clamp_(-1, 1)", f"{x}.add_(1)", f"{x}.copy_({x} * 0.5)",
        f"{x}[{c.part(x)}] = 0.5", f"{x}.detach().uniform_()", f"{x}.detach().copy_({x}.detach().flip(0))",
    )  # fmt: skip


MAKERS = MakerSet((*DEFAULT.values, (_reading, 5), (_detached, 2)), (*DEFAULT.writes, (_effect, 2)))


# ---------------------------------------------------------------- one function


def finish(kind: str, given: dict[str, Any], made: dict[str, Any], returned: tuple[str, ...]) -> dict[str, Any]:
    """Differentiate, and return some of the variables: as they are, or detached where autograd has a graph of them."""
    found: dict[str, Any] = {}
    parts = [(v * v.detach().cos()).sum() for v in made.values() if v.is_floating_point() and v.requires_grad]
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    total: Any = sum(part.to(torch.float64) for part in parts if part.requires_grad)
    if leaves and parts and parts[-1].requires_grad and kind == "first":
        total.backward()
    elif leaves and parts and parts[-1].requires_grad and kind != "none":
        grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        used = [grad for grad in grads if grad is not None]
        found["first"] = [grad.detach() for grad in used]
        squares: Any = [(grad * grad).sum() for grad in used if grad.requires_grad]
        if squares and kind == "penalty":
            sum(squares).backward()
        elif squares:
            found["second"] = torch.autograd.grad(sum(squares), leaves, allow_unused=True)
    for name in returned:
        value = made[name]
        found[name] = value.detach() if value.requires_grad and name not in given and kind != "first" else value
    return found


def make(seed: int) -> tuple[Program, random.Random]:
    """The program of a seed, and the randomness that is left."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    count = rng.randint(1, 3)
    inputs = tuple(_input(rng, mesh, f"x{at}") for at in range(count))
    kind = rng.choice(DERIVATIVES)
    program = Program(seed, mesh, inputs, (), kind, names_of)
    return make_of(program, rng, MAKERS, rng.randint(2, 7)), rng


def _input(rng: random.Random, mesh: tuple[int, ...], name: str) -> Input:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 3))))
    return Input(name, shape, _placements(rng, mesh, shape))


def _placements(rng: random.Random, mesh: tuple[int, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    kinds = ["R", "R", "P", *(f"S{d}" for d in range(len(shape)) for _ in range(3)), "Z0"]
    first = rng.choice([*kinds, "G0"])  # whose sizes are those of all of the dim
    return (first, *(rng.choice(kinds) for _ in mesh[1:]))


HEADS = {"": "if True:", "no_grad": "with torch.no_grad():", "inference": "with torch.inference_mode():"}


def made_by(program: Program) -> list[str]:
    """The variables of a program, its inputs among them."""
    first = [line.partition(" = ")[0] for line in program.lines]
    return [*(given.name for given in program.inputs), *(name for name in first if name.isidentifier()), "last"]


class Side:
    """One copy of a function with its state."""

    def __init__(self, program: Program, head: str, returned: tuple[str, ...], distributed: bool = True) -> None:
        self.program = program
        self.run = Run(program, distributed)
        self.run.inputs, self.run.variables = [], {}
        self.state: State = self.run.names["S"]
        names = [given.name for given in program.inputs]
        given = ", ".join(f"{name!r}: {name}" for name in names)
        made = ", ".join(f"{name!r}: {name}" for name in made_by(program))
        lines = [HEADS[head], *(f"    {line}" for line in program.lines), f"    last = {names[0]}.detach() * extra"]
        lines.append(f"return finish({program.derivative!r}, {{{given}}}, {{{made}}}, {returned!r})")
        text = f"def program({', '.join(names)}, extra=1.0):\n" + "".join(f"    {line}\n" for line in lines)
        self.names = {**self.run.names, "finish": finish}
        exec(compile(text, f"program_{program.seed}.py", "exec"), self.names)
        self.function: Callable[..., Any] = self.names["program"]
        self.given: list[Any] = []

    def place(self, given: Input, value: torch.Tensor, how: str) -> Any:
        """An input; "apart": its elements are not next to each other in memory."""
        mesh = self.run.mesh
        if mesh is None:
            return value
        placed: Any = sw.distribute_tensor(value, mesh, **layout_of(mesh, value.shape, given.placements))
        if how == "apart" and value.dim():
            local = torch.stack([placed.to_local(), placed.to_local()], -1)[..., 0]
            placed = sw.DTensor.from_local(local, mesh, placed.placements, shape=placed.shape)
        return placed

    def tensors(self, result: Any) -> dict[str, Any]:
        """All tensors that a caller can see, by name."""
        state, layer = self.state, self.state.layer
        found: dict[str, Any] = {f"input {at}": tensor for at, tensor in enumerate(self.given)}
        found |= {f"gradient of input {at}": tensor.grad for at, tensor in enumerate(self.given) if tensor.is_leaf}
        found |= {"gain": layer.gain, "gradient of gain": layer.gain.grad, "seen": layer.seen, "kept": state.kept}
        return found | {f"result {name}": value for name, value in _flat(result)}

    def values(self, result: Any) -> dict[str, Any]:
        """The values of all tensors, in whatever layout: a view whose base was written to is computed again."""
        tensors = {name: tensor for name, tensor in self.tensors(result).items() if isinstance(tensor, torch.Tensor)}
        with torch.no_grad():
            return {name: bits(_whole(tensor.detach()))[-1] for name, tensor in tensors.items()}

    def visible(self, result: Any) -> dict[str, Any]:
        """All that a caller can see, by name."""
        state = self.state
        tensors = self.tensors(result)
        found = {name: bits(value) for name, value in tensors.items()}
        found["memory"] = _memory(tensors)
        found |= {
            "scale": state.scale,
            "calls": state.calls,
            "table": state.table,
            "generator": state.generator.get_state().numpy().tobytes(),
        }
        return found | {"random": torch.get_rng_state().numpy().tobytes()}


def _flat(result: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in (result or {}).items():
        found += (
            [(f"{name}[{at}]", item) for at, item in enumerate(value)]
            if isinstance(value, list | tuple)
            else [(name, value)]
        )
    return found


def _memory(tensors: dict[str, Any]) -> list[Any]:
    """Of each tensor: which others it is, shares memory with, and where its elements are in it."""
    numbers: dict[Any, int] = {}
    found: list[Any] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            local = tensor._local_tensor if isinstance(tensor, sw.DTensor) else tensor
            same = numbers.setdefault(("tensor", id(tensor)), len(numbers))
            for part in parts_of(local):
                storage = numbers.setdefault(part.untyped_storage()._cdata, len(numbers))
                found.append((name, same, storage, part.stride(), part.storage_offset() if part.numel() else 0))
    return found


# ---------------------------------------------------------------- changes between calls


def _change(side: Side, what: str, number: float) -> None:
    """Change something that the function reads."""
    state, layer, names = side.state, side.state.layer, side.names
    match what:
        case "scale":
            state.scale = number
        case "flag":
            state.flag = number < 0.5
        case "table":
            state.table["a"] = number
        case "order of a table":
            state.table = dict(reversed(state.table.items()))
        case "new item":
            state.table["c"] = number
        case "list":
            state.order.reverse()
        case "closure":
            names["set_factor"](number)
        case "global":
            names["NUMBER"] = number
        case "attribute":
            layer.slope = number
        case "buffer":
            layer.seen.fill_(number)
        case "new buffer":
            layer.seen = layer.seen.clone()
        case "parameter":
            with torch.no_grad():
                layer.gain.mul_(number)
        case "new parameter":
            layer.gain = nn.Parameter(layer.gain.detach() * number)
        case "frozen":
            layer.gain.requires_grad_(not layer.gain.requires_grad)
        case "hook":
            layer.register_forward_hook(lambda module, args, out: out * number)  # pyright: ignore[reportOperatorIssue]
        case "tensor hook":
            if layer.gain.requires_grad:
                layer.gain.register_hook(lambda grad: grad * number)
        case "no gradient":
            layer.gain.grad = None
        case "seed":
            state.generator.manual_seed(int(100 * number))
        case "generator":
            state.generator = torch.Generator().manual_seed(int(100 * number))
        case "kept":
            state.kept = None
        case "mode":
            layer.train(number < 0.5)
        case "another name":
            state.extra = number  # pyright: ignore[reportAttributeAccessIssue]
        case _:
            raise AssertionError(what)


CHANGES = (
    "scale", "flag", "table", "order of a table", "new item", "list", "closure", "global", "attribute", "buffer",
    "new buffer", "parameter", "new parameter", "frozen", "hook", "tensor hook", "no gradient", "seed", "generator",
    "kept", "mode", "another name",
)  # fmt: skip
# How a call is made: other layouts, another of the inputs requires a gradient, one tensor in several places, ...
WAYS = ("layout", "requires_grad", "twice", "apart", "again", "extra", "no_grad", "inference", "autocast")


@contextlib.contextmanager
def _around(way: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "no_grad":
            stack.enter_context(torch.no_grad())
        elif way == "inference":
            stack.enter_context(torch.inference_mode())
        elif way == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        yield


def _give(side: Side, dtype: torch.dtype, call: int, way: str, at: int, placements: tuple[str, ...]) -> None:
    """The inputs of a call."""
    program, given = side.program, []
    for position, each in enumerate(program.inputs):
        value = each.value(program.seed * CALLS + call).to(dtype)
        chosen = position == at
        if chosen and way == "layout":
            each = replace(each, placements=placements)
        tensor = side.place(each, value, way if chosen else "")
        requires = program.derivative != "none" and not (chosen and way == "requires_grad")
        given.append(tensor.requires_grad_(requires))
    if way == "again" and side.given:
        given[at] = side.given[at]
    if way == "twice":
        for position, each in enumerate(program.inputs):
            if each.shape == program.inputs[at].shape:
                given[position] = given[at]
    side.given = given


# ---------------------------------------------------------------- comparing


def compare(seed: int, calls: int = CALLS) -> tuple[int, int]:
    """Run one seed; how many calls ran as programs, and how many programs there were. Raises where bits differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _compare(seed, calls)


def _call(side: Side, function: Callable[..., Any], way: str, start: int) -> tuple[Any, Exception | None]:
    torch.manual_seed(start)
    try:
        with _around(way):
            return function(*side.given, **({"extra": 2.0} if way == "extra" else {})), None
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return None, error


def _write(result: Any) -> list[str]:
    """Write to all results, one after the other, and say which writes torch refuses."""
    refused = []
    found = [(name, value) for name, value in _flat(result) if isinstance(value, torch.Tensor)]
    if any(value.requires_grad for _, value in found):  # torch tracks writes to memory that has a graph
        return refused
    for at, (name, value) in enumerate(found):
        if value.is_floating_point():
            try:
                with torch.no_grad():
                    value.mul_(0.5).add_(at + 1)
            except RuntimeError as error:
                refused.append(f"{name}: {type(error).__name__}")
    return refused


def _drawn(seed: int) -> tuple[Program, torch.dtype, random.Random]:
    """A program, and the dtype of its inputs: one that plain torch can run it with."""
    program, rng = make(seed)
    dtype = rng.choice(DTYPES)
    lines = tuple(line.replace("torch.float64", str(dtype)) for line in program.lines)
    other = replace(program, lines=lines)
    side = Side(other, "", (), distributed=False)
    _give(side, dtype, 0, "", 0, ())
    return (other, dtype, rng) if _call(side, side.function, "", seed)[1] is None else (program, torch.float64, rng)


def _compare(seed: int, calls: int) -> tuple[int, int]:
    program, dtype, rng = _drawn(seed)
    head = rng.choice(("", "", "", "no_grad", "inference")) if program.derivative == "none" else ""
    made = made_by(program)
    returned = tuple(rng.sample(made, rng.randint(1, len(made))))
    sides = [Side(program, head, returned) for _ in range(2)]
    step = captured(sides[1].function, **rng.choice(OPTIONS))
    ran, way, at, placements = 0, "", 0, ()
    for call in range(calls):
        if call == CHANGED and rng.random() < 0.5:
            change, number = rng.choice(CHANGES), rng.random()
            for side in sides:
                _change(side, change, number)
        if call >= CHANGED:
            way = rng.choice(WAYS) if rng.random() < 0.5 else "again" if rng.random() < 0.1 else ""
            at = rng.randrange(len(program.inputs))
            placements = _placements(rng, program.mesh, program.inputs[at].shape)
        writes = rng.random() < 0.5
        outcomes, errors = [], []
        for side, function in zip(sides, (sides[0].function, step), strict=True):
            _give(side, dtype, call, way, at, placements)
            was, before = side.visible(None) if function is step else {}, len(step.programs)
            result, error = _call(side, function, way, seed + call)
            if function is step:
                ran += len(step.programs) == before > 0 and error is None
                if isinstance(error, UnsupportedError) and errors[0] is None:
                    now = side.visible(None)
                    changed = [name for name in now if name != "random" and now[name] != was[name]]
                    assert not changed, f"seed {seed}, call {call}: refused ({error}), and {changed[:6]} changed"
                    raise refusal(error)
            errors.append(error)
            outcomes.append(side.visible(result))
            if writes:
                outcomes[-1]["refused writes"] = _write(result)
                outcomes[-1]["after writes"] = side.values(result)
        if type(errors[0]) is not type(errors[1]) and not (errors[0] and isinstance(errors[1], UnsupportedError)):
            raise AssertionError(f"seed {seed}, call {call}: eager raised {errors[0]!r}, captured {errors[1]!r}")
        different = [name for name in {**outcomes[0], **outcomes[1]} if outcomes[0].get(name) != outcomes[1].get(name)]
        if different:
            raise AssertionError(f"seed {seed}, call {call}, {way}: captured differs from eager in {different[:6]}")
    return ran, len(step.programs)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    return run_seeds(compare, CALLS, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
