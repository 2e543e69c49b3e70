"""PrepareModuleInput, PrepareModuleOutput and both in one: layouts of inputs and outputs; parameters are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.errors import LayoutError
from shardwise.parallel.tensor_parallel.style import ParallelStyle, placement_of, placements_of
from shardwise.parallel.tensor_parallel.value_layouts import in_layouts, local_of

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = tuple[Placement | None, ...]


def _prepared(value: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, to_local: bool) -> Any:
    """The tensors of one argument or result in the wanted layout; unchanged if `given` is None."""
    if given is None:
        return value
    found = in_layouts(value, mesh, given, given if wanted is None else wanted)
    return local_of(found, mesh) if to_local else found


class PrepareModuleInput(ParallelStyle):
    """Lay out the inputs of a module: plain tensors become DTensors, and these are redistributed.

    Args:
        input_layouts: the layout of each positional input; None to leave one unchanged. One placement for one input.
        desired_input_layouts: the layout that the module needs, as many as `input_layouts`.
        input_kwarg_layouts: the layouts of keyword inputs, by name; others are unchanged.
        desired_input_kwarg_layouts: the layouts that the module needs of these.
        use_local_output: give the module plain tensors, each rank its part, instead of DTensors (the default).

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> style = PrepareModuleInput(input_layouts=sw.Shard(0), desired_input_layouts=sw.Replicate())
        >>> same = sw.parallel.parallelize_module(torch.nn.Identity(), mesh, style)
        >>> same(torch.ones(2, 3)).spec
        f32[8,3] R
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = None if input_layouts is None else placements_of(input_layouts, self, "input_layouts")
        self.desired_input_layouts = (
            None
            if desired_input_layouts is None
            else placements_of(desired_input_layouts, self, "desired_input_layouts")
        )
        self.input_kwarg_layouts = self._by_name(input_kwarg_layouts, "input_kwarg_layouts")
        self.desired_input_kwarg_layouts = self._by_name(desired_input_kwarg_layouts, "desired_input_kwarg_layouts")
        self.with_kwargs = input_kwarg_layouts is not None
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            _check_alike(self, "input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise LayoutError(
                f"{self}: input_kwarg_layouts and desired_input_kwarg_layouts name different inputs",
                hint="give each of them a layout in both",
            )

    def _by_name(self, layouts: Mapping[str, Any] | None, argument: str) -> dict[str, Placement | None]:
        return {
            name: None if layout is None else placement_of(layout, self, f"{argument}[{name!r}]")
            for name, layout in (layouts or {}).items()
        }

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_prepare_inputs, style=self, mesh=device_mesh), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


def _prepare_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, style: PrepareModuleInput, mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given, wanted, to_local = style.input_layouts, style.desired_input_layouts, style.use_local_output
    if given is not None and wanted is not None:
        _check_count(style, module, "input", len(args), len(given))
        args = tuple(
            [_prepared(arg, mesh, have, want, to_local) for arg, have, want in zip(args, given, wanted, strict=True)]
        )
    if style.input_kwarg_layouts:
        layouts, desired = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        kwargs = {
            name: _prepared(value, mesh, layouts.get(name), desired.get(name), to_local)
            for name, value in kwargs.items()
        }
    return args, kwargs


class PrepareModuleOutput(ParallelStyle):
    """Lay out the outputs of a module: plain tensors become DTensors, and these are redistributed.

    Args:
        output_layouts: the layout of each output; None to leave one unchanged. One placement for one output.
        desired_output_layouts: the new layout of each, as many as `output_layouts`.
        use_local_output: give plain tensors, each rank its part (the default), instead of DTensors.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> style = PrepareModuleOutput(output_layouts=sw.Replicate(), desired_output_layouts=sw.Shard(0))
        >>> same = sw.parallel.parallelize_module(torch.nn.Identity(), mesh, style)
        >>> same(torch.ones(8, 3)).shape  # on each rank
        torch.Size([2, 3])
    """

    def __init__(self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True) -> None:
        self.output_layouts = placements_of(output_layouts, self, "output_layouts")
        self.desired_output_layouts = placements_of(desired_output_layouts, self, "desired_output_layouts")
        self.use_local_output = use_local_output
        _check_alike(self, "output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_prepare_outputs, style=self, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


def _prepare_outputs(module: nn.Module, args: Any, result: Any, *, style: PrepareModuleOutput, mesh: DeviceMesh) -> Any:
    given, wanted, to_local = style.output_layouts, style.desired_output_layouts, style.use_local_output
    if not isinstance(result, tuple | list):
        _check_count(style, module, "output", 1, len(given))
        return _prepared(result, mesh, given[0], wanted[0], to_local)
    _check_count(style, module, "output", len(result), len(given))
    items = [
        _prepared(item, mesh, have, want, to_local) for item, have, want in zip(result, given, wanted, strict=True)
    ]
    return items if isinstance(result, list) else tuple(items)


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one, with the arguments of both.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: as there.
        use_local_input: give the module plain tensors instead of DTensors (the default).
        output_layouts, desired_output_layouts, use_local_output: as there.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=sw.Shard(0),
        ...     desired_input_layouts=sw.Replicate(),
        ...     output_layouts=sw.Replicate(),
        ...     desired_output_layouts=sw.Shard(1),
        ... )
        >>> sw.parallel.parallelize_module(torch.nn.Identity(), mesh, style)(torch.ones(2, 4)).shape
        torch.Size([8, 1])
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prepare_module_input}, {self.prepare_module_output})"


# ---------------------------------------------------------------- checks


def _check_alike(style: ParallelStyle, argument: str, given: Layouts, wanted: Layouts | None) -> None:
    if wanted is None or len(given) != len(wanted):
        raise LayoutError(
            f"{type(style).__name__}: {argument} are {given}, desired_{argument} are {wanted}",
            hint="give as many of one as of the other; None leaves a tensor unchanged",
        )


def _check_count(style: ParallelStyle, module: nn.Module, what: str, have: int, layouts: int) -> None:
    if have != layouts:
        raise LayoutError(
            f"{type(module).__name__} has {have} {what}s, and {type(style).__name__} has layouts for {layouts}",
            hint=f"give {what}_layouts a placement or None for each {what}"
            + ("; for keyword inputs use input_kwarg_layouts" if what == "input" else ""),
        )
