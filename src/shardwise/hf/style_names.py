"""The names of styles in plans of transformers, as styles of this library: one table.

A plan has the path of a module or of a parameter, and a name. On DTensors only the layout of a parameter matters:
operators know the layouts of their operands. So names that describe only communication do nothing here.
"""

from __future__ import annotations

import difflib

from torch import nn

from shardwise.core.placement import Placement, Replicate, Shard, StridedShard
from shardwise.errors import UnsupportedError
from shardwise.parallel.tensor_parallel.style import ParallelStyle
from shardwise.parallel.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = ["check_name", "is_silent", "layer_style", "parameter_placement"]

_COLWISE = ColwiseParallel(use_local_output=False)
_COLWISE_GATHERED = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
# A plain tensor in a model is global here, even if the plan expects the sharded output of another layer.
_ROWWISE = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)

# For nn.Linear and nn.Embedding.
LAYERS: dict[str, ParallelStyle] = {
    "colwise": _COLWISE,
    "colwise_gather_output": _COLWISE_GATHERED,
    "colwise_rep": _COLWISE_GATHERED,
    "rowwise": _ROWWISE,
    "rowwise_split_input": _ROWWISE,
    "rowwise_rep": _ROWWISE,
    "embedding_rowwise": _ROWWISE,
    "embedding_colwise": _COLWISE_GATHERED,
}
# For norms.
SEQUENCE = {"sequence_parallel": SequenceParallel()}
# For parameters that a plan names, and those of other modules: the dim to shard, counted from the last, and the number
# of parts that are fused in it. Weights are (..., outputs, inputs).
PARAMETERS: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "colwise_gather_output": (-2, 1),
    "colwise_rep": (-2, 1),
    "rowwise": (-1, 1),
    "rowwise_split_input": (-1, 1),
    "rowwise_rep": (-1, 1),
    "embedding_rowwise": (-2, 1),
    "embedding_colwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}
EXPERTS = {"grouped_gemm"}  # parameters of experts, (experts, ...)
# Styles without an effect on layouts: communication, or replicated parameters.
SILENT = {
    "all_reduce",
    "ep_dispatch_experts",
    "ep_router",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
}
KNOWN = LAYERS.keys() | SEQUENCE.keys() | PARAMETERS.keys() | EXPERTS | SILENT


def check_name(name: object, path: str) -> str:
    """The name, if it is one of a known style."""
    if isinstance(name, str) and name in KNOWN:
        return name
    near = difflib.get_close_matches(str(name), sorted(KNOWN), n=3)
    raise UnsupportedError(
        f"the plan's style {name!r} (for {path!r}) is not known",
        hint=f"known styles are {', '.join(near or sorted(KNOWN))}; or pass a ParallelStyle",
    )


def is_silent(name: str) -> bool:
    """Whether a style has no effect: parameters stay replicated."""
    return name in SILENT


def layer_style(name: str, module: nn.Module) -> ParallelStyle | None:
    """The style of a module as one layer; None for a module whose parameters are distributed one by one."""
    if name in SEQUENCE:
        return SEQUENCE[name]
    return LAYERS.get(name) if isinstance(module, nn.Linear | nn.Embedding) else None


def parameter_placement(name: str, parameter: nn.Parameter) -> Placement:
    """The placement of a parameter by the style of this name.

    Example:
        >>> import torch
        >>> parameter_placement("packed_colwise", nn.Parameter(torch.zeros(4, 6, 2)))
        StridedShard(1, split_factor=2)
    """
    if name in EXPERTS:
        return Shard(0)
    dim, parts = PARAMETERS[name]
    if parameter.ndim == 0:
        return Replicate()
    if parameter.ndim == 1:  # a bias, or one number for each output
        return Shard(0) if dim == -2 else Replicate()
    dim += parameter.ndim
    return Shard(dim) if parts == 1 else StridedShard(dim, split_factor=parts)
