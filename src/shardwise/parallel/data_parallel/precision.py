"""Settings of a user for dtypes and memory of data parallel modules, read by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.torch_private import tree_map

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "cast_floats"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes a fully sharded module computes and communicates in.

    Args:
        param_dtype: parameters are gathered and used in this dtype; their own by default. The shards, and so the
            optimizer, keep the parameters' own.
        reduce_dtype: gradients are reduced in this dtype; in the one they are computed in by default.
        output_dtype: floating-point outputs of forward are converted to this dtype.
        cast_forward_inputs: convert floating-point inputs of forward to `param_dtype`.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_forward_inputs
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards wait between uses: on their device. The base of policies that keep them elsewhere.

    Example:
        >>> OffloadPolicy()
        OffloadPolicy()
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards kept in the host's memory. The name exists so that programs can refer to it; `fully_shard` refuses it.

    Example:
        >>> CPUOffloadPolicy().pin_memory
        True
    """

    pin_memory: bool = True


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """Every floating-point tensor in `tree` in `dtype`; None leaves all as they are."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)
