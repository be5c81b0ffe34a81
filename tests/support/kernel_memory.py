"""Memory limits for tests: a real cgroup where one can be made, and directories that look like the kernel's where not.

Owns: both, and the removal of the real one. Must not touch a cgroup that it has not made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ckpt_supervisor.linux import cgroups

from tests.support.run import eventually

V1_NONE = 9_223_372_036_854_771_712
"""What version 1 says where there is no limit."""


@dataclasses.dataclass
class Kernel:
    """A /proc and one cgroup hierarchy with the memory controller, version 1 or 2, in a directory."""

    root: Path
    version: int
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def proc(self) -> str:
        """In place of /proc."""
        return str(self.root / "proc")

    def place(self, name: str) -> Path:
        """Where this cgroup's files are."""
        return self.root / "cgroup" / name.strip("/")

    def put(self, name: str, **files: object) -> None:
        """Give the cgroup these files; `__` stands for a dot."""
        for file, content in files.items():
            (self.place(name) / file.replace("__", ".")).write_text(f"{content}\n")

    def kills(self, name: str, kills: int, hits: int | None = None) -> None:
        """So many processes of this very cgroup were killed, and its own limit could not be kept so often."""
        if self.version == 1:
            self.put(name, memory__oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}")
        else:
            self.put(name, memory__events=f"low 0\nhigh 0\nmax 9\noom {hits or 0}\noom_kill {kills}\noom_group_kill 0")
        if hits is not None:
            self.hits(name, hits)

    def hits(self, name: str, hits: int) -> None:
        """The cgroup's own limit could not be kept so often."""
        if self.version == 1:
            self.put(name, memory__failcnt=hits)
        else:
            self.put(name, memory__events__local=f"low 0\nhigh 0\nmax 9\noom {hits}\noom_kill 0\noom_group_kill 0")

    def node(self, total: int, available: int, shared: int = 0, kills: int = 0) -> None:
        """The node's memory in kB, and its count of kills."""
        meminfo = f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nShmem: {shared} kB\nHugePages_Total: 0\n"
        (self.root / "proc" / "meminfo").write_text(meminfo)
        (self.root / "proc" / "vmstat").write_text(f"nr_free_pages 5\noom_kill {kills}\n")


def kernel(root: Path, version: int, name: str, mounted: str = "/") -> Kernel:
    """One where this process is in the cgroup `name`, and the mount's top is the cgroup `mounted`."""
    made = Kernel(root, version)
    (root / "proc" / "self").mkdir(parents=True)
    place = str(root / "cgroup").replace(" ", "\\040")
    if version == 1:
        own = f"9:name=systemd:/\n4:cpuset,memory:{name}\n0::/\n"
        mount = f"35 31 0:32 {mounted} {place} rw,relatime - cgroup cgroup rw,cpuset,memory\n"
    else:
        own = f"0::{name}\n"
        mount = f"35 31 0:32 {mounted} {place} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    (root / "proc" / "self" / "cgroup").write_text(own)
    other = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    (root / "proc" / "self" / "mountinfo").write_text(other + mount)
    made.node(32_000_000, 30_000_000)
    inside = name.removeprefix(mounted.rstrip("/")) if mounted != "/" else name
    parts = [part for part in inside.split("/") if part]
    for depth in range(len(parts) + 1):
        made.names.append("/".join(parts[:depth]))
        made.place(made.names[-1]).mkdir(exist_ok=True)
        limited(made, made.names[-1], None, 0)
        made.kills(made.names[-1], 0, hits=0)
    made.names.reverse()
    return made


def limited(made: Kernel, name: str, limit: int | None, used: int, cached: int = 0, shared: int = 0) -> None:
    """Give this cgroup a limit and a use, in bytes; `cached` of it could be dropped."""
    if made.version == 1:
        stat = f"cache 0\nshmem 0\ninactive_file 0\ntotal_inactive_file {cached}\ntotal_shmem {shared}"
        limit = V1_NONE if limit is None else limit
        made.put(name, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat, memory__use_hierarchy=1)
    else:
        stat = f"anon 5\nfile 6\nshmem {shared}\ninactive_file {cached}\nactive_file 0"
        made.put(name, memory__max="max" if limit is None else limit, memory__current=used, memory__stat=stat)


@contextlib.contextmanager
def real_cgroup(limit: int) -> Iterator[Path | None]:
    """A new cgroup with this memory limit and no swap; None where this process may not make one, as in most containers."""
    place = _make(limit)
    try:
        yield place
    finally:
        if place is not None:
            # What was in it has ended; the kernel takes a moment to see that.
            eventually(lambda: _removed(place), f"{place} is empty")


def within(place: Path | None) -> list[str]:
    """Before a command line: it is run in that cgroup."""
    return [] if place is None else ["sh", "-c", f'echo $$ > "{place}/cgroup.procs" && exec "$@"', "sh"]


def _make(limit: int) -> Path | None:
    for level in reversed(cgroups.levels()):  # Only at the top may version 2 have processes beside further cgroups.
        place = Path(level.path, f"ckpt_test_{os.getpid()}")
        try:
            if level.version == 2:
                with contextlib.suppress(OSError):
                    Path(level.path, "cgroup.subtree_control").write_text("+memory")
            place.mkdir()
        except OSError:
            continue
        try:
            _limit(place, limit, level.version)
            subprocess.run([*within(place), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            place.rmdir()
            continue
        return place
    return None


def _limit(place: Path, limit: int, version: int) -> None:
    if version == 2:
        (place / "memory.max").write_text(str(limit))
        with contextlib.suppress(OSError):  # Not where there is no swap at all.
            (place / "memory.swap.max").write_text("0")
    else:
        (place / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):
            (place / "memory.memsw.limit_in_bytes").write_text(str(limit))


def _removed(place: Path) -> bool:
    try:
        place.rmdir()
    except OSError:
        return False
    return True
