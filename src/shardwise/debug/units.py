"""Bytes, seconds and operators for people. Knows nothing of what they are of."""

from __future__ import annotations

__all__ = ["bytes_text", "operator_text", "plural", "seconds_text"]


def bytes_text(count: float) -> str:
    """Bytes, in 1024s.

    Example:
        >>> bytes_text(512), bytes_text(3 * 2**29), bytes_text(33292288)
        ('512 B', '1.5 GiB', '31.8 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = max((p for p in range(len(units)) if count >= 1024**p), default=0)
    return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:.1f} {units[power]}"


def seconds_text(seconds: float) -> str:
    """Seconds.

    Example:
        >>> seconds_text(2.5), seconds_text(0.0284), seconds_text(4e-5), seconds_text(0)
        ('2.50 s', '28.4 ms', '40.0 us', '0')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us" if seconds else "0"


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
