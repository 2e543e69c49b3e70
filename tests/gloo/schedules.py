"""An independent check of the collectives of all ranks: each group sees one sequence, and no order can block.

Programs are read as data: nothing of the library that made them is asked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Event(NamedTuple):
    """One collective as one rank issues it."""

    kind: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]  # elements of its tensors
    dtypes: tuple[str, ...]
    reduction: str
    splits: tuple[tuple[int, ...], ...]


def events_of(program: Any) -> list[Event]:
    """The collectives of a program of one rank, in order."""
    found = []
    for _, call in program.calls:
        op = getattr(call, "op", None)
        if op is None or op.namespace != "c10d":
            continue
        given = dict(zip([a.name for a in op._schema.arguments], call.args, strict=False)) | call.kwargs
        group = torch.distributed.ProcessGroup.unbox(given["process_group"])
        leaves = torch.utils._pytree.tree_leaves(list(given.values()))  # pyright: ignore[reportAttributeAccessIssue]
        numbers = [leaf.number for leaf in leaves if hasattr(leaf, "number")]
        shapes = [program.facts.geometry[number] for number in numbers]
        splits = tuple(tuple(given[name]) for name in ("output_split_sizes", "input_split_sizes") if name in given)
        reduction = "" if call.expected is None else str(call.expected.reduceOp.op)
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        sizes = tuple(torch.Size(shape.shape).numel() for shape in shapes)
        found.append(Event(op._opname, ranks, sizes, tuple(str(shape.dtype) for shape in shapes), reduction, splits))
    return found


def disagreement(schedules: Sequence[Sequence[Event]]) -> str:
    """Why the schedules of ranks do not fit each other; "" where they do.

    Runs all ranks against each other: a collective happens when it is next on all ranks of its group.
    """
    waiting = [list(schedule) for schedule in schedules]
    while any(waiting):
        heads = [own[0] for own in waiting if own]
        ready = [e for e in heads if all(waiting[r] and waiting[r][0].ranks == e.ranks for r in e.ranks)]
        if not ready:
            return f"blocked: {[own[0] if own else None for own in waiting]}"
        together = [waiting[r].pop(0) for r in ready[0].ranks]
        problem = _mismatch(together)
        if problem:
            return f"{problem}: {together}"
    return ""


def _mismatch(together: Sequence[Event]) -> str:
    first = together[0]
    if any((e.kind, e.dtypes, e.reduction) != (first.kind, first.dtypes, first.reduction) for e in together):
        return "different collectives"
    if first.kind == "alltoall_base_":
        for i, sender in enumerate(together):
            for j, receiver in enumerate(together):
                if sender.splits[1] and receiver.splits[0] and sender.splits[1][j] != receiver.splits[0][i]:
                    return f"{i} sends {sender.splits[1][j]} to {j}, which expects {receiver.splits[0][i]}"
    elif any(e.sizes != first.sizes for e in together):
        return "different sizes"
    return ""
