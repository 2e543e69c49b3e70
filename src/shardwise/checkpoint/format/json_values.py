"""Plain objects as JSON and back: lossless, for a fixed set of types, without executing code.

A value that JSON cannot represent is an object with one key that starts with `$`. Any other type is an error that names
its place in the state.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.checkpoint.format.stored_dtypes import DTYPES, NAMES
from shardwise.errors import CheckpointError

__all__ = ["Name", "decode", "decode_kind", "encode", "encode_items", "is_plain", "join", "kind_of"]

Name = tuple[Any, ...]  # the path of keys to an entry
DEEPEST = 100  # levels of nesting, in writing and in reading
EXACT = 2**53  # some JSON readers convert larger integers to floats
_HEX = re.compile(r"-?0x[0-9a-f]+")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KEYS = (str, int)
_KINDS = ("$ordered", "$counter", "$default")  # subclasses of dict; the value is the content as a dict
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None, "int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": tuple, "dict": dict,
    "OrderedDict": OrderedDict, "Counter": Counter,
}  # fmt: skip


def join(path: Sequence[Any]) -> str:
    """The name of an entry: its keys joined by `/`; `~` and `/` inside a key are `~0` and `~1`.

    Example:
        >>> join(("optimizer", "state", 0, "exp_avg"))
        'optimizer/state/0/exp_avg'
    """
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


def is_plain(value: Any) -> bool:
    """Whether `value` contains no tensor: it is stored as one object."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else True


def encode(value: Any, path: Name = (), depth: int = 0) -> Any:
    """`value` as JSON data; `decode` is the inverse.

    Example:
        >>> encode({"betas": (0.9, float("inf")), 3: [None, 2**60]})
        {'$dict': [['betas', {'$tuple': [0.9, {'$float': 'inf'}]}], [3, [None, {'$int': '0x1000000000000000'}]]]}
    """
    if depth > DEEPEST:
        raise CheckpointError(
            f"{join(path[:8])}... is nested more than {DEEPEST} levels deep", hint="does it contain itself?"
        )
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -EXACT <= value <= EXACT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encode(item, (*path, i), depth + 1) for i, item in enumerate(value)]
    if kind is torch.dtype and value in NAMES:
        return {"$dtype": NAMES[value]}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is tuple:
        return {"$tuple": [encode(item, (*path, i), depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        items = [(key, encode(item, (*path, key), depth + 1)) for key, item in value.items()]
        return encode_items(items, path, value)
    raise _refused(value, path)


def _refused(value: Any, path: Name) -> CheckpointError:
    return CheckpointError(
        f"{join(path) or 'the state'} is {_what(value)}, which a checkpoint cannot store",
        hint="supported are tensors, numbers, strings, None, lists, tuples, dicts, OrderedDict, defaultdict and "
        "Counter; convert numpy values with .tolist(), named tuples with ._asdict(), dataclasses with asdict()",
    )


def encode_items(items: Sequence[tuple[Any, Any]], path: Name, like: dict[Any, Any]) -> Any:
    """Encode a dict of the type of `like`, whose values are already encoded."""
    for key, _ in items:
        if type(key) not in _KEYS:
            raise CheckpointError(
                f"{join(path) or 'the state'} has the key {key!r}, {_what(key)}", hint="keys are strings or integers"
            )
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        made: Any = dict(items)
    else:
        made = {"$dict": [[encode(key), item] for key, item in items]}
    return _encode_kind(like, made, path)


def _encode_kind(value: dict[Any, Any], made: Any, path: Name) -> Any:
    kind_of(value, path)
    if type(value) is OrderedDict:
        return {"$ordered": made}
    if type(value) is Counter:
        return {"$counter": made}
    if isinstance(value, defaultdict):
        return {"$default": [next(n for n, made_by in _FACTORIES.items() if made_by is value.default_factory), made]}
    return made


def kind_of(value: dict[Any, Any], path: Name) -> Callable[[dict[Any, Any]], dict[Any, Any]]:
    """A function from a plain dict to the dict type of `value`; raises for unsupported types."""
    if type(value) is defaultdict:
        factory = value.default_factory
        if not any(factory is known for known in _FACTORIES.values()):
            raise CheckpointError(
                f"{join(path) or 'the state'} is a defaultdict of {factory!r}, which a checkpoint cannot store",
                hint=f"supported factories are {', '.join(_FACTORIES)}; or use dict(...)",
            )
        return lambda made: defaultdict(factory, made)
    for kind in (dict, OrderedDict, Counter):
        if type(value) is kind:
            return kind
    raise _refused(value, path)


def decode_kind(data: dict[str, Any]) -> tuple[Any, Callable[[dict[Any, Any]], dict[Any, Any]]] | None:
    """For an encoded dict subclass: its content, and the function from a plain dict to it; None for other data."""
    tag = next(iter(data), "")
    if tag not in _KINDS or len(data) != 1:
        return None
    content = data[tag]
    make: Callable[[dict[Any, Any]], dict[Any, Any]] = OrderedDict if tag == "$ordered" else Counter
    if tag == "$default":
        if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str):
            raise CheckpointError(f"invalid encoding of a dict: {_shown(data)}")
        name, content = content
        if name not in _FACTORIES:
            raise CheckpointError(f"unknown default factory of a dict: {name[:80]!r}")
        make = lambda made: defaultdict(_FACTORIES[name], made)  # noqa: E731
    inner = next(iter(content), "") if isinstance(content, dict) else "$"
    if inner.startswith("$") and inner != "$dict":
        raise CheckpointError(f"invalid encoding of a dict: {_shown(data)}")
    return content, make


def _what(value: Any) -> str:
    return f"of type {type(value).__module__}.{type(value).__qualname__}"


def decode(data: Any, depth: int = 0) -> Any:
    """The inverse of `encode`; raises for data that `encode` cannot return.

    Example:
        >>> decode({"$tuple": [1, {"$float": "nan"}]})
        (1, nan)
    """
    if depth > 2 * DEEPEST:
        raise CheckpointError(f"an object is nested more than {DEEPEST} levels deep")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: decode(item, depth + 1) for key, item in data.items()}
    kind = decode_kind(data)
    if kind is not None:
        return kind[1](decode(kind[0], depth + 1))
    content = data[tag]
    if len(data) == 1 and tag in ("$tuple", "$dict") and isinstance(content, list):
        items = [decode(item, depth + 1) for item in content]
        return tuple(items) if tag == "$tuple" else _dict_of(items)
    if len(data) == 1 and isinstance(content, str):
        if tag == "$int" and _HEX.fullmatch(content):
            return int(content, 16)
        if tag == "$float" and content in _FLOATS:
            return _FLOATS[content]
        if tag == "$dtype" and content in DTYPES:
            return DTYPES[content]
    if len(data) == 1 and tag == "$size" and isinstance(content, list) and all(type(n) is int for n in content):
        return torch.Size(content)
    raise CheckpointError(f"invalid encoding of an object: {_shown(data)}")


def _shown(data: Any) -> str:
    """The begin of a value as text; it may be too deep to be shown."""
    try:
        return str(data)[:80]
    except RecursionError:
        return "nested too deep"


def _dict_of(pairs: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in _KEYS or pair[0] in made:
            raise CheckpointError(f"invalid encoding of a dict entry: {_shown(pair)}")
        made[pair[0]] = pair[1]
    return made
