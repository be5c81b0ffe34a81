"""Ends what a supervisor that is dead has left running on this node, before the next command starts.

Owns the proof that a process is such a leftover, and its end. Must not touch anything that cannot be proven: a leftover is of our
user, says in its environment whose it is (CKPT_SUPERVISE_TAG), and the supervisor named there is dead; or it descends from one
that does. A program that clears the environment and loses all of its parents is not found. Why it is needed at all: where Slurm
follows a step by its parents alone, daemons outlive the job, and with them what they hold of the GPUs (field case 132).

A first start never comes here: looking at thousands of processes takes longer than the rest of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.linux import procfs, segments
from ckpt_supervisor.start.startup import Job, job_of

if TYPE_CHECKING:
    from ckpt_supervisor.core.describe import Entry

WITHIN_MS = 3_000
"""A start is held up no longer than this."""

GONE_MS = 2_000
"""Somebody who was killed so long ago and is still there hangs in the kernel."""

CHASE_MS = 200
"""While processes of our user come and go, one of them may be a leftover that is always gone when it is looked at: we look for so
long, or, when there was any leftover at all, for as long as there is time."""

CHASE_TURN_MS = 10
CHASE_BACK_MAX = 64
"""How long between two looks at everybody, and how many of the newest numbers are looked at."""

LOOK_AGAIN_S = 0.005
PASSES_MAX = 2_000
EMPTY_PASSES = 2
"""Looks in a row that show nobody: one may miss a child whose parent has just died."""

PROCESSES_MAX = 20_000
"""Most processes of this user that one look goes through."""

GENERATIONS_MAX = 1_000
_TAG = re.compile(r"(.+)\.([^.]+)" + r"\.(\d{1,18})" * 4, re.ASCII)

NAMED_MAX = 5
"""Most processes that are named on stderr; the journal has all pids."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tag:
    """CKPT_SUPERVISE_TAG: `job.step.epoch.task.pid.started` of the supervisor that started the command."""

    job: str
    step_id: str
    epoch: int
    task: int
    pid: int
    started: int
    """Clock ticks after boot: with the pid it names one process once and for all."""

    @classmethod
    def parse(cls, text: str) -> Tag | None:
        """None if it is none. From the right: a job outside of Slurm is named after its host, which may hold dots."""
        match = _TAG.fullmatch(text)
        return None if match is None else cls(match[1], match[2], *map(int, match.groups()[2:]))


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What came of it: processes by pid with their names, and when that was (wall clock in ns, monotonic in ms)."""

    ended: Mapping[int, str] = dataclasses.field(default_factory=dict)
    stuck: Mapping[int, str] = dataclasses.field(default_factory=dict)
    segments: tuple[str, ...] = ()
    """Shared memory that only they had in use, and that is gone now."""
    at: tuple[int, int] = (0, 0)

    def lines(self) -> Iterator[tuple[str, str]]:
        """What to tell, with the name of its event."""
        if self.ended:
            some = "1 process was" if len(self.ended) == 1 else f"{len(self.ended)} processes were"
            yield (
                "leftovers_ended",
                f"{some} left here by an earlier start and had to be ended ({_names(self.ended)}): what they held of GPUs, "
                "memory and files is free",
            )
        if self.stuck:
            some = "1 process" if len(self.stuck) == 1 else f"{len(self.stuck)} processes"
            yield (
                "leftovers_stuck",
                f"{some} of an earlier start cannot be ended, as the kernel waits for a device or a file server on their behalf "
                f"({_names(self.stuck)}): GPUs and memory that they hold stay taken; the command is started all the same",
            )


def end(job: Job, directory: Path, env: Mapping[str, str]) -> Ended:
    """End the leftovers of this job, and those of other jobs in this directory; told on stderr. Takes WITHIN_MS at most.

    Several supervisors of a node may do it at once: whoever comes second finds nobody, or waits for the same.
    """
    hunt = _Hunt(job, directory, env)
    found = hunt.run()
    for _, text in found.lines():
        say(text)
    return found


def tell(found: Ended | None, log: Callable[[Entry, tuple[int, int]], None]) -> None:
    """The journal's lines, once there is a journal. None: it was a first start."""
    from ckpt_supervisor.core.describe import Entry  # Not needed before the command runs.

    if found is None:
        return
    texts = dict(found.lines())
    if found.ended:
        fields = {"pids": sorted(found.ended), "segments": list(found.segments), "text": texts["leftovers_ended"]}
        log(Entry("leftovers_ended", "warning", fields), found.at)
    if found.stuck:
        log(Entry("leftovers_stuck", "error", {"pids": sorted(found.stuck), "text": texts["leftovers_stuck"]}), found.at)


@dataclasses.dataclass(frozen=True, slots=True)
class _Marks:
    """What a process's environment says."""

    tag: Tag
    text: str
    directory: str
    job: str
    """The job that it runs in by what Slurm has told it; "" if it was told nothing, or had that removed."""


class _Hunt:
    """The looks of one start, with what they have in common."""

    def __init__(self, job: Job, directory: Path, env: Mapping[str, str]) -> None:
        self._job = job.name if job.slurm is not None else ""  # Without Slurm all runs of a host have one name.
        place = directory.absolute()
        self._directories = {str(place), os.path.realpath(place)}
        # Those above us put us here: as seen from within a container they need not be visible at all.
        self._own_tag = env.get("CKPT_SUPERVISE_TAG", "")
        self._namespaces = procfs.namespaces()
        self._ancestors = set(_above(os.getpid(), {}))
        self._marks: dict[tuple[int, int], _Marks | None] = {}
        """By pid and start: what has no tag has none later, unless a living supervisor has just started it."""
        self._uid = os.geteuid()
        self._newest = 0
        self._spared: set[int] = set()
        self._come_and_go = False
        self._sighted = False
        """Whether there was any, even if it was gone again before it could be ended."""
        self._killed: dict[int, tuple[int, str]] = {}
        self._segments: set[segments.Segment] = set()

    def run(self) -> Ended:
        """Look and end until nobody is left, or it has taken long enough."""
        began = killed_at = time.monotonic_ns() // 1_000_000
        empty = 0
        for _ in range(PASSES_MAX):
            fresh = self._end_those_there()
            now = time.monotonic_ns() // 1_000_000
            if not fresh and (self._sighted or now - began < CHASE_MS):
                fresh = self._chase()
            killed_at = now if fresh else killed_at
            waits = not fresh and any(map(self._is_there, self._killed))
            is_calm = not self._come_and_go or (now - began >= CHASE_MS and not self._sighted)
            empty = 0 if fresh or waits or not is_calm else empty + 1
            if empty == EMPTY_PASSES or now - began >= WITHIN_MS or now - killed_at >= GONE_MS:
                break
            if waits:
                threading.Event().wait(LOOK_AGAIN_S)
        stuck = {pid: name for pid, (_, name) in self._killed.items() if self._is_there(pid)}
        ended = {pid: name for pid, (_, name) in self._killed.items() if pid not in stuck}
        swept = segments.sweep_segments(frozenset(self._segments))
        return Ended(ended, stuck, swept, (time.time_ns(), time.monotonic_ns() // 1_000_000))

    def _end_those_there(self) -> bool:
        """One look; whether somebody was there who had not been killed yet."""
        self._newest = procfs.newest()
        seen = {pid: kin for pid in procfs.of_user(self._uid)[:PROCESSES_MAX] if (kin := procfs.kin(pid)) is not None}
        marked = {pid: marks for pid, kin in seen.items() if (marks := self._marks_of(pid, kin)) is not None}
        alive = {marks.tag.pid for marks in marked.values() if not _is_dead(marks.tag)}
        self._spared = spared = {os.getpid(), *alive}
        leftovers = [pid for pid, marks in marked.items() if self._is_marked(marks) and self._is_beside(pid)]
        going = [pid for pid in _with_all_below(leftovers, seen) if not _is_over(seen[pid]) and pid not in self._ancestors]
        new = [pid for pid in going if self._killed.get(pid, (0, ""))[0] != seen[pid].started]
        fresh = [pid for pid in new if spared.isdisjoint([pid, *_above(pid, seen)])]
        self._sighted |= bool(fresh)
        self._segments |= segments.segments_of(fresh)
        return sum(self._kill(pid, seen[pid].started) for pid in fresh) > 0

    def _chase(self) -> bool:
        """Only the newest, the last one first, each judged and ended at once; whether there was one to end.

        A daemon that forks and ends, again and again, lives for a fraction of what a look at everybody takes.
        """
        self._come_and_go = False
        until = time.monotonic() + CHASE_TURN_MS / 1_000
        while time.monotonic() < until:
            last, self._newest = self._newest, procfs.newest()
            back = min(CHASE_BACK_MAX, self._newest - last) if last <= self._newest else CHASE_BACK_MAX
            if sum(self._end_at_once(pid) for pid in range(self._newest, self._newest - back, -1)):
                return True
        return False

    def _end_at_once(self, pid: int) -> bool:
        uid = procfs.owner(pid)
        kin = procfs.kin(pid) if uid == self._uid else None
        self._come_and_go |= uid in (None, self._uid)
        marks = None if kin is None else self._marks_of(pid, kin)
        if marks is None or kin is None or not self._is_marked(marks) or pid in self._ancestors:
            return False
        if not self._spared.isdisjoint([pid, *_above(pid, {pid: kin})]):
            return False
        is_beside = self._is_beside(pid)
        self._sighted |= is_beside or procfs.owner(pid) is None
        return is_beside and self._kill(pid, kin.started)

    def _marks_of(self, pid: int, kin: procfs.Kin) -> _Marks | None:
        key = (pid, kin.started)
        if key not in self._marks:
            env = {} if _is_over(kin) else procfs.environ(pid)
            text = env.get("CKPT_SUPERVISE_TAG", "")
            tag = Tag.parse(text)
            slurm = None if tag is None else SlurmEnv.from_environ(env)
            job = "" if slurm is None else job_of(slurm).name
            self._marks[key] = None if tag is None else _Marks(tag, text, env.get("CKPT_SUPERVISE_DIR", ""), job)
        return self._marks[key]

    def _is_marked(self, marks: _Marks) -> bool:
        """Whether it is a leftover by its own marks.

        The job it runs in has to be that of its tag: `sbatch` hands the environment on, so a job that a supervised program has
        submitted carries the tag of another one.
        """
        is_of_tag = marks.job in ("", marks.tag.job)
        concerns_us = marks.tag.job == self._job or marks.directory in self._directories
        is_ours = is_of_tag and concerns_us and marks.text != self._own_tag
        return is_ours and _is_dead(marks.tag)

    def _is_beside(self, pid: int) -> bool:
        """Whether pids and times mean the same to it as to us. In a container the supervisor that it names may be alive."""
        return procfs.namespaces(pid) == self._namespaces

    def _kill(self, pid: int, started: int) -> bool:
        name = procfs.name_of(pid)
        kin = procfs.kin(pid)
        if kin is None or kin.started != started:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        self._killed[pid] = (started, name)
        return True

    def _is_there(self, pid: int) -> bool:
        """Whether one that was killed still holds what it held."""
        kin = procfs.kin(pid)
        return kin is not None and kin.started == self._killed[pid][0] and not _is_over(kin)


def _is_over(kin: procfs.Kin) -> bool:
    """A zombie holds nothing any more, once its last thread has ended too."""
    return kin.state == "gone" or (kin.state == "zombie" and kin.threads <= 1)


def _is_dead(tag: Tag) -> bool:
    """Whether that supervisor is dead for certain: one that another user runs may be hidden from us (proc(5), hidepid)."""
    if not tag.started:
        return False  # It could not tell when it was started.
    seen = procfs.stat(tag.pid)
    if seen is not None:
        return seen.started != tag.started or seen.state in ("zombie", "gone")
    try:
        os.kill(tag.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _above(pid: int, seen: Mapping[int, procfs.Kin]) -> list[int]:
    """Its parent, that one's parent, and so on, without init."""
    found: list[int] = []
    for _ in range(GENERATIONS_MAX):
        kin = seen.get(pid) or procfs.kin(pid)
        if kin is None or kin.parent <= 1:
            break
        pid = kin.parent
        found.append(pid)
    return found


def _with_all_below(pids: list[int], seen: Mapping[int, procfs.Kin]) -> list[int]:
    """These and their descendants, by parents, and by session: who is in one that a leftover has made descends from it."""
    below: dict[int, list[int]] = {}
    for pid, kin in seen.items():
        for root in {kin.parent, kin.session} - {pid}:
            below.setdefault(root, []).append(pid)
    found = list(pids)
    known = set(pids)
    for pid in found:  # Grows while it is walked.
        fresh = [child for child in below.get(pid, ()) if child not in known]
        known.update(fresh)
        found += fresh
    return found


def _names(processes: Mapping[int, str]) -> str:
    some = [f"{pid} {name}" for pid, name in sorted(processes.items())[:NAMED_MAX]]
    return ", ".join([*some, "..."] if len(processes) > NAMED_MAX else some)
