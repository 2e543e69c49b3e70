"""Routers of real models on 4 processes: ten steps of training as by a loop over experts on one device."""

from typing import Any

import torch

from tests.expert_models import CASES, check, on_mesh, on_one_device

MESHES = (((4,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2), ("ep", "tp")))


def on_ranks() -> list[list[torch.Tensor]]:
    """Each case on one of the meshes in turn."""
    return [on_mesh(case, *MESHES[at % len(MESHES)]) for at, case in enumerate(CASES)]


def test_ten_steps_are_those_of_one_device(gloo4: Any) -> None:
    plain = [on_one_device(case) for case in CASES]
    for found in gloo4.run(on_ranks, timeout=240):
        for mine, theirs in zip(found, plain, strict=True):
            check(mine, theirs)
