"""Operators whose windows slide over sharded dims: the row exchanges around them, and the rows of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.layout import Segment, Window
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.plan.row_exchange import row_exchange_route
from shardwise.plan.step import RowExchange, Windowed
from shardwise.rules.engine import Dim, Factors
from shardwise.rules.registry import Halo, WindowPart

__all__ = ["HaloExchange", "halo_exchange", "halo_rows"]

Windows = tuple[tuple[int, Window, DTensorSpec], ...]


@dataclass(frozen=True, slots=True, eq=False)
class HaloExchange:
    """The exchanges around an operator, dim by dim, so that corners come from the right ranks.

    Args:
        halo: the windows of the rule.
        before: for each operand the exchanges that give it halos.
        after: for each result the exchanges that add its windows.
        windows: the dims with halos.
    """

    halo: Halo
    before: tuple[tuple[RowExchange, ...], ...]
    after: tuple[tuple[RowExchange, ...], ...]
    windows: Windows

    @property
    def seconds(self) -> float:
        """Modelled time of all exchanges."""
        return sum(row_exchange_route(step).seconds for steps in (*self.before, *self.after) for step in steps)

    def made(self, outputs: Sequence[DTensorSpec]) -> list[DTensorSpec | Windowed]:
        """The results before overlapping windows of them are added."""
        pairs = enumerate(outputs)
        return [Windowed(spec, self.windows) if i in self.halo.adds else spec for i, spec in pairs]

    def places(self, coordinate: Coordinate) -> dict[int, WindowPart]:
        """By dim, the rows on which the rank at `coordinate` works."""
        found = {}
        for dim, window, reference in self.windows:
            ((start, length),) = reference.runs(dim, coordinate)
            found[dim] = WindowPart(start, length, *window.over(start, length))
        return found


def halo_exchange(
    halo: Halo, factors: Factors, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> HaloExchange | None:
    """The exchanges around an operator in these layouts; None if no dim with a window is sharded."""
    reference = outputs[0] if halo.reference is None else inputs[halo.reference]
    names = factors.results[0] if halo.reference is None else factors.operands[halo.reference]
    windows = tuple(
        (dim, halo.windows[name], reference)
        for dim, name in enumerate(names)
        if name is not None and name in halo.windows and reference.dim_axes[dim]
    )
    if not windows:
        return None
    before = [_exchanges(spec, windows, adds=False) if i in halo.reads else () for i, spec in enumerate(inputs)]
    after = [_exchanges(spec, windows, adds=True) if i in halo.adds else () for i, spec in enumerate(outputs)]
    return HaloExchange(halo, tuple(before), tuple(after), windows)


def _exchanges(spec: DTensorSpec, windows: Windows, adds: bool) -> tuple[RowExchange, ...]:
    """One exchange for each dim with rows that other ranks need; in reverse order for results that are added."""
    steps: list[RowExchange] = []
    plain: DTensorSpec | Windowed = spec
    for i, (dim, window, reference) in enumerate(windows):
        haloed = Windowed(spec, windows[: i + 1])
        if window != Window(0, 0) or spec.shape[dim] != reference.shape[dim]:
            pair = (haloed, plain) if adds else (plain, haloed)
            segment = Segment(0, 0, 0, 0, spec.shape[dim])
            steps.append(RowExchange(spec, spec, pair[:1], pair[1:], dim, (segment,), spec.dim_axes[dim], adds))
        plain = haloed
    return tuple(steps[::-1] if adds else steps)


def halo_rows(halo: Halo, name: Dim) -> float:
    """The approximate number of rows of a factor that a rank receives if shards are longer than the window."""
    window = halo.windows.get(name or "")
    return 0.0 if window is None else max((window.last - window.first + window.per - window.step) / window.per, 0.0)
