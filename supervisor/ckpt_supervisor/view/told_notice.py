"""The notice of an attempt, as the journal tells it: again whenever its cause or its time is known better.

Owns how those words become one notice. Pure. Its times count from the first word on, its cause is the last one that says more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ckpt_supervisor.view.facts import Notice
from ckpt_supervisor.view.values import number, text

REQUEUED = "requeued already"
BY_SLURM = frozenset({"preempted", "time limit reached", "end of the time limit ahead", "node failure"})
"""Slurm requeues by itself what it has ended for these: that it has is no cause of its own."""

_MS = 1_000_000
_TIMES = ("left_ms", "save_left_ms", "verify_left_ms", "leave_left_ms", "out_left_ms")


def told_again(before: Notice | None, line: dict[str, Any], at_ns: int) -> Notice:
    """The notice after this line of it."""
    cause, by = text(line.get("cause")), text(line.get("by"))
    times = {key: number(line.get(key)) for key in _TIMES}
    if before is None:
        return msgspec.structs.replace(Notice(at_ns, by, cause, None), **times)
    if not cause or (cause == REQUEUED and before.cause in BY_SLURM):
        cause = before.cause
    spent_ms = (at_ns - before.at_ns) // _MS
    return msgspec.structs.replace(
        before,
        cause=cause,
        first_cause=before.first_cause or (before.cause if cause != before.cause else ""),
        **{key: left + spent_ms for key, left in times.items() if left is not None},
    )
