"""How long `async_save` stops training, beside plain copies of the locals: one process, 1 GiB, rounds interleaved.

The copy is `copy_` into memory that exists; `clone` also asks the system for new memory. The first save allocates
its buffer and is not counted; later ones use it again.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from bench.figures import figure

ROUNDS = 7
ROWS, COLUMNS, TENSORS = 2048, 2048, 64
RANKS = (1, 4)  # virtual: a process of a job has one local of each tensor, as with 1


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - wall, time.thread_time() - cpu


def _parts(tensor: sw.DTensor) -> list[torch.Tensor]:
    local: Any = tensor.to_local()
    return list(local.tensors)


def main() -> None:
    """Run the measurement in a folder of the current directory: /tmp may be memory."""
    torch.set_num_threads(1)
    for ranks in RANKS:
        measure(ranks)


def measure(ranks: int) -> None:
    """Measure with this number of virtual ranks."""
    mesh = sw.init_device_mesh("cpu", (ranks,))
    state = {
        f"layer{i}.weight": sw.distribute_tensor(torch.rand(ROWS, COLUMNS), mesh, [sw.Shard(i % 2)])
        for i in range(TENSORS)
    }
    parts: list[torch.Tensor] = [part for t in state.values() for part in _parts(t)]
    room = [torch.empty_like(part).copy_(part) for part in parts]
    found: dict[str, list[tuple[float, float]]] = {"async_save": [], "copy": [], "clone": []}
    print(f"{sum(part.nbytes for part in parts) / 2**30:.2f} GiB in {TENSORS} tensors of {ranks} virtual ranks")
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-async-") as folder:
        for number in range(ROUNDS + 1):
            path, saving = Path(folder) / f"step-{number}", list[sw.checkpoint.Saving]()
            times = {
                "copy": timed(lambda: [place.copy_(part) for place, part in zip(room, parts, strict=True)]),
                "async_save": timed(
                    lambda saving=saving, path=path: saving.append(sw.checkpoint.async_save(state, path))
                ),
            }
            saving[0].wait()
            shutil.rmtree(path)
            times["clone"] = timed(lambda: [part.clone() for part in parts])
            if number:
                for name, one in times.items():
                    found[name].append(one)
    wall = {name: statistics.median(one for one, _ in times) for name, times in found.items()}
    cpu = {name: statistics.median(one for _, one in times) for name, times in found.items()}
    for name in found:
        print(f"  {name:12} wall {wall[name] * 1e3:7.1f} ms  CPU {cpu[name] * 1e3:7.1f} ms")
    what = f"checkpoint, async_save of {len(parts)} locals stops for, to a copy of them"
    print(figure(f"{what} (CPU time)", cpu["async_save"] / cpu["copy"], 1.1))
    print(figure(what, wall["async_save"] / wall["copy"], 1.1))


if __name__ == "__main__":
    main()
