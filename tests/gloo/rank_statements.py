"""What random programs about ranks consist of: plain tensors, locals, DTensors, writes, random numbers, modules.

A statement is one or more lines of Python that mean the same on virtual ranks and on processes. `each(...)` is a local
that differs from rank to rank, `fill(shape, k)` a tensor of fixed values. Draws nothing from torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PLACEMENTS = ("sw.Shard(0)", "sw.Replicate()", "sw.Partial()")


@dataclass
class Names:
    """The variables of a program, by what they are: names with shapes. `None` for the length of an uneven dim."""

    random: random.Random
    axes: int
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    local: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    dtensor: dict[str, tuple[int, ...]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)  # the locals that all ranks have alike
    count: int = 0

    def new(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def pick(self, options: Sequence[str]) -> str:
        return self.random.choice(options)

    def one_plain(self, *shapes: tuple[int, ...]) -> str:
        return self.random.choice([name for name, shape in self.plain.items() if not shapes or shape in shapes])

    def one_local(self, *shapes: tuple[int | None, ...]) -> str:
        """A local; mostly one that is alike on all ranks, so that programs do not end too soon."""
        fitting = [name for name, shape in self.local.items() if not shapes or shape in shapes]
        alike = [name for name in fitting if name in self.alike]
        return self.random.choice(alike if alike and self.random.random() < 0.8 else fitting)

    def add_local(self, name: str, shape: tuple[int | None, ...], *sources: str) -> None:
        """A new local computed from others."""
        self.local[name] = shape
        if all(source in self.alike or source not in self.local for source in sources):
            self.alike.add(name)

    def write_local(self, name: str, *sources: str) -> None:
        """A local that was written to."""
        if not all(source in self.alike or source not in self.local for source in sources):
            self.alike.discard(name)

    def one_dtensor(self, *shapes: tuple[int, ...]) -> str:
        return self.random.choice([name for name, shape in self.dtensor.items() if not shapes or shape in shapes])

    def placements(self, *options: str) -> str:
        return "[" + ", ".join(self.pick(options or PLACEMENTS) for _ in range(self.axes)) + "]"

    def number(self) -> int:
        return self.random.randrange(1, 9)


Statement = Callable[[Names], str]
ROW, MATRIX, SCALAR = (3,), (2, 3), ()


def beginning(names: Names) -> list[str]:
    """Some of everything."""
    lines = []
    for shape in (ROW, ROW, MATRIX, SCALAR):
        name = names.new("p")
        lines.append(f"{name} = fill({shape}, {names.number()})")
        names.plain[name] = shape
    for shape, length in (((8, 3), 2), ((6, 3), None), ((3,), 3), ((2, 3), 2)):
        name, part = names.new("d"), names.new("l")
        options = ("sw.Shard(0)",) if shape[0] > 3 else ("sw.Replicate()",)
        placements = names.placements(*options)
        lines.append(f"{name} = sw.distribute_tensor(fill({shape}, {names.number()}), mesh, {placements})")
        lines.append(f"{part} = {name}.to_local().clone()")
        names.dtensor[name] = shape
        names.local[part] = (length, 3)[-len(shape) :]
        if shape[0] <= 3:
            names.alike.add(part)
    for shape in (ROW, MATRIX):
        name = names.new("l")
        lines.append(f"{name} = each([fill({shape}, k) for k in range(4)])")
        names.local[name] = shape
    return lines


# ---------------------------------------------------------------- computing

UNARY = (".sin()", ".abs()", " * 2", ".neg()", ".exp().clamp(max=3)", ".clone()", ".sort(-1).values", ".cumsum(-1)")
BINARY = ("{} + {}", "{} * {}", "torch.maximum({}, {})", "torch.where({} > 0, {}, 0.5)", "{} - 2 * {}")


def compute_plain(names: Names) -> str:
    source, name = names.one_plain(), names.new("p")
    names.plain[name] = names.plain[source]
    return f"{name} = {source}{names.pick(UNARY[:6])}"


def compute_local(names: Names) -> str:
    name = names.new("l")
    if names.random.random() < 0.5:
        source = names.one_local()
        names.add_local(name, names.local[source], source)
        return f"{name} = {source}{names.pick(UNARY if len(names.local[source]) else UNARY[:6])}"
    source = names.one_local(ROW, MATRIX)
    shape = names.local[source]
    other = names.pick([names.one_plain(ROW, SCALAR), names.one_local(ROW), source])
    names.add_local(name, shape, source, other)
    return f"{name} = " + names.pick(BINARY).format(source, other)


def compute_dtensor(names: Names) -> str:
    source, name = names.one_dtensor(), names.new("d")
    names.dtensor[name] = names.dtensor[source]
    if names.random.random() < 0.5:
        return f"{name} = {source}{names.pick(UNARY)}"
    return f"{name} = {source}.redistribute(placements={names.placements('sw.Shard(0)', 'sw.Replicate()')})"


def reduce_local(names: Names) -> str:
    source, name = names.one_local(), names.new("l")
    how = names.pick((".sum()", ".mean()", ".max()", ".norm()", ".square().sum()"))
    names.add_local(name, SCALAR, source)
    return f"{name} = {source}{how}"


def gather(names: Names) -> str:
    source, name = names.one_dtensor(), names.new("p")
    names.plain[name] = names.dtensor[source]
    return f"{name} = {source}.full_tensor()"


def part_of(names: Names) -> str:
    source, name = names.one_dtensor(ROW, MATRIX), names.new("l")
    names.add_local(name, names.dtensor[source])
    return f"{name} = {source}.redistribute(placements={names.placements('sw.Replicate()')}).to_local()"


def combine_local(names: Names) -> str:
    source, name = names.one_local(ROW, MATRIX), names.new("d")
    names.dtensor[name] = names.local[source]  # pyright: ignore[reportArgumentType]
    return f"{name} = sw.DTensor.from_local({source}, mesh, {names.placements('sw.Partial()')}).redistribute()"


def shard_plain(names: Names) -> str:
    source, name = names.one_plain(ROW, MATRIX), names.new("d")
    names.dtensor[name] = names.plain[source]
    return f"{name} = sw.distribute_tensor({source}, mesh, {names.placements('sw.Shard(0)', 'sw.Replicate()')})"


def mix(names: Names) -> str:
    name, shape = names.new("d"), names.pick(["ROW", "MATRIX"])
    wanted = ROW if shape == "ROW" else MATRIX
    dtensor, plain = names.one_dtensor(wanted), names.one_plain(wanted)
    names.dtensor[name] = wanted
    return f"with sw.implicit_replication():\n    {name} = {dtensor} * {plain}"


def mix_local(names: Names) -> str:
    wanted = names.random.choice([ROW, MATRIX])
    dtensor, local, name = names.one_dtensor(wanted), names.one_local(wanted), names.new("d")
    names.dtensor[name] = wanted
    return names.pick(
        (f"with sw.implicit_replication():\n    {name} = {dtensor} + {local}", f"{name} = {dtensor} * {local}")
    )


def size(names: Names) -> str:
    source, name = names.one_local(*[shape for shape in names.local.values() if shape]), names.new("l")
    how = names.pick(
        (
            "{x} * {x}.shape[0]", "{x}.sum(0) / {x}.shape[0]", "{x}.sum() / {x}.numel()",
            "{x}.reshape({x}.shape[0], -1) + 1", "{x}.new_ones({x}.shape) + {x}", "{x}.view(-1).sum()",
            "torch.zeros({x}.shape) + {x}", "{x}[: {x}.size(0) // 2 + 1]", "{x} * len({x})",
            "sum(row.sum() for row in {x})",
        )
    )  # fmt: skip
    return f"{name} = " + how.format(x=source)


def view(names: Names) -> str:
    source, name = names.one_plain(MATRIX), names.new("p")
    names.plain[name] = ROW
    return f"{name} = {source}[{names.pick(('0', '1', '-1'))}]"


def view_local(names: Names) -> str:
    source, name = names.one_local(MATRIX), names.new("l")
    names.add_local(name, ROW, source)
    return f"{name} = {source}[{names.pick(('0', '1', '-1'))}]"


# ---------------------------------------------------------------- writing

INTO = (
    "{t}.add_({x})", "{t}.mul_({x})", "{t}.copy_({x})", "{t}.lerp_({x}, 0.25)", "{t}.addcmul_({x}, {x})",
    "{t}.addcdiv_({x}, {x}.abs() + 1)", "torch.add({x}, 1, out={t})", "torch._foreach_add_([{t}], [{x}])",
    "torch._foreach_mul_([{t}, {t}], [{x}, {x}])", "{t}[1] = {x}[1]", "{t}[{x} > 0] = 0.5", "{t} += {x}",
    "{t}[:2] *= {x}[:2]",
    "{t}.masked_fill_({x} > 0.2, 1.5)", "torch.where({x} > 0, {x}, {t}, out={t})", "{t}.clamp_(max={x})",
)  # fmt: skip
INTO_ROW = (
    "{t}.index_add_(0, torch.tensor([0, 2, 2]), {x})", "{t}.scatter_add_(0, torch.tensor([1, 1, 0]), {x})",
    "{t}[torch.tensor([2, 0])] = {x}[:2]", "{t}.put_(torch.tensor([0, 1]), {x}[1:], accumulate=True)",
    "{t}.view(3, 1)[1:].add_({x}[1:, None])", "torch._foreach_add_([{t}, {t}[1:]], [{x}, {x}[1:]])",
    "order = torch.zeros(3, dtype=torch.int64)\ntorch.sort({x}, out=({t}, order))",
    "{t}.index_copy_(0, torch.tensor([1]), {x}[:1])",
)  # fmt: skip


def write_to_plain(names: Names) -> str:
    shape = names.random.choice([ROW, ROW, MATRIX])
    target, source = names.one_plain(shape), names.one_local(shape)
    return names.pick(INTO + INTO_ROW if shape == ROW else INTO).format(t=target, x=source)


def write_to_local(names: Names) -> str:
    shape = names.random.choice([ROW, MATRIX])
    target = names.one_local(shape)
    source = names.pick([names.one_plain(shape), names.one_local(shape)])
    names.write_local(target, source)
    return names.pick(INTO + INTO_ROW if shape == ROW else INTO).format(t=target, x=source)


def add_up(names: Names) -> str:
    target, source = names.one_plain(SCALAR), names.one_local()
    return f"{target} += {source}.sum()"


def write_dtensor(names: Names) -> str:
    shape = names.random.choice([ROW, MATRIX])
    target = names.one_dtensor(shape)
    source = names.pick([names.one_dtensor(shape), names.one_plain(shape)])
    how = names.pick(("{t}.add_({x})", "{t}.copy_({x})", "{t}.mul_({x})", "torch._foreach_add_([{t}], [{x}])"))
    return "with sw.implicit_replication():\n    " + how.format(t=target, x=source)


def write_dtensor_to_plain(names: Names) -> str:
    shape = names.random.choice([ROW, MATRIX])
    target, source = names.one_plain(shape), names.one_dtensor(shape)
    how = names.pick(
        (
            "{t}.add_({x})", "{t}.copy_({x})", "{t}.lerp_({x}, 0.5)", "torch._foreach_add_([{t}], [{x}])",
            "torch._foreach_lerp_([{t}], [{x}], 0.5)", "torch._foreach_addcmul_([{t}], [{x}], [{x}], 0.5)",
            "torch.add({x}, 1, out={t})",
        )
    )  # fmt: skip
    return "with sw.implicit_replication():\n    " + how.format(t=target, x=source)


def write_local_of_dtensor(names: Names) -> str:
    return f"{names.one_dtensor()}.to_local().{names.pick(('mul_(2)', 'add_(1)', 'sin_()', 'zero_()'))}"


def assign_data(names: Names) -> str:
    shape = names.random.choice([ROW, MATRIX])
    target, source = names.one_local(shape), names.one_local(shape)
    names.write_local(target, source)
    return f"{target}.data = {source}.clone()"


def reshape_in_place(names: Names) -> str:
    target = names.one_local(MATRIX)
    return names.pick(
        (
            f"{target}.t_()\n{target}.mul_(2)\n{target}.t_()",
            f"{target}.unsqueeze_(0)\n{target} += 1\n{target}.squeeze_(0)",
            f"{target}.resize_(3, 3).fill_(1)\n{names.new('p')} = torch.ones({target}.shape)\n{target}.resize_(2, 3)",
            f"{target}.set_({names.one_local(MATRIX)}.clone())",
        )
    )


def write_array(names: Names) -> str:
    return f"{names.one_plain(ROW)}.numpy()[1] += 2"


def read_number(names: Names) -> str:
    name = names.new("s")
    source = names.pick([names.one_local(), names.one_plain()])
    return f"{name} = float({source}.sum())\n{names.one_plain(ROW)}.mul_({name})"


# ---------------------------------------------------------------- random numbers

DRAWS = (
    "F.dropout({x}, 0.5)", "torch.rand_like({x})", "torch.randn_like({x})", "torch.bernoulli({x}.sigmoid())",
    "{x}.clone().normal_()", "{x}.clone().uniform_(generator=generator)", "torch.normal({x}, 0.5)",
    "F.gumbel_softmax({x})",
    "F.rrelu({x}, training=True)", "checkpoint(lambda x: F.dropout(x.sin(), 0.5), {x}, use_reentrant=False)",
    "torch.poisson({x}.abs() * 3)",
)  # fmt: skip


def draw_local(names: Names) -> str:
    source, name = names.one_local(), names.new("l")
    if len(names.local[source]) == 0:
        source = names.one_local(ROW)
    names.add_local(name, names.local[source], source)
    return f"{name} = " + names.pick(DRAWS).format(x=source)


def draw_plain(names: Names) -> str:
    name = names.new("p")
    names.plain[name] = ROW
    return f"{name} = torch.{names.pick(('rand', 'randn'))}(3, dtype=torch.float64)"


def draw_dtensor(names: Names) -> str:
    source, name = names.one_dtensor(), names.new("d")
    names.dtensor[name] = names.dtensor[source]
    return f"{name} = " + names.pick(("F.dropout({x}, 0.5)", "torch.rand_like({x})", "{x}.clone().normal_()")).format(
        x=source
    )


def draw_many(names: Names) -> str:
    source, name = names.one_local(ROW, MATRIX), names.new("i")
    return f"{name} = torch.multinomial({source}.abs() + 0.1, 2, replacement={names.random.random() < 0.5})"


def draw_into_plain(names: Names) -> str:
    return f"{names.one_plain(ROW)}.bernoulli_({names.one_local(ROW)}.sigmoid())"


def seed(names: Names) -> str:
    number = names.number()
    return names.pick(
        (
            f"torch.manual_seed({number})",
            f"generator.manual_seed({number})",
            "state = torch.get_rng_state()\ntorch.rand(2)\ntorch.set_rng_state(state)",
            "with torch.random.fork_rng():\n    torch.rand(5)",
        )
    )


# ---------------------------------------------------------------- modules, gradients, optimizers

OPTIMIZERS = (
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9)",
    "torch.optim.SGD({p}, lr=0.1, foreach=True)",
    "torch.optim.Adam({p}, lr=0.1, foreach=True)",
    "torch.optim.AdamW({p}, lr=0.1, foreach=False)",
    "torch.optim.AdamW({p}, lr=0.1, fused=True)",
    "torch.optim.RMSprop({p}, lr=0.1, foreach=True)",
)


def batch_norm(names: Names) -> str:
    name, kind = names.new("m"), names.pick(("plain", "fully_shard", "replicate"))
    names.modules[name] = "norm"
    made = f"{name} = nn.BatchNorm1d(3, dtype=torch.float64)"
    return made if kind == "plain" else f"{made}\nsw.{kind}({name}, mesh)"


def run_norm(names: Names) -> str:
    modules = [name for name, kind in names.modules.items() if kind == "norm"]
    module, name = names.pick(modules), names.new("l")
    source = names.pick([names.one_local(MATRIX), names.one_plain(MATRIX), names.one_dtensor(MATRIX)])
    mode = names.pick(("train", "train", "eval"))
    return f"with sw.implicit_replication():\n    {module}.{mode}()\n    {name} = {module}({source})"


def linear(names: Names) -> str:
    name = names.new("m")
    names.modules[name] = "linear"
    torch_seed = f"torch.manual_seed({names.number()})"
    plain = f"{torch_seed}\n{name} = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()"
    column = "sw.parallel.ColwiseParallel(output_layouts=sw.Replicate())"
    made = names.pick(
        (
            "",
            f"sw.parallel.parallelize_module({name}, tp, {{'0': {column}}})",
            f"sw.parallel.parallelize_module({name}, tp, {{'0': {column}, '2': {column}}})",
            f"sw.fully_shard({name}, mesh)",
            f"sw.replicate({name}, mesh)",
        )
    )
    optimizer = names.pick(OPTIMIZERS).format(p=f"{name}.parameters()")
    return f"{plain}\n{made}\n{name}_optimizer = {optimizer}"


def train(names: Names) -> str:
    modules = [name for name, kind in names.modules.items() if kind == "linear"]
    module = names.pick(modules)
    source = names.pick([names.one_local(MATRIX), names.one_local(MATRIX), names.one_plain(MATRIX)])
    closure = (
        f"def closure():\n    {module}_optimizer.zero_grad()\n    loss = {module}({source}.detach()).square().mean()\n"
        f"    loss.backward()\n    return loss\n"
    )
    step = names.pick((f"{module}_loss = {module}_optimizer.step(closure)", "closure()"))
    return closure + step


def weight(names: Names) -> str:
    """A leaf of its own, and its gradient by a local, a DTensor or a plain tensor; accumulated, or by an optimizer."""
    name = names.new("w")
    plain, placements = f"fill((3,), {names.number()})", names.placements("sw.Shard(0)", "sw.Replicate()")
    make = names.pick((plain, f"sw.distribute_tensor({plain}, mesh, {placements})"))
    names.modules[name] = "weight"
    optimizer = names.pick(OPTIMIZERS).format(p=f"[{name}]")
    return f"{name} = nn.Parameter({make})\n{name}_optimizer = {optimizer}"


def backward(names: Names) -> str:
    name = names.pick([name for name, kind in names.modules.items() if kind == "weight"])
    source = names.pick([names.one_local(ROW, MATRIX), names.one_plain(ROW), names.one_dtensor(ROW, MATRIX)])
    use = names.pick(("{w} * {x}", "({w} + {x}).sin()", "({w} * {x}).square()", "F.dropout({w} * {x}, 0.5)"))
    loss = "(" + use.format(w=name, x=source) + ")" + names.pick((".sum()", ".mean()"))
    return f"with sw.implicit_replication():\n    {loss}.backward()"


def backward_of_sum(names: Names) -> str:
    name = names.pick([name for name, kind in names.modules.items() if kind == "weight"])
    source = names.one_local(ROW)
    return (
        f"total = torch.zeros((), dtype=torch.float64)\n"
        f"with sw.implicit_replication():\n"
        f"    part = {name}.to_local() if isinstance({name}, sw.DTensor) else {name}\n"
        f"    total += (part * {names.pick((source, '2'))}).sum()\n    total.backward()"
    )


UNEVEN = (
    "({x} * {p}).mean()", "{x}.mean(0).square().sum()", "{x}.softmax(0).square().sum()",
    "F.linear({x}, {p}[None]).square().mean()", "({x}.t() @ {x}).sin().sum()", "{x}.reshape(-1).square().mean()",
    "F.layer_norm({x}, (3,), {p}).pow(3).sum()", "torch.cat([{x}, {x} * {p}]).square().mean()",
    "{x}.flatten().sin().sum()", "{x}[:1].sum() * {x}.mean()", "{x}.std(0).sum()",
    "F.normalize({x}, dim=0).mul({p}).sum()", "{x}.sort(0).values.mul({p}).cumsum(0).mean()",
    "{x}.repeat(2, 1).mul({p}).var()", "torch.stack([{x}, {x}]).mean(0).mul({p}).square().sum()",
    "{x}.amax(0).mul({p}).sum()", "F.dropout({x}, 0.5).mean()", "{x}.norm() * {p}.sum()",
    "F.mse_loss({x}, {x}.detach() + {p})", "{x}.masked_select({x} > 0).sum()",
)  # fmt: skip


def differentiate(names: Names) -> str:
    """The gradient of a DTensor by what is computed from its local, of even and of uneven shards."""
    name, rows = names.new("u"), names.random.choice([4, 6, 7, 8])
    loss = names.pick(UNEVEN).format(x=f"{name}.to_local()", p=names.one_plain(ROW))
    made = f"sw.distribute_tensor(fill(({rows}, 3), {names.number()}), mesh, {names.placements('sw.Shard(0)')})"
    return f"{name} = {made}.requires_grad_()\n{name}_loss = {loss}\n{name}_loss.backward()"


def plan(names: Names) -> str:
    """A layer whose result is a local, forward and backward."""
    name, rows = names.new("m"), names.random.choice([4, 6, 8])
    module, style, given = names.random.choice(
        [
            ("nn.Linear(3, 4)", "ColwiseParallel(use_local_output=True)", "fill((2, 3), 2)"),
            ("nn.Linear(3, 6)", "ColwiseParallel(use_local_output=True)", "fill((2, 3), 2)"),
            (
                "nn.Linear(8, 3)",
                "RowwiseParallel(input_layouts=sw.Replicate(), use_local_output=True)",
                "fill((2, 8), 2)",
            ),
            ("nn.LayerNorm(3)", "SequenceParallel(use_local_output=True)", f"seq(fill((1, {rows}, 3), 3))"),
            ("nn.Embedding(6, 4)", "RowwiseParallel(input_layouts=sw.Replicate())", "torch.tensor([[0, 5, 2]])"),
        ]
    )
    after = names.pick(("{y}.square().mean()", "F.dropout({y}, 0.5).sum()", "{y}.sin().sum() / {y}.shape[-1]"))
    return (
        f"torch.manual_seed({names.number()})\n{name} = nn.Sequential({module}.double())\n"
        f"sw.parallel.parallelize_module({name}, tp, {{'0': sw.parallel.{style}}})\n"
        f"{name}_result = {name}({given})\n{name}_loss = {after.format(y=f'{name}_result')}\n{name}_loss.backward()"
    )


def step(names: Names) -> str:
    name = names.pick([name for name, kind in names.modules.items() if kind != "norm"])
    return names.pick((f"{name}_optimizer.step()", f"{name}_optimizer.step()", f"{name}_optimizer.zero_grad()"))


STATEMENTS: tuple[tuple[float, Statement], ...] = (
    (1, compute_plain), (3, compute_local), (1, compute_dtensor), (1, reduce_local), (1, gather), (1.5, part_of),
    (1, view), (1, combine_local), (1, shard_plain), (1, mix), (1, view_local), (4, write_to_plain),
    (3, write_to_local), (1, add_up), (1, write_dtensor), (1.5, write_dtensor_to_plain),
    (0.5, write_local_of_dtensor), (0.5, assign_data), (0.3, write_array), (0.3, reshape_in_place),
    (0.5, read_number), (3, draw_local), (0.5, draw_plain), (1, draw_dtensor), (0.5, draw_many),
    (0.5, draw_into_plain), (0.5, seed), (0.7, batch_norm), (1, run_norm), (0.7, linear), (2, train), (1, weight),
    (2, backward), (1.5, differentiate), (1, plan), (0.7, size),
    (0.3, mix_local), (1, backward_of_sum), (1.5, step),
)  # fmt: skip


def statements(seed: int, length: int) -> tuple[tuple[int, ...], list[str]]:
    """The shape of a mesh of four ranks, and a program."""
    choose = random.Random(seed)
    mesh = choose.choice([(4,), (4,), (2, 2)])
    names = Names(choose, len(mesh))
    lines = beginning(names)
    weights, makers = zip(*STATEMENTS, strict=True)
    while length:
        make = choose.choices(makers, weights)[0]
        try:
            lines.append(make(names))
        except IndexError:  # no variable of the kind that it needs
            continue
        length -= 1
    return mesh, lines
