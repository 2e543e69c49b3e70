"""Where the calls of a recorded step come from: line, phase and module of the user's code; and the routes that ran."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec
from shardwise.debug.recording.module_tracker import ModuleTracker
from shardwise.debug.recording.records import NO_LINE, MoveRecord, SourceLine, moves_of_route, scatter_move
from shardwise.debug.recording.user_lines import stack_lines
from shardwise.events import route_started, scatter_started
from shardwise.plan.route import Route
from shardwise.torch_private import autograd_sequence_number, current_autograd_node

__all__ = ["NOWHERE", "PHASES", "CallSites", "Site"]

MOST_NODES = 2**20
_LEAF = 2**63  # nodes that accumulate gradients have a number larger than all others


PHASES = {"forward": "", "backward": "backward of ", "recompute": "recomputed: ", "gradients": "gradients, "}


class Site(NamedTuple):
    """Where one call comes from.

    Args:
        where: the user's line; in backward that of the forward operator whose gradient is computed.
        phase: "forward", "backward", "recompute", or "gradients" where these are added to those of parameters.
        module: the path of the module whose forward ran, "" for none.
    """

    where: SourceLine
    phase: str
    module: str

    @property
    def place(self) -> str:
        """File and line, with the phase; empty if they are not known."""
        return PHASES[self.phase] + str(self.where) if self.where.file else ""

    def comment(self) -> str:
        """The line as a comment of a program: file, number, text.

        Example:
            >>> Site(SourceLine("model.py", 3, "forward"), "backward", "").comment()
            'backward of model.py:3'
        """
        if not self.where.file:
            return self.phase
        text = linecache.getline(self.where.file, self.where.line).strip()
        return f"{self.place}  {text}" if text else self.place


NOWHERE = Site(NO_LINE, "forward", "")


class CallSites:
    """Notes the site of each call of a tape by its position, and the collectives of routes before which position.

    On virtual ranks a collective is many copies; the routes say which these are.
    """

    def __init__(self) -> None:
        self.at: dict[int, Site] = {}
        self.moves: list[tuple[int, Site, MoveRecord]] = []
        self._modules = ModuleTracker()
        self._by_node: BoundedCache[int, Site] = BoundedCache(MOST_NODES)
        self._count = 0

    def note(self, position: int) -> None:
        """The call at this position is recorded now."""
        self.at[position] = self._here()
        self._count = position + 1

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Inside, modules and routes are tracked."""
        route_started.append(self._route)
        scatter_started.append(self._scatter)
        self._modules.start(lambda module, path: None)
        try:
            yield
        finally:
            self._modules.stop()
            route_started.remove(self._route)
            scatter_started.remove(self._scatter)

    def _here(self) -> Site:
        node = current_autograd_node()
        inner, called, recomputing = stack_lines(node is not None)
        if node is None or recomputing:
            site = Site(inner, "forward" if node is None else "recompute", self._modules.current)
            self._by_node.setdefault(autograd_sequence_number() - 1, site)
            return site
        number = node._sequence_nr()
        cause = self._by_node.get(number)
        if cause is not None:
            return Site(cause.where if inner is NO_LINE else inner, "backward", cause.module)
        where = called if inner is NO_LINE else inner
        if number < _LEAF:
            return Site(where, "backward", "")
        return Site(where, "gradients", self._modules.owner_of(node.variable)[0])  # pyright: ignore[reportAttributeAccessIssue]

    def _route(self, route: Route) -> None:
        self.moves += [(self._count, self._here(), move) for move in moves_of_route(route)]

    def _scatter(self, spec: DTensorSpec) -> None:
        self.moves.append((self._count, self._here(), scatter_move(spec)))
