"""Interned data for torch's compiler: constants, compared by identity, which generated code rebuilds by a call."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.torch_private import opaque_types

__all__ = ["ConstantMeta", "constant_to_compilers", "why_not_constant"]

Value = TypeVar("Value")
_failed: list[str] = []
# Before torch 2.13 the registry needs a metaclass. It slows isinstance down, so it is used only for those versions.
ConstantMeta: Any = type if torch.__version__ >= "2.13" else getattr(opaque_types, "OpaqueBaseMeta", type)


def constant_to_compilers(kind: type[Value]) -> type[Value]:
    """Register a class of interned values: compilers take its values as constants and may read their attributes.

    Example:
        >>> why_not_constant() is None
        True
    """
    try:
        use = opaque_types.MemberType.USE_REAL
        # the compiler reads all of them beforehand, so those that may raise are omitted
        hidden = getattr(kind, "_not_constant", ())
        public = [name for name in dir(kind) if not name.startswith("_") and name not in hidden]
        special = [*filter(kind.__dict__.__contains__, ["__getitem__"]), "__eq__", "__ne__"]
        members = dict.fromkeys([*public, *special], use)
        opaque_types.register_opaque_type(kind, typ="value", members=members)
    except (AttributeError, TypeError) as error:  # another version of torch
        _failed.append(f"{type(error).__name__}: {error}")
    return kind


def why_not_constant() -> str | None:
    """The reason why the compiler of this version of torch cannot take our values as constants; None if it can.

    Example:
        >>> why_not_constant() is None
        True
    """
    return _failed[0] if _failed else None
