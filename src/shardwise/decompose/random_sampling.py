"""Random operators that are computed from a fill with random numbers, step by step as torch itself does it.

Each rank computes its part of the fill; see `shardwise.dispatch.random_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Any:
    if not isinstance(std, torch.Tensor):
        return _new_like(mean).normal_(0, std, generator=generator).add_(mean)
    shaped = torch.broadcast_tensors(mean, std)[1] if isinstance(mean, torch.Tensor) else std
    return _new_like(shaped).normal_(0, 1, generator=generator).mul_(std).add_(mean)


def _new_like(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


@decomposition(aten.bernoulli.default)
def _bernoulli(p: Any, *, generator: torch.Generator | None = None) -> Any:
    if not _is_on_cpu(p):  # drawn by a kernel with another mapping of threads
        return NotImplemented
    return (_new_like(p, _unit_dtype(p)).uniform_(0, 1, generator=generator) < p).to(p.dtype)


@decomposition(aten.bernoulli_.Tensor)
def _bernoulli_into(target: Any, p: Any, generator: torch.Generator | None = None) -> Any:
    if not _is_on_cpu(target):
        return NotImplemented
    return target.copy_(torch.empty_like(target, dtype=_unit_dtype(p)).uniform_(0, 1, generator=generator) < p)


def _is_on_cpu(x: Any) -> bool:
    """Whether a tensor is on CPUs; locals of dry runs are on no device."""
    return (x.device_mesh.device_type if hasattr(x, "device_mesh") else x.device.type) == "cpu"


@decomposition(aten.rrelu_with_noise.default)
def _rrelu(
    x: Any, noise: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Nothing is drawn outside of training."""
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _unit_dtype(p: Any) -> torch.dtype:
    """The dtype of the uniform numbers that torch compares with probabilities."""
    return torch.float64 if p.dtype is torch.float64 else torch.float32


@decomposition(aten.multinomial.default)
def _multinomial(
    probabilities: Any, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Any:
    """Without replacement: the largest of `p / Exp(1)`."""
    if replacement and num_samples > 1:
        return NotImplemented
    if not bool(((probabilities >= 0) & (probabilities < torch.inf)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not bool((probabilities.sum(-1) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    rates = probabilities / torch.empty_like(probabilities).exponential_(1, generator=generator)
    return rates.argmax(-1, keepdim=True) if num_samples == 1 else rates.topk(num_samples).indices
