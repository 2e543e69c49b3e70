"""CommDebugMode: counts the collectives of DTensors by module and phase, with the interface of torch's class.

A listener of the recorder. Collectives that the user calls on plain tensors are not counted.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from shardwise.core.mode_stack import ModeContext
from shardwise.debug.recording.recorder import Listener, listening
from shardwise.debug.recording.records import MoveRecord, Record
from shardwise.fabric.traced_collectives import functional_collectives
from shardwise.tensor import DTensor

__all__ = ["CommDebugMode"]

_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
GLOBAL = "Global"  # outside all modules
# Trivial operators, omitted from tables up to noise level 2.
TRIVIAL = {
    "aten.detach.default", "aten.t.default", "aten.view.default", "aten._to_copy.default", "aten.as_strided.default",
    "aten.transpose.int",
}  # fmt: skip
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BOLD, RED, END = "\033[1;33m", "\033[1;31m", "\033[0m"
PASSES = {"forward": "FORWARD PASS", "backward": "BACKWARD PASS", "recompute": "ACTIVATION CHECKPOINTING"}


class CommDebugMode(Listener, ModeContext[Any]):
    """Counts every collective that DTensors issue inside the context, on any fabric.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> with CommDebugMode() as comm:
        ...     _ = x.full_tensor()
        >>> comm.get_total_counts(), comm.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
        (1, 1)
        >>> comm.received_bytes
        24
    """

    def __init__(self) -> None:
        functional_collectives()  # declares the operators that are the keys of the counts
        self._clear()

    def _clear(self) -> None:
        self.comm_counts: Counter[Any] = Counter()
        self.comm_module_counts: dict[str, dict[str, Counter[Any]]] = {}
        self._records: list[Record] = []
        self._modules: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        self._parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._shardings: dict[str, Any] = {}
        self._received = 0.0

    def _run(self) -> Generator[Self, None, None]:
        self._clear()
        with listening(self):
            yield self

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # ---------------------------------------------------------------- events

    def begin(self, record: Record) -> None:
        """Store the record of an operator."""
        self._records.append(record)

    def move(self, record: Record, move: MoveRecord) -> None:
        """Count a collective, for its module and all enclosing modules."""
        if move.collective not in _NAMES:
            return
        name = getattr(torch.ops.c10d_functional, _NAMES[move.collective])
        self.comm_counts[name] += 1
        self._received += move.received
        phase = "forward" if record.phase == "forward" else "backward"
        for path in _around(record.module):
            counts = self.comm_module_counts.setdefault(path, {"forward": Counter(), "backward": Counter()})
            counts[phase][name] += 1

    def module(self, module: nn.Module, path: str) -> None:
        """Store a module with its parameters."""
        found = self._modules.setdefault(path, {})
        found["depth"] = self._modules[self._parent(path) or GLOBAL]["depth"] + 1
        found["module_type"] = f"class '{type(module).__module__}.{type(module).__qualname__}'"
        for name, parameter in module.named_parameters(recurse=False):
            self._parameters.setdefault(path, {})[name] = parameter
            if isinstance(parameter, DTensor):
                self._shardings[f"{path}.{name}"] = parameter.placements
                found.setdefault("parameters", {})[name] = str(parameter.placements)

    # ---------------------------------------------------------------- sums

    def get_comm_counts(self) -> dict[Any, int]:
        """The count of each collective, keyed by torch's operator for it."""
        return self.comm_counts

    def get_total_counts(self) -> int:
        """The count of all collectives."""
        return sum(self.comm_counts.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received by a rank."""
        return round(self._received)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The parameters of each module that ran, by module path and parameter name."""
        # .data is an operator: read earlier, it would be counted as one of the program
        return {
            path: {name: parameter.data for name, parameter in named.items()}
            for path, named in self._parameters.items()
        }

    def get_sharding_info(self) -> dict[str, Any]:
        """The placements of each DTensor parameter, by its path."""
        return self._shardings

    # ---------------------------------------------------------------- tables

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """An indented table of modules with their collectives and operators, with terminal colours.

        Args:
            noise_level: 0: counts of collectives; 1 and 2: also parameters and non-trivial operators; 3: everything.
        """
        table = ""
        for path, facts in self._modules.items():
            indent = "    " * facts["depth"]
            table += f"{indent}{path}\n"
            if noise_level > 0:
                table += _module_lines(facts, indent)
            for phase, heading in PASSES.items():
                lines = self._counts_lines(path, phase, indent) + self._operator_lines(path, phase, indent, noise_level)
                if lines:
                    table += f"{indent}  {heading}\n{''.join(lines)}"
        return table

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file, without colours."""
        Path(file_name).write_text(ANSI.sub("", self.generate_comm_debug_tracing_table(noise_level)), encoding="utf-8")

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the tree of modules with their collectives and operators as JSON; same noise levels as the table."""
        Path(file_name).write_text(json.dumps(self._tree(GLOBAL, noise_level), indent=4) + "\n", encoding="utf-8")

    def _counts_lines(self, path: str, phase: str, indent: str) -> list[str]:
        counts = self.comm_module_counts.get(path, {}).get(phase, {})
        return [f"{BOLD}{indent}    *{name}: {count}{END}\n" for name, count in counts.items()]

    def _operators(self, path: str, phase: str, noise_level: int) -> list[Record]:
        if noise_level < 1:
            return []
        kept = (record for record in self._records if record.kind == "operator" and record.phase == phase)
        return [r for r in kept if (r.module or GLOBAL) == path and (noise_level > 2 or r.name not in TRIVIAL)]

    def _operator_lines(self, path: str, phase: str, indent: str, noise_level: int) -> list[str]:
        lines = []
        for record in self._operators(path, phase, noise_level):
            lines.append(f"{BOLD}{indent}    **{record.name}{END}\n")
            for name, value in _operator_facts(record).items():
                lines.append(f"{RED}{indent}      {name}: {value}{END}\n")
        return lines

    def _tree(self, path: str, noise_level: int) -> dict[str, Any]:
        facts = self._modules[path]
        counts = self.comm_module_counts.get(path, {})
        made: dict[str, Any] = {"fqn": path, "module_type": "", "parameters": []}
        if noise_level > 0:
            made["module_type"] = facts.get("module_type", "")
            made["parameters"] = [list(item) for item in facts.get("parameters", {}).items()]
        made["children"] = [self._tree(child, noise_level) for child in self._modules if self._parent(child) == path]
        for phase in ("forward", "backward"):
            found = counts.get(phase, {})
            made[f"collectives_{phase}"] = [[str(name), count] for name, count in found.items()]
        for phase in PASSES:
            name = "checkpointing_operations" if phase == "recompute" else f"operations_{phase}"
            made[name] = [self._operation(record) for record in self._operators(path, phase, noise_level)]
        return made

    def _parent(self, path: str) -> str | None:
        """The nearest enclosing module that ran."""
        if path == GLOBAL:
            return None
        return next((outer for outer in _around(path)[1:] if outer in self._modules), GLOBAL)

    def _operation(self, record: Record) -> dict[str, Any]:
        specs = [operand.spec for operand in record.operands]
        return {
            "name": record.name,
            "input_shape": [list(spec.shape) for spec in specs],
            "input_sharding": [[str(placement) for placement in spec.placements] for spec in specs],
            "device_mesh": str(specs[0].mesh) if specs else "",
        }


def _around(path: str) -> list[str]:
    """The path of a module, the paths of its enclosing modules, and GLOBAL."""
    parts = path.split(".") if path else []
    return [*(".".join(parts[:i]) for i in range(len(parts), 0, -1)), GLOBAL]


def _module_lines(facts: dict[str, Any], indent: str) -> str:
    lines = f"{indent}*module type: {facts['module_type']}\n" if "module_type" in facts else ""
    if "parameters" in facts:
        lines += f"{indent}*Parameter List\n"
        lines += "".join(f"{indent} *{name}: {placement}\n" for name, placement in facts["parameters"].items())
    return lines


def _operator_facts(record: Record) -> dict[str, Any]:
    specs = [operand.spec for operand in record.operands]
    if not specs:
        return {}
    return {
        "shape": [torch.Size(spec.shape) for spec in specs],
        "sharding": [spec.placements for spec in specs],
        "device mesh": specs[0].mesh,
    }
