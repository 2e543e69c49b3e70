"""`make demo`: a tour of what the library does, on virtual ranks, in a few seconds. Every line shown is computed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import shardwise as sw
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.routes import observers
from shardwise.plan.route import Route, plain_route
from shardwise.text import WIDTH, print_lines, slim_table

__all__ = ["main"]


class Page:
    """What the tour prints: headings, sentences, code and tables, at most 80 columns wide."""

    def _print(self, *parts: Any, style: str = "") -> None:
        print_lines(*parts, style=style, widest=WIDTH)

    def heading(self, text: str) -> None:
        """The beginning of a part."""
        self._print("", text, style="bold")

    def say(self, text: str) -> None:
        """A sentence."""
        self._print(text)

    def code(self, text: str) -> None:
        """What one would type."""
        self._print("\n".join(f"  {line}" for line in text.splitlines()), style="cyan")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows of cells; the columns numbered in `right` are numbers."""
        table = slim_table()
        for column, heading in enumerate(headings):
            table.add_column(heading, justify="right" if column in right else "left")
        for row in rows:
            table.add_row(*row)
        self._print(table)


def main() -> None:
    """Print the tour.

    Example:
        >>> main()  # doctest: +SKIP
    """
    page = Page()
    begin = time.perf_counter()
    with sw.virtual():
        mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    show_mesh(page, mesh)
    show_layouts(page, mesh)
    show_routes(page, mesh)
    show_gradients(page, mesh)
    show_dry_run(page)
    page.heading(f"That took {time.perf_counter() - begin:.1f} s. Next: shardwise plan --help, docs/architecture.md")


def show_mesh(page: Page, mesh: sw.DeviceMesh) -> None:
    """Eight ranks in this process."""
    page.heading("1. A mesh of ranks, without a cluster")
    page.code('mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))')
    page.say(f"{mesh}")
    page.say(f"All {mesh.size()} ranks live in this process. Under torchrun they are processes; the code is the same.")


def show_layouts(page: Page, mesh: sw.DeviceMesh) -> None:
    """One tensor, laid out in three ways."""
    page.heading("2. One tensor, many layouts")
    whole = torch.arange(70.0).reshape(7, 10)
    page.code("x = sw.distribute_tensor(whole, mesh, placements)    # whole: 7 x 10")
    rows = []
    for placements in ([sw.Shard(0), sw.Replicate()], [sw.Shard(0), sw.Shard(1)], [sw.Partial(), sw.Shard(0)]):
        x = sw.distribute_tensor(whole, mesh, placements)
        local: Any = x.to_local()  # a RankTensor: the parts of all ranks
        shapes = [f"{tuple(local.tensors[rank].shape)}" for rank in (0, 3, 7)]
        same = "yes" if torch.equal(x.full_tensor(), whole) else "NO"
        rows.append([repr(x.spec), *shapes, same])
    page.table(["layout", "rank 0", "rank 3", "rank 7", "full_tensor() is whole"], rows)


def show_routes(page: Page, mesh: sw.DeviceMesh) -> None:
    """What redistribute does, beside what one would do by hand."""
    page.heading("3. From one layout to another by the cheapest route")
    page.code("y = x.redistribute(placements=[...])    # x: 512 x 256")
    whole = torch.randn(512, 256)
    moves: list[tuple[list[sw.Placement], list[sw.Placement]]] = [
        ([sw.Shard(0), sw.Shard(1)], [sw.Shard(1), sw.Shard(0)]),
        ([sw.Shard(0), sw.Replicate()], [sw.Replicate(), sw.Shard(1)]),
        ([sw.Partial(), sw.Shard(0)], [sw.Shard(0), sw.Shard(1)]),
        ([sw.Partial(), sw.Partial()], [sw.Replicate(), sw.Shard(0)]),
    ]
    rows = []
    for before, after in moves:
        x = sw.distribute_tensor(whole, mesh, before)
        route, y = watched_redistribute(x, after)
        plain = plain_route(x.spec, y.spec)
        error = (y.full_tensor() - whole).abs().max().item()
        steps = "\n".join(step.describe() for step in route.steps)
        layouts = f"{x.spec.layout}\n-> {y.spec.layout}"
        rows.append([layouts, steps, f"{route.received:,.0f}", f"{plain.received:,.0f}", _difference(error)])
    headings = ["layouts", "steps taken", "bytes", "by hand", "difference"]
    page.table(headings, rows, right=(2, 3, 4))
    page.say("Bytes are what a rank receives; by hand: reduce, gather what changes, slice.")


def watched_redistribute(x: sw.DTensor, placements: list[sw.Placement]) -> tuple[Route, sw.DTensor]:
    """The tensor laid out otherwise, and the route it took."""
    taken: list[Route] = []
    observers.append(taken.append)
    try:
        y = x.redistribute(placements=placements)
    finally:
        observers.remove(taken.append)
    return taken[0], y


def show_gradients(page: Page, mesh: sw.DeviceMesh) -> None:
    """The same program on one device and on the mesh."""
    page.heading("4. Operators and gradients are those of one device")
    page.code(
        "y = (x * w + x).redistribute(placements=[sw.Shard(1), sw.Replicate()])\n(y * y).full_tensor().sum().backward()"
    )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(64, 48, generator=generator) for _ in range(2)]
    one_x, one_w = (tensor.clone().requires_grad_() for tensor in whole)
    one_y = one_x * one_w + one_x
    (one_y * one_y).sum().backward()

    # typed loosely: to a type checker what an operator gives is a Tensor
    x: Any = sw.distribute_tensor(whole[0], mesh, [sw.Shard(0), sw.Shard(1)]).requires_grad_()
    w: Any = sw.distribute_tensor(whole[1], mesh, [sw.Replicate(), sw.Shard(1)]).requires_grad_()
    y = (x * w + x).redistribute(placements=[sw.Shard(1), sw.Replicate()])
    (y * y).full_tensor().sum().backward()
    rows = []
    for name, ours, one in (("x", x, one_x), ("w", w, one_w)):
        error = (ours.grad.full_tensor() - one.grad).abs().max().item()
        rows.append([name, repr(ours.spec), repr(ours.grad.spec), _difference(error)])
    page.table(["", "tensor", "its gradient", "largest difference"], rows, right=(3,))


def show_dry_run(page: Page) -> None:
    """The same calls, for more ranks than anyone has at hand."""
    page.heading("5. A dry run: what would this move and hold on 16,384 devices?")
    page.code(
        "with sw.dry_run() as run:\n"
        '    names = ("dp", "pp", "tp")\n'
        '    mesh = sw.init_device_mesh("cuda", (64, 32, 8), mesh_dim_names=names)\n'
        "    w = sw.empty(16384, 53248, dtype=torch.bfloat16, device_mesh=mesh,\n"
        "                 placements=[sw.Shard(0), sw.Partial(), sw.Shard(1)])\n"
        "    w.redistribute(placements=[sw.Shard(1), sw.Replicate(), sw.Shard(0)])"
    )
    begin = time.perf_counter()
    with sw.dry_run() as run:
        mesh = sw.init_device_mesh("cuda", (64, 32, 8), mesh_dim_names=("dp", "pp", "tp"))
        shards = [sw.Shard(0), sw.Partial(), sw.Shard(1)]
        w = sw.empty(16384, 53248, dtype=torch.bfloat16, device_mesh=mesh, placements=shards)
        moved = w.redistribute(placements=[sw.Shard(1), sw.Replicate(), sw.Shard(0)])
    took = time.perf_counter() - begin
    plain = plain_route(w.spec, moved.spec)
    page.say(f"{w.spec} -> {moved.spec.layout} on {mesh.size():,} ranks:")
    rows = [
        ["as planned", *_costs(sum(run.collectives.values()), run.bytes, run.seconds, peak(run, w.spec))],
        ["by hand", *_costs(plain.collectives, plain.received, plain.seconds, plain.peak_bytes)],
    ]
    page.table(["", "collectives", "MB received", "modelled ms", "peak MB"], rows, right=(1, 2, 3, 4))
    page.say(f"Planned in {1000 * took:.0f} ms; nothing was sent, and no value computed.")


def peak(run: sw.DryRun, source: DTensorSpec) -> int:
    """The most that a state of the route holds on a rank, its beginning included."""
    return max([source.local_bytes, *(record.cost.holds for record in run.steps)])


def _difference(error: float) -> str:
    return f"{error:.0e}" if error else "none"


def _costs(collectives: int, received: float, seconds: float, held: int) -> list[str]:
    return [str(collectives), f"{received / 1e6:,.1f}", f"{1e3 * seconds:,.3f}", f"{held / 1e6:,.1f}"]


if __name__ == "__main__":
    main()
