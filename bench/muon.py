"""A step of `sw.optim.Muon` beside one of AdamW on the same shards: host and compute time of one rank of eight.

The matrices are those of 12 blocks of a transformer (attention and feed-forward), sharded over their rows. On torch's
fake process group, which sends nothing: what is measured is what one rank does on one core. Asked: at most 1.3.
Newton-Schulz takes a number of operations that grows with the cube of the width, AdamW with its square. So the ratio
depends on the width and on the device: measured here for small widths, and modelled for a GPU and for this core, whose
rates are measured. The model has no host's part, and is what no implementation goes below: AdamW moves 28 bytes of an
element, Newton-Schulz of `torch.optim.Muon` takes 23 operations of it for each unit of the width. On a GPU the part of
one rank of eight is measured too, on plain tensors, by the time of its kernels: no host, no exchange, no library.
"""

import itertools
import math
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise as sw
from bench.figures import figure
from bench.peers import start
from bench.timing import compare
from shardwise.optim.matrix_owners import matrix_owners
from shardwise.optim.muon import newton_schulz, newton_schulz_cost

RANKS, BLOCKS, WIDTHS = 8, 12, (16, 64, 128, 256)
TOKENS = 8192  # of each rank in a step, beside which the optimizer's part is shown


class Device(NamedTuple):
    """Operations of products in bfloat16 and bytes of memory and of links, each in a second."""

    name: str
    flops: float
    bandwidth: float
    link: float


# data sheet: seven tenths of the peak for products of bfloat16, nine tenths of the bandwidth, a direction of NVLink
H200 = Device("eight H200", 0.7 * 989e12, 0.9 * 4.8e12, 0.8 * 450e9)


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


def this_core() -> Device:
    """The rates of this core, measured: a product of 512 by 512 matrices in bfloat16, and a sum of large tensors."""
    a, b = torch.randn(512, 512, dtype=torch.bfloat16), torch.randn(8 * 2**20)
    product = min(timeit.repeat(lambda: a @ a, number=3, repeat=5, timer=time.process_time)) / 3
    stream = min(timeit.repeat(lambda: b.add_(1.0), number=3, repeat=5, timer=time.process_time)) / 3
    return Device("eight cores as this one", 2 * 512**3 / product, 2 * b.nbytes / stream, 10e9)


def busiest(width: int) -> float:
    """The work of the rank that has the most, to the mean."""
    costs = [newton_schulz_cost(torch.Size(shape)) for shape in shapes(width)]
    owners = matrix_owners(costs, RANKS)
    load = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(RANKS)]
    return max(load) * RANKS / sum(load)


def modelled(device: Device, width: int) -> str:
    """The ratio without the host's part, with exchanges in front and hidden, and the part of a training step."""
    elements = sum(map(math.prod, shapes(width))) / RANKS
    adamw = elements * 7 * 4 / device.bandwidth  # parameter, gradient and two moments are read, three of them written
    moved = elements * (6 * 4 + 4 * 2) / device.bandwidth  # gradient, momentum, parameter; updates in bfloat16
    computed = busiest(width) * orthogonalizing(width) / RANKS / device.flops
    sent = 2 * elements * 2 * (RANKS - 1) / RANKS / device.link
    training = 6 * elements * RANKS * TOKENS / device.flops
    return (
        f"modelled on {device.name}, width {width}: {(moved + computed + sent) / adamw:.2f}, with hidden exchanges "
        f"{(moved + computed) / adamw:.2f}; {computed / (moved + computed + sent):.0%} of it Newton-Schulz; "
        f"{(moved + computed + sent) / training:.1%} of a step of {TOKENS} tokens on each rank"
    )


def owned_shapes(width: int) -> list[tuple[int, int]]:
    """The matrices of the rank that has the most to do."""
    each = shapes(width)
    costs = [newton_schulz_cost(torch.Size(shape)) for shape in each]
    owners = matrix_owners(costs, RANKS)
    load = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(RANKS)]
    return [shape for shape, owner in zip(each, owners, strict=True) if owner == load.index(max(load))]


def kernels(step: Callable[[], object]) -> float:
    """Milliseconds that the GPU takes for a step, as a graph: the host has no part in it."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(11):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def on_gpu(width: int) -> str:
    """The kernels of one rank's part of a step: AdamW, and Muon's momentum, Newton-Schulz and update."""
    parts = [(rows // RANKS, columns) for rows, columns in shapes(width)]
    values, gradients, momenta = ([torch.randn(part, device="cuda") for part in parts] for _ in range(3))
    updates = [torch.randn(part, device="cuda", dtype=torch.bfloat16) for part in parts]
    stacks = [
        torch.randn(len(list(alike)), *shape, device="cuda", dtype=torch.bfloat16)
        for shape, alike in itertools.groupby(sorted(owned_shapes(width)))
    ]
    leaves = [nn.Parameter(value) for value in values]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    fused = torch.optim.AdamW(leaves, fused=True, capturable=True)

    @torch.no_grad()
    def momentum() -> None:
        torch._foreach_lerp_(momenta, gradients, 0.05)
        nesterov = torch._foreach_lerp(gradients, momenta, 0.95)
        torch._foreach_copy_(updates, nesterov)
        torch._foreach_mul_(values, 0.999)
        torch._foreach_add_(values, updates, alpha=-0.01)

    @torch.no_grad()
    def orthogonalize() -> None:
        for stack in stacks:
            newton_schulz(stack, (3.4445, -4.775, 2.0315), 5, 1e-7)

    adamw, moved, computed = kernels(fused.step), kernels(momentum), kernels(orthogonalize)
    rate = busiest(width) * orthogonalizing(width) / RANKS / computed / 1e9
    return (
        f"kernels of one rank of {RANKS}, width {width}: AdamW (fused) {adamw:.3f} ms; Muon's momentum and update "
        f"{moved:.3f} ms, Newton-Schulz {computed:.3f} ms ({rate:.0f} TFLOP/s); {(moved + computed) / adamw:.2f}, "
        f"Newton-Schulz alone {computed / adamw:.2f}"
    )


def main() -> None:
    """Print both times for each width."""
    if torch.cuda.is_available():
        for width in (64, 256, 768, 2048, 4096):
            print(f"  {on_gpu(width)}")
    start(RANKS)
    mesh = sw.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
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
            print(f"  {figure('a step of Muon, to AdamW: host', ratio, 1.3)}")
        else:
            print(f"  {figure(f'a step of Muon, to AdamW: host and compute at width {width}', ratio, 1.3)}")
    for device, widths in ((this_core(), WIDTHS), (H200, (256, 768, 2048, 4096))):
        for width in widths:
            print(f"  {modelled(device, width)}")


if __name__ == "__main__":
    main()
