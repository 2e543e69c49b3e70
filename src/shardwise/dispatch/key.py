"""The signature of a call as a dictionary key: specs of DTensors, and of the other arguments what a rule reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise import modes
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.schema import UNREAD, Reader, op_info
from shardwise.torch_private import OpOverload

__all__ = ["Key", "is_symbolic", "key_of"]

Key = tuple[Any, ...]
CONSTANTS = {type(None), bool, int, torch.dtype, torch.device, torch.layout, torch.memory_format}


def key_of(tensor_class: type, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    """The signature of a call: specs of DTensors; type and value of the rest, type alone of what no rule reads."""
    parts: list[Any] = [id(func)]  # OpOverload hashes in Python, and operators live for ever
    info = op_info(func)
    reads = info.reads
    for i, arg in enumerate(args):
        kind = arg.__class__
        if kind is tensor_class:
            parts.append(arg._spec)
        elif kind is int or kind is bool:
            parts.append((kind, arg) if reads[i] is None else _part(tensor_class, arg, reads[i]))
        elif isinstance(arg, torch.Tensor):
            ours = issubclass(kind, tensor_class)
            parts.append(arg._spec if ours else _plain_key(arg))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            parts.append(_part(tensor_class, arg, reads[i]))
    for name in kwargs:
        arg = kwargs[name]
        kind = arg.__class__
        read = reads[info.names.index(name)]
        parts += (name, (kind, arg) if read is None and kind in CONSTANTS else _part(tensor_class, arg, read))
    return tuple(parts)


def _part(tensor_class: type, value: Any, looked_at: Reader) -> Any:
    kind = value.__class__
    if issubclass(kind, tensor_class):
        return value._spec
    if kind is list or kind is tuple:
        if value and value[0].__class__ is int:  # sizes and dims: of one type by the schema
            return tuple(value)
        return tuple(
            [item._spec if item.__class__ is tensor_class else _part(tensor_class, item, looked_at) for item in value]
        )
    if isinstance(value, torch.Tensor):
        return _plain_key(value)
    if looked_at is not None:
        # a number that shapes nothing: its type, and what the rule looks at, if it looks
        return kind if looked_at is UNREAD else (kind, looked_at(value))
    # 1 == 1.0 == True to a dictionary, but not to an operator
    return (kind, value)


def _plain_key(tensor: torch.Tensor) -> Key:
    """The key of a plain tensor, with what it is taken for."""
    return (modes.plain_policy(), TensorMeta.of(tensor))


def is_symbolic(key: Key) -> bool:
    """Whether sizes in a call are those of a compiler: then the call is traced, and not met again."""
    for part in key:
        kind = part.__class__
        if kind is DTensorSpec:
            part = part.tensor_meta
            kind = TensorMeta
        if part.is_symbolic if kind is TensorMeta else is_symbolic(part) if kind is tuple else kind is torch.SymInt:
            return True
    return False
