"""`import shardwise` costs little and changes nothing: no process group, no heavy modules, no global state of torch."""

import ast
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Modules that `import shardwise` may load on top of `import torch`, its own aside. Each costs every user's start-up.
ALLOWED: frozenset[str] = frozenset()

PROBE = """
import json, sys
import torch

def state():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill uninitialized": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "anomaly mode": torch.is_anomaly_enabled(),
        "random numbers": torch.get_rng_state().sum().item(),
        "print options": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "cuda started": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
    }

torch.manual_seed(0)
before, modules = state(), set(sys.modules)
if len(sys.argv) > 1:
    exec(sys.argv[1])
print(json.dumps({"before": before, "after": state(), "modules": sorted(set(sys.modules) - modules)}))
"""


def probe(statement: str) -> dict[str, Any]:
    """State of torch before and after a statement in a fresh interpreter, and the modules it loaded."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", PROBE, statement], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def loaded_beyond_torch(report: dict[str, Any]) -> set[str]:
    return {name for name in report["modules"] if name.partition(".")[0] != "shardwise"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return probe("import shardwise")


def test_import_loads_nothing_heavy(report: dict[str, Any]) -> None:
    extra = loaded_beyond_torch(report) - ALLOWED
    assert not extra, (
        f"import shardwise also loads {sorted(extra)}; import lazily, or add to ALLOWED what is worth its time"
    )
    assert "shardwise" in report["modules"]


def test_import_changes_no_state_of_torch(report: dict[str, Any]) -> None:
    assert report["after"] == report["before"]
    assert report["after"]["process group"] is False


def test_the_probe_sees_changes() -> None:
    report = probe(
        "import rich.table; torch.set_default_dtype(torch.float64); torch.rand(1); torch.set_grad_enabled(False)"
    )
    changed = {key for key, value in report["before"].items() if report["after"][key] != value}
    assert changed == {"default dtype", "grad mode", "random numbers"}
    assert "rich.table" in loaded_beyond_torch(report)


# ---------------------------------------------------------------- names load when they are used

MODULES_OF_IMPORT = 16  # data types and errors; today 15


def run(program: str, *, folder: str | None = None, **environment: str) -> str:
    """What a program prints in a fresh interpreter."""
    paths = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_data_types_alone(report: dict[str, Any]) -> None:
    ours = [name for name in report["modules"] if name.partition(".")[0] == "shardwise"]
    assert len(ours) <= MODULES_OF_IMPORT, ours
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert rooms <= {"core", "errors", "events", "imports", "text", "torch_private"}


def test_what_most_programs_do_not_use_stays_unloaded() -> None:
    """A mesh, DTensors, an operator with its rule, backward."""
    report = probe(
        "import shardwise as sw; mesh = sw.init_device_mesh('cpu', (2,)); x = sw.ones(4, 4, device_mesh=mesh, "
        "placements=[sw.Shard(0)], requires_grad=True); (x @ x).sum().full_tensor().backward()"
    )
    rooms = {name.split(".")[1] for name in report["modules"] if name.startswith("shardwise.")}
    assert "dispatch" in rooms
    unused = {"capture", "checkpoint", "cli", "debug", "demo", "elastic", "hf", "meshes", "moe", "optim", "parallel"}
    assert not rooms & (unused | {"pipelines"})


def test_moving_tensors_does_not_load_the_compiler() -> None:
    report = probe(
        "import shardwise as sw; mesh = sw.init_device_mesh('cpu', (2,)); x = sw.distribute_tensor(torch.ones(4, 4), "
        "mesh, [sw.Shard(0)]); x.redistribute(placements=[sw.Shard(1)]).full_tensor(); x.to_local()"
    )
    assert "shardwise.tensor.versions" in report["modules"]
    assert not {"torch._dynamo", "torch._inductor"} & {*report["modules"]}


def test_every_public_name_is_found_and_listed() -> None:
    program = """
import shardwise as sw
before = set(dir(sw))
assert before >= set(sw.__all__), set(sw.__all__) - before
for name in sw.__all__:
    assert getattr(sw, name) is not None, name
assert sw.random.manual_seed is sw.manual_seed and sw.hf.parallelize
for name in ("no_such_name", "_private", "__wrapped__"):
    assert not hasattr(sw, name), name
names = {}
exec("from shardwise import *", names)
print(sorted(set(sw.__all__) - set(names)))
"""
    assert run(program) == "[]"


def test_names_for_type_checkers_are_those_at_run_time() -> None:
    """The block for type checkers, the names of `essentials` and of the rooms say the same."""
    import shardwise as sw
    from shardwise import essentials

    source = Path(sw.__file__).read_text(encoding="utf-8")
    [block] = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name for name, module in declared.items() if module == "shardwise.essentials"} == set(essentials.__all__)
    for name, module in declared.items():
        assert getattr(sw, name) is getattr(importlib.import_module(str(module)), name), name
    assert set(declared) <= set(sw.__all__)


def test_a_mesh_is_of_the_surrounding_fabric_however_it_is_made() -> None:
    """Under torchrun, a mesh that is the first thing a program makes is of processes; also one made by many threads."""
    import shardwise as sw

    pickled = pickle.dumps(sw.DeviceMesh("cpu", [0], fabric="c10d")).hex()
    threads = """
import threading, shardwise as sw
found, ready = [], threading.Barrier(8)
def make():
    ready.wait()
    found.append(sw.DeviceMesh("cpu", [0, 1]).fabric)
threads = [threading.Thread(target=make) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*found)
"""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    assert run(threads, **environment).split() == ["c10d"] * 8
    unpickled = f"import pickle, shardwise\nprint(pickle.loads(bytes.fromhex({pickled!r})).fabric)"
    assert run(unpickled, **environment) == "c10d"


def test_the_first_use_may_be_a_file(tmp_path: Path) -> None:
    """`torch.load` of DTensors right after the import, and what follows: operators, torch's load_state_dict."""
    import shardwise as sw

    mesh = sw.init_device_mesh("cpu", (2,))
    torch.save({"weight": sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])}, tmp_path / "state.pt")
    program = """
import torch, shardwise
state = torch.load("state.pt", weights_only=True)
layer = torch.nn.Linear(4, 4, bias=False)
layer.weight = torch.nn.Parameter(state["weight"] * 2)
layer.load_state_dict({"weight": torch.full((4, 4), 3.0)})
print(type(layer.weight.data).__name__, layer.weight.full_tensor().sum().item(), layer.weight.placements)
"""
    assert run(program, folder=str(tmp_path)) == "DTensor 48.0 (Shard(0),)"


# ---------------------------------------------------------------- what torch.Tensor is given

OF_TRANSFORMED = {"_spec", "spec", "device_mesh", "placements", "redistribute", "to_local", "full_tensor"}
OF_COMPILED = {"__coerce_same_metadata_as_tangent__"}  # only after compiled code has returned a DTensor


def test_plain_tensors_have_no_new_attributes() -> None:
    """The list of docs/architecture.md, "What is changed in torch", is complete, and plain tensors show none of it."""
    import shardwise as sw

    sw.init_device_mesh("cpu", (2,))
    given = {
        name
        for name, value in vars(torch.Tensor).items()
        if (getattr(value, "__module__", None) or type(value).__module__).startswith("shardwise")
    }
    assert given - OF_COMPILED == OF_TRANSFORMED
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert not [name for name in OF_TRANSFORMED if hasattr(tensor, name)]
    seen: list[bool] = []
    torch.func.grad(lambda x: (seen.append(any(hasattr(x, name) for name in OF_TRANSFORMED)), x.sum())[1])(
        torch.ones(2)
    )
    assert seen == [False]
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## What is changed in torch")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in section or f".{name}`" in section for name in OF_TRANSFORMED | OF_COMPILED)
