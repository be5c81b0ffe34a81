"""Names what the kernel's OOM killer has done: a status of 137 alone says that somebody sent SIGKILL, not who and why.

Owns the comparison of the kernel's counts now with those at the command's start. Must not read more than a few small files at a
time, as it does so in the loop, and must not blame the kernel without a count that has moved: people send SIGKILL as well. The
kernel counts before it kills (mm/oom_kill.c), so whoever sees the end of a process sees the count.
"""

from __future__ import annotations

import dataclasses
import signal

from ckpt_supervisor.linux import cgroups

KILLED = 128 + signal.SIGKILL

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20))


@dataclasses.dataclass(frozen=True, slots=True)
class Struck:
    """Kills since the start. `limit` bytes of `of`; 0 where it was the node that was short of memory, or that does not show."""

    kills: int
    of: str = ""
    limit: int = 0
    is_ours: bool = True
    """False: some process of the node was killed, and whose it was does not show."""

    @property
    def text(self) -> str:
        """What was too small, and how often."""
        times = f"{self.kills} oom kill{'' if self.kills == 1 else 's'}"
        if self.of:
            return f"limit {memory_text(self.limit)} of {self.of}, {times}"
        return f"no limit that can be seen from here: the node was short of memory, or a container around this, {times}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Count:
    """Of one cgroup."""

    level: cgroups.Level
    kills: int | None
    hits: int | None


class Kills:
    """`mark` at the command's start; from then on `struck` and `why` tell what has come since. Must be used by one thread."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._counts: tuple[_Count, ...] = ()
        self._node: int | None = None

    def mark(self) -> None:
        """Count from here on."""
        self._counts = tuple(
            _Count(level, cgroups.kills_of(level), cgroups.hits_of(level)) for level in cgroups.levels(self._proc)
        )
        self._node = cgroups.node_kills(self._proc)

    def struck(self) -> Struck | None:
        """Kills since then among the processes of our own cgroup; where nobody counts those, anywhere on the node."""
        for count in self._counts:
            if count.kills is None:
                continue
            # Of the first one that counts. One above it also counts strangers: other steps, other jobs.
            kills = (cgroups.kills_of(count.level) or 0) - count.kills
            return self._by_limit(kills) if kills > 0 else None
        now = cgroups.node_kills(self._proc)
        if self._node is None or now is None or now <= self._node:
            return None
        return Struck(now - self._node, is_ours=False)

    def why(self, code: int, step: str, *, is_killed: bool) -> str:
        """What to say of a command that has ended with this status, "" if nothing. `step`: how its processes are called.

        `is_killed`: we have sent SIGKILL ourselves, so that 137 proves nothing.
        """
        struck = None if code == 0 else self.struck()
        if struck is None:
            return ""
        if not struck.is_ours:
            if code != KILLED or is_killed:
                return ""
            return f"probably the kernel killed it for lack of memory: on this node it has killed {struck.kills} since the start"
        if code == KILLED and not is_killed:
            return f"the kernel killed a process of this {step} for lack of memory ({struck.text})"
        return f"since its start the kernel has killed processes of this {step} for lack of memory ({struck.text})"

    def _by_limit(self, kills: int) -> Struck:
        """With the limit that could not be kept: the nearest one that says so.

        If none says so since the start, one that has said so before: the kernel counts that before it begins to look whom to
        kill, and the command was started a moment before we count.
        """
        found = [(count, cgroups.hits_of(count.level) or 0, cgroups.limit_of(count.level)) for count in self._counts]
        for is_new in (True, False):
            for count, hits, limit in found:
                if limit is not None and hits > ((count.hits or 0) if is_new else 0):
                    return Struck(kills, count.level.name, limit)
        for count, _, limit in found:
            if limit is not None and cgroups.was_full(count.level, limit):
                return Struck(kills, count.level.name, limit)
        return Struck(kills)


def memory_text(count: int) -> str:
    """As Slurm and the kernel count memory, in powers of 1,024 (`--mem=4G` is 4 GiB): text.py's are a disk's."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count >> 10} KiB"
