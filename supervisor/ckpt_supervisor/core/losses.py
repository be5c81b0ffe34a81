"""What the loss of a rank, or of another task's supervisor with the ranks below it, means for whatever is going on.

Pure. Owns the way from there in each phase. Who is lost, and since when, is tasks.py's.
"""

from __future__ import annotations

from ckpt_client import wire

from ckpt_supervisor.core import ranks, rounds, tasks, turns
from ckpt_supervisor.core.between import Report
from ckpt_supervisor.core.commands import Command
from ckpt_supervisor.core.events import (
    Adopted,
    Asked,
    CommandExited,
    Committed,
    Event,
    Looked,
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
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Phase, Stage, State, Task

Result = tuple[State, tuple[Command, ...]]


def tasks_lost(policy: Policy, state: State, lost: tuple[Task, ...], now_ms: int) -> Result:
    """Supervisors of other tasks are not heard from any more, nor are the ranks below them."""
    state = tasks.all_over(policy, state)
    names = ", ".join(tasks.describe(state, task, now_ms) for task in lost[:8]) + (", ..." if len(lost) > 8 else "")
    reason = f"no word of {names}"
    numbers = {task.number for task in lost}
    current = state.round
    match state.phase:
        case Phase.AGREEING | Phase.SAVING:
            assert current is not None
            for member in current.members:
                if member.who.task in numbers:
                    state = rounds.lost(state, member.who, Stage.GONE, "its task is not heard from")
            if state.round != current:
                return turns.give_up(policy, state, reason, now_ms)
        case Phase.VERIFYING:
            assert current is not None
            if current.unverified & numbers:
                return turns.give_up(policy, state, f"{reason}, before its ranks' files were verified", now_ms)
        case Phase.RUNNING:
            if state.code is not None:
                return turns.command_over(policy, state, now_ms)
        case Phase.COMMITTING | Phase.LEAVING | Phase.REQUEUEING | Phase.DONE:
            pass
    return state, ()


def join_over(policy: Policy, state: State, now_ms: int) -> Result:
    """Nobody else will join: what the others have come to is what there is."""
    after = tasks.join_is_over(policy, state, now_ms)
    if after.phase is Phase.RUNNING and after.code is not None and state.code is None:
        return turns.command_over(policy, after, now_ms)
    return after, ()


def loss(policy: Policy, state: State, event: Event, now_ms: int) -> Result:
    """A member will not save in this round."""
    current = state.round
    assert current is not None
    match event:
        case wire.Failed(who=who, round=number, reason=reason):
            if number != current.number or current.member(who) is None:
                return state, ()
            return _lost(policy, state, who, Stage.FAILED, reason, now_ms)
        case wire.Finished(who=who) | wire.Left(who=who):
            member = current.member(who)
            if member is None or member.stage is Stage.WRITTEN:
                return state, ()
            return _lost(policy, state, who, Stage.FINISHED, "left its training loop", now_ms)
        case RankGone(who=who, how=how):
            member = current.member(who)
            if member is None or member.stage is Stage.WRITTEN:
                return state, ()
            return _lost(policy, state, who, Stage.GONE, how, now_ms)
        case CommandExited(code=code, task=task):
            where = f" of task {task}" if policy.tasks > 1 else ""
            how = f"the command{where} ended with status {code}"
            for member in current.members:
                if member.who.task == task and member.stage is not Stage.WRITTEN:
                    state = rounds.lost(state, member.who, Stage.GONE, how)
            if state.round == current and state.code is None:
                return state, ()  # None of its ranks is waited for, and the others train on.
            return turns.give_up(policy, state, f"{how} before the save was over", now_ms)
        case (
            wire.Hello()
            | wire.Ack()
            | wire.Arrived()
            | wire.Saving()
            | wire.Saved()
            | Report()
            | TaskCut()
            | SignalCame()
            | Looked()
            | Verified()
            | Committed()
            | Adopted()
            | Met()
            | RequeueReturned()
            | Resubmitted()
            | Recalled()
            | Stalled()
            | Asked()
            | Tick()
        ):
            return state, ()


def _lost(policy: Policy, state: State, who: wire.Who, stage: Stage, reason: str, now_ms: int) -> Result:
    state = rounds.lost(state, who, stage, reason)
    return turns.give_up(policy, state, f"{ranks.describe_who(who)} {stage.value}: {reason}", now_ms)
