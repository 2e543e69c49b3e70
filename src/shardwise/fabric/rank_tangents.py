"""Forward mode on uneven locals of virtual ranks: tangents that torch creates get each rank's own sizes.

For an operand without a tangent torch computes with zeros that have sizes but no memory, in code that requires plain
sizes. The sizes of uneven locals differ between ranks, so their zeros are tensors in memory, one for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.fabric.rank_sizes import count_of, of_rank
from shardwise.torch_private import TorchDispatchMode, forward_ad, tree_leaves, tree_map

__all__ = ["RankTangents", "in_forward_mode"]

_ZEROS = torch.ops.aten._efficientzerotensor.default  # zeros without memory


def in_forward_mode() -> bool:
    """Whether a level of `forward_ad` is active.

    Example:
        >>> with forward_ad.dual_level():
        ...     in_forward_mode()
        True
    """
    return forward_ad._current_level >= 0


class RankTangents(TorchDispatchMode):
    """Creates tangents with each rank's own sizes, and zero tangents with memory.

    Args:
        of_ranks: makes the local of all virtual ranks from each rank's tensor.
    """

    def __init__(self, of_ranks: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.of_ranks = of_ranks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        make = torch.zeros if func is _ZEROS else func
        leaves = tree_leaves((args, kwargs))
        count = None if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else count_of(leaves)
        if count is None:
            return make(*args, **kwargs)
        rows = [tree_map(lambda leaf, rank=rank: of_rank(leaf, rank), (args, kwargs)) for rank in range(count)]
        return self.of_ranks([make(*row, **options) for row, options in rows])
