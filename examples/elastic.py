"""Training that goes on when ranks come and go: the same losses on four ranks, on three, or on some of each.

python examples/elastic.py                               # four ranks inside this process, then three, then five
torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic.py --folder /shared/run
# one agent on each of four machines: if one is lost, the others go on
torchrun --nnodes 3:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
    examples/elastic.py --folder /shared/run

Three things make a step independent of the ranks: the global batch depends on the number of the step alone, a batch of
DTensors is one batch (its loss, gradients and dropout are those of one device), and a checkpoint loads on any mesh.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

SAMPLES, FEATURES, CLASSES, BATCH = 100, 12, 5, 24
say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def build(mesh: sw.DeviceMesh) -> dict[str, Any]:
    """Everything that a training consists of, on a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))
    sw.fully_shard(model[0], mesh)
    sw.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state(), "step": 0}


def train(state: dict[str, Any], mesh: sw.DeviceMesh, steps: int, folder: Path | None = None) -> list[float]:
    """Go on to this number of steps; the losses on the way."""
    inputs, classes = data()
    torch.set_rng_state(state["random"])  # dropout goes on where it was
    losses = []
    for step in range(state["step"], steps):
        rows = sw.batch_indices(step, BATCH, SAMPLES)
        x, y = (sw.distribute_tensor(t[rows], mesh, [sw.Shard(0)], src_data_rank=None) for t in (inputs, classes))
        loss: Any = F.cross_entropy(state["model"](x), y)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.detach().full_tensor().item())
        state["step"] = step + 1
        state["random"].copy_(torch.get_rng_state())
        if folder is not None:
            # the note first: a rank that is lost in between repeats a step, and no step is without a note
            note(folder, f"{step} {mesh.size()} {losses[-1]!r}")
            sw.checkpoint.save(state, folder / f"step-{step + 1}", keep=2, overwrite=True)
    return losses


def note(folder: Path, line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        with (folder / "losses.txt").open("a") as file:
            file.write(line + "\n")
        say(line)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return found[-1] if found else None


def on_processes(folder: Path, steps: int) -> None:
    """What torchrun starts, and starts again after a failure, on as many processes as there are then."""
    folder.mkdir(parents=True, exist_ok=True)
    mesh = sw.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    state = build(mesh)
    path = latest(folder)
    if path is not None:
        sw.remesh(path, mesh, into=state)  # the ranks that saved it are gone
        say(f"continues at step {state['step']} on {plural(mesh.size())}")
    train(state, mesh, steps, folder)


def in_one_process(steps: int) -> None:
    """The same with virtual ranks, where the old mesh is still there when the new one takes over."""
    meshes = [sw.DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("dp",)) for ranks in (4, 3, 5)]
    state: dict[str, Any] = build(meshes[0])
    losses: list[float] = []
    for number, mesh in enumerate(meshes):
        if number:
            state = sw.remesh(state, mesh, into=build(mesh))
        more = train(state, mesh, steps * (number + 1) // len(meshes))
        say(f"{plural(mesh.size())}: {' '.join(f'{loss:.4f}' for loss in more)}")
        losses += more
    whole = train(build(meshes[0]), meshes[0], steps)
    apart = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
    assert apart < 1e-5, apart
    say(f"an uninterrupted run on 4 ranks has the same {len(whole)} losses, up to {apart:.1e}")


def plural(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of checkpoints and losses, shared by all processes")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        if arguments.folder is None:
            parser.error("under torchrun, --folder is needed")
        on_processes(arguments.folder, arguments.steps)
    else:
        in_one_process(arguments.steps)
