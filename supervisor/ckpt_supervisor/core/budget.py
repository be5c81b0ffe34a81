"""How the time until the kill is shared. Pure integers of milliseconds; cut once per look, backwards from the kill.

Must not know phases or causes: it gets an instant and gives instants. Why backwards: what comes last (the requeue) is what
brings the job back, so its share is set aside first (docs/slurm.md, section 2).
"""

from __future__ import annotations

import dataclasses

OUT_MARGIN_MS = 500
"""The supervisor means to be out this long before the kill."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Deadlines of one leave: each phase has to be over by its own; all on the monotonic clock."""

    save_by_ms: int
    verify_by_ms: int
    leave_by_ms: int
    out_by_ms: int


def cut(now_ms: int, kill_at_ms: int, verify_ms: int = 0, *, requeues: bool = True) -> Budget:
    """Shares of the time from now to the kill. Never negative: with too little time all deadlines are now.

    `verify_ms`: what verification and commit have taken before, 0 if that is not known; with a quarter and a second more they
    get it, if that is not too much. Not `requeues`: somebody else has ended the job or had it requeued: it is only left.
    """
    left_ms = max(0, kill_at_ms - now_ms)
    margin_ms = min(OUT_MARGIN_MS, left_ms // 10)
    requeue_ms = _share(left_ms, 15, 600, 3_000) if requeues else _share(left_ms, 5, 300, 1_000)  # To see all out.
    unknown_ms = _share(left_ms, 12, 500, 10_000)
    measured_ms = min(max(500, min(verify_ms * 2, verify_ms * 5 // 4 + 1_000)), left_ms // 4)
    verify_ms = measured_ms if verify_ms else unknown_ms
    leave_ms = _share(left_ms, 5, 200, 2_000)
    out_by_ms = kill_at_ms - margin_ms
    leave_by_ms = out_by_ms - requeue_ms
    verify_by_ms = leave_by_ms - leave_ms
    save_by_ms = verify_by_ms - verify_ms
    return Budget(
        save_by_ms=max(now_ms, save_by_ms),
        verify_by_ms=max(now_ms, verify_by_ms),
        leave_by_ms=max(now_ms, leave_by_ms),
        out_by_ms=max(now_ms, out_by_ms),
    )


def _share(left_ms: int, percent: int, least_ms: int, most_ms: int) -> int:
    """A percentage within bounds, but never more than a quarter of what is left."""
    return min(max(least_ms, min(most_ms, left_ms * percent // 100)), left_ms // 4)
