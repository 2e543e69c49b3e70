"""Programs of `hf_torchrun` on four processes, against the same programs on one device."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.architectures import missing, prepare
from tests.models.hf_torchrun import sample_config

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")
ROOT = Path(__file__).parents[2]


def results(name: str, folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a program finds under torchrun, and on one device."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    setting = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "SHARDWISE_NO_BEARTYPE": "1",
    }
    for words in ([], torchrun):
        command = [sys.executable, *words, "-m", "tests.models.hf_torchrun", name, str(folder), *options]
        done = subprocess.run(command, cwd=ROOT, env=setting, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    found, wanted = (json.loads((folder / f"{name}{end}.json").read_text()) for end in ("", "-plain"))
    return found, wanted


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_from_files_training_to_files_and_generating(tmp_path: Path) -> None:
    prepare("transformers")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    kind = transformers.MixtralForCausalLM
    kind(sample_config(transformers)).save_pretrained(tmp_path / "files")
    found, wanted = results("loop", tmp_path)
    close(found["losses"], wanted["losses"])
    assert found["texts"] == wanted["texts"]
    ours, theirs = (kind.from_pretrained(tmp_path / name).state_dict() for name in ("saved", "saved-plain"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found, wanted = results("accelerated", tmp_path)
    close(found["steps"], wanted["steps"])


@pytest.mark.parametrize("options", [(), ("accumulate", "smooth")], ids=str)
def test_the_trainer_logs_evaluates_saves_and_resumes(options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found, wanted = results("trainer", tmp_path, *options)
    for name, values in wanted.items():
        close(found[name], values)
    assert found["evaluated"][1] == 7  # each sample once, in batches of 4 and 3
    assert found["resumed"] == [entry[:2] for entry in found["entries"]]
    kind = importlib.import_module("transformers").LlamaForCausalLM
    ours, theirs = (kind.from_pretrained(tmp_path / run / "checkpoint-4").state_dict() for run in ("run", "run-plain"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
