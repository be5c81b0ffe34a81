"""Whether a job may come back at all: the budgets of requeues, and the brake on attempts that get nowhere.

Pure. Owns that question for every cause; the way back is leaving.py's. Why a brake: a job that is requeued again and again and
never gets to a new checkpoint uses up a cluster and its owner's share for nothing, and nobody looks at it. An attempt that was
interrupted before it had its time is no such attempt, and preemptions and node failures have no budget.
"""

from __future__ import annotations

from ckpt_supervisor.core.history import NONE
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
        return f"its time limit has ended it {_times(history.timeouts + 1)} now, and --max-timeouts is {policy.max_timeouts}"
    if notice.cause is Cause.CRASHED and history.crashes >= policy.max_crashes:
        return f"training has failed by itself {_times(history.crashes + 1)} now, and --max-crashes is {policy.max_crashes}"
    in_a_row = history.stalled + 1
    if policy.max_stalled is not None and in_a_row > policy.max_stalled and is_stalled(state):
        row = f"{in_a_row} attempts in a row had their" if in_a_row > 1 else "this attempt had its"
        return (
            f"{row} time and committed nothing new (--max-stalled {policy.max_stalled}): "
            "look at why with ckptctl log, save more often (--every), or give it more time"
        )
    return ""


def waits_until_ms(state: State) -> int | None:
    """Until when a job whose training has failed waits for what earlier attempts came to; None when it does not.

    A command that cannot even start fails before that is read, every time: it would never come to the end of its budget.
    """
    notice = state.notice
    if notice is None or notice.cause is not Cause.CRASHED or state.history is not NONE:
        return None
    return notice.budget.leave_by_ms


def is_stalled(state: State) -> bool:
    """Whether this attempt had its time and has committed nothing newer than it resumed from."""
    if state.committed_step > state.began_step:
        return False  # Also by a start before this one, in place.
    if state.notice is not None and state.notice.cause in (Cause.CRASHED, Cause.HUNG, *OF_THE_LIMIT):
        return True  # Also where no rank has attached: a start that takes longer than the limit would be tried for ever.
    until_ms = None if state.notice is None else state.notice.first_ms
    return state.attached_ms is not None and until_ms is not None and until_ms - state.attached_ms >= HAD_TIME_MS


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
