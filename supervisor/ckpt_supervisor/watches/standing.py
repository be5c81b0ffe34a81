"""Why a rank stands still, as far as the kernel shows it: gone, stopped, held by a device, or busy in C code.

Owns the kinds of hangs and their words for people. Must not signal anybody. Each look reads a few small files of one process,
twice, a moment apart: whoever is in a state for both looks is taken to be in it.
"""

from __future__ import annotations

import dataclasses
import os
import select
from collections.abc import Sequence

from ckpt_supervisor.adapters import children
from ckpt_supervisor.core.hangs import Stall
from ckpt_supervisor.linux import procfs, threads

APART_MS = 500
"""Between the two looks."""

GONE = "process gone"
STOPPED = "stopped"
ASLEEP = "uninterruptible sleep"
IN_C = "stuck in C"
MUTE = "silent"
NO_PROGRESS = "no progress"

KINDS = (GONE, STOPPED, ASLEEP, IN_C, MUTE, NO_PROGRESS)
"""The first one that any rank is in names the hang: the others then wait for that rank."""

BUSY_SHARE = 50
"""Percent of a CPU from which on a main thread computes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """In which way one rank stands still. `text`: for people."""

    kind: str
    text: str


UNSEEN = Way(NO_PROGRESS, "makes no progress; how it stands could not be looked at")


def by_now(stalls: Sequence[Stall], found: Sequence[Way]) -> list[Way]:
    """The same, with those that have ended meanwhile: stacks take their time, and training may be started again in it."""
    now = [_Look(stall.who.pid) for stall in stalls]
    return [_way(False, look, look) if look.is_over else way for look, way in zip(now, found, strict=True)]


def ways(stalls: Sequence[Stall], silent_ms: int) -> list[Way]:
    """In which way each of them stands. Takes APART_MS. Who was heard longer ago than `silent_ms` is not heard any more."""
    before = [_Look(stall.who.pid) for stall in stalls]
    select.select([], [], [], APART_MS / 1_000)
    after = [_Look(stall.who.pid) for stall in stalls]
    return [_way(stall.silent_ms > silent_ms, *looks) for stall, *looks in zip(stalls, before, after, strict=True)]


class _Look:
    """What the kernel says of a process's main thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_ours = 0 < pid <= children.PID_MAX
        self.state = procfs.state_of(pid) if self.is_ours else "gone"
        self.used_ms = threads.used_ticks(pid, pid) * 1_000 // max(1, os.sysconf("SC_CLK_TCK"))
        self.runs = threads.runs(pid, pid)
        self.waits_in = threads.waits_in(pid, pid)
        self.tracer = threads.tracer_of(pid)

    @property
    def is_over(self) -> bool:
        """Its process has ended."""
        return self.is_ours and self.state in ("gone", "zombie")


def _way(is_silent: bool, before: _Look, after: _Look) -> Way:
    heard = "is not heard any more" if is_silent else "answers, and makes no progress"
    if not after.is_ours:
        hidden = "nothing can be seen of it from here, as it has process ids of its own (a container)"
        return Way(MUTE if is_silent else NO_PROGRESS, f"{heard}; {hidden}")
    if after.is_over:
        return Way(GONE, f"has ended: there is no process {after.pid} any more")
    if after.state == "stopped":
        by = (
            f"held by a debugger (process {after.tracer} {procfs.name_of(after.tracer)})" if after.tracer else "stopped (SIGSTOP)"
        )
        return Way(STOPPED, f"is {by}")
    waits_in = f" in the kernel's {after.waits_in}" if after.waits_in else ""
    if before.state == after.state == "uninterruptible":
        return Way(ASLEEP, f"sleeps uninterruptibly{waits_in}: a device or a file server does not answer")
    share = max(0, after.used_ms - before.used_ms) * 100 // APART_MS
    computes = share >= BUSY_SHARE or (before.runs and after.runs)  # On a crowded node it may have little of a CPU.
    does = f"its main thread computes ({share} % of a CPU)" if computes else f"its main thread waits{waits_in}"
    if is_silent:
        return Way(IN_C, f"{heard} and lives: C code has the interpreter (the GIL) and keeps it; {does}")
    guess = "in a loop, or in a busy wait for other ranks" if computes else "for other ranks, a lock, or input"
    return Way(NO_PROGRESS, f"{heard}: {does}, {guess}")
