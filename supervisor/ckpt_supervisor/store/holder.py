"""Who holds a checkpoint directory: its name for people, and whether its process can be seen to live from here.

Must not read or write the directory: fence.py does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """The coordinator that holds a directory.

    `pid_started` is in clock ticks after boot (proc(5)): pids are used again. `pid_namespace` is the inode of the
    namespace that the pid is of, 0 if not known: a container's pids say nothing outside of it.
    """

    epoch: int
    job: str
    attempt: int
    step_id: str
    host: str
    pid: int
    pid_started: int
    pid_namespace: int = 0


Ask = Callable[[Holder], str]
"""Why a holder that is no live process here holds the directory all the same, or may; "" if it does not."""


class HeldByOther(Exception):
    """Another job, or another step, is using this directory and is alive, or may be (`why`)."""

    def __init__(self, holder: Holder, why: str = "") -> None:
        super().__init__(f"in use by {describe_holder(holder)}" + (f": {why}" if why else ""))
        self.holder = holder


def describe_holder(holder: Holder) -> str:
    """A holder's name for people."""
    step = f" step {holder.step_id}" if holder.step_id else ""
    return f"job {holder.job}{step} (attempt {holder.attempt}), process {holder.pid} on {holder.host}"


class BegunSince(HeldByOther):
    """Another start, which goes before this one, has begun while this one did: a later attempt of the same job, for example."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder, "it has begun after this start")


def is_alive(holder: Holder) -> bool:
    """Whether this holder is a live process that can be seen from here. Of another host nothing can be said: not alive."""
    return can_be_seen(holder) and started_at(holder.pid) == holder.pid_started


def can_be_seen(holder: Holder) -> bool:
    """Whether /proc here tells of this holder: the same host, and the same pid namespace as far as that is known."""
    ours = pid_namespace()
    return holder.host == os.uname().nodename and (0 in (ours, holder.pid_namespace) or holder.pid_namespace == ours)


def pid_namespace() -> int:
    """The inode of this process's pid namespace (pid_namespaces(7)), 0 if it cannot be told."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def started_at(pid: int) -> int | None:
    """When a live process started, in clock ticks after boot; None if there is none. A zombie is not alive."""
    try:
        with Path(f"/proc/{pid}/stat").open("rb") as file:
            line = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses (proc(5))
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
