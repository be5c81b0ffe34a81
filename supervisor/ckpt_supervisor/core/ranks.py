"""The table of ranks: who is attached, under which identity, and who is gone (rules 10 and 11).

Pure. Owns Hello and the bookkeeping of who was heard; knows nothing of rounds.
"""

from __future__ import annotations

import dataclasses

from ckpt_client import wire
from ckpt_client.wire import FromRank, Who

from ckpt_supervisor.core.commands import Command, Say
from ckpt_supervisor.core.names import step_name
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Rank, State

NEVER = 1 << 62
"""A step that no run reaches."""

RANKS_MAX = 65_536
"""More ranks than that below one coordinator are refused."""


def hello(policy: Policy, state: State, word: wire.Hello, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Let a rank in, or refuse it by name."""
    who = word.who
    problem = _problem(state, word)
    if problem:
        return state, (Say(who.pid, wire.Refused(problem)),)
    if who.generation > state.generation:
        state = dataclasses.replace(
            state,
            generation=who.generation,
            ranks=(),
            seen=(),
            alone=False,
            last_n=-1,
            resume_from=_newest(policy, state)[0],
            resume_step=_newest(policy, state)[1],
        )
    known = state.rank(who)
    if known is None:
        rank = Rank(who, word.world_size, word.sharded, heard_ms=now_ms)
        others = tuple(other for other in state.ranks if other.who.rank != who.rank)
        state = dataclasses.replace(
            state,
            ranks=tuple(sorted((*others, rank), key=lambda item: item.who.rank)),
            seen=tuple(sorted({*state.seen, who.rank})),
            alone=state.alone and who.rank in state.seen,
        )
    welcome = wire.Welcome(
        version=wire.VERSION,
        newest_round=state.newest_round if state.round is None else state.newest_round - 1,
        every_steps=policy.every_steps,
        resume_from=state.resume_from,
        resume_step=state.resume_step,
    )
    return state, (Say(who.pid, welcome),)


def heard(state: State, word: FromRank, now_ms: int) -> State | None:
    """Note that this rank was heard; None when the word is from nobody we know (an older generation, a refused process)."""
    rank = state.rank(word.who)
    if rank is None or rank.gone:
        return None
    rank = dataclasses.replace(rank, heard_ms=now_ms)
    match word:
        case wire.Finished():
            rank = dataclasses.replace(rank, finished=True, stopped_at=None)
        case wire.Failed(round=wire.NO_ROUND):
            rank = dataclasses.replace(rank, finished=False)
        case wire.Left():
            rank = dataclasses.replace(rank, left=True, stopped_at=None)
        case wire.Arrived(round=wire.NO_ROUND, at=at):
            if rank.stopped_at != at and at.n > state.last_n:
                rank = dataclasses.replace(rank, stopped_at=at, stopped_ms=now_ms)
        case wire.Hello() | wire.Ack() | wire.Arrived() | wire.Saving() | wire.Saved() | wire.Failed():
            pass
    return put(state, rank)


def gone(state: State, pid: int) -> State:
    """Mark the rank of this process as gone."""
    for rank in state.ranks:
        if rank.who.pid == pid and not rank.gone:
            return put(state, dataclasses.replace(rank, gone=True, stopped_at=None))
    return state


def all_gone(state: State) -> State:
    """The state after the command's end, when it is started again: no rank is left, also none whose process is not ours to watch,
    and the next ones may begin before the last step that was agreed on, where their own stops are no echoes."""
    left = tuple(dataclasses.replace(rank, gone=True, stopped_at=None) for rank in state.ranks)
    return dataclasses.replace(state, ranks=left, last_n=-1)


def put(state: State, rank: Rank) -> State:
    """The state with this rank's entry replaced."""
    return dataclasses.replace(state, ranks=tuple(rank if other.who == rank.who else other for other in state.ranks))


def no_longer_stopped(state: State, up_to: int = NEVER) -> State:
    """The state in which no rank waits at a stop of its own, at this step or before it."""
    over = [rank for rank in state.ranks if rank.stopped_at is not None and rank.stopped_at.n <= up_to]
    for rank in over:
        state = put(state, dataclasses.replace(rank, stopped_at=None))
    return state


def _problem(state: State, word: wire.Hello) -> str:
    who = word.who
    if word.version != wire.VERSION:
        return f"speaks protocol version {word.version}, the supervisor speaks {wire.VERSION}: install the same release for both"
    if who.generation < state.generation:
        return f"is of generation {who.generation}, and generation {state.generation} has begun"
    if len(state.ranks) >= RANKS_MAX:
        return f"there are {RANKS_MAX} ranks already"
    if who.generation == state.generation:
        for other in state.ranks:
            if other.who.rank == who.rank and other.who != who and other.live:
                return f"rank {who.rank} is taken by the live process {other.who.pid}; a second one is not supervised"
    return ""


def _newest(policy: Policy, state: State) -> tuple[str, int]:
    """Path and step to resume from, as of now: chosen once per generation, the same for all ranks."""
    if state.committed_here and state.committed_step >= 0:
        return f"{policy.directory}/{step_name(state.committed_step)}", state.committed_step
    return policy.resume_from, policy.resume_step


def describe_who(who: Who) -> str:
    """A rank's name for people."""
    return f"rank {who.rank} (pid {who.pid})"
