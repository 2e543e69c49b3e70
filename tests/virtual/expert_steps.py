"""Steps of a mixture of experts with other sizes in each: what the library keeps of them.

python -m tests.virtual.expert_steps --steps 1000
"""

from __future__ import annotations

import argparse
import gc
import resource

import torch
from torch.nn import functional as F

import shardwise as sw

KINDS = (sw.DTensorSpec, sw.TensorMeta, sw.Ragged)


class Steps:
    """A layer of experts, and what is kept after some steps of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mesh = sw.init_device_mesh("cpu", (4,))
        self.x = sw.distribute_tensor(torch.randn(32, 4), self.mesh, [sw.Shard(0)])
        weights = sw.distribute_tensor(torch.randn(8, 4, 4), self.mesh, [sw.Shard(0)])
        self.weights = weights.requires_grad_()

    def run(self, count: int) -> None:
        """So many steps, forward and backward, each with other experts."""
        for _ in range(count):
            most = int(torch.randint(1, 8, ()))
            ids = sw.distribute_tensor(torch.randint(0, 8, (32, 2)).clamp_(max=most), self.mesh, [sw.Shard(0)])
            rows, back = sw.moe.dispatch(self.x, ids, 8)
            back(F.grouped_mm(rows, self.weights, offs=back.offs).relu()).sum().backward()
            self.weights.grad = None

    @staticmethod
    def kept() -> int:
        """How many specs, shapes and sizes there are."""
        gc.collect()
        return sum(type(one) in KINDS for one in gc.get_objects())


def main() -> None:
    """Print what is kept, and the memory of the process, ten times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = Steps()
    tenth = max(1, parser.parse_args().steps // 10)
    for done in range(10):
        steps.run(tenth)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{(done + 1) * tenth} steps: {steps.kept()} specs, shapes and sizes; {memory} MiB")


if __name__ == "__main__":
    main()
