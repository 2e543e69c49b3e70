"""Mutation testing: break the code in one place, and see whether a test fails.

`python -m tests.mutants --modules core plan rules dispatch --sample 120 --seed 0 --jobs 2` draws mutants, equally many
of each package, and runs the tests that execute the changed line: the quickest first, up to `--seconds` of them.
`--files plan/route.py` draws equally many of each of these files instead. A first pass records which test executes
which line; `--coverage FILE` keeps it for later runs. A mutant is killed when a test fails, times out when the tests
take far longer than before, survives when they pass, and is uncovered when no test of the chosen files executes its
line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import numpy  # noqa: F401  imported once, for all children
import pytest
import torch  # noqa: F401

from tests.line_coverage import Coverage, LineRecorder

ROOT = Path(__file__).parent.parent
PACKAGES = ("core", "plan", "rules", "dispatch")
# Files whose tests are many, quick, and execute these packages: not those that start processes or train models.
TESTS = (
    "pure/test_core_cache.py",
    "pure/test_core_interning.py",
    "pure/test_core_layout.py",
    "pure/test_core_mesh.py",
    "pure/test_core_notation.py",
    "pure/test_core_spec.py",
    "pure/test_host_axes.py",
    "pure/test_plan.py",
    "pure/test_plan_parts.py",
    "pure/test_rules.py",
    "virtual/test_broadcast.py",
    "virtual/test_choices.py",
    "virtual/test_dispatch.py",
    "virtual/test_dtensor.py",
    "virtual/test_extend.py",
    "virtual/test_halo.py",
    "virtual/test_host_routes.py",
    "virtual/test_known_cases.py",
    "virtual/test_meshes.py",
    "virtual/test_modes.py",
    "virtual/test_ops_attention.py",
    "virtual/test_ops_convolution.py",
    "virtual/test_ops_creation.py",
    "virtual/test_ops_embedding.py",
    "virtual/test_ops_indexing.py",
    "virtual/test_ops_linalg.py",
    "virtual/test_ops_loss.py",
    "virtual/test_ops_matmul.py",
    "virtual/test_ops_movement.py",
    "virtual/test_ops_normalization.py",
    "virtual/test_ops_pointwise.py",
    "virtual/test_ops_recurrent.py",
    "virtual/test_ops_reduction.py",
    "virtual/test_owner_exchange.py",
    "virtual/test_plain_tensors.py",
    "virtual/test_random.py",
    "virtual/test_redistribute.py",
    "virtual/test_row_exchange.py",
    "virtual/test_sequence_attention.py",
    "virtual/test_serialization.py",
    "virtual/test_shapes.py",
    "virtual/test_spread_gradients.py",
    "virtual/test_torch_api.py",
    "virtual/test_transfer.py",
)
START_SECONDS = 30  # CPU time of importing the package and the test files, at most
BROKEN, NOT_REPLACED = 70, 71  # exit statuses that pytest does not use


# ---------------------------------------------------------------- mutants


class Mutant(NamedTuple):
    """One change of one file: `after` in place of the text from `start` to `end`."""

    file: str  # below src/shardwise
    start: int
    end: int
    after: str
    kind: str
    lines: tuple[int, int]
    in_function: bool

    @property
    def name(self) -> str:
        """What `--only` takes."""
        return f"{self.file}:{self.lines[0]}:{self.kind}:{self.start}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.name}\n    - {_short(before)}\n    + {_short(self.after)}"


def _short(text: str) -> str:
    return text if len(text) <= 150 else f"{text[:147]}..."


SWAPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
SWAPPED_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls whose two first arguments cannot be exchanged and still mean something.
FIXED_ARGUMENTS = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "zip", "min", "max", "print"}


def expression_mutants(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Kinds of changes of an expression, each with the changed expression."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED_COMPARISONS:
            yield "comparison", _changed(node, ops=[SWAPPED_COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in SWAPPED_OPERATORS and not _has_text(node):
            yield "arithmetic", _changed(node, op=SWAPPED_OPERATORS[type(op)]())
        case ast.BoolOp(op=ast.And()):
            yield "and_or", _changed(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield "and_or", _changed(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "dropped_not", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.IfExp(test=test):
            yield "negated_test", _changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(func=ast.Name(id=name), args=args):
            if name in SWAPPED_FUNCTIONS:
                yield "function", _changed(node, func=ast.Name(SWAPPED_FUNCTIONS[name]))
            if name not in FIXED_ARGUMENTS and len(args) >= 2 and not any(isinstance(a, ast.Starred) for a in args):
                yield "swapped_arguments", _changed(node, args=[args[1], args[0], *args[2:]])
        case _:
            pass


def _changed(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _has_text(node: ast.BinOp) -> bool:
    """Strings and displays are joined by `+`: any other operator would only raise."""
    kinds = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
    sides = (node.left, node.right)
    return any(isinstance(s, kinds) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides)


def _removable(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.If(body=[ast.Raise() | ast.Return()], orelse=[]):
            return True
        case _:
            return False


class _Finder(ast.NodeVisitor):
    """All mutants of a file. Annotations, decorators, assertions and the texts of errors are left out."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.mutants: list[Mutant] = []
        self._offsets = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        self._functions = 0

    def generic_visit(self, node: ast.AST) -> None:
        for kind, changed in expression_mutants(node):
            self._add(node, kind, f"({ast.unparse(changed)})")
        if isinstance(node, ast.stmt) and _removable(node):
            self._add(node, "removed_statement", "pass")
        if isinstance(node, ast.If | ast.While):
            self._add(node.test, "negated_test", f"(not ({ast.unparse(node.test)}))")
        super().generic_visit(node)

    def _add(self, node: ast.AST, kind: str, after: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        first, last = node.lineno, node.end_lineno or node.lineno
        start = self._offsets[first - 1] + node.col_offset
        end = self._offsets[last - 1] + (node.end_col_offset or 0)
        self.mutants.append(Mutant(self.file, start, end, after, kind, (first, last), self._functions > 0))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: lengths are equal
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("__")):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def leave_out(self, node: ast.AST) -> None:
        pass

    visit_Assert = visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = leave_out


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in order.

    Each has other text than the file, and compiles.
    """
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.mutants


def all_mutants(root: Path, places: list[str]) -> dict[str, list[Mutant]]:
    """The mutants of each place: a package or a file below src/shardwise."""
    source = root / "src/shardwise"
    return {
        place: [
            mutant
            for path in (sorted((source / place).rglob("*.py")) if (source / place).is_dir() else [source / place])
            for mutant in mutants_of(str(path.relative_to(source)), path.read_bytes())
        ]
        for place in places
    }


# ---------------------------------------------------------------- running tests on a mutant


class Verdict(NamedTuple):
    mutant: Mutant
    outcome: str  # killed, timed out, survived, uncovered; "not replaced" for those that need a new import
    tests: int


class Job(NamedTuple):
    """A mutant and the tests that may kill it, with the CPU seconds of each."""

    mutant: Mutant
    tests: list[tuple[float, str]]

    @property
    def limit(self) -> int:
        """CPU seconds after which the tests are stopped."""
        return int(START_SECONDS + 3 * sum(cost for cost, _ in self.tests))


def tests_for(mutant: Mutant, coverage: Coverage, seconds: float) -> Job:
    """The quickest tests that execute its lines; of what runs when a module is imported, those that use the module."""
    found = coverage.tests_of_lines(mutant.file, *mutant.lines)
    if not found and not mutant.in_function:
        found = coverage.tests_of_file(mutant.file)
    found.sort()
    sums = itertools.accumulate(cost for cost, _ in found)
    return Job(mutant, [test for test, total in zip(found, sums, strict=True) if total <= seconds or test is found[0]])


def jobs_of(mutants: Sequence[Mutant], options: argparse.Namespace, every_test: Sequence[str]) -> list[Job]:
    """With `--every-test`, all of `every_test` for each mutant; otherwise the tests that were recorded."""
    if options.every_test:
        cost = options.seconds / max(len(every_test), 1)
        return [Job(mutant, [(cost, name) for name in every_test]) for mutant in mutants]
    coverage = Coverage.load(options.coverage)
    return [tests_for(mutant, coverage, options.seconds) for mutant in mutants]


def in_child(function: Callable[[], int], cpu_seconds: int | None = None, output: str | Path = os.devnull) -> int:
    """Fork, run `function` with its output in a file, exit with what it returns; returns the process id."""
    child = os.fork()
    if child:
        return child
    code = BROKEN
    try:
        os.setpgid(0, 0)
        opened = os.open(output, os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(opened, descriptor)
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_jobs(jobs: Iterable[Job], processes: int, start: Callable[[Job], int]) -> Iterator[Verdict]:
    """Run children, `processes` at once. One that waits takes no CPU time: it is stopped by the clock."""
    running: dict[int, tuple[Job, float]] = {}
    waiting = iter(jobs)
    while True:
        while len(running) < processes and (job := next(waiting, None)) is not None:
            running[start(job)] = (job, time.monotonic() + 20 * job.limit)
        if not running:
            return
        for child, (job, deadline) in list(running.items()):
            late = time.monotonic() > deadline
            if late:
                os.killpg(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if done:
                del running[child]
                yield Verdict(job.mutant, _outcome(status), len(job.tests))
        time.sleep(0.02)


def _outcome(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "timed out" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "killed"
    return {0: "survived", NOT_REPLACED: "not replaced"}.get(os.WEXITSTATUS(status), "killed")


def run_pytest(root: Path, arguments: list[str], plugins: Sequence[object] = ()) -> int:
    """Run tests of a copy of the tree in this process, which has imported neither the package nor a test file."""
    os.chdir(root)
    os.environ.update(PYTHONPATH=f"{root / 'src'}:{root}", SHARDWISE_NO_BEARTYPE="1")
    sys.dont_write_bytecode = True
    here = {str(ROOT), str(ROOT / "src"), ""}
    sys.path[:] = [str(root), str(root / "src"), *(path for path in sys.path if path not in here)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, *arguments], plugins=list(plugins)))


class WarmSession:
    """A session of pytest that has collected all tests. Each mutant is a fork of it.

    The first fork records the lines of tests, if that is not done. A fork for a mutant replaces the code of the live
    functions, so that nothing is imported again.
    """

    def __init__(self, root: Path, options: argparse.Namespace, mutants: list[Mutant], results: Connection) -> None:
        self._root = root
        self._options = options
        self._mutants = mutants
        self._results = results  # number of the mutant, outcome, number of tests

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        if not self._options.every_test and not self._options.coverage.exists():
            os.waitpid(in_child(lambda: self._record(session)), 0)
        known = jobs_of(self._mutants, self._options, list(items))
        jobs = [job._replace(tests=[test for test in job.tests if test[1] in items]) for job in known]

        def start(job: Job) -> int:
            return in_child(lambda: self._run(session, job.mutant, [items[name] for _, name in job.tests]), job.limit)

        for number, job in enumerate(jobs):
            if not job.tests:
                self._results.send((number, "uncovered", 0))
        numbers = {id(job.mutant): number for number, job in enumerate(jobs)}
        for verdict in run_jobs([job for job in jobs if job.tests], self._options.jobs, start):
            self._results.send((numbers[id(verdict.mutant)], verdict.outcome, verdict.tests))
        return True

    def _record(self, session: pytest.Session) -> int:
        """In a random order, until the tests of a file have taken the time that a file has."""
        packages = sorted({*PACKAGES, *(mutant.file.partition("/")[0] for mutant in self._mutants)})
        recorder = LineRecorder(self._root / "src/shardwise", packages)
        session.config.pluginmanager.register(recorder)
        session.config.option.maxfail = 0
        by_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        for items in by_file.values():
            random.Random(0).shuffle(items)
            end = time.process_time() + self._options.file_seconds
            for item in items:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if time.process_time() > end:
                    break
        self._options.coverage.write_text(json.dumps(recorder.tests))
        return 0

    def _run(self, session: pytest.Session, mutant: Mutant, items: list[pytest.Item]) -> int:
        if not replace_code(self._root / "src/shardwise" / mutant.file, mutant):
            return NOT_REPLACED
        for item, following in itertools.zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def replace_code(path: Path, mutant: Mutant) -> bool:
    """Give live functions the code of the mutant; False where their closures would differ, or none is found."""
    source = path.read_bytes()
    before = _functions(compile(source, str(path), "exec", dont_inherit=True))
    after = _functions(compile(mutant.applied(source), str(path), "exec", dont_inherit=True))
    if len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    changed = {old: new for old, new in pairs if old != new}
    live = [each for each in gc.get_objects() if type(each) is FunctionType and each.__code__ in changed]
    if any(each.__code__.co_freevars != changed[each.__code__].co_freevars for each in live):
        return False
    for each in live:
        each.__code__ = changed[each.__code__]
    return bool(live)


def _functions(code: CodeType) -> list[CodeType]:
    """The code of all functions inside of a module or function, in order."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [found for const in inner for found in (const, *_functions(const))]


def run_imported(root: Path, job: Job) -> int:
    """Import the package with the mutant in it, and run the tests."""
    path = str(root / "src/shardwise" / job.mutant.file)
    get_code = SourceFileLoader.get_code

    def get_mutated(loader: SourceFileLoader, name: str) -> CodeType | None:
        if loader.path != path:
            return get_code(loader, name)
        return compile(job.mutant.applied(Path(path).read_bytes()), path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_mutated
    return run_pytest(root, [name for _, name in job.tests])


def copy_of_tree(target: Path) -> Path:
    """Sources, tests and pages: tests find each other by their place."""
    skipped = shutil.ignore_patterns(".*", "site", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=skipped)
    return target


def verdicts_of(root: Path, options: argparse.Namespace, mutants: list[Mutant]) -> Iterator[Verdict]:
    """Mutants of functions in forks of one session; others, and functions that cannot be replaced, imported anew."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    session = WarmSession(root, options, mutants, sending)
    log = root.with_suffix(".log")
    child = in_child(lambda: run_pytest(root, [f"tests/{name}" for name in options.tests], [session]), output=log)
    sending.close()
    imported = []
    with contextlib.suppress(EOFError):
        while True:
            number, outcome, tests = receiving.recv()
            if outcome == "not replaced":
                imported.append(mutants[number])
            else:
                yield Verdict(mutants[number], outcome, tests)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"the session of tests failed: {log.read_text()[-4000:]}")
    jobs = jobs_of(imported, options, [f"tests/{name}" for name in options.tests])
    yield from run_jobs(jobs, options.jobs, lambda job: in_child(lambda: run_imported(root, job), job.limit))


# ---------------------------------------------------------------- command line


def chosen_mutants(root: Path, options: argparse.Namespace) -> list[Mutant]:
    by_place = all_mutants(root, options.files or options.modules)
    if options.only:
        return [mutant for mutants in by_place.values() for mutant in mutants if mutant.name in options.only]
    draw = random.Random(options.seed)
    share = max(options.sample // len(by_place), 1)
    return [mutant for mutants in by_place.values() for mutant in draw.sample(mutants, min(share, len(mutants)))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modules", nargs="+", default=list(PACKAGES), choices=PACKAGES, help="packages to mutate")
    parser.add_argument("--files", nargs="+", help="files to mutate, below src/shardwise, instead of packages")
    parser.add_argument("--sample", type=int, default=120, help="mutants in all, equally many of each package or file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at once")
    parser.add_argument("--seconds", type=float, default=15, help="CPU time of the tests of one mutant")
    parser.add_argument("--file-seconds", type=float, default=30, help="CPU time of the tests of one file, recorded")
    parser.add_argument("--coverage", type=Path, help="the recorded lines of tests: read, or written if not there")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files of tests, below tests/")
    parser.add_argument("--every-test", action="store_true", help="all tests of these files; nothing is recorded")
    parser.add_argument("--only", nargs="+", help="these mutants, as a report names them")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copy_of_tree(Path(folder) / "tree")
        options.coverage = (options.coverage or Path(folder) / "lines.json").absolute()
        mutants = chosen_mutants(root, options)
        for verdict in verdicts_of(root, options, mutants):
            outcomes[verdict.outcome] += 1
            source = (root / "src/shardwise" / verdict.mutant.file).read_bytes()
            text = verdict.mutant.name if verdict.outcome == "killed" else verdict.mutant.describe(source)
            print(f"{verdict.outcome} ({verdict.tests} tests) {text}", flush=True)
    detected = outcomes["killed"] + outcomes["timed out"]
    counts = ", ".join(f"{outcomes[key]} {key}" for key in ("killed", "timed out", "survived", "uncovered"))
    print(f"mutation score {detected / max(len(mutants), 1):.0%} of {len(mutants)} mutants: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
