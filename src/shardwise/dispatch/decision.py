"""How a signature is run, for whoever asks why: the way that was chosen, and what the rule says.

Told by the dispatcher while it resolves; kept by nobody unless somebody listens on this thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.dispatch.signature import Signature
from shardwise.plan.propagate import OutputSharding

__all__ = ["Decision", "decided", "listening"]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One resolved signature.

    Args:
        way: "rule", "decomposed", "whole tensors", "random", "by a new tensor", "by copies", "view in place",
            "mesh by mesh", "outside the mesh"; for attention over a sharded sequence "ring", "gather" or "heads".
        signature: the call; None where its operands lie on several meshes.
        sharding: where everything lies by the rule; for "decomposed" what the rule would have done.
        why: why this way, where there were several.
    """

    way: str
    signature: Signature | None = None
    sharding: OutputSharding | None = None
    why: str = ""


_thread = threading.local()


def decided(
    way: str, signature: Signature | None = None, sharding: OutputSharding | None = None, why: str = ""
) -> None:
    """Tell whoever listens on this thread."""
    heard: list[Decision] | None = getattr(_thread, "heard", None)
    if heard is not None:
        heard.append(Decision(way, signature, sharding, why))


@contextlib.contextmanager
def listening() -> Iterator[list[Decision]]:
    """Inside, decisions made on this thread are collected."""
    before = getattr(_thread, "heard", None)
    _thread.heard = heard = []
    try:
        yield heard
    finally:
        _thread.heard = before
