"""A captured training step under inductor beside the compiled plain step on the same locals.

The layers of `bench compile`: 16 parameters, replicated, the input sharded, on one rank of a fake world of 8; forward
and backward. Beside it torch.compile of the DTensors. Asked: at most 1.05 of the plain compiled step.

    python -m bench captured_inductor
"""

import time
from collections.abc import Callable

import torch
from torch import nn
from torch._inductor import config

import shardwise
from bench.compile import BATCH, LAYERS, WIDTH, WORLD, laid_out, plain, step_of
from bench.figures import figure
from bench.peers import peers, start
from bench.timing import compare


def captured_step(model: nn.Module, x: torch.Tensor, backend: str | None) -> Callable[[], object]:
    """One forward and backward, captured."""
    parameters = list(model.parameters())

    def step() -> object:
        result = model(x)
        result.backward(torch.ones_like(result))
        for parameter in parameters:
            parameter.grad = None
        return result

    return shardwise.captured(step, backend=backend)


def main() -> None:
    """Print the ratios."""
    start(WORLD)
    config.compile_threads = 1
    ours, _ = peers(WORLD)
    local = torch.randn(BATCH, WIDTH)
    x = ours.DTensor.from_local(local, ours.mesh, [ours.Shard(0)], run_check=False)
    steps: dict[str, Callable[[], object]] = {
        "plain, compiled": step_of(plain("plain"), local)[0],
        "DTensors, compiled": step_of(laid_out(ours), x)[0],
        "captured": captured_step(laid_out(ours), x, None),
        "captured, inductor": captured_step(laid_out(ours), x, "inductor"),
    }
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(4):
            step()
        print(f"the first four calls, {name}: {time.perf_counter() - begin:.1f} s")
    print(steps["captured, inductor"].source())  # pyright: ignore[reportFunctionMemberAccess]
    title = f"\nstep of {2 * LAYERS} parameters"
    timings = compare(steps, number=50, title=title, baseline="plain, compiled", clock=time.process_time)
    median = {name: timing.median for name, timing in timings.items()}
    ratio = median["captured, inductor"] / median["plain, compiled"]
    print(f"  {figure('a captured step under inductor, to a plain compiled one', ratio, 1.05)}")


if __name__ == "__main__":
    main()
