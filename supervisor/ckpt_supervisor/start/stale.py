"""What killed supervisors and their programs have left in this node's memory and on its disks: sockets and shared memory.

Owns the look at the places where a socket may be, and the proof that nobody listens there. Must not disturb a live one, and
removes nothing that cannot be proven to be ours: a directory of our user with mode 0700 and a name that adapters/transport.py
gives, locked by nobody, with nothing in it but a socket that refuses connections, on a disk of this machine: on a file server the
listener may be on another one, and neither lock nor refusal says anything. Runs beside training, in a lane.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ckpt_supervisor.adapters import transport
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.linux import segments

_NAME = re.compile(r"ckpt-[a-z0-9_]{8}", re.ASCII)
"""As tempfile.mkdtemp makes it."""

SOCKET = "s"
EMPTY_S = 600.0
"""Younger, an empty one may be of a supervisor that is just starting."""

SWEPT_MAX = 100
ENTRIES_MAX = 20_000
"""Most directories removed in one start, and most entries looked at in one place."""

MOUNTS_BYTES_MAX = 4 << 20
LOCAL = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay"})


@dataclasses.dataclass(frozen=True, slots=True)
class Swept:
    """What is gone: directories by path, shared memory by name."""

    sockets: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()


def post(lanes: Lanes, env: Mapping[str, str], log: Callable[[Entry], None]) -> None:
    """Have it done beside everything else; what was removed is told to the journal."""

    def swept(result: Swept | Broken) -> None:
        if isinstance(result, Swept) and (result.sockets or result.segments):
            log(Entry("stale_removed", "info", {"sockets": list(result.sockets), "segments": list(result.segments)}))

    lanes.post("prune", "sweeping sockets", lambda: sweep(transport.places(env)), swept)


def sweep(places: Iterable[str]) -> Swept:
    """Remove what nobody uses any more."""
    local = _local_devices()
    # A place may be there twice, and by a link. What is gone is not found again.
    paths = list(dict.fromkeys(os.path.realpath(place) for place in places if place))
    gone: list[str] = []
    for path in paths:
        for name in _candidates(path):
            if len(gone) == SWEPT_MAX:
                break
            gone += [f"{path}/{name}"] if _remove(f"{path}/{name}", local, time.time()) else []
    return Swept(tuple(gone), segments.sweep_abandoned())


def _candidates(place: str) -> Iterator[str]:
    try:
        with os.scandir(place) as entries:
            names = [entry.name for _, entry in zip(range(ENTRIES_MAX), entries, strict=False)]
    except OSError:
        return
    yield from (name for name in names if _NAME.fullmatch(name))


def _remove(path: str, local: frozenset[int], now_s: float) -> bool:
    """Remove this directory if nobody listens in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        seen = os.fstat(fd)
        if seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) != 0o700 or seen.st_dev not in local:
            return False
        with os.scandir(fd) as entries:
            names = [entry.name for _, entry in zip(range(2), entries, strict=False)]
        if names != [SOCKET] and (names or now_s - seen.st_mtime <= EMPTY_S):
            return False
        # Fails while the supervisor lives, or another one sweeps.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if names and not _nobody_listens(fd):
            return False
        if names:
            os.unlink(SOCKET, dir_fd=fd)
        os.rmdir(path)  # noqa: PTH106 - not if somebody has put something into it meanwhile.
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _nobody_listens(directory: int) -> bool:
    """Whether connecting to the socket there is refused. A live one hears nothing of it (adapters/closings.py)."""
    if not stat.S_ISSOCK(os.stat(SOCKET, dir_fd=directory, follow_symlinks=False).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # A listener whose queue is full is alive: EAGAIN.
        # By the descriptor: as short as the path was when it was bound, and no link in between.
        return probe.connect_ex(f"/proc/self/fd/{directory}/{SOCKET}") == errno.ECONNREFUSED


def _local_devices() -> frozenset[int]:
    """Numbers of the file systems that are this machine's own (proc_pid_mountinfo(5)); what is not found does not count."""
    found = set()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123
        for line in file.read(MOUNTS_BYTES_MAX).decode("utf-8", "replace").splitlines():
            before, _, after = line.partition(" - ")
            if after.split(" ", 1)[0] in LOCAL:
                major, _, minor = before.split(" ", 3)[2].partition(":")
                found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)
