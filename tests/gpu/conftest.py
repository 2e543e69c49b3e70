"""Under pytest, tests here are skipped where there is no CUDA; `python -m tests.gpu` has no use for this file."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
