"""CommDebugMode: counts the collectives that DTensors issue, with the interface of torch's.

Listens to the routes; knows nothing of why they were taken.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

import torch

from shardwise.fabric import routes
from shardwise.plan.route import Route

__all__ = ["CommDebugMode"]

_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


class CommDebugMode:
    """Inside, every collective that a DTensor issues is counted, on any fabric.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> x = sw.ones(8, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> with CommDebugMode() as comm:
        ...     _ = x.full_tensor()
        >>> comm.get_total_counts(), comm.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
        (1, 1)
        >>> comm.received_bytes
        24
    """

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def __enter__(self) -> Self:
        self.routes.clear()
        self._listener = self.routes.append
        routes.observers.append(self._listener)
        return self

    def __exit__(self, *error: object) -> None:
        routes.observers.remove(self._listener)

    def get_comm_counts(self) -> dict[Any, int]:
        """How many of each collective, keyed by torch's operators for them."""
        counts: Counter[Any] = Counter()
        for route in self.routes:
            for step in route.steps:
                if step.collective is not None:
                    counts[getattr(torch.ops.c10d_functional, _NAMES[step.collective])] += 1
        return counts

    def get_total_counts(self) -> int:
        """How many collectives in all."""
        return sum(self.get_comm_counts().values())

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank received."""
        return round(sum(route.received for route in self.routes))
