"""The description of a random fill on one device, and the operators that are fills. Data only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwise.torch_private import OpOverload

__all__ = ["FILLS", "FROM", "IN_PLACE", "Draw", "fills"]

aten = torch.ops.aten
FROM = getattr(aten.random_, "from")
# Operators that depend only on the shape of their operand: the in-place version, and the functional version.
FILLS: dict[OpOverload, OpOverload] = {
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.exponential_.default: aten.exponential.default,
    aten.cauchy_.default: aten.cauchy.default,
    aten.geometric_.default: aten.geometric.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.random_.default: aten.random.default,
    aten.random_.to: aten.random.to,
    FROM: getattr(aten.random, "from"),
}
IN_PLACE = {new: fill for fill, new in FILLS.items()}


class Draw(NamedTuple):
    """A global tensor of random numbers: the in-place operator that fills it, and the tensor's properties.

    The dims are in memory order, which is the order of drawing.

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
    contiguous: bool = True  # whether the tensor is contiguous in the user's order of dims


def fills(op: OpOverload) -> bool:
    """Whether an operator fills a tensor with random numbers that depend only on its shape."""
    if op._schema.name == "aten::randint_like":
        return "Tensor" not in op._overloadname
    return op in FILLS or op in IN_PLACE or op._schema.name in ("aten::rand_like", "aten::randn_like")
