"""Why an operator communicated, and which single layout change avoids it, according to the planner.

Every suggested change has been checked: with it, the rule needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.debug.recording.records import Record, layouts_text, operator_text
from shardwise.plan.alternatives import Candidate, Change, candidates_of, changes_without_communication
from shardwise.plan.propagate import OpSchema
from shardwise.text import human_bytes

__all__ = ["advice_text", "changes_for", "rejected"]


def moved_by(record: Record) -> float:
    """Bytes received by a rank for an operator, its decomposition included."""
    return record.received + record.received_inside


def changes_for(record: Record) -> tuple[Change, ...]:
    """The single layout changes that avoid an operator's communication, the best first.

    Preferred, in this order: changes that do not defer a reduction (leave a Partial), need no more memory, concern a
    parameter (whose layout is chosen once), and are cheapest to reach.
    """
    schema = _schema(record)
    if schema is None or not moved_by(record):
        return ()
    decision = record.decision
    assert decision is not None
    assert decision.sharding is not None
    assert decision.signature is not None
    now = sum(len(spec.partial_axes) for spec in decision.sharding.outputs)

    def rank(change: Change) -> tuple[bool, bool, bool, float]:
        operand = record.operands[change.operand]
        defers = sum(len(spec.partial_axes) for spec in change.outputs) > now
        grows = change.spec.local_bytes > operand.spec.local_bytes
        return defers, grows, not operand.owner and not grows, change.route.seconds

    found = changes_without_communication(schema, decision.sharding.call.results, decision.signature.pinned)
    known = [change for change in found if change.operand < len(record.operands)]
    return tuple(sorted(known, key=rank))


def rejected(record: Record) -> tuple[Candidate, ...]:
    """All rows that the rule allows, the chosen ones marked."""
    schema = _schema(record)
    decision = record.decision
    return (
        ()
        if schema is None or decision is None or decision.sharding is None
        else candidates_of(schema, decision.sharding)
    )


def _schema(record: Record) -> OpSchema | None:
    """The schema of the call, if it has a rule and all its operands are DTensors."""
    decision = record.decision
    if decision is None or decision.signature is None or decision.sharding is None:
        return None
    signature = decision.signature
    if len(signature.specs) != len(record.operands):
        return None
    return OpSchema(signature.info.op, signature.arguments, signature.specs)


def advice_text(record: Record, changes: Sequence[Change], record_at: Callable[[int | None], Record | None]) -> str:
    """The advice in one or two sentences; "" for none."""
    if not moved_by(record) or record.parent is not None:  # the user does not choose layouts inside a decomposition
        return ""
    if record.way == "replicated operands":
        return (
            f"{operator_text(record.name)} has no rule for {layouts_text(o.spec for o in record.operands)}: all "
            "operands were replicated. Register a rule with register_sharding, or call it on Replicate() tensors."
        )
    if not changes:
        return ""
    change = changes[0]
    operand = record.operands[change.operand]
    made = record_at(operand.made_by)
    maker = "" if made is None else f"; it is a result of {operator_text(made.name)} at {made.where.short}"
    costs = f"{', '.join(step.describe() for step in change.route.steps)}, {human_bytes(change.route.received)}"
    if len(operand.spec.partial_axes) > len(change.spec.partial_axes):
        cheaper = change.route.received < record.received
        return (
            f"{_name(operand.name, operand.owner)} is {operand.spec.layout} and must be reduced before "
            f"{operator_text(record.name)}{maker}. "
            + (
                f"Redistributing it to {change.spec.layout} costs less: {costs}."
                if cheaper
                else "To avoid the reduction, change the layouts that make it Partial."
            )
        )
    have = ", ".join(f"{_name(o.name, o.owner)} is {o.spec.layout}" for o in record.operands)
    free = "nothing" if not change.route.collectives else costs
    return (
        f"{have}. With {_name(operand.name, operand.owner)} as {change.spec.layout}, nothing moves and the result is "
        f"{layouts_text(spec.layout for spec in change.outputs)}. Redistributing it costs {free}{maker}."
    )


def _name(name: str, owner: str) -> str:
    return f"{name} ({owner})" if owner else name
