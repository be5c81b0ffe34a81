"""How rounds begin, turn and end, and what follows them.

Pure. Owns the ways from one phase to another that several phases share; machine.py owns which event leads where. Must not look at
events: a way is the same whoever takes it.
"""

from __future__ import annotations

from ckpt_client import wire
from msgspec.structs import replace

from ckpt_supervisor.core import adopting, crashes, forecast, interval, leaving, masked, parting, ranks, rounds, wishes
from ckpt_supervisor.core.budget import Budget
from ckpt_supervisor.core.commands import Command, DropPartial, Prune
from ckpt_supervisor.core.events import Meaning, Stalled
from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import GivenUp, Kind, Phase, Round, Stage, State

TRIES_MAX = 2
"""A leave round that a rank failed is tried once more, if the time allows."""

INTERRUPTS_MAX = 2
"""Without Slurm the second ctrl-C ends at once."""

WRITE_MS = 10_000
"""When one rank's failure ends training, the others' running saves get this long."""

LOOK_MS = 2_000
"""The look that tells a notice from a rehearsal is waited for this long, where it decides whether training goes on."""

VERIFY_MS = 600_000
"""Bound on verification and commit when there is no kill ahead."""

Commands = tuple[Command, ...]
Result = tuple[State, Commands]


def begin(policy: Policy, state: State, kind: Kind, now_ms: int) -> Result:
    """Ask all ranks to save, if there is anybody to ask."""
    if kind is Kind.LEAVE:
        assert state.notice is not None
        wait_ms = waits_until_ms(state)
        waits = wait_ms is not None and now_ms < wait_ms
        if policy.heir and state.code is None:
            if waits:
                return state, ()  # It may be a rehearsal.
            if policy.passes and state.started and not state.live:
                return adopting.hand_on(policy, state, now_ms)
            reason = "" if state.inherited_fresh else "the coordinator, task 0's supervisor, was lost"
            return leaving.leave(policy, state, state.inherited_fresh, reason, now_ms)
        if state.code is not None:
            return command_over(policy, state, now_ms)
        if not state.live:
            if waits:
                return state, ()  # Nobody can save; a rehearsal must not end a training that only has not attached yet.
            if policy.passes and state.started:
                return adopting.hand_on(policy, state, now_ms)
            return leaving.leave(policy, state, False, _nobody(state), now_ms)
        tries = _tries(state)
        if waits and (tries >= TRIES_MAX or forecast.too_late(state, now_ms)):
            return state, ()  # See give_up; and it may only seem to be too late.
        if now_ms >= state.notice.budget.save_by_ms or tries >= TRIES_MAX:
            # A round that could only be given up at once would hide why the one before it was.
            return leaving.leave(policy, state, False, _no_time(state), now_ms)
        late = forecast.too_late(state, now_ms)
        if late:
            return leaving.leave(policy, state, False, late, now_ms)
        state, commands = rounds.begin(policy, state, kind, now_ms, state.notice.budget.save_by_ms)
        if tries and state.round is not None:
            state = replace(state, round=replace(state.round, tries=tries + 1))
        return state, commands
    if not state.live or state.code is not None or policy.heir:
        return state, ()
    state = wishes.leaving_round(policy, state, now_ms)
    if state.notice is not None:
        return begin(policy, state, Kind.LEAVE, now_ms)
    return rounds.begin(policy, state, kind, now_ms, now_ms + policy.save_timeout_ms)


def own_stops(policy: Policy, state: State, now_ms: int) -> Result:
    """Ranks have stopped by themselves: a periodic round at that position (rule 12)."""
    stops = [rank.stopped_at for rank in state.live if rank.stopped_at is not None]
    if not stops:
        return state, ()
    state = wishes.leaving_round(policy, state, now_ms)
    kind, save_by_ms = Kind.PERIODIC, now_ms + policy.save_timeout_ms
    if state.notice is not None:
        kind, save_by_ms = Kind.LEAVE, state.notice.budget.save_by_ms
    return rounds.begin(policy, state, kind, now_ms, save_by_ms, at=min(stops))


def turn(policy: Policy, state: State, now_ms: int) -> Result:
    """A notice came, went, or knows its deadline better, while a round is running (rule 12)."""
    current, notice = state.round, state.notice
    assert current is not None
    if notice is None:
        if current.kind is not Kind.LEAVE:
            return replace(state, round=_bounded(policy, current, None)), ()
        # No end in sight after all: the same round, but training goes on after it.
        save_by_ms = now_ms + policy.save_timeout_ms
        if state.phase in (Phase.AGREEING, Phase.SAVING) and not current.go:
            return rounds.convert(policy, state, Kind.SAVE, save_by_ms, now_ms)
        return replace(
            state,
            round=replace(current, kind=Kind.SAVE, save_by_ms=save_by_ms, verify_by_ms=now_ms + VERIFY_MS),
        ), ()
    if notice.interrupts >= INTERRUPTS_MAX and not policy.slurm:
        return end_at_once(policy, state, now_ms)
    if current.kind is Kind.LEAVE:
        return replace(
            state,
            round=replace(current, save_by_ms=notice.budget.save_by_ms, verify_by_ms=notice.budget.verify_by_ms),
        ), ()
    if state.phase in (Phase.AGREEING, Phase.SAVING) and not current.go:
        return rounds.convert(policy, state, Kind.LEAVE, notice.budget.save_by_ms, now_ms)
    # After Go the round is finished; it must be over in time for the way out.
    return replace(state, round=_bounded(policy, current, notice.budget)), ()


def _bounded(policy: Policy, current: Round, budget: Budget | None) -> Round:
    """A round that is no leave round, with its own bounds and what a notice leaves of them.

    Cut anew each time: at the signal the time left is a guess, and the look that follows may find more.
    """
    save_by_ms = current.began_ms + policy.save_timeout_ms
    verify_by_ms = current.verify_by_ms
    if current.written_ms is not None and not current.committed:
        verify_by_ms = current.written_ms + VERIFY_MS
    if budget is not None:
        save_by_ms = min(save_by_ms, budget.save_by_ms)
        verify_by_ms = min(verify_by_ms or budget.verify_by_ms, budget.verify_by_ms)
    return replace(current, save_by_ms=save_by_ms, verify_by_ms=verify_by_ms)


def end_at_once(policy: Policy, state: State, now_ms: int) -> Result:
    """A person's second ctrl-C: the round is given up, and training gets no more time."""
    state, commands = give_up(policy, state, "a second ctrl-C ended the save", now_ms, again=False)
    if state.leaving is None and state.notice is not None and state.phase is not Phase.DONE:
        state, more = leaving.leave(policy, state, False, "a second ctrl-C ended the save", now_ms)
        commands += more
    return parting.end_at_once(state, now_ms), commands


def all_here(policy: Policy, state: State, now_ms: int) -> Result:
    """Every rank stands at T. If that step is committed already, nothing is written (rule 10)."""
    current = state.round
    assert current is not None and current.at is not None
    if current.at.n == state.committed_step:
        current = replace(current, committed=True, verify_by_ms=now_ms + LOOK_MS)
        return saved_all(policy, replace(state, phase=Phase.COMMITTING, round=current), now_ms)
    notice = state.notice
    if notice is not None and current.kind is Kind.LEAVE:
        late = forecast.too_late(state, now_ms)
        if late and not forecast.is_settled(state, notice, now_ms):
            return state, ()  # It may only seem so: the look is about to tell.
        if late:
            return give_up(policy, state, late, now_ms, again=False)
    return rounds.go(state, now_ms)


def saved_all(policy: Policy, state: State, now_ms: int) -> Result:
    """The round's step is committed."""
    current = state.round
    assert current is not None and current.at is not None
    if current.kind is Kind.LEAVE and state.notice is not None:
        if _may_turn(state) and now_ms < current.verify_by_ms:
            return state, ()  # The look will say whether there is an end in sight at all.
        return leaving.leave(policy, state, True, "", now_ms)
    commands = rounds.abort(state, "committed, go on")
    if not current.go:
        state = ranks.no_longer_stopped(state)  # Nothing was written: the ranks still stand at this round's own stop.
    state = interval.with_next(policy, replace(state, phase=Phase.RUNNING, round=None), now_ms)
    need_ms = ((current.go_ms or now_ms) - current.began_ms + state.longest_save_ms) * 3 // 2
    state, more = back(policy, state, now_ms, need_ms)
    return state, (*commands, Prune(), *more)


def _may_turn(state: State) -> bool:
    """Whether the look that is under way may still find that no end is in sight."""
    notice = state.notice
    if notice is None or notice.meaning is not Meaning.NOTICE or notice.looked:
        return False
    return state.looking or notice.relook_ms is not None


def waits_until_ms(state: State) -> int | None:
    """Until when a notice in RUNNING waits for its look; None when it waits for nothing."""
    if state.notice is None or state.writing or state.closing_ms is not None:
        return None
    by_ms = forecast.waits_until_ms(state, state.notice)
    return state.notice.first_ms + LOOK_MS if _may_turn(state) else by_ms or state.notice.first_ms


def stalled(policy: Policy, state: State, event: Stalled, now_ms: int) -> Result:
    """Ranks stand still before the step that was agreed, or while they save, for longer than they may: they will not come to it.

    If anything is done about the hang the round is given up first; otherwise its own time ends it, and the hang was told.
    """
    if not crashes.acts(policy, state, event):
        return state, ()
    state, commands = give_up(policy, state, f"training hangs ({event.kind})", now_ms, again=False)
    state, more = crashes.stalled(policy, state, event, now_ms)
    return state, commands + more


def give_up(policy: Policy, state: State, reason: str, now_ms: int, again: bool = True, commit_over: bool = False) -> Result:
    """The round is over without a checkpoint: release everybody at once, and go on or leave.

    `commit_over`: its commit has failed, rather than not come back in time.
    """
    current = state.round
    assert current is not None
    commands = rounds.abort(state, reason)
    partial = rounds.partial_path(policy, current)
    if partial and current.go and (commit_over or state.phase is not Phase.COMMITTING):
        # Never under a running commit: it could rename a directory that is being emptied.
        commands = (*commands, DropPartial(partial))
    if state.phase in (Phase.AGREEING, Phase.SAVING):
        # Abort releases those stops too; the next ones, of ranks that had written already, belong to the next round.
        written = frozenset(member.who for member in current.members if member.stage is Stage.WRITTEN)
        state = ranks.no_longer_stopped(state, ranks.NEVER if current.at is None else current.at.n)
        state = ranks.no_longer_stopped(state, but=written)
    committing = state.phase is Phase.COMMITTING
    if state.phase is Phase.SAVING and current.go:
        at_it = (Stage.ARRIVED, Stage.SAVING)
        state = replace(state, at_work=frozenset(member.who for member in current.members if member.stage in at_it))
    state = replace(
        state,
        round=None,
        given_up=GivenUp(current, reason),
        given_up_in_a_row=state.given_up_in_a_row + 1,
        phase=Phase.RUNNING,
    )
    state = forecast.tried(interval.with_next(policy, wishes.not_saved(state), now_ms), current, now_ms)
    if current.kind is Kind.LEAVE and state.notice is not None:
        if state.code is not None:
            state, more = command_over(policy, state, now_ms)
            return state, commands + more
        if again and not committing and _may_try_again(state, current.tries, current.began_ms, now_ms):
            state, more = begin(policy, state, Kind.LEAVE, now_ms)
            if state.round is not None:
                state = replace(state, round=replace(state.round, tries=current.tries + 1))
            return state, commands + more
        wait_ms = waits_until_ms(state)
        if again and wait_ms is not None and now_ms < wait_ms:
            return state, commands  # The looks have yet to say whether there is an end in sight at all.
        state, more = leaving.leave(policy, state, False, reason, now_ms)
        return state, commands + more
    state, more = back(policy, state, now_ms)
    return state, commands + more


def _tries(state: State) -> int:
    """How often the leave round of the notice in force was tried: the last one that was given up knows."""
    last, notice = state.given_up, state.notice
    if last is None or notice is None or last.round.kind is not Kind.LEAVE or last.round.number != state.newest_round:
        return 0
    # One that had begun before the notice, and was turned into a leave round, may be of an earlier notice: at worst one try more.
    return last.round.tries if last.round.began_ms >= notice.first_ms else 0


def _may_try_again(state: State, tries: int, began_ms: int, now_ms: int) -> bool:
    """Once more, if every rank is still there and the time that this try took is left again."""
    assert state.notice is not None
    whole = bool(state.live) and len(state.live) == len(state.ranks) and state.code is None
    return whole and tries < TRIES_MAX and now_ms + 2 * (now_ms - began_ms) < state.notice.budget.save_by_ms


def back(policy: Policy, state: State, now_ms: int, need_ms: int | None = None) -> Result:
    """RUNNING again after a round: a notice, the command's end or ranks that wait by themselves come next.

    `need_ms`: it was committed, and one more like it takes this long, with some to spare. Where that is not there the fresh
    checkpoint is the last one: a save that does not make it would only hide it.
    """
    if state.code is not None:
        return command_over(policy, state, now_ms)
    if state.notice is not None:
        if need_ms is not None and now_ms + need_ms > state.notice.budget.save_by_ms:
            return leaving.leave(policy, state, True, "", now_ms)
        return begin(policy, state, Kind.LEAVE, now_ms)
    return own_stops(policy, state, now_ms)


def command_over(policy: Policy, state: State, now_ms: int) -> Result:
    """The command has ended and no round is running."""
    code = state.code
    assert code is not None
    if code != 0 and state.at_work and state.notice is None:
        # What a rank writes may be a file of its own, where it always was: another one's failure must not cut it in half.
        state = replace(state, writing=state.at_work, at_work=frozenset(), write_by_ms=now_ms + WRITE_MS)
    if state.writing:
        return state, ()
    if adopting.is_answer(policy, state):
        return adopting.hand_on(policy, state, now_ms)
    if not adopting.is_closed(policy, state, now_ms):
        return adopting.close(policy, state, now_ms)
    may_hide = code == 0 and (state.notice is None or masked.ended_before(state))
    if may_hide and masked.waits(policy, state, now_ms):
        return masked.settle(state, now_ms), ()
    hidden = masked.culprit(state) if may_hide else ""
    if hidden and state.notice is None:
        code = masked.EXIT_MASKED
        state = replace(state, code=code, failed=code, masked=hidden)
    ended_before = not hidden and (adopting.ended_before(state) or masked.ended_before(state))
    is_own = ended_before and (code == 0 or state.restarts >= policy.restarts)
    if state.notice is not None and not is_own and not (code == 0 and not state.ranks):
        ended = leaving.own_end(policy, state, code)
        reason = hidden or f"the command{_whose(policy, state)} ended with status {code} before it could save"
        return ended or leaving.leave(policy, state, False, reason, now_ms)
    if code == 0:
        return leaving.done(state, code, leaving.OWN_END + leaving.unsaved(policy, state, now_ms))
    failed = f"training failed by itself with status {code}{_whose(policy, state)}"
    if hidden:
        failed = f"training failed by itself: {hidden}; the command ended with status 0 all the same"
    elif state.why_exited:
        failed = f"{failed}: {state.why_exited}"
    if state.notice is not None:
        return leaving.done(state, code, failed)
    return crashes.failed(policy, state, code, failed, now_ms)


def _whose(policy: Policy, state: State) -> str:
    """In a step of several tasks: whose command it was that failed, or ""."""
    if policy.tasks == 1 or not state.failed:
        return ""
    first = next((number for number in range(policy.tasks) if state.codes.get(number) == state.failed), None)
    return "" if first is None else f" of task {first}"


def write_by_ms(state: State) -> int | None:
    """Until when saves that another rank's failure must not cut short are waited for; with a notice they must be over in its
    time."""
    if not state.writing:
        return None
    return state.write_by_ms if state.notice is None else min(state.write_by_ms, state.notice.budget.save_by_ms)


def written(policy: Policy, state: State, who: wire.Who, now_ms: int) -> Result:
    """One of the ranks whose writes were not to be cut short by another one's failure is done with it."""
    if who not in state.writing:
        return state, ()
    state = replace(state, writing=state.writing - {who})
    return command_over(policy, state, now_ms) if state.code is not None else (state, ())


def _nobody(state: State) -> str:
    if not state.ranks:
        return "no rank had attached yet"
    if any(rank.finished for rank in state.ranks):
        return "training had left its loop already"
    return "no rank is left"


def _no_time(state: State) -> str:
    if state.given_up is not None and state.given_up.round.number == state.newest_round:
        return state.given_up.reason
    return "there was no time left for a save"


def cause_word(state: State) -> str:
    """Why this checkpoint is taken, in a word or two, for its manifest."""
    if state.notice is not None:
        return state.notice.name if state.notice.cause in (Cause.UNKNOWN, Cause.NO_END) else state.notice.cause.value
    assert state.round is not None
    return state.round.kind.value
