"""Cold dispatch: the first call with a new shape, on meshes of 1 to 6 axes.

Asked: at most 0.15 of torch's on one axis, 0.03 on two, 0.005 on three; on six no more than 4 times our one-axis cost.
"""

import statistics

import torch

from bench.figures import figure, point
from bench.peers import Peer, peers, start
from bench.timing import Timing, compare_cold

ASKED = {1: 0.15, 2: 0.03, 3: 0.005}
MESHES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 6: (2, 2, 2, 2, 2, 2)}
SIZES = range(3, 15)
PLOTTED = ("add", "mm", "softmax")


def calls(peer: Peer) -> dict:
    """Each operator as a function of the local size, which makes the signature new."""
    axes = peer.mesh.ndim
    rest = [peer.Replicate()] * (axes - 1)
    sharded, whole = [peer.Shard(0), *rest], [peer.Replicate(), *rest]
    n = peer.mesh.shape[0]
    return {
        "add": lambda k: (lambda a, b: a + b, peer.local(sharded, k, 8), peer.local(sharded, k, 8)),
        "add, layouts differ": lambda k: (lambda a, b: a + b, peer.local(sharded, k, 8), peer.local(whole, k * n, 8)),
        "mm": lambda k: (lambda a, b: a @ b, peer.local(sharded, k, 8), peer.local(whole, 8, 16)),
        "softmax": lambda k: (lambda a: a.softmax(-1), peer.local(sharded, k, 8)),
        "view": lambda k: (lambda a: a.view(-1, 2, 4), peer.local(sharded, k, 8)),
        "sum": lambda k: (lambda a: a.sum(0), peer.local(sharded, k, 8)),
        "cat": lambda k: (lambda a, b: torch.cat([a, b], 1), peer.local(sharded, k, 8), peer.local(sharded, k, 8)),
    }


def thunks(peer: Peer, name: str) -> list:
    """One call for each size; the operands are made beforehand."""
    made = [calls(peer)[name](k) for k in SIZES]
    return [lambda fn=fn, given=given: fn(*given) for fn, *given in made]


def main() -> None:
    """Print the time of first calls on both libraries; torch is left out on six axes, where it takes minutes."""
    start(64)
    one_axis: dict[str, Timing] = {}
    with torch.no_grad():
        for axes, shape in MESHES.items():
            both = peers(*shape)
            measured = both if axes <= 3 else both[:1]
            for name in calls(both[0]):
                sides = {peer.name: thunks(peer, name) for peer in measured}
                timings = compare_cold(sides, title=f"{name} on {axes} axes {shape}")
                mine = timings["shardwise"]
                if name in PLOTTED:
                    for peer, timing in timings.items():
                        point("cold_axes", f"{name}, {peer}", axes, timing.median)
                if axes <= 3:
                    one_axis.setdefault(name, mine)
                    ratio, asked = mine.median / timings["torch"].median, ASKED[axes]
                else:
                    ratio, asked = mine.median / one_axis[name].median, 4.0
                to = "torch" if axes <= 3 else "ours on one axis"
                print(f"  {figure(f'first `{name}`, {axes} axes, to {to}', ratio, asked)}\n")
    print(f"median of ours on one axis: {statistics.median(t.median for t in one_axis.values()):.0f} us")


if __name__ == "__main__":
    main()
