"""One way to say something to the user: a line on stderr. Must not fail: a broken stderr never stops a save."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable


def say(line: str) -> None:
    """One line on stderr, or nothing when nobody can hear it."""
    with contextlib.suppress(OSError):
        os.write(2, f"ckpt-supervise: {line}\n".encode(errors="replace"))


def progress() -> Callable[[int, int], None]:
    """A progress line on stderr for a long look at the start, at most once a second."""
    told = [time.monotonic_ns() // 1_000_000]

    def tell(done: int, total: int) -> None:
        if time.monotonic_ns() // 1_000_000 - told[0] >= 1_000:
            told[0] = time.monotonic_ns() // 1_000_000
            say(f"verifying the newest checkpoint: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return tell
