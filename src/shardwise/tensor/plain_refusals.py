"""Plain tensors that are refused: looked for in the call that the program makes, before anything of it runs.

Operators cannot distinguish a tensor of the program from one that torch made inside. The outermost call of a torch
function can: its arguments are the program's. So the class takes part in torch's function protocol while plain
tensors are refused anywhere, and at no other time. In code that is traced, operators refuse every plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, no_type_check

import torch
from torch.overrides import resolve_name

from shardwise import modes
from shardwise.compilers import never_traced
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.errors import PlainTensorError
from shardwise.events import user_line
from shardwise.fabric.collective_log import argument_name
from shardwise.torch_private import DisableTorchFunctionSubclass, tree_leaves

__all__ = ["refusable"]


def refusable(tensor_class: Any) -> None:
    """Let plain tensors among tensors of this class be refused."""

    @no_type_check  # a compiler traces this function, and cannot trace type checks
    def refuse(
        cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_dynamo_compiling() and modes.plain_policy() == "refuse":
            for name, given in (*enumerate(args, 1), *kwargs.items()):
                for leaf in tree_leaves(given) if isinstance(given, list | tuple | dict) else (given,):
                    if (
                        isinstance(leaf, torch.Tensor)
                        and not isinstance(leaf, tensor_class)
                        and _is_refused(func, leaf)
                    ):
                        raise _refusal(func, name, leaf)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    never_traced(refuse)  # on its own, after a graph break; in a graph it is traced
    ordinary, refusing = tensor_class.__torch_function__, classmethod(refuse)

    def switch(on: bool) -> None:
        tensor_class.__torch_function__ = refusing if on else ordinary

    modes.on_refusal.append(switch)


def _is_refused(func: Any, tensor: torch.Tensor) -> bool:
    """Tensors of one element are constants; setting an attribute, like `.grad`, is not an operator."""
    return tensor.numel() != 1 and getattr(func, "__name__", "") != "__set__"


def _refusal(func: Any, name: int | str, tensor: torch.Tensor) -> PlainTensorError:
    argument = argument_name(name, tensor)
    return PlainTensorError(
        f"{resolve_name(func) or func} at {user_line()}: argument {argument} is a plain torch.Tensor of shape "
        f"{tuple(tensor.shape)} among DTensors, and plain tensors are refused here",
        hint="distribute_tensor(tensor, mesh, placements) if every rank has the full tensor, "
        "DTensor.from_local(tensor, mesh, placements) if each rank holds a part, "
        "or inside plain_tensors('verify') it is taken as replicated",
    )
