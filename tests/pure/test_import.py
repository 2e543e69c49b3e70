"""`import shardwise` costs little and changes nothing: no process group, no heavy modules, no global state of torch."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

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
