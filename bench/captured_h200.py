"""Thousand tokens/s of training steps of a 1B llama on one GPU and one NCCL rank: plain, torch's FSDP2, ours, captured.

16 blocks, width 2,048, 32 heads with 8 key heads, bfloat16, 2 x 4,096 tokens, fused AdamW. Wanted: a captured step at
least as fast as the plain eager one, and under inductor 0.99 of the plain compiled one; for fully_shard, tensor
parallelism, and both.

    python -m bench.captured_h200                       # all sides, most important first, within --seconds
    python -m bench.captured_h200 --only plain fsdp     # the sides with these words
    python -m bench.captured_h200 --device cpu --blocks 2 --width 64 --length 32 --vocabulary 128   # that it runs
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise as sw
from bench.dry_prediction import Llama, Sizes, both, fully_sharded, tensor_parallel

WARM, TIMED = 5, 8
OPTIONS: dict[str, Any] = {}  # more of those of `captured`


class Setting(NamedTuple):
    """Sizes, and where it runs."""

    device: str
    sizes: Sizes
    batch: int
    length: int


def plain(model: Any, setting: Setting) -> None:
    """One device."""


def torch_fsdp(model: Any, setting: Setting) -> None:
    for block in model.blocks:
        torch_fully_shard(block)
    torch_fully_shard(model)


def on_mesh(wrap: Callable[[Any, Any], None], *axes: str) -> Callable[[Any, Setting], None]:
    def wrapped(model: Any, setting: Setting) -> None:
        wrap(model, sw.init_device_mesh(setting.device, (1,) * len(axes), mesh_dim_names=axes))

    return wrapped


WRAPS: dict[str, Callable[[Any, Setting], None]] = {
    "plain": plain,
    "torch fsdp": torch_fsdp,
    "fsdp": on_mesh(fully_sharded, "dp"),
    "tp": on_mesh(tensor_parallel, "tp"),
    "tp x fsdp": on_mesh(both, "dp", "tp"),
}
# In the order of importance: what is left when the time is over is not measured.
SIDES = [
    ("plain", "eager"), ("fsdp", "eager"), ("fsdp", "captured"), ("tp", "captured"), ("tp x fsdp", "captured"),
    ("torch fsdp", "eager"), ("tp", "eager"), ("tp x fsdp", "eager"), ("plain", "captured"),
    ("plain", "compiled"), ("fsdp", "captured, inductor"), ("tp", "captured, inductor"),
    ("tp x fsdp", "captured, inductor"), ("plain", "captured, cudagraphs"), ("fsdp", "captured, cudagraphs"),
    ("tp", "captured, cudagraphs"), ("tp x fsdp", "captured, cudagraphs"), ("fsdp", "compiled"),
    ("torch fsdp", "compiled"),
]  # fmt: skip


def step_of(kind: str, how: str, setting: Setting) -> Callable[[], Any]:
    """A training step, ready to be called."""
    torch.manual_seed(0)
    device = torch.device(setting.device)
    with device:
        model = Llama(setting.sizes).to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    WRAPS[kind](model, setting)
    if how == "compiled" and kind == "plain":
        model.compile()
    elif how == "compiled":
        for block in model.blocks:  # as one does with fully_shard
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = (setting.batch, setting.length)
    tokens = torch.randint(setting.sizes.vocabulary, size, device=device)
    target = torch.randint(setting.sizes.vocabulary, (setting.batch * setting.length,), device=device)

    def step() -> Any:
        loss = F.cross_entropy(model(tokens).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if how.startswith("captured"):
        backend = how.partition(", ")[2] or None
        return sw.captured(step, backend=backend, verify=backend is None, **OPTIONS)
    return step


def measure(kind: str, how: str, setting: Setting) -> tuple[float, float, float, str]:
    """Median seconds of a step, seconds of the first calls, GiB at the peak, the losses of the timed steps."""
    cuda = setting.device == "cuda"
    step = step_of(kind, how, setting)

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    begin = time.perf_counter()
    for _ in range(WARM):
        step()
    synchronize()
    warm = time.perf_counter() - begin
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    losses: list[Any] = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        losses.append(step())
        synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    last: Any = losses[-1]
    last = last.full_tensor() if hasattr(last, "full_tensor") else last
    return statistics.median(times), warm, peak, f"{float(last):.4f}"


def main(arguments: list[str] | None = None) -> None:
    """Print thousand tokens/s of each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=220.0, help="no side is begun later than this")
    parser.add_argument("--only", nargs="*", default=[], help="kinds (plain, 'torch fsdp', fsdp, tp, 'tp x fsdp')")
    parser.add_argument("--how", nargs="*", default=[], help="words of eager, compiled, captured, inductor, cudagraphs")
    options = parser.parse_args([] if arguments is None else arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    begin = time.perf_counter()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", rank=0, world_size=1)
    sizes = Sizes(options.blocks, options.width, 32, 8, 4 * options.width, options.vocabulary)
    setting = Setting(options.device, sizes, options.batch, options.length)
    tokens = options.batch * options.length / 1e3
    found: dict[tuple[str, str], float] = {}
    print(f"torch {torch.__version__}, thousand tokens/s, median of {TIMED} steps")
    try:
        for kind, how in SIDES:
            if (options.only and kind not in options.only) or (
                options.how and not any(word in how.split(", ") for word in options.how)
            ):
                continue
            if time.perf_counter() - begin > options.seconds:
                print(f"  {kind:12}{how:24}not begun: {options.seconds:.0f} s are over", flush=True)
                continue
            try:
                seconds, warm, peak, loss = measure(kind, how, setting)
            except Exception as error:
                print(f"  {kind:12}{how:24}failed: {type(error).__name__}: {str(error)[:1500]}", flush=True)
                continue
            finally:
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
            found[kind, how] = tokens / seconds
            base = found.get(("plain", "compiled" if how.endswith(("inductor", "compiled")) else "eager"))
            ratio = f"{found[kind, how] / base:6.3f} of plain" if base else " " * 15
            print(
                f"  {kind:12}{how:24}{found[kind, how]:8.1f}{ratio}  {1e3 * seconds:8.1f} ms, first {WARM} calls "
                f"{warm:.1f} s, peak {peak:.1f} GiB, last loss {loss}",
                flush=True,
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
