"""DTensors of every kind of Partial, really spread over the ranks, and the check that an operator keeps their value."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardwise as sw
from shardwise import MaskPartial, Partial
from tests.virtual.parity import assert_same, whole

KINDS = [Partial(), Partial("avg"), Partial("min"), Partial("max"), Partial("product"), MaskPartial()]
RANKS = 3


def mesh_of(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape)


def held(shape: Sequence[int], kind: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> sw.DTensor:
    """A DTensor of one axis whose ranks hold unlike parts of both signs; of a mask, each element is one rank's."""
    torch.manual_seed(seed)
    parts = [torch.randn(shape, dtype=torch.float64) * 3 for _ in range(RANKS)]
    if isinstance(kind, MaskPartial):
        owner = torch.randint(0, RANKS, tuple(shape))
        parts = [torch.where(owner == rank, part, 0) for rank, part in enumerate(parts)]
    locals_ = sw.RankTensor([part.to(dtype) for part in parts])
    return sw.DTensor.from_local(locals_, mesh_of(RANKS), [kind], shape=tuple(shape), stride=parts[0].stride())


def assert_value(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of DTensors has the value that it has of their values."""
    plain = [arg.full_tensor() if isinstance(arg, sw.DTensor) else arg for arg in args]
    got = fn(*args)
    assert_same(whole(got), fn(*plain), f"{[a.spec for a in args if isinstance(a, sw.DTensor)]}")
    return got
