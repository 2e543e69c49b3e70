"""What `explain()` of a captured function says: collectives, bytes, seconds and memory, by line and module."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.capture.call_sites import NOWHERE, Site
from shardwise.capture.collective_calls import Collective
from shardwise.capture.memory_plan import MemoryPlan, memory_plan
from shardwise.capture.program import Program
from shardwise.debug.explain_report.summary import Total
from shardwise.text import DottedName, human_bytes, human_seconds, plural, slim_table

__all__ = ["CapturedReport"]

MOST_ROWS = 40


@dataclass(frozen=True, eq=False)
class CapturedReport:
    """Communication and memory of one program. Prints as a table.

    Args:
        name: of the function.
        operators: how many operators the program runs, for each phase.
        collectives: all of them, in order.
        memory: what its values take over time.
        sites: the line, phase and module of each call, by its position.
        ranks: how many ranks the program runs: one, or all virtual ones. Memory is that of all of them.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> w = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> step = sw.captured(lambda x: (x @ w).full_tensor())
        >>> x = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> _ = [step(x) for _ in range(3)]
        >>> report = step.explain()
        >>> report.total.collectives, report.by_axis["tp"].received
        (1, 384.0)
    """

    name: str
    operators: dict[str, int]
    collectives: tuple[Collective, ...]
    memory: MemoryPlan
    sites: dict[int, Site]
    ranks: int

    @staticmethod
    def of(program: Program) -> CapturedReport:
        sites = program.facts.sites
        phases = Counter(sites.get(position, NOWHERE).phase for position, _ in program.calls)
        return CapturedReport(
            program.name,
            dict(phases),
            tuple(program.communication()),
            memory_plan(program),
            sites,
            program.ranks,
        )

    # ---------------------------------------------------------------- sums

    @property
    def total(self) -> Total:
        """The sum of all collectives."""
        return _total(self.collectives)

    @property
    def by_line(self) -> dict[str, Total]:
        """Sums for each line of the user, backward included."""
        return self._sums(lambda found: str(found.site.where))

    @property
    def by_module(self) -> dict[str, Total]:
        """Sums for each module without its submodules; "" is outside all modules."""
        return self._sums(lambda found: found.site.module)

    @property
    def by_collective(self) -> dict[str, Total]:
        """Sums for each kind of collective."""
        return self._sums(lambda found: found.kind)

    @property
    def by_axis(self) -> dict[str, Total]:
        """Sums for each group of mesh axes."""
        return self._sums(lambda found: found.over)

    @property
    def by_phase(self) -> dict[str, Total]:
        """Sums for forward, backward and recompute."""
        return self._sums(lambda found: found.site.phase)

    @property
    def peak_memory(self) -> int:
        """Bytes at the peak: what the program is given, and what it has made and still needs."""
        return self.memory.held + self.memory.peak

    @property
    def memory_by_line(self) -> dict[str, int]:
        """Bytes of the program's own values at the peak, by the line that made them."""
        return self._alive(lambda site: str(site.where))

    @property
    def memory_by_module(self) -> dict[str, int]:
        """Bytes of the program's own values at the peak, by the module that made them."""
        return self._alive(lambda site: site.module)

    def _sums(self, key: Callable[[Collective], str]) -> dict[str, Total]:
        groups: dict[str, list[Collective]] = {}
        for found in self.collectives:
            groups.setdefault(key(found), []).append(found)
        return {name: _total(found) for name, found in groups.items()}

    def _alive(self, key: Callable[[Site], str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for position, size in self.memory.alive:
            found[key(self.sites.get(position, NOWHERE))] += size
        return dict(found)

    # ---------------------------------------------------------------- text

    def table(self, *, width: int = 100, color: bool = False) -> str:
        """The report as text."""
        from rich.console import Console

        console = Console(
            file=io.StringIO(), width=width, force_terminal=color, highlight=False, legacy_windows=False,
            color_system="standard" if color else None,
        )  # fmt: skip
        for part in self._parts():
            console.print(part)
        written = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        return "\n".join(line.rstrip() for line in written.rstrip().splitlines())

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        total = self.total
        return f"CapturedReport({self.name}: {total.collectives} collectives, {total.received:.0f} bytes)"

    def _parts(self) -> Iterator[Any]:
        from rich.text import Text

        total, memory = self.total, self.memory
        count = sum(self.operators.values())
        yield Text(f"{self.name}: {plural(count, 'operator')}, {plural(total.collectives, 'collective')}", "bold")
        if total.collectives:
            yield Text(f"a rank receives {human_bytes(total.received)} in {human_seconds(total.seconds)} (modelled)")
        whose = "" if self.ranks == 1 else f" on all {self.ranks} virtual ranks together"
        yield Text(
            f"memory{whose}: {human_bytes(memory.held)} given, {human_bytes(memory.peak)} of its own at the peak"
            + ("" if memory.at is None else f", at {self.sites.get(memory.at, NOWHERE).comment()}")
        )
        for title, sums, alive in (
            ("line", self.by_line, self.memory_by_line),
            ("module", self.by_module, self.memory_by_module),
        ):
            yield Text("")
            yield _table(title, sums, alive)
        for title, sums in (("collective", self.by_collective), ("axis", self.by_axis), ("phase", self.by_phase)):
            if sums:
                yield Text("")
                yield _table(title, sums, None)


def _table(title: str, sums: dict[str, Total], alive: dict[str, int] | None) -> Any:
    made = slim_table(expand=True)
    made.add_column(f"by {title}", ratio=1, overflow="fold")
    headings = ["collectives", "received", "time"] + (["held at the peak"] if alive is not None else [])
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    names: dict[str, None] = dict.fromkeys([*sums, *(alive or {})])
    ordered = sorted(names, key=lambda name: (-sums.get(name, _NOTHING).received, -(alive or {}).get(name, 0)))
    for name in ordered[:MOST_ROWS]:
        total = sums.get(name, _NOTHING)
        cells = [str(total.collectives or ""), human_bytes(total.received) if total.collectives else ""]
        cells.append(human_seconds(total.seconds) if total.collectives else "")
        if alive is not None:
            cells.append(human_bytes(alive[name]) if name in alive else "")
        made.add_row(DottedName(name) if name and title == "module" else name or f"(no {title})", *cells)
    if len(ordered) > MOST_ROWS:
        made.add_row(f"and {len(ordered) - MOST_ROWS} more")
    return made


_NOTHING = Total(0, 0.0, 0.0)


def _total(found: Any) -> Total:
    listed = list(found)
    return Total(len(listed), sum(each.received for each in listed), sum(each.seconds for each in listed))
