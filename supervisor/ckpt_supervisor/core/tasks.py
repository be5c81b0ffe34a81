"""The other supervisors of the step, as the coordinator knows them: who is there, what they report, and what they are told.

Pure. Owns the table of tasks, the merging of one broadcast that reaches every task a little apart, and the exit codes of all
their commands. Must not know rounds: machine.py says what the loss of a task means for one. A step of one task has none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_client import wire
from msgspec.structs import replace

from ckpt_supervisor.core import parting, ranks
from ckpt_supervisor.core.between import TASKS_MAX, VERSION, Report, Stand
from ckpt_supervisor.core.commands import Announce, Command, TurnAway
from ckpt_supervisor.core.events import CommandExited, Meaning, RankGone, SignalCame, Tick
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Burst, State, Task
from ckpt_supervisor.core.table import Table

if TYPE_CHECKING:
    from ckpt_supervisor.core.events import Event

BEAT_MS = 1_000
"""Report and Stand are said again this often, and at every change."""

GONE_MS = 4_500
"""A task that has not been heard for this long is gone. Others notice a lost coordinator after the same time (5 s with the wait
for the next look at the clock)."""

CUT_MS = 1_500
"""A task whose connection was closed is gone after this long: libzmq connects again within a second (adapters/links.py)."""

DIED_MS = 5_000
"""A task whose connection was closed, and that has not come back by then, was killed, and its ranks with it: that ends training
as any rank's end does. A network that is cut closes no connection, and is waited for."""

EXIT_KILLED = 137

NAP_MS = 2_000
"""With beats every second a longer pause between two steps means that this process itself was stopped: nobody was heard
meanwhile, and nobody is gone for it."""

BROADCAST_MS = 10_000
"""One signal of Slurm reaches the tasks a little apart, and a word of it may come late: within this time it is one and the same,
unless a task tells of a second one."""

SIGNALS_AT_ONCE_MAX = 3
"""A report that tells of more signals of one name than that since the last one tells of this many."""


def unfold(policy: Policy, state: State, report: Report) -> tuple[Event, ...]:
    """What is new in a report, as events in their order; the report itself is the first. All of it may have been said before."""
    if problem(policy, state, report):
        return (report,)
    known = state.tasks.get(report.task)
    before = {} if known is None else {name: count for name, _, count in known.signals}
    events: list[Event] = [report]
    for name, meaning, count in report.signals:
        if meaning in Meaning.__members__:
            new = min(count - before.get(name, 0), SIGNALS_AT_ONCE_MAX)
            events += [SignalCame(name, Meaning[meaning], report.task)] * new
    for who in report.finished:
        rank = state.rank(who)
        if rank is not None and not (rank.finished or rank.died or (rank.gone and not rank.ended)):
            events.append(wire.Finished(who, wire.NO_ROUND))
    for who, how in report.gone:
        rank = state.rank(who)
        if rank is not None and not rank.gone:
            events.append(RankGone(who, how))
    if report.code is not None and report.restart == state.restarts and state.codes.get(report.task) is None:
        events.append(CommandExited(report.code, report.task, report.command, report.why))
    return tuple(events)


def problem(policy: Policy, state: State, report: Report) -> str:
    """Why this task cannot take part, or ""."""
    if report.version != VERSION:
        versions = f"task {report.task} speaks version {report.version}, task 0 speaks {VERSION}"
        return f"{versions}: install the same release on all nodes"
    if report.epoch != policy.epoch:
        return f"task {report.task} follows epoch {report.epoch}, and this is epoch {policy.epoch}"
    if not 0 < report.task < min(policy.tasks, TASKS_MAX):
        return f"task {report.task} of a step of {policy.tasks} tasks"
    known = state.tasks.get(report.task)
    if known is not None and not known.gone and (known.host, known.pid) != (report.host, report.pid):
        return f"task {report.task} is taken by process {known.pid} on {known.host}"
    return ""


def reported(policy: Policy, state: State, report: Report, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Note a report. A task that is new, or back, is told at once where the step stands."""
    wrong = problem(policy, state, report)
    if wrong:
        return state, (TurnAway(report.task, wrong),)
    known = state.tasks.get(report.task)
    task = Task(report.task, report.host, report.pid, now_ms, signals=report.signals, bye=report.bye)
    if known is not None and known.cut_ms is not None and not report.lost:
        cut = [other.cut_ms for other in state.tasks if other.cut_ms is not None and other.number != report.task]
        state = replace(state, cut_ms=min(cut, default=None))
    if report.lost and known is not None:
        # It follows again, or it does not: what it goes on to say of itself keeps nobody waiting for its ranks.
        state = replace(state, tasks=state.tasks.put(report.task, replace(known, signals=report.signals, bye=report.bye)))
        return state, (Announce(stand(policy, state, now_ms), (report.task,)),) if known.gone else ()
    if known is not None and not known.gone:
        return replace(state, tasks=state.tasks.put(report.task, task)), ()
    if known is not None and known.pid == report.pid:
        for rank in state.ranks:
            if rank.cut and rank.who.task == report.task:
                state = ranks.put(state, replace(rank, cut=False))
    first_ms = now_ms if not len(state.tasks) else min(state.tasks_heard_ms, now_ms)
    state = replace(state, tasks=state.tasks.put(report.task, task), tasks_heard_ms=first_ms)
    return state, (Announce(stand(policy, state, now_ms), (report.task,)),)


def cut(state: State, number: int, now_ms: int) -> State:
    """A task's connection was closed."""
    task = state.tasks.get(number)
    if task is None or task.cut_ms is not None or task.bye:
        return state
    first_ms = now_ms if state.cut_ms is None else state.cut_ms
    return replace(state, tasks=state.tasks.put(number, replace(task, cut_ms=now_ms)), cut_ms=first_ms)


def died(policy: Policy, state: State, now_ms: int) -> tuple[CommandExited, ...]:
    """The ends of commands whose supervisors were killed, while nobody is on the way out anyway."""
    if state.cut_ms is None or now_ms < state.cut_ms + DIED_MS or state.notice is not None or state.leaving is not None:
        return ()
    return tuple(
        CommandExited(EXIT_KILLED, task.number)
        for task in state.tasks
        if task.gone and _was_killed(task, now_ms) and state.codes.get(task.number) is None
    )


def _was_killed(task: Task, now_ms: int) -> bool:
    """Its connection was closed while it was well, and not for its silence (adapters/links.py closes one silent for long)."""
    return task.cut_ms is not None and task.cut_ms - task.heard_ms < GONE_MS and now_ms >= task.cut_ms + DIED_MS


def is_fresh(policy: Policy, state: State, event: SignalCame, now_ms: int) -> tuple[State, bool]:
    """Whether this signal is a new one, or another task's word of one that is known."""
    if policy.tasks == 1:
        return state, True
    others = tuple(burst for burst in state.bursts if burst.name != event.name)
    known = next((burst for burst in state.bursts if burst.name == event.name), None)
    if known is None or now_ms - known.began_ms > BROADCAST_MS:
        known = Burst(event.name, now_ms, 0, Table())
    # As many were sent as the task that has got most of them tells of: two in a row are not two more with every task.
    times = (known.told.get(event.task) or 0) + 1
    fresh = times > known.times
    known = replace(known, told=known.told.put(event.task, times))
    if fresh:
        known = replace(known, began_ms=now_ms, times=times)
    return replace(state, bursts=(*others, known)), fresh


def exited(policy: Policy, state: State, event: CommandExited) -> State:
    """One task's command has ended. All of training has when all have, or when one has failed and nobody was told to leave."""
    if state.codes.get(event.task) is not None:
        return state
    if policy.tasks > 1 and state.restarts and not state.started and state.leaving is None:
        return state  # What was left of the start before, ended to make way for the next one.
    failed = event.code if state.failed is None and event.code != 0 else state.failed
    at_work = frozenset(who for who in state.at_work if who.task != event.task)  # What is below it ends with it.
    why = event.why if event.why and event.code == failed else state.why_exited
    state = replace(state, codes=state.codes.put(event.task, event.code), failed=failed, at_work=at_work, why_exited=why)
    state = replace(state, pids=state.pids.put(event.task, event.pid)) if event.pid else state
    return all_over(policy, state)


def all_over(policy: Policy, state: State) -> State:
    """Settle whether training is over; a task that is gone has no command any more."""
    over = all(state.codes.get(number) is not None or _is_gone(state, number) for number in range(policy.tasks))
    code = state.code
    if code is None and (over or (state.failed is not None and state.leaving is None)):
        code = state.failed or 0
    return replace(state, over=over, code=code)


def _is_gone(state: State, number: int) -> bool:
    task = state.tasks.get(number)
    if task is not None and task.cut_ms is not None and state.notice is None and state.leaving is None:
        return False  # It may have been killed, which is no good end: `died` will say.
    return task.gone if task is not None else number > 0 and state.join_is_over


def missing(policy: Policy, state: State) -> list[int]:
    """Tasks that have never reported."""
    return [number for number in range(1, policy.tasks) if state.tasks.get(number) is None]


def join_is_over(policy: Policy, state: State, now_ms: int) -> State:
    """Tasks that have not reported by --join-timeout are not waited for any more, whatever they are."""
    if policy.tasks == 1 or state.join_is_over or now_ms < state.began_ms + policy.join_ms:
        return state
    return all_over(policy, replace(state, join_is_over=True))


def started_again(state: State) -> State:
    """The commands of all tasks are started once more."""
    state = replace(state, codes=Table(), pids=Table(), failed=None, code=None, over=False, at_work=frozenset())
    return replace(state, why_exited="")


def due(policy: Policy, state: State, tick: Tick, now_ms: int) -> tuple[State, tuple[Task, ...]]:
    """Who is gone by now, marked so, with their ranks."""
    if policy.tasks == 1:
        return state, ()
    nap = tick.behind or now_ms - state.stepped_ms > NAP_MS
    state = replace(state, stepped_ms=now_ms, awake_ms=now_ms if nap else state.awake_ms)
    heard_by_ms = max(state.tasks_heard_ms, state.awake_ms) + GONE_MS
    if not len(state.tasks) or now_ms < (heard_by_ms if state.cut_ms is None else min(heard_by_ms, state.cut_ms + CUT_MS)):
        return state, ()
    lost = tuple(task for task in state.tasks if not task.gone and _gone_at_ms(state, task) <= now_ms)
    for task in lost:
        state = replace(state, tasks=state.tasks.put(task.number, replace(task, gone=True)))
    numbers = {task.number for task in lost}
    for rank in state.ranks if numbers else ():
        if rank.who.task in numbers:
            state = ranks.put(state, replace(rank, cut=True, stopped_at=None))
    first_ms = min((task.heard_ms for task in state.tasks if not task.gone), default=now_ms)
    return replace(state, tasks_heard_ms=first_ms), lost


def _gone_at_ms(state: State, task: Task) -> int:
    silent_ms = max(task.heard_ms, state.awake_ms) + GONE_MS
    return silent_ms if task.cut_ms is None else min(silent_ms, max(task.cut_ms, state.awake_ms) + CUT_MS)


def next_deadline(policy: Policy, state: State) -> int | None:
    """When `due` or `announce` has something to do."""
    if policy.tasks == 1:
        return None
    times = [state.beat_ms]
    if any(not task.gone for task in state.tasks):
        times.append(max(state.tasks_heard_ms, state.awake_ms) + GONE_MS)
    # The beats are often enough for what follows from a closed connection.
    return min(times)


def announce(policy: Policy, state: State, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Tell all tasks where the step stands, at every change and every second."""
    if policy.tasks == 1:
        return state, ()
    word = stand(policy, state, now_ms)
    told = replace(word, left_ms=0 if state.notice is not None else None)
    if told == state.told and now_ms < state.beat_ms:
        return state, ()
    state = replace(state, told=told, beat_ms=now_ms + BEAT_MS)
    return state, (Announce(word),) if len(state.tasks) else ()


def stand(policy: Policy, state: State, now_ms: int) -> Stand:
    """Where the step stands."""
    leaving, notice = state.leaving, state.notice
    end = "" if leaving is None or leaving.killed_ms is None else leaving.reason or "its time to end by itself was over"
    return Stand(
        epoch=state.epoch,
        restart=state.restarts if state.started else -1,
        resume_from=state.resume_from,
        resume_step=state.resume_step,
        committed_step=state.committed_step,
        end=end,
        code=state.exit_code,
        fresh=leaving is not None and leaving.fresh,
        start_restarts=max(policy.start_restarts, state.start_restarts),
        kill_wait_ms=policy.kill_wait_ms,
        left_ms=None if notice is None else notice.kill_at_ms - now_ms,
        passed=leaving is not None and leaving.passed,
        ask="" if leaving is None or leaving.asked_ms is None else parting.why_asked(leaving),
    )


def describe(state: State, task: Task, now_ms: int) -> str:
    """A task that is gone, for people: where it was, for how long, and whose ranks are gone with it."""
    below = [rank.who.rank for rank in state.ranks if rank.who.task == task.number]
    some = ", ".join(map(str, below[:8])) + (", ..." if len(below) > 8 else "")
    ranks_below = f" with rank{'s' if len(below) > 1 else ''} {some}" if below else ""
    closed = ", its connection is closed" if task.cut_ms is not None else ""
    return f"task {task.number} on {task.host}{ranks_below} for {now_ms - task.heard_ms} ms{closed}"
