"""Looking at a disk that may not answer: bounded retries, regular files only, bounded listings.

Owns the difference between "not there" and "could not look". Must not change anything on a disk and must not follow a
link. On a network file system EIO, ESTALE and EACCES come and go (field case 111: one ESTALE, fine at the next open);
only ENOENT and ENOTDIR say that a thing is absent.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})
"""The only answers that mean "this does not exist"."""

_DEFINITE = NOT_THERE | {errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.EINVAL}
"""Looking again does not change these. ELOOP is what O_NOFOLLOW says to a link, EINVAL readlink(2) to what is none."""

PAUSES_MS = (50, 250)
"""Pauses between the tries of one look: three tries in all."""

PATIENCE_MS_MAX = 2_000
"""Most that one task waits altogether, so that a thousand unreadable checkpoints do not take a thousand times as long.
"""

NAMES_MAX = 1_000_000
"""Most names in one directory; more is refused, never cut, since the newest could be among the rest."""

TREE_FILES_MAX = 100_000
TREE_DEPTH_MAX = 32

_BUSY_ON_NFS = re.compile(r"\.nfs[0-9a-f]+")
"""A file removed while somebody has it open stays under such a name until it is closed (nfs(5), "silly rename")."""


class Stop(Protocol):
    """What is needed of a threading.Event to end a long look early."""

    def is_set(self) -> bool:
        """Whether the caller wants an end."""

    def wait(self, timeout: float | None = None) -> bool:
        """Pause for so many seconds, less if it is set meanwhile."""


class NotRegular(Exception):
    """The name is there, but is no regular file; the message ends the sentence "state.pt ..."."""


class Patience:
    """Retries looks, with a bound on each and on all of them together."""

    def __init__(self, stop: Stop | None = None, budget_ms: int = PATIENCE_MS_MAX) -> None:
        self._stop: Stop = stop if stop is not None else threading.Event()
        self._left_ms = budget_ms

    def look(self, at: Callable[[], T]) -> T:
        """The answer of `at`; its OSError when it is definite or the patience is used up."""
        for pause_ms in PAUSES_MS:
            try:
                return at()
            except OSError as error:
                if error.errno in _DEFINITE or pause_ms > self._left_ms or self._stop.is_set():
                    raise
            self._left_ms -= pause_ms
            self._stop.wait(pause_ms / 1000)
        return at()


class Tree(msgspec.Struct):
    """The regular files below a directory with their sizes, its directories ("" first), and what is neither."""

    files: dict[str, int] = msgspec.field(default_factory=dict)
    directories: list[str] = msgspec.field(default_factory=list)
    refused: list[tuple[str, str]] = msgspec.field(default_factory=list)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor for reading. Raises NotRegular, or OSError. Never follows a link, never blocks on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular("is a link") from error
        if error.errno == errno.ENXIO:
            raise NotRegular("is a socket or a device") from error
        raise
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        os.close(fd)
        raise
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise NotRegular(f"is {kind_of(mode)}")
    return fd


def read_up_to(fd: int, bytes_max: int) -> bytes:
    """The first `bytes_max` bytes of a file, fewer if it ends before."""
    parts: list[bytes] = []
    left = bytes_max
    while left > 0:
        part = os.pread(fd, min(left, 1 << 20), bytes_max - left)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def list_names(directory: str | os.PathLike[str]) -> list[str]:
    """All names in a directory. Raises OSError, also when there are more than NAMES_MAX."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, NAMES_MAX + 1)]
    if len(names) > NAMES_MAX:
        raise OSError(errno.EOVERFLOW, f"more than {NAMES_MAX} names", os.fspath(directory))
    return names


def list_tree(directory: str | os.PathLike[str], skip: str, files_max: int = TREE_FILES_MAX) -> Tree:
    """Everything below a directory but the top-level name `skip`. Raises OSError if any part cannot be listed."""
    tree = Tree()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        tree.directories.append(below)
        if below.count("/") >= TREE_DEPTH_MAX:
            tree.refused.append((below, f"is more than {TREE_DEPTH_MAX} directories deep"))
            continue
        for name, mode, size in _entries(Path(directory) / below):
            path = f"{below}/{name}" if below else name
            if path == skip or (stat.S_ISREG(mode) and _BUSY_ON_NFS.fullmatch(name)):
                continue
            if stat.S_ISDIR(mode):
                waiting.append(path)
            elif stat.S_ISREG(mode):
                tree.files[path] = size
            else:
                tree.refused.append((path, f"is {kind_of(mode)}"))
            if len(tree.files) + len(tree.refused) + len(tree.directories) + len(waiting) > files_max:
                tree.refused.append(("", f"holds more than {files_max} files and directories"))
                return tree
    return tree


def _entries(directory: Path) -> Iterator[tuple[str, int, int]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                seen = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed between the listing and the look: the same as never listed
            yield entry.name, seen.st_mode, seen.st_size


def kind_of(mode: int) -> str:
    """What an inode is, in words."""
    for test, word in (
        (stat.S_ISLNK, "a link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file"),
    ):
        if test(mode):
            return word
    return "a device"
