"""Module parity: compares outputs and gradients of a sharded model with the same model on one device.

Two copies of the plain model, in its dtype and in float64, run on the inputs of the sharded model. A difference counts
as rounding if it is not much larger than the difference between the two copies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.debug.parity_check.gather_for_check import gather_for_check
from shardwise.debug.parity_check.parity_report import Difference, ParityReport
from shardwise.debug.parity_check.rounding import SAFETY, Gap, gap_between, is_inexact, same, widened
from shardwise.errors import ParityError, UnsupportedError
from shardwise.events import user_line
from shardwise.fabric.base import fabric_of
from shardwise.rng.draw_blocks import default_generator
from shardwise.tensor import DTensor
from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["ModuleParity"]

ModuleOutputs = list[tuple[str, str, list[torch.Tensor]]]  # module, line, outputs


class ModuleParity:
    """Compares one sharded model with a plain model while it is active."""

    def __init__(
        self,
        reference: torch.nn.Module,
        sharded: torch.nn.Module | None,
        report: ParityReport,
        rtol: float | None,
        stop: bool,
    ) -> None:
        self.report = report
        self._rtol, self._stop = rtol, stop
        self._plain, self._exact = copy.deepcopy(reference), copy.deepcopy(reference).double()
        self._line = user_line()
        self._handles: list[Any] = []
        self._model: torch.nn.Module | None = None
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the two copies, before their backward
        self._arrived: dict[int, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._drawn = False
        if sharded is not None:
            self._attach(sharded)
        else:
            self._handles.append(register_module_forward_pre_hook(self._find))

    def close(self, failed: bool) -> None:
        """Compare the gradients, unless the program failed, and remove all hooks."""
        try:
            if not failed:
                self._compare_gradients()
        finally:
            for handle in self._handles:
                handle.remove()

    # ---------------------------------------------------------------- the two models

    def _find(self, module: torch.nn.Module, args: Any) -> None:
        """Take the first called module with the plain model's submodules and DTensor parameters as the sharded one."""
        if self._model is not None or _names_of(module) != _names_of(self._plain):
            return
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            self._attach(module)
            self._before_forward(module, args, {})

    def _attach(self, model: torch.nn.Module) -> None:
        if _names_of(model) != _names_of(self._plain):
            odd = sorted(_names_of(model) ^ _names_of(self._plain))[0]
            raise UnsupportedError(
                f"parity: the two models have different submodules or parameters: only one of them has {odd!r}",
                hint="pass the plain model from which the sharded one was made",
            )
        self._model = model
        self._compare_parameters()
        self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._note_output(name)))
        self._handles.append(model.register_forward_hook(self._after_forward))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._note_gradient(name)))

    def _compare_parameters(self) -> None:
        assert self._model is not None
        for (name, plain), other in zip(self._plain.named_parameters(), self._model.parameters(), strict=True):
            value = _gathered(other.detach())
            if not same(value.cpu(), plain.detach().cpu()):
                gap = gap_between(value.cpu(), widened(plain.detach().cpu()), torch.zeros(plain.shape))
                self._found("wrong", f"the parameter {name}", self._line, other, value, plain.detach(), gap)
            self.report.counts["equal"] += 1

    def _take_over_parameters(self) -> None:
        """Copy the parameters of the sharded model: updates by an optimizer are not compared."""
        assert self._model is not None
        sources = [*self._model.parameters(), *self._model.buffers()]
        with torch.no_grad():
            for target in (self._plain, self._exact):
                for mine, other in zip((*target.parameters(), *target.buffers()), sources, strict=True):
                    mine.copy_(_gathered(other.detach()))

    # ---------------------------------------------------------------- forward

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._run_backward()
        if self._drawn or self._gradients:
            self._take_over_parameters()
        self._drawn = True
        self._given = tree_map(_gathered, (args, kwargs))
        self._generator = default_generator(next(module.parameters()).device)
        self._state = self._generator.get_state()
        self._seen: ModuleOutputs = []

    def _note_output(self, name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            values = [_gathered(t.detach()) for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            self._seen.append((name, user_line(), values))

        return note

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        plain, plain_output = self._run_copy(self._plain, lambda t: t)
        exact, exact_output = self._run_copy(self._exact, widened)
        specs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        for (name, line, values), wanted, true in zip(self._seen, plain, exact, strict=False):
            for value, one, two in zip(values, wanted[2], true[2], strict=False):
                self._judge(f"the module {name or type(module).__name__}", line, specs, value, one, two)
        for mine, one, two in zip(specs, tree_leaves(plain_output), tree_leaves(exact_output), strict=False):
            if mine.requires_grad:
                self._outputs.append((one, two))
                mine.register_hook(self._note_output_gradient(len(self._outputs) - 1))

    def _run_copy(
        self, model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[ModuleOutputs, Any]:
        """The outputs of a copy on the inputs of the sharded model, with the same random numbers."""
        seen: ModuleOutputs = []
        hooks = [
            module.register_forward_hook(
                lambda _m, _a, output, name=name: seen.append(
                    (name, "", [t.detach() for t in tree_leaves(output) if isinstance(t, torch.Tensor)])
                )
            )
            for name, module in model.named_modules()
        ]
        after = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            args, kwargs = tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, self._given)
            return seen, model(*args, **kwargs)
        finally:
            self._generator.set_state(after)
            for hook in hooks:
                hook.remove()

    # ---------------------------------------------------------------- backward

    def _note_output_gradient(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            self._arrived[number] = _gathered(gradient.detach())

        return note

    def _note_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            value = _gathered(gradient.detach())
            self._gradients[name] = self._gradients[name] + value if name in self._gradients else value

        return note

    def _run_backward(self) -> None:
        """Run backward of the copies with the output gradients of the sharded model."""
        for which in (0, 1):
            ready = [(self._outputs[number][which], gradient) for number, gradient in self._arrived.items()]
            if ready:
                torch.autograd.backward([o for o, _ in ready], [g.to(o.dtype) for o, g in ready])
        self._outputs.clear()
        self._arrived.clear()

    def _compare_gradients(self) -> None:
        self._run_backward()
        plain, exact = dict(self._plain.named_parameters()), dict(self._exact.named_parameters())
        for name, value in self._gradients.items():  # in the order they were computed
            one, two = plain[name].grad, exact[name].grad
            if one is not None and two is not None:
                self._judge(f"the gradient of {name}", self._line, [], value, one, two)

    # ---------------------------------------------------------------- verdicts

    def _judge(
        self, what: str, line: str, specs: list[Any], value: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor
    ) -> None:
        value, plain, exact = value.cpu(), plain.detach().cpu(), widened(exact.detach().cpu())
        if same(value, plain):
            self.report.counts["equal"] += 1
            return
        if value.shape != plain.shape:
            self._found("wrong", what, line, None, value, plain, Gap(math.inf, 0.0, ()))
            return
        gap = gap_between(value, *self._truth(plain, exact))
        if gap.excess <= 1:
            self.report.counts["rounding"] += 1
            if self.report.first_rounding is None:
                self.report.first_rounding = self._difference("rounding", what, line, None, value, plain, gap)
        elif not self.report.findings:  # later differences are consequences of the first
            self._found("wrong", what, line, None, value, plain, gap)

    def _truth(self, plain: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The true value and the tolerance: a multiple of the plain model's error, plus rounding at this magnitude."""
        if not is_inexact(plain) or not plain.numel():
            return exact, torch.zeros(plain.shape, dtype=torch.float64)
        size, eps = exact.abs().nan_to_num(0.0, 0.0, 0.0).amax(), torch.finfo(plain.dtype).eps
        if self._rtol is not None:
            return exact, torch.broadcast_to(self._rtol * size, plain.shape)
        off = (widened(plain) - exact).abs().nan_to_num(0.0, 0.0, 0.0).amax()
        if off > eps**0.5 * size:  # the float64 copy diverged: other random numbers, or another branch
            return widened(plain), torch.broadcast_to(eps**0.5 * size, plain.shape)
        return exact, torch.broadcast_to(SAFETY * (off + eps * size), plain.shape)

    def _difference(
        self, kind: str, what: str, line: str, of: Any, value: torch.Tensor, plain: torch.Tensor, gap: Gap
    ) -> Difference:
        spec = str(of._spec) if isinstance(of, DTensor) else f"{value.dtype} {tuple(value.shape)}"
        place = gap.at if value.shape == plain.shape else ()
        pair = (value[place].item(), plain[place].item()) if place or value.dim() == 0 else (math.nan, math.nan)
        return Difference(kind, what, line, False, (), spec, (), gap.at, *pair, gap.error, gap.allowed)

    def _found(
        self, kind: str, what: str, line: str, of: Any, value: torch.Tensor, plain: torch.Tensor, gap: Gap
    ) -> None:
        found = self._difference(kind, what, line, of, value, plain, gap)
        self.report.counts[kind] += 1
        self.report.findings.append(found)
        if self._stop:
            raise ParityError(str(found), hint="all values before it were right: use parity() to find the operator")


def _names_of(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}


def _gathered(value: Any) -> Any:
    """The global tensor of a DTensor; other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    mesh = value._spec.mesh
    if mesh.size() < mesh.grid_size and fabric_of(mesh).many_ranks:
        raise UnsupportedError(
            "parity of models: a tensor is on a slice of a mesh, and slices may have different values",
            hint="compare operator by operator: parity() without a model",
        )
    return gather_for_check(value).value
