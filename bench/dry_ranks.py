"""Dry runs of one training step of a 70B llama, tensor parallel within 8 ranks and fully sharded over the rest.

The processor's time on 128 and on 16,384 ranks, in turn: it must not depend on the number of ranks.
"""

import statistics
import time

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.dry_prediction import Llama, Sizes, both
from bench.figures import figure

SIZES = Sizes(blocks=80, width=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=128_256)
MESHES = ((16, 8), (2048, 8))
ROUNDS, TOKENS, LIMIT = 3, 4096, 1.3


def step(shape: tuple[int, int], sizes: Sizes = SIZES) -> tuple[float, int]:
    """Seconds that making the model and one step take, and the peak that is predicted."""
    begin = time.process_time()
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Llama(sizes).to(torch.bfloat16)
        both(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        loss = F.cross_entropy(model(tokens).float(), torch.zeros(TOKENS, dtype=torch.long, device="meta"))
        loss.backward()
        optimizer.step()
    return time.process_time() - begin, run.peak_bytes


def main() -> None:
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in MESHES}
    for _ in range(ROUNDS):
        for shape in MESHES:
            taken, peak = step(shape)
            seconds[shape].append(taken)
            print(f"  {shape[0]:5} x {shape[1]}: {taken:6.2f} s, peak {peak / 2**30:6.2f} GiB")
    few, many = (statistics.median(seconds[shape]) for shape in MESHES)
    print(figure("a dry run of a 70B model, 2,048 x 8 ranks to 16 x 8", many / few, LIMIT))


if __name__ == "__main__":
    main()
