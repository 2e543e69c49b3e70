"""The demo (`make demo`, `shardwise demo`): trains a transformer on eight virtual devices in under a minute."""

from __future__ import annotations

import time

import torch

import shardwise
from shardwise.demo.page import Page
from shardwise.demo.tour import Tour

__all__ = ["STEPS", "main"]

STEPS = 180


def main(steps: int = STEPS, html: str | None = None) -> None:
    """Run the demo. All printed numbers are measured or computed in this run.

    Args:
        steps: the number of training steps.
        html: a file for the report of one step.

    Example:
        >>> main(steps=2)  # doctest: +SKIP
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    try:
        present(Page(), steps, html)
    finally:
        torch.set_num_threads(threads)


def present(page: Page, steps: int, html: str | None) -> None:
    """Print all parts, the next steps, and the time."""
    begin = time.perf_counter()
    page.say(f"Shardwise {shardwise.__version__} on torch {torch.__version__}", style="bold")
    Tour(page, steps, html).present()
    page.heading("What next")
    page.lines(
        [
            'shardwise plan "f32[4096,4096] dp:S0 -> tp:S1" --mesh dp=2,tp=4',
            "shardwise run --mesh dp=2,tp=4 your_script.py",
            "torchrun --nproc-per-node 8 your_script.py    the same script, real devices",
            "shardwise --help",
        ],
        style="cyan",
    )
    page.say(f"This took {time.perf_counter() - begin:.0f} s.")
