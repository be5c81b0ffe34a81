"""Spans, numbers and instants as the report writes them.

Owns their spelling, for people and for a chart's axis. Pure.
"""

from __future__ import annotations

import collections
from datetime import datetime, timedelta, timezone

from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.progress import span_text

NUMBER_MAX = 2**53
"""A browser counts no further without loss; a journal may say anything."""

NS_MAX = 253_370_764_800 * 10**9
"""The year 9999."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
UNKNOWN = "not known"


class Names:
    """What attempts are called, as `ckptctl why --attempt` takes it: 3, or 3#7 where several starts are attempt 3."""

    def __init__(self, run: Run) -> None:
        self._starts = collections.Counter((one.job, one.attempt) for one in run.attempts)

    def __call__(self, one: Attempt) -> str:
        """The name of this one."""
        return str(one.attempt) if self._starts[one.job, one.attempt] <= 1 else f"{one.attempt}#{one.epoch}"


def is_sane(number: object) -> bool:
    """Whether it is a whole number that a chart can show."""
    return isinstance(number, int) and 0 <= number <= NUMBER_MAX


def _at(ns: int) -> datetime:
    return _EPOCH + timedelta(microseconds=min(max(ns, 0), NS_MAX) // 1_000)


def instant(ns: int | None) -> str:
    """For people: 2026-01-31 12:00:05."""
    return UNKNOWN if ns is None else f"{_at(ns):%Y-%m-%d %H:%M:%S}"


def axis_instant(ns: int) -> str:
    """For a time axis, which takes it as it stands: no zone, so UTC whatever the browser's own is."""
    return _at(ns).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def span(ms: float | None) -> str:
    """A duration: 120 ms, 4.2 s, 2 min 05 s, 1 h 12 min, 3 d 4 h."""
    if ms is None:
        return UNKNOWN
    if ms < 0:
        return f"-{span(-ms)}"
    if ms < 1_000:
        return f"{ms:.0f} ms"
    if ms < 10_000:
        return f"{ms / 1_000:.1f} s"
    hours = int(ms // 3_600_000)
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else span_text(ms / 1_000)


def count(number: int | None) -> str:
    """A whole number with its thousands apart: 61,200."""
    return UNKNOWN if number is None else f"{number:,}"


def counted(number: int, word: str, more: str = "") -> str:
    """1 save, 3 saves; `more` where the plural is another word."""
    return f"{number:,} {word if number == 1 else more or word + 's'}"


def listed(parts: list[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
