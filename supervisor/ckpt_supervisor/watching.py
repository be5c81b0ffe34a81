"""Who else looks at the run beside the machine: at its progress, its memory, its owner's wishes.

Owns the list of watches and their turns in the loop. Must not decide anything: a watch feeds events, or writes journal lines.
Each is imported here only, after the command runs, and what it has to do that takes time it does in the lane "watch".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ckpt_client import wire

from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import State
from ckpt_supervisor.lanes import Lanes
from ckpt_supervisor.launch import Launch

if TYPE_CHECKING:  # Only a step of several tasks has these.
    from ckpt_supervisor.others import Coordinating, Following

Feed = Callable[[ev.Event], None]
Log = Callable[[Entry], None]
Ends = tuple["Coordinating | None", "Following | None"]
View = Callable[[], State]
"""The machine's state as it is now, to look at only."""


class Watch(Protocol):
    """One of them."""

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When it wants to be looked at, on the monotonic clock."""

    def look(self, now_ms: int) -> None:
        """Its turn; called once in every turn of the loop, so it sees itself whether its time has come."""

    def heard(self, word: wire.Said) -> None:
        """A word of a rank below this supervisor, also one that is none of the machine's."""


def watches_of(launch: Launch, lanes: Lanes, feed: Feed, log: Log, view: View, ends: Ends = (None, None)) -> list[Watch]:
    """The watches of this supervisor. `ends`: what connects it to the step's others."""
    found: list[Watch] = []
    if launch.joined is None:
        from ckpt_supervisor.control import Control

        found.append(Control(launch, lanes, feed, log, view))
    from ckpt_supervisor.memory import Memory

    found.append(Memory(launch.options.memory_warn, launch.claims, lanes, log, time.monotonic_ns() // 1_000_000))
    if launch.options.hang_floor_ms is not None:
        from ckpt_supervisor.hangs import Hangs

        found.append(Hangs(launch, lanes, feed, log, view, ends))
    return found


class Watching:
    """All of them, as the loop has them."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = tuple(watches)

    @property
    def times_ms(self) -> list[int | None]:
        """When any of them wants to be looked at."""
        return [time for watch in self._watches for time in watch.times_ms]

    def look(self, now_ms: int) -> None:
        """A turn of each."""
        for watch in self._watches:
            watch.look(now_ms)

    def heard(self, word: wire.Said) -> None:
        """Pass a rank's word on."""
        for watch in self._watches:
            watch.heard(word)
