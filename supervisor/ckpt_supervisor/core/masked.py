"""Training that has failed behind a command that ends with 0: `sh -c "python train.py; echo done"` loses the status of python.

Pure. Owns what is known of the ends of ranks once the command is over, and how long their last words are waited for. Must not
decide what follows (turns.py): it answers who has failed, or that this is not settled yet. Only the last process of each rank
counts, and only its own word that it dies of an exception. An end without a word proves nothing: `os._exit(0)` after the loop, a
fork child, a trial that its agent has ended and a goodbye that was lost all look like a death, and none of them is a failure.
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
    if state.settle_ms is None:
        return None
    return state.settle_ms + (SETTLE_MS if policy.tasks == 1 else SETTLE_TASKS_MS)


def waits(policy: Policy, state: State, now_ms: int) -> bool:
    """Whether it is not known yet how the ranks of a command that ended with 0 have ended."""
    by_ms = until_ms(policy, state)
    if by_ms is not None and now_ms >= by_ms:
        return False
    return not culprit(state) and any(_may_speak(state, rank) for rank in state.ranks)


def ended_before(state: State) -> bool:
    """Whether the command had ended with 0 before the notice came: it does not make an interruption of a run that was over."""
    return state.settle_ms is not None


def settle(state: State, now_ms: int) -> State:
    """The state in which last words are waited for."""
    return state if state.settle_ms is not None else replace(state, settle_ms=now_ms)


def culprit(state: State) -> str:
    """The rank that has failed and why, for people; "" if none is known to have."""
    first = next((rank for rank in state.ranks if rank.died and _is_hidden(state, rank)), None)
    return "" if first is None else f"{ranks.describe_who(first.who)}: {first.died}"


def _may_speak(state: State, rank: Rank) -> bool:
    """Whether its word of a bad end may still be on its way."""
    said = rank.finished or rank.left or rank.died
    return not said and not rank.cut and not (rank.gone and not rank.ended) and _is_hidden(state, rank)


def _is_hidden(state: State, rank: Rank) -> bool:
    """Whether another program's status stands for this rank's. Where it was the command itself, 0 is its own."""
    return state.pids.get(rank.who.task) != rank.who.pid
