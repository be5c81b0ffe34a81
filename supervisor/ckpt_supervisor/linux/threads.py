"""What the kernel shows of a process's threads: what each does, what it sleeps in, and how much of a CPU it has used.

Owns these files of /proc, beside procfs.py, which is asked a few times a second; these are read when a rank stands still. Must
not signal anybody. What is gone or hidden is "" or 0, never an error.
"""

from __future__ import annotations

import os

FILE_BYTES_MAX = 16_384
SHOWN_MAX = 64
"""Most threads that are shown; a process of a GPU has hundreds."""


def used_ticks(pid: int, thread: int) -> int:
    """Clock ticks of CPU time that a thread has used so far."""
    fields = _stat(f"/proc/{pid}/task/{thread}")
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def runs(pid: int, thread: int) -> bool:
    """Whether a thread has a CPU, or would have if it were its turn."""
    return _stat(f"/proc/{pid}/task/{thread}")[:1] == ["R"]


def waits_in(pid: int, thread: int) -> str:
    """The kernel's function that a thread sleeps in (proc_pid_wchan(5))."""
    name = _read(f"/proc/{pid}/task/{thread}/wchan").strip()
    return "" if name == "0" else name


def tracer_of(pid: int) -> int:
    """Who traces the process; 0 for nobody."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        key, _, value = line.partition(":")
        if key == "TracerPid":
            return int(value)
    return 0


def shown(pid: int) -> str:
    """Its threads, a line each: number, name, state, what they sleep in, the number of the system call; for root their stacks."""
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208 - one file system for all of these.
    except OSError:
        return ""
    lines = []
    for number in numbers[:SHOWN_MAX]:
        at = f"/proc/{pid}/task/{number}"
        fields, where, call = _stat(at), waits_in(pid, number), _read(f"{at}/syscall").split()[:1]
        words = [f"thread {number} {_read(f'{at}/comm').strip()!r}", f"state {fields[0]}" if fields else "gone"]
        words += [*([f"in {where}"] if where else []), *(f"system call {one}" for one in call)]
        lines.append(", ".join(words))
        lines += [f"  {line}" for line in _read(f"{at}/stack").splitlines()]
    left = len(numbers) - SHOWN_MAX
    return "\n".join([*lines, *([f"and {left} more"] if left > 0 else [])])


def _stat(at: str) -> list[str]:
    """The fields after the name, which may hold anything (proc_pid_stat(5))."""
    return _read(f"{at}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
