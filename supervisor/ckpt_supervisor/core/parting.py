"""The end of the command on the way out, in three stages: Leave, then SIGTERM to what is left, then SIGKILL.

Pure. Owns the share that each stage has of the time, cut backwards from the kill, and that nothing is asked twice. Must not know
the requeue, which goes on beside it (leaving.py). Why three: a rank that hears Leave ends at a quiet point; a wrapper or a helper
hears nothing, and cleans up at SIGTERM; what still lives then has had its time, and holds up the node.
"""

from __future__ import annotations

import dataclasses

from ckpt_client import wire
from msgspec.structs import replace

from ckpt_supervisor.core.commands import AskCommand, Command, EndCommand, to
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Leaving, Phase, State

RESEND_MS = 1_000
"""Leave is said again this often."""

IGNORED_MS = 1_500
"""A rank that goes on training after Preempted, or never said that it leaves, gets this long, SIGTERM's part included."""

LEAST_MS = 200
"""Even with the time over, ranks that were told to leave get this long."""

ASK_LEAST_MS = 300
"""With less than that between SIGTERM and SIGKILL there is no time to ask: it is killed at once."""

ASK_MOST_MS = 2_000
"""SIGTERM's part is a third of the time from Leave to the kill, within these two bounds."""

LEFT_ALONE_LEAST_MS, LEFT_ALONE_MOST_MS, LEFT_ALONE_PART = 1_000, 10_000, 8
"""Ranks in their loops, when those that had come to their end are gone, may be at their own last steps for an eighth of the time
that is left, within these two bounds."""

BY_BUDGET_MS = 1 << 60
"""As `end_command_at_ms`: the budget alone says when, as it follows what the looks find."""

Commands = tuple[Command, ...]


def begun(policy: Policy, state: State, fresh: bool, reason: str, now_ms: int) -> Leaving:
    """The way out as it begins, with the command's last moment."""
    assert state.notice is not None
    live, leave_by_ms = state.live, state.notice.budget.leave_by_ms
    own_end = any(rank.finished and not rank.gone for rank in state.ranks)
    if own_end:
        end_ms = BY_BUDGET_MS
    elif live:
        end_ms = min(now_ms + policy.leave_ms, max(now_ms + LEAST_MS, leave_by_ms))
    else:
        # Nobody hears Leave: the whole of it is SIGTERM's part, if there is any.
        end_ms = min(now_ms + ASK_MOST_MS, leave_by_ms)
        end_ms = end_ms if state.started and end_ms >= now_ms + ASK_LEAST_MS else now_ms
    return Leaving(
        fresh=fresh,
        reason=reason,
        began_ms=now_ms,
        said_ms=now_ms,
        end_command_at_ms=end_ms,
        cause=state.notice.cause if state.leaving is None else state.leaving.cause,
        own_end=own_end,
        told=(bool(live) and not own_end) or state.inherited_asked,
        asked_ms=now_ms if state.inherited_asked else None,
    )


def see_out(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """While the command runs: say Leave again, ask it to end, and end it, each once, when its time has come."""
    if state.over:
        return state, ()
    state, commands = _see_alone(policy, state, now_ms)
    leaving = state.leaving
    assert leaving is not None
    if now_ms >= leaving.said_ms + RESEND_MS:
        leaving = dataclasses.replace(leaving, said_ms=now_ms)
        commands = (*commands, *say_leave(state))
    ask_ms = ask_command_at_ms(state)
    if leaving.killed_ms is None and now_ms >= end_command_at_ms(state):
        leaving = dataclasses.replace(leaving, killed_ms=now_ms, told=True)
        commands = (*commands, EndCommand(leaving.reason))
    elif ask_ms is not None and now_ms >= ask_ms:
        leaving = dataclasses.replace(leaving, asked_ms=now_ms, told=True)
        commands = (*commands, AskCommand(why_asked(leaving)))
    return replace(state, leaving=leaving), commands


def _see_alone(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """Training that ends by itself but for ranks that wait for one that is gone does not: they are told to leave after all.

    Those that then come to their own end all the same have their time for it.
    """
    leaving = state.leaving
    assert leaving is not None
    if _comes_to_its_end(state):
        leaving = dataclasses.replace(leaving, own_end=True, alone_ms=None, end_command_at_ms=BY_BUDGET_MS)
    elif not leaving.own_end or now_ms >= end_command_at_ms(state):
        return state, ()
    elif not _is_left_alone(state):
        leaving = dataclasses.replace(leaving, alone_ms=None)
    elif leaving.alone_ms is None:
        leaving = dataclasses.replace(leaving, alone_ms=now_ms)
    elif now_ms >= _alone_until_ms(state):
        leaving = begun(policy, state, leaving.fresh, leaving.reason, now_ms)
        state = replace(state, leaving=dataclasses.replace(leaving, alone_ms=now_ms))
        return state, say_leave(state)
    return replace(state, leaving=leaving), ()


def _is_left_alone(state: State) -> bool:
    return bool(state.live) and not any(rank.finished and not (rank.gone or rank.cut) for rank in state.ranks)


def _comes_to_its_end(state: State) -> bool:
    """Whether all ranks that were told to leave when they had been left alone have come to the end of their loops instead."""
    leaving = state.leaving
    if leaving is None or leaving.own_end or leaving.alone_ms is None or state.phase is not Phase.LEAVING:
        return False
    if state.live or leaving.killed_ms is not None or leaving.asked_ms is not None:
        return False
    return not any(rank.left for rank in state.ranks) and any(rank.finished and not rank.gone for rank in state.ranks)


def _alone_until_ms(state: State) -> int:
    """Until when ranks that are left alone may come to their own end."""
    assert state.leaving is not None and state.leaving.alone_ms is not None and state.notice is not None
    alone_ms = state.leaving.alone_ms
    part_ms = (state.notice.budget.leave_by_ms - alone_ms) // LEFT_ALONE_PART
    return alone_ms + max(LEFT_ALONE_LEAST_MS, min(LEFT_ALONE_MOST_MS, part_ms))


def next_deadline(state: State) -> int | None:
    """When `see_out` has something to do. No instant stays behind once it has passed."""
    leaving = state.leaving
    assert leaving is not None
    if state.over:
        return None
    times = [leaving.said_ms + RESEND_MS]
    if leaving.killed_ms is None:
        if leaving.alone_ms is not None and leaving.own_end:
            times.append(_alone_until_ms(state))
        times.append(end_command_at_ms(state))
        ask_ms = ask_command_at_ms(state)
        if ask_ms is not None:
            times.append(ask_ms)
    return min(times)


def end_command_at_ms(state: State) -> int:
    """When the command is ended. A kill that comes nearer meanwhile (a scancel in the grace) brings this nearer too."""
    leaving = state.leaving
    assert leaving is not None and state.notice is not None
    return min(leaving.end_command_at_ms, max(leaving.began_ms + LEAST_MS, state.notice.budget.leave_by_ms))


def ask_command_at_ms(state: State) -> int | None:
    """When what is left of the command is asked to end; None when it is not, or has been.

    Training that ends by itself is not asked, nor a program that saves by itself: that would cut short what they are doing.
    """
    leaving = state.leaving
    assert leaving is not None
    if leaving.asked_ms is not None or leaving.killed_ms is not None or leaving.own_end or leaving.passed:
        return None
    end_ms = end_command_at_ms(state)
    span_ms = end_ms - leaving.began_ms
    if not leaving.told:
        return leaving.began_ms if span_ms >= ASK_LEAST_MS else None
    part_ms = max(ASK_LEAST_MS, min(ASK_MOST_MS, span_ms // 3))
    return end_ms - part_ms if span_ms - part_ms >= LEAST_MS else None


def why_asked(leaving: Leaving) -> str:
    """The reason for SIGTERM, for people; never ""."""
    return leaving.reason or "its time to end by itself was over"


def ignored(state: State, now_ms: int) -> State:
    """A rank has gone on training after Preempted: it does not get the time of one that leaves."""
    leaving = state.leaving
    if leaving is None:
        return state
    # SIGTERM comes nearer with the kill, and still before it.
    least_ms = (now_ms if leaving.asked_ms is None else leaving.asked_ms) + ASK_LEAST_MS
    end_ms = min(leaving.end_command_at_ms, max(now_ms, least_ms, leaving.began_ms + IGNORED_MS))
    return replace(state, leaving=dataclasses.replace(leaving, end_command_at_ms=end_ms))


def end_at_once(state: State, now_ms: int) -> State:
    """A second ctrl-C: no more waiting for training, nor for a look at what a program has written."""
    leaving = state.leaving
    if leaving is None:
        return state
    reason = "ctrl-C ended the program while it saved" if leaving.passed and not state.over else leaving.reason
    return replace(state, leaving=dataclasses.replace(leaving, end_command_at_ms=now_ms, adopted=True, reason=reason))


def say_leave(state: State) -> Commands:
    """Leave, to everybody who can still hear it."""
    if state.leaving is None or state.leaving.own_end:
        return ()
    word = wire.Leave(max(1, state.newest_round))
    return tuple(to(rank.who, word) for rank in state.live)
