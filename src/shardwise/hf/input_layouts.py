"""shard_batch and context_parallel: a model shards its own inputs, samples over one axis and tokens over another.

Layouts affect communication, not values. So an unknown input stays unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.api import distribute_module, distribute_tensor
from shardwise.compilers import not_compiled
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard, Zigzag
from shardwise.errors import LayoutError, MeshError
from shardwise.fabric.world import as_mesh
from shardwise.hf.flex_calls import call_flex_attention_uncompiled
from shardwise.hf.transformers_version import check_loaded
from shardwise.parallel.tensor_parallel.style import STYLES
from shardwise.tensor import is_dtensor

__all__ = ["context_parallel", "shard_batch"]

Model = TypeVar("Model", bound=nn.Module)
_LAYOUTS = "_shardwise_input_layouts"  # on a model: the InputLayouts of its hook
# Inputs of (samples, tokens), and of (samples, tokens, features).
TOKENS = {
    "attention_mask",
    "decoder_attention_mask",
    "decoder_input_ids",
    "input_ids",
    "labels",
    "mm_token_type_ids",
    "position_ids",
    "shift_labels",
    "token_type_ids",
}
EMBEDDED = {"decoder_inputs_embeds", "inputs_embeds"}


class InputLayouts:
    """The layouts of a model's inputs: the axis of its samples, and that of its tokens."""

    def __init__(self) -> None:
        self.samples: DeviceMesh | None = None
        self.tokens: DeviceMesh | None = None
        self.along: type[Shard] | type[Zigzag] = Zigzag
        self._mesh: DeviceMesh | None = None

    def mesh_of(self, model: nn.Module) -> DeviceMesh:
        """The mesh of the inputs: the axes of the samples, the tokens and the parameters."""
        if self._mesh is None:
            parameters: Any = model.parameters()
            found = {each.device_mesh for each in parameters if is_dtensor(each)}
            found |= {each for each in (self.samples, self.tokens) if each is not None}
            self._mesh = _joined(found)
        return self._mesh

    def reset(self) -> None:
        """Determine the mesh again at the next call."""
        self._mesh = None

    def laid_out(self, name: str, value: Any, mesh: DeviceMesh) -> Any:
        """An input as a DTensor; unchanged if it is one already, or has neither samples nor tokens."""
        if not isinstance(value, torch.Tensor) or is_dtensor(value):
            return value
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if self.samples is not None and value.ndim > 0 and (dim := _sample_dim(name, value)) is not None:
            placements[_axis_in(mesh, self.samples)] = Shard(dim)
        if self.tokens is not None and (dim := _token_dim(name, value)) is not None:
            axis = _axis_in(mesh, self.tokens)
            if value.shape[dim] >= mesh.size(axis):  # not the single tokens of `generate`
                placements[axis] = self.along(dim)
        if all(each.is_replicate() for each in placements):
            return value
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _sample_dim(name: str, value: torch.Tensor) -> int | None:
    if name not in TOKENS | EMBEDDED and not name.startswith(("pixel_values", "input_features", "input_values")):
        return None
    dim = 1 if name == "position_ids" and value.ndim == 3 else 0  # (3, samples, tokens): time, height, width
    return dim if value.ndim > 1 and value.shape[dim] > 1 else None


def _token_dim(name: str, value: torch.Tensor) -> int | None:
    if name in TOKENS and (value.ndim == 2 or (name == "position_ids" and value.ndim == 3)):
        return value.ndim - 1
    return 1 if name in EMBEDDED and value.ndim == 3 else None


def _joined(meshes: set[DeviceMesh]) -> DeviceMesh:
    """The mesh with the axes of all of these, in the order of the grid that they were cut from."""
    roots = {mesh.root for mesh in meshes}
    if len(meshes) == 1:
        return next(iter(meshes))
    if len(roots) > 1:
        raise MeshError(
            "the parameters and the inputs are on meshes that were made separately: "
            f"{', '.join(sorted(map(repr, roots)))}",
            hint='make one mesh, and give its axes: mesh["tp"], mesh["cp"]',
        )
    (root,) = roots
    used = sorted({at for mesh in meshes for axes in mesh.axes for at in axes})
    return root[tuple(root.axis_name(at) for at in used)]


def _axis_in(mesh: DeviceMesh, part: DeviceMesh) -> int:
    axis = mesh.axis_of(part)
    assert axis is not None
    return axis


def _layouts_of(model: nn.Module, axis: Any) -> tuple[InputLayouts, DeviceMesh]:
    """The layouts of a model, with the hook that applies them, and the requested mesh of one axis."""
    check_loaded()
    call_flex_attention_uncompiled()
    mesh = as_mesh(axis)
    if mesh.ndim != 1:
        raise MeshError(
            f"inputs are sharded over one axis, and {mesh} has {mesh.ndim}", hint='pass one axis: mesh["cp"]'
        )
    for path, module in model.named_modules():
        if any(planned == mesh for _, planned in module.__dict__.get(STYLES, ())):
            raise LayoutError(
                f"{mesh} is the axis of the plan of {path or type(model).__name__!r}; inputs need another axis",
                hint='use axes of one mesh: parallelize(model, mesh["tp"]), then mesh["dp"] or mesh["cp"] here',
            )
    known = model.__dict__.get(_LAYOUTS)
    if known is None:
        known = InputLayouts()
        model.__dict__[_LAYOUTS] = known
        model.register_forward_pre_hook(_lay_out_inputs, with_kwargs=True)
    known.reset()
    parameters: Any = model.parameters()
    if not any(is_dtensor(each) for each in parameters):
        distribute_module(model, mesh)
    return known, mesh


@not_compiled
def _lay_out_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layouts: InputLayouts = model.__dict__[_LAYOUTS]
    mesh = layouts.mesh_of(model)
    names = dict(zip(_positional(model), args, strict=False))
    given = {**names, **kwargs}
    _check_some(model, layouts, given)
    flex = getattr(getattr(model, "config", None), "_attn_implementation", None) == "flex_attention"
    kept = "attention_mask" if flex else None  # torch compiles the creation of block masks from plain tensors
    moved = {name: value if name == kept else layouts.laid_out(name, value, mesh) for name, value in given.items()}
    rest = args[len(names) :]
    return (*(moved[name] for name in names), *rest), {name: moved[name] for name in kwargs}


def _positional(model: nn.Module) -> Iterator[str]:
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield name


def _check_some(model: nn.Module, layouts: InputLayouts, given: Mapping[str, Any]) -> None:
    """Raise if no input has tokens: all would be replicated silently."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if layouts.tokens is None or any(
        is_dtensor(value) or _token_dim(name, value) is not None for name, value in tensors.items()
    ):
        return
    raise LayoutError(
        f"context_parallel: none of the inputs of {type(model).__name__} has tokens to shard: {', '.join(tensors)}",
        hint=f"tokens are dim 1 of {', '.join(sorted(TOKENS | EMBEDDED))}; or pass sharded DTensors",
    )


def shard_batch(model: Model, device_mesh: Any = None) -> Model:
    """Let a model shard its plain inputs over a mesh axis by their samples: each rank takes its part of a global batch.

    Inputs must be the same on every rank, like those of a loader with one seed; nothing is communicated. Losses are
    means over the global batch, as on one device. DTensors are unchanged.

    Args:
        model: a model of transformers, plain or after `parallelize` or `fully_shard`.
        device_mesh: a mesh of one axis: `mesh["dp"]` where there are several.

    Returns:
        The model.

    Example:
        >>> model = shard_batch(parallelize(model, mesh["tp"]), mesh["dp"])  # doctest: +SKIP
        >>> model(**batch).loss.backward()  # doctest: +SKIP
    """
    layouts, mesh = _layouts_of(model, device_mesh)
    layouts.samples = mesh
    return model


def context_parallel(model: Model, device_mesh: Any = None, placement: type[Placement] = Zigzag) -> Model:
    """Let a model shard its plain inputs over a mesh axis by their tokens: a rank has a part of each sequence.

    Positions, masks, rotary tables and the shift of the labels are those of one device. Attention exchanges keys and
    values as set by `sw.attention`; everything else works token by token. Inputs must be the same on every rank;
    nothing is communicated to shard them. DTensors, and the single tokens of `generate`, are unchanged.

    Args:
        model: a model of transformers whose inputs are tokens, plain or after `parallelize` or `fully_shard`.
        device_mesh: a mesh of one axis, another than that of the plan: `mesh["cp"]` where there are several.
        placement: `Zigzag`, which balances the work of causal attention, or `Shard`, contiguous parts. Layers that
            scan a sequence (convolutions, linear attention) communicate less with `Shard`.

    Returns:
        The model.

    Example:
        >>> model = context_parallel(parallelize(model, mesh["tp"]), mesh["cp"])  # doctest: +SKIP
        >>> model(**batch).loss.backward()  # doctest: +SKIP
    """
    along = next((each for each in (Shard, Zigzag) if each is placement), None)
    if along is None:
        raise LayoutError(
            f"context_parallel: placement={placement!r} does not shard tokens", hint="pass the class Shard or Zigzag"
        )
    layouts, mesh = _layouts_of(model, device_mesh)
    layouts.tokens, layouts.along = mesh, along
    return model
