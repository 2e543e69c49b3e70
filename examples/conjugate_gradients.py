"""Conjugate gradients on a matrix that is larger than one device may hold.

    python examples/conjugate_gradients.py                             # four ranks inside this process
    torchrun --nproc-per-node 4 examples/conjugate_gradients.py        # real processes, the same file

No device ever has the whole matrix: it is made in shards, and used in shards. A dry run of the same function says
beforehand what a device would hold, also for a matrix of a size that fits no machine at hand.
"""

import os

import torch

import shardwise as sw
from shardwise.text import human_bytes

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None
LIMIT = 4 * 2**20  # bytes that a device may hold


def make_system(n: int, mesh: sw.DeviceMesh) -> tuple[sw.DTensor, sw.DTensor]:
    """A symmetric positive definite matrix, by rows, and a right-hand side."""
    numbers = torch.arange(n, dtype=torch.float64)
    rows = sw.distribute_tensor(numbers, mesh, [sw.Shard(0)])
    columns = sw.distribute_tensor(numbers, mesh, [sw.Replicate()])
    matrix = rows.unsqueeze(1).sub(columns).abs_().add_(1).reciprocal_()  # 1 / (1 + |i - j|)
    return matrix, rows.sin()


def solve(matrix: sw.DTensor, right: sw.DTensor, steps: int) -> tuple[sw.DTensor, sw.DTensor]:
    """The solution and the squared length of what is left, after some steps of conjugate gradients."""
    x, left, direction = torch.zeros_like(right), right, right
    length = left.dot(left)
    for _ in range(steps):
        image = matrix @ direction
        step = length / direction.dot(image)
        x, left = x + step * direction, left - step * image
        before, length = length, left.dot(left)
        direction = left + (length / before) * direction
    return x, length


def held(n: int, ranks: int) -> sw.DryRun:
    """What a device would hold and move for ten steps."""
    with sw.dry_run() as run:
        solve(*make_system(n, sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))), steps=10)
    return run


def main() -> None:
    n, ranks = 1024, int(os.environ.get("WORLD_SIZE", 4))
    mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    peak = held(n, ranks).peak_bytes
    say(f"the matrix has {human_bytes(8 * n * n)}, a device may hold {human_bytes(LIMIT)}")
    say(f"on {mesh} a device holds {human_bytes(peak)} at the peak: {'it fits' if peak <= LIMIT else 'too much'}")

    matrix, right = make_system(n, mesh)
    for steps in (5, 10, 15, 20):
        x, _ = solve(matrix, right, steps)
        error = (matrix @ x - right).norm() / right.norm()
        say(f"after {steps:2} steps what is left is {error.item():.1e} of the right-hand side")

    large = held(2**18, 1024)
    say(f"with {2**18:,} unknowns the matrix would have {human_bytes(8 * 2**36)}; each of 1,024 devices would hold")
    say(f"{human_bytes(large.peak_bytes)} and receive {human_bytes(large.bytes)} in ten steps")


if __name__ == "__main__":
    main()
