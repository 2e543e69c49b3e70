"""Convolution and sampling: batch and channels are factors; windows slide over space, which may be sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import Window
from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.engine import EACH_ALONE, FIRST, Dim, Factors, Row
from shardwise.rules.registry import Call, Halo, pattern_rule, rule
from shardwise.rules.windows import SPACE, Places, at, kernel_window, window_of, with_value

aten = torch.ops.aten
Specs = Sequence[DTensorSpec]

REPLICATE, SUM = Replicate(), Partial()


# ---------------------------------------------------------------- convolution


def channels(call: Call) -> tuple[Dim, Dim, Dim, Dim]:
    """The factors of the channels of input and output, and of the weight's first two dims."""
    transposed, groups = call["transposed"], call["groups"]
    if groups == 1:
        return ("i", "o", "i", "o") if transposed else ("i", "o", "o", "i")
    # an even split of a dim of as many channels as groups is a split of the groups
    splits = groups == call["input"].shape[1] or (not transposed and groups == call["weight"].shape[0])
    return ("g", "g", "g", None) if splits else (None, None, None, None)


def conv_dims(call: Call) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]] | None:
    """The factors of input, weight, bias and output; None for shapes without a batch dim or without elements."""
    given, weight = call["input"].shape, call["weight"].shape
    if len(given) != len(weight) or len(given) < 3 or 0 in (*given, *weight):
        return None
    into, out, first, second = channels(call)
    kernel, space = (None,) * (len(given) - 2), SPACE[: len(given) - 2]
    return ("b", into, *space), (first, second, *kernel), (out,), ("b", out, *space)


def local_conv(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The local groups and the local bias."""
    local = dict(zip(call.tensors, (spec.local_shape(coordinate) for spec in inputs), strict=True))
    changed: dict[str, Any] = {"groups": call["groups"]}
    if call["groups"] > 1:
        changed["groups"] = call["groups"] * local["input"][1] // call["input"].shape[1]
    if call.get("bias_sizes") is not None:
        changed["bias_sizes"] = [local["grad_output"][1]]
    return changed


# ---------------------------------------------------------------- sharded spatial dims


def conv_windows(call: Call) -> dict[str, Window]:
    """By factor, the rows of the input that a row of the output reads; input and output are swapped if transposed."""
    kernel = call["weight"].shape[2:]
    stride, padding, dilation = (call[name] for name in ("stride", "padding", "dilation"))
    return {
        SPACE[i]: kernel_window(size, at(stride, i), at(padding, i), at(dilation, i)) for i, size in enumerate(kernel)
    }


def conv_halo(call: Call) -> Halo:
    """The output is computed from windows of the input. A transposed convolution adds up windows of the output."""
    if not call["transposed"]:
        return Halo(conv_windows(call), conv_of_windows, reads=(0,))
    last = {} if call["bias"] is None else {0: plus_bias}  # not once for each window that a row is in
    return Halo(conv_windows(call), conv_of_windows, adds=(0,), reference=0, last=last)


def conv_backward_halo(call: Call) -> Halo:
    """The gradient of the input is a sum of windows; if transposed, it is computed from windows of the output's."""
    into, weight, bias = call["output_mask"]
    if not call["transposed"]:
        reads = (1,) if weight else ()  # else only the size of the input is read
        return Halo(conv_windows(call), conv_backward_of_windows, reads, (0,) if into else (), reference=0)
    last = {into + weight: sum_for_bias} if bias else {}
    return Halo(conv_windows(call), conv_backward_of_windows, reads=(0,), reference=1, last=last)


def conv_of_windows(
    input: torch.Tensor,  # noqa: A002  # as the operator names it
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    places: Places,
) -> torch.Tensor:
    """A convolution of one rank's window of the input, or to its window of the output, without the bias."""
    bias = None if transposed else bias
    count, ndim = weight.dim() - 2, weight.dim()
    padding, output_padding = (with_value(given, count, places, 0, ndim) for given in (padding, output_padding))
    return aten.convolution.default(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def conv_backward_of_windows(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  # as the operator names it
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    places: Places,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of one rank's window of the input, or of its part from the window of the output's gradient."""
    count, ndim = weight.dim() - 2, weight.dim()
    padding, output_padding = (with_value(given, count, places, 0, ndim) for given in (padding, output_padding))
    reads_size = not transposed and not output_mask[1]
    window = window_of(input, places) if reads_size else input
    return aten.convolution_backward.default(
        grad_output,
        window,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )


def plus_bias(made: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """The sum of windows, plus the bias."""
    return made.add_(bias.view(-1, *([1] * (made.dim() - 2))))


def sum_for_bias(made: torch.Tensor, grad_output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The gradient of the bias, from the rank's own rows of the output: windows would count rows several times."""
    return grad_output.sum((0, *range(2, grad_output.dim())))


# ---------------------------------------------------------------- the rules


def on_meta(given: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The result in the memory format of the kernels: channels-last if an operand is. torch's meta function differs."""
    result = aten.convolution.default(given, weight, *rest)
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.ndim)
    if memory_format is None or torch.float64 in (given.dtype, weight.dtype):
        return result
    operands = [each for each in (given, weight) if not each.is_contiguous()]
    if any(each.is_contiguous(memory_format=memory_format) for each in operands):
        return result.contiguous(memory_format=memory_format)
    return result


@rule(
    aten.convolution.default,
    aten.convolution_overrideable.default,
    localize=local_conv,
    meta_op=on_meta,
    halo=conv_halo,
)
def convolution(call: Call) -> Factors | None:
    """Input channels are contracted; the bias is added once."""
    dims = conv_dims(call)
    if dims is None:
        return None
    bias = call["bias"] is not None
    return Factors(
        dims[: 3 if bias else 2],
        (dims[3],),
        linear=((0, 2), (1, 2)) if bias else EACH_ALONE,
        additive=(2,) if bias else (),
        nonempty=frozenset("iog"),
        even=frozenset("g"),
        exchanged=frozenset(dims[3][2:]),  # pyright: ignore[reportArgumentType]
    )


@rule(aten.convolution_backward.default, localize=local_conv, halo=conv_backward_halo)
def convolution_backward(call: Call) -> Factors | None:
    """The requested gradients of input, weight and bias."""
    dims = conv_dims(call)
    if dims is None:
        return None
    asked = [d for d, wanted in zip(dims[:3], call["output_mask"], strict=True) if wanted]
    if len(asked) != len(call.results):
        return None
    return Factors(
        (dims[3], dims[0], dims[1]),
        tuple(asked),
        linear=FIRST,
        summed=frozenset(("b", "o", *dims[3][2:])),  # pyright: ignore[reportArgumentType]
        untouched=frozenset({("i", len(asked) - 1)} if call["output_mask"][2] else ()),
        nonempty=frozenset("iog"),
        even=frozenset("g"),
        exchanged=frozenset(dims[3][2:]),  # pyright: ignore[reportArgumentType]
        rows=(_saved_sum(asked, dims, 1, 1), _saved_sum(asked, dims, 2, 0)),
    )


def _saved_sum(asked: Sequence[Any], dims: Sequence[Any], operand: int, result: int) -> Row:
    """The row for a Partial input or weight (`operand`): one gradient is linear in it, the others do not read it."""
    inputs = tuple(SUM if i == operand else REPLICATE for i in range(3))
    return Row(inputs, tuple(SUM if given is dims[result] else REPLICATE for given in asked))


# ---------------------------------------------------------------- sampling

pattern_rule("b c x! y!, b h w k! -> b c h w", aten.grid_sampler_2d.default, linear=FIRST)
pattern_rule("b c x! y! z!, b d h w k! -> b c d h w", aten.grid_sampler_3d.default, linear=FIRST)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Factors | None:
    """The gradients of the image, summed over the samples, and of the grid, summed over the channels."""
    space = "dhw"[5 - len(call["input"].shape) :]
    image: tuple[Dim, ...] = ("b", "c", *((None,) * len(space)))
    grid: tuple[Dim, ...] = ("b", *space, None)
    # kernels return the gradient of the grid even if it is not requested
    results = (image, grid) if call["output_mask"][0] else (grid,)
    if len(results) != len(call.results):
        return None
    operands = (("b", "c", *space), image, grid)
    return Factors(operands, results, linear=FIRST, summed=frozenset("cdhw"))


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(call: Call) -> Factors | None:
    """Windows at the positions given for each channel."""
    if len(call["random_samples"].shape) != 3 or len(call["self"].shape) != len(call["kernel_size"]) + 2:
        return None
    image: tuple[Dim, ...] = ("b", "c", *((None,) * len(call["kernel_size"])))
    return Factors((image, ("b", "c", None)), (image, image), nonempty=frozenset("c"))
