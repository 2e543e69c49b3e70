"""A step of `sw.optim.Muon` beside one of AdamW on the same shards: host and compute time of one rank of eight.

The matrices are those of 12 blocks of a transformer (attention and feed-forward), sharded over their rows. On torch's
fake process group, which sends nothing: what is measured is what one rank does on one core. Asked: at most 1.3.
Newton-Schulz takes a number of operations that grows with the cube of the width, AdamW with its square. So the ratio
depends on the width and on the device: measured here for small widths, and modelled for an H100 at the end.
"""

import math
import time
from typing import Any

import torch
from torch import nn

import shardwise as sw
from bench.figures import figure
from bench.peers import start
from bench.timing import compare

RANKS, BLOCKS, WIDTHS = 8, 12, (16, 64, 128, 256)
# An H100 (data sheet, half of the peak for products of bfloat16; nine tenths of the bandwidth) and the host's part
FLOPS, BANDWIDTH = 0.5 * 989e12, 0.9 * 3.35e12


def shapes(width: int) -> list[tuple[int, int]]:
    """The matrices of all blocks."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * BLOCKS


def parameters(width: int, mesh: sw.DeviceMesh) -> list[nn.Parameter]:
    """Sharded matrices with gradients."""
    made: list[nn.Parameter] = []
    for shape in shapes(width):
        parameter = nn.Parameter(sw.distribute_tensor(torch.randn(shape), mesh, [sw.Shard(0)]))
        parameter.grad = torch.full_like(parameter, 0.1)
        made.append(parameter)
    return made


def orthogonalizing(width: int) -> float:
    """Floating point operations of Newton-Schulz of all matrices: five steps of three products."""
    found = 0.0
    for rows, columns in shapes(width):
        short, long = sorted((rows, columns))
        found += 5 * (4 * short**2 * long + 2 * short**3)
    return found


def modelled(width: int, host: float) -> float:
    """The ratio on eight H100s, of whose steps the host's part takes so many times AdamW's, which hides nothing."""
    elements = sum(map(math.prod, shapes(width))) / RANKS
    adamw = elements * 7 * 4 / BANDWIDTH  # parameter, gradient and two moments are read, three of them written
    muon = elements * (6 * 4 + 4 * 2) / BANDWIDTH + orthogonalizing(width) / RANKS / FLOPS
    launch = 100e-6  # of the foreach kernels of AdamW, on the host
    return (muon + host * launch) / (adamw + launch)


def main() -> None:
    """Print both times for each width."""
    start(RANKS)
    mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    host = 0.0
    for width in WIDTHS:
        optimizers: dict[str, Any] = {
            "Muon": sw.optim.Muon(parameters(width, mesh), lr=0.01),
            "AdamW": torch.optim.AdamW(parameters(width, mesh), foreach=True),
        }
        timings = compare(
            {name: optimizer.step for name, optimizer in optimizers.items()},
            number=5,
            repeat=7,
            clock=time.process_time,
            title=f"12 blocks of width {width}, one rank of {RANKS}",
        )
        ratio = timings["Muon"].median / timings["AdamW"].median
        if width == WIDTHS[0]:
            host = ratio
            print(f"  {figure('a step of Muon, to AdamW: host', ratio, 1.3)}")
        else:
            print(f"  {figure(f'a step of Muon, to AdamW: host and compute at width {width}', ratio, 1.3)}")
    for width in (768, 2048, 4096):
        print(f"  modelled on eight H100s, width {width}: {modelled(width, host):.2f}, without communication")


if __name__ == "__main__":
    main()
