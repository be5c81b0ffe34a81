"""A training in which no rank attaches is told, once: everything looks well, and nothing of it is ever saved.

Owns when that is said and in which words. Must not decide anything, nor take a launcher that needs long to import for one: it
waits for minutes, and says what else it may be. Only where the program does not save by itself (--adopt, --pass-signal), and by
task 0's supervisor, which knows the ranks of all tasks.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_client import wire

from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.config import Options
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import State
from ckpt_supervisor.text import time_text

LEAST_MS = 120_000
"""Imports on a file system that is busy take so long."""

MOST_MS = 300_000
"""Said after this time, also where no save is due by then."""

ID = "nobody-attached"


class Unattached:
    """The watch. `view` gives the machine's state."""

    def __init__(self, options: Options, log: Callable[[Entry], None], view: Callable[[], State], now_ms: int) -> None:
        self._log = log
        self._view = view
        wait_ms = MOST_MS if options.every_ms is None else max(LEAST_MS, min(MOST_MS, options.every_ms))
        self._wait_ms = wait_ms
        self._at_ms: int | None = None if options.adopt or options.pass_signal is not None else now_ms + wait_ms

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When it has something to say, if that is so by then."""
        return (self._at_ms,)

    def look(self, now_ms: int) -> None:
        """Say it if it is time."""
        if self._at_ms is None or now_ms < self._at_ms:
            return
        state = self._view()
        if not state.started and state.code is None and state.notice is None:
            self._at_ms = now_ms + self._wait_ms  # What it resumes from is still being read.
            return
        self._at_ms = None
        if state.attached_ms is not None or state.code is not None or state.notice is not None:
            return
        text = (
            f"no rank has attached within {time_text(self._wait_ms)}, so nothing is saved yet: if training is not just starting "
            "up, its loop needs ckpt_client's steps() or attach(), or say --adopt PATTERN for a program that saves by itself"
        )
        say(text)
        self._log(Entry("warning", "warning", {"id": ID, "text": text}))

    def heard(self, word: wire.Said) -> None:
        """What a rank says is in the state."""
