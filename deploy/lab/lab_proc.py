"""Processes of a lab: who they are, and how they are ended.

Owns: reading /proc, and every signal the lab sends.
Must not: match processes by a loose name. Each answer rests on something that only this lab's
processes have (a path under its root on the command line or among the open files, or the name of
one of its nodes in the environment), because other Slurms may run on the same machine.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POLL_S = 0.02
TITLE_BYTES_MAX = 65_536


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat, proc(5): since boot, fixed at fork, kept through exec


def parse_stat(text: str) -> tuple[int, str, int, int]:
    """Gives pid, state, parent's pid and start time out of /proc/PID/stat."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return int(head.split(" ", 1)[0]), fields[0], int(fields[1]), int(fields[19])


def read_stat(pid: int) -> tuple[int, str, int, int] | None:
    """As parse_stat, or None when there is no such process."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


def alive(process: Process) -> bool:
    """True while exactly this process runs; a zombie has ended."""
    stat = read_stat(process.pid)
    return stat is not None and stat[3] == process.start_ticks and stat[1] not in "ZX"


def _read_words(pid: int, name: str) -> list[str]:
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(TITLE_BYTES_MAX).decode(errors="replace").split("\0")
    except OSError:
        return []


def command_line(pid: int) -> list[str]:
    """The words of a process's command line, or nothing when it has ended."""
    return _read_words(pid, "cmdline")


def _all() -> list[tuple[Process, int]]:
    """Every live process with its parent's pid."""
    found = []
    for entry in Path("/proc").iterdir():
        stat = read_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[1] not in "ZX":
            found.append((Process(stat[0], stat[3]), stat[2]))
    return found


def _open_paths(pid: int) -> set[str]:
    paths = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                paths.add(str(entry.readlink()))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        pass  # the process has ended
    return paths


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def stepds(logs: Iterable[str]) -> list[Process]:
    """The slurmstepds that write to one of these slurmd logs.

    slurmstepd's title names the job but not the node, and it overwrites its environment with the title; the log of
    its slurmd, which it keeps open, is what says whose it is.
    """
    wanted = set(logs)
    return [p for p, _ in _all() if _comm(p.pid) in ("slurmstepd", "slurmd") and _is_stepd(p.pid, wanted)]


def _is_stepd(pid: int, logs: set[str]) -> bool:
    title = " ".join(command_line(pid))
    if "slurmstepd" not in title:
        return False
    # In a chroot on a mount of its own the link can carry a longer path; the end of it stays.
    return any(path == log or path.endswith(log) for path in _open_paths(pid) for log in logs)


def tasks(nodes: Iterable[str], roots: Iterable[Process]) -> list[Process]:
    """Every process of the jobs on these nodes: by the node's name in the environment, or below one of `roots`."""
    words = {f"SLURMD_NODENAME={node}" for node in nodes}
    everyone = _all()
    below = {p.pid for p in roots}
    children: dict[int, list[int]] = {}
    for process, parent in everyone:
        children.setdefault(parent, []).append(process.pid)
    frontier = list(below)
    while frontier:
        for pid in children.get(frontier.pop(), []):
            if pid not in below:
                below.add(pid)
                frontier.append(pid)
    own = os.getpid()
    return [p for p, _ in everyone if p.pid != own and (p.pid in below or words & set(_read_words(p.pid, "environ")))]


def send(process: Process, number: signal.Signals) -> None:
    """Signals exactly this process; one that has ended is passed over."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if alive(process):  # looked at through the pidfd's lifetime: the pid cannot be reused unnoticed
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


def wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    """Polls a fact with a bound; there is no event to wait for in another process's children."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not true():
        if time.monotonic() >= deadline:
            return False
        pause.wait(POLL_S)
    return True


def end(processes: Iterable[Process], number: signal.Signals, timeout_s: float) -> list[Process]:
    """Signals all, waits, and gives back those that still run."""
    left = list(processes)
    for process in left:
        send(process, number)
    wait_until(lambda: not any(map(alive, left)), timeout_s)
    return [process for process in left if alive(process)]
