"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(n: int | float, noun: str, plural: str | None = None) -> str:
    """`1 GPU`, `0 jobs`."""
    return f"{n:g} {noun if n == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], total: int | None = None) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    names, more = list(names), (total or len(names)) - len(names)
    if more > 0:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def data_size(size_bytes: float) -> str:
    """`512 bytes`, `1.5 MB`, `98 GB`."""
    if size_bytes < 1000:
        return counted(size_bytes, "byte")
    for unit in ("kB", "MB", "GB", "TB"):
        size_bytes /= 1000
        if size_bytes < 999.5 or unit == "TB":
            break
    return f"{size_bytes:.1f} {unit}" if size_bytes < 9.95 else f"{size_bytes:.0f} {unit}"


def spoken(seconds: float) -> str:
    """A duration as people say it: `45 s`, `20 min`, `2.5 h`, `3 d`."""
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2 if unit == "d" else 1) * length_s:
            value = seconds / length_s
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0") + f" {unit}"
    return f"{max(seconds, 0.0):.3g} s"
