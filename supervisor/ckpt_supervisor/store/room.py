"""Whether the next checkpoint will fit where it is going to be written.

Owns the question to the file system: free bytes of the volume that DIR itself lies on (DIR is often a link to another one, field
case 112), and whether a quota lets this user have them. statvfs(2) knows of no quota, so that the bytes are asked for with
fallocate(2) and given back at once. Must not leave anything behind, write anything, or ask for more than one checkpoint: what is
asked for is gone for everybody else meanwhile.

Never by `os.posix_fallocate`: where a file system cannot reserve, glibc writes zeros instead. Not on tmpfs either: there it is
memory that would be taken, which may be what training is short of, and a file system in memory rarely has quotas.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from ckpt_supervisor.store.durable import free_bytes
from ckpt_supervisor.store.layout import trash_name
from ckpt_supervisor.store.manifest import Manifest

FALLOC_FL_KEEP_SIZE = 1
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The only answers that say anything about room. A file system that cannot reserve says EOPNOTSUPP, ENOSYS or EINVAL, and one
whose files are limited EFBIG."""

IN_MEMORY = frozenset({0x01021994, 0x858458F6, 0x958458F6})
"""tmpfs, ramfs, hugetlbfs (statfs(2))."""

STATFS_BYTES = 512
"""More than struct statfs has on any machine; its first long is the kind of the file system."""

PROBES_MAX = 6
"""So often it is asked how much a quota still gives: to a sixty-fourth of a checkpoint."""

RESERVE_BYTES_MAX = 64 * 1024**3
"""More is not asked for: ext4 takes 25 ms for each GB, and others lack it meanwhile. A quota that leaves more is not found."""

_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
"""What open(2) says where there is no O_TMPFILE (NFS, old kernels)."""

Reserve = Callable[[int, int], int]
"""Reserves so many bytes for an open file; 0, or the error number."""


class Room(msgspec.Struct, frozen=True):
    """What there is.

    `refusal`: the error by which the file system refused what its free bytes promise ("EDQUOT"), "" if it did not.
    """

    needed_bytes: int
    free_bytes: int
    """Of the volume, for this user."""
    usable_bytes: int
    """The same, but what a quota leaves of it where that is less than needed."""
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether one more checkpoint can be written."""
        return self.usable_bytes >= self.needed_bytes


def needed_for(manifest: Manifest) -> int:
    """Bytes for another checkpoint like this one: as large and a twentieth, and what the file system needs for each file."""
    return manifest.total_bytes + manifest.total_bytes // 20 + 8192 * (len(manifest.files) + 2)


def reserve(fd: int, count: int) -> int:
    """Reserve so many bytes for an open file by fallocate(2) itself; 0, or the error number. Not in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    kind = ctypes.create_string_buffer(STATFS_BYTES)
    if libc.fstatfs(fd, kind) == 0 and ctypes.c_long.from_buffer(kind).value & 0xFFFFFFFF in IN_MEMORY:
        return errno.EOPNOTSUPP
    try:
        function = libc.fallocate
    except AttributeError:
        return errno.ENOSYS
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return 0 if function(fd, FALLOC_FL_KEEP_SIZE, 0, count) == 0 else ctypes.get_errno()


def look_at_room(directory: str | os.PathLike[str], bytes_needed: int, reserve: Reserve | None = reserve) -> Room:
    """How much room there is in this directory. Raises OSError when it cannot be looked at.

    `reserve` None: only the volume's free bytes are looked at, nothing is asked for (somebody may be writing).
    """
    free = free_bytes(directory)
    if reserve is None or not 0 < bytes_needed <= free:
        return Room(bytes_needed, free, free)
    refusal = _asked(directory, min(bytes_needed, RESERVE_BYTES_MAX), reserve)
    if refusal not in REFUSALS:
        return Room(bytes_needed, free, free)
    usable, too_much = 0, min(bytes_needed, RESERVE_BYTES_MAX)
    for _ in range(PROBES_MAX):
        middle = (usable + too_much) // 2
        if _asked(directory, middle, reserve) == 0:
            usable = middle
        else:
            too_much = middle
    return Room(bytes_needed, free, usable, errno.errorcode[refusal])


def _asked(directory: str | os.PathLike[str], count: int, reserve: Reserve) -> int:
    """Ask for so many bytes and give them back; 0, or the error number of whatever went wrong."""
    try:
        fd = _nameless(directory)
    except OSError as error:
        return error.errno or errno.EIO
    try:
        return reserve(fd, count) if count > 0 else 0
    finally:
        os.close(fd)


def _nameless(directory: str | os.PathLike[str]) -> int:
    """An open file that goes when it is closed. Where it needs a name for a moment, it is one that the sweep removes."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    path = Path(directory) / trash_name(0, 0, os.getpid())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(FileNotFoundError):  # The sweep was faster.
        path.unlink()
    return fd
