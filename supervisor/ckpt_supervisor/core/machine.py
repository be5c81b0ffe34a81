"""The machine: what the supervisor decides, as a pure function.

Theory of operation
-------------------
`step(policy, state, event, now_ms) -> (state, commands)` and `next_deadline(policy, state) -> int | None` are all there is. Time
is an integer of monotonic milliseconds and an argument: float seconds once woke a timer one ulp early and never again. The shell
(app.py) feeds one event at a time, carries the commands out, and asks for the next deadline after every step; it remembers none.

Rules of this package, held by tests/test_architecture.py and the import contracts:
1. No clock, no I/O, no randomness, no logging. What is logged is derived from (event, before, after) in describe.py.
2. Phases go forward only within a round: AGREEING, SAVING, VERIFYING, COMMITTING, then RUNNING, or LEAVING, REQUEUEING, DONE.
3. Every phase names every event. There is no `case _`, so a new event fails type checking until each phase has decided on it.
4. Deadlines are checked last in every step, after the event itself: an answer that is here is never thrown away for being late.
5. Messages may come twice, late or never. A word of another round is answered, never obeyed.
6. "Could not look" is a value of its own (NoView, UNKNOWN), never taken for "nothing there".
"""

from __future__ import annotations

from ckpt_client import wire
from ckpt_client.wire import NO_ROUND, FromRank
from msgspec.structs import replace

from ckpt_supervisor.core import (
    adopting,
    answers,
    checking,
    crashes,
    forecast,
    interval,
    leaving,
    losses,
    masked,
    notices,
    parting,
    ranks,
    rounds,
    tasks,
    turns,
    wishes,
)
from ckpt_supervisor.core.between import Report
from ckpt_supervisor.core.commands import Command, to
from ckpt_supervisor.core.events import (
    Adopted,
    Asked,
    CommandExited,
    CommitResult,
    Committed,
    Event,
    Looked,
    Meaning,
    Met,
    RankGone,
    Recalled,
    RequeueReturned,
    Resubmitted,
    SignalCame,
    Stalled,
    TaskCut,
    Tick,
    Verified,
)
from ckpt_supervisor.core.policy import NOT_LOOKED, Policy
from ckpt_supervisor.core.state import Kind, Phase, Stage, State

OWN_STOP_MS = 20_000
"""A rank that stopped by itself while an earlier checkpoint is still being verified waits at most this long."""

Commands = tuple[Command, ...]
Result = tuple[State, Commands]

_RankWord = wire.Hello | wire.Ack | wire.Arrived | wire.Saving | wire.Saved | wire.Failed | wire.Finished | wire.Left


def start(policy: Policy, now_ms: int) -> Result:
    """The first state. The command runs already; the first look settles the end time and the number of restarts."""
    state = State(
        began_ms=now_ms,
        resume_from=policy.resume_from,
        resume_step=policy.resume_step,
        committed_step=policy.resume_step,
        start_restarts=policy.start_restarts,
        started=policy.resume_step != NOT_LOOKED,
        epoch=policy.epoch,
        beat_ms=now_ms,
        stepped_ms=now_ms,
        began_step=policy.resume_step,
        next_adopt_ms=now_ms + adopting.LOOK_EVERY_MS if policy.adopts else None,
    )
    return notices.look(policy, interval.with_next(policy, state, now_ms), "start", now_ms)


def resumed(state: State, path: str, step_resumed: int, several: bool = False) -> State:
    """The state of a run whose (next) start goes on from this checkpoint; step -1 for a start from scratch.

    `several`: it holds files of more ranks than rank 0.
    """
    began = step_resumed if not state.restarts else state.began_step
    state = replace(state, resume_from=path, resume_step=step_resumed, committed_step=step_resumed, began_step=began)
    return replace(state, committed_here=False, started=True, several=several)


def step(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """One event. Returns the new state and what to do."""
    if state.phase is Phase.DONE:
        # Who has said goodbye by now is not waited for.
        return (tasks.reported(policy, state, event, now_ms)[0] if isinstance(event, Report) else state), ()
    if isinstance(event, _RankWord):
        state, commands = hear(policy, state, event, now_ms)
    else:
        state, commands = _take_in(policy, state, event, now_ms)
    state, due = _due(policy, state, event, now_ms)
    state, told = tasks.announce(policy, state, now_ms)
    return state, (*commands, *due, *told)


def _take_in(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    if isinstance(event, SignalCame):
        state, fresh = tasks.is_fresh(policy, state, event, now_ms)
        if not fresh:
            return state, ()
    state, commands = _note(policy, state, event, now_ms)
    state, more = _dispatch(policy, state, event, now_ms)
    return state, commands + more


def next_deadline(policy: Policy, state: State) -> int | None:
    """The next instant at which a Tick has something to do; None for never."""
    times: list[int | None] = []
    match state.phase:
        case Phase.RUNNING if masked.until_ms(policy, state) is not None:
            times = [masked.until_ms(policy, state), None if state.notice is None else state.notice.relook_ms]
        case Phase.RUNNING:
            times = [notices.next_deadline(policy, state), turns.waits_until_ms(state)]
            times += [turns.write_by_ms(state), adopting.next_deadline(policy, state)]
            if state.notice is None and state.closing_ms is None:
                times.append(state.next_save_ms)
        case Phase.AGREEING | Phase.SAVING:
            times = [rounds.next_deadline(state), notices.next_deadline(policy, state)]
        case Phase.VERIFYING | Phase.COMMITTING:
            stops = [state.stopped_ms + OWN_STOP_MS] if state.stopped else []
            assert state.round is not None
            times = [state.round.verify_by_ms, notices.next_deadline(policy, state), checking.again_ms(state), *stops]
        case Phase.LEAVING | Phase.REQUEUEING:
            times = [leaving.next_deadline(policy, state), notices.next_deadline(policy, state)]
        case Phase.DONE:
            pass
    if state.phase is not Phase.DONE:
        times.append(tasks.next_deadline(policy, state))
    return min((time for time in times if time is not None), default=None)


# --- what every phase notes -------------------------------------------------------------------------------------------


def hear(policy: Policy, state: State, word: FromRank, now_ms: int) -> Result:
    """A word of a rank: known ranks only; words of an older generation are dropped (rule 11).

    `step` without what is due by now: for one of many words that have come together, before a Tick.
    """
    commands: Commands = ()
    if state.phase is Phase.DONE:
        return state, ()
    if isinstance(word, wire.Hello):
        generation = state.generation
        state, commands = ranks.hello(policy, state, word, now_ms)
        if state.attached_ms is None and len(state.ranks):
            state = replace(state, attached_ms=now_ms)
        if state.generation != generation and state.phase in (Phase.AGREEING, Phase.SAVING):
            state, more = turns.give_up(policy, state, f"the workers were started again (generation {state.generation})", now_ms)
            commands += more
    heard = ranks.heard(state, word, now_ms)
    if heard is not None:
        if state.phase is not Phase.AGREEING or not isinstance(word, wire.Ack):  # That one is noted with what it says.
            heard = rounds.heard(heard, word.who, now_ms)
        state, answers = _dispatch(policy, heard, word, now_ms)
        return state, commands + answers
    return ranks.last_word(state, word), commands


def _note(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """Bookkeeping that does not depend on the phase."""
    match event:
        case SignalCame(meaning=meaning):
            if meaning is Meaning.SAVE:
                return state, ()
            if meaning is not Meaning.NOTICE:
                state = leaving.term_came(state)
            return notices.signalled(policy, state, event, now_ms)
        case Looked():
            return notices.looked(policy, state, event, now_ms)
        case RankGone(who=who, how=how):
            return ranks.gone(state, who, how), ()
        case CommandExited():
            return tasks.exited(policy, state, event), ()
        case Report():
            return tasks.reported(policy, state, event, now_ms)
        case TaskCut(task=task):
            return tasks.cut(state, task, now_ms), ()
        case Adopted():
            return adopting.adopted(state, event, now_ms)
        case Committed() if state.round is None or event.round != state.round.number:
            return leaving.late_commit(state, event), ()
        case Recalled(history=history):
            return notices.recalled(policy, state, history, now_ms), ()
        case Asked():
            return wishes.asked(policy, state, event, now_ms), ()
        case Resubmitted():
            return leaving.resubmitted(state, event), ()
        case Verified() | Committed() | Met() | RequeueReturned() | Stalled() | Tick():
            return state, ()
        case (
            wire.Hello()
            | wire.Ack()
            | wire.Arrived()
            | wire.Saving()
            | wire.Saved()
            | wire.Failed()
            | wire.Finished()
            | wire.Left()
        ):
            return state, ()  # See _word.


def _dispatch(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    match state.phase:
        case Phase.RUNNING:
            return _running(policy, state, event, now_ms)
        case Phase.AGREEING:
            return _agreeing(policy, state, event, now_ms)
        case Phase.SAVING:
            return _saving(policy, state, event, now_ms)
        case Phase.VERIFYING:
            return _verifying(policy, state, event, now_ms)
        case Phase.COMMITTING:
            return _committing(policy, state, event, now_ms)
        case Phase.LEAVING:
            return _leaving(policy, state, event, now_ms)
        case Phase.REQUEUEING:
            return _requeueing(policy, state, event, now_ms)
        case Phase.DONE:
            return state, ()


# --- the phases -------------------------------------------------------------------------------------------------------


def _running(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """No round is running."""
    match event:
        case SignalCame(meaning=Meaning.SAVE):
            return turns.begin(policy, state, Kind.SAVE, now_ms)
        case SignalCame():
            return turns.begin(policy, state, Kind.LEAVE, now_ms) if state.notice is not None else (state, ())
        case Looked():
            return state, ()  # See _running_due.
        case CommandExited():
            return turns.command_over(policy, state, now_ms) if state.code is not None else (state, ())
        case wire.Arrived(who=who, round=number) if number == NO_ROUND:
            rank = state.rank(who)
            if rank is None or rank.stopped_at is None or policy.heir or state.code is not None:
                # Its round is over and the word that released it was lost: it would be held until it gives up by itself.
                return state, (to(who, wire.Abort(NO_ROUND, "this round is over")),)
            return turns.own_stops(policy, state, now_ms)
        case wire.Saved(who=who):
            state, commands = turns.written(policy, state, who, now_ms)
            return state, (*answers.stale(state, event), *commands)
        case wire.Ack() | wire.Arrived():
            return state, answers.stale(state, event)
        case wire.Hello() if state.notice is not None:
            return turns.begin(policy, state, Kind.LEAVE, now_ms)
        case wire.Failed(who=who) | wire.Finished(who=who) | wire.Left(who=who) | RankGone(who=who):
            return turns.written(policy, state, who, now_ms)
        case wire.Hello() | wire.Saving() | Report() | TaskCut():
            return state, ()  # The tables of ranks and tasks are up to date.
        case Stalled():
            return crashes.stalled(policy, state, event, now_ms)
        case Verified() | Committed() | Adopted() | Met() | RequeueReturned() | Resubmitted() | Recalled() | Asked() | Tick():
            return state, ()


def _agreeing(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """Prepare is out; T is not fixed."""
    match event:
        case wire.Ack():
            if answers.is_stale(state, event):
                return state, answers.stale(state, event)
            return rounds.acked(policy, state, event, now_ms)
        case wire.Hello(who=who):
            return rounds.join(policy, state, who, now_ms)
        case wire.Arrived(who=who, round=number):
            if number == NO_ROUND:
                return state, (to(who, wire.Wait(NO_ROUND)),)
            return state, answers.stale(state, event)
        case wire.Saved():
            return state, answers.stale(state, event)
        case wire.Failed() | wire.Finished() | RankGone() | wire.Left() | CommandExited():
            return losses.loss(policy, state, event, now_ms)
        case SignalCame() | Looked():
            return turns.turn(policy, state, now_ms)
        case wire.Saving() | Report() | TaskCut() | Verified() | Committed() | Adopted() | Met() | RequeueReturned():
            return state, ()
        case Stalled():
            return turns.stalled(policy, state, event, now_ms)
        case Resubmitted() | Recalled() | Asked() | Tick():
            return state, ()


def _saving(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """T is fixed: ranks arrive, get Go together, and save."""
    match event:
        case wire.Arrived(who=who, round=number):
            if number == NO_ROUND:
                problem = rounds.stopped_beyond(state, event)
                if problem:
                    return turns.give_up(policy, rounds.lost(state, who, Stage.FAILED, problem), problem, now_ms)
                return state, (to(who, wire.Wait(NO_ROUND)),)
            if answers.is_stale(state, event):
                return state, answers.stale(state, event)
            state, commands, problem = rounds.arrived(policy, state, event, now_ms)
            if problem:
                return turns.give_up(policy, rounds.lost(state, who, Stage.FAILED, problem), problem, now_ms)
            if rounds.all_arrived(state):
                return turns.all_here(policy, state, now_ms)
            return state, commands
        case wire.Saving():
            return rounds.saving(state, event), ()
        case wire.Saved(who=who):
            if answers.is_stale(state, event):
                return state, answers.stale(state, event)
            state, problem = rounds.saved(state, event)
            if problem:
                return turns.give_up(policy, rounds.lost(state, who, Stage.FAILED, problem), problem, now_ms)
            if rounds.all_written(state):
                return checking.begin(policy, state, now_ms)
            return state, answers.hold(state, event)
        case wire.Ack(who=who):
            if answers.is_stale(state, event):
                return state, answers.stale(state, event)
            state, problem = rounds.on_its_way(state, event, now_ms)
            if problem:
                return turns.give_up(policy, rounds.lost(state, who, Stage.FAILED, problem), problem, now_ms)
            return state, ()
        case wire.Failed() | wire.Finished() | RankGone() | wire.Left() | CommandExited():
            return losses.loss(policy, state, event, now_ms)
        case SignalCame() | Looked():
            return turns.turn(policy, state, now_ms)
        case wire.Hello() | Report() | TaskCut() | Verified() | Committed() | Adopted() | Met() | RequeueReturned():
            return state, ()
        case Stalled():
            return turns.stalled(policy, state, event, now_ms)
        case Resubmitted() | Recalled() | Asked() | Tick():
            return state, ()


def _verifying(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """Everything is written; what happens to the ranks now does not matter to this checkpoint."""
    match event:
        case Verified():
            return checking.verified(policy, state, event, now_ms)
        case wire.Ack() | wire.Arrived() | wire.Saved():
            return state, answers.hold(state, event)
        case SignalCame() | Looked():
            return turns.turn(policy, state, now_ms)
        case wire.Hello() | wire.Saving() | wire.Failed() | wire.Finished() | wire.Left() | RankGone() | CommandExited():
            return state, ()
        case Report() | TaskCut() | Committed() | Adopted() | Met() | RequeueReturned():
            return state, ()
        case Resubmitted() | Recalled() | Stalled() | Asked() | Tick():
            return state, ()


def _committing(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """The commit is running; it cannot be taken back."""
    current = state.round
    assert current is not None
    match event:
        case Committed(round=number, result=result, reason=reason):
            if number != current.number or current.at is None:
                return state, ()
            if result in (CommitResult.COMMITTED, CommitResult.ALREADY_THERE):
                state = replace(
                    forecast.measured(state, now_ms),
                    committed_step=max(state.committed_step, current.at.n),
                    committed_here=True,
                    several=state.several or len(current.members) > 1,
                    given_up_in_a_row=0,
                    round=replace(current, committed=True, verify_by_ms=now_ms + turns.LOOK_MS),
                )
                return turns.saved_all(policy, state, now_ms)
            failed = f"{result.value}: {reason}" if reason else result.value
            return turns.give_up(policy, state, failed, now_ms, commit_over=result is CommitResult.FAILED)
        case wire.Ack() | wire.Arrived() | wire.Saved():
            return state, answers.hold(state, event)
        case SignalCame() | Looked():
            state, commands = turns.turn(policy, state, now_ms)
            if current.committed:
                state, more = turns.saved_all(policy, state, now_ms)
                return state, commands + more
            return state, commands
        case wire.Hello() | wire.Saving() | wire.Failed() | wire.Finished() | wire.Left() | RankGone() | CommandExited():
            return state, ()
        case Report() | TaskCut() | Verified() | Adopted() | Met() | RequeueReturned():
            return state, ()
        case Resubmitted() | Recalled() | Stalled() | Asked() | Tick():
            return state, ()


def _leaving(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """Ranks have been told to leave; crashes of the command are journaled and change nothing."""
    match event:
        case CommandExited():
            return (leaving.own_end(policy, state, state.code) if state.code is not None else None) or (state, ())
        case wire.Left(again=True):
            return parting.ignored(state, now_ms), ()
        case SignalCame(meaning=Meaning.INTERRUPT):
            return parting.end_at_once(state, now_ms), ()
        case wire.Ack() | wire.Arrived() | wire.Saved() | wire.Hello():
            return state, leaving.answer(state, event)
        case wire.Saving() | wire.Failed() | wire.Finished() | wire.Left() | RankGone():
            return state, ()
        case SignalCame() | Looked() | Report() | TaskCut() | Verified() | Committed() | Adopted() | Met():
            return state, ()
        case RequeueReturned() | Resubmitted() | Recalled() | Stalled() | Asked() | Tick():
            return state, ()


def _requeueing(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """The requeue, last of all."""
    match event:
        case Met():
            return leaving.met(policy, state, event, now_ms)
        case Looked():
            return leaving.looked(policy, state, event, now_ms)
        case RequeueReturned():
            return leaving.returned(policy, state, event, now_ms)
        case wire.Left(again=True):
            return parting.ignored(state, now_ms), ()
        case SignalCame(meaning=Meaning.INTERRUPT):
            return parting.end_at_once(state, now_ms), ()
        case wire.Ack() | wire.Arrived() | wire.Saved() | wire.Hello():
            return state, leaving.answer(state, event)
        case wire.Saving() | wire.Failed() | wire.Finished() | wire.Left() | RankGone() | CommandExited():
            return state, ()
        case SignalCame() | Report() | TaskCut() | Verified() | Committed() | Adopted() | Resubmitted() | Recalled():
            return state, ()
        case Stalled() | Asked() | Tick():
            return state, ()


# --- deadlines ----------------------------------------------------------------------------------------------------------


def _due(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """What is due by now, in every phase; last in every step."""
    if state.phase is Phase.DONE:
        return state, ()
    commands: Commands = ()
    if isinstance(event, Tick):  # Only when what had come was taken in: nobody is gone whose word is waiting.
        state, lost = tasks.due(policy, state, event, now_ms)
        state, commands = losses.tasks_lost(policy, state, lost, now_ms) if lost else (state, ())
        state, more = losses.join_over(policy, state, now_ms)
        commands += more
        for killed in tasks.died(policy, state, now_ms):
            state, more = _take_in(policy, state, killed, now_ms)
            commands += more
    if state.phase is Phase.DONE:
        return state, commands
    state, looks = notices.due(policy, state, now_ms)
    commands += looks
    if Phase.RUNNING.value < state.phase.value < Phase.LEAVING.value and notices.watch_is_due(policy, state, now_ms):
        # The end of the job's time has come near during a round: that round becomes the last one, as with any notice.
        state, turned = turns.turn(policy, notices.ahead(policy, state, now_ms), now_ms)
        commands += turned
    state, more = _phase_due(policy, state, now_ms)
    state, looks_for = adopting.due(policy, state, now_ms)
    return state, (*commands, *more, *looks_for)


def _phase_due(policy: Policy, state: State, now_ms: int) -> Result:
    more: Commands = ()
    match state.phase:
        case Phase.RUNNING:
            state, more = _running_due(policy, state, now_ms)
        case Phase.AGREEING | Phase.SAVING:
            state, more, problem = rounds.tick(policy, state, now_ms)
            if problem:
                state, after = turns.give_up(policy, state, problem, now_ms)
                more += after
            elif rounds.all_arrived(state):
                state, after = turns.all_here(policy, state, now_ms)
                more += after
        case Phase.VERIFYING | Phase.COMMITTING:
            assert state.round is not None
            current = state.round
            if current.committed and now_ms >= current.verify_by_ms:
                state, more = turns.saved_all(policy, state, now_ms)
            elif not current.committed and now_ms >= current.verify_by_ms:
                what = "verification" if state.phase is Phase.VERIFYING else "commit"
                state, more = turns.give_up(policy, state, f"the {what} was not over in its time", now_ms)
            else:
                state, more = _own_stops_due(state, now_ms)
                state, again = checking.again(policy, state, now_ms)
                more += again
        case Phase.LEAVING:
            state, more = leaving.tick(policy, state, now_ms)
        case Phase.REQUEUEING:
            state, more = leaving.requeue_tick(policy, state, now_ms)
        case Phase.DONE:
            pass
    return state, more


def _running_due(policy: Policy, state: State, now_ms: int) -> Result:
    write_by_ms = turns.write_by_ms(state)
    if write_by_ms is not None and now_ms >= write_by_ms:
        return turns.command_over(policy, replace(state, writing=frozenset()), now_ms)
    if masked.until_ms(policy, state) is not None:
        return (state, ()) if masked.waits(policy, state, now_ms) else turns.command_over(policy, state, now_ms)
    if notices.watch_is_due(policy, state, now_ms):
        return turns.begin(policy, notices.ahead(policy, state, now_ms), Kind.LEAVE, now_ms)
    if state.closing_ms is not None:
        return turns.command_over(policy, state, now_ms) if adopting.is_closed(policy, state, now_ms) else (state, ())
    wait_ms = turns.waits_until_ms(state)
    if wait_ms is not None:
        return turns.begin(policy, state, Kind.LEAVE, now_ms) if now_ms >= wait_ms else (state, ())
    if state.next_save_ms is not None and now_ms >= state.next_save_ms:
        return turns.begin(policy, interval.with_next(policy, state, now_ms), Kind.PERIODIC, now_ms)
    return state, ()


def _own_stops_due(state: State, now_ms: int) -> Result:
    """A periodic save is skipped rather than holding training for the one before it."""
    if not state.stopped or now_ms < state.stopped_ms + OWN_STOP_MS:
        return state, ()
    state, over = ranks.stopped_since(state, now_ms - OWN_STOP_MS)
    word = wire.Abort(NO_ROUND, "the checkpoint before is still being verified")
    return state, tuple(to(rank.who, word) for rank in over)
