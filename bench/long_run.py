"""Twenty thousand training steps whose scalars, learning rate and sequence length change: memory, caches, time a step.

Asked: memory flat, caches within their bounds, the time of a step flat.
"""

import resource
import sys
import time

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.figures import figure

STEPS = 20_000
LENGTHS = (3, 4, 5, 7, 8, 11)


class Loop:
    """A small model on two virtual ranks, and one step of its training."""

    def __init__(self) -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        self.mesh = mesh
        self.up = sw.randn(8, 16, device_mesh=mesh, placements=[sw.Shard(1)], requires_grad=True)
        self.down = sw.randn(16, 8, device_mesh=mesh, placements=[sw.Shard(0)], requires_grad=True)
        self.optimizer = torch.optim.SGD([self.up, self.down], lr=0.1, momentum=0.9)

    def step(self, step: int) -> None:
        """Forward, backward, update; every number in it is another than the step before."""
        length = LENGTHS[step % len(LENGTHS)]
        x = sw.full((length, 8), 0.01 * step % 1, device_mesh=self.mesh, placements=[sw.Shard(0)], dtype=torch.float32)
        hidden = F.dropout(F.gelu(x @ self.up * (1 + 1e-4 * step)), 0.1)
        loss = (hidden @ self.down + 1.0 / (step + 1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        torch.nn.utils.clip_grad_norm_([self.up, self.down], 1.0 + 1e-3 * step)
        self.optimizer.step()


def resident() -> int:
    """Bytes of memory that the process has had at most."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def main() -> None:
    """Print a line for each tenth of the steps."""
    loop = Loop()
    tenth = STEPS // 10
    times: list[float] = []
    print(f"{'step':>8}{'us a step':>12}{'peak MiB':>10}{'entries':>9}{'routes':>8}{'misses':>8}")
    for begin in range(0, STEPS, tenth):
        start = time.perf_counter()
        for step in range(begin, begin + tenth):
            loop.step(step)
        each = (time.perf_counter() - start) / tenth * 1e6
        info = sw.cache_info()
        caches = f"{info.entries:>9}{info.routes:>8}{info.misses:>8}"
        print(f"{begin + tenth:>8}{each:>12.0f}{resident() / 2**20:>10.1f}{caches}", flush=True)
        times.append(each)
    name = f"a step, the last tenth of {STEPS:,} over the first"
    print(f"{name}: {figure(name, times[-1] / times[0], 1.1)}")


if __name__ == "__main__":
    main()
