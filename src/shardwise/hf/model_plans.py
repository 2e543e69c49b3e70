"""The plan of a model: its own plan, a given plan, or a plan derived from its structure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.core.placement import Placement
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.hf.derived_plans import derived_plan
from shardwise.hf.parameter_style import ShardParameters
from shardwise.hf.style_names import check_name, is_silent, layer_style, parameter_placement
from shardwise.parallel.tensor_parallel.adapters import BASE
from shardwise.parallel.tensor_parallel.style import ParallelStyle

__all__ = ["plan_of"]

NamedPlan = Mapping[str, Any]


def plan_of(model: nn.Module, plan: str | NamedPlan = "auto") -> dict[str, ParallelStyle]:
    """The plan of a model of transformers, as a plan for `parallelize_module`: paths of modules and their styles.

    Args:
        model: the model, or an adapter of peft around it.
        plan: `"tp"` uses the model's tensor-parallel plan; `"ep"` its expert-parallel plan, and the tensor-parallel
            plan for other modules; `"derived"` recognizes attention and MLPs by their structure; `"auto"` uses the
            first of the three that has layers. Or a dict from paths, in which `*` is a number, to names of styles or to
            a `ParallelStyle`.

    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        >>> [type(style).__name__ for style in plan_of(mlp, {"0": "colwise", "2": "rowwise"}).values()]
        ['ColwiseParallel', 'RowwiseParallel']
    """
    inside: Any = getattr(model, "get_base_model", None)  # of an adapter of peft
    base: nn.Module = model if inside is None else inside()
    found = resolved(base, named_plan(base, plan))
    if base is model:
        return found
    prefix = next(path for path, module in model.named_modules() if module is base)
    return {f"{prefix}.{path}": style for path, style in found.items()}


# ---------------------------------------------------------------- which plan


def named_plan(model: nn.Module, plan: str | NamedPlan) -> NamedPlan:
    """The requested plan, with names of styles."""
    if isinstance(plan, Mapping):
        return plan
    own = {"tp": _carried(model, "tp_plan"), "ep": _carried(model, "ep_plan")}
    if plan == "auto":
        plan = next((name for name, found in own.items() if any("*" in path for path in found)), "derived")
        if plan == "derived":
            return _warn_derived(model, derived_plan(model)) | own["tp"]  # which may have only the head
    if plan == "derived":
        return derived_plan(model) | own["tp"]
    if plan not in own:
        raise LayoutError(f"plan={plan!r} is not known", hint="use 'auto', 'tp', 'ep', 'derived' or a dict")
    if not own[plan]:
        others = [name for name, found in own.items() if found]
        raise UnsupportedError(
            f"{type(model).__name__} carries no {plan} plan",
            hint=f"use plan={others[0]!r} or a dict" if others else "use plan='derived' or a dict",
        )
    return own["tp"] if plan == "tp" else _with_experts(own["tp"], own["ep"])


def _carried(model: nn.Module, name: str) -> dict[str, str]:
    return dict(getattr(model, name, None) or getattr(model, f"_{name}", None) or {})  # 5.17 has no `ep_plan`


def _with_experts(dense: dict[str, str], experts: dict[str, str]) -> dict[str, str]:
    """The plan of the experts, and the dense plan for all modules that it does not name."""
    taken = re.compile("|".join(rf"{re.escape(path)}(\..+)?" for path in experts))
    return {path: style for path, style in dense.items() if not taken.fullmatch(path)} | experts


def _warn_derived(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(".".join(path.split(".")[-2:]) for path in plan)
    found = f"one was derived from its structure: {', '.join(names)}"
    none = (
        "no attention and no MLP was recognized in it, so it is replicated, for data parallelism with a sharded batch"
    )
    warnings.warn(f"{type(model).__name__} carries no plan; {found if plan else none}", stacklevel=5)
    return plan


# ---------------------------------------------------------------- names of styles as styles


def resolved(model: nn.Module, plan: NamedPlan) -> dict[str, ParallelStyle]:
    """The styles of all modules that a plan names. Paths that the model lacks are ignored."""
    for path, style in plan.items():
        if not isinstance(style, ParallelStyle):
            check_name(style, path)
    parts = dict(_parts(model))
    styles: dict[str, ParallelStyle] = {}
    parameters: dict[str, dict[str, Placement]] = {}
    for pattern, style in plan.items():
        for path in _matching(parts, pattern):
            part = parts[path]
            if isinstance(style, ParallelStyle):
                styles[path] = style
            elif is_silent(style):
                continue
            elif isinstance(part, nn.Parameter):
                owner, _, name = path.rpartition(".")
                parameters.setdefault(owner, {})[name] = parameter_placement(style, part)
            elif (layer := layer_style(style, _inside_adapters(part))) is not None:
                styles[path] = layer
            else:
                for name, parameter in part.named_parameters(recurse=False):
                    parameters.setdefault(path, {})[name] = parameter_placement(style, parameter)
    if plan and not styles and not parameters:
        raise LayoutError(
            f"the plan shards no module of {type(model).__name__}; its paths are {', '.join(list(plan)[:4])}",
            hint="paths begin at the model that is passed, as in 'model.layers.*.self_attn.q_proj'",
        )
    styles |= {path: ShardParameters(placements) for path, placements in parameters.items()}
    return styles | dict.fromkeys(_tied_to(model, styles), ShardParameters({}))


def _tied_to(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """The modules outside of a plan that share a parameter with a module of it, such as an embedding and the head.

    Their parameter is sharded too, so they need a style that remaps it to a larger mesh.
    """
    named = [module for path, module in model.named_modules() if path in styles]
    sharded = {id(parameter) for module in named for parameter in module.parameters()}
    inside = {each for module in named for each in module.modules()}
    for path, module in model.named_modules():
        if module not in inside and any(id(each) in sharded for each in module.parameters(recurse=False)):
            yield path


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    yield from model.named_modules()
    for owner, module in model.named_modules():  # tied parameters by all of their names
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{owner}.{name}" if owner else name, parameter


def _matching(parts: Mapping[str, Any], pattern: str) -> list[str]:
    """The paths that a pattern matches; `*` is the number of a layer."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    return [path for path in parts if matches(path)]


def _inside_adapters(module: nn.Module) -> nn.Module:
    while isinstance(base := module._modules.get(BASE), nn.Module):
        module = base
    return module
