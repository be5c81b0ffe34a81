"""What stands above this process: whether its supervisor is among its ancestors, and whether pids mean the same to both.

Owns the client's reads of /proc for that. Must import next to nothing: it runs on `import ckpt_client` (shield.py), where pathlib
is not worth its import. What does not show is no ancestor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

ANCESTORS_MAX = 64
"""Most parents looked at when the supervisor is searched among them."""

STAT_BYTES_MAX = 4_096


def supervisor_pid(environment: Mapping[str, str]) -> int:
    """What the supervisor says of itself, 0 where that is no pid."""
    text = environment.get("CKPT_SUPERVISE_PID", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def pid_namespace() -> str:
    """The pid namespace of this process as a word, "" where it does not show."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""


def is_ancestor(pid: int) -> bool:
    """Whether this process descends from that one. Its number alone may be somebody else's by now."""
    looked_at = os.getppid()
    for _ in range(ANCESTORS_MAX):
        if looked_at == pid or looked_at <= 1:
            return looked_at == pid and pid > 0
        looked_at = _parent(looked_at)
    return False


def _parent(pid: int) -> int:
    """The parent's pid, 0 where it does not show."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        # The name stands in parentheses and may hold blanks and parentheses: the last one ends it (proc(5)).
        return int(os.read(fd, STAT_BYTES_MAX).rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    finally:
        os.close(fd)


def signal_masks() -> int | None:
    """The signals that the main thread blocks, or that this process ignores or handles, one bit each; None if that is hidden."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = {line[:6]: line[7:] for line in os.read(fd, 4 * STAT_BYTES_MAX).splitlines()}
        return int(found[b"SigBlk"], 16) | int(found[b"SigIgn"], 16) | int(found[b"SigCgt"], 16)
    except (OSError, KeyError, ValueError):
        return None
    finally:
        os.close(fd)
