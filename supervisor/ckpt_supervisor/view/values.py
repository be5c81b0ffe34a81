"""Values of a journal's line, checked: a file may hold anything.

Owns what counts as a number, a text and a set of ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NUMBER_MAX = 1 << 53
TEXT_MAX = 2_000


def number(value: object) -> int | None:
    """A whole number that somebody may have meant; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and -NUMBER_MAX < value < NUMBER_MAX else None


def text(value: object) -> str:
    """A text of bounded length, "" for anything else."""
    return value[:TEXT_MAX] if isinstance(value, str) else ""


def ranks_of(line: dict[str, Any], most: int) -> Iterator[int]:
    """The ranks that a line is about: `rank`, or `ranks` as [3, "8-15"]; so many at most."""
    one = number(line.get("rank"))
    if one is not None and one >= 0:
        yield one
        return
    count = 0
    parts = line.get("ranks")
    for part in parts if isinstance(parts, list) else ():
        first, dash, last = str(part).partition("-")
        if not (first.isascii() and first.isdecimal() and len(first) < 10):
            continue
        until = int(last) if dash and last.isascii() and last.isdecimal() and len(last) < 10 else int(first)
        for rank in range(int(first), until + 1):
            if count >= most:
                return
            count += 1
            yield rank
