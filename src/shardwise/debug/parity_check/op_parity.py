"""Op parity: runs every operator also on one device, on a reference tensor for each DTensor, and compares.

A result that differs from its reference is classified: rounding of this operator; correct for the actual operands,
which had drifted before ("carried"); or wrong. So an error is reported where it happens, and not again in its
consequences.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import modes
from shardwise.core.mesh import DeviceMesh
from shardwise.debug.parity_check.gather_for_check import gather_for_check
from shardwise.debug.parity_check.parity_report import Difference, ParityReport
from shardwise.debug.parity_check.rounding import PlainCall, exact_results, is_inexact, magnified, tolerances, widened
from shardwise.debug.parity_check.verdict import (
    EQUAL,
    ROUNDING,
    WRONG,
    Output,
    Verdict,
    all_same,
    dtensors,
    outputs_of,
    worst,
)
from shardwise.debug.recording.user_lines import BackwardLines
from shardwise.errors import ParityError, UnsupportedError
from shardwise.events import tensor_entered, tensor_moved
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_tensor import parts_of
from shardwise.rng.draw_blocks import default_generator
from shardwise.schema import OpInfo, op_info
from shardwise.tensor import DTensor, dtensor_of, intercepted
from shardwise.torch_private import tree_map

__all__ = ["OpParity"]

_aten = torch.ops.aten
# The results of these are uninitialized.
_UNSET = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten.empty, _aten.empty_strided, _aten.resize_}
# Errors of an operator on one device.
_OPERATOR_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


class StateBefore(NamedTuple):
    """The state that an operator may change: a generator, and written DTensors with their references."""

    generator: torch.Generator | None
    state: torch.Tensor | None
    written: Mapping[int, tuple[DTensor, torch.Tensor]]  # by the id of the tensor

    @contextlib.contextmanager
    def same_numbers(self) -> Iterator[None]:
        """Inside the context, the generator repeats the random numbers of the operator."""
        if self.generator is None or self.state is None:
            yield
            return
        after = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(after)


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """An operator that has run on the ranks: its arguments and outputs."""

    info: OpInfo
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: StateBefore
    outputs: tuple[Output, ...]

    @property
    def operands(self) -> list[DTensor]:
        """Its DTensor operands."""
        return list(dtensors((self.args, self.kwargs)))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose ranks agree on the verdict."""
        return self.operands[0]._spec.mesh

    def call(self, plain: Callable[[DTensor], torch.Tensor]) -> PlainCall:
        """The same call with plain tensors in place of DTensors."""

        def change(leaf: Any) -> Any:
            return plain(leaf) if isinstance(leaf, DTensor) else leaf

        is_leaf = lambda leaf: isinstance(leaf, torch.Tensor)  # noqa: E731
        return PlainCall(self.info.op, *tree_map(change, (self.args, dict(self.kwargs)), is_leaf=is_leaf))

    def addends(self) -> float:
        """The largest magnitude of an addend of a Partial operand or output. Collective: all ranks must call it."""
        given = [self.before.written.get(id(t), (t,))[0] for t in self.operands]
        of_operands = [gather_for_check(tensor).largest for tensor in given if tensor._spec.partial_axes]
        return max([*of_operands, *(output.largest for output in self.outputs)], default=0.0)

    def results(self, call: PlainCall, result: Any) -> list[torch.Tensor]:
        """The outputs of a plain call of the same operator."""
        return outputs_of(self.info, call.args, call.kwargs, result)

    def replayed(self, call: PlainCall) -> list[torch.Tensor] | None:
        """The outputs on one device with the same random numbers; None if it cannot run the operator."""
        if self.info.draws and modes.draws_by_index():
            return None
        try:
            with self.before.same_numbers():
                return self.results(call, call.execute())
        except _OPERATOR_ERRORS:
            return None


class OpParity:
    """Compares every DTensor operator with one device; one instance for each `parity()` context."""

    def __init__(self, report: ParityReport, rtol: float | None, stop: bool) -> None:
        self.report = report
        self._rtol, self._stop = rtol, stop
        self._reference: Any = WeakIdKeyDictionary()
        self._tainted: Any = WeakIdKeyDictionary()  # DTensors with differing replicas, and results computed from them
        self._lines = BackwardLines()
        self._thread = threading.local()

    # ---------------------------------------------------------------- events

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Inside the context, every operator and every redistribution is compared, on all threads."""
        if tensor_moved:
            raise UnsupportedError("parity() is active already", hint="leave the first parity() before a second one")
        intercepted["__torch_dispatch__"].add(self.operator)
        tensor_moved.append(self.moved)
        tensor_entered.append(self.entered)
        try:
            yield
        finally:
            intercepted["__torch_dispatch__"].remove(self.operator)
            tensor_moved.remove(self.moved)
            tensor_entered.remove(self.entered)

    def operator(
        self, run: Callable[..., Any], cls: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the ranks and on the references, and compare."""
        kwargs = kwargs or {}
        if self._inside or not fabric_of(next(dtensors((args, kwargs)))._spec.mesh).has_values:
            return run(cls, op, types, args, kwargs)
        with self._alone():
            info = op_info(op)
            self._adopt_operands(args, kwargs)
            before = self._before(info, args, kwargs)
            result = run(cls, op, types, args, kwargs)
            self._lines.note()
            outputs = tuple(Output.of(tensor) for tensor in outputs_of(info, args, kwargs, result))
            self._compare(CompletedCall(info, args, kwargs, before, outputs))
            return result

    def moved(self, source: DTensor, result: DTensor) -> None:
        """Compare the result of a redistribution with the reference of its source."""
        if self._inside or not fabric_of(source._spec.mesh).has_values:
            return
        with self._alone(), torch.no_grad():
            self._lines.note()
            self._compare_moved(source, result)

    def entered(self, tensor: DTensor) -> None:
        """Take the values of a new DTensor as the reference, if replicas agree."""
        if self._inside or not fabric_of(tensor._spec.mesh).has_values:
            return
        with self._alone(), torch.no_grad():
            self._adopt(tensor)

    @property
    def _inside(self) -> bool:
        return getattr(self._thread, "inside", False)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Operators inside the context are part of the current comparison, and not compared themselves."""
        self._thread.inside = True
        try:
            yield
        finally:
            self._thread.inside = False

    # ---------------------------------------------------------------- references

    def _adopt_operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in dtensors((args, kwargs)):
            if tensor not in self._reference:
                self._adopt(tensor)

    def _adopt(self, tensor: DTensor) -> None:
        """Make the values on the ranks the reference; differing replicas are reported."""
        gathered = gather_for_check(tensor)
        self._reference[tensor] = gathered.value
        if gathered.differing:
            self._tainted[tensor] = True
            line, backward = self._lines.here()
            spec = str(tensor._spec)
            found = Difference("replicas", f"the DTensor {spec}", line, backward, (), spec, gathered.differing)
            self._found(found, "replicas of a block must have the same values")

    def _before(self, info: OpInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StateBefore:
        generator = None
        if info.draws:
            given = kwargs.get("generator")
            generator = given if given is not None else default_generator(next(dtensors((args, kwargs))).device)
        written: dict[int, tuple[DTensor, torch.Tensor]] = {}
        for name in info.writes:
            index = info.names.index(name)
            for tensor in dtensors(args[index] if index < len(args) else kwargs.get(name)):
                copy = dtensor_of(tensor._spec, tensor._local_tensor.clone())
                written[id(tensor)] = (copy, self._reference[tensor].clone())
        return StateBefore(generator, None if generator is None else generator.get_state(), written)

    # ---------------------------------------------------------------- operators

    def _compare(self, ran: CompletedCall) -> None:
        tainted = any(tensor in self._tainted for tensor in ran.operands)
        references = ran.replayed(ran.call(lambda tensor: self._reference[tensor]))
        checked = references is not None and len(references) == len(ran.outputs)
        for number, output in enumerate(ran.outputs):
            if isinstance(output.tensor, DTensor):
                fresh = (
                    references[number] if checked and references is not None else gather_for_check(output.tensor).value
                )
                self._reference[output.tensor] = fresh
                if tainted:
                    self._tainted[output.tensor] = True
        if not checked or references is None:
            self.report.counts["unchecked"] += 1
        elif not tainted and ran.info.op.overloadpacket not in _UNSET:
            self._classify(ran, references)

    def _classify(self, ran: CompletedCall, references: Sequence[torch.Tensor]) -> None:
        """Classify a result: equal, rounding of this operator, carried from its operands, or wrong."""
        if self._agreed(ran.mesh, Verdict(EQUAL if all_same(ran.outputs, references) else ROUNDING)).level == EQUAL:
            self.report.counts["equal"] += 1
            return
        self._note_drift(ran.outputs, references)
        written = ran.before.written
        call = ran.call(lambda tensor: written[id(tensor)][1] if id(tensor) in written else self._reference[tensor])
        verdict = self._judged(ran, call, references)
        if verdict.level != WRONG:
            self.report.counts["rounding"] += 1
            if self.report.first_rounding is None:
                self.report.first_rounding = self._difference("rounding", ran, verdict)
            return
        actual = ran.call(lambda t: gather_for_check(written[id(t)][0] if id(t) in written else t).value)
        plain = ran.replayed(actual.mapped(torch.clone))
        if plain is None:
            self.report.counts["unchecked"] += 1
            return
        verdict = self._judged(ran, actual, plain)
        if verdict.level != WRONG:
            self.report.counts["carried"] += 1
            return
        self._mark_tainted(ran.outputs)
        self._found(self._difference("wrong", ran, verdict), "the rule or the execution of the operator is wrong")

    def _judged(self, ran: CompletedCall, call: PlainCall, plain: Sequence[torch.Tensor]) -> Verdict:
        """The verdict of all ranks on the outputs, against the operator in float64 on the operands of `call`."""
        exact = None if ran.info.draws else exact_results(call, ran.results)
        if exact is None or [e.shape for e in exact] != [p.shape for p in plain]:
            exact = [widened(result) for result in plain]
        dtypes = [output.tensor.dtype for output in ran.outputs]
        allowed = tolerances(call, exact, dtypes, ran.mesh.size(), ran.results, self._rtol, ran.addends())
        verdict = worst(ran.outputs, plain, exact, allowed)
        if verdict.level == WRONG and self._rtol is None and not ran.info.draws:
            more = magnified(call, exact, dtypes, ran.results)
            verdict = worst(ran.outputs, plain, exact, [a + b for a, b in zip(allowed, more, strict=True)])
        return self._agreed(ran.mesh, verdict)

    # ---------------------------------------------------------------- redistributions

    def _compare_moved(self, source: DTensor, result: DTensor) -> None:
        if source not in self._reference:
            self._adopt(source)
        reference = self._reference[result] = self._reference[source].clone()
        if source in self._tainted:
            self._tainted[result] = True
            return
        mesh, output = result._spec.mesh, Output.of(result)
        if self._agreed(mesh, Verdict(EQUAL if all_same([output], [reference]) else ROUNDING)).level == EQUAL:
            self.report.counts["equal"] += 1
            return
        self._note_drift([output], [reference])
        actual = gather_for_check(source).value
        verdict = self._agreed(mesh, worst([output], [actual], [widened(actual)], [self._moving(source, actual)]))
        kind = "wrong" if verdict.level == WRONG else "rounding" if source._spec.partial_axes else "carried"
        line, backward = self._lines.here()
        what = f"redistribute to {result._spec.layout}"
        found = _filled(Difference(kind, what, line, backward, (str(source._spec),), output.text), verdict, output)
        if kind == "wrong":
            self._mark_tainted([output])
            self._found(found, "a collective of the route delivered wrong values")
            return
        self.report.counts[kind] += 1
        if kind == "rounding" and self.report.first_rounding is None:
            self.report.first_rounding = found

    def _moving(self, source: DTensor, actual: torch.Tensor) -> torch.Tensor:
        """The allowed error of a redistribution: zero, except for sums over ranks."""
        nothing = torch.zeros_like(actual, dtype=torch.float64)
        if not source._spec.partial_axes or not is_inexact(actual):
            return nothing
        largest = gather_for_check(source).largest
        return nothing + 8 * torch.finfo(actual.dtype).eps * source._spec.mesh.size() * largest

    # ---------------------------------------------------------------- findings

    def _difference(self, kind: str, ran: CompletedCall, verdict: Verdict) -> Difference:
        line, backward = self._lines.here()
        operands = tuple(str(tensor._spec) for tensor in ran.operands)
        output = ran.outputs[verdict.output]
        return _filled(Difference(kind, str(ran.info.op), line, backward, operands[:6], output.text), verdict, output)

    def _found(self, difference: Difference, hint: str) -> None:
        before = sum(self.report.counts.values())
        self.report.counts[difference.kind] += 1
        found = replace(difference, number=before + 1)
        self.report.findings.append(found)
        if self._stop:
            right = f"the {before} compared before it were right" if before else "nothing was compared before it"
            raise ParityError(str(found), hint=f"{hint}; {right}")

    def _mark_tainted(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output.tensor, DTensor) and gather_for_check(output.tensor).differing:
                self._tainted[output.tensor] = True

    def _agreed(self, mesh: DeviceMesh, verdict: Verdict) -> Verdict:
        """The worst verdict of any rank of the mesh, so that all ranks take the same branch."""
        verdicts = fabric_of(mesh).agree(mesh, verdict, torch.empty(0))
        return max(verdicts, key=lambda one: one.badness, default=verdict)

    def _note_drift(self, outputs: Sequence[Output], references: Sequence[torch.Tensor]) -> None:
        for output, reference in zip(outputs, references, strict=True):
            if not reference.is_floating_point() or not reference.numel():
                continue
            largest = max(float(part.abs().amax()) for part in parts_of(reference))
            for _, part, expected in output.beside(reference):
                if largest and part.shape == expected.shape and part.numel():
                    apart = float((part.double() - expected.double()).abs().amax()) / largest
                    if apart > self.report.drift[0]:
                        self.report.drift = (apart, self._lines.here()[0])


def _filled(difference: Difference, verdict: Verdict, output: Output) -> Difference:
    """The difference with the worst element's global index, values and error."""
    at, coordinate, spec = verdict.gap.at, verdict.coordinate, output.spec
    if coordinate is not None and spec is not None:
        runs = spec.block(coordinate).runs
        at = tuple(
            [
                [i for run in r for i in range(run.start, run.start + run.length)][j]
                for r, j in zip(runs, at, strict=False)
            ]
        )
    value, expected = (v if v.imag else v.real for v in map(complex, (verdict.value, verdict.expected)))
    ranks = (coordinate,) if coordinate is not None else ()
    gap = verdict.gap
    return replace(difference, ranks=ranks, at=at, value=value, expected=expected, error=gap.error, allowed=gap.allowed)
