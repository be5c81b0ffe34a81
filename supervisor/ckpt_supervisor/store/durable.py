"""Changes to a directory in an order that survives a crash: write, fsync, rename, fsync of the parent.

Owns the system calls that make, move and remove things in a checkpoint directory. Must not decide what is moved or
removed. A rename is one step for every reader, but it is not on the disk before its directory is synced, and it may
reach the disk before the data that it names (field case 74): hence the order.

A failed fsync is never tried again: Linux marks the pages clean all the same, and the second one would say that all is
well. An error of close() counts as one of writing, since NFS tells of a full disk only then.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from ckpt_supervisor.store.look import Patience

NAMES_TRIED_MAX = 1_000
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_STILL_OPEN = frozenset({errno.ENOTEMPTY, errno.EBUSY})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def sync_file(path: Path) -> os.stat_result:
    """fsync one file; what fstat says about it afterwards. Never follows a link."""
    fd = Patience().look(lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """fsync a directory, which may be a link to one: people make DIR such a link.

    A file system that has no such thing (fsync(2): EINVAL) is taken as it is.
    """
    fd = Patience().look(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, exclusive: bool = False) -> None:
    """Write a whole file and fsync it. `exclusive`: raises FileExistsError if the name is taken."""
    how = os.O_EXCL if exclusive else os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def move_aside(source: Path, root: Path, name_of: Callable[[int], str]) -> Path:
    """Rename `source` to the first free name of `name_of(0), name_of(1), ...` in `root`. Raises OSError."""
    for k in range(NAMES_TRIED_MAX):
        target = root / name_of(k)
        if os.path.lexists(target):
            continue
        try:
            source.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            continue  # somebody took the name in between
        return target
    raise OSError(errno.EEXIST, f"{NAMES_TRIED_MAX} names are taken", str(root / name_of(0)))


def move_out(source: Path, root: Path, name_of: Callable[[int], str]) -> Path:
    """The same for what may be lost; where a new name needs space that only its removal gives back it keeps its own."""
    try:
        return move_aside(source, root, name_of)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        return source


def delete(path: Path) -> None:
    """Remove a file, a link, or a directory with everything in it, never what a link points to.

    Raises the first refusal as OSError once all that can go has gone: one file that is busy must not hold the space of
    the others.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        path.unlink()
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        shutil.rmtree(path)
    except RecursionError as error:  # By shutil.rmtree, for a thousand directories in each other.
        raise OSError(errno.ELOOP, "too many directories in each other", str(path)) from error
    except OSError as error:
        if error.errno in _STILL_OPEN:  # on NFS a removed file that somebody has open stays as .nfs… (nfs(5))
            raise OSError(errno.EBUSY, "a file in it is still open, or came while it was removed", str(path)) from error
        raise


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write on the volume of this directory. Quotas are not seen."""
    volume = os.statvfs(directory)
    return volume.f_bavail * volume.f_frsize
