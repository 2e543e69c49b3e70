"""Layers of recurrent networks by oneDNN and cuDNN: the batch is parallel, time is not.

The forward saves an opaque workspace for its backward. So backward runs on the same shards as forward, for any layout
of the gradients. cuDNN's backward has no meta kernel for the shapes of its results: it runs replicated, and so does
forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.placement import AnyShard, Partial, Placement, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Call, layout_rule, rule

aten = torch.ops.aten

BATCH = frozenset("b")
WORKSPACE = "workspace"
RESULTS = ("output", "hy", "cy", WORKSPACE)
GRADIENTS = ("input", "weight1", "weight2", "weight3", "weight4", "hx", "cx")


def dims_of(name: str, ndim: int) -> tuple[Dim, ...]:
    """The factors of a tensor: sequences have time and batch before the features, states the batch."""
    has_batch = name != WORKSPACE and not name.startswith("weight")
    return tuple("b" if has_batch and dim == ndim - 2 else None for dim in range(ndim))


def operand_names(call: Call) -> list[str]:
    """The argument of each tensor operand."""
    names = [argument.name for argument in call.op._schema.arguments]
    return [name for name in names if isinstance(call.get(name), TensorMeta)]


@rule(aten.mkldnn_rnn_layer.default)
def layer(call: Call) -> Factors | None:
    """One direction of one layer. oneDNN always gets time before the batch."""
    if call["batch_sizes"]:  # sequences packed into one another
        return None
    given = zip(operand_names(call), call.operands, strict=True)
    made = zip(RESULTS, call.results, strict=True)
    return Factors(
        tuple(dims_of(name, len(meta.shape)) for name, meta in given),
        tuple(dims_of(name, len(meta.shape)) for name, meta in made),
        untouched=frozenset([("b", RESULTS.index(WORKSPACE))]),
        nonempty=BATCH,
    )


@layout_rule(aten.mkldnn_rnn_layer_backward.default)
def layer_backward(
    call: Call, specs: Sequence[DTensorSpec]
) -> tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]] | None:
    """Every operand in the layout of forward; gradients of weights are sums over the batch."""
    names = operand_names(call)
    output = specs[names.index("output")]
    batch = dims_of("output", output.ndim).index("b")
    inputs = tuple(
        spec if name == WORKSPACE else _along(output, batch, spec.tensor_meta, dims_of(name, spec.ndim), Replicate())
        for name, spec in zip(names, specs, strict=True)
    )
    outputs = tuple(
        _along(output, batch, meta, dims_of(name, len(meta.shape)), Partial())
        for name, meta in zip(GRADIENTS, call.results, strict=True)
    )
    return inputs, outputs


def _along(
    output: DTensorSpec, batch: int, meta: TensorMeta, dims: Sequence[Dim], without_batch: Placement
) -> DTensorSpec:
    """A layout with the batch split like that of the output."""
    own, split = dims.index("b") if "b" in dims else None, output.dim_axes[batch]

    def placement(axis: int, of_output: Placement) -> Placement:
        if axis not in split or not isinstance(of_output, AnyShard):
            return Replicate()
        if own is None:
            return without_batch
        return of_output.on_dim(own)

    placements = tuple(placement(axis, p) for axis, p in enumerate(output.placements))
    return DTensorSpec.from_dim_axes(
        output.mesh, placements, meta, [split if d == own else () for d in range(len(dims))]
    )


@rule(aten._cudnn_rnn.default, reads=("dropout",))
def cudnn(call: Call) -> None:
    """Replicated. Dropout uses cuDNN's own random state, which differs between ranks."""
    if call["dropout"] and call["train"]:
        raise UnsupportedError(
            "dropout between the layers of a recurrent network on CUDA: cuDNN uses a random state of its own in each"
            " process",
            hint="set torch.backends.cudnn.enabled = False, or put nn.Dropout between networks of one layer",
        )
