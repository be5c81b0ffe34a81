"""Shared memory that nobody has in use any more: files in /dev/shm of processes that were killed before they could remove them.

Owns which names are looked at and the proof that nobody needs such a file. Must not remove what cannot be proven: a file goes
only if it is of our user, bears a name that only torch, multiprocessing or NCCL give, is known to be of processes that are dead,
and is open and mapped nowhere. The kernel answers that last question itself: it grants a write lease on a file only if nobody
else has it open, in whatever namespace (fcntl(2), F_SETLEASE; a mapping counts as open). One answer takes 2 us here; the maps of
all processes take milliseconds each.

What a program keeps in /dev/shm under a name of its own, to find it again, stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import re
import signal
import stat
import time
from collections.abc import Collection, Iterator

from ckpt_supervisor.linux import procfs

PLACE = "/dev/shm"  # noqa: S108 - nothing is made there.

_NAME = re.compile(r"torch_(\d{1,10})_\d{1,10}_\d{1,10}|psm_[0-9a-f]{8}|sem\.mp-[a-z0-9_]{8}|nccl-[A-Za-z0-9]{6}", re.ASCII)
"""As torch 2.13 (sharing strategy file_system; the number is the maker's pid), multiprocessing's SharedMemory without a name and
its locks, and NCCL name them."""

_TRACKER = re.compile(r"from [\w.]*resource_tracker import main\b", re.ASCII)

FILES_MAX = 20_000
MAPS_BYTES_MAX = 4 << 20
WITHIN_MS = 20
"""Before the kill, and after it: what is not found out by then stays."""

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""include/linux/proc_ns.h: from there every process of the machine can be seen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """One file, by what names it once and for all."""

    name: str
    device: int
    inode: int
    changed_s: float = dataclasses.field(default=0.0, compare=False)


def cleans_up(pid: int) -> bool:
    """Whether this process removes shared memory by itself once all others are dead: kill it after them, if it does not leave."""
    words = procfs.words(pid)
    if os.path.basename(words[0]) == "torch_shm_manager":  # noqa: PTH119
        return True
    # multiprocessing.resource_tracker, joblib's and others' copies: `python -c "from ... import main;main(5)"`.
    return any(flag == "-c" and _TRACKER.match(code) for flag, code in itertools.pairwise(words))


def segments_of(pids: Collection[int], within_ms: int = WITHIN_MS) -> frozenset[Segment]:
    """What these processes have made, or have open or mapped and may have made. Before they are killed."""
    if not pids:
        return frozenset()
    rest = {(one.device, one.inode): one for one in _listed()}
    if not rest:
        return frozenset()  # As almost always: nothing of a process has to be read.
    until = time.monotonic() + within_ms / 1_000
    wanted = set(pids)
    found = {one for one in rest.values() if _maker(one.name) in wanted}
    began = _began(wanted)
    rest = {key: one for key, one in rest.items() if one not in found and one.changed_s >= began - 1}
    for pid in pids:
        if not rest or time.monotonic() > until:
            break
        found |= {rest.pop(key) for key in _in_use_by(pid) if key in rest}
    return frozenset(found)


def sweep_segments(found: Collection[Segment], within_ms: int = WITHIN_MS) -> tuple[str, ...]:
    """Remove those of them that nobody has in use now; their names. After the processes are dead."""
    until = time.monotonic() + within_ms / 1_000
    return tuple(one.name for one in sorted(found, key=lambda one: one.name) if time.monotonic() <= until and _remove(one))


def sweep_abandoned() -> tuple[str, ...]:
    """What torch has left here at some time before: its maker is dead, and so is the process through which it could be opened.

    A segment of torch can only be opened through the torch_shm_manager that knows it. So while one of our user's is alive nothing
    is touched, and nothing at all where some processes cannot be seen. Other names do not say who has made them: those stay.
    """
    if procfs.namespaces()[0] != INITIAL_PID_NAMESPACE:
        return ()
    orphaned = [one for one in _listed() if (maker := _maker(one.name)) is not None and procfs.stat(maker) is None]
    if not orphaned or any(map(_is_manager, procfs.of_user(os.geteuid()))):
        return ()
    return sweep_segments(orphaned, within_ms=1_000)


def _is_manager(pid: int) -> bool:
    return os.path.basename(procfs.words(pid)[0]) == "torch_shm_manager"  # noqa: PTH119


def _listed() -> Iterator[Segment]:
    """Our user's files with such names."""
    uid = os.geteuid()
    try:
        with os.scandir(PLACE) as entries:
            for _, entry in zip(range(FILES_MAX), entries, strict=False):
                if not _NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    if seen.st_uid == uid and stat.S_ISREG(seen.st_mode):
                        yield Segment(entry.name, seen.st_dev, seen.st_ino, seen.st_ctime)
    except OSError:
        return


def _maker(name: str) -> int | None:
    """The pid in the name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and match[1] is not None else None


def _began(pids: Collection[int]) -> float:
    """When the oldest of them started, on the clock that files have: what is older was made by somebody else."""
    ticks = [seen.started for pid in pids if (seen := procfs.stat(pid)) is not None]
    if not ticks:
        return time.time()
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + min(ticks) / os.sysconf("SC_CLK_TCK")


def _in_use_by(pid: int) -> Iterator[tuple[int, int]]:
    """Device and inode of what it has mapped or open there."""
    for line in procfs.maps(pid, MAPS_BYTES_MAX).splitlines():
        if f"{PLACE}/" in line:
            device, inode = line.split(maxsplit=5)[3:5]
            major, _, minor = device.partition(":")
            yield os.makedev(int(major, 16), int(minor, 16)), int(inode)
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"{PLACE}/"):  # noqa: PTH115
                seen = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116
                yield seen.st_dev, seen.st_ino


def _remove(one: Segment) -> bool:
    """Unlink it if it still is that file and nobody has it open or mapped."""
    path = f"{PLACE}/{one.name}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        seen = os.fstat(fd)
        if (seen.st_dev, seen.st_ino, seen.st_uid) != (one.device, one.inode, os.geteuid()) or not stat.S_ISREG(seen.st_mode):
            return False
        # Whoever opens it from here on would have us told by SIGIO, of which we would die; of this one nobody dies.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False  # In use; or a kernel that grants no leases there: then it stays.
    finally:
        os.close(fd)
    return True
