"""Who else looks at the run beside the machine: at its progress, its memory, its owner's wishes.

Owns the list of watches and their turns in the loop. Must not decide anything: a watch feeds events, or writes journal lines.
Each is imported here only, after the command runs, and what it has to do that takes time it does in the lane "watch".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ckpt_client import wire

from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.state import State
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.lines import Lines

if TYPE_CHECKING:  # Only a step of several tasks has these.
    from ckpt_supervisor.tasks.others import Coordinating, Following

Feed = Callable[[ev.Event], None]
Ends = tuple["Coordinating | None", "Following | None"]
View = Callable[[], State]
"""The machine's state as it is now, to look at only."""


class Watch(Protocol):
    """One of them."""

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When it wants to be looked at, on the monotonic clock; soon while it waits for a result that does not wake the loop."""

    def look(self, now_ms: int) -> None:
        """Its turn; called once in every turn of the loop, so it sees itself whether its time has come."""

    def heard(self, word: wire.Said) -> None:
        """A word of a rank below this supervisor, also one that is none of the machine's."""


def watches_of(launch: Launch, lanes: Lanes, feed: Feed, lines: Lines, view: View, ends: Ends = (None, None)) -> list[Watch]:
    """The watches of this supervisor. `ends`: what connects it to the step's others."""
    log = lines.log
    found: list[Watch] = [*_tellers(launch, lanes, lines, view)]
    if launch.joined is None:
        from ckpt_supervisor.watches.control import Control
        from ckpt_supervisor.watches.unattached import Unattached

        found.append(Control(launch, lanes, feed, log, view))
        found.append(Unattached(launch.options, log, view, time.monotonic_ns() // 1_000_000))
    from ckpt_supervisor.watches.memory import Memory

    found.append(Memory(launch.options.memory_warn, launch.claims, lanes, log, time.monotonic_ns() // 1_000_000))
    if launch.options.hang_floor_ms is not None:
        from ckpt_supervisor.watches.hangs import Hangs

        found.append(Hangs(launch, lanes, feed, log, view, ends))
    return found


def _tellers(launch: Launch, lanes: Lanes, lines: Lines, view: View) -> Iterator[Watch]:
    """Those that hear the journal's lines, to tell others of them, or to tell what they have heard besides."""
    options = launch.options
    if launch.joined is None:
        from ckpt_supervisor.watches.progress import Progress

        progress = Progress(lines.log)
        lines.listen(progress.told)
        yield progress
    if launch.joined is None and options.on_event:
        from ckpt_supervisor.watches.notify import Notify

        yield Notify(launch, lanes, lines, view)
    if options.metrics_file or options.metrics_port is not None:
        from ckpt_supervisor.watches.metrics import Metrics

        yield Metrics(launch, lanes, lines)


SLACK_MS = 700
"""A watch may be so late: the loop wakes for the shield every 600 ms anyway, and each wake-up costs."""


class Watching:
    """All of them, as the loop has them."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = tuple(watches)

    def times_ms(self, wakes_at_ms: int | None) -> list[int | None]:
        """When the loop is to wake for any of them; `wakes_at_ms`: when it does so for something else, if that is known."""
        times = [time for watch in self._watches for time in watch.times_ms]
        if wakes_at_ms is None:
            return [*times]
        return [None if time is None or 0 <= wakes_at_ms - time <= SLACK_MS else time for time in times]

    @property
    def lanes_at_end(self) -> dict[str, int]:
        """Lanes in which any of them has something to do yet when all is over, with the milliseconds that this may take."""
        return {lane: ms for watch in self._watches for lane, ms in getattr(watch, "lanes_at_end", {}).items()}

    def look(self, now_ms: int) -> None:
        """A turn of each."""
        for watch in self._watches:
            watch.look(now_ms)

    def heard(self, word: wire.Said) -> None:
        """Pass a rank's word on."""
        for watch in self._watches:
            watch.heard(word)
