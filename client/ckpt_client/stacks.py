"""Stacks on demand: at one real-time signal this process writes where its threads are, also while C code holds the interpreter.

Owns that signal and the descriptor it is written to, a file in memory that the supervisor reads through /proc. Must not take a
signal that is somebody's, nor stand in for anything else: only a process whose training stands still is ever sent it.
faulthandler does the writing (its handler is C and needs no lock), and nothing of it runs before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from ckpt_client import above

FILE_NAME = "ckpt-stacks"
"""The supervisor reads no descriptor but one of this name."""

TRIED_MAX = 8
"""Real-time signals tried, from the highest but two down: tools that use them begin at either end."""

NONE = (0, -1)


def stand_by() -> tuple[int, int]:
    """Be ready to write the stacks: the signal for it and the descriptor; (0, -1) where that cannot be."""
    number = _free_signal()
    if not number:
        return NONE
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        fd = _file()
        # Not chained: the action before it is the default one, which would end the process.
        faulthandler.register(number, file=fd, all_threads=True, chain=False)
        return number, fd
    return NONE


def _free_signal() -> int:
    """A real-time signal that nobody handles, ignores or blocks; 0 for none. C code's handlers show in /proc only."""
    taken = above.signal_masks()
    if taken is None:
        return 0
    highest = int(signal.SIGRTMAX) - 2
    for number in range(highest, max(highest - TRIED_MAX, int(signal.SIGRTMIN)), -1):
        if signal.getsignal(number) is signal.SIG_DFL and not taken >> (number - 1) & 1:
            return number
    return 0


def _file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    import tempfile

    # Pythons built on old systems (conda's) lack it. The file has no name by now but the one that /proc shows.
    with tempfile.NamedTemporaryFile(prefix=f"{FILE_NAME}-") as file:
        return os.dup(file.fileno())
