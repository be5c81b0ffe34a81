"""Whether a job may come back at all: the budgets of requeues, and the brake on attempts that get nowhere.

Pure. Owns that question for every cause; the way back is leaving.py's. Why a brake: a job that is requeued again and again and
never gets to a new checkpoint uses up a cluster and its owner's share for nothing, and nobody looks at it. An attempt that was
interrupted before it had its time is no such attempt, and preemptions and node failures have no budget.
"""

from __future__ import annotations

from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import State

HAD_TIME_MS = 60_000
"""An attempt that trained for so long had its time."""

OF_THE_LIMIT = (Cause.LIMIT_AHEAD, Cause.TIME_LIMIT)


def barred(policy: Policy, state: State) -> str:
    """Why this job is not to be requeued now, for people; "" if it may be."""
    notice, history = state.notice, state.history
    if state.leave_asked is not None and not state.leave_asked.requeue:
        return f"its owner asked it to leave ({state.leave_asked.who or 'ckptctl save --leave'})"
    if notice is None:
        return ""
    if notice.cause in OF_THE_LIMIT and policy.max_timeouts is not None and history.timeouts >= policy.max_timeouts:
        return f"its time limit has ended it {history.timeouts + 1} times now, and --max-timeouts is {policy.max_timeouts}"
    in_a_row = history.stalled + 1
    if policy.max_stalled is not None and in_a_row > policy.max_stalled and is_stalled(state):
        return (
            f"{in_a_row} attempts in a row had their time and committed nothing new (--max-stalled {policy.max_stalled}): "
            "look at why with ckptctl log, save more often (--every), or give it more time"
        )
    return ""


def is_stalled(state: State) -> bool:
    """Whether this attempt had its time and has committed nothing newer than it resumed from."""
    if state.committed_here and state.committed_step > state.began_step:
        return False
    if state.notice is not None and state.notice.cause is Cause.CRASHED:
        return True
    until_ms = None if state.notice is None else state.notice.first_ms
    return state.attached_ms is not None and until_ms is not None and until_ms - state.attached_ms >= HAD_TIME_MS
