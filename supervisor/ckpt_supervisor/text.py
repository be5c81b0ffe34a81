"""How sizes and names are written for people.

Owns the spelling only. Pure, imports nothing of ours, and must not decide what is shown: the store's reasons, the supervisor's
lines and ckptctl's tables all write these in the same way.
"""

from __future__ import annotations


def size_text(count: int) -> str:
    """A number of bytes: 1.2 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def time_text(ms: int) -> str:
    """A duration: 40 ms, 2.1 s, 45 s, 2 min, 1 h 53 min."""
    ms = max(0, ms)
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f} s" if ms < 10_000 else f"{ms // 1_000} s"
    minutes = ms // 60_000
    rest = f" {minutes % 60} min" if minutes % 60 else ""
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h{rest}"


def one_line(text: str) -> str:
    """Text that holds names from a disk, as one line that a terminal shows and does not obey: a name may hold anything."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
