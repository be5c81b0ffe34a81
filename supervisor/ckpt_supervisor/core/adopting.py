"""Programs that save by themselves: what they wrote is looked for and adopted, and a notice's signal is handed on to them.

Pure. Owns when to look (--adopt), the wait for such a program's own save and end (--pass-signal), and the last look at what it
wrote. Must not know files: a look is a command, answered by Adopted with the steps that it has made checkpoints. A save that does
not come through in its time is not lost: the next start looks before it chooses.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from ckpt_supervisor.core.commands import Adopt, Command, PassSignal, Prune
from ckpt_supervisor.core.events import Adopted
from ckpt_supervisor.core.parting import BY_BUDGET_MS
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Leaving, Phase, State

LOOK_EVERY_MS = 10_000
"""While the program runs. A file counts once two looks have seen it unchanged, so it is a checkpoint at most 20 s after its end
and the time of its copy."""

CLOSE_LEAST_MS = 500
"""A program that has died of Slurm's own broadcast can be seen to end a moment before the supervisor's own signal is."""

CLOSE_MS = 900_000
"""Bound on the last look at what a program has left that ended by itself."""

OF_AN_HEIR = "the coordinator, task 0's supervisor, was lost; the next start looks at what the program has written"

Commands = tuple[Command, ...]


def hand_on(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """Enter LEAVING: the program gets its signal, and the time to save and to end that the way out leaves."""
    notice = state.notice
    assert notice is not None
    leaving = Leaving(
        fresh=state.inherited_fresh,
        reason=f"the program had not ended in its time after {policy.passes}" if not policy.heir else OF_AN_HEIR,
        began_ms=now_ms,
        said_ms=now_ms,
        end_command_at_ms=BY_BUDGET_MS,
        told=True,
        passed=True,
        adopted=not policy.adopts or policy.heir > 0,
    )
    state = replace(state, phase=Phase.LEAVING, round=None, leaving=leaving)
    return state, (() if state.over else (PassSignal(),))


def adopted(state: State, event: Adopted, now_ms: int) -> tuple[State, Commands]:
    """Take in what a look has found. A checkpoint that it made after the signal was handed on is that of this notice."""
    if not state.adopting:
        return state, ()
    state = replace(state, adopting=False, next_adopt_ms=now_ms + LOOK_EVERY_MS)
    newest = max(event.steps, default=-1)
    is_final = event.final and state.over  # One of a start before, that comes only now, is not that of this end.
    is_new = newest > state.committed_step and event.fresh
    is_again = 0 <= event.again == state.committed_step
    if event.steps:
        state = replace(state, committed_step=max(state.committed_step, newest), committed_here=True)
    leaving = state.leaving
    if leaving is not None and leaving.passed:
        fresh = leaving.fresh or (is_final and (is_new or is_again))
        reason = "" if fresh else event.problem or "the program has written nothing new"
        reason = reason if is_final else leaving.reason
        leaving = dataclasses.replace(leaving, fresh=fresh, adopted=leaving.adopted or is_final, reason=reason)
        return replace(state, leaving=leaving), ()
    if state.closing_ms is not None and is_final:
        state = replace(state, closed_look=True)
    return state, (Prune(),) if event.steps and state.phase is Phase.RUNNING else ()


def due(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """Ask for the looks that are due."""
    if not policy.adopts or state.adopting or policy.heir or state.phase is Phase.DONE:
        return state, ()
    leaving = state.leaving
    if leaving is not None:
        if leaving.passed and state.over and not leaving.adopted:
            reason = "what the program has written could not be checked in its time; the next start does it"
            return _look(replace(state, leaving=dataclasses.replace(leaving, reason=reason)), final=True)
        return state, ()
    if state.closing_ms is not None:
        return (state, ()) if state.closed_look else _look(state, final=True)
    if state.phase is Phase.RUNNING and state.next_adopt_ms is not None and now_ms >= state.next_adopt_ms:
        return _look(state, final=False)
    return state, ()


def next_deadline(policy: Policy, state: State) -> int | None:
    """When `due` or `is_closed` has something to do in RUNNING."""
    if not policy.adopts or policy.heir:
        return None
    if state.closing_ms is not None:
        return _closed_at_ms(policy, state)
    return None if state.adopting else state.next_adopt_ms


def close(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """The command is over: one more look at what it has left, before anything else comes of it."""
    if state.closing_ms is None:
        state = replace(state, closing_ms=now_ms)
    return due(policy, state, now_ms)


def is_closed(policy: Policy, state: State, now_ms: int) -> bool:
    """Whether nothing is to be looked for any more after the command's end.

    Where one of several tasks has failed the others still write: what is whole is for the next start to say.
    """
    if not policy.adopts or policy.heir or not state.over:
        return True
    return state.closing_ms is not None and now_ms >= _closed_at_ms(policy, state)


def is_answer(policy: Policy, state: State) -> bool:
    """Whether the command's end is the program's answer to a notice: its signal has reached it directly, by Slurm's broadcast."""
    return bool(policy.passes) and state.notice is not None and not state.ranks and not ended_before(state)


def ended_before(state: State) -> bool:
    """Whether the command had ended by itself before the notice came: the last look at what it has left can take minutes."""
    if state.closing_ms is None or state.notice is None:
        return False
    return state.notice.first_ms - state.closing_ms > CLOSE_LEAST_MS


def _look(state: State, *, final: bool) -> tuple[State, Commands]:
    return replace(state, adopting=True), (Adopt(final),)


def _closed_at_ms(policy: Policy, state: State) -> int:
    assert state.closing_ms is not None
    if not state.closed_look:
        by_ms, notice = state.closing_ms + CLOSE_MS, state.notice
        if notice is None:
            return by_ms
        at_once = not policy.slurm and notice.interrupts > 1  # A person's second ctrl-C.
        return state.closing_ms if at_once else min(by_ms, max(state.closing_ms, notice.budget.save_by_ms))
    return state.closing_ms + (CLOSE_LEAST_MS if policy.passes else 0)
