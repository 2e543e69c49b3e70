"""Composite operators of torch that cannot run on DTensors: other operators in their place, for DTensors alone.

torch takes a composite operator apart in C++, before a tensor class sees it. One that reads the memory of an operand,
or makes a sparse tensor, is replaced at the one dispatch key above autograd that only tensor classes have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["replace_composites"]

aten = torch.ops.aten
_KEY = "PythonTLSSnapshot"
_library = torch.library.Library("aten", "IMPL")


def _tensor_split(self: Any, tensor_indices_or_sections: Any, dim: int = 0) -> Any:
    """torch reads the indices in memory; their values are asked for here."""
    if tensor_indices_or_sections.dim():
        return aten.tensor_split.indices(self, tensor_indices_or_sections.tolist(), dim)
    return aten.tensor_split.sections(self, int(tensor_indices_or_sections), dim)


def _embedding_sparse_backward(
    grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """A DTensor is dense, and so is the gradient of a table that asks for a sparse one."""
    return aten.embedding_dense_backward.default(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def _ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *options: Any) -> Any:
    """torch copies the lengths to the CPU; their values are asked for here."""
    return aten.ctc_loss.IntList(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *options)


REPLACED: dict[OpOverload, Callable[..., Any]] = {
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    aten.ctc_loss.Tensor: _ctc_loss,
    aten.embedding_sparse_backward.default: _embedding_sparse_backward,
}


def replace_composites(tensor_class: type[torch.Tensor]) -> None:
    """Compute the operators of `REPLACED` by others if a tensor of this class is among the arguments."""
    for op, compute in REPLACED.items():
        _library.impl(op.name().removeprefix("aten::"), _kernel(tensor_class, op, compute), _KEY)


def _kernel(tensor_class: type[torch.Tensor], op: OpOverload, compute: Callable[..., Any]) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, tensor_class) for arg in args):
            return compute(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(below):  # pyright: ignore[reportAttributeAccessIssue]
            return op(*args, **kwargs)

    return run
