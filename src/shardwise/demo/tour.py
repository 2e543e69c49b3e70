"""The parts of the demo. Each part computes and prints its numbers."""

from __future__ import annotations

import inspect
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.debug.explain_report.report import Report
from shardwise.debug.pictures.draw_text import picture_text
from shardwise.demo.corpus import TITLE, Corpus, read_corpus
from shardwise.demo.model import spread
from shardwise.demo.page import Page
from shardwise.demo.training import DryStep, Pair, Size, Trainer, dry_step, make_pair, restore_on, sample
from shardwise.text import human_bytes, human_seconds

__all__ = ["Tour"]

MESH = {"dp": 2, "tp": 4}
DRAWN = "blocks.0.feed_forward.down.weight"
CLUSTER = (256, 4)
GROWN_CLUSTER = (128, 8)
GROWN = Size(width=4096, heads=32, blocks=32, length=2048, windows=128, dtype=torch.bfloat16)
SAMPLED = 160  # characters
MOST_MODULES = 4


class Tour:
    """A run of the demo: a text, a mesh, a model on the mesh, and the same model on one device.

    Args:
        page: the output.
        steps: the number of training steps.
        html: a file for the report, or None.
    """

    def __init__(self, page: Page, steps: int, html: str | None) -> None:
        self.page, self.steps, self.html = page, steps, html
        self.size = Size()
        self.corpus: Corpus = read_corpus()
        with sw.virtual():
            self.mesh = sw.init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        self.pair: Pair = make_pair(self.size, self.mesh, steps)

    @property
    def spread_model(self) -> Any:
        """The model on the mesh."""
        return self.pair.sharded.model

    def present(self) -> None:
        """Print all parts in order."""
        self.show_model()
        self.show_sharding()
        self.train()
        self.show_communication()
        self.show_cluster()
        self.show_samples()
        self.show_checkpoint()

    def show_model(self) -> None:
        """Print the model, the mesh, and the code that parallelizes the model."""
        count = sum(parameter.numel() for parameter in self.pair.alone.model.parameters())
        self.page.heading(f"A transformer on {self.mesh.size()} devices, all of them in this process")
        self.page.say(
            f"It has {count:,} parameters and reads {TITLE!r}, {len(self.corpus.text):,} characters. The model is",
            f"plain PyTorch. This parallelizes it on the mesh {mesh_text(self.mesh)}, fully sharded on dp, tensor and",
            "sequence parallel on tp:",
        )
        self.page.code(textwrap.dedent(inspect.getsource(spread).partition("\n")[2]))

    def show_sharding(self) -> None:
        """Print which device holds which block of one parameter."""
        self.page.heading(f"The sharding of {DRAWN}")
        self.page.lines(picture_text(self.spread_model.get_parameter(DRAWN).spec, width=76))
        parts = self.spread_model.get_parameter(DRAWN).to_local().tensors
        full = self.pair.alone.model.get_parameter(DRAWN)
        held = sorted({tuple(part.shape) for part in parts})
        self.page.say(
            f"Each of {len(parts)} devices holds a block of {' or '.join(map(str, held))} out of {tuple(full.shape)}:",
            f"{human_bytes(parts[0].nbytes)} of {human_bytes(full.nbytes)}.",
        )

    def train(self) -> None:
        """Train both models, and print their losses."""
        self.page.heading(f"{self.steps} steps of training, on the mesh and on one device")
        furthest = 0.0
        names = ("mesh", "one device")
        with self.page.bar("step", self.steps, names) as show:
            for batch in self.corpus.batches(self.steps, self.size.windows, self.size.length):
                sharded, alone = self.pair.sharded.step(batch), self.pair.alone.step(batch)
                furthest = max(furthest, abs(sharded - alone))
                show(f"{sharded:.4f}", f"{alone:.4f}")
        dtype = str(self.size.dtype).removeprefix("torch.")
        self.page.say(f"Over all {self.steps} steps the two losses, in {dtype}, differ by {furthest:.0e} at most.")

    def show_communication(self) -> None:
        """Print the communication of one step by axis and collective; write the report, if requested."""
        self.page.heading("The communication of one step")
        batch = next(self.corpus.batches(1, self.size.windows, self.size.length))
        with sw.explain() as report:
            self.pair.sharded.loss(batch).backward()
            self.pair.sharded.optimizer.step()
        self.pair.sharded.optimizer.zero_grad()
        total = report.total
        self.page.say(
            f"{len(report.records)} operators, {total.collectives} collectives; a device received",
            f"{human_bytes(total.received)}.",
        )
        self.page.table(["axis", "collective", "forward", "backward", "received"], moved_rows(report), right=(2, 3, 4))
        busiest = sorted(report.by_module.items(), key=lambda item: -item[1].received)[:MOST_MODULES]
        named = (
            f"{name.partition('.')[2] or 'the model itself'} {human_bytes(sums.received)}" for name, sums in busiest
        )
        self.page.say(f"Most of it in: {', '.join(named)}.")
        if self.html:
            report.to_html(self.html)
            self.page.say(f"The report by line, with advice, is in {self.html}; open it in a browser.")

    def show_cluster(self) -> None:
        """Print a dry run of the same code on many devices."""
        here = self.size
        scaled = here._replace(windows=here.windows * CLUSTER[0] // MESH["dp"])
        steps = [
            dry_step(size, device, shape)
            for size, device, shape in (
                (here, "cpu", (MESH["dp"], MESH["tp"])),
                (scaled, "cuda", CLUSTER),
                (GROWN, "cuda", GROWN_CLUSTER),
            )
        ]
        self.page.heading(f"The same code on {steps[-1].mesh.size():,} devices: a dry run, nothing is computed")
        self.page.table(
            ["one step, on each device", "here", "scaled out", "and grown"], dry_rows(steps), right=(1, 2, 3)
        )
        self.page.say(
            f"Scaled out, {scaled.windows:,} windows of {scaled.length} characters make a batch. Grown, it is",
            f"{GROWN.windows} of {GROWN.length:,}, and the model has {GROWN.blocks} blocks of width {GROWN.width:,}.",
        )

    def show_samples(self) -> None:
        """Print text generated by the sharded model."""
        self.page.heading("What the sharded model writes")
        speakers = common_speakers(self.corpus, MESH["dp"])
        texts: list[str] = list(speakers)
        count = min(SAMPLED, 10 * self.steps)  # after few training steps, generate less
        with self.page.bar("writing", count) as show:
            for grown in sample(self.pair.sharded, self.corpus, speakers, count, self.size.length):
                texts = grown
                show()
        lines = [
            part for text in texts for line in [*text.splitlines(), ""] for part in textwrap.wrap(line, 74) or [""]
        ]
        self.page.lines(lines[:-1], style="green")

    def show_checkpoint(self) -> None:
        """Save on the mesh, load on three devices, and compare."""
        with sw.virtual():
            mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        self.page.heading(f"A checkpoint, saved on {self.mesh.size()} devices and loaded on {mesh.size()}")
        with tempfile.TemporaryDirectory() as folder:
            restored = restore_on(mesh, self.pair.sharded, self.size, Path(folder))
        batch = next(self.corpus.batches(1, self.size.windows, self.size.length))
        rows = []
        for trainer in (self.pair.sharded, restored.trainer):
            weight: Any = trainer.model.get_parameter(DRAWN)
            rows.append([mesh_text(weight.spec.mesh), weight.spec.layout, f"{loss_now(trainer, batch):.6f}"])
        self.page.say(
            f"{restored.files} files, {human_bytes(restored.file_bytes)}. Of {restored.parameters} parameters,",
            f"{restored.differing} differ between the meshes.",
        )
        self.page.table(["mesh", DRAWN, "loss of a batch"], rows, right=(2,))


def moved_rows(report: Report) -> list[list[str]]:
    """For each axis and collective: counts in forward and backward, and bytes received."""
    counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for record in report.records:
        for move in record.moves:
            sums = counts[move.axis, move.collective]
            sums[record.phase == "backward"] += 1
            sums[2] += move.received
    return [
        [*key, str(forward or "-"), str(backward or "-"), human_bytes(received)]
        for key, (forward, backward, received) in sorted(counts.items(), key=lambda item: -item[1][2])
    ]


def dry_rows(steps: list[DryStep]) -> list[list[str]]:
    """A row for each quantity, a column for each step."""
    rows: list[tuple[str, Callable[[DryStep], str]]] = [
        ("mesh", lambda step: mesh_text(step.mesh)),
        ("elements", lambda step: str(step.dtype).removeprefix("torch.")),
        ("parameters of the model", lambda step: f"{step.parameters:,}"),
        ("parameters and AdamW's state", lambda step: human_bytes(step.held)),
        ("memory at the peak", lambda step: human_bytes(step.peak)),
        ("receives", lambda step: human_bytes(step.received)),
        ("collectives", lambda step: str(step.collectives)),
        ("time in them, modelled", lambda step: human_seconds(step.seconds)),
    ]
    return [[name, *map(show, steps)] for name, show in rows]


def mesh_text(mesh: sw.DeviceMesh) -> str:
    """The axes of a mesh with their sizes."""
    return " x ".join(f"{mesh.axis_name(axis)}={size}" for axis, size in enumerate(mesh.shape))


def common_speakers(corpus: Corpus, count: int) -> list[str]:
    """The most frequent speakers, as in the text of the play."""
    names = [line for line in corpus.text.splitlines() if line.endswith(":") and line.isupper()]
    often = sorted(set(names), key=lambda name: (-names.count(name), name))
    return [f"{name}\n" for name in often[:count]]


@torch.no_grad()
def loss_now(trainer: Trainer, batch: Any) -> float:
    """The loss of a batch, without training."""
    return trainer.loss(batch).item()
