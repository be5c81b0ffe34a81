"""What the loop has to say to the journal and to the user, gathered for one turn.

Owns the order of lines and what is told twice. Must not decide what is worth a line: describe.py does. Writing is done in the
journal's lane: sooner, its thread would have the interpreter before each word is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_supervisor.core.describe import Entry, folded
from ckpt_supervisor.garbage import Garbage
from ckpt_supervisor.journal import Journal, Stamp
from ckpt_supervisor.lanes import Lanes
from ckpt_supervisor.stderr import say

MANY = (3, 10, 30, 100, 300, 1_000)
"""When so many saves have failed in a row that is told, whatever the reasons were (field case 122)."""

TOLD_MAX = 100
"""Most different reasons of failed saves that are told on stderr; all are in the journal."""


class Lines:
    """The lines of one supervisor."""

    def __init__(self, journal: Journal, lanes: Lanes) -> None:
        self._journal = journal
        self._lanes = lanes
        self._told: set[str] = set()
        self._lines: list[tuple[Entry, Stamp]] = []
        self._together: list[Entry] = []

    def log(self, entry: Entry, at: tuple[int, int] | None = None) -> None:
        """One line for the journal. `at`: when it was, if not now: wall clock in ns, monotonic in ms."""
        self._lines.append((entry, self._journal.stamp() if at is None else Stamp(*at)))

    def log_later(self, entries: Iterable[Entry]) -> None:
        """Lines of one of many words that came together: in this turn what is the same of several ranks becomes one line."""
        self._together += entries

    def fold(self) -> None:
        """All of those have been taken in."""
        together, self._together = self._together, []
        for entry in folded(together):
            self.log(entry)

    def garbage(self, garbage: Garbage) -> None:
        """Somebody has sent what is no word, or may not speak: one line for each."""
        if garbage.first:
            self.log(Entry("garbage", "warning", {"peer": garbage.peer, "reason": garbage.reason}))

    def write(self) -> None:
        """Give a turn's lines to the journal, at its end."""
        lines, self._lines = self._lines, []
        if not lines or not self._lanes.room("journal"):
            return

        def write() -> None:
            for entry, stamp in lines:
                self._journal.write(entry.event, entry.level, stamp, entry.fields)

        self._lanes.post("journal", "journal", write, _ignore)

    def tell_given_up(self, reason: object, in_a_row: int, newest: int) -> None:
        """A save that failed while training goes on is told, once for each reason; that none succeeds is told again."""
        text = str(reason or "")
        if in_a_row in MANY:
            stands = f"step {newest} is the newest checkpoint" if newest >= 0 else "there is no checkpoint"
            say(f"{in_a_row} saves in a row were given up, and {stands}; the last reason: {text}")
            return
        if text and text not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(text)
            say(f"a save was given up, training goes on: {text}")


def _ignore(_: Any) -> None:
    return None
