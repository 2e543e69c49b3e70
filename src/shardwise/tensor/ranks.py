"""One plain tensor for all virtual ranks, and all of them as one, with derivatives; how our functions are applied.

Uses locals, not DTensors.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compilers import never_traced
from shardwise.errors import AgreementError
from shardwise.fabric.rank_tensor import RankTensor, is_of_ranks
from shardwise.fabric.shared_writes import check_agreement
from shardwise.local import stored_zeros
from shardwise.torch_private import forward_ad
from shardwise.transforms import alive, innermost, transforming

__all__ = [
    "FirstRank",
    "OnEveryRank",
    "apply_function",
    "first_rank",
    "is_forward_or_transformed",
    "on_every_rank",
    "wants_derivatives",
]


def wants_derivatives(tensor: torch.Tensor) -> bool:
    """Whether autograd must record operations on a tensor: reverse or forward mode, or torch.func."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or forward_ad._current_level >= 0 or transforming()


def is_forward_or_transformed() -> bool:
    """Whether derivatives are taken otherwise than by a backward: in forward mode, or by torch.func."""
    return forward_ad._current_level >= 0 or transforming()


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, outside of torch.func without torch's set-up for it, which costs more than a move."""
    if transforming():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def on_every_rank(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A plain tensor as the local of each of `count` virtual ranks: the same program made it on each."""
    return apply_function(OnEveryRank, tensor, count)


def first_rank(local: torch.Tensor) -> torch.Tensor:
    """The value that all virtual ranks agree on, as one plain tensor."""
    local = alive(local)
    return apply_function(FirstRank, local, len(innermost(local).tensors), False)


class OnEveryRank(torch.autograd.Function):
    """A plain tensor as the local of every virtual rank; their gradients must agree."""

    @staticmethod
    def forward(tensor: torch.Tensor, count: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RankTensor([stored_zeros(tensor).detach().clone() for _ in range(count)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is not None and is_of_ranks(innermost(grad)):
            grad = apply_function(FirstRank, grad, ctx.count, True)
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return on_every_rank(tangent, ctx.count)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: torch.Tensor, count: int) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return on_every_rank(tensor, count), in_dims[0]


class FirstRank(torch.autograd.Function):
    """The value that all virtual ranks have; `check`: raise where they do not."""

    @staticmethod
    def forward(local: RankTensor, count: int, check: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if check:
            check_agreement(local.tensors, _differing_gradients)
        return local.tensors[0].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is not None and not is_of_ranks(innermost(grad)):
            grad = on_every_rank(grad, ctx.count)
        return grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return first_rank(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], local: torch.Tensor, count: int, check: bool) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return apply_function(FirstRank, local, count, check), in_dims[0]


def _differing_gradients(rank: int) -> AgreementError:
    return AgreementError(
        "a plain tensor represents the local of every virtual rank, but their gradients differ",
        hint="give from_local a RankTensor with one tensor for each rank",
    )


never_traced(
    RankTensor.__torch_dispatch__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    *(
        getattr(function, name)
        for function in (OnEveryRank, FirstRank)
        for name in ("forward", "setup_context", "backward", "jvp")
    ),
)
