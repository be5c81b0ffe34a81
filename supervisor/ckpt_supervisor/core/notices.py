"""Notices: a signal or the end of the job's time says that the supervisor has to leave; a look says why and until when.

Pure. Owns the notice and the clock of looks. The cause comes from the job's state, never from the signal's number, and is looked
at again on every further signal (docs/slurm.md, sections 1 to 3). Must not start or end rounds: the machine does.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from ckpt_supervisor.core import interval
from ckpt_supervisor.core.budget import cut
from ckpt_supervisor.core.commands import Command, LookUp
from ckpt_supervisor.core.events import Looked, Meaning, SignalCame
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.policy import Cause, Policy, Reading, lead_ms, read, runs
from ckpt_supervisor.core.state import Notice, Phase, State
from ckpt_supervisor.core.views import JobView, NoView

RELOOKS_MS = (100, 300, 1_000)
"""When the state does not explain a signal, look again after these: the first look may be 60 ms too early."""

TURN_RELOOKS = 2
"""A notice signal is taken for a rehearsal only after this many further looks."""

BY_OTHERS = (Cause.CANCELLED, Cause.REQUEUED)
"""Nothing is left to ask Slurm for: the share of the requeue is the save's."""

CUT_AGAIN_MS = 1_000
"""A kill that has moved by less keeps its budget: cut anew at every look, the shares that come last would melt away."""

REFRESH_MS = 300_000
"""The job's end time is looked at this often when nothing happens: `scontrol update TimeLimit` moves it."""

FIRST_RETRY_MS = 5_000
"""Pause before the next look when the one at the start failed."""

LATE_MS = 1_500
"""For what a rank does between the end of a helper it waited for and its save."""

LINGER_MS = 10_000
"""With --linger training goes on after the save only if so much is left before the watch begins the last one."""

WATCH_LOOK_MS = 3_000
"""The watch looks once more this long before it starts the last save."""

REVIVE_CHECK_STALE_MS = 60_000
"""Never more than one look a minute when nothing happens."""


def signalled(policy: Policy, state: State, event: SignalCame, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Note a signal that asks to leave, and ask why it came."""
    notice = state.notice
    is_term = event.meaning in (Meaning.LEAVE, Meaning.INTERRUPT)
    if notice is None:
        kill_at_ms = now_ms + (policy.kill_wait_ms if policy.slurm else policy.grace_ms)
        notice = Notice(
            name=event.name,
            meaning=event.meaning,
            first_ms=now_ms,
            kill_at_ms=kill_at_ms,
            budget=cut(now_ms, kill_at_ms, state.verify_ms),
            cause=Cause.UNKNOWN if policy.slurm else Cause.LOCAL,
            term_ms=now_ms if is_term else None,
            end_term_ms=now_ms if is_term else None,
            interrupts=int(event.meaning is Meaning.INTERRUPT),
        )
    else:
        # By its owner; now by somebody else, unless it is what our own requeue has brought about.
        was_asked = notice.cause is Cause.ASKED and (state.requeue is None or not state.requeue.calls)
        notice = dataclasses.replace(
            notice,
            name=event.name if was_asked else notice.name,
            cause=notice.cause if not was_asked else Cause.UNKNOWN if policy.slurm else Cause.LOCAL,
            meaning=Meaning.LEAVE if is_term else notice.meaning,
            signals=notice.signals + 1,
            interrupts=notice.interrupts + int(event.meaning is Meaning.INTERRUPT),
            term_ms=notice.term_ms if notice.term_ms is not None or not is_term else now_ms,
            end_term_ms=now_ms if is_term and _is_stale(state, notice.end_term_ms) else notice.end_term_ms,
            relooks=0,
        )
        if is_term:
            notice = _nearer(policy, state, notice, now_ms)
    return look(policy, replace(state, notice=notice), f"signal {event.name}", now_ms)


def inherited(state: State, kill_at_ms: int | None, now_ms: int) -> State:
    """An heir takes a notice over that came a while ago: the time that is left is cut from now on."""
    notice = state.notice
    assert notice is not None
    kill_at_ms = notice.kill_at_ms if kill_at_ms is None else min(notice.kill_at_ms, kill_at_ms)
    notice = dataclasses.replace(notice, kill_at_ms=kill_at_ms, budget=cut(now_ms, kill_at_ms, state.verify_ms))
    return replace(state, notice=notice, asked_ms=now_ms if state.looking else state.asked_ms)


def _nearer(policy: Policy, state: State, notice: Notice, now_ms: int) -> Notice:
    """A further SIGTERM: until a look says otherwise it is that of the end, a scancel or a requeue, and KillWait runs from it.

    A look can take longer than KillWait, or fail; waited for without this, it costs the way out.
    """
    kill_at_ms = now_ms + (policy.kill_wait_ms if policy.slurm else policy.grace_ms)
    if kill_at_ms > notice.kill_at_ms - CUT_AGAIN_MS:
        return notice
    budget = cut(now_ms, kill_at_ms, state.verify_ms)
    return dataclasses.replace(notice, kill_at_ms=kill_at_ms, budget=budget, deadline_known=False)


def ahead(policy: Policy, state: State, now_ms: int) -> State:
    """The job's end is near: the notice that nobody sent."""
    end_at_ms = state.end_at_ms if state.end_at_ms is not None else now_ms
    kill_at_ms = max(now_ms, end_at_ms) + policy.kill_wait_ms
    # Planned to be out before the limit; KillWait stays in reserve (after the limit the requeue still works, but late).
    notice = Notice(
        name="end-time watch",
        meaning=Meaning.LEAVE,
        first_ms=now_ms,
        kill_at_ms=kill_at_ms,
        budget=cut(now_ms, kill_at_ms, state.verify_ms),
        cause=Cause.LIMIT_AHEAD,
        looked=True,
        signals=0,
    )
    return replace(state, notice=notice)


def look(policy: Policy, state: State, why: str, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Ask about the job; one look at a time."""
    if not policy.can_look:
        return state, ()
    if state.looking:
        # An heir's look that still waits its turn will show what is the case by then.
        waits = state.asked_ms is not None and now_ms < state.asked_ms + policy.heir_waits_ms
        return (state if waits else replace(state, look_again=True)), ()
    # Heirs ask one after the other: the controller is not asked by a thousand at once, and the first one's requeue is seen.
    return replace(state, looking=True, look_again=False, asked_ms=now_ms), (LookUp(why, policy.heir_waits_ms),)


def looked(policy: Policy, state: State, event: Looked, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Take in what a look gave: end time, cause, kill time. `notice` becomes None when no end is in sight after all."""
    state = replace(state, looking=False)
    again = state.look_again
    match event.view:
        case NoView(definite=definite):
            pause_ms = REFRESH_MS if definite else REVIVE_CHECK_STALE_MS if state.looked_ms is not None else FIRST_RETRY_MS
            state = replace(state, next_look_ms=now_ms + pause_ms)
            state = _relook(state, now_ms)
        case JobView() as view:
            state = _seen(policy, state, view, now_ms)
            known = dataclasses.replace(policy, start_restarts=state.start_restarts)
            earlier = state.notice.preempt_ms if state.notice else None
            state = _explained(policy, state, read(view, known, now_ms, earlier, _since_ms(state, now_ms)), view, now_ms)
    if again:
        return look(policy, state, "a signal came during the look", now_ms)
    return state, ()


def recalled(policy: Policy, state: State, history: History, now_ms: int) -> State:
    """What earlier attempts came to is known: how long saves take, and how often the run is interrupted."""
    longest_ms = max((state.longest_save_ms, history.tried_ms, *history.saves_ms))
    state = replace(state, history=history, longest_save_ms=longest_ms)
    # The first save by time is still due an interval from the begin.
    return state if state.next_save_ms is None else interval.with_next(policy, state, state.began_ms)


def _since_ms(state: State, now_ms: int) -> int:
    """The latest instant at which the end of the job can have begun, as seen by the look that is over now: with a SIGTERM that
    has come, but after the newest look that still saw the job run."""
    asked_ms = now_ms if state.asked_ms is None else state.asked_ms
    term_ms = state.notice.end_term_ms if state.notice is not None else None
    if term_ms is None:
        return asked_ms
    return min(asked_ms, term_ms if state.ran_ms is None else max(term_ms, state.ran_ms))


def _is_stale(state: State, term_ms: int | None) -> bool:
    """Whether the job was seen to run after this SIGTERM, so that a later one may be the one of its end."""
    return term_ms is None or (state.ran_ms is not None and term_ms <= state.ran_ms)


def _seen(policy: Policy, state: State, view: JobView, now_ms: int) -> State:
    """End time and number of restarts. The first look of a running job settles how often it had been restarted."""
    start = max(policy.start_restarts, state.start_restarts)
    if state.looked_ms is None and view.state == "RUNNING" and state.notice is None:
        start = max(start, view.restarts)
    end_at_ms = None
    if view.state == "RUNNING" and view.end_ms is not None:
        end_at_ms = now_ms + view.end_ms - view.looked_ms
    return replace(
        state,
        start_restarts=start,
        held=view.held,
        looked_ms=now_ms,
        ran_ms=state.asked_ms if runs(view) else state.ran_ms,
        end_at_ms=end_at_ms,
        end_seen_ms=now_ms if state.end_at_ms is None else state.end_seen_ms,
        next_look_ms=now_ms + REFRESH_MS,
    )


def _explained(policy: Policy, state: State, reading: Reading, view: JobView, now_ms: int) -> State:
    notice = state.notice
    if notice is None:
        # A job that is being preempted or ended although no signal came (not under srun): the look is the notice.
        if reading.explained and reading.kill_at_ms is not None:
            notice = Notice(
                name=f"job state {view.state}",
                meaning=Meaning.LEAVE,
                first_ms=now_ms,
                kill_at_ms=reading.kill_at_ms,
                budget=cut(now_ms, reading.kill_at_ms, state.verify_ms, requeues=reading.cause not in BY_OTHERS),
                cause=reading.cause,
                signals=0,
                looked=True,
                deadline_known=True,
                preempt_ms=view.preempt_ms,
            )
            return replace(state, notice=notice)
        return state
    may_turn = notice.meaning is Meaning.NOTICE and state.phase.value < Phase.LEAVING.value
    if may_turn and not reading.explained and _far(policy, reading, now_ms, state.longest_save_ms):
        if notice.relooks < TURN_RELOOKS:
            return _relook(state, now_ms)  # The first look may be too early; the save is running meanwhile.
        return replace(state, notice=None)
    # A job on its way out explains its own SIGTERM, not an earlier one: a step limit's kill, say, still comes in its time.
    known = notice.deadline_known or (notice.looked and not runs(view))
    kill_at_ms = _kill_at_ms(policy, dataclasses.replace(notice, deadline_known=known), reading, now_ms)
    cause = _cause(policy, notice, reading, now_ms)
    # Once it leaves the shares are what they were: the save is over, and the way out counts on them.
    is_same = (cause in BY_OTHERS) is (notice.cause in BY_OTHERS) or state.phase.value >= Phase.LEAVING.value
    is_cut = is_same and abs(kill_at_ms - notice.kill_at_ms) < CUT_AGAIN_MS
    notice = dataclasses.replace(
        notice,
        cause=cause,
        kill_at_ms=kill_at_ms,
        budget=notice.budget if is_cut else cut(now_ms, kill_at_ms, state.verify_ms, requeues=cause not in BY_OTHERS),
        looked=True,
        deadline_known=notice.deadline_known or reading.explained,
        preempt_ms=view.preempt_ms if reading.cause is Cause.PREEMPTED and notice.preempt_ms is None else notice.preempt_ms,
    )
    state = replace(state, notice=notice)
    # A job that looks cancelled may be one that Slurm is just about to requeue: that too is looked at again. So is a grace that
    # goes on although a further signal came: it may be a scancel that the controller has not written down yet.
    still_grace = reading.cause is Cause.PREEMPTED and runs(view) and notice.signals > 1
    again = not reading.explained or reading.cause is Cause.CANCELLED or still_grace
    return _relook(state, now_ms) if again else state


def _cause(policy: Policy, notice: Notice, reading: Reading, now_ms: int) -> Cause:
    """The cause as of this look. A SIGTERM long before the job's end is not that of its limit, whatever it is of."""
    if not reading.explained and notice.cause not in (Cause.UNKNOWN, Cause.LIMIT_AHEAD, Cause.NO_END):
        return notice.cause
    if reading.explained or notice.term_ms is None or reading.kill_at_ms is None:
        return reading.cause
    is_far = reading.kill_at_ms - policy.kill_wait_ms - now_ms > policy.notice_horizon_ms
    return Cause.NO_END if is_far else reading.cause


def _kill_at_ms(policy: Policy, notice: Notice, reading: Reading, now_ms: int) -> int:
    """The kill: the first look that explains the signal replaces the guess, later ones only bring it nearer.

    TERM without a reason means KillWait, until a reason is seen.
    """
    found_ms = reading.kill_at_ms
    if not reading.explained and notice.term_ms is not None:
        found_ms = notice.term_ms + policy.kill_wait_ms
    if found_ms is None:
        found_ms = notice.first_ms + policy.kill_wait_ms
    return min(notice.kill_at_ms, found_ms) if notice.deadline_known else max(found_ms, now_ms)


def _far(policy: Policy, reading: Reading, now_ms: int, longest_save_ms: int) -> bool:
    """Whether a notice signal came with no end in sight, as when a person rehearses with `scancel --signal`.

    With the watch off a far end still counts as a notice: nobody else would save before it. With --linger any end is far before
    which the watch has still time to begin the last save itself.
    """
    if reading.kill_at_ms is None:
        return True
    lead = lead_ms(policy, longest_save_ms)
    if lead is None:
        return False
    horizon_ms = min(policy.notice_horizon_ms, lead + LINGER_MS) if policy.lingers else policy.notice_horizon_ms
    return reading.kill_at_ms - policy.kill_wait_ms - now_ms > horizon_ms


def _relook(state: State, now_ms: int) -> State:
    notice = state.notice
    if notice is None or notice.signals == 0 or notice.relooks >= len(RELOOKS_MS):
        return state
    relook_ms = now_ms + RELOOKS_MS[notice.relooks]
    return replace(state, notice=dataclasses.replace(notice, relook_ms=relook_ms, relooks=notice.relooks + 1))


def due(policy: Policy, state: State, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Start the looks that are due."""
    notice = state.notice
    if notice is not None:
        if notice.relook_ms is not None and now_ms >= notice.relook_ms:
            state = replace(state, notice=dataclasses.replace(notice, relook_ms=None))
            return look(policy, state, "the state did not explain the signal", now_ms)
        return state, ()
    if state.looking:
        return state, ()
    when_ms = _next_look_ms(policy, state)
    if when_ms is not None and now_ms >= when_ms:
        state = replace(state, next_look_ms=now_ms + REFRESH_MS)
        return look(policy, state, "end time", now_ms)
    return state, ()


def watch_at_ms(policy: Policy, state: State) -> int | None:
    """When the last save has to begin by the job's end time; never in the first half of the time that was left at first sight."""
    lead = lead_ms(policy, state.longest_save_ms)
    if not policy.slurm or lead is None or state.end_at_ms is None or state.notice is not None:
        return None
    half_ms = state.end_seen_ms + max(0, state.end_at_ms - state.end_seen_ms) // 2
    return max(state.end_at_ms - lead, half_ms)


def watch_is_due(policy: Policy, state: State, now_ms: int) -> bool:
    """Whether the end-time watch calls for the last save now; it has looked shortly before, or cannot look."""
    when_ms = watch_at_ms(policy, state)
    return when_ms is not None and now_ms >= when_ms and not state.looking


def _next_look_ms(policy: Policy, state: State) -> int | None:
    """When the end time is looked at next: regularly, and once shortly before the watch acts."""
    if not policy.can_look:
        return None
    when_ms = watch_at_ms(policy, state)
    before_ms = None if when_ms is None else when_ms - WATCH_LOOK_MS
    # Once, whatever comes of it: a controller that is down is not asked over and over.
    if before_ms is not None and (state.asked_ms is None or state.asked_ms < before_ms):
        return before_ms if state.next_look_ms is None else min(before_ms, state.next_look_ms)
    return state.next_look_ms


def ranks_are_late(state: State, now_ms: int) -> bool:
    """The last moment for a save has come, and somebody does not stand at the agreed step yet: something may hold it up.

    Not sooner: whoever waits for a helper of its own may just have to wait a little. Not before half of the time is over.
    A rank's listener answers Prepare, and the step is fixed, even where its training thread hangs.
    """
    notice, current = state.notice, state.round
    if notice is None or current is None or current.go or state.phase not in (Phase.AGREEING, Phase.SAVING):
        return False
    last_ms = notice.budget.save_by_ms - state.longest_save_ms * 3 // 2 - LATE_MS
    return now_ms >= max(last_ms, (notice.first_ms + notice.budget.save_by_ms) // 2)


def next_deadline(policy: Policy, state: State) -> int | None:
    """When `due` or the watch has something to do."""
    if state.notice is not None:
        return state.notice.relook_ms
    if state.looking:
        return None
    times = [time for time in (_next_look_ms(policy, state), watch_at_ms(policy, state)) if time is not None]
    return min(times, default=None)
