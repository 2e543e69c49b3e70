"""The validator: every operator of torch's own test database on many layouts against one device.

    python -m tests.virtual.conformance [--sample SEED] [--only name ...] [--jobs 2] [--json FILE] [--write FILE]
    python -m tests.virtual.conformance --device cuda --dtypes float32 bfloat16 float16

Values, gradients, shapes, dtypes, agreement of replicas, inputs left alone, in-place variants. Counts how each case
ran: without communication, with it, by decomposition, by replication. Knows nothing of any particular operator, but of
a few that their values cannot be compared.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import shardwise as sw
from shardwise import modes
from shardwise.events import route_started
from tests.virtual.parity import (
    MESHES,
    Diverged,
    check_locals,
    distribute,
    gradients_of,
    plain_layouts,
    random_layout,
    same_bits,
    whole,
)

# How a case that is right ran; each is worse than the one before.
RAN = ("free", "rule", "decomposed", "replicated")
# How a case may fail.
FAILED = ("refused", "wrong", "diverged", "crashed", "hung", "random")
SECONDS_PER_CASE = 20.0

# Operators that leave their result uninitialized: only shape, dtype and layout are compared.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Results that are uninitialized, or the state of a generator, by their positions.
UNREAD = {"torch.ops.aten._flash_attention_forward": (2, 3), "torch.ops.aten._efficient_attention_forward": (2, 3)}
# Results whose columns are known up to a factor of absolute value 1, by their positions. Factors of cuSOLVER depend on
# the number of matrices in a batch.
UP_TO_PHASE = {"linalg.eigh": (1,)}
# Operators whose last bits depend on where in memory torch finds its operands: replicas agree up to rounding.
INEXACT = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of an operator is tried: samples of each dtype, cases and seconds in all; on which device."""

    samples: int
    cases: int
    seconds: float
    seed: int | None = None
    device: str = "cpu"
    dtypes: tuple[str, ...] = ()  # the floating-point dtypes; none of them named: the first of FLOATS that is supported


FULL = Budget(samples=60, cases=200, seconds=240.0)


def sampled(seed: int) -> Budget:
    """A few cases of each operator, the same ones for a seed."""
    return Budget(samples=12, cases=4, seconds=20.0, seed=seed)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: which sample of which dtype, out-of-place or in-place, on which mesh and in which layouts."""

    op: str
    dtype: str
    sample: int
    variant: str
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    elements: int

    def __str__(self) -> str:
        called = f"{self.op}{'_' if self.variant == 'inplace' else ''}"
        return f"{called} {self.dtype} sample {self.sample} mesh {self.mesh} [{'; '.join(self.placements)}]"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case went: one of RAN or FAILED, what its gradients took, and what was wrong."""

    case: Case
    kind: str
    backward: str = ""
    message: str = ""


# ---------------------------------------------------------------- cases


@functools.cache
def database() -> dict[str, Any]:
    """Every OpInfo by its name, with its variant behind a dot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db}


FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def dtypes_of(op: Any, budget: Budget) -> list[torch.dtype]:
    """A floating-point dtype or those asked for, an integer and a complex one; any one if none of them is supported."""
    supported = op.supported_dtypes(budget.device)
    named = [d for d in (getattr(torch, name) for name in budget.dtypes) if d in supported]
    wanted = [
        next((d for d in group if d in supported), None)
        for group in (
            () if named else FLOATS,
            (torch.int64, torch.int32, torch.uint8),
            (torch.complex64, torch.complex128),
        )
    ]
    return [*named, *(d for d in wanted if d is not None)] or sorted(supported, key=str)[:1]


class Sample:
    """One sample of an OpInfo in one variant: how to call it on given tensors, and what that gives on one device."""

    def __init__(self, op: Any, dtype: torch.dtype, index: int, sample: Any, variant: str, device: str) -> None:
        self.op, self.dtype, self.index, self.variant, self.device = op, dtype, index, variant, device
        self.process = sample.output_process_fn_grad
        self.leaves, self.tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.at]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The sample's first argument, the others and those by name, with these tensors in place of its own."""
        new = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            new[i] = tensor
        return tree_unflatten(new, self.tree)

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The operator on these tensors in place of the sample's own."""
        first, args, kwargs = self.arguments(tensors)
        if self.variant == "inplace":
            return self._in_place(first, args, kwargs)
        return self.op.op(first, *args, **kwargs)

    def _in_place(self, first: Any, args: Any, kwargs: Any) -> Any:
        target = first.clone()
        result = self.op.inplace_variant(target, *args, **kwargs)
        if isinstance(result, torch.Tensor) and result is not target:
            raise AssertionError("the in-place variant does not give back the tensor it wrote to")
        return target

    @functools.cached_property
    def wanted(self) -> "Wanted | None":
        """The result of one device; None if it refuses the call too."""
        plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors]
        before = [t.detach().clone() for t in plain]
        try:
            torch.manual_seed(0)
            before_drawing = _states()
            result = self.call(plain)
            drawn = any(not torch.equal(a, b) for a, b in zip(before_drawing, _states(), strict=True))
        except Exception:
            return None
        try:
            grads = gradients_of(self.process(result), plain)
        except Exception:
            grads = None
        changed = tuple(not same_bits(t.detach(), b) for t, b in zip(plain, before, strict=True))
        return Wanted(tree_map(_detached, result), grads, drawn, changed)

    def rounding(self, what: str, position: int) -> float:
        """The largest rounding error of one device in a result or gradient, at this sample and close to it.

        Found by computing in double precision too; 0 where that cannot be done. It is counted up to a bound: beyond,
        values have little to do with each other, as where a comparison of rounded numbers went the other way.
        """
        generator, largest = torch.Generator().manual_seed(0), 0.0
        for _ in range(4):
            near = [_neighbour(t.detach(), generator).requires_grad_(t.requires_grad) for t in self.tensors]
            exact = [_in_double(t.detach()).requires_grad_(t.requires_grad) for t in near]
            try:
                rounded, precise = (self._values(tensors, what)[position] for tensors in (near, exact))
            except Exception:
                return 0.0
            scale = max(1.0, float(precise.abs().max())) if precise.numel() else 1.0
            error = float((_in_double(rounded) - precise).abs().max()) if precise.numel() else 0.0
            largest = max(largest, min(error, LARGEST_ROUNDING * scale))
        return largest

    def _values(self, tensors: Sequence[torch.Tensor], what: str) -> list[Any]:
        torch.manual_seed(0)
        result = self.call(tensors)
        values = gradients_of(self.process(result), tensors) if what == "gradient" else tree_flatten(result)[0]
        return [_detached(value) for value in values]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The results of one device, their gradients (None: it has none), whether it drew, which inputs it changed."""

    result: Any
    grads: list[Any] | None
    drawn: bool
    changed: tuple[bool, ...]


def _neighbour(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor whose floating-point values are off by about one rounding error."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:
        return tensor.clone()
    signs = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device)
    return (tensor * (1 + torch.finfo(tensor.dtype).eps * signs)).to(tensor.dtype)


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _states() -> list[torch.Tensor]:
    """The states of the generators of all devices."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def samples_of(name: str, op: Any, budget: Budget) -> Iterator[Sample]:
    """The samples of an operator that have tensors to distribute, out-of-place and in-place."""
    for dtype in dtypes_of(op, budget):
        torch.manual_seed(0)
        random.seed(0)
        graded = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(budget.device)
        found = op.sample_inputs(budget.device, dtype, requires_grad=graded)
        for index, sample in enumerate(itertools.islice(found, budget.samples)):
            for variant in ("op", "inplace") if op.inplace_variant is not None else ("op",):
                made = Sample(op, dtype, index, sample, variant, budget.device)
                if made.at and all(_distributable(t) for t in made.tensors):
                    yield made


def _distributable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and tensor.numel() < 50_000
    )


Plan = tuple[Sample, tuple[int, ...], list[list[Any]]]


def plans(name: str, op: Any, budget: Budget) -> list[Plan]:
    """The cases of an operator: all samples and layouts, thinned out evenly where they are too many."""
    rng = random.Random(f"{budget.seed}:{name}")
    samples = list(samples_of(name, op, budget))
    if budget.seed is not None:
        rng.shuffle(samples)
        samples.sort(
            key=lambda s: dtypes_of(op, budget).index(s.dtype) * 0.7 + rng.random() - (s.variant == "op") * 0.3
        )
        samples = samples[: budget.cases]
    columns: list[list[Plan]] = []
    for sample in samples:
        shapes = [t.shape for t in sample.tensors]
        mine: list[Plan] = []
        for mesh in MESHES:
            mine += [(sample, mesh, layout) for layout in plain_layouts(shapes, len(mesh))]
            mine += [(sample, mesh, random_layout(shapes, len(mesh), rng)) for _ in range(3)]
        rng.shuffle(mine)
        columns.append(mine)
    chosen = [p for row in itertools.zip_longest(*columns) for p in row if p is not None][: budget.cases]
    return sorted(chosen, key=lambda p: (str(p[0].dtype), p[0].index, p[0].variant, p[1]))


# ---------------------------------------------------------------- one case


class Watch:
    """How a stretch of code ran: whether anything moved, was decomposed, was replicated."""

    def __init__(self) -> None:
        self.moved = self.decomposed = self.replicated = False

    @property
    def kind(self) -> str:
        if self.replicated:
            return "replicated"
        return "free" if not self.moved else "decomposed" if self.decomposed else "rule"


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Listen to routes, to decompositions and to warnings of replication."""
    watch = Watch()
    decomposing = modes.decomposing

    def moved(route: Any) -> None:
        watch.moved = True

    def noted(op: Any) -> Any:
        watch.decomposed = True
        return decomposing(op)

    modes._warned.clear()
    route_started.append(moved)
    modes.decomposing = noted
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", sw.ReplicationWarning)
            yield watch
    finally:
        modes.decomposing = decomposing
        route_started.remove(moved)
    watch.replicated = bool(caught)


class Hung(BaseException):
    """A case took too long. No Exception, so that nothing swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float, *, of_processor: bool = False) -> Iterator[None]:
    """Raise `Hung` after some seconds, of the clock or of the processor; only in the main thread."""
    timer, name = (signal.ITIMER_VIRTUAL, signal.SIGVTALRM) if of_processor else (signal.ITIMER_REAL, signal.SIGALRM)

    def expire(*_: Any) -> None:
        raise Hung(f"took more than {seconds} s")

    before = signal.signal(name, expire)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(name, before)


def run_case(name: str, plan: Plan) -> Outcome | None:
    """Carry out a case and compare; None where one device refuses it too."""
    sample, shape, layout = plan
    wanted = sample.wanted
    if wanted is None:
        return None
    notes = tuple(",".join(str(p) for p in placements) for placements in layout)
    elements = sum(t.numel() for t in sample.tensors)
    dtype = str(sample.dtype).removeprefix("torch.")
    case = Case(name, dtype, sample.index, sample.variant, shape, notes, elements)
    try:
        with time_limit(SECONDS_PER_CASE):
            forward, backward = _compare(name, sample, wanted, shape, layout)
        return Outcome(case, forward, backward)
    except Hung as error:
        return Outcome(case, "hung", message=str(error))
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) and multiprocessing.parent_process() is not None:
            os._exit(1)  # nothing runs on the device any more: this operator took the process down
        return Outcome(case, _failure(error, wanted), message=_told(error))


def _failure(error: Exception, wanted: Wanted) -> str:
    if isinstance(error, Diverged):
        return "random" if wanted.drawn else "diverged"
    if isinstance(error, AssertionError) and not _raised_in_library(error):
        return "random" if wanted.drawn else "wrong"
    return "refused" if isinstance(error, sw.ShardwiseError) else "crashed"


def _raised_in_library(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/shardwise/" in frames[-1].filename


def _told(error: Exception) -> str:
    """The error in two lines, with the last place in the library."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "/shardwise/" in f.filename]
    at = f" [{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}]" if ours else ""
    text = " | ".join(line.strip() for line in str(error).strip().splitlines() if line.strip())
    return f"{type(error).__name__}: {text[:400]}{at}"


def _compare(
    name: str, sample: Sample, wanted: Wanted, shape: tuple[int, ...], layout: list[list[Any]]
) -> tuple[str, str]:
    """How the forward and the backward pass of a case ran; raises where anything is not as on one device."""
    mesh = sw.init_device_mesh(sample.device, shape)
    given = []
    for tensor, placements in zip(sample.tensors, layout, strict=True):
        made = distribute(tensor.detach().clone(), mesh, placements)
        given.append(made.requires_grad_(tensor.requires_grad))
    before = [[t.clone() for t in one._local_tensor.tensors] for one in given]
    torch.manual_seed(0)
    with watching() as forward:
        result = sample.call(given)
    for i, (one, kept) in enumerate(zip(given, before, strict=True)):
        same = all(same_bits(a, b) for a, b in zip(one._local_tensor.tensors, kept, strict=True))
        if not same and not wanted.changed[i]:  # the parts of a Partial may change where their sum does not
            _check("", f"input {i} after the call", one, sample.tensors[i].detach(), lambda *_: 0.0)
    _check(name, "result", result, wanted.result, sample.rounding)
    if wanted.grads is None:
        return forward.kind, ""
    with watching() as backward:
        grads = gradients_of(sample.process(result), given)
    in_sequences, theirs = (_of_sequences(name, sample, some) for some in (grads, wanted.grads))
    _check(name, "gradient", in_sequences, theirs, sample.rounding)
    return forward.kind, backward.kind if grads else ""


def _of_sequences(name: str, sample: Sample, grads: list[Any]) -> list[Any]:
    """Gradients of packed queries, keys and values, without rows after the last sequence: torch does not write them."""
    named = sample.arguments(sample.tensors)[2]
    ends = [named.get("cu_seqlens_q"), named.get("cu_seqlens_k"), named.get("cu_seqlens_k")]
    if not name.endswith("_efficient_attention_forward") or any(end is None for end in ends):
        return grads
    rows = [int(end[-1]) for end in ends if end is not None]
    return [*(grad.narrow(1, 0, count) for grad, count in zip(grads, rows, strict=False)), *grads[len(rows) :]]


def _with_phases_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a`, each column times the number of absolute value 1 that brings it closest to that of `b`."""
    overlap = (a.conj() * b).sum(-2, keepdim=True)
    return a * torch.where(overlap == 0, 1, overlap / overlap.abs())


def _check(name: str, what: str, got: Any, wanted: Any, rounding: Callable[[str, int], float]) -> None:
    """Equal structure, kind of tensor, shape, dtype and, up to the rounding of reordered sums, values."""
    mine, theirs = tree_flatten(got)[0], tree_flatten(wanted)[0]
    assert len(mine) == len(theirs), f"{what}: {len(mine)} values instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        at = f"{what} {i}" if len(mine) > 1 else what
        if not isinstance(b, torch.Tensor):
            assert not isinstance(a, torch.Tensor) or (b is None and not a.any()), f"{at}: {a} instead of {b}"
            assert isinstance(a, torch.Tensor) or a == b or (a != a and b != b), f"{at}: {a} is not {b}"
            continue
        if a is None:
            assert not b.any(), f"{at}: None instead of {b}"
            continue
        assert not isinstance(a, sw.RankTensor), f"{at}: a bare local came out"
        assert a.dtype == b.dtype, f"{at}: {a.dtype} is not {b.dtype}"
        assert a.shape == b.shape, f"{at}: {tuple(a.shape)} is not {tuple(b.shape)}"
        assert a.layout == b.layout, f"{at}: {a.layout} is not {b.layout}"
        if name in UNINITIALIZED or (what == "result" and i in UNREAD.get(name, ())):
            if isinstance(a, sw.DTensor):  # plain on another device
                check_locals(a)
            continue
        at = f"{at} ({getattr(a, 'spec', 'plain')})"
        a = whole(a, exact=name not in INEXACT)
        if what == "result" and i in UP_TO_PHASE.get(name, ()):
            a = _with_phases_of(a, b)
        try:
            _close(a, b, at)
        except AssertionError:
            own = rounding(what, i)
            if not own:
                raise
            _close(a, b, at, SUMMANDS * own)


# Of the value of a Partial on 2x3 ranks the ranks hold (2 + 1) * (2 + 2 + 1) times as much, without signs (`SHARES`).
SUMMANDS = 15
LARGEST_ROUNDING = 0.02 / SUMMANDS  # of the largest value


def _close(a: torch.Tensor, b: torch.Tensor, at: str, more: float = 0.0) -> None:
    """Equal, floating-point numbers up to rounding and `more`.

    Every summand of a Partial is rounded, and so is every sum of some: about 2 * SUMMANDS errors of half a unit in the
    last place of the value, of random signs, so their sum is about the square root of that many. Numbers of 32 bits
    and more may have sums of many elements behind them, which one device rounds too.
    """
    if b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if b.dtype.itemsize == 1 and b.is_floating_point():
        a, b = a.float(), b.float()
    if not (b.is_floating_point() or b.is_complex()):
        assert torch.equal(a, b), f"{at}: {a.tolist()} is not {b.tolist()}"
        return
    finite = b.detach().abs()[b.isfinite()]
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    eps = torch.finfo(b.dtype).eps
    halves = (2 * SUMMANDS) ** 0.5 * eps / 2
    relative, absolute = (halves, halves) if eps > 1e-4 else (1e-3, 1e-4)
    large = b.abs() * SUMMANDS > torch.finfo(b.dtype).max
    a = torch.where(large & ~a.isfinite(), b, a)  # summands of a Partial are too large for the dtype
    torch.testing.assert_close(
        a, b, rtol=relative, atol=absolute * scale + more, equal_nan=True, msg=lambda m: f"{at}: {m}"
    )


# ---------------------------------------------------------------- one operator, and all


@dataclasses.dataclass
class Report:
    """The results of an operator's cases."""

    op: str
    ran: Counter[str] = dataclasses.field(default_factory=Counter)
    backward: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Outcome] = dataclasses.field(default_factory=list)
    note: str = ""
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return self.ran.total() + len(self.failures)

    @property
    def smallest(self) -> Outcome | None:
        """The failure that is easiest to look at."""
        return min(self.failures, key=lambda f: (f.case.elements, len(f.case.mesh)), default=None)


def check_operator(name: str, budget: Budget) -> Report:
    """Try one operator."""
    report = Report(name)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            todo = plans(name, database()[name], budget)
        except Exception as error:
            report.note = f"no samples: {_told(error)}"
            return report
        for plan in todo:
            outcome = run_case(name, plan)
            if outcome is None:
                continue
            if outcome.kind in RAN:
                report.ran[outcome.kind] += 1
                report.backward[outcome.backward] += bool(outcome.backward)
            else:
                report.failures.append(outcome)
            if time.monotonic() - started > budget.seconds:
                report.note = "stopped early: out of time"
                break
    if not report.cases:
        report.note = "takes no dense tensor"
    report.seconds = time.monotonic() - started
    return report


def check_all(names: Sequence[str], budget: Budget, jobs: int, told: Callable[[Report], None]) -> list[Report]:
    """Try many operators in processes of their own; one that takes its process down is a crash of that operator."""
    if jobs <= 1:
        reports = [check_operator(name, budget) for name in names]
        for report in reports:
            told(report)
        return reports
    done: dict[str, Report] = {}
    todo, size = list(names), jobs
    while todo:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(size, mp_context=context, initializer=_settings) as pool:
            futures = {pool.submit(check_operator, name, budget): name for name in todo}
            try:
                for future in concurrent.futures.as_completed(futures):
                    done[futures[future]] = future.result()
                    told(done[futures[future]])
            except concurrent.futures.process.BrokenProcessPool:
                pass
        left = [name for name in todo if name not in done]
        if left == todo and size == 1:  # the first of them did it
            case = Case(left[0], "", 0, "op", (), (), 0)
            done[left[0]] = Report(left[0], failures=[Outcome(case, "crashed", message="took the process down")])
            told(done[left[0]])
            left = left[1:]
        size = 1 if left == todo else jobs
        todo = left
    return [done[name] for name in names]


def _settings() -> None:
    """One thread; convolutions of CUDA in float32, not in TF32."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False


# ---------------------------------------------------------------- telling


def line_of(report: Report) -> str:
    """One line for an operator that fails."""
    worst = report.smallest
    assert worst is not None
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(f.kind for f in report.failures).items())
    return f"{report.op}: {kinds} of {report.cases}; smallest: {worst.kind}: {worst.case}: {worst.message}"


def summary(reports: Iterable[Report]) -> str:
    """The counts of all operators and cases."""
    reports = list(reports)
    ran = sum((r.ran for r in reports), Counter())
    failed = Counter(f.kind for r in reports for f in r.failures)
    bad = [r for r in reports if r.failures]
    idle = [r for r in reports if not r.cases]
    cases = sum(r.cases for r in reports)
    return (
        f"{len(reports)} operators, {cases} cases in {sum(r.seconds for r in reports):.0f} s: {len(bad)} operators "
        f"fail, {len(idle)} take no dense tensor\n"
        f"right: {', '.join(f'{kind} {ran[kind]}' for kind in RAN)}\n"
        f"failed: {', '.join(f'{kind} {failed[kind]}' for kind in FAILED)}"
    )


def table(reports: Iterable[Report]) -> str:
    """docs/operators.md: for each operator how many of its cases ran in which way."""
    head = (
        "# Operators\n\n"
        "Every operator of PyTorch's own test database, on virtual meshes of 4, 2x2 and 2x3 ranks, in layouts that\n"
        "shard each tensor argument on each dim, leave it replicated or Partial: values and gradients compared with\n"
        "one device. Made by `make conformance`. The columns say how many of 100 such layouts ran\n\n"
        "- **free**: without any communication,\n"
        "- **moving**: with communication chosen by the operator's rule,\n"
        "- **decomposed**: as several smaller operators, some of which communicate,\n"
        "- **replicated**: on gathered operands on every rank, with a ReplicationWarning,\n"
        "- **failing**: not as on one device.\n\n"
        "*backward* is the worst that the gradients needed. *flat*, added by `python -m tests.virtual.scaling --write\n"
        "docs/operators.md`: with one dim sharded and constant locals, the layouts of 100 whose peak and received\n"
        "bytes do not grow from 4 to 64 ranks, forward and backward; empty where no sample could be measured.\n\n"
        "| operator | cases | free | moving | decomposed | replicated | failing | backward |\n"
        "|---|---:|---:|---:|---:|---:|---:|---|\n"
    )
    words = {"free": "free", "rule": "moving", "decomposed": "decomposed", "replicated": "replicated"}
    rows = []
    idle = []
    for report in sorted(reports, key=lambda r: r.op):
        if not report.cases:
            idle.append(report.op)
            continue
        shares = [
            f"{100 * n / report.cases:.0f}" if n else "" for n in (*(report.ran[k] for k in RAN), len(report.failures))
        ]
        worst = next((words[kind] for kind in reversed(RAN) if report.backward[kind]), "")
        rows.append(f"| `{report.op}` | {report.cases} | {' | '.join(shares)} | {worst} |")
    tail = (
        "\n\nWithout a dense tensor argument, so nothing to distribute: " + ", ".join(f"`{op}`" for op in idle) + ".\n"
    )
    return head + "\n".join(rows) + (tail if idle else "\n")


def as_json(reports: Iterable[Report]) -> str:
    """Everything, for other programs."""
    return json.dumps([vars(r) | {"failures": [dataclasses.asdict(f) for f in r.failures]} for r in reports], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.conformance", description=__doc__)
    parser.add_argument("--sample", type=int, metavar="SEED", help="only a few cases of each operator")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these operators (all their variants)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cases", type=int, help="at most so many cases of each operator")
    parser.add_argument("--device", default="cpu", help="the kind of device of the virtual ranks")
    parser.add_argument("--dtypes", nargs="+", default=(), metavar="DTYPE", help="floating-point dtypes to try")
    parser.add_argument("--write", type=Path, help="write the table of operators here")
    parser.add_argument("--json", type=Path, help="write every count and failure here")
    options = parser.parse_args(argv)
    _settings()
    budget = FULL if options.sample is None else sampled(options.sample)
    budget = dataclasses.replace(budget, device=options.device, dtypes=tuple(options.dtypes))
    if options.cases is not None:
        budget = dataclasses.replace(budget, cases=options.cases)
    names = [n for n in database() if not options.only or n in options.only or n.partition(".")[0] in options.only]

    def told(report: Report) -> None:
        if report.failures:
            print(line_of(report), flush=True)

    reports = check_all(names, budget, options.jobs if len(names) > 1 else 1, told)
    print(summary(reports))
    if options.write:
        options.write.write_text(table(reports))
    if options.json:
        options.json.write_text(as_json(reports))
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
