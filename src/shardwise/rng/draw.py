"""One random fill as a single device would carry it out. Pure data; who draws, and from what, is told elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

__all__ = ["Draw"]


class Draw(NamedTuple):
    """A whole tensor of random numbers: the in-place operator that fills it, and what it fills.

    The dims stand in the order in which they lie in memory, which is the order of drawing.

    Example:
        >>> draw = Draw(torch.ops.aten.uniform_.default, (0.0, 1.0), (4, 3), torch.float32, torch.device("cpu"))
        >>> draw.op(torch.empty(draw.shape), *draw.numbers).shape
        torch.Size([4, 3])
    """

    op: OpOverload
    numbers: tuple[Any, ...]  # the arguments between the tensor and the generator
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool = True  # whether the tensor is so, with its dims as the user has them
