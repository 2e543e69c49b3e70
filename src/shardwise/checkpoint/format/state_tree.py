"""A nested state as named entries and back: its tensors and plain objects with their names.

Dicts are traversed; lists and tuples only if they contain a tensor, otherwise they are one object. Modules, optimizers
and other objects with `state_dict` and `load_state_dict` are replaced by their state dict. No file access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.json_values import (
    DEEPEST,
    Name,
    decode,
    decode_kind,
    encode,
    encode_items,
    is_plain,
    join,
    kind_of,
)
from shardwise.errors import CheckpointError

__all__ = [
    "ExpandedObject",
    "StateTree",
    "encode_state",
    "entries",
    "expand",
    "filled",
    "merge",
    "rebuild",
    "stored_entries",
    "tensor_name",
    "tensors_in",
]

TENSOR = "$tensor"


class ExpandedObject(NamedTuple):
    """An object that was replaced by its state dict: its path, the object, and the dict."""

    path: Name
    owner: Any
    state: dict[Any, Any]


class StateTree(NamedTuple):
    """A state of dicts, lists, tuples, tensors and plain objects, and the objects that were replaced in it."""

    root: Any
    expanded: tuple[ExpandedObject, ...]


def is_stateful(value: Any) -> bool:
    """Whether a value has a state dict."""
    if isinstance(value, dict | torch.Tensor | type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def expand(
    state: Any,
    state_of: Callable[[Any, Name], dict[Any, Any]] = lambda owner, path: owner.state_dict(),
    *,
    exact: bool = True,
) -> StateTree:
    """The state with every module, optimizer, ... replaced by its state dict. The user's containers are not changed.

    An unsupported dict type is an error. Without `exact` all dicts become plain dicts, which suffices for loading.
    """
    found: list[ExpandedObject] = []

    def walk(value: Any, path: Name) -> Any:
        if len(path) > DEEPEST:
            raise CheckpointError(
                f"{join(path[:8])}... is nested more than {DEEPEST} levels deep", hint="does it contain itself?"
            )
        if is_stateful(value):
            made = state_of(value, path)
            found.append(ExpandedObject(path, value, made))
            # load_state_dict gets a dict of the object's own type, so the type of this dict is not stored
            return walk(dict(made) if isinstance(made, dict) else made, path)
        if isinstance(value, dict):
            items = [(key, walk(item, (*path, key))) for key, item in value.items()]
            return kind_of(value, path)(dict(items)) if exact else dict(items)
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, i)) for i, item in enumerate(value))
        return value

    root = walk(state, ())
    if not isinstance(root, dict):
        raise CheckpointError(
            f"the state is a {type(state).__qualname__}", hint="pass a dict, for example {'model': model, 'step': 3}"
        )
    return StateTree(root, tuple(found))


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """The visible tensors of a state, expanded or not; used to find the ranks that take part."""
    left, seen = [state], set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from value.parameters()
            yield from value.buffers()
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value


def entries(root: Any, path: Name = ()) -> Iterator[tuple[Name, Any]]:
    """Every tensor and every plain object of an expanded state, with its path of keys."""
    if isinstance(root, dict):
        for key, item in root.items():
            yield from entries(item, (*path, key))
    elif type(root) in (list, tuple) and not is_plain(root):
        for i, item in enumerate(root):
            yield from entries(item, (*path, i))
    else:
        yield path, root


def encode_state(root: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state as JSON data with names in place of tensors, and the tensors by name."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, Name] = {}

    def walk(value: Any, path: Name) -> Any:
        if isinstance(value, dict):
            return encode_items([(key, walk(item, (*path, key))) for key, item in value.items()], path, value)
        if type(value) in (list, tuple) and not is_plain(value):
            items = [walk(item, (*path, i)) for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        name = join(path)
        if names.setdefault(name, path) != path:
            raise CheckpointError(
                f"two entries of the state have the name {name}: {names[name]} and {path}",
                hint="different keys must have different names: 0 and '0' have the same",
            )
        if not isinstance(value, torch.Tensor):
            return encode(value, path)
        tensors[name] = value
        return {TENSOR: name}

    return walk(root, ()), tensors


# ---------------------------------------------------------------- from a stored state


def stored_entries(data: Any) -> dict[str, tuple[Name, Any]]:
    """The entries of a stored state by name: the path of keys, and the encoded tensor name or object."""
    found: dict[str, tuple[Name, Any]] = {}

    def walk(value: Any, path: Name) -> None:
        if len(path) > 2 * DEEPEST:
            raise CheckpointError(f"the stored state is nested more than {DEEPEST} levels deep")
        pairs = _children(value)
        if pairs is None:
            if join(path) in found:
                raise CheckpointError(f"the stored state has two entries named {join(path)}")
            found[join(path)] = (path, value)
        else:
            for key, item in pairs:
                walk(item, (*path, key))

    walk(data, ())
    return found


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a stored container, None for an entry."""
    if isinstance(value, list):
        return None if _has_no_tensor(value) else list(enumerate(value))
    if not isinstance(value, dict):
        return None
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return list(value.items())
    kind = decode_kind(value)
    if kind is not None:
        return _children(kind[0])
    content = value[tag]
    if tag == "$dict" and len(value) == 1 and isinstance(content, list):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
            raise CheckpointError("the stored state has an invalid encoding of a dict")
        keys = decode({"$dict": [[key, None] for key, _ in content]})
        return list(zip(keys, [item for _, item in content], strict=True))
    if tag == "$tuple" and len(value) == 1 and isinstance(content, list) and not _has_no_tensor(content):
        return list(enumerate(content))
    return None


def _has_no_tensor(data: Any, depth: int = 0) -> bool:
    if depth > 2 * DEEPEST:
        raise CheckpointError(f"the stored state is nested more than {DEEPEST} levels deep")
    if isinstance(data, list):
        return all(_has_no_tensor(item, depth + 1) for item in data)
    if isinstance(data, dict):
        return TENSOR not in data and all(_has_no_tensor(item, depth + 1) for item in data.values())
    return True


def tensor_name(value: Any) -> str | None:
    """The tensor name of a stored entry, None for a plain object."""
    if isinstance(value, dict) and set(value) == {TENSOR} and isinstance(value[TENSOR], str):
        return value[TENSOR]
    return None


def rebuild(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode a stored state, with these tensors."""
    name = tensor_name(data)
    if name is not None:
        return tensors[name]
    pairs = _children(data)
    if pairs is None:
        return decode(data)
    if isinstance(data, dict) and "$tuple" not in data:
        kind = decode_kind(data)
        made = {key: rebuild(item, tensors) for key, item in pairs}
        return made if kind is None else kind[1](made)
    items = [rebuild(item, tensors) for _, item in pairs]
    return items if isinstance(data, list) else tuple(items)


def merge(ours: Any, theirs: Any) -> Any:
    """A stored state, with the missing entries added from another."""
    if not (_is_stored_dict(ours) and _is_stored_dict(theirs)):
        return ours
    merged = dict(_children(ours) or ())
    for key, item in _children(theirs) or ():
        merged[key] = merge(merged[key], item) if key in merged else item
    kind = decode_kind(ours)
    return encode_items(list(merged.items()), (), {} if kind is None else kind[1]({}))


def _is_stored_dict(data: Any) -> bool:
    if not isinstance(data, dict):
        return False
    return "$dict" in data or decode_kind(data) is not None or not next(iter(data), "").startswith("$")


def filled(value: Any, objects: Mapping[Name, Any], path: Name = ()) -> Any:
    """`value` with the entries at these paths replaced: dicts and lists in place, tuples as new tuples."""
    if path in objects:
        return objects[path]
    if isinstance(value, dict):
        for key in value:
            value[key] = filled(value[key], objects, (*path, key))
    elif type(value) is list:
        value[:] = [filled(item, objects, (*path, i)) for i, item in enumerate(value)]
    elif type(value) is tuple:
        return tuple([filled(item, objects, (*path, i)) for i, item in enumerate(value)])
    return value
