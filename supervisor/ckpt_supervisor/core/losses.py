"""What the loss of other tasks' supervisors, and of the ranks below them, means for whatever is going on.

Pure. Owns the way from there in each phase. Who is lost, and since when, is tasks.py's.
"""

from __future__ import annotations

from ckpt_supervisor.core import rounds, tasks, turns
from ckpt_supervisor.core.commands import Command
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
