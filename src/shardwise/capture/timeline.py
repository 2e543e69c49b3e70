"""A program as a picture: which line runs when, which collectives are in flight, and the memory meanwhile."""

from __future__ import annotations

from shardwise.capture.call_sites import NOWHERE
from shardwise.capture.memory_plan import memory_plan
from shardwise.capture.program import Program
from shardwise.debug.pictures.draw_timeline import Span, Timeline
from shardwise.text import human_bytes, plural

__all__ = ["timeline_of"]


def timeline_of(program: Program) -> Timeline:
    """The operators of a program by phase, its collectives by axis, and its memory, in the order of its calls."""
    memory, found = memory_plan(program), program.communication()
    lanes: dict[str, list[Span]] = {"operators": _operators(program)}
    index = {position: at for at, (position, _) in enumerate(program.calls)}
    positions = sorted(index)
    for each in found:
        later = next((position for position in positions if position >= each.position), None)
        at = len(program.calls) - 1 if later is None else index[later]
        words = f"{each.kind.replace('_', '-')}, {human_bytes(each.received)} received, {each.site.comment()}"
        lanes.setdefault(f"over {each.over}", []).append(Span(at, at + 1, each.kind.replace("_", "-"), words))
    received = sum(each.received for each in found)
    subtitle = (
        f"{plural(len(program.calls), 'call')} · {plural(len(found), 'collective')} · {human_bytes(received)} received "
        f"by a rank · {human_bytes(memory.peak)} of its own at the peak"
    )
    return Timeline(
        program.name, subtitle, len(program.calls), tuple((n, tuple(spans)) for n, spans in lanes.items()), memory.curve
    )


def _operators(program: Program) -> list[Span]:
    """Consecutive operators of one line as one span."""
    spans: list[Span] = []
    for at, (position, _) in enumerate(program.calls):
        site = program.facts.sites.get(position, NOWHERE)
        title = site.comment() + (f" ({site.module})" if site.module else "")
        if spans and spans[-1].title == title:
            spans[-1] = spans[-1]._replace(last=at + 1)
        else:
            spans.append(Span(at, at + 1, site.phase, title))
    return spans
