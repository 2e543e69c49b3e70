"""The decision how a signature is executed, with the layouts of its rule. An event of the dispatcher."""

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
        way: "rule", "decomposed", "replicated operands", "random", "by a new tensor", "by copies", "view in place",
            "mesh by mesh", "outside the mesh"; for attention over a sharded sequence "ring", "gather", "heads",
            "halo" or "local".
        signature: the call; None if its operands are on several meshes.
        sharding: the layouts of the rule; for "decomposed" those that the rule would have used.
        why: the reason, if several algorithms were possible.
        by_values: whether another call of the same signature may run differently because of the values of a mask.
    """

    way: str
    signature: Signature | None = None
    sharding: OutputSharding | None = None
    why: str = ""
    by_values: bool = False


def decided(
    way: str,
    signature: Signature | None = None,
    sharding: OutputSharding | None = None,
    why: str = "",
    by_values: bool = False,
) -> None:
    """Notify listeners of decisions."""
    if decision_made:
        decision_made.notify(Decision(way, signature, sharding, why, by_values))
