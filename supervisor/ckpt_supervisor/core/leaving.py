"""The way out: the requeue, and the exit status (docs/slurm.md, section 2).

Pure. Owns LEAVING and REQUEUEING; the command's end in them is parting.py's. The requeue comes last, once, after a fresh look;
never after a scancel; and nobody leaves before it is accepted and its SIGTERM has come, or it is definitely refused.
Unknown is not refused: then it stays.
"""

from __future__ import annotations

import dataclasses

from ckpt_client import wire
from msgspec.structs import replace

from ckpt_supervisor.core import comeback, forecast, notices, parting
from ckpt_supervisor.core.commands import CallRequeue, Command, Exit, Meet, Resubmit, to
from ckpt_supervisor.core.events import CommitResult, Committed, Looked, Met, RequeueResult, RequeueReturned, Resubmitted
from ckpt_supervisor.core.names import step_name
from ckpt_supervisor.core.policy import EXIT_CANCELLED, EXIT_INTERRUPTED, EXIT_STALE, NOT_LOOKED, Cause, Policy
from ckpt_supervisor.core.state import Asking, Phase, Requeue, State
from ckpt_supervisor.core.views import NoView

ASK_AFTER_MS = 1_000
"""Training that has not ended by then is left to end beside the requeue."""

REAP_MS = 2_000
"""A killed command that has not ended by then (uninterruptible sleep) does not hold the supervisor."""

TERM_MS = 3_000
"""Slurm's SIGTERM comes about 40 ms after an accepted requeue; without it the supervisor leaves after this long."""

MEET_MS = 2_000
"""The state directory has this long to answer; it is a convenience, and the requeue is not."""

MEET_AGAIN_MS = 200
"""Pause between looks at the job's other steps."""

PAUSES_MS = (300, 600, 1_200, 2_500, 5_000)
"""Pauses between tries of a requeue whose result is unknown."""

STAY_MS = 900_000
"""While Slurm has not answered the supervisor stays this long beyond the expected kill: leaving in a grace loses the job on
22.05, and no kill comes while the controller is away."""

OWN_END = "training ended by itself"

UNSAVED_MS = 60_000
"""Training that ran for so long and that no rank attached in would have had something to save."""

Commands = tuple[Command, ...]


def leave(policy: Policy, state: State, fresh: bool, reason: str, now_ms: int) -> tuple[State, Commands]:
    """Enter LEAVING: tell every rank, and set the command's last moment."""
    begun = parting.begun(policy, state, fresh, reason, now_ms)
    state = replace(state, phase=Phase.LEAVING, round=None, leaving=begun)
    return state, parting.say_leave(state)


def tick(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """What is due in LEAVING: repeat Leave, end the command, go on to the requeue."""
    state, commands = parting.see_out(policy, state, now_ms)
    leaving = state.leaving
    assert leaving is not None
    if leaving.own_end and state.code is None and leaving.killed_ms is None:
        return state, commands  # Not asked to leave: nothing to requeue unless its time runs out.
    if _saves_itself(state) and now_ms < _ask_at_ms(state):
        return state, commands
    ended = _ended(state, now_ms)
    wait_ms = comeback.waits_until_ms(state)
    if wait_ms is not None and now_ms < wait_ms:
        return state, commands
    if not _asks(policy, state):
        if ended and (not _waits_for_look(policy, state) or now_ms >= _out_by_ms(state)):
            state, more = finish(policy, state, "")
            return state, commands + more
        return state, commands
    if ended or now_ms >= _ask_at_ms(state):
        if policy.heir:
            # The tasks before this one may have called already: the look, which waits its turn, shows it.
            requeue = Requeue(Asking.PAUSED, began_ms=now_ms, again_ms=now_ms)
            state, more = requeue_tick(policy, replace(state, phase=Phase.REQUEUEING, requeue=requeue), now_ms)
            return state, commands + more
        requeue = Requeue(Asking.MEETING, began_ms=now_ms, asked_ms=now_ms)
        state = replace(state, phase=Phase.REQUEUEING, requeue=requeue)
        return state, (*commands, Meet())
    return state, commands


def answer(state: State, word: wire.Ack | wire.Arrived | wire.Saved | wire.Hello) -> Commands:
    """A rank that may be parked is told to leave, or released where training ends by itself."""
    if state.leaving is not None and state.leaving.own_end:
        number = wire.NO_ROUND if isinstance(word, wire.Hello) else word.round
        return (to(word.who, wire.Abort(number, "training is ending by itself")),)
    return (to(word.who, wire.Leave(max(1, state.newest_round))),)


def late_commit(state: State, event: Committed) -> State:
    """A commit that was given up for its deadline has come through all the same. Fresh only if it is that of the last round."""
    if event.result not in (CommitResult.COMMITTED, CommitResult.ALREADY_THERE):
        return state
    state = replace(state, committed_step=max(event.step, state.committed_step), committed_here=True)
    if state.leaving is None or event.round != state.newest_round:
        return state
    return replace(state, leaving=dataclasses.replace(state.leaving, fresh=True))


def own_end(policy: Policy, state: State, code: int) -> tuple[State, Commands] | None:
    """The command has ended with a notice in force. Its own status counts if every rank had said Finished before Leave."""
    leaving = state.leaving
    all_finished = bool(state.ranks) and all(rank.finished for rank in state.ranks)
    if all_finished and (leaving is None or not leaving.told or code == 0):
        return done(state, code, _own_end_line(code))
    if code == 0 and leaving is None and not state.ranks:
        return done(state, code, _own_end_line(code))
    return None


def met(policy: Policy, state: State, event: Met, now_ms: int) -> tuple[State, Commands]:
    """The other steps have answered. One that is still saving is waited for, until the requeue has to come."""
    requeue, notice = state.requeue, state.notice
    if requeue is None or notice is None or requeue.asking is not Asking.MEETING:
        return state, ()
    if event.ready or now_ms >= notice.budget.leave_by_ms:
        return _look(policy, state, now_ms)
    requeue = dataclasses.replace(requeue, again_ms=now_ms + MEET_AGAIN_MS, reason=event.reason)
    return replace(state, requeue=requeue), ()


def looked(policy: Policy, state: State, event: Looked, now_ms: int) -> tuple[State, Commands]:
    """The job was looked at (the notice is up to date already). Decides whether requeue is called now."""
    requeue = state.requeue
    if requeue is None:
        return state, ()
    if _cause(state) is Cause.CANCELLED and requeue.asking is not Asking.ACCEPTED:
        return _over(policy, state, "", now_ms)
    if _cause(state) is Cause.REQUEUED:
        return _accepted(policy, state, now_ms, "requeued already")
    if requeue.asking is not Asking.LOOKING:
        return state, ()
    if isinstance(event.view, NoView):
        if event.view.definite:
            return _over(policy, state, f"Slurm cannot be asked ({event.view.reason})", now_ms)
        return _pause(state, f"the job could not be looked at ({event.view.reason})", now_ms)
    if not event.view.batch:
        return _over(policy, state, "only batch jobs can be requeued, and this one was not started by sbatch", now_ms)
    if state.looking:
        return state, ()  # A signal came during the look: what it says is out of date.
    requeue = dataclasses.replace(
        requeue, asking=Asking.CALLING, calls=requeue.calls + 1, again_ms=None, term_seen=False, cause=_cause(state)
    )
    return replace(state, requeue=requeue), (CallRequeue(),)


def returned(policy: Policy, state: State, event: RequeueReturned, now_ms: int) -> tuple[State, Commands]:
    """The call is over."""
    requeue = state.requeue
    if requeue is None or requeue.asking is not Asking.CALLING:
        return state, ()
    match event.result:
        case RequeueResult.ACCEPTED | RequeueResult.PENDING:
            return _accepted(policy, state, now_ms, event.reason)
        case RequeueResult.REFUSED:
            return _over(policy, state, f"Slurm refused the requeue ({event.reason})", now_ms)
        case RequeueResult.UNKNOWN:
            return _pause(state, event.reason, now_ms)


def resubmitted(state: State, event: Resubmitted) -> State:
    """The command of --resubmit is over; what is left is training's own time to end."""
    requeue = state.requeue
    if requeue is None or requeue.asking is not Asking.RESUBMITTING:
        return state
    if event.accepted:
        requeue = dataclasses.replace(requeue, asking=Asking.OVER, resubmitted=event.reason)
    else:
        reason = f"{requeue.reason}; the command of --resubmit failed ({event.reason})"
        requeue = dataclasses.replace(requeue, asking=Asking.OVER, reason=reason)
    return replace(state, requeue=requeue)


def term_came(state: State) -> State:
    """A SIGTERM during the requeue: the accepted requeue has begun to end this step."""
    requeue = state.requeue
    if requeue is None or requeue.asking not in (Asking.CALLING, Asking.ACCEPTED):
        return state
    return replace(state, requeue=dataclasses.replace(requeue, term_seen=True))


def requeue_tick(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """What is due in REQUEUEING."""
    state, commands = parting.see_out(policy, state, now_ms)
    requeue, notice = state.requeue, state.notice
    assert requeue is not None and notice is not None
    if requeue.asking is Asking.OVER:
        if _ended(state, now_ms):
            state, more = finish(policy, state, requeue.reason)
            return state, commands + more
        return state, commands
    if requeue.asking is Asking.ACCEPTED:
        assert requeue.accepted_ms is not None
        if _ended(state, now_ms) and (requeue.term_seen or now_ms >= _term_by_ms(state)):
            state, more = finish(policy, state, "")
            return state, commands + more
        return state, commands
    if now_ms >= _stay_until_ms(state):
        state, more = finish(policy, state, f"requeue not confirmed: {requeue.reason or 'no answer from Slurm'}")
        return state, commands + more
    if requeue.asking is Asking.MEETING and requeue.again_ms is None and now_ms >= _met_by_ms(state):
        state, more = _look(policy, state, now_ms)
        return state, commands + more
    if requeue.again_ms is not None and now_ms >= requeue.again_ms:
        if requeue.asking is Asking.MEETING:
            state = replace(state, requeue=dataclasses.replace(requeue, again_ms=None, asked_ms=now_ms))
            return state, (*commands, Meet())
        if requeue.asking is Asking.PAUSED:
            state, more = _look(policy, state, now_ms)
            return state, commands + more
    return state, commands


def next_deadline(policy: Policy, state: State) -> int | None:
    """When the ticks of LEAVING and REQUEUEING have something to do. No instant stays behind once it has passed."""
    leaving, requeue = state.leaving, state.requeue
    assert leaving is not None
    times: list[int] = []
    see_out_ms = parting.next_deadline(state)
    if see_out_ms is not None:
        times.append(see_out_ms)
    ended_ms = _ended_at_ms(state)
    if requeue is None:
        asks, held_ms = _asks(policy, state), comeback.waits_until_ms(state) or 0
        if asks and not (leaving.own_end and state.code is None and leaving.killed_ms is None):
            times.append(max(held_ms, _ask_at_ms(state)))
        if ended_ms is not None:
            ended_ms = max(held_ms, ended_ms, _ask_at_ms(state)) if _saves_itself(state) else max(held_ms, ended_ms)
            times.append(max(ended_ms, _out_by_ms(state)) if not asks and _waits_for_look(policy, state) else ended_ms)
    elif requeue.asking is Asking.OVER:
        if ended_ms is not None:
            times.append(ended_ms)
    elif requeue.accepted_ms is not None:
        if ended_ms is not None:
            times.append(ended_ms if requeue.term_seen else max(ended_ms, _term_by_ms(state)))
    else:
        times.append(_stay_until_ms(state))
        if requeue.asking is Asking.MEETING and requeue.again_ms is None:
            times.append(_met_by_ms(state))
        if requeue.again_ms is not None:
            times.append(requeue.again_ms)
    return min(times, default=None)


def done(state: State, code: int, line: str) -> tuple[State, Commands]:
    """The end."""
    return replace(state, phase=Phase.DONE, exit_code=code), (Exit(code, line),)


def finish(policy: Policy, state: State, why_not: str) -> tuple[State, Commands]:
    """Exit after an interruption: the status of design section 7, and one line with what stands and what happens next."""
    leaving = state.leaving
    assert leaving is not None
    cause = _first_cause(state)
    saved = _what_stands(policy, state)
    if cause is Cause.CANCELLED:
        return done(state, EXIT_CANCELLED, f"cancelled; {saved}; not requeued, as a person ended this job")
    code = EXIT_INTERRUPTED if leaving.fresh else EXIT_STALE
    why = _why(state)
    if cause is Cause.CRASHED and state.code is not None:
        code, why = state.code, leaving.reason
    barred = comeback.barred(policy, state) if requeue_is_open(state) else ""
    if policy.requeue == "exit" and not barred:
        code = policy.requeue_exit
        return done(state, code, f"{why}; {saved}; exit {code} asks Slurm to requeue the job (RequeueExit)")
    return done(state, code, f"{why}; {saved}; {_what_next(policy, state, why_not or barred)}")


def requeue_is_open(state: State) -> bool:
    """Whether nobody has had the job requeued."""
    return state.requeue is None or (state.requeue.accepted_ms is None and state.requeue.resubmitted is None)


def before_requeue_line(policy: Policy, state: State) -> str:
    """What to say before the requeue is called: once it is accepted, Slurm may cut the step's output off before the last line."""
    next_word = "Slurm brings the job back" if _cause(state) is Cause.REQUEUED else "now asking Slurm to requeue the job"
    if not policy.can_look:
        next_word = "without scontrol this step stays until Slurm ends it, and a preempted job comes back"
    return f"{_why(state)}; {_what_stands(policy, state)}; {next_word}"


def _why(state: State) -> str:
    """The cause for people; where there is none to be known, the signal."""
    notice, cause = state.notice, _first_cause(state)
    assert notice is not None
    return notice.name if cause in (Cause.LOCAL, Cause.UNKNOWN, Cause.NO_END) else cause.value


def _what_stands(policy: Policy, state: State) -> str:
    leaving = state.leaving
    assert leaving is not None
    if leaving.fresh:
        return f"step {state.committed_step} is committed"
    if leaving.cause is Cause.CRASHED:
        return f"{step_name(state.committed_step)} stands" if state.committed_step >= 0 else "there is no checkpoint"
    failed = f"this save did not make it ({leaving.reason})"
    if leaving.reason.startswith(forecast.NONE_BEGUN) or leaving.cause is Cause.HUNG:
        failed = leaving.reason
    if state.committed_step >= 0:
        return f"{failed}; {step_name(state.committed_step)} stands"
    if state.committed_step == NOT_LOOKED:
        return f"{failed}; what checkpoints there are stands, none had been chosen yet"
    tip = "" if state.ranks or policy.adopts else " (a program without the line in its loop needs --adopt PATTERN)"
    return f"{failed}; there is no checkpoint{tip}"


def _what_next(policy: Policy, state: State, why_not: str) -> str:
    requeue = state.requeue
    if requeue is not None and requeue.accepted_ms is not None:
        if state.held:
            return f"Slurm has accepted the requeue but holds the job ({state.held}): scontrol release lets it start again"
        return "Slurm has accepted the requeue, the job comes back by itself"
    if requeue is not None and requeue.resubmitted is not None:
        said = f" ({requeue.resubmitted})" if requeue.resubmitted else ""
        return f"not requeued: {requeue.reason}; --resubmit has brought it back{said}"
    again = "start the same command again" + (" to go on from there" if state.committed_step >= 0 else "")
    if why_not:
        return f"not requeued: {why_not}; {_way_out(policy, state, why_not)}{again}"
    if not policy.slurm:
        return f"there is no Slurm to requeue it: {again}"
    if policy.requeue == "never":
        return f"not requeued (--requeue never): {again}"
    return again


def _way_out(policy: Policy, state: State, why_not: str) -> str:
    """Where Slurm itself refuses: what else there is."""
    refused = "Slurm refused" in why_not or "requeue not confirmed" in why_not
    if not refused or policy.resubmits or comeback.barred(policy, state):
        return ""
    return "--requeue exit:N (RequeueExit) or --resubmit CMD can bring it back on such a site; now "


def unsaved(policy: Policy, state: State, now_ms: int) -> str:
    """For the last line of training that nobody has ever saved; "" for any other."""
    if state.attached_ms is not None or len(state.ranks) or policy.adopts or policy.passes or policy.heir:
        return ""
    if now_ms - state.began_ms < UNSAVED_MS:
        return ""
    return "; no rank ever attached, so nothing was saved"


def _own_end_line(code: int) -> str:
    return OWN_END if code == 0 else f"training failed by itself with status {code}"


def _asks(policy: Policy, state: State) -> bool:
    """Whether requeue is to be called at all."""
    if not policy.slurm or policy.requeue != "auto" or _cause(state) is Cause.CANCELLED:
        return False
    return state.requeue is not None or not comeback.barred(policy, state)


def _cause(state: State) -> Cause:
    return state.notice.cause if state.notice is not None else Cause.UNKNOWN


def _first_cause(state: State) -> Cause:
    """The cause without what has come of it: the supervisor has the job requeued, or somebody does when training has failed."""
    cause, requeue, leaving = _cause(state), state.requeue, state.leaving
    if cause is not Cause.REQUEUED:
        return cause
    if requeue is not None and requeue.calls and requeue.cause is not Cause.REQUEUED:
        return requeue.cause
    return leaving.cause if leaving is not None and leaving.cause in (Cause.CRASHED, Cause.HUNG) else cause


def _over(policy: Policy, state: State, reason: str, now_ms: int) -> tuple[State, Commands]:
    """There will be no requeue: what is left is training's own time to end. The reason is "" for a job that was cancelled."""
    requeue = state.requeue
    assert requeue is not None
    if reason and policy.resubmits and requeue.asking is not Asking.RESUBMITTING and not policy.heir:
        requeue = dataclasses.replace(requeue, asking=Asking.RESUBMITTING, again_ms=None, reason=reason)
        return replace(state, requeue=requeue), (Resubmit(reason),)
    requeue = dataclasses.replace(requeue, asking=Asking.OVER, again_ms=None, reason=reason)
    return requeue_tick(policy, replace(state, requeue=requeue), now_ms)


def _accepted(policy: Policy, state: State, now_ms: int, reason: str) -> tuple[State, Commands]:
    requeue = state.requeue
    assert requeue is not None
    if requeue.accepted_ms is None:
        seen = requeue.term_seen or _cause(state) is Cause.REQUEUED
        requeue = dataclasses.replace(
            requeue, asking=Asking.ACCEPTED, accepted_ms=now_ms, again_ms=None, reason=reason, term_seen=seen
        )
        state = replace(state, requeue=requeue)
    return requeue_tick(policy, state, now_ms)


def _look(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """Look at the job right before the call: one that was cancelled meanwhile is not revived."""
    requeue = state.requeue
    assert requeue is not None
    state = replace(state, requeue=dataclasses.replace(requeue, asking=Asking.LOOKING, again_ms=None))
    if not policy.can_look:
        # Leaving in the grace loses the job on 22.05; whoever stays until the end of it is requeued by Slurm itself.
        requeue = dataclasses.replace(requeue, asking=Asking.PAUSED, again_ms=None, reason="scontrol was not found")
        return replace(state, requeue=requeue), ()
    return notices.look(policy, state, "right before the requeue", now_ms)


def _pause(state: State, reason: str, now_ms: int) -> tuple[State, Commands]:
    requeue = state.requeue
    assert requeue is not None
    pause_ms = PAUSES_MS[min(requeue.failures, len(PAUSES_MS) - 1)]
    requeue = dataclasses.replace(
        requeue, asking=Asking.PAUSED, again_ms=now_ms + pause_ms, failures=requeue.failures + 1, reason=reason
    )
    return replace(state, requeue=requeue), ()


def _stay_until_ms(state: State) -> int:
    """Until when an unanswered requeue is stayed for. Counted from its begin where that comes after the expected kill (the
    supervisor was stopped meanwhile): it is always tried."""
    assert state.notice is not None and state.requeue is not None
    return max(state.notice.kill_at_ms, state.requeue.began_ms) + STAY_MS


def _met_by_ms(state: State) -> int:
    """Until when the answer of the other steps is waited for: a state directory that hangs must not cost the requeue."""
    assert state.requeue is not None and state.notice is not None
    asked_ms = state.requeue.asked_ms
    return max(asked_ms, min(asked_ms + MEET_MS, state.notice.budget.leave_by_ms))


def _ended_at_ms(state: State) -> int | None:
    """Since when the command counts as over: it has ended, or has had its time to die after the kill. None: not in sight."""
    leaving = state.leaving
    assert leaving is not None
    if state.over:
        return leaving.began_ms
    if leaving.killed_ms is None:
        return None
    reap_by_ms, out_by_ms = leaving.killed_ms + REAP_MS, _out_by_ms(state)
    return min(reap_by_ms, out_by_ms) if leaving.killed_ms < out_by_ms else reap_by_ms


def _ended(state: State, now_ms: int) -> bool:
    ended_ms = _ended_at_ms(state)
    return ended_ms is not None and now_ms >= ended_ms


def _saves_itself(state: State) -> bool:
    """Whether a program that got its signal is still saving, or what it wrote is still being looked at."""
    leaving = state.leaving
    return leaving is not None and leaving.passed and not (state.over and leaving.adopted)


def _waits_for_look(policy: Policy, state: State) -> bool:
    """The look that tells a cancelled job from an interrupted one is under way; not waited for beyond the planned end."""
    return policy.can_look and _cause(state) is Cause.UNKNOWN and state.looking


def _out_by_ms(state: State) -> int:
    assert state.notice is not None
    return state.notice.budget.out_by_ms


def _ask_at_ms(state: State) -> int:
    """When the requeue is asked for although the command has not ended yet."""
    assert state.leaving is not None and state.notice is not None
    if _saves_itself(state):
        return max(state.leaving.began_ms, state.notice.budget.leave_by_ms)
    return max(state.leaving.began_ms, min(state.leaving.began_ms + ASK_AFTER_MS, state.notice.budget.leave_by_ms))


def _term_by_ms(state: State) -> int:
    """Until when the SIGTERM of an accepted requeue is waited for; not past the planned end, when the kill is near anyway.

    Who is still here after the planned end has outlived the expected kill: nothing is near then.
    """
    assert state.requeue is not None and state.requeue.accepted_ms is not None and state.notice is not None
    accepted_ms, out_by_ms = state.requeue.accepted_ms, state.notice.budget.out_by_ms
    term_by_ms = accepted_ms + TERM_MS
    return min(term_by_ms, out_by_ms) if accepted_ms < out_by_ms else term_by_ms
