"""Warm dispatch: the time of an operator whose signature is known. Asked: at most torch's, `x + 1.0` at most 0.6."""

import torch

from bench.figures import figure
from bench.peers import Peer, peers, start
from bench.timing import compare

OPERATORS = {
    "add": (lambda a, b, c: a + b, 1.0),
    "x + 1.0": (lambda a, b, c: a + 1.0, 0.6),
    "mm": (lambda a, b, c: a @ c, 1.0),
    "view": (lambda a, b, c: c.view(2, 2, 4), 1.0),
    "t": (lambda a, b, c: a.t(), 1.0),
    "detach": (lambda a, b, c: a.detach(), 1.0),
    "add_": (lambda a, b, c: a.add_(b), 1.0),
    "softmax": (lambda a, b, c: a.softmax(-1), 1.0),
}


def tensors(peer: Peer) -> tuple[torch.Tensor, ...]:
    """Two sharded tensors and a replicated one."""
    sharded, whole = [peer.Shard(0)], [peer.Replicate()]
    return peer.local(sharded, 4, 4), peer.local(sharded, 4, 4), peer.local(whole, 4, 4)


def main() -> None:
    """Print each operator's time on both libraries."""
    start(8)
    sides = {peer.name: tensors(peer) for peer in peers(8)}
    with torch.no_grad():
        for name, (run, asked) in OPERATORS.items():
            thunks = {side: (lambda given=given, run=run: run(*given)) for side, given in sides.items()}
            timings = compare(thunks, title=f"{name}: asked at most {asked}")
            ratio = timings["shardwise"].median / timings["torch"].median
            print(f"  {figure(f'warm `{name}`, to torch', ratio, asked)}\n")


if __name__ == "__main__":
    main()
