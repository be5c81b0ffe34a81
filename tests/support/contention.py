"""For how long this machine had more to do than it could: what a bar in seconds has to excuse, and nothing beyond that.

Owns one thread that writes down four times a second how much time there was in which a process that could run had to wait (for a
core, a disk, the hypervisor), and the question how much of that lay between two moments.
Must not: judge, or slow anything down. A bar that counts this out stays as strict as it is on an idle machine: whoever waits for
nothing, sleeps or lets a time-out pass is not excused by a core that others need.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import threading
import time
from pathlib import Path

LOOK_S = 0.25
KEPT = 4_000
"""Looks: more than a quarter of an hour, longer than any test takes."""

STOPPED_S = 3.0
SHARE_MOST = 2 / 3
"""What is excused at most: one stop so long, or work that is three times slower. A bar that is missed by more is missed."""

PRESSURE = (Path("/proc/pressure/cpu"), Path("/proc/pressure/io"))
STEAL = 8
"""Its place among the words of the line `cpu` (proc(5)), in ticks."""


class Watch:
    """The thread and what it has seen: pairs of the time and of the seconds that were lost since it began."""

    def __init__(self) -> None:
        """Begins at once, and never ends: it is a daemon."""
        self.seen: collections.deque[tuple[float, float]] = collections.deque([(time.time(), 0.0)], KEPT)
        self.over = threading.Event()
        threading.Thread(target=self.look_on, name="contention", daemon=True).start()

    def look_on(self) -> None:
        """Look for ever."""
        counted = _counted()
        while not self.over.wait(LOOK_S):
            now, count = time.time(), _counted()
            before, lost = self.seen[-1]
            gap = max(0.0, now - before)
            more = gap * _share_that_waits() if counted is None or count is None else count - counted
            # When this thread itself comes late nobody knows better than it how late.
            self.seen.append((now, lost + min(gap, max(more, gap - LOOK_S))))
            counted = count

    def lost_s(self, begin: float, end: float) -> float:
        """Of the seconds between these two times since the epoch, those that were lost and that can be excused."""
        if end > self.seen[-1][0]:
            self.over.wait(2 * LOOK_S)  # The look that has the end.
        seen = list(self.seen)
        first = next((lost for at, lost in reversed(seen) if at <= begin), seen[0][1])
        last = next((lost for at, lost in seen if at >= end), seen[-1][1])
        most = max(STOPPED_S, SHARE_MOST * (end - begin))
        return min(max(0.0, end - begin), max(0.0, last - first), most)


def _counted() -> float | None:
    """Seconds so far in which somebody had to wait, by the kernel's own count; None where it does not count them."""
    total = 0.0
    try:
        for path in PRESSURE:
            found = re.search(r"^some .*total=(\d+)", path.read_text(), re.MULTILINE)
            total += int(found[1]) / 1e6 if found else 0.0
    except OSError:
        return None
    with contextlib.suppress(OSError, IndexError, ValueError):
        total += int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[STEAL]) / os.sysconf("SC_CLK_TCK")
    return total


def _share_that_waits() -> float:
    """Of the processes that could run now, the share for which there is no core."""
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1  # Not this one.
    return max(0.0, 1 - (os.cpu_count() or 1) / running) if running > 0 else 0.0


@functools.cache
def watch() -> Watch:
    """The one of this process, from its first use on."""
    return Watch()


def lost_s(begin: float, end: float) -> float:
    """Of the seconds between these two times since the epoch, those in which this machine had more to do than it could."""
    return watch().lost_s(begin, end)
