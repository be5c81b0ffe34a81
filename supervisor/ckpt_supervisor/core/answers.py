"""Answers to words of ranks that belong to no running round, or to one whose files are being checked.

Pure. Owns who is released and who only hears that it is heard (docs/protocol.md, rules 5 and 7). Must not change anything.
"""

from __future__ import annotations

from ckpt_client import wire
from ckpt_client.wire import NO_ROUND

from ckpt_supervisor.core.commands import Command, to
from ckpt_supervisor.core.state import State

Commands = tuple[Command, ...]
Word = wire.Ack | wire.Arrived | wire.Saved


def is_stale(state: State, word: Word) -> bool:
    """Whether this word belongs to no round that is running."""
    return state.round is None or word.round != state.round.number or state.round.member(word.who) is None


def stale(state: State, word: Word) -> Commands:
    """A word of a round that is over: that rank may be parked, and is released."""
    if word.round == NO_ROUND or not is_stale(state, word):
        return ()
    return (to(word.who, wire.Abort(word.round, "this round is over")),)


def hold(state: State, word: Word) -> Commands:
    """A rank that is parked while the files are checked hears that it is heard."""
    if word.round != NO_ROUND and is_stale(state, word):
        return stale(state, word)
    return (to(word.who, wire.Wait(word.round)),)
