"""Compiled training steps on a fake world: beside the plain local step and torch's DTensor, in one run.

Asked: a compiled step of 16 parameters at most 1.2 of the compiled plain one on the same locals, and at most 1.0 of
torch's DTensor; guards at most 0.6 us a parameter; compile time at most 1.1 of torch's. `BENCH_BACKEND` chooses the
backend, inductor by default. Beside them stands a subclass of torch.Tensor that only wraps: what any such class costs.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # pyright: ignore[reportPrivateImportUsage]
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from bench.figures import figure
from bench.peers import Peer, peers, start
from bench.timing import compare

BACKEND = os.environ.get("BENCH_BACKEND", "inductor")
LAYERS, WIDTH, BATCH, WORLD = 8, 64, 16, 8


class Layers(nn.Module):
    """Linear layers: two parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def plain(name: str) -> nn.Module:
    """The layers, with a forward of their own: what is compiled is kept by the code of a function."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_{name}")
    return type(name, (Layers,), {"forward": forward})()


def laid_out(peer: Peer) -> nn.Module:
    """Every parameter a DTensor, replicated as in data parallel training: locals as large as the plain ones."""
    model: Any = plain(peer.name)
    for layer in model.layers:
        for name, parameter in list(layer.named_parameters()):
            whole = peer.DTensor.from_local(parameter.detach(), peer.mesh, [peer.Replicate()], run_check=False)
            layer.register_parameter(name, nn.Parameter(whole))
    return model


class Bare(torch.Tensor):
    """A tensor around another one that knows nothing: no layout, no look-up, no check."""

    __slots__ = ("_local_tensor",)
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, local.shape, local.stride(), dtype=local.dtype)
        made._local_tensor = local
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_local_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, outer_size: Any, outer_stride: Any) -> Any:
        return Bare(inner["_local_tensor"])

    def _stable_hash_for_caching(self) -> str:
        return "bare"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*[a._local_tensor if a.__class__ is Bare else a for a in args], **(kwargs or {}))
        return Bare(result) if isinstance(result, torch.Tensor) else result


def wrapped() -> nn.Module:
    """Every parameter in a tensor that only wraps."""
    model: Any = plain("wrapped")
    for layer in model.layers:
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(Bare(parameter.detach())))
    return model


def step_of(model: nn.Module, x: torch.Tensor) -> tuple[Callable[[], object], Any]:
    """One forward and backward, compiled; and the compiled module."""
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    parameters = list(model.parameters())

    def step() -> object:
        result = compiled(x)
        result.backward(torch.ones_like(result))
        for parameter in parameters:
            parameter.grad = None
        return result

    return step, compiled


def first_call(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> float:
    """Seconds until the first step is done, without any cache on disk."""
    torch._dynamo.reset()
    step, _ = step_of(*make())
    begin = time.perf_counter()
    with fresh_cache():
        step()
    return time.perf_counter() - begin


def guards_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """The check of the guards of a compiled forward."""
    code = type(model).forward.__code__
    entries = _debug_get_cache_entry_list(code)
    manager = entries[0].guard_manager
    scope = {"self": model, "x": x}
    assert manager.check(scope)
    return lambda: manager.check(scope)


def main() -> None:
    """Print the ratios."""
    start(WORLD)
    config.compile_threads = 1
    ours, theirs = peers(WORLD)
    makers: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
        "plain": lambda: (plain("plain"), torch.randn(BATCH, WIDTH)),
        "shardwise": lambda: (laid_out(ours), ours.local([ours.Shard(0)], BATCH, WIDTH)),
        "bare subclass": lambda: (wrapped(), Bare(torch.randn(BATCH, WIDTH))),
        "torch": lambda: (laid_out(theirs), theirs.local([theirs.Shard(0)], BATCH, WIDTH)),
    }
    for make in makers.values():  # what is imported and built once
        first_call(make)
    seconds = {name: min(first_call(make) for _ in range(2)) for name, make in makers.items()}
    print("compile time: " + ", ".join(f"{name} {found:.2f} s" for name, found in seconds.items()))
    print(f"  {figure('compile time, to torch', seconds['shardwise'] / seconds['torch'], 1.1)}\n")
    steps: dict[str, Callable[[], object]] = {}
    checks: dict[str, Callable[[], object]] = {}
    torch._dynamo.reset()
    for name, make in makers.items():
        model, x = make()
        steps[name], _ = step_of(model, x)
        steps[name]()
        checks[name] = guards_of(model, x)
        steps[name]()
    timings = compare(steps, number=100, title=f"\nstep of {2 * LAYERS} parameters, {BACKEND}")
    median = {name: timing.median for name, timing in timings.items()}
    for peer, asked in (("plain", 1.2), ("bare subclass", 1.0), ("torch", 1.0)):
        print(f"  {figure(f'a compiled step, to {peer}', median['shardwise'] / median[peer], asked)}")
    guards = {name: timing.median for name, timing in compare(checks, title="\nguards of the forward").items()}
    more = (guards["shardwise"] - guards["plain"]) / (2 * LAYERS)
    print(f"  {figure('guards of a parameter beyond a plain one', more, 0.6, ' us')}")


if __name__ == "__main__":
    main()
