"""Completes terminations inside the tree that the shield would otherwise swallow.

The command and all below it run with SIGTERM blocked, so that Slurm's broadcast does not end loader workers in mid-
save. But then a process's own parent cannot end it either: `Popen.terminate()`, `Pool.__exit__` would wait for ever.
So while no notice is in force, a descendant in which SIGTERM is pending and blocked gets SIGKILL (docs/slurm.md,
section 4).

Owns the memory of what was seen, and the kill. Must not end anybody for a SIGTERM that came from outside. With
proctrack/linuxproc Slurm's broadcast reaches the descendants a moment before the supervisor handles its own signal,
so one look is not enough: two looks SETTLED_MS apart are needed, with no signal to the supervisor in between. And a
blocked signal stays pending: whoever still has one from a notice must not be ended for it when that notice is over.
Times are arguments; there is no clock in here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from ckpt_supervisor import procfs

SETTLED_MS = 400
"""Between the first look that shows the pending SIGTERM and the one that ends the process."""

SWEEP_SHARE_MAX = 500
"""A sweep may take one part in this many of the time: 0.2 %."""


class Shield:
    """Call `sweep` every second or so, sooner when it `is_waiting`; `quiet=False` when a signal came or a notice is in force."""

    def __init__(self) -> None:
        self._first_seen: dict[tuple[int, int], int] = {}
        self._from_outside: set[tuple[int, int]] = set()

    def sweep(self, pids: Iterable[int], now_ms: int, quiet: bool) -> list[int]:
        """Look at these processes; end those whose SIGTERM has been stuck for SETTLED_MS of quiet. Returns the ended ones.

        `quiet`: no notice is in force and no signal came to the supervisor since the last sweep. If not, every SIGTERM found
        stuck is taken to be from outside, and its process is spared for as long as it lives.
        """
        looked_at = list(pids)
        stuck = [who for who in map(_identity_if_stuck, looked_at) if who is not None]
        self._forget(set(looked_at), set(stuck))
        if not quiet:
            self._from_outside.update(stuck)
            self._first_seen = {}
            return []
        self._first_seen = {who: self._first_seen.get(who, now_ms) for who in stuck if who not in self._from_outside}
        due = [who for who, first_ms in self._first_seen.items() if now_ms - first_ms >= SETTLED_MS]
        return [who[0] for who in due if _end(who)]

    def is_waiting(self, now_ms: int) -> bool:
        """Whether a process was seen stuck for the first time: the next look is worth having as soon as it may end it."""
        return any(now_ms - first_ms < SETTLED_MS for first_ms in self._first_seen.values())

    def _forget(self, looked_at: set[int], stuck: set[tuple[int, int]]) -> None:
        """Drop marks of processes that have taken their SIGTERM or are gone; a walk of the tree may miss one that lives."""
        for who in self._from_outside - stuck:
            seen = None if who[0] in looked_at else procfs.stat(who[0])
            if seen is None or seen.started != who[1]:
                self._from_outside.discard(who)


def next_sweep_ms(cost_us: int) -> int:
    """How long to wait until the next sweep when the last one, with its walk of the tree, took this long.

    A tree of 8 ranks with 100 threads each costs 4 ms a look; it is looked at every 2 s.
    """
    return max(SETTLED_MS, cost_us * SWEEP_SHARE_MAX // 1000)


def _identity_if_stuck(pid: int) -> tuple[int, int] | None:
    if not procfs.term_is_stuck(pid):
        return None
    seen = procfs.stat(pid)
    return None if seen is None or seen.state in ("zombie", "gone") else (pid, seen.started)


def _end(who: tuple[int, int]) -> bool:
    """Kill it if it still is the same process with the same stuck SIGTERM."""
    if _identity_if_stuck(who[0]) != who:
        return False
    try:
        os.kill(who[0], signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
