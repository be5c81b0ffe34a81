"""When the disk may be used for what can wait.

Owns one question, asked from the lanes: is anybody saving, or choosing what to resume from? Must not know what waits. Removing
old checkpoints keeps a disk busy that a save needs, and with many of them for minutes.
"""

from __future__ import annotations

import threading

WAIT_S_MAX = 3_600.0
"""Whatever is going on: after so long what waits goes on, for a disk that fills up is worse."""


class Calm:
    """`put` is for the loop's thread, `wait` and `over` for the lanes."""

    def __init__(self) -> None:
        self._reasons: frozenset[str] = frozenset()
        self._calm = threading.Event()
        self._calm.set()
        self.over = threading.Event()
        """Set while it is not calm: what reads a lot ends there."""

    def put(self, reason: str, is_on: bool) -> None:
        """This reason for being quiet holds from now on, or no longer."""
        if is_on == (reason in self._reasons):
            return
        self._reasons = self._reasons | {reason} if is_on else self._reasons - {reason}
        if self._reasons:
            self._calm.clear()
            self.over.set()
        else:
            self.over.clear()
            self._calm.set()

    def wait(self) -> None:
        """Until it is calm."""
        self._calm.wait(WAIT_S_MAX)
