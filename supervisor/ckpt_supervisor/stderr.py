"""One way to say something to the user: a line on stderr. Must not fail: a broken stderr never stops a save."""

from __future__ import annotations

import contextlib
import os


def say(line: str) -> None:
    """One line on stderr, or nothing when nobody can hear it."""
    with contextlib.suppress(OSError):
        os.write(2, f"ckpt-supervise: {line}\n".encode(errors="replace"))
