"""Convolution, pooling, interpolation, sampling: batch and channels are factors, what a window slides over is whole.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Coordinate
from shardwise.core.placement import Partial, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.notation import EACH_ALONE, FIRST, Dim, Factors, Row
from shardwise.rules.registry import Call, pattern_rule, rule

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
    """The factors of input, weight, bias and output; None for shapes that have no batches, or nothing in them."""
    given, weight = call["input"].shape, call["weight"].shape
    if len(given) != len(weight) or len(given) < 3 or 0 in (*given, *weight):
        return None
    into, out, first, second = channels(call)
    space = (None,) * (len(given) - 2)
    return ("b", into, *space), (first, second, *space), (out,), ("b", out, *space)


def local_conv(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The groups and the bias that are here."""
    local = dict(zip(call.tensors, (spec.local_shape(coordinate) for spec in inputs), strict=True))
    changed: dict[str, Any] = {"groups": call["groups"]}
    if call["groups"] > 1:
        changed["groups"] = call["groups"] * local["input"][1] // call["input"].shape[1]
    if call.get("bias_sizes") is not None:
        changed["bias_sizes"] = [local["grad_output"][1]]
    return changed


@rule(aten.convolution.default, aten.convolution_overrideable.default, localize=local_conv)
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
    )


@rule(aten.convolution_backward.default, localize=local_conv)
def convolution_backward(call: Call) -> Factors | None:
    """The gradients of input, weight and bias, those of them that were asked for."""
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
        summed=frozenset("bo"),
        untouched=frozenset({("i", len(asked) - 1)} if call["output_mask"][2] else ()),
        nonempty=frozenset("iog"),
        even=frozenset("g"),
        rows=(_saved_sum(asked, dims, 1, 1), _saved_sum(asked, dims, 2, 0)),
    )


def _saved_sum(asked: Sequence[Any], dims: Sequence[Any], operand: int, result: int) -> Row:
    """Where input or weight, the operand, is a sum: one gradient is linear in it, the others do not read it."""
    inputs = tuple(SUM if i == operand else REPLICATE for i in range(3))
    return Row(inputs, tuple(SUM if given is dims[result] else REPLICATE for given in asked))


# ---------------------------------------------------------------- windows over the last dims


def leading(call: Call, space: int, linear: bool) -> Factors:
    """The dims before the last `space` ones, which all tensors of the call have alike.

    What a gradient is taken by is read for its size only: it may be a sum as it is.
    """

    def dims(ndim: int) -> tuple[Dim, ...]:
        # counted from the window: channels, then batches, which kernels take empty
        return (*(f"c{i}" for i in reversed(range(ndim - space))), *((None,) * space))

    exact = call.operands[0].dtype.is_floating_point or call.operands[0].dtype.is_complex  # integers are rounded
    return Factors(
        tuple(dims(len(meta.shape)) for meta in call.operands),
        tuple(dims(len(meta.shape)) for meta in call.results),
        linear=FIRST if linear and exact else (),
        nonempty=frozenset(["c0"]),
        rows=_of_any_self(call) if call.get("grad_output") is not None and call.get("self") is not None else (),
    )


def _of_any_self(call: Call) -> tuple[Row, ...]:
    rest = (REPLICATE,) * (len(call.operands) - 2)
    return Row((REPLICATE, SUM, *rest), (REPLICATE,)), Row((SUM, SUM, *rest), (SUM,))


def local_image(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The size of the image on this rank."""
    return {"input_size": list(outputs[0].local_shape(coordinate))}


# what is linear in its first operand, and what is not; by the number of dims that a window has
POOLS = {
    (2, True): (
        aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default, aten.max_pool2d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default, aten.fractional_max_pool2d_backward.default,
        aten.max_unpool2d.default,
    ),
    (3, True): (
        aten.avg_pool3d.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool3d_backward.default, aten.max_pool3d_with_indices_backward.default,
        aten.adaptive_max_pool3d_backward.default, aten.fractional_max_pool3d_backward.default,
        aten.max_unpool3d.default,
    ),
    (2, False): (aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default),
    (3, False): (aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default),
}  # fmt: skip
for (space, linear), ops in POOLS.items():
    rule(*ops)(lambda call, space=space, linear=linear: leading(call, space, linear))

INTERPOLATIONS = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
        "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}  # fmt: skip
for space, named in INTERPOLATIONS.items():
    for name in named:
        rule(getattr(aten, name).default)(lambda call, space=space: leading(call, space, linear=True))
        rule(getattr(aten, f"{name}_backward").default, localize=local_image)(
            lambda call, space=space: leading(call, space, linear=True)
        )


# ---------------------------------------------------------------- sampling

pattern_rule("b c x! y!, b h w k! -> b c h w", aten.grid_sampler_2d.default, linear=FIRST)
pattern_rule("b c x! y! z!, b d h w k! -> b c d h w", aten.grid_sampler_3d.default, linear=FIRST)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Factors | None:
    """The gradients of the image, summed over the samples, and of the grid, summed over the channels."""
    space = "dhw"[5 - len(call["input"].shape) :]
    image: tuple[Dim, ...] = ("b", "c", *((None,) * len(space)))
    grid: tuple[Dim, ...] = ("b", *space, None)
    results = [dims for dims, wanted in zip((image, grid), call["output_mask"], strict=True) if wanted]
    if len(results) != len(call.results):
        return None
    operands = (("b", "c", *space), image, grid)
    return Factors(operands, tuple(results), linear=FIRST, summed=frozenset("cdhw"))


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(call: Call) -> Factors | None:
    """Windows at places that are given for each channel."""
    if len(call["random_samples"].shape) != 3 or len(call["self"].shape) != len(call["kernel_size"]) + 2:
        return None
    image: tuple[Dim, ...] = ("b", "c", *((None,) * len(call["kernel_size"])))
    return Factors((image, ("b", "c", None)), (image, image), nonempty=frozenset("c"))


@rule(aten.im2col.default)
def im2col(call: Call) -> Factors:
    """Windows as columns: the rows of a channel follow each other, so that even splits of channels stay together."""
    batch = ("b",) * (len(call["self"].shape) - 3)
    return Factors(((*batch, "c", None, None),), ((*batch, "c", None),), linear=FIRST, even=frozenset("c"))


@rule(aten.col2im.default)
def col2im(call: Call) -> Factors:
    """Columns put back as windows, added where they overlap."""
    batch = ("b",) * (len(call["self"].shape) - 2)
    return Factors(((*batch, None, None),), ((*batch, None, None, None),), linear=FIRST)
