"""Training that has failed behind a command that ends with 0: `sh -c "python train.py; echo done"` loses the status of python.

Pure. Owns what is known of the ends of ranks once the command is over, and how long their last words are waited for. Must not
decide what follows (turns.py): it answers who has failed, or that this is not settled yet. Only the last process of each rank
counts, and only a bad end that is known: a rank that lives, that has finished its loop, or that never attached proves nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from ckpt_supervisor.core import ranks
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Rank, State

SETTLE_MS = 500
"""A rank's last words and its end come by other descriptors than the command's end, in any order and a few milliseconds apart."""

SETTLE_TASKS_MS = 2_000
"""Of another task they come with its supervisor's report, which is repeated every second."""

EXIT_MASKED = 1


def until_ms(policy: Policy, state: State) -> int | None:
    """Until when last words are waited for; None when nothing is waited for."""
    if state.settle_ms is None or state.notice is not None:
        return None
    return state.settle_ms + (SETTLE_MS if policy.tasks == 1 else SETTLE_TASKS_MS)


def waits(policy: Policy, state: State, now_ms: int) -> bool:
    """Whether it is not known yet how the ranks of a command that ended with 0 have ended."""
    by_ms = until_ms(policy, state)
    if by_ms is not None and now_ms >= by_ms:
        return False
    return not any(rank.died for rank in state.ranks) and any(_is_open(state, rank) for rank in state.ranks)


def settle(state: State, now_ms: int) -> State:
    """The state in which last words are waited for."""
    return state if state.settle_ms is not None else replace(state, settle_ms=now_ms)


def culprit(state: State) -> str:
    """The rank that has failed and why, for people; "" if none is known to have."""
    failed = [rank for rank in state.ranks if rank.died]
    failed += [rank for rank in state.ranks if rank.ended and _is_open(state, rank)]
    if not failed:
        return ""
    first = failed[0]
    return f"{ranks.describe_who(first.who)}: {first.died or f'{first.ended} before its training was over'}"


def _is_open(state: State, rank: Rank) -> bool:
    """Whether nothing shows that this rank has come to a good end. Where it was the command itself, that one's status does."""
    if rank.finished or rank.left or rank.cut or (rank.gone and not rank.ended):
        return False
    return state.pids.get(rank.who.task) != rank.who.pid
