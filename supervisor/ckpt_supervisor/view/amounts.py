"""Instants, spans of time, shares and counts as the timeline and `ckptctl why` write them.

Owns their spelling only. Pure.
"""

from __future__ import annotations

from datetime import datetime, timezone


def iso(at_ns: int | None) -> str | None:
    """RFC 3339, UTC, microseconds."""
    stamp = _moment(at_ns)
    return None if stamp is None else stamp.isoformat(timespec="microseconds").replace("+00:00", "Z")


def instant(at_ns: int | None) -> str:
    """For people."""
    stamp = _moment(at_ns)
    return "?" if stamp is None else f"{stamp:%m-%d %H:%M:%S}"


def _moment(at_ns: int | None) -> datetime | None:
    try:
        return None if at_ns is None else datetime.fromtimestamp(at_ns // 1_000 / 1e6, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None


def span_text(ms: float) -> str:
    """A duration: 120 ms, 4.2 s, 2m 05s, 3h 12m, 2d 4h."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    seconds = ms / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, part, less in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{less}"
    return f"{whole} s"


def percent(share: float) -> str:
    """91 %, 0.4 %, 99.8 %: 100 only where it is all of it, 0 only where it is nothing."""
    of_100 = 100 * share
    if 0 < of_100 < 10 or 99 < of_100 < 100:
        return f"{min(99.9, max(0.1, of_100)):.1f} %"
    return f"{of_100:.0f} %"


def number(count: int) -> str:
    """With its thousands apart."""
    return f"{count:,}"


def counted(count: int, word: str) -> str:
    """1 save, 3 saves."""
    return f"{number(count)} {word}{'' if count == 1 else 's'}"
