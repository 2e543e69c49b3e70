"""Planned routes bound to their fabric, cached for each pair of specs; listeners are notified before a route runs.

Every change of a local's layout goes through this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec
from shardwise.events import route_started, scatter_started
from shardwise.fabric.base import BoundRows, BoundStep, fabric_of, on_found, on_new_world, raise_found
from shardwise.plan.cost import CostModel, current_cost_model, on_new_model
from shardwise.plan.route import DTensorRedistributePlanner, Route
from shardwise.plan.row_exchange import row_exchange_route
from shardwise.plan.step import Expand, Rotate, RowExchange

__all__ = [
    "BoundRoute",
    "Rotation",
    "announced",
    "bound_rotations",
    "bound_route",
    "bound_rows",
    "scatter",
]

MAX_ROUTES = 8192


@dataclass(eq=False, slots=True)
class BoundRoute:
    """A route and the callable that executes it on a local."""

    route: Route
    run: BoundStep
    communicates: bool
    read: BoundStep  # the same for tensors that are only read: keeps broadcast dims
    reorder: bool = False  # whether the local must be copied to the order of the global strides: it may be row-major
    _begin: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = None

    def start(self, local: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start, leaving the last collective in flight; the result waits and finishes."""
        route_started.notify(self.route)
        if self._begin is None:
            self._begin = fabric_of(self.route.source.mesh).start_route(self.route)
        return self._begin(local)


_bound: BoundedCache[tuple[Any, ...], BoundRoute] = BoundedCache(MAX_ROUTES)
on_new_world.append(_bound.clear)  # they know groups
on_new_model.append(_bound.clear)  # and were the cheapest


def bound_route(source: DTensorSpec, target: DTensorSpec, max_bytes: int | None = None) -> BoundRoute:
    """The cheapest route from `source` to `target`, planned and bound on first use."""
    key = (source, target, max_bytes)
    found = _bound.get(key)
    if found is None:
        raise_found()
        model = current_cost_model()
        if source.tensor_meta.is_symbolic:
            return _bind_symbolic(source, target, max_bytes, model)
        keep = _bound.keep_recent if source.is_ragged or target.is_ragged else _bound.keep
        found = keep(key, _bind(source, target, max_bytes, model))
    return found


def _bind(source: DTensorSpec, target: DTensorSpec, max_bytes: int | None, model: CostModel) -> BoundRoute:
    route = DTensorRedistributePlanner(model).plan(source, target, max_bytes=max_bytes)
    run = fabric_of(source.mesh).bind_route(route)
    read = fabric_of(source.mesh).bind_route(_only_read(route)) if source.broadcast else run
    reorder = not source.tensor_meta.is_contiguous and not target.broadcast
    if not route.collectives:
        return BoundRoute(route, run, False, read, reorder)

    def announced(bound: BoundStep) -> BoundStep:
        def announce_and_run(local: torch.Tensor) -> torch.Tensor:
            if route_started:
                route_started.notify(route)
            return bound(local)

        return announce_and_run

    both = announced(run)
    return BoundRoute(route, both, True, announced(read) if source.broadcast else both, reorder)


def _only_read(route: Route) -> Route:
    """A route of a tensor with broadcast dims whose result is only read."""
    last = route.steps[-1]
    return replace(route, steps=(*route.steps[:-1], replace(last, reads=True))) if isinstance(last, Expand) else route


def _bind_symbolic(source: DTensorSpec, target: DTensorSpec, max_bytes: int | None, model: CostModel) -> BoundRoute:
    """The cheapest route for the hinted sizes; it is correct for all sizes. Not cached, because it is traced once."""

    meta = source.tensor_meta.hinted()
    known, goal = DTensorSpec.from_context(source.context, meta), DTensorSpec.from_context(target.context, meta)
    stored = known.compact().tensor_meta

    def symbolic(spec: DTensorSpec) -> DTensorSpec:
        is_stored = source.broadcast and spec.tensor_meta is stored
        return DTensorSpec.from_context(spec.context, (source.compact() if is_stored else source).tensor_meta)

    planned = DTensorRedistributePlanner(model).plan(known, goal, max_bytes=max_bytes)
    steps = tuple(replace(step, before=symbolic(step.before), after=symbolic(step.after)) for step in planned.steps)
    route = Route(source, target, steps, planned.costs)
    run = fabric_of(source.mesh).bind_route(route)
    read = fabric_of(source.mesh).bind_route(_only_read(route)) if source.broadcast else run
    return BoundRoute(route, run, bool(route.collectives), read)


def bound_rows(step: RowExchange) -> tuple[Route, BoundRows]:
    """A planned and bound row exchange. The caller caches it, since it belongs to one operator call."""
    route = row_exchange_route(step)
    run = fabric_of(step.before.mesh).bind_rows(step, bool(route.collectives))
    if not route.collectives:
        return route, run

    def announce_and_run(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
        if route_started:
            route_started.notify(route)
        return run(locals_, fill)

    return route, announce_and_run


Rotation = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


def bound_rotations(route: Route) -> tuple[Callable[[], None], dict[int, Rotation]]:
    """Bound rotations by distance, and the function that notifies listeners of all. The caller caches both."""
    fabric = fabric_of(route.source.mesh)
    steps = [step for step in route.steps if isinstance(step, Rotate)]

    def announce() -> None:
        fabric.record(route)
        if route_started:
            route_started.notify(route)

    return announce, {step.distance: fabric.start_rotation(step) for step in steps}


def announced(route: Route) -> None:
    """Notify listeners that a route is about to run."""
    if route_started:
        route_started.notify(route)


def scatter(spec: DTensorSpec, blocks: Callable[[tuple[int, ...]], torch.Tensor], source: int | None) -> torch.Tensor:
    """Each rank's block of a tensor of this spec as a local. The rank `source` sends; if None, each makes its own."""
    if scatter_started and source is not None and spec.mesh.size() > 1:
        scatter_started.notify(spec)
    return fabric_of(spec.mesh).scatter(spec.mesh, blocks, source)


def forget_routes() -> None:
    """Drop all bound routes, because fabrics bind differently from now on."""
    _bound.clear()


on_found.append(forget_routes)


def cached_routes() -> int:
    """The number of cached routes."""
    return len(_bound)
