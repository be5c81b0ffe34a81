"""The table of ranks: who is attached, under which identity, and who is gone (rules 10 and 11).

Pure. Owns Hello and the bookkeeping of who was heard; knows nothing of rounds.
"""

from __future__ import annotations

from ckpt_client import wire
from ckpt_client.wire import FromRank, Who
from msgspec.structs import replace

from ckpt_supervisor.core.commands import Command, to
from ckpt_supervisor.core.names import step_name
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Rank, State
from ckpt_supervisor.core.table import Table

NEVER = 1 << 62
"""A step that no run reaches."""

UNSAID = "for a reason that is not known"

RANKS_MAX = 65_536
"""More ranks than that below one coordinator are refused."""


def hello(policy: Policy, state: State, word: wire.Hello, now_ms: int) -> tuple[State, tuple[Command, ...]]:
    """Let a rank in, or refuse it by name."""
    who = word.who
    problem = _problem(state, word)
    if problem:
        return state, (to(who, wire.Refused(problem)),)
    if who.generation > state.generation:
        path, resume_step = _newest(policy, state)
        state = replace(
            state,
            generation=who.generation,
            ranks=Table(),
            world_size=0,
            stopped=0,
            alone=False,
            last_n=-1,
            resume_from=path,
            resume_step=resume_step,
        )
    if state.rank(who) is None:
        alone = state.alone and state.ranks.get(who.rank) is not None
        state = replace(state, world_size=max(state.world_size, word.world_size), alone=alone)
        state = put(state, Rank(who, word.world_size, word.sharded))
    welcome = wire.Welcome(
        version=wire.VERSION,
        newest_round=state.newest_round if state.round is None else state.newest_round - 1,
        every_steps=policy.every_steps,
        resume_from=state.resume_from,
        resume_step=state.resume_step,
    )
    return state, (to(who, welcome),)


def heard(state: State, word: FromRank, now_ms: int) -> State | None:
    """Note what this rank says of itself; None when the word is from nobody we know (an older generation, a refused process)."""
    rank = state.rank(word.who)
    if rank is None or rank.gone:
        return None
    if state.at_work and isinstance(word, wire.Saved | wire.Failed | wire.Finished | wire.Left):
        state = replace(state, at_work=state.at_work - {word.who})
    match word:
        case wire.Finished():
            return put(state, replace(rank, finished=not rank.died, stopped_at=None))
        case wire.Failed(round=wire.NO_ROUND, reason=reason, n=n):
            return replace(put(state, replace(rank, finished=False, died=reason or UNSAID)), died_n=max(state.died_n, n))
        case wire.Left():
            return put(state, replace(rank, left=True, stopped_at=None))
        case wire.Arrived(round=wire.NO_ROUND, at=at):
            if rank.stopped_at != at and at.n > state.last_n:
                return put(state, replace(rank, stopped_at=at, stopped_ms=now_ms))
        case wire.Hello() | wire.Ack() | wire.Arrived() | wire.Saving() | wire.Saved() | wire.Failed():
            pass
    return state


def last_word(state: State, word: FromRank) -> State:
    """Note what a rank has said of its own end that was seen to end before this was read."""
    rank = state.rank(word.who)
    if rank is None or not rank.ended:
        return state
    match word:
        case wire.Finished() if not rank.finished and not rank.died:
            return put(state, replace(rank, finished=True))
        case wire.Failed(round=wire.NO_ROUND, reason=reason, n=n) if not rank.died:
            return replace(put(state, replace(rank, finished=False, died=reason or UNSAID)), died_n=max(state.died_n, n))
        case _:
            return state


def gone(state: State, who: Who, how: str) -> State:
    """Mark this rank as gone: its process has ended."""
    state = replace(state, at_work=state.at_work - {who}) if state.at_work else state
    rank = state.rank(who)
    if rank is None or rank.gone:
        return state
    return put(state, replace(rank, gone=True, ended=how or UNSAID, stopped_at=None))


def all_gone(state: State) -> State:
    """The state after the command's end, when it is started again: no rank is left, also none whose process is not ours to watch,
    and the next ones may begin before the last step that was agreed on, where their own stops are no echoes."""
    for rank in state.ranks:
        state = put(state, replace(rank, gone=True, died="", ended="", stopped_at=None))
    return replace(state, last_n=-1)


def put(state: State, rank: Rank) -> State:
    """The state with this rank's entry added or replaced."""
    before = state.ranks.get(rank.who.rank)
    was, stops = before is not None and before.stopped_at is not None, rank.stopped_at is not None
    stopped_ms = state.stopped_ms
    if stops:
        stopped_ms = min(stopped_ms, rank.stopped_ms) if state.stopped else rank.stopped_ms
    return replace(
        state,
        ranks=state.ranks.put(rank.who.rank, rank),
        stopped=state.stopped + stops - was,
        stopped_ms=stopped_ms,
    )


def no_longer_stopped(state: State, up_to: int = NEVER, but: frozenset[Who] = frozenset()) -> State:
    """The state in which no rank waits at a stop of its own, at this step or before it; `but` are left as they are."""
    if not state.stopped:
        return state
    for rank in state.ranks:
        if rank.stopped_at is not None and rank.stopped_at.n <= up_to and rank.who not in but:
            state = put(state, replace(rank, stopped_at=None))
    return state


def stopped_since(state: State, since_ms: int) -> tuple[State, tuple[Rank, ...]]:
    """Who has stopped by itself at this instant or before; the state is without those stops."""
    over = tuple(rank for rank in state.live if rank.stopped_at is not None and rank.stopped_ms <= since_ms)
    for rank in over:
        state = put(state, replace(rank, stopped_at=None))
    left_ms = [rank.stopped_ms for rank in state.ranks if rank.stopped_at is not None]
    return replace(state, stopped_ms=min(left_ms, default=0)), over


def _problem(state: State, word: wire.Hello) -> str:
    who = word.who
    if word.version != wire.VERSION:
        return f"speaks protocol version {word.version}, the supervisor speaks {wire.VERSION}: install the same release for both"
    if who.generation < state.generation:
        return f"is of generation {who.generation}, and generation {state.generation} has begun"
    if len(state.ranks) >= RANKS_MAX:
        return f"there are {RANKS_MAX} ranks already"
    other = state.ranks.get(who.rank) if who.generation == state.generation else None
    # One that has said that it dies is not waited for: its end is not seen where it has a pid namespace of its own.
    if other is not None and other.who != who and other.live and not other.died:
        return f"rank {who.rank} is taken by the live process {other.who.pid}; a second one is not supervised"
    return ""


def _newest(policy: Policy, state: State) -> tuple[str, int]:
    """Path and step to resume from, as of now: chosen once per generation, the same for all ranks."""
    if state.committed_here and state.committed_step >= 0:
        return f"{policy.directory}/{step_name(state.committed_step)}", state.committed_step
    return policy.resume_from, policy.resume_step


def describe_who(who: Who) -> str:
    """A rank's name for people."""
    where = f"task {who.task}, " if who.task else ""
    return f"rank {who.rank} ({where}pid {who.pid})"
