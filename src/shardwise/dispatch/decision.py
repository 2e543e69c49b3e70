"""How a signature is run: the way that was chosen, and what the rule says. An event of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.dispatch.signature import Signature
from shardwise.events import decision_made
from shardwise.plan.propagate import OutputSharding

__all__ = ["Decision", "decided"]


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


def decided(
    way: str, signature: Signature | None = None, sharding: OutputSharding | None = None, why: str = ""
) -> None:
    """Tell those who observe decisions."""
    if decision_made:
        decision_made.notify(Decision(way, signature, sharding, why))
