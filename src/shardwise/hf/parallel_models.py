"""parallelize: a model of transformers over one axis of a mesh, by the model's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.api import distribute_module
from shardwise.fabric.world import as_mesh
from shardwise.hf.flex_calls import call_flex_attention_uncompiled
from shardwise.hf.model_plans import plan_of
from shardwise.hf.static_caches import lay_out_static_caches
from shardwise.hf.transformers_version import check_loaded
from shardwise.parallel.tensor_parallel.parallelize import parallelize_module

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    device_mesh: Any = None,
    plan: str | Mapping[str, Any] = "auto",
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a model of transformers in place, by the plan that its configuration carries.

    Forward, backward, losses and `generate` are those of one device. Inputs may be plain tensors (the same on every
    rank) or DTensors, on this mesh or on one with more axes, such as a batch that is sharded over `dp`.
    `fully_shard(model, mesh["dp"])` may follow.

    Args:
        model: the model, on one device or on meta, or an adapter of peft around it.
        device_mesh: a mesh of one axis: `mesh["tp"]` where there are several.
        plan: `"tp"` uses the model's tensor-parallel plan; `"ep"` its expert-parallel plan, and the tensor-parallel
            plan for other modules; `"derived"` recognizes attention and MLPs by their structure; `"auto"` uses the
            first of the three that has layers, and warns if it is the last. A model in which nothing is recognized is
            replicated. Or a dict from paths, in which `*` is a number, to names of styles or to a `ParallelStyle`.
        src_data_rank: the rank of the mesh whose parameter values are used. None: each rank's own.

    Returns:
        The model.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        >>> mlp = parallelize(mlp, mesh, {"0": "colwise", "2": "rowwise"})
        >>> mlp[0].weight.spec, mlp(torch.ones(3, 4)).spec
        (f32[8,4] S0, f32[3,4] R)
    """
    check_loaded()
    lay_out_static_caches()
    call_flex_attention_uncompiled()
    mesh = as_mesh(device_mesh)
    styles = plan_of(model, plan)
    if not styles:
        return distribute_module(model, mesh)
    return parallelize_module(model, mesh, styles, src_data_rank=src_data_rank)
