"""What the kernel's OOM killer makes of the supervisor and of its command (proc_pid_oom_score_adj(5)).

Owns the two scores. Must not fail: where a score cannot be set it stays, and nobody is told, as an ordinary user may not lower
one. The supervisor is the better one to keep: it needs 40 MB, and without it nobody brings the job back.
"""

from __future__ import annotations

import contextlib
import os

PATH = "/proc/self/oom_score_adj"

LOWER_BY = 500
"""Half of the memory that counts. Not to -1000, which nothing may ever kill: then a leak of ours would take the node."""

LOWEST = -900

HIGHER_BY = 50
"""A twentieth of the memory that counts: the job's, where Slurm limits that. More than we need on any node with GPUs, so that we
are never chosen first. No more than that, as the score also compares the training with other people's programs when a whole node
is short of memory: there it should not go much before its turn."""

HIGHEST = 1_000


def protect_self() -> int:
    """Make this process one of the last to be chosen, if it may. Its score before, which is what its command would have had."""
    own = _score()
    _set(f"{max(own - LOWER_BY, LOWEST)}".encode() if own > LOWEST else b"")
    return own


def command_score(own: int) -> int:
    """The score for the command of a supervisor that was started with this one; raising it is always allowed."""
    return min(own + HIGHER_BY, HIGHEST)


def _score() -> int:
    try:
        fd = os.open(PATH, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 32))
    except (OSError, ValueError):
        return 0
    finally:
        os.close(fd)


def _set(text: bytes) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(PATH, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)
