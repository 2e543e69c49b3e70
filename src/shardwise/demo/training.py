"""The demo's computations: training on one device and on the mesh, a dry run, samples, a checkpoint. Prints nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.demo.corpus import Batch, Corpus
from shardwise.demo.model import Transformer, spread

__all__ = ["DryStep", "Pair", "Restored", "Size", "Trainer", "dry_step", "make_pair", "restore_on", "sample"]

LEARNING_RATE = 2e-2
WARM_UP = 20  # steps
TEMPERATURE = 0.7  # of sampling


class Size(NamedTuple):
    """The size of a model and of a batch."""

    characters: int = 64  # of the play, rounded up to a multiple of four ranks
    width: int = 64
    heads: int = 4
    blocks: int = 2
    length: int = 32
    windows: int = 32
    dtype: torch.dtype = torch.float64  # shows differences that are larger than rounding

    def make(self) -> Transformer:
        """A model with new parameters."""
        return Transformer(self.characters, self.width, self.heads, self.blocks, self.length).to(self.dtype)


def as_it_is(tensor: Tensor) -> Tensor:
    """The placement of a batch on one device: unchanged."""
    return tensor


class Trainer:
    """A model with its optimizer and schedule.

    Args:
        model: on one device or on a mesh.
        place: distributes a batch for the model.
        steps: the number of training steps; the learning rate decays to zero.
    """

    def __init__(self, model: nn.Module, place: Callable[[Tensor], Any], steps: int) -> None:
        self.model, self.place = model, place
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        )

    def loss(self, batch: Batch) -> Any:
        """The mean loss of a batch."""
        logits = self.model(self.place(batch.texts))
        return F.cross_entropy(logits.flatten(0, 1), self.place(batch.following).flatten())

    def step(self, batch: Batch) -> float:
        """Train on a batch. Returns the loss before the update."""
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()


class Pair(NamedTuple):
    """The same model twice: on one device, and on the mesh."""

    alone: Trainer
    sharded: Trainer


def make_pair(size: Size, mesh: sw.DeviceMesh, steps: int) -> Pair:
    """Two trainers of one model, with the same parameters.

    Args:
        size: the size of the model.
        mesh: a mesh with the axes dp and tp.
        steps: the number of training steps.
    """
    torch.manual_seed(0)
    model = size.make()
    spread_model = spread(copy.deepcopy(model), mesh)
    return Pair(Trainer(model, as_it_is, steps), Trainer(spread_model, over_data_axis(mesh), steps))


def over_data_axis(mesh: sw.DeviceMesh) -> Callable[[Tensor], sw.DTensor]:
    """A function that shards a batch over the axis dp of a mesh."""
    placements = [sw.Shard(0) if name == "dp" else sw.Replicate() for name in mesh.mesh_dim_names or ()]
    return lambda tensor: sw.distribute_tensor(tensor, mesh, placements)


# ---------------------------------------------------------------- a dry run


class DryStep(NamedTuple):
    """Memory and communication of one step on a rank."""

    mesh: sw.DeviceMesh
    dtype: torch.dtype
    parameters: int
    held: int
    peak: int
    received: int
    collectives: int
    seconds: float


def dry_step(size: Size, device_type: str, shape: tuple[int, int]) -> DryStep:
    """A dry run of one training step on a mesh of `shape`; nothing is computed.

    Args:
        size: the size of the model and of the global batch.
        device_type: the device of the link model.
        shape: the sizes of dp and tp.
    """
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = size.make()
        count = sum(parameter.numel() for parameter in model.parameters())
        trainer = Trainer(spread(model, mesh), as_it_is, 1)
        placements = [sw.Shard(0), sw.Replicate()]
        texts = sw.zeros(size.windows, size.length, dtype=torch.long, device_mesh=mesh, placements=placements)
        loss = trainer.loss(Batch(texts, texts))
        loss.backward()
        del loss
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        held = run.live_bytes
    collectives = sum(run.collectives.values())
    return DryStep(mesh, size.dtype, count, held, run.peak_bytes, run.bytes, collectives, run.seconds)


# ---------------------------------------------------------------- samples


def sample(trainer: Trainer, corpus: Corpus, beginnings: list[str], count: int, length: int) -> Iterator[list[str]]:
    """Continue texts by sampling, one character at a time.

    Args:
        trainer: the model.
        corpus: the characters.
        beginnings: the texts to continue.
        count: the number of characters to add to each.
        length: the length of the model's input; texts are padded to it, so that every call has the same sizes.
    """
    generator = torch.Generator().manual_seed(0)
    texts = [corpus.encode(text) for text in beginnings]
    for _ in range(count):
        windows = [text[-length:] for text in texts]
        padded = torch.tensor([window + [0] * (length - len(window)) for window in windows])
        with torch.no_grad():
            logits = trainer.model(trainer.place(padded)).full_tensor()
        for row, (text, window) in enumerate(zip(texts, windows, strict=True)):
            chances = (logits[row, len(window) - 1, : len(corpus.characters)] / TEMPERATURE).softmax(-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        yield [corpus.decode(text) for text in texts]


# ---------------------------------------------------------------- a checkpoint


class Restored(NamedTuple):
    """A model that was saved on one mesh and loaded on another."""

    trainer: Trainer
    mesh: sw.DeviceMesh
    file_bytes: int
    files: int
    parameters: int
    differing: int


def restore_on(mesh: sw.DeviceMesh, trainer: Trainer, size: Size, folder: Path) -> Restored:
    """Save a trainer, and load it on another mesh, fully sharded over its axis.

    Args:
        mesh: a mesh with one axis, dp.
        trainer: its model and optimizer are saved.
        size: the size of the model.
        folder: the folder of the checkpoint.
    """
    path = folder / "checkpoint"
    checkpoint.save({"model": trainer.model, "optimizer": trainer.optimizer}, path)
    model = size.make()
    for block in model.blocks:
        sw.fully_shard(block, mesh)
    restored = Trainer(sw.fully_shard(model, mesh), over_data_axis(mesh), 1)
    checkpoint.load({"model": restored.model, "optimizer": restored.optimizer}, path)
    written = [file for file in path.iterdir() if file.is_file()]
    saved = trainer.model.state_dict()
    differing = sum(not same(saved[name], loaded) for name, loaded in restored.model.state_dict().items())
    file_bytes = sum(file.stat().st_size for file in written)
    return Restored(restored, mesh, file_bytes, len(written), len(saved), differing)


def same(one: Any, other: Any) -> bool:
    """Whether two DTensors have the same values, on any meshes."""
    return torch.equal(one.full_tensor(), other.full_tensor())
