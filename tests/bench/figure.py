"""What a measurement comes to: rows of the table, and the few statistics they are made of.

Owns the words of a row and when it is over its bar. Must not measure anything.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository, for programs that are started from here."""

_never = threading.Event()


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure. `bar` is the most it may be; None for one that only explains another."""

    what: str
    measured: float
    unit: str
    bar: float | None = None
    how: str = ""
    """More about it: its spread, its parts, or why it was not measured."""

    @property
    def verdict(self) -> str:
        """`ok` or `over`; a figure that is not a number is over its bar: it was not measured."""
        if self.bar is None:
            return ""
        return "ok" if self.measured <= self.bar else "over"


def not_measured(what: str, why: str) -> Row:
    """A row that says why there is no figure. That counts as over the bar, whatever it was."""
    return Row(what, math.nan, "", 0, f"not measured: {why}")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def pause(seconds: float) -> None:
    """Let time pass where the passing of time is what is measured."""
    _never.wait(seconds)


def busy_cores(seconds: float = 0.4) -> float:
    """How many cores others keep busy just now, while this process waits."""
    before = _busy_ticks()
    pause(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """User, nice, system, interrupts and stolen time of all cores (proc_stat(5))."""
    words = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) for word in words[:8])
    return user + nice + system + irq + softirq + steal


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [("figure", "measured", "bar", "", "how")]
    for row in rows:
        bar = "" if row.bar is None else f"<= {row.bar:g} {row.unit}".rstrip()
        lines.append((row.what, f"{row.measured:.4g} {row.unit}".rstrip(), bar, row.verdict, row.how))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in lines
    )
