"""One plain tensor for all virtual ranks, and all of them as one, with gradients. Knows locals, not DTensors."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.core.mesh import DeviceMesh
from shardwise.errors import AgreementError
from shardwise.fabric.shared_writes import check_agreement
from shardwise.fabric.virtual import RankTensor

__all__ = ["FirstRank", "OnEveryRank"]


def _differing_gradients(rank: int) -> AgreementError:
    return AgreementError(
        "a plain tensor stands for the local of every virtual rank, but their gradients differ",
        hint="give from_local a RankTensor with one tensor for each rank",
    )


class OnEveryRank(torch.autograd.Function):
    """A plain tensor as the local of every virtual rank: the same program made it on each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RankTensor([tensor.detach().clone() for _ in mesh.grid_ranks])

    @staticmethod
    def backward(ctx: Any, grad: RankTensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_agreement(grad.tensors, _differing_gradients)
        return grad.tensors[0], None


class FirstRank(torch.autograd.Function):
    """The value that all virtual ranks agree on, as one plain tensor."""

    @staticmethod
    def forward(ctx: Any, local: RankTensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.count = len(local.tensors)
        return local.tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RankTensor([grad.clone() for _ in range(ctx.count)])


never_traced(OnEveryRank.forward, OnEveryRank.backward, FirstRank.forward, FirstRank.backward)
