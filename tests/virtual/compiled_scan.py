"""`associative_scan` along a sharded dim, compiled against one device.

    python -m tests.virtual.compiled_scan

A program of its own, because torch's compiler does not trace the run-time type checks of the tests.
"""

from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan

import shardwise as sw


def linear(left: Any, right: Any) -> Any:
    """The recurrence `h = a * h + b`."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def step(a: Any, b: Any) -> Any:
    return associative_scan(linear, (a, b), 0, combine_mode="generic")[1] + 1


def gradients(function: Any, xs: list[Any]) -> list[Any]:
    given = [x.detach().requires_grad_() for x in xs]
    out = function(*given)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def main() -> None:
    """Compare values and gradients of uneven blocks."""
    mesh = sw.init_device_mesh("cpu", (4,))
    plain = [torch.rand(7, 3, dtype=torch.float64) for _ in range(2)]
    xs = [sw.distribute_tensor(x, mesh, [sw.Shard(0)]) for x in plain]
    got = gradients(torch.compile(step, backend="aot_eager", fullgraph=True), xs)
    for mine, theirs in zip(got, gradients(step, plain), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    main()
