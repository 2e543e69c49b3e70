"""Architectures trained for one parallel step against plain torch: loss, gradients, parameters and buffers after it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch
from torch import nn

import shardwise as sw
from tests.models.architectures import ARCHITECTURES, Architecture, missing, version_of
from tests.models.training_programs import BY_PLAN, OF_TOKENS, PROGRAMS, Program, Trained, plain

__all__ = ["PASSED", "Report", "check_all", "check_architecture"]

PASSED = "passed"
# Relative to the largest element of the tensor, or to a hundredth of the largest of its kind where the tensor is
# smaller: gradients that are zero but for rounding have no scale of their own.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass
class Report:
    """What became of one architecture."""

    name: str
    library: str
    version: str = ""
    skipped: str = ""
    seconds: float = 0.0
    results: dict[tuple[str, str], str] = field(default_factory=dict)  # (way, mesh): PASSED, or what is wrong

    @property
    def failures(self) -> dict[tuple[str, str], str]:
        """The ways that do not pass."""
        return {key: result for key, result in self.results.items() if result != PASSED}


def check_architecture(
    name: str, ways: Iterable[str] = tuple(PROGRAMS), dtype: torch.dtype = torch.float32, trace: bool = False
) -> Report:
    """Run one architecture in the given ways, on every mesh."""
    architecture = ARCHITECTURES[name]
    report = Report(name, architecture.library)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        if (reason := missing(architecture.library)) is not None:
            report.skipped = reason
            return report
        report.version = version_of(architecture.library)
        task = _InDtype(architecture, dtype)
        wanted = state_after(plain(task))
        for way, programs in PROGRAMS.items():
            if way not in ways or (way in BY_PLAN and not getattr(task.model(), "tp_plan", None)):
                continue
            if way in OF_TOKENS and not is_tokens(task.batch()):
                continue
            for mesh, program in programs.items():
                report.results[way, mesh] = _result(task, program, wanted, TOLERANCES[dtype], trace)
    report.seconds = time.perf_counter() - started
    return report


def is_tokens(batch: dict[str, torch.Tensor]) -> bool:
    """Whether all of a batch is numbers of tokens: (samples, length)."""
    return all(value.dim() == 2 and not value.is_floating_point() for value in batch.values())


@dataclass(frozen=True)
class _InDtype:
    """An architecture with its weights and its batch in a dtype."""

    architecture: Architecture
    dtype: torch.dtype

    def model(self) -> nn.Module:
        model = self.architecture.model()
        return model if self.dtype is torch.float32 else model.to(self.dtype)

    def batch(self) -> dict[str, torch.Tensor]:
        batch = self.architecture.batch()
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.items()}

    def dim(self, name: str) -> int:
        return self.architecture.dim(name)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.architecture.loss(model, batch)


# ---------------------------------------------------------------- comparing


def state_after(trained: Trained) -> dict[str, dict[str, torch.Tensor]]:
    """What a step leaves, as plain tensors, by kind and name."""
    model, loss = trained
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": {"": _global(loss)},
        "gradient": {name: _global(value) for name, value in gradients.items()},
        "parameter": {name: _global(value) for name, value in model.named_parameters()},
        "buffer": {name: _global(value) for name, value in model.named_buffers()},
    }


def differences(
    got: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]], tolerance: float
) -> Iterator[str]:
    """What differs by more than rounding, in words."""
    for kind, tensors in wanted.items():
        if missing_names := tensors.keys() ^ got[kind].keys():
            yield f"{kind} on one side alone: {', '.join(sorted(missing_names)[:3])}"
        floor = 1e-2 * max((_size(value) for value in tensors.values()), default=0.0)
        for name in tensors.keys() & got[kind].keys():
            value, expected = got[kind][name], tensors[name]
            if value.shape != expected.shape or value.dtype != expected.dtype:
                yield f"{kind} {name}: {value.dtype} {tuple(value.shape)}, not {expected.dtype} {tuple(expected.shape)}"
                continue
            error = _size(value.double() - expected.double())
            if not error <= tolerance * max(_size(expected), floor):
                yield f"{kind} {name}: differs by {error:.2e}, where the largest element is {_size(expected):.2e}"


def _result(
    task: _InDtype, program: Program, wanted: dict[str, dict[str, torch.Tensor]], tolerance: float, trace: bool
) -> str:
    try:
        found = list(differences(state_after(program(task)), wanted, tolerance))
    except Exception as error:
        if trace:
            traceback.print_exc()
        return f"{type(error).__name__}: {str(error).strip()}"
    if not found:
        return PASSED
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more


def _global(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).clone()


def _size(value: torch.Tensor) -> float:
    return value.double().abs().max().item() if value.numel() else 0.0


# ---------------------------------------------------------------- many of them


def check_all(
    names: Iterable[str],
    jobs: int,
    told: Callable[[Report], None],
    ways: Iterable[str] = tuple(PROGRAMS),
    dtype: torch.dtype = torch.float32,
) -> list[Report]:
    """Check architectures in processes of their own; the reports are in the order of the names."""
    names, ways = list(names), tuple(ways)
    reports: dict[str, Report] = {}
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        waiting = {pool.submit(check_architecture, name, ways, dtype): name for name in names}
        for future in as_completed(waiting):
            name = waiting[future]
            report = reports[name] = future.result()
            told(report)
    return [reports[name] for name in names]
