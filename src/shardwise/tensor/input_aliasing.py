"""Which inputs of a compiled program share memory. Knows DTensors by their locals and what they are copies of."""

from __future__ import annotations

import itertools
from typing import Any

from shardwise.dispatch.views import OUTSIDE
from shardwise.fabric.virtual import parts_of
from shardwise.torch_private import TracingContext

__all__ = ["first_sharing"]

Span = tuple[int, int, int]  # a storage, and the first and the last element in it


def first_sharing(tensor: Any, kind: type) -> Any:
    """Of the inputs of this kind the first whose memory reaches, input by input, into that of `tensor`; else itself.

    The compiler sees by the storage which inputs share memory. Where one of those is written to it has no code for
    tensors like ours, and says so.
    """
    context: Any = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return tensor
    inputs = [t for t in context.tensor_to_context if isinstance(t, kind)]
    traced = [context.fake_mode.fake_tensor_converter._get_memo(t) for t in inputs]
    reached = [at for at, fake in enumerate(traced) if fake is tensor]
    memory = [_spans(t) for t in inputs]
    for at in reached:  # which grows
        near = [i for i, spans in enumerate(memory) if i not in reached and _overlap(spans, memory[at])]
        reached.extend(near)
    return traced[min(reached)] if reached else tensor


def _spans(tensor: Any) -> list[Span]:
    """Which memory a DTensor, or what it is a copied view of, lies in here."""
    while tensor._copied_view not in (None, OUTSIDE):
        tensor = tensor._copied_view.args[0]
    spans = []
    for part in parts_of(tensor._local_tensor):
        first = part.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        spans.append((part.untyped_storage()._cdata, first, last if part.numel() else -1))
    return spans


def _overlap(one: list[Span], other: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2] for a, b in itertools.product(one, other))
