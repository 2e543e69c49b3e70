"""Random programs along sharded sequences and images: attention, windows, convolutions, pooling, scans, indexing.

As `programs`, with other lines: of tensors (samples, heads or channels, tokens or rows, width), of which the third dim
is mostly sharded, in uneven and empty shards, zigzags, and over several axes. Some programs are differentiated twice,
in forward mode, by one input alone, transformed by `torch.func`, or compiled.

    python -m tests.virtual.sequence_programs --programs 1000 --jobs 2
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Sequence

import torch

from tests.virtual.programs import Choices, Input, MakerSet, Program, make_of, run_seeds

MESHES = ((3,), (4,), (2, 2), (2, 3), (2, 2, 2))
ROWS = (2, 3, 5, 6, 7, 8, 9, 12, 13)
WIDTHS = (3, 4, 5, 8)
WAYS = (None, "ring", "gather", "heads", "halo")
MODES = ("first",) * 4 + ("penalty", "hessian", "forward", "some", "function", "compiled")


def _constant(*shape: int) -> str:
    count = 1
    for size in shape:
        count *= size
    return f"D(torch.linspace(-1, 1, {count}, dtype=torch.float64).sin().reshape({list(shape)}))"


def _mask(c: Choices, rows: int, columns: int, shape: torch.Size) -> str:
    """An argument for a mask."""
    near = f"torch.ones({rows}, {columns}, dtype=torch.bool).tril({c.pick(0, 1, 2)}).triu(-{c.pick(0, 1, 3)})"
    sinks = f"({near} | (torch.arange({columns}) < {c.pick(1, 2)}))"
    documents = f"(torch.arange({rows})[:, None] // 4 == torch.arange({columns}) // 4)"
    padding = f"(torch.arange({columns}) < {max(1, columns - 2)}).expand({shape[0]}, 1, 1, {columns})"
    of_heads = f"torch.linspace(-1, 1, {shape[1]}, dtype=torch.float64).view(-1, 1, 1) * {_bias(rows, columns)}"
    return c.pick(
        "None", near, f"D({near})", f"D({sinks})", sinks, f"D({documents})", documents, f"D({padding})",
        f"D({_bias(rows, columns)})", f"D({of_heads})", f"D({_bias(rows, columns)}.masked_fill(~{near}, -torch.inf))",
    )  # fmt: skip


def _bias(rows: int, columns: int) -> str:
    return f"torch.linspace(-1, 1, {rows * columns}, dtype=torch.float64).reshape({rows}, {columns})"


def _attention(c: Choices) -> str:
    q = c.name(ndim=4)
    shape = c.shape(q)
    if len(shape) > 4:
        raise ValueError(q)
    fitting = [
        n for n, v in c.variables.items()
        if v.dtype.is_floating_point and v.dim() == 4 and v.shape[:2] == shape[:2] and v.shape[3] == shape[3]
    ]  # fmt: skip
    k = c.rng.choice([*fitting, q])
    columns, rows = c.shape(k)[2], shape[2]
    few = c.pick(False, False, True) and shape[1] % 2 == 0
    groups, enable = ("[:, ::2]", ", enable_gqa=True") if few else ("", "")
    v = c.pick(k, f"{k}.sin()", f"{k}.flip(2)", f"{k}[..., :2]")
    causal = c.pick(False, False, True)
    mask = "None" if causal else _mask(c, rows, columns, shape)
    options = f"is_causal={causal}{enable}, math={c.pick(False, False, True)}"
    options += c.pick("", "", ", scale=0.3", ", dropout_p=0.3")
    plain = f"{q}, {k}{groups}, ({v}){groups}, {mask}"
    return c.pick(
        f"A({c.pick(*WAYS)!r}, {plain}, {options})", f"A({c.pick(*WAYS)!r}, {plain}, {options})",
        f"A({c.pick(*WAYS)!r}, {q}.transpose(1, 2), {k}{groups}.transpose(1, 2), ({v}){groups}.transpose(1, 2))",
        f"C(lambda q, k: A({c.pick(*WAYS)!r}, q, k, k.tanh(), {mask}, is_causal={causal}), {q}, {k})",
        f"F.multi_head_attention_forward({q}[0].transpose(0, 1), {k}[0].transpose(0, 1), {k}[0].transpose(0, 1), "
        f"{shape[3]}, 1, {_constant(3 * shape[3], shape[3])}, None, None, None, False, 0.0, "
        f"{_constant(shape[3], shape[3])}, None, need_weights=False)[0]",
    )  # fmt: skip


def _convolution(c: Choices) -> str:
    x = c.name(ndim=3)
    shape, dims = c.shape(x), len(c.shape(x)) - 2
    if dims > 2:
        raise ValueError(x)
    channels, size = shape[1], c.pick(1, 2, 3, 4)
    kernel = [size, *(c.pick(1, 2, 3) for _ in range(dims - 1))]
    stride, padding, dilation = c.pick(1, 1, 2, 3), c.pick(0, 1, 2), c.pick(1, 1, 2)
    each = f"stride={stride}, padding={padding}, dilation={dilation}"
    out = c.pick(2, 3)
    transposed = f"F.conv_transpose{dims}d({x}, {_constant(channels, out, *kernel)}, {each}"
    weight = c.pick(_constant(out, channels, *kernel), f"{_constant(out, channels, *kernel)} * {x}.mean()")
    return c.pick(
        f"F.conv{dims}d({x}, {weight}, {each})", f"F.conv{dims}d({x}, {weight}, {_constant(out)}, {each})",
        f"F.conv{dims}d({x}, {weight}, padding='same', dilation={dilation})",
        f"F.conv{dims}d(F.pad({x}, {[0, 0] * (dims - 1) + [size - 1, 0]}), {_constant(channels, 1, *kernel)}, "
        f"groups={channels})",
        f"{transposed})", f"{transposed}, output_padding={c.pick(0, 1)})",
        f"F.conv{dims}d({x}.transpose(0, 1), {_constant(out, shape[0], *kernel)}, {each})",
    )  # fmt: skip


def _pooling(c: Choices) -> str:
    x = c.name(ndim=3)
    shape, dims = c.shape(x), len(c.shape(x)) - 2
    if dims > 2:
        raise ValueError(x)
    size, stride, padding = c.pick(2, 3, 4), c.pick(1, 2, 3), c.pick(0, 1)
    to = [c.pick(1, 2, max(1, n - 1), n + 1, 2 * n) for n in shape[2:]]
    mode = {1: "linear", 2: c.pick("bilinear", "bicubic")}[dims]
    corners, ceil, counted = c.pick(True, False), c.pick(True, False), c.pick(True, False)
    pads = [c.pick(0, 1, 2) for _ in range(2 * dims)]
    kind = c.pick("reflect", "replicate", "circular", "constant")
    return c.pick(
        f"F.avg_pool{dims}d({x}, {size}, {stride}, {padding}, ceil_mode={ceil}, count_include_pad={counted})",
        f"F.max_pool{dims}d({x}, {size}, {stride}, {padding}, dilation={c.pick(1, 2)}, ceil_mode={ceil})",
        f"F.adaptive_avg_pool{dims}d({x}, {to})", f"F.adaptive_max_pool{dims}d({x}, {to})",
        f"F.lp_pool{dims}d({x}.abs() + 0.1, 2, {size}, {stride})", f"F.interpolate({x}, size={to}, mode='nearest')",
        f"F.interpolate({x}, size={to}, mode='{mode}', align_corners={corners})",
        f"F.interpolate({x}, scale_factor={c.pick(0.6, 1.4, 2)}, mode='{mode}')",
        f"F.interpolate({x}, scale_factor={c.pick(0.6, 1.4, 2)}, mode='nearest-exact')",
        f"F.pad({x}, {pads}, mode='{kind}')", f"F.pad({x}, {[-1, 1] * dims})", f"F.pad({x}, {pads}, value=0.5)",
        f"F.unfold({x}, {[min(size, n) for n in shape[2:]]}, stride={stride})" if dims == 2 else f"{x}.unfold(2, 2, 1)",
        f"F.local_response_norm({x}, 2)",
    )  # fmt: skip


def _shift(c: Choices) -> str:
    x = c.name(ndim=2)
    shape, dim = c.shape(x), c.pick(2, 2, 1, -1) if len(c.shape(x)) > 2 else c.dim(x)
    size = shape[dim]
    at = ":, " * (dim % len(shape))
    step, begin, width = c.pick(1, 2, 3), c.pick(0, 1, 2), min(size, c.pick(2, 3, 4))
    return c.pick(
        f"{x}.roll({c.pick(1, -2, size // 2, size + 3)}, {dim})", f"{x}.diff(n={c.pick(1, 2)}, dim={dim})",
        f"{x}[{at}{begin}:]", f"{x}[{at}:-{step}]", f"{x}[{at}{begin}::{step}]", f"{x}.flip({dim})",
        f"{x}[{at}2:] - 2 * {x}[{at}1:-1] + {x}[{at}:-2]", f"{x}.unfold({dim}, {width}, {step}).mean(-1)",
        f"{x}.unfold({dim}, {width}, {step})", f"torch.gradient({x}, dim={dim % len(shape)})[0]",
        f"torch.cat([{x}[{at}1:], {x}[{at}:1]], {dim})", f"torch.cat([{x}, {x}[{at}:{begin}]], {dim})",
        f"{x}.roll((1, 2), ({dim}, 0))", f"torch.cat([torch.zeros_like({x}[{at}:1]), {x}[{at}:-1]], {dim})",
        f"{x}.unfold({dim}, {width}, {step}).median(-1).values", f"{x}.repeat_interleave(2, {dim})",
        f"{x}.tensor_split(3, {dim})[1]", f"{x}.split({step + 1}, {dim})[-1]", f"{x}.select({dim}, {size - 1})",
        f"torch.rot90({x}, 1, (0, {dim}))", f"torch.trapezoid({x}, dim={dim})", f"{x}.narrow({dim}, {begin}, 1)",
        f"torch.cumulative_trapezoid({x}, dim={dim})", f"{x}.swapaxes(0, {dim}).contiguous()",
    )  # fmt: skip


def _scan(c: Choices) -> str:
    x = c.name(ndim=2)
    dim = c.pick(2, 2, 1, 0, -1) if len(c.shape(x)) > 2 else c.dim(x)
    return c.pick(
        f"{x}.cumsum({dim})", f"{x}.cumprod({dim})", f"{x}.logcumsumexp({dim})", f"{x}.cummax({dim}).values",
        f"{x}.cummin({dim}).values", f"{x}.flip({dim}).cumsum({dim}).flip({dim})", f"{x}.cumsum({dim}).exp() / 50",
        f"({x}.abs() + 0.5).log().cumsum({dim}).exp().clamp(max=9)", f"{x}.tanh().cumprod({dim}).cumsum({dim})",
        f"{x}.cummax({dim}).indices", f"{x}.softmax({dim}).cumsum({dim})", f"{x}.logsumexp({dim})",
        f"({x}.cumsum({dim}) - {x})", f"{x}.to(torch.float32).cumsum({dim}).to(torch.float64).round(decimals=3)",
    )  # fmt: skip


def _index(c: Choices) -> str:
    x = c.name(ndim=2)
    shape, dim = c.shape(x), c.dim(x)
    size = shape[dim]
    index = [c.rng.randrange(size) for _ in range(c.pick(1, 3, 5))]
    at = f"D(torch.tensor({index}))"
    return c.pick(
        f"{x}[:, {c.rng.randrange(shape[1])}]", f"{x}.index_select({dim}, {at})", f"{x}[..., -1:]", f"{x}[:, None]",
        f"{x}[:, D(torch.tensor({[i % shape[1] for i in index]}))]", f"{x}[{c.part(x)}]", f"{x}[{c.part(x)}]",
        f"{x}.gather({dim}, {x}.argsort({dim}))", f"{x}.index_add({dim}, {at}, {x}.index_select({dim}, {at}))",
        f"torch.where(D(torch.arange({shape[-1]}) % 2 == 0), {x}, 0.5)", f"{x} * D(torch.arange({shape[-1]}) / 3.0)",
        f"{x}.masked_fill({x} > 0.4, -0.3)", f"{x}.index_fill({dim}, {at}, 0.25)", f"{x}.take_along_dim({at})",
        f"{x}.slice_scatter({x}.narrow({dim}, 0, 1) * 2, {dim}, 0, 1)", f"{x}.tril()", f"{x}.mT.triu(1)",
        f"{x}.select_scatter({x}.select({dim}, 0) * 2, {dim}, {size - 1})",
    )  # fmt: skip


def _shape(c: Choices) -> str:
    x = c.name(ndim=2)
    n = len(c.shape(x))
    order = c.rng.sample(range(n), n)
    weight = _constant(c.shape(x)[-1], 4)
    return c.pick(
        f"{x}.permute({order})", f"{x}.transpose(1, -1).contiguous()", f"{x}.flatten(0, 1)", f"{x}.unsqueeze(0)",
        f"{x}.unsqueeze(2)", f"{x} @ {weight}", f"({x} @ {weight}).unflatten(-1, (2, 2))", f"{x}.mT @ {x}",
        f"{x}.mean({c.dim(x)}, keepdim=True) + {x}", f"{x}.squeeze()", f"{x}.sum({c.dim(x)})",
        f"{x}.softmax(-1) @ {x}.mT",
        f"F.layer_norm({x}, [{c.shape(x)[-1]}])", f"F.instance_norm({x})", f"F.group_norm({x}, 1)",
        f"F.dropout({x}, 0.2)",
        f"F.batch_norm({x}, None, None, training=True)", f"{x}.tanh()", f"{x} * 0.5", f"{x} + {c.like(x)}",
    )  # fmt: skip


def _layout(c: Choices) -> str:
    x = c.name(ndim=1)
    ndim = len(c.shape(x))
    placements = [c.rng.choice(["R", *(f"S{d}" for d in range(ndim)), *(f"Z{d}" for d in range(ndim))])
                  for _ in range(c.axes)]  # fmt: skip
    return f"L({x}, {', '.join(map(repr, placements))})"


def _write(c: Choices) -> str:
    x = c.inner(ndim=2)
    dim = c.dim(x)
    at = ":, " * (dim % len(c.shape(x)))
    return c.pick(
        f"{x}[{c.part(x)}] = 0.25", f"{x}[{at}1:] = {x}[{at}:-1].clone()", f"{x}[{at}::2] *= 2", f"{x}.mul_(0.5)",
        f"{x}[{at}-1:].add_(1)", f"{x}.narrow({dim}, 0, 1).copy_({x}.narrow({dim}, 1, 1))", f"{x}.tanh_()",
        f"{x}.masked_fill_({x} > 0.5, 0.1)", f"{x}.transpose(0, -1).mul_(2)", f"{x}.cumsum_({dim})",
        f"{x}[{at}1:] += {x}[{at}:-1].clone()", f"{x}.index_fill_({dim}, D(torch.tensor([0])), 0.5)",
        f"{x}[{x} > 0.2] = 0.1",
    )  # fmt: skip


MAKERS = MakerSet(
    (
        (_attention, 5),
        (_convolution, 4),
        (_pooling, 4),
        (_shift, 4),
        (_scan, 2),
        (_index, 2),
        (_shape, 3),
        (_layout, 1),
    ),
    ((_write, 2),),
)


def make(seed: int, modes: Sequence[str] = MODES) -> Program:
    """The program of a seed: 2 or 3 tensors, 3 to 7 lines."""
    rng = random.Random(f"sequence {seed}")
    mesh = rng.choice(MESHES)
    batch, heads, width = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 4)), rng.choice(WIDTHS)
    inputs = tuple(
        _input(rng, mesh, f"x{i}", (batch, heads, rng.choice(ROWS), width)) for i in range(rng.choice((1, 2, 3)))
    )
    program = Program(seed, mesh, inputs, (), rng.choice(modes))
    # torch's compiler refuses writes to DTensors that a graph gets from another one
    makers = MAKERS._replace(writes=()) if program.derivative == "compiled" else MAKERS
    return make_of(program, rng, makers, rng.randint(3, 7))


def _input(rng: random.Random, mesh: tuple[int, ...], name: str, shape: tuple[int, ...]) -> Input:
    if rng.random() < 0.2:
        shape = shape[1:]  # a sequence, or an image of one dim
    kind = rng.choice("SSSZ")
    tokens = rng.randrange(len(mesh))
    rest = ["R", "P", *(f"{kind}{dim}" for dim in range(len(shape)))]
    placements = [
        f"{kind}{max(len(shape) - 2, 1)}" if axis == tokens else rng.choice(rest) for axis in range(len(mesh))
    ]
    if rng.random() < 0.1:
        placements = ["R" if p.startswith("S") else p for p in placements]
    elif rng.random() < 0.15:
        placements = [p.replace("S", "G") for p in placements]
    order = tuple(rng.sample(range(len(mesh)), len(mesh))) if rng.random() < 0.2 else None
    return Input(name, shape, tuple(placements), order)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=sorted(set(MODES)), default=MODES, help="how programs are run")
    options = parser.parse_args(argv)
    return run_seeds(
        functools.partial(make, modes=options.modes), options.seed, options.programs, options.jobs, at_once=10
    )


if __name__ == "__main__":
    sys.exit(main())
