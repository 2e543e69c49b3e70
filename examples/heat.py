"""Heat that spreads in a plate, by convolutions over a sharded height.

    python examples/heat.py                             # four ranks inside this process
    torchrun --nproc-per-node 4 examples/heat.py        # real processes, the same file

The plate is sharded along its height, unevenly. Each step needs the rows above and below: ranks receive one row of
either neighbour, and nothing else moves. The gradient of the final state runs back through all steps in the same way.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import debug

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None
HEIGHT, WIDTH, STEPS = 254, 64, 20


def spread(plate: Any, laplacian: Any, steps: int = STEPS) -> Any:
    """The plate after some steps, with cold edges."""
    for _ in range(steps):
        plate = plate + 0.2 * F.conv2d(plate, laplacian, padding=1)
    return plate


def rows_received(ranks: int) -> float:
    """Rows that a rank receives in one step."""
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        plate = sw.zeros(1, 1, HEIGHT, WIDTH, dtype=torch.float64, device_mesh=mesh, placements=[sw.Shard(2)])
        kernel = sw.zeros(1, 1, 3, 3, dtype=torch.float64, device_mesh=mesh, placements=[sw.Replicate()])
        spread(plate, kernel, steps=1)
    return run.bytes / (8 * WIDTH)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 4))
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64).view(1, 1, 3, 3)
    start = torch.zeros(1, 1, HEIGHT, WIDTH, dtype=torch.float64)
    start[..., HEIGHT // 4 : HEIGHT // 2, WIDTH // 4 : WIDTH // 2] = 1.0

    alone: Any = start.clone().requires_grad_()
    wanted = spread(alone, kernel)
    wanted.square().sum().backward()

    plate: Any = sw.distribute_tensor(start, mesh, [sw.Shard(2)]).requires_grad_()
    laplacian = sw.distribute_tensor(kernel, mesh, [sw.Replicate()])
    with debug.CommDebugMode() as forward:
        got = spread(plate, laplacian)
    got.square().sum().backward()

    value = (got.full_tensor() - wanted).abs().max() / wanted.abs().max()
    gradient = (plate.grad.full_tensor() - alone.grad).abs().max() / alone.grad.abs().max()
    say(f"the plate is {plate.spec}, after {STEPS} steps {got.spec}")
    say(
        f"a rank receives {rows_received(ranks):.0f} of {HEIGHT} rows a step, in {forward.get_total_counts()} exchanges"
    )
    say(f"agreement with one device: values {value.item():.0e}, gradients {gradient.item():.0e}")


if __name__ == "__main__":
    main()
