"""Another task's supervisor while the coordinator is there: it passes on what its ranks say and what they are told.

Pure, as the machine is, and no second machine: it decides nothing about a save or a way out. It repeats where its task stands
(Report), does what the coordinator's newest Stand says, has its own ranks' files verified, and notices when the coordinator is
lost. Then the one machine takes over here, as an heir (policy.heir): it saves nothing, leaves when it has to, and requeues in its
turn.
"""

from __future__ import annotations

import dataclasses

import msgspec
from ckpt_client import wire
from ckpt_client.wire import FromRank, Who
from msgspec.structs import replace

from ckpt_supervisor.core import machine, notices, ranks
from ckpt_supervisor.core.between import VERSION, Check, Checked, Report, Stand, Tell, Turned
from ckpt_supervisor.core.commands import (
    AskCommand,
    Command,
    EndCommand,
    Exit,
    PassSignal,
    PassUp,
    RelayCommand,
    Say,
    SendUp,
    StartCommand,
    TakeOver,
    Verify,
    to,
)
from ckpt_supervisor.core.events import CommandExited, Meaning, RankGone, SignalCame, TaskCut, Tick, Verified
from ckpt_supervisor.core.policy import EXIT_STALE, Policy
from ckpt_supervisor.core.state import Phase, State
from ckpt_supervisor.core.tasks import BEAT_MS, CUT_MS, GONE_MS, NAP_MS

EXIT_USAGE = 2

GONE_RANKS_MAX = 1_000
"""Most ranks whose end is repeated; torchrun may start its workers again and again."""

REAP_MS = 2_000
"""A command that was killed and has not ended by then does not hold its supervisor."""

RECENT_MS = 2_000
"""A signal that came this shortly before the coordinator was last heard may not have reached it."""

Event = FromRank | SignalCame | RankGone | CommandExited | Verified | Stand | Tell | Check | Turned | TaskCut | Tick
Result = tuple["Relay", tuple[RelayCommand, ...]]


class Relay(msgspec.Struct, frozen=True):
    """What a relay knows."""

    task: int
    epoch: int
    host: str
    pid: int
    heard_ms: int
    """When the coordinator was last heard; the begin before that."""
    spread_ms: int = 0
    """The second beat comes this much sooner than a second after the first: a thousand tasks do not all speak in one moment."""
    joined: bool = False
    stepped_ms: int = 0
    said_ms: int | None = None
    stand: Stand | None = None
    stood_ms: int = 0
    noticed_ms: int = 0
    """When the coordinator first told of the notice that is in force."""
    signals: tuple[tuple[str, str, int], ...] = ()
    recent: tuple[tuple[int, SignalCame], ...] = ()
    """The last signals and when they came."""
    restart: int = -1
    """The start of the command that runs, or has run last."""
    code: int | None = None
    asked: bool = False
    """What is left of the command was sent SIGTERM."""
    killed_ms: int | None = None
    passed: bool = False
    """The command has been handed the signal that it saves at."""
    command: int = 0
    """Its process, once it has ended."""
    why: str = ""
    """What is known of that end beyond its status."""
    gone: tuple[tuple[Who, str], ...] = ()
    finished: tuple[Who, ...] = ()
    """Ranks that have left their training loops by themselves."""
    hellos: tuple[wire.Hello, ...] = ()
    """Ranks that have attached since the command's start."""
    saved: tuple[wire.Saved, ...] = ()
    """What they said they had written for the newest round."""
    checking: int = 0
    """The round whose files are being verified, or were last."""
    checked: Checked | None = None
    newest_round: int = 0
    cut_ms: int | None = None
    """Since when the connection to the coordinator is closed."""
    lost: bool = False
    over: bool = False

    @property
    def is_running(self) -> bool:
        """The command has been started and has not ended."""
        return self.restart >= 0 and self.code is None


def start(task: int, epoch: int, host: str, pid: int, now_ms: int) -> Relay:
    """A relay that has found the coordinator's address."""
    spread_ms = task * 37 % BEAT_MS
    return Relay(task, epoch, host, pid, now_ms, spread_ms=spread_ms, stepped_ms=now_ms)


def started(state: Relay, stand: Stand) -> Relay:
    """The relay of a command that was started as soon as the coordinator's first word had said from what."""
    return replace(state, restart=stand.restart)


def step(policy: Policy, state: Relay, event: Event, now_ms: int) -> Result:
    """One event. Returns the new state and what to do."""
    if state.over:
        return state, ()
    if now_ms - state.stepped_ms > NAP_MS:
        state = replace(state, heard_ms=now_ms)  # This process itself was stopped: nobody could be heard.
    state = replace(state, stepped_ms=now_ms)
    state, commands = _take_in(policy, state, event, now_ms)
    state, more = _follow(state, now_ms)
    state, due = _due(state, now_ms)
    return state, commands + more + due


def next_deadline(state: Relay) -> int | None:
    """When a Tick has something to do; None for never."""
    if state.over:
        return None
    times = [0 if state.said_ms is None else state.said_ms + BEAT_MS]
    if state.joined and not state.lost:
        times.append(_lost_at_ms(state))
    if state.killed_ms is not None and state.is_running:
        times.append(max(state.killed_ms + REAP_MS, state.stepped_ms + 1))
    return min(times)


def _take_in(policy: Policy, state: Relay, event: Event, now_ms: int) -> Result:
    match event:
        case wire.Hello(who=who):
            others = tuple(hello for hello in state.hellos if hello.who.rank != who.rank)
            gone = tuple(item for item in state.gone if item[0] != who)
            finished = tuple(other for other in state.finished if other.rank != who.rank or other == who)
            return replace(state, hellos=(*others, event), gone=gone, finished=finished), (PassUp(event),)
        case wire.Saved(who=who, round=number):
            if any(word.round > number for word in state.saved):
                return state, (PassUp(event),)  # Of an older round, said again.
            kept = tuple(word for word in state.saved if word.round == number and word.who != who)
            return replace(state, saved=(*kept, event)), (PassUp(event),)
        case wire.Finished(who=who):
            kept_who = tuple(other for other in state.finished if other.rank != who.rank)
            return replace(state, finished=(*kept_who, who)), (PassUp(event),)
        case wire.Failed(who=who, round=wire.NO_ROUND):
            return replace(state, finished=tuple(other for other in state.finished if other != who)), (PassUp(event),)
        case wire.Ack() | wire.Arrived() | wire.Saving() | wire.Failed() | wire.Left():
            return state, (PassUp(event),)
        case SignalCame():
            return _signalled(state, event, now_ms)
        case RankGone(who=who, how=how):
            gone = (*state.gone, (who, how))[-GONE_RANKS_MAX:]
            return _report(replace(state, gone=gone), now_ms)
        case CommandExited(code=code, pid=pid, why=why):
            return _report(replace(state, code=code, command=pid, why=why), now_ms)
        case Verified():
            checked = Checked(state.task, event.round, event.problem, event.bytes_read, event.files, event.verified)
            return replace(state, checked=checked), (SendUp(checked),)
        case Stand(epoch=epoch):
            if epoch != state.epoch:
                return state, ()
            # Who has attached to the heir meanwhile is not known to the coordinator, and will not say Hello again.
            again = tuple(PassUp(hello) for hello in state.hellos) if state.lost else ()
            if event.left_ms is not None and (state.stand is None or state.stand.left_ms is None):
                state = replace(state, noticed_ms=now_ms)
            state = replace(state, heard_ms=now_ms, stand=event, stood_ms=now_ms, cut_ms=None)
            return replace(state, joined=True, lost=False), again
        case Tell():
            state = replace(state, heard_ms=now_ms, newest_round=max(state.newest_round, getattr(event.word, "round", 0)))
            return state, tuple(Say(pid, event.word) for pid in event.pids)
        case Check():
            state = replace(state, heard_ms=now_ms)
            return (state, ()) if state.lost else _check(state, event)  # An heir verifies nothing; it is asked again.
        case Turned(reason=reason):
            return _leave(state, EXIT_USAGE, reason, now_ms)
        case TaskCut():
            return replace(state, cut_ms=now_ms if state.cut_ms is None else state.cut_ms), ()
        case Tick():
            return state, ()


def _signalled(state: Relay, event: SignalCame, now_ms: int) -> Result:
    counts = {name: (meaning, count) for name, meaning, count in state.signals}
    count = counts.get(event.name, ("", 0))[1] + 1
    counts[event.name] = (event.meaning.name, count)
    signals = tuple((name, meaning, number) for name, (meaning, number) in counts.items())
    return _report(replace(state, signals=signals, recent=(*state.recent, (now_ms, event))[-8:]), now_ms)


def _check(state: Relay, event: Check) -> Result:
    """Verify what these ranks said they had written; a Check that comes again gets the same answer again."""
    if state.checked is not None and state.checked.round == event.round:
        return state, (SendUp(state.checked),)
    if state.checking == event.round:
        return state, ()  # They are being read.
    said = [word for word in state.saved if word.round == event.round and word.who.pid in event.pids]
    if len(said) < len(event.pids):
        problem = f"task {state.task} has not heard what {len(event.pids) - len(said)} of its ranks wrote"
        return state, (SendUp(Checked(state.task, event.round, problem, 0, (), "")),)
    said.sort(key=lambda word: word.who.rank)
    files = tuple((word.who.rank, file) for word in said for file in word.files)
    return replace(state, checking=event.round), (Verify(event.round, event.partial, files, event.full),)


def _follow(state: Relay, now_ms: int) -> Result:
    """Do what the newest Stand says and has not been done yet."""
    stand = state.stand
    if stand is None or state.lost:
        return state, ()
    if stand.code is not None:
        return _leave(state, stand.code, "", now_ms)
    if stand.restart > state.restart:
        if state.is_running:
            return _end_command(state, "it is started again", now_ms)
        state = replace(state, restart=stand.restart, code=None, asked=False, killed_ms=None, checked=None)
        state = replace(state, command=0, why="", gone=(), finished=(), hellos=(), saved=())
        return state, (StartCommand(stand.restart),)
    if stand.end and state.is_running:
        return _end_command(state, stand.end, now_ms)
    if stand.ask and state.is_running and not state.asked and state.killed_ms is None:
        return replace(state, asked=True), (AskCommand(stand.ask),)
    if stand.passed and state.is_running and not state.passed:
        return replace(state, passed=True), (PassSignal(),)
    return state, ()


def _end_command(state: Relay, why: str, now_ms: int) -> Result:
    if state.killed_ms is not None:
        return state, ()
    return replace(state, killed_ms=now_ms), (EndCommand(why),)


def _leave(state: Relay, code: int, line: str, now_ms: int) -> Result:
    """Exit with the step's status, once the command is over."""
    state, commands = _end_command(state, "the step is over", now_ms) if state.is_running else (state, ())
    assert state.killed_ms is not None or not state.is_running
    if state.is_running and now_ms < (state.killed_ms or 0) + REAP_MS:
        return state, commands
    state, last = _report(replace(state, over=True), now_ms)
    return state, (*commands, *last, Exit(code, line))


def _due(state: Relay, now_ms: int) -> Result:
    if state.over:
        return state, ()
    commands: tuple[RelayCommand, ...] = ()
    if state.said_ms is None:
        state, commands = _report(state, now_ms)
        assert state.said_ms is not None
        state = replace(state, said_ms=state.said_ms - state.spread_ms)
    elif now_ms >= state.said_ms + BEAT_MS:
        state, commands = _report(state, now_ms)
    if state.joined and not state.lost and now_ms >= _lost_at_ms(state):
        reason = f"task 0's supervisor has not been heard for {now_ms - state.heard_ms} ms"
        if state.restart < 0 and not state.recent:
            # Nothing runs here, nothing is asked for, and nobody is left to say what to resume from.
            state, more = _leave(state, EXIT_STALE, f"{reason}, and the command had not been started yet", now_ms)
            return state, commands + more
        state = replace(state, lost=True)
        commands = (*commands, TakeOver(reason))
    return state, commands


def _lost_at_ms(state: Relay) -> int:
    silent_ms = state.heard_ms + GONE_MS
    return silent_ms if state.cut_ms is None else min(silent_ms, max(state.cut_ms, state.heard_ms) + CUT_MS)


def _report(state: Relay, now_ms: int) -> Result:
    word = Report(
        task=state.task,
        version=VERSION,
        epoch=state.epoch,
        host=state.host,
        pid=state.pid,
        signals=state.signals,
        restart=state.restart,
        code=state.code,
        gone=state.gone,
        lost=state.lost,
        bye=state.over,
        finished=state.finished,
        command=state.command,
        why=state.why,
    )
    return replace(state, said_ms=now_ms), (SendUp(word),)


# --- the heir ---------------------------------------------------------------------------------------------------------


def heir_policy(policy: Policy, state: Relay) -> Policy:
    """The options of the machine that takes over here."""
    stand = state.stand or Stand(state.epoch)
    return dataclasses.replace(
        policy,
        epoch=state.epoch,
        tasks=1,
        heir=state.task,
        restarts=0,
        start_restarts=max(policy.start_restarts, stand.start_restarts),
        kill_wait_ms=stand.kill_wait_ms,
        resume_from=stand.resume_from,
        resume_step=stand.resume_step,
    )


def may_follow_again(heir: State) -> bool:
    """Whether the coordinator, heard again, is followed: not once anything was decided without it."""
    return heir.phase is Phase.RUNNING and heir.notice is None and heir.code is None


def inherit(policy: Policy, state: Relay, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """The machine's state on taking over, and what to do first: nobody stays parked for a coordinator that is lost.

    `policy` is heir_policy's. A notice that was in force, or a signal that may not have reached the coordinator, is in force
    here.
    """
    stand = state.stand or Stand(state.epoch)
    heir = State(
        began_ms=now_ms,
        epoch=state.epoch,
        resume_from=stand.resume_from,
        resume_step=stand.resume_step,
        committed_step=stand.committed_step,
        newest_round=state.newest_round,
        restarts=max(0, state.restart),
        start_restarts=policy.start_restarts,
        started=state.restart >= 0,
        inherited_fresh=stand.fresh,
        inherited_asked=state.asked,
        next_look_ms=now_ms,
    )
    ended = dict(state.gone)
    for hello in sorted(state.hellos, key=lambda item: item.who.generation):
        heir, _ = machine.hear(policy, heir, hello, now_ms)
        if hello.who in state.finished:
            heir, _ = machine.hear(policy, heir, wire.Finished(hello.who, wire.NO_ROUND), now_ms)
        if hello.who in ended:
            heir = ranks.gone(heir, hello.who, ended[hello.who])
    commands: tuple[Command, ...] = ()
    for number in (state.newest_round, wire.NO_ROUND):
        word = wire.Abort(number, "the coordinator was lost")
        commands += tuple(to(rank.who, word) for rank in heir.live)
    heir, more = _notice_in_force(policy, state, heir, now_ms)
    commands += more
    # The notice comes first: a command that has ended because it was told to is not taken for training that ended by itself.
    for event in (Tick(), *(() if state.code is None else (CommandExited(state.code, pid=state.command, why=state.why),))):
        heir, more = machine.step(policy, heir, event, now_ms)
        commands += more
    return heir, commands


def _notice_in_force(policy: Policy, state: Relay, heir: State, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """The notice of the coordinator, or of a signal that may not have reached it, from the time on when it came."""
    asks = [item for item in state.recent if item[1].meaning in (Meaning.LEAVE, Meaning.NOTICE, Meaning.INTERRUPT)]
    left_ms = None if state.stand is None else state.stand.left_ms
    if asks and asks[-1][0] >= state.stood_ms - RECENT_MS:
        at_ms, came = asks[-1]
    elif left_ms is not None:
        # Our own signal of it, if we had one: not that of an earlier notice that came to nothing.
        own_ms = [at_ms for at_ms, _ in asks if at_ms >= state.noticed_ms - RECENT_MS]
        at_ms, came = min(own_ms, default=state.noticed_ms), SignalCame("notice of the coordinator", Meaning.LEAVE)
    else:
        return heir, ()
    heir, commands = notices.signalled(policy, heir, came, at_ms)
    return notices.inherited(heir, None if left_ms is None else state.stood_ms + left_ms, now_ms), commands
