"""loss_parallel: accepted for plans written for torch; the loss over sharded classes is an ordinary operator here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["loss_parallel"]


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Changes nothing: `cross_entropy` of logits that are sharded over classes gathers none of them, inside or outside.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> logits = sw.zeros(2, 8, device_mesh=mesh, placements=[sw.Shard(-1)])
        >>> targets = sw.zeros(2, dtype=torch.int64, device_mesh=mesh)
        >>> with loss_parallel():
        ...     loss = torch.nn.functional.cross_entropy(logits, targets)
        >>> round(loss.item(), 4)
        2.0794
    """
    yield
