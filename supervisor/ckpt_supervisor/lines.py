"""What the loop has to say to the journal and to the user, gathered for one turn.

Owns the order of lines and what is told twice. Must not decide what is worth a line: describe.py does. Writing is done in the
journal's lane: sooner, its thread would have the interpreter before each word is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.journal import Journal, Stamp
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core import notices, tasks
from ckpt_supervisor.core.describe import Entry, spans
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import State
from ckpt_supervisor.text import time_text

MANY = (3, 10, 30, 100, 300, 1_000)
"""When so many saves have failed in a row that is told, whatever the reasons were (field case 122)."""

OF_ONE = frozenset({"rank", "rank_pid", "of_task", "after_ms", "entered", "save_ms", "files", "bytes"})
"""What differs between lines that say the same of several ranks or tasks."""

MANY_LINES = 9
"""From so many on they are one; fewer are easier to read, and to look for, one by one."""

Listener = Callable[[Entry, Stamp], None]
"""Hears every line in the loop's thread, so it stores a number or posts to a lane, and no more."""

TOLD_MAX = 100
"""Most different reasons of failed saves that are told on stderr; all are in the journal."""


class Lines:
    """The lines of one supervisor."""

    def __init__(self, journal: Journal, lanes: Lanes) -> None:
        self._journal = journal
        self._lanes = lanes
        self._told: set[str] = set()
        self._lines: list[tuple[Entry, Stamp]] = []
        self._together: list[tuple[Entry, Stamp]] | None = None
        self._listeners: list[Listener] = []

    @property
    def lost(self) -> int:
        """Lines that could not be written so far."""
        return self._journal.lost

    def listen(self, listener: Listener) -> None:
        """Pass every line on to this one as well, those of this turn first."""
        self._listeners.append(listener)
        for line in tuple(self._lines):
            listener(*line)

    def text(self, entry: Entry, at: Stamp) -> str:
        """The line as the journal has it."""
        return self._journal.text(entry.event, entry.level, at, entry.fields)

    def log(self, entry: Entry, at: tuple[int, int] | None = None) -> None:
        """One line for the journal. `at`: when it was, if not now: wall clock in ns, monotonic in ms."""
        line = (entry, self._journal.stamp() if at is None else Stamp(*at))
        if self._together is None:
            self._add([line])
        else:
            self._together.append(line)

    def gather(self) -> None:
        """From here to `fold` what is the same of several ranks or tasks becomes one line: their words have come together."""
        self._together = []

    def fold(self) -> None:
        """All of those words have been taken in."""
        together, self._together = self._together or [], None
        self._add(folded(together))

    def garbage(self, garbage: Garbage) -> None:
        """Somebody has sent what is no word, or may not speak: one line for each."""
        if garbage.first:
            self.log(Entry("garbage", "warning", {"peer": garbage.peer, "reason": garbage.reason}))

    def _add(self, lines: list[tuple[Entry, Stamp]]) -> None:
        self._lines += lines
        for line in lines if self._listeners else ():
            for listener in self._listeners:
                listener(*line)

    def write(self) -> None:
        """Give a turn's lines to the journal, at its end."""
        lines, self._lines = self._lines, []
        if not lines or not self._lanes.room("journal"):
            return

        def write() -> None:
            for entry, stamp in lines:
                self._journal.write(entry.event, entry.level, stamp, entry.fields)

        # Nothing waits for the result, and a wake-up is what an idle supervisor's time goes to.
        self._lanes.post("journal", "journal", write, _ignore, wakes=False)

    def tell(self, entry: Entry, policy: Policy, state: State, now_ms: int) -> None:
        """What of the journal is for the user too, while training goes on."""
        match entry.event:
            case "join_over" if missing := tasks.missing(policy, state):
                some = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
                say(f"no word of a supervisor of task {some}: ranks there cannot take part in a save")
            case "round_given_up" if state.notice is None:
                self.tell_given_up(entry.fields.get("reason"), state.given_up_in_a_row, state.committed_step)
            case "notice_over":
                last_ms = notices.watch_at_ms(policy, state)
                until = "" if last_ms is None else f"; the last save begins in {time_text(last_ms - now_ms)}"
                say(f"{entry.fields['reason']}{until}")
            case _:
                pass

    def tell_given_up(self, reason: object, in_a_row: int, newest: int) -> None:
        """A save that failed while training goes on is told, once for each reason; that none succeeds is told again."""
        text = str(reason or "")
        if in_a_row in MANY:
            stands = f"step {newest} is the newest checkpoint" if newest >= 0 else "there is no checkpoint"
            say(f"{in_a_row} saves in a row were given up, and {stands}; the last reason: {text}")
            return
        if text and text not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(text)
            goes_on = "" if " gone: " in text else ", training goes on"  # Without that rank it may not.
            say(f"a save was given up{goes_on}: {text}")


def folded(lines: list[tuple[Entry, Stamp]]) -> list[tuple[Entry, Stamp]]:
    """Lines that say the same of several ranks, or of one signal at several tasks, as one each, with the last one's numbers."""
    groups: dict[tuple[Any, ...], list[tuple[Entry, Stamp]]] = {}
    for place, (entry, stamp) in enumerate(lines):
        key: tuple[Any, ...] = (place,)
        if "rank" in entry.fields or entry.event == "signal":
            key = (entry.event, *((name, str(value)) for name, value in entry.fields.items() if name not in OF_ONE))
        groups.setdefault(key, []).append((entry, stamp))
    found = []
    for group in groups.values():
        if len(group) < MANY_LINES:
            found += group
            continue
        entry, stamp = group[-1]
        fields = {name: value for name, value in entry.fields.items() if name not in ("rank", "rank_pid", "of_task")}
        one, many = ("rank", "ranks") if "rank" in entry.fields else ("of_task", "of_tasks")
        fields[many] = spans([line.fields[one] for line, _ in group if one in line.fields])
        found.append((Entry(entry.event, entry.level, fields), stamp))
    return found


def _ignore(_: Any) -> None:
    return None
