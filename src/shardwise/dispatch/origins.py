"""What is put back into zeros of a tensor's shape lies as that tensor did.

The gradient of `x[0]` is zeros but for one row. The operator that makes it is told the shape of `x`, not its layout,
and every layout is as cheap: each rank makes its own part. So the forward notes the layout with the node of autograd
that made `x`, and the backward asks the node that it leads to. What is not noted is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.signature import Executor, Signature
from shardwise.plan.propagate import OutputSharding
from shardwise.rules.dims import wrapped

__all__ = ["PUTTING_BACK", "TAKING", "current_node", "noting_origin", "origin_of", "putting_back"]

aten = torch.ops.aten
TAKING = {
    aten.select.int, aten.slice.Tensor, aten.gather.default, aten.index_select.default, aten.index.Tensor,
}  # fmt: skip
PUTTING_BACK = {aten.select_backward.default, aten.slice_backward.default}
current_node = torch._C._current_autograd_node  # pyright: ignore[reportAttributeAccessIssue]
NOTED = "shardwise: layouts of outputs"  # in the metadata of a node


def noting_origin(signature: Signature, run: Executor) -> Executor:
    """`run`, but where it takes something of a sharded dim, the layout is noted for the gradient."""
    spec = signature.specs[0]
    dim = signature.arguments.get("dim")
    axes = spec.dim_axes if dim is None or not spec.ndim else spec.dim_axes[wrapped(dim, spec.ndim)]
    if spec.is_strided or not any(axes if dim is None else [axes]):
        return run

    def note_and_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node = _node_of(args[0])
        if node is not None:  # of a leaf the layout is known anyway
            node.metadata.setdefault(NOTED, {})[args[0].output_nr] = spec
        return run(args, kwargs)

    return note_and_run


def _node_of(tensor: torch.Tensor) -> Any:
    """The node of autograd that made a tensor; None where there is none, or torch does not say."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was made in inference mode, and whose base has been written to since
        return None


def origin_of(tensor_class: Any) -> DTensorSpec | None:
    """The layout of the tensor whose gradient is being computed, where it is known."""
    node: Any = current_node()
    follows = node.next_functions if node is not None else ()
    if not follows or follows[0][0] is None:
        return None
    maker, output = follows[0]
    leaf: Any = getattr(maker, "variable", None)
    return leaf._spec if isinstance(leaf, tensor_class) else maker.metadata.get(NOTED, {}).get(output)


def putting_back(
    signature: Signature, sharding: OutputSharding, make: Callable[[OutputSharding], Executor]
) -> Executor:
    """What runs a call that puts something back into zeros; in the layout that they are noted to have, if any."""
    tensor_class, spec = signature.wrapping.tensor_class, sharding.outputs[0]
    runs: dict[DTensorSpec | None, Executor] = {None: make(sharding)}
    dim = wrapped(signature.arguments["dim"], spec.ndim)
    if spec.tensor_meta.is_symbolic:
        return runs[None]

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        origin = origin_of(tensor_class)
        if origin is not None and (origin.mesh is not spec.mesh or origin.shape != spec.shape or origin.is_strided):
            origin = None
        found = runs.get(origin)
        if found is None:
            found = runs[origin] = make(_spread(sharding, origin, dim))
        return found(args, kwargs)

    return run


def _spread(sharding: OutputSharding, origin: DTensorSpec | None, dim: int) -> OutputSharding:
    """`sharding`, with what would be whole along `dim` split as the origin is."""
    out, split = sharding.outputs[0], Shard(dim)
    assert origin is not None
    placements: list[Placement] = [
        split if origin.placements[axis] is split and isinstance(placement, Replicate) else placement
        for axis, placement in enumerate(out.placements)
    ]
    axes = list(out.dim_axes)
    axes[dim] = tuple(axis for axis in origin.dim_axes[dim] if placements[axis] is split)
    spread = DTensorSpec.from_dim_axes(out.mesh, tuple(placements), out.tensor_meta, axes)
    return replace(sharding, outputs=(spread,))
