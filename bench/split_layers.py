"""A block of a transformer whose weights are split by hand, by columns and rows: collectives and bytes, beside torch's.

No plan and no hooks: DTensors go in, and the library decides what moves. Counted on torch's fake process group, forward
and backward of one rank.
"""

from typing import Any

import torch
import torch.nn.functional as F

from bench.counting import Calls, Moved, fake_world
from bench.figures import figure
from bench.peers import Peer, peers

BATCH, LENGTH, WIDTH, HEADS = 8, 256, 512, 8
MESHES = ((8,), (2, 4), (2, 2))


def block(peer: Peer, axes: tuple[int, ...]) -> Moved:
    """What forward and backward of the block communicate."""
    *data, ranks = axes
    replicas = [peer.Replicate()] * len(data)

    def made(*size: int, split: int | None = None) -> Any:
        local = [n // ranks if dim == split else n for dim, n in enumerate(size)]
        last = peer.Replicate() if split is None else peer.Shard(split)
        return peer.local([*replicas, last], *local).requires_grad_()

    shares = BATCH // (data[0] if data else 1)
    x: Any = peer.local([*[peer.Shard(0)] * len(data), peer.Replicate()], shares, LENGTH, WIDTH)
    scale = made(WIDTH)
    queries, keys, values = (made(WIDTH, WIDTH, split=0) for _ in range(3))
    out, up, down = made(WIDTH, WIDTH, split=1), made(4 * WIDTH, WIDTH, split=0), made(WIDTH, 4 * WIDTH, split=1)
    with Calls() as calls:
        normed = F.layer_norm(x, (WIDTH,), scale)
        q, k, v = (F.linear(normed, w).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for w in (queries, keys, values))
        mixed = (torch.softmax(q @ k.transpose(2, 3), -1) @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        x = x + F.linear(mixed, out)
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,), scale), up)), down)
        x.pow(2).mean().backward()
    return calls.moved


def main() -> None:
    """Print what each library moves on each mesh."""
    print(f"{BATCH} x {LENGTH} x {WIDTH}, forward and backward: collectives, MB received by a rank")
    for axes in MESHES:
        with fake_world(8 if len(axes) == 1 or axes[-1] == 4 else 4):
            ours, theirs = (block(peer, axes) for peer in peers(*axes))
        name = "x".join(map(str, axes))
        for side, moved in (("shardwise", ours), ("torch", theirs)):
            print(f"  {name:>4} {side:10} {moved.collectives:4.0f}  {moved.received / 1e6:8.2f}")
        print(f"  {figure(f'layers split by hand on {name}, bytes to torch', ours.received / theirs.received, 1.0)}")


if __name__ == "__main__":
    main()
