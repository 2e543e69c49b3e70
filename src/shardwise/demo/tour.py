"""What the demo tells, part by part. Each part computes what it says of the run at hand."""

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
    """The run that is told: a play, a mesh, and a model on it beside the same on one device.

    Args:
        page: where it is told.
        steps: how long the model is trained.
        html: where the page of the report is written, if anywhere.
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
        return self.pair.together.model

    def tell(self) -> None:
        """All parts, one after the other."""
        self.show_model()
        self.show_sharding()
        self.train()
        self.show_communication()
        self.show_cluster()
        self.show_samples()
        self.show_checkpoint()

    def show_model(self) -> None:
        """The model, the mesh, and the code that brings one onto the other."""
        count = sum(parameter.numel() for parameter in self.pair.alone.model.parameters())
        self.page.heading(f"A transformer on {self.mesh.size()} devices, all of them in this process")
        self.page.say(
            f"It has {count:,} parameters and reads {TITLE!r}, {len(self.corpus.text):,} characters. The model is",
            f"plain PyTorch. This spreads it over the mesh {mesh_text(self.mesh)}, fully sharded on dp, tensor and",
            "sequence parallel on tp:",
        )
        self.page.code(textwrap.dedent(inspect.getsource(spread).partition("\n")[2]))

    def show_sharding(self) -> None:
        """Who holds which block of one parameter."""
        self.page.heading(f"Who holds what: {DRAWN}")
        self.page.lines(picture_text(self.spread_model.get_parameter(DRAWN).spec, width=76))
        parts = self.spread_model.get_parameter(DRAWN).to_local().tensors
        whole = self.pair.alone.model.get_parameter(DRAWN)
        held = sorted({tuple(part.shape) for part in parts})
        self.page.say(
            f"Each of {len(parts)} devices holds a block of {' or '.join(map(str, held))} out of {tuple(whole.shape)}:",
            f"{human_bytes(parts[0].nbytes)} of {human_bytes(whole.nbytes)}.",
        )

    def train(self) -> None:
        """Both models, step by step, with their losses beside each other."""
        self.page.heading(f"{self.steps} steps of training, on the mesh and on one device")
        furthest = 0.0
        names = ("mesh", "one device")
        with self.page.bar("step", self.steps, names) as show:
            for batch in self.corpus.batches(self.steps, self.size.windows, self.size.length):
                together, alone = self.pair.together.step(batch), self.pair.alone.step(batch)
                furthest = max(furthest, abs(together - alone))
                show(f"{together:.4f}", f"{alone:.4f}")
        dtype = str(self.size.dtype).removeprefix("torch.")
        self.page.say(f"Over all {self.steps} steps the two losses, in {dtype}, differ by {furthest:.0e} at most.")

    def show_communication(self) -> None:
        """What one step moves, by axis and collective; the whole report as a page, if asked for."""
        self.page.heading("What one step moved")
        batch = next(self.corpus.batches(1, self.size.windows, self.size.length))
        with sw.explain() as report:
            self.pair.together.loss(batch).backward()
            self.pair.together.optimizer.step()
        self.pair.together.optimizer.zero_grad()
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
            self.page.say(f"Line by line, with how to avoid it: {self.html}, a page for your browser.")

    def show_cluster(self) -> None:
        """The same code on more devices than anyone has at hand."""
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
        """What the model on the mesh has learnt to write."""
        self.page.heading("What the sharded model writes")
        speakers = common_speakers(self.corpus, MESH["dp"])
        texts: list[str] = list(speakers)
        count = min(SAMPLED, 10 * self.steps)  # from a model that has learnt little, little is asked
        with self.page.bar("writing", count) as show:
            for grown in sample(self.pair.together, self.corpus, speakers, count, self.size.length):
                texts = grown
                show()
        lines = [
            part for text in texts for line in [*text.splitlines(), ""] for part in textwrap.wrap(line, 74) or [""]
        ]
        self.page.lines(lines[:-1], style="green")

    def show_checkpoint(self) -> None:
        """Saved on the mesh, loaded on three devices."""
        with sw.virtual():
            mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        self.page.heading(f"A checkpoint, saved on {self.mesh.size()} devices and loaded on {mesh.size()}")
        with tempfile.TemporaryDirectory() as folder:
            restored = restore_on(mesh, self.pair.together, self.size, Path(folder))
        batch = next(self.corpus.batches(1, self.size.windows, self.size.length))
        rows = []
        for trainer in (self.pair.together, restored.trainer):
            weight: Any = trainer.model.get_parameter(DRAWN)
            rows.append([mesh_text(weight.spec.mesh), weight.spec.layout, f"{loss_now(trainer, batch):.6f}"])
        self.page.say(
            f"{restored.files} files, {human_bytes(restored.file_bytes)}. Of {restored.parameters} parameters,",
            f"{restored.differing} differ between the meshes.",
        )
        self.page.table(["mesh", f"{DRAWN} lies", "loss of a batch"], rows, right=(2,))


def moved_rows(report: Report) -> list[list[str]]:
    """What moved along each axis: by which collective, how often forward and backward, how much."""
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
    """A row for each thing to know, a column for each step."""
    rows: list[tuple[str, Callable[[DryStep], str]]] = [
        ("mesh", lambda step: mesh_text(step.mesh)),
        ("elements", lambda step: str(step.dtype).removeprefix("torch.")),
        ("parameters of the model", lambda step: f"{step.parameters:,}"),
        ("keeps of them and of AdamW's state", lambda step: human_bytes(step.held)),
        ("holds at the peak", lambda step: human_bytes(step.peak)),
        ("receives", lambda step: human_bytes(step.received)),
        ("collectives", lambda step: str(step.collectives)),
        ("time in them, as modelled", lambda step: human_seconds(step.seconds)),
    ]
    return [[name, *map(show, steps)] for name, show in rows]


def mesh_text(mesh: sw.DeviceMesh) -> str:
    """The axes of a mesh and how many devices are along each."""
    return " x ".join(f"{mesh.axis_name(axis)}={size}" for axis, size in enumerate(mesh.shape))


def common_speakers(corpus: Corpus, count: int) -> list[str]:
    """Those who speak most often, as the play announces them."""
    names = [line for line in corpus.text.splitlines() if line.endswith(":") and line.isupper()]
    often = sorted(set(names), key=lambda name: (-names.count(name), name))
    return [f"{name}\n" for name in often[:count]]


@torch.no_grad()
def loss_now(trainer: Trainer, batch: Any) -> float:
    """The loss of a batch, without learning from it."""
    return trainer.loss(batch).item()
