"""A plan for a model without one: attention and MLPs of its repeated blocks, recognized by names and sizes.

Layouts affect communication, not values, so a wrong guess only costs time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from shardwise.core.placement import Shard, StridedShard
from shardwise.hf.parameter_style import ShardParameters

__all__ = ["derived_plan"]

_NAME = r"(q|k|v|query|key|value)(_?(proj|lin|layer|linear))?"
PROJECTION = re.compile(_NAME)
FUSED = re.compile(r"(w?qkv|query_key_value|c_attn|in_proj)(_?(proj|lin))?", re.IGNORECASE)


class Linear(NamedTuple):
    """A linear layer of a block; `transposed` if its weight is (inputs, outputs), as in GPT-2."""

    path: str
    inputs: int
    outputs: int
    transposed: bool

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The path of the module that has it."""
        return self.path.rpartition(".")[0]


def derived_plan(model: nn.Module) -> dict[str, Any]:
    """A plan from paths, in which `*` is a number, to names of styles; empty if nothing is recognized.

    Example:
        >>> block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> derived_plan(nn.ModuleList([block, block]))
        {'*.0': 'colwise', '*.2': 'rowwise'}
    """
    plan: dict[str, Any] = {}
    for block in _blocks(model):
        left = list(block)
        for columns, row in [*_attentions(block), *_mlps(block)]:
            if not all(each in left for each in (*columns, row)):
                continue
            for each in (*columns, row):
                left.remove(each)
                plan.setdefault(_pattern(each.path), _style(each, each is row))
    return plan


# ---------------------------------------------------------------- recognized groups of layers


def _attentions(block: list[Linear]) -> Iterator[tuple[list[Linear], Linear]]:
    """Projections to queries, keys and values, with the projection that follows them."""
    at = 0
    while at < len(block):
        first = block[at]
        if FUSED.fullmatch(first.name):
            group, width = [first], None
        elif PROJECTION.fullmatch(first.name):
            group = [first]
            while at + len(group) < len(block) and _belongs(block[at + len(group)], first):
                group.append(block[at + len(group)])
            width = next((each.outputs for each in group if each.name.startswith("q")), first.outputs)
        else:
            at += 1
            continue
        at += len(group)
        if at < len(block) and not PROJECTION.fullmatch(block[at].name) and block[at].inputs in (width, first.inputs):
            yield group, block[at]


def _belongs(linear: Linear, first: Linear) -> bool:
    return linear.parent == first.parent and PROJECTION.fullmatch(linear.name) is not None


def _mlps(block: list[Linear]) -> Iterator[tuple[list[Linear], Linear]]:
    """Layers to more features, one or two of equal size, with the layer back to the original number."""
    for at, last in enumerate(block):
        group: list[Linear] = []
        for each in reversed(block[:at]):
            if (each.inputs, each.outputs) != (last.outputs, last.inputs) or each.inputs >= each.outputs:
                break
            group.insert(0, each)
        if group and not any(FUSED.fullmatch(each.name) for each in group):
            yield group, last


def _style(linear: Linear, row: bool) -> Any:
    if not linear.transposed:
        return "rowwise" if row else "colwise"
    if row:
        return ShardParameters({"weight": Shard(0)})
    parts = linear.outputs // linear.inputs if FUSED.fullmatch(linear.name) else 1
    if parts == 1:
        return ShardParameters({"weight": Shard(1), "bias": Shard(0)})
    return ShardParameters({"weight": StridedShard(1, split_factor=parts), "bias": StridedShard(0, split_factor=parts)})


# ---------------------------------------------------------------- blocks and layers


def _blocks(model: nn.Module) -> list[list[Linear]]:
    """The linear layers of each repeated block, in the order of their definition."""
    found: dict[str, list[Linear]] = {}
    for path, module in model.named_modules():
        linear = _linear(path, module)
        block = _block_of(path)
        if linear is not None and block is not None:
            found.setdefault(block, []).append(linear)
    return list(found.values())


def _block_of(path: str) -> str | None:
    """The path of the innermost module around a layer whose name is a number.

    A number directly above the layer counts only if it is the only one: it may be that of a layer (`mlp.0.dense`).
    """
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts[:-1]) if part.isdigit()]
    inner = [at for at in numbers if at + 2 < len(parts)] or numbers[:1]
    return ".".join(parts[: inner[-1] + 1]) if inner else None


def _linear(path: str, module: nn.Module) -> Linear | None:
    if isinstance(module, nn.Linear):
        return Linear(path, module.in_features, module.out_features, transposed=False)
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) is not None:  # transformers' own, of GPT-2
        weight: Any = module.weight
        return Linear(path, weight.shape[0], weight.shape[1], transposed=True)
    return None


def _pattern(path: str) -> str:
    """The path with `*` for each number, except the last part."""
    *parts, last = path.split(".")
    return ".".join([*("*" if part.isdigit() else part for part in parts), last])
