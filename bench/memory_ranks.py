"""Peak memory of a rank in a training step of an 8B llama, by dry runs on 8 to 4,096 ranks.

In bfloat16 with AdamW, 4,096 tokens on each rank of the data axis: replicated parameters, fully sharded ones, and both
fully sharded and tensor parallel. More ranks must not need more memory.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.dry_prediction import Llama, Sizes, both
from bench.figures import point

SIZES = Sizes(blocks=32, width=4096, heads=32, kv_heads=8, ffn=14_336, vocabulary=128_256)
RANKS, TOKENS = (8, 64, 512, 4096), 4096


def replicated(model: Llama, mesh: sw.DeviceMesh) -> None:
    sw.replicate(model, mesh["dp"])


def sharded(model: Llama, mesh: sw.DeviceMesh) -> None:
    for block in model.blocks:
        sw.fully_shard(block, mesh["dp"])
    sw.fully_shard(model, mesh["dp"])


WAYS: dict[str, tuple[int, Callable[[Llama, sw.DeviceMesh], object]]] = {  # ranks of tp, and the calls
    "replicate": (1, replicated),
    "fully_shard": (1, sharded),
    "fully_shard x tp=8": (8, both),
}


def peak(ranks: int, tp: int, prepare: Callable[[Llama, sw.DeviceMesh], object]) -> int:
    """Bytes at the peak of the second step, where the states of AdamW are there."""
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Llama(SIZES).to(torch.bfloat16)
        prepare(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        for _ in range(2):
            F.cross_entropy(model(tokens).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.peak_bytes


def main() -> None:
    for name, (tp, prepare) in WAYS.items():
        for ranks in RANKS:
            found = peak(ranks, tp, prepare) / 2**30
            point("memory_ranks", name, ranks, found)
            print(f"  {name:20} {ranks:6,} ranks: {found:7.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
