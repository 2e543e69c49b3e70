"""The user's settings for dtypes and memory of data parallel modules."""

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
    """Keep shards on their device. The base of policies that offload them.

    Example:
        >>> OffloadPolicy()
        OffloadPolicy()
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards in host memory. The name exists for compatibility; `fully_shard` refuses it.

    Example:
        >>> CPUOffloadPolicy().pin_memory
        True
    """

    pin_memory: bool = True


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with every floating-point tensor cast to `dtype`; unchanged for None."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)
