"""What follows when training fails by itself, or stands still: start it again in place, have the job requeued, or end.

Pure. Owns that choice and its budgets (--restarts, --max-crashes, --on-hang). Must not be asked while a notice is in force: then
the way out goes its way whatever the command does. Why in place first: all ranks of the step go on from the newest intact
checkpoint within seconds, without the queue; a failure that comes back at the same step with the same status is no accident.
"""

from __future__ import annotations

from msgspec.structs import replace

from ckpt_supervisor.core import comeback, interval, leaving, ranks, tasks
from ckpt_supervisor.core.budget import cut
from ckpt_supervisor.core.commands import Command, StartCommand
from ckpt_supervisor.core.events import Meaning, Stalled
from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import Notice, State

PAUSES_MS = (0, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000)
"""Pauses before each start in place: the first one at once, then time for whatever made it fail to pass."""

LEAVE_MS = 30_000
"""When nobody presses, the way out has as much time as Slurm's default KillWait gives."""

Commands = tuple[Command, ...]
Result = tuple[State, Commands]


def failed(policy: Policy, state: State, code: int, words: str, now_ms: int) -> Result:
    """The command has failed by itself; `words` say so with its status. It is over, or one task's part of it is."""
    repeated = _is_repeated(state, code)
    state = replace(state, last_crash=(state.died_n, code), died_n=-1)
    if repeated:
        return leaving.done(state, code, f"{words}, at the same step as before: not started again")
    if _may_restart(policy, state):
        return start_again(policy, state, now_ms)
    if not _may_requeue(policy) or state.history.crashes >= policy.max_crashes:
        return leaving.done(state, code, words + _used_up(policy, state))
    state = _noticed(policy, state, Cause.CRASHED, now_ms)
    barred = comeback.barred(policy, state)
    if barred:
        return leaving.done(replace(state, notice=None), code, f"{words}; not requeued: {barred}")
    return leaving.leave(policy, state, False, words, now_ms)


def stalled(policy: Policy, state: State, event: Stalled, now_ms: int) -> Result:
    """Training stands still. What is done about it is the user's choice; by default nothing but telling."""
    if not acts(policy, state, event):
        return state, ()
    if policy.on_hang == "restart" and _may_restart(policy, state):
        return start_again(policy, state, now_ms)
    state = _noticed(policy, state, Cause.HUNG, now_ms)
    return leaving.leave(policy, state, False, event.text, now_ms)


def acts(policy: Policy, state: State, event: Stalled) -> bool:
    """Whether anything is done about this hang."""
    if policy.on_hang == "warn" or state.notice is not None or state.code is not None or policy.heir:
        return False
    may = (policy.on_hang == "restart" and _may_restart(policy, state)) or _may_requeue(policy)
    return may and _is_of_this_start(state, event)


def start_again(policy: Policy, state: State, now_ms: int) -> Result:
    """Start the commands of all tasks again in place, from the newest intact checkpoint."""
    restart = state.restarts + 1
    state = tasks.started_again(state)
    state = replace(state, restarts=restart, started=False, round=None, closing_ms=None, closed_look=False, settle_ms=None)
    state = interval.with_next(policy, ranks.all_gone(state), now_ms)
    return state, (StartCommand(restart, PAUSES_MS[min(restart, len(PAUSES_MS)) - 1]),)


def _is_of_this_start(state: State, event: Stalled) -> bool:
    """Every task tells of the same hang, seconds apart: after the first word all is started again, and the others are old."""
    ranks_named = (state.ranks.get(number) for number in event.ranks)
    return any(rank is not None and rank.live for rank in ranks_named)


def _may_restart(policy: Policy, state: State) -> bool:
    """A task that is lost takes its node with it: nothing can be started there."""
    return state.restarts < policy.restarts and not any(task.gone for task in state.tasks)


def _may_requeue(policy: Policy) -> bool:
    return policy.slurm and policy.requeue != "never" and not policy.heir


def _is_repeated(state: State, code: int) -> bool:
    """Whether it has failed just so in this attempt before: at the same step, as the rank said itself, with the same status.

    Not while it resumes: a checkpoint that cannot be loaded is start/resume_gate.py's, which takes the one before
    (--resume-tries).
    """
    return state.died_n > state.resume_step and state.last_crash == (state.died_n, code)


def _used_up(policy: Policy, state: State) -> str:
    """What was tried before, for the last line; "" if nothing was to be."""
    tried = []
    if policy.restarts:
        tried.append(f"after {state.restarts} of {policy.restarts} starts in place (--restarts)")
    if policy.max_crashes and _may_requeue(policy):
        tried.append(f"after {state.history.crashes} of {policy.max_crashes} requeues (--max-crashes)")
    return "".join(f"; {text}" for text in tried)


def _noticed(policy: Policy, state: State, cause: Cause, now_ms: int) -> State:
    """The notice that nobody sent."""
    kill_at_ms = now_ms + max(LEAVE_MS, policy.kill_wait_ms)
    notice = Notice(
        name=cause.value,
        meaning=Meaning.LEAVE,
        first_ms=now_ms,
        kill_at_ms=kill_at_ms,
        budget=cut(now_ms, kill_at_ms),
        cause=cause,
        looked=True,
        deadline_known=True,
        signals=0,
    )
    return replace(state, notice=notice)
