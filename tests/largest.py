"""The largest tensor that is made: to show that a global tensor is never in memory."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw


class Largest(TorchDispatchMode):
    """The most elements that any operator made in one tensor of one rank."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, sw.DTensor | sw.RankTensor) for kind in types):
            return NotImplemented  # what that does to the tensors of ranks comes here again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor and leaf.device.type != "meta":
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
