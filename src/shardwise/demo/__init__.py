"""`make demo`, `shardwise demo`: a transformer is trained on eight virtual devices, in under a minute, and shown."""

from __future__ import annotations

import time

import torch

import shardwise
from shardwise.demo.page import Page
from shardwise.demo.tour import Tour

__all__ = ["STEPS", "main"]

STEPS = 180


def main(steps: int = STEPS, html: str | None = None) -> None:
    """Train, and tell about it. Every number that is printed is of this run.

    Args:
        steps: how many steps to train.
        html: a file for the page of what one step moved.

    Example:
        >>> main(steps=2)  # doctest: +SKIP
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors as small as these are not worth waking a second thread for
    try:
        tell(Page(), steps, html)
    finally:
        torch.set_num_threads(threads)


def tell(page: Page, steps: int, html: str | None) -> None:
    """All of it on `page`, and what to do next."""
    begin = time.perf_counter()
    page.say(f"Shardwise {shardwise.__version__} on torch {torch.__version__}", style="bold")
    Tour(page, steps, html).tell()
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
