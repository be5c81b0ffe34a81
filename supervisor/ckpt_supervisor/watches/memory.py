"""Watches the memory that this step may use, and tells in time who uses it when it comes to an end.

Owns the looks, and what is said of them. Must not decide anything about the run, and must not cost it: a look is a few small
files of the kernel every few seconds; the processes are looked at, by psutil, only when there is something to tell, in a lane.
The limit is that of any cgroup around us, or what the node has; RLIMIT_AS is none of them, as it makes an allocation fail, which
training reports itself. What the kernel has killed is told as well, also when the command lives on (linux/oom_kills.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from ckpt_client import wire

from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.linux import cgroups
from ckpt_supervisor.linux.oom_kills import Kills, Struck, memory_text
from ckpt_supervisor.text import one_line

EVERY_MS = 5_000

RESULT_MS = 1_000
"""The result of a look is fetched so soon after it was asked for, if nothing else wakes the loop."""

LEVELS_LOOKS = 12
"""After so many looks it is found out again which cgroups are around us: that takes twice the time of all the rest.
In the same look all processes are gone through for the journal's `memory`: so each minute, and never at a time of its own."""

AGAIN_MS = 60_000
"""At most one warning a minute."""

GROWN = 50
"""Per mille of the limit: it is told again once so much more is used."""

CALM = 20
"""Per mille of the limit below the warning that count as having fallen: at the mark itself it goes up and down all the time."""

SHOWN_MAX = 5
MEASURED_MAX = 50
"""Most processes whose own share is measured: the kernel goes through all of their pages for it."""

SEEN_MAX = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How near the nearest limit is, in bytes. `of`: whose limit it is, a cgroup's name, or "the node"."""

    of: str
    limit: int
    used: int
    shared: Callable[[], int]
    """How much of it is shared memory; asked only when there is something to tell."""

    @property
    def mille(self) -> int:
        """Per mille of the limit in use."""
        return self.used * 1_000 // self.limit


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One that uses memory: what would be free without it."""

    pid: int
    name: str
    used: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What is written down now and then: `tree`: resident less shared, all processes below us, in bytes."""

    tree: int
    nearest: Reading | None


class Alarm:
    """When to tell: at `warn` percent; again after it has fallen and risen, or has grown; never more than once a minute."""

    def __init__(self, warn: int) -> None:
        self._warn = warn * 10
        self._told: int | None = None
        """Per mille when it was told last; None: it has fallen since."""
        self._told_ms: int | None = None

    def rings(self, mille: int, now_ms: int) -> bool:
        """Whether to tell of this use now."""
        if mille < self._warn - CALM:
            self._told = None
        is_new = mille >= self._warn and (self._told is None or mille >= self._told + GROWN)
        if not is_new or (self._told_ms is not None and now_ms - self._told_ms < AGAIN_MS):
            return False
        self._told, self._told_ms = mille, now_ms
        return True


class Memory:
    """The watch. `warn`: percent of the limit, None to tell of kills only."""

    def __init__(
        self, warn: int | None, claims: children.Claims, lanes: Lanes, log: Callable[[Entry], None], now_ms: int
    ) -> None:
        self._alarm = None if warn is None else Alarm(warn)
        self._warn = warn or 0
        self._claims = claims
        self._lanes = lanes
        self._log = log
        self._kills = Kills()
        self._kills.mark()
        self._told = 0
        self._levels: tuple[cgroups.Level, ...] = ()
        self._looks = 0
        self._at_ms = now_ms + EVERY_MS
        self._is_looking = False

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When the next look is due."""
        return (self._at_ms,)

    def look(self, now_ms: int) -> None:
        """Have the numbers looked at, if it is time."""
        if now_ms < self._at_ms:
            return
        self._at_ms = now_ms + RESULT_MS
        if self._is_looking:
            return

        def measured(found: tuple[Reading | None, Struck | None, Sample | None] | Broken) -> None:
            self._is_looking = False
            self._at_ms = now_ms + EVERY_MS
            if not isinstance(found, Broken):
                reading, struck, sample = found
                self._measured(reading, struck, now_ms)
                self._note(sample)

        self._is_looking = True
        self._lanes.post("watch", "looking at memory", self._measure, measured, wakes=False)

    def heard(self, word: wire.Said) -> None:
        """Ranks say nothing of memory."""

    def _measure(self) -> tuple[Reading | None, Struck | None, Sample | None]:
        is_sampled = self._looks % LEVELS_LOOKS == 0
        if is_sampled:
            self._levels = cgroups.levels()
        self._looks += 1
        reading = nearest(0 if is_sampled else self._warn, levels=self._levels) if is_sampled or self._alarm else None
        sample = Sample(tree_bytes(self._claims), reading) if is_sampled else None
        return reading if self._alarm else None, self._kills.struck(), sample

    def _note(self, sample: Sample | None) -> None:
        if sample is None:
            return
        near = sample.nearest
        fields = {
            "tree_bytes": sample.tree,
            "used_bytes": 0 if near is None else near.used,
            "limit_bytes": 0 if near is None else near.limit,
            "limit_of": "" if near is None else near.of,
        }
        self._log(Entry("memory", "debug", fields))

    def _measured(self, reading: Reading | None, struck: Struck | None, now_ms: int) -> None:
        if struck is not None and struck.is_ours and struck.kills > self._told:
            self._told = struck.kills
            text = f"the kernel has killed a process for lack of memory ({struck.text})"
            fields = {"kills": struck.kills, "limit_of": struck.of, "limit_bytes": struck.limit, "text": text}
            self._log(Entry("oom_kill", "warning", fields))
        if reading is None or self._alarm is None or not self._alarm.rings(reading.mille, now_ms):
            return

        def found(processes: tuple[tuple[Process, ...], int] | Broken) -> None:
            if not isinstance(processes, Broken):
                self._tell(reading, *processes)

        self._lanes.post("watch", "looking at who uses memory", lambda: (heaviest(self._claims), reading.shared()), found)

    def _tell(self, reading: Reading, processes: tuple[Process, ...], shared: int) -> None:
        top = [f"{one.pid} {one_line(one.name)} {memory_text(one.used)}" for one in processes[:SHOWN_MAX]]
        text = (
            f"memory: {memory_text(reading.used)} of {memory_text(reading.limit)} of {reading.of} in use "
            f"({reading.mille / 10:.0f} %); {', '.join(top) or 'no process below'}; shared memory {memory_text(shared)}"
        )
        fields = {
            "limit_of": reading.of,
            "limit_bytes": reading.limit,
            "used_bytes": reading.used,
            "shared_bytes": shared,
            "below_bytes": sum(one.used for one in processes),
            "processes": [{"pid": one.pid, "name": one.name, "mb": one.used >> 20} for one in processes[:SHOWN_MAX]],
            "text": text,
        }
        self._log(Entry("memory_near_limit", "warning", fields))
        say(text)


def nearest(warn: int, proc: str = "/proc", levels: Sequence[cgroups.Level] | None = None) -> Reading | None:
    """The limit of which most is in use, in proportion; None where nothing can be read.

    `warn`: below so many percent of a limit no more is looked up than that it is below. `levels`: the cgroups around
    us, if they are known.
    """
    node = cgroups.node(proc)
    found = []
    if node is not None:
        found.append(Reading("the node", node.total, node.total - node.available, lambda: node.shared))
    for level in cgroups.levels(proc) if levels is None else levels:
        limit = cgroups.limit_of(level)
        if not limit or (node is not None and limit >= node.total):
            continue
        used = cgroups.used_of(level, limit * warn // 100)
        if used is not None:
            found.append(Reading(level.name, limit, used, lambda level=level: cgroups.shared_of(level)))  # type: ignore[misc]
    return max(found, key=lambda reading: reading.mille, default=None)


def tree_bytes(claims: children.Claims, proc: str = "/proc") -> int:
    """What all processes below us have resident without what is shared: one small file of each, no psutil."""
    pages = 0
    for pid in children.descendants(claims)[:SEEN_MAX]:
        try:
            with open(f"{proc}/{pid}/statm", "rb") as file:  # noqa: PTH123 - hundreds of them, and pathlib takes twice the time.
                _, resident, shared, *_ = file.read(200).split()
        except (OSError, ValueError):
            continue  # It is gone.
        pages += max(0, int(resident) - int(shared))
    return pages * os.sysconf("SC_PAGE_SIZE")


def heaviest(claims: children.Claims) -> tuple[Process, ...]:
    """The processes below us, most memory first: each with what only it uses, so that shared memory counts with nobody.

    Of those that do not show that, and of the many small ones, what is resident without what is shared.
    """
    import psutil  # Not before: it takes its time, and most runs never need it.

    resident = []
    for pid in children.descendants(claims)[:SEEN_MAX]:
        try:
            one = psutil.Process(pid)
            counts = one.memory_info()
            resident.append((max(0, counts.rss - counts.shared), one, one.name()))
        except psutil.Error:
            continue  # It is gone.
    resident.sort(key=lambda found: -found[0])
    processes = []
    for place, (used, one, name) in enumerate(resident):
        own = used
        if place < MEASURED_MAX:
            try:
                own = one.memory_full_info().uss
            except psutil.Error:
                own = used
        processes.append(Process(one.pid, name, own))
    return tuple(sorted(processes, key=lambda one: -one.used))
