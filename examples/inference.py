"""Inference with a cache of keys and values: the text grows, the shapes do not, and nothing is decided twice.

    python examples/inference.py                             # four ranks inside this process
    torchrun --nproc-per-node 4 examples/inference.py        # real processes, the same file

Heads are split over devices, and so is the cache. How an operator is run is decided once for each layout and shape and
kept; a text that grows by one character must not make new decisions for ever.
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None
WIDTH, HEADS, LONGEST, CHARACTERS = 64, 8, 96, 256


class Decoder(nn.Module):
    """One layer of attention that reads one character at a time, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, character: Tensor, place: Tensor, keys: Tensor, values: Tensor, numbers: Tensor) -> Tensor:
        x = self.characters(character) + self.places(place)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        keys.index_copy_(1, place, k.transpose(0, 1))  # heads, places, features
        values.index_copy_(1, place, v.transpose(0, 1))
        seen = (numbers <= place).unsqueeze(0)
        read = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
        return self.head(self.out(read.transpose(0, 1).flatten(1)))


def write(model: nn.Module, mesh: sw.DeviceMesh | None, count: int) -> list[int]:
    """The characters that the model finds likeliest, one after the other."""

    def place(tensor: Tensor, placement: sw.Placement = sw.Replicate()) -> Tensor:  # noqa: B008
        return tensor if mesh is None else sw.distribute_tensor(tensor, mesh, [placement])

    keys, values = (place(torch.zeros(HEADS, LONGEST, WIDTH // HEADS), sw.Shard(0)) for _ in range(2))
    numbers, character, written = place(torch.arange(LONGEST)), torch.tensor([ord("S")]), []
    for number in range(count):
        logits = model(place(character), place(torch.tensor([number])), keys, values, numbers)
        character = (logits if mesh is None else logits.full_tensor()).argmax(-1)
        written.append(character.item())
        if mesh is not None and number in (0, 1, 19, 79):
            known = sw.cache_info()
            say(f"{number + 1:2} characters: {known.entries} signatures known, {known.misses} worked out")
    return written


@torch.no_grad()
def main() -> None:
    mesh = sw.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", 4)),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = Decoder()
    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    plan = {"query": columns, "key": columns, "value": columns, "out": rows}
    spread = parallelize_module(copy.deepcopy(alone), mesh, plan)
    sw.distribute_module(spread, mesh)  # what the plan does not name, on every rank

    together = write(spread, mesh, 80)
    say(f"as on one device: {together == write(alone, None, 80)}")


if __name__ == "__main__":
    main()
