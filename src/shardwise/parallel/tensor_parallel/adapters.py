"""Adapters (LoRA) around a layer of a plan.

An adapter adds a function of a layer's input to its output: `base_layer(x) + lora_B(lora_A(x))`. If the layer takes or
returns plain locals, the two terms do not match. So the hooks that convert to and from locals are moved
from the layer to the module around it, and everything inside computes on DTensors, as one device would. Parameters of
the adapter stay plain, and are replicated.

peft names the layer `base_layer` in all of its adapters, and so does this file.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwise.parallel.tensor_parallel.layer import (
    Layer,
    LayerLayouts,
    features_of,
    layer_of,
    new_cache,
    reinstall,
    uninstall,
)
from shardwise.parallel.tensor_parallel.style import STYLES

__all__ = ["BASE", "convert_around_adapters"]

BASE = "base_layer"
_AROUND = "_shardwise_around"  # on an adapter: the hooks of its layer, restored when the adapter is removed


def convert_around_adapters(module: nn.Module) -> None:
    """Move the hooks of layers of a plan to the adapters around them, also for adapters that are added later.

    Not if the plan has a style for another part of the adapter, or a second style for the layer.
    """
    _watch_registrations()
    for owner in reversed(list(module.modules())):  # an adapter may be around another: the inner one first
        base = owner._modules.get(BASE)
        if base is not None:
            _place_hooks(owner, base)


def _place_hooks(adapter: nn.Module, base: nn.Module) -> None:
    inside = {id(part) for part in base.modules()}
    has_more_styles = any(STYLES in part.__dict__ for part in adapter.modules() if id(part) not in inside)
    layer = layer_of(base)
    if layer is None or has_more_styles or len(base.__dict__.get(STYLES, ())) > 1:
        _move_back(adapter, base)
    elif _AROUND not in adapter.__dict__:
        _move_out(adapter, base, layer)


def _move_out(adapter: nn.Module, base: nn.Module, layer: Layer) -> None:
    features = layer.layouts.features
    size = None if features is None else features_of(base, features)
    around = Layer(
        layer.mesh,
        LayerLayouts({}, layer.layouts.input, size, on_locals=False),
        layer.given,
        layer.output,
        layer.to_local,
    )
    around.install(adapter)
    reinstall(
        base,
        replace(
            layer, given=layer.layouts.input, output=None, to_local=False, programs=new_cache(), results=new_cache()
        ),
    )
    adapter.__dict__[_AROUND] = layer


def _move_back(adapter: nn.Module, base: nn.Module) -> None:
    layer = adapter.__dict__.pop(_AROUND, None)
    if layer is not None:
        uninstall(adapter)
        if layer_of(base) is not None:  # an inner adapter may have been removed
            reinstall(base, layer)


@functools.cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_registered)


def _registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called when a module is registered in another: an adapter gets its layer, or a layer replaces its adapter."""
    if name == BASE:
        if module is not None:
            _place_hooks(owner, module)
        return
    before = owner._modules.get(name)
    if before is not None and module is not None and before._modules.get(BASE) is module:
        _move_back(before, module)
