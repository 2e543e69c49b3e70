"""Names and numbers of things for people. Knows nothing of what they are of."""

from __future__ import annotations

__all__ = ["operator_text", "plural"]


def plural(count: int, one: str) -> str:
    """A number of things.

    Example:
        >>> plural(1, "collective"), plural(3, "collective")
        ('1 collective', '3 collectives')
    """
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def operator_text(name: str) -> str:
    """An operator without its overload, as one speaks of it.

    Example:
        >>> operator_text("aten.mm.default"), operator_text("aten.sum.dim_IntList"), operator_text("redistribute")
        ('aten.mm', 'aten.sum', 'redistribute')
    """
    return ".".join(name.split(".")[:2])
