"""Routers of real models on several meshes: ten steps of training as by a loop over experts on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.expert_models import CASES, Case, check, on_mesh, on_one_device

MESHES = (((4,), ("ep",)), ((3,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2, 2), ("dp", "ep", "tp")))


@functools.cache
def wanted(case: Case) -> list[torch.Tensor]:
    return on_one_device(case)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh[0])))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.router}-{case.experts}")
def test_ten_steps_are_those_of_one_device(case: Case, mesh: Any) -> None:
    check(on_mesh(case, *mesh), wanted(case))
