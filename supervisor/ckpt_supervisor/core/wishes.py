"""What the owner of the job asks for from outside, while it runs (`ckptctl save`).

Pure. Owns the wish to leave after the next save, and another interval. A save at once is as SIGUSR2's. Must not cost a step: the
round that the job leaves after is a leave round from its beginning, so that no rank trains on after its save; if that save does
not make it, training goes on and the wish stays.
"""

from __future__ import annotations

from msgspec.structs import replace

from ckpt_supervisor.core import interval
from ckpt_supervisor.core.budget import cut
from ckpt_supervisor.core.events import Asked, Meaning
from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import Notice, State


def asked(policy: Policy, state: State, event: Asked, now_ms: int) -> State:
    """Note a wish."""
    if event.what == "leave_after_save":
        return replace(state, leave_asked=event)
    state = replace(state, asked_every_ms=event.every_ms, asked_auto=event.every_ms is None)
    return interval.with_next(policy, state, now_ms)


def leaving_round(policy: Policy, state: State, now_ms: int) -> State:
    """The state in which the round that begins now is the last one, if that was asked for."""
    if state.leave_asked is None or state.notice is not None or policy.heir:
        return state
    kill_at_ms = now_ms + policy.save_timeout_ms + policy.kill_wait_ms
    notice = Notice(
        name=state.leave_asked.who or "ckptctl save --leave",
        meaning=Meaning.LEAVE,
        first_ms=now_ms,
        kill_at_ms=kill_at_ms,
        budget=cut(now_ms, kill_at_ms),
        cause=Cause.ASKED,
        looked=True,
        deadline_known=True,
        signals=0,
    )
    return replace(state, notice=notice)


def not_saved(state: State) -> State:
    """That save did not make it: training goes on, unless there is another reason to leave by now (notices.signalled)."""
    notice = state.notice
    return replace(state, notice=None) if notice is not None and notice.cause is Cause.ASKED else state
