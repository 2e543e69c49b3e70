"""Why an operator moved something, and the one change that would have spared it: found by asking the planner.

Each change that is named has been tried: with it, the rule moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.debug.records import Record, layouts_text
from shardwise.debug.units import operator_text
from shardwise.plan.alternatives import Candidate, Change, candidates_of, changes_without_communication
from shardwise.plan.propagate import OpSchema
from shardwise.text import human_bytes

__all__ = ["advice_text", "changes_for", "rejected"]


def moved_by(record: Record) -> float:
    """Bytes that a rank received for an operator, in all of its parts."""
    return record.received + record.received_inside


def changes_for(record: Record) -> tuple[Change, ...]:
    """The single changes with which an operator would have moved nothing, the best first.

    Best is what does not put the communication off by leaving a Partial, then what needs no more memory, then what
    concerns a parameter, whose layout is chosen once, then what is cheapest to reach.
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
    """Every row that the rule allowed, the chosen ones marked."""
    schema = _schema(record)
    decision = record.decision
    return (
        ()
        if schema is None or decision is None or decision.sharding is None
        else candidates_of(schema, decision.sharding)
    )


def _schema(record: Record) -> OpSchema | None:
    """The call again, if a rule spoke for it and every operand is a DTensor."""
    decision = record.decision
    if decision is None or decision.signature is None or decision.sharding is None:
        return None
    signature = decision.signature
    if len(signature.specs) != len(record.operands):
        return None
    return OpSchema(signature.info.op, signature.arguments, signature.specs)


def advice_text(record: Record, changes: Sequence[Change], record_at: Callable[[int | None], Record | None]) -> str:
    """The advice in a sentence or two; "" where there is none."""
    if not moved_by(record) or record.parent is not None:  # of a part of a decomposition the user chooses nothing
        return ""
    if record.way == "whole tensors":
        return (
            f"{operator_text(record.name)} has no rule for {layouts_text(o.spec for o in record.operands)}: it ran on "
            "whole tensors. Give it a rule with register_sharding, or call it on tensors that are Replicate()."
        )
    if not changes:
        return ""
    change = changes[0]
    operand = record.operands[change.operand]
    made = record_at(operand.made_by)
    maker = "" if made is None else f"; it comes out of {operator_text(made.name)} at {made.where.short}"
    costs = f"{', '.join(step.describe() for step in change.route.steps)}, {human_bytes(change.route.received)}"
    if len(operand.spec.partial_axes) > len(change.spec.partial_axes):
        cheaper = change.route.received < record.received
        return (
            f"{_name(operand.name, operand.owner)} is {operand.spec.layout}: a sum that has to be made before "
            f"{operator_text(record.name)} can use it{maker}. "
            + (
                f"To {change.spec.layout} it takes less: {costs}."
                if cheaper
                else "Only another layout there spares it."
            )
        )
    have = ", ".join(f"{_name(o.name, o.owner)} is {o.spec.layout}" for o in record.operands)
    free = "nothing" if not change.route.collectives else costs
    return (
        f"{have}. Were {_name(operand.name, operand.owner)} {change.spec.layout}, nothing would move, and the result "
        f"would be {layouts_text(spec.layout for spec in change.outputs)}. To bring it there takes {free}{maker}."
    )


def _name(name: str, owner: str) -> str:
    return f"{name} ({owner})" if owner else name
