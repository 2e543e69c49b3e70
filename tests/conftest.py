"""What holds for every test: types are checked at run time, numbers repeat, tiers are marked, no process is left."""

import collections
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo.processes import ProcessPool, child_processes

ROOT = Path(__file__).parent.parent
TIERS = ("pure", "virtual", "gloo", "hosts", "peer", "gpu", "models")
LEFT_CHILDREN = pytest.StashKey[list[str]]()


def check_types_at_run_time() -> None:
    """Every annotation of the package becomes a check: here only, never in production."""
    if os.environ.get("SHARDWISE_NO_BEARTYPE") == "1" or importlib.util.find_spec("beartype") is None:
        return
    from beartype import BeartypeConf
    from beartype.claw import beartype_package

    assert "shardwise" not in sys.modules, "shardwise was imported before its types could be checked"
    _tell_named_tuples_their_module()
    # An int is a float to type checkers, so it is one here. The dispatcher and the fabrics make functions for each
    # signature, and checking these would cost more than the tests themselves. Beartype also keeps what functions
    # inside of functions refer to, tensors included.
    skipped = ("shardwise.dispatch", "shardwise.fabric", "shardwise.local", "shardwise.pipelines.split_backward")
    beartype_package("shardwise", conf=BeartypeConf(is_pep484_tower=True, claw_skip_package_names=skipped))


def _tell_named_tuples_their_module() -> None:
    """The constructor of a NamedTuple claims a module that is not there; beartype looks in it for the fields' types."""
    original = collections.namedtuple

    def namedtuple(*args: Any, **options: Any) -> Any:
        made: Any = original(*args, **options)
        if made.__module__.partition(".")[0] == "shardwise":
            made.__new__.__module__ = made.__module__
        return made

    collections.namedtuple = namedtuple


def choose_hypothesis_profile() -> None:
    """`ci`, the default: the same examples on each run. HYPOTHESIS_PROFILE=dev: new ones, failures remembered."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    import hypothesis

    hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
    hypothesis.settings.register_profile("dev", deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


check_types_at_run_time()
choose_hypothesis_profile()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def always_decomposing() -> Iterator[None]:
    """Operators are computed from others wherever their rule would communicate, however small the tensors are."""
    from shardwise.plan.cost import current_cost_model, set_cost_model
    from shardwise.rules.registry import REDUCTIONS
    from shardwise.schema import load_rules

    load_rules()  # otherwise done when the first operator runs
    known = dict(REDUCTIONS)
    REDUCTIONS.clear()
    set_cost_model(current_cost_model())  # what was chosen before is forgotten
    yield
    REDUCTIONS.update(known)
    set_cost_model(current_cost_model())


@pytest.fixture
def always_with_halos(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Windows slide over sharded dims wherever these are sharded, however short they are."""
    from shardwise.plan import propagate
    from shardwise.plan.cost import current_cost_model, set_cost_model

    monkeypatch.setattr("shardwise.tensor.composites.GATHERED", 0)
    monkeypatch.setattr(propagate.ShardingPropagator, "_seconds", lambda *args: 0.0)
    monkeypatch.setattr(propagate, "halo_rows", lambda *args: 0.0)
    set_cost_model(current_cost_model())  # what was chosen before is forgotten
    yield
    set_cost_model(current_cost_model())


@pytest.fixture(scope="session")
def gloo4() -> Iterator[ProcessPool]:
    """Four real ranks over gloo, started once a session: `gloo4.run(function, *args, timeout=60)`."""
    with ProcessPool(4) as pool:
        yield pool


def tier_of(path: Path) -> str | None:
    """The tier of a file, by its folder; examples in docstrings of the package are `virtual`."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        return "virtual"
    return parts[1] if parts[0] == "tests" and parts[1] in TIERS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item.path)
        if tier is None:
            raise pytest.UsageError(f"{item.nodeid}: a test lives in a folder of its tier: {', '.join(TIERS)}")
        item.add_marker(tier)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_CHILDREN] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist the tests run in workers: they look for their children, the controller fails the session."""
    node.config.stash[LEFT_CHILDREN] += getattr(node, "workeroutput", {}).get("left_children", [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    left = config.stash[LEFT_CHILDREN]
    if not config.pluginmanager.hasplugin("dsession"):
        left += children_that_stay()
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_children"] = left
    elif left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left := config.stash[LEFT_CHILDREN]:
        terminalreporter.section("processes left behind", red=True)
        for child in left:
            terminalreporter.line(child)


def children_that_stay(patience: float = 2.0) -> list[str]:
    """The children of this process that do not end by themselves within `patience` seconds."""
    deadline = time.monotonic() + patience
    while (children := child_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{pid}: {command}" for pid, command in children.items()]
