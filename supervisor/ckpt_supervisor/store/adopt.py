"""Making a checkpoint of what a program has written where it always did: judge, copy, check, commit.

Owns the copy. Must not change, link to or remove the program's own files: it may write over them in place or delete them at any
time, and a committed checkpoint must not change with them (field case 75). Copies share the blocks of the original where the file
system can (XFS, Btrfs), so that they cost neither time nor room. A file that changes while it is copied makes no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from ckpt_supervisor.store.commit import AlreadyThere, Committed, Outcome, commit, discard, make_partial
from ckpt_supervisor.store.durable import sync_directory
from ckpt_supervisor.store.found import Item, kinds
from ckpt_supervisor.store.layout import step_name
from ckpt_supervisor.store.look import NotRegular, Stop, list_tree, open_regular, read_up_to
from ckpt_supervisor.store.manifest import FileEntry, Manifest, ManifestError, read_manifest
from ckpt_supervisor.store.trash import destroy, take_out
from ckpt_supervisor.store.verdict import Mode, Verdict
from ckpt_supervisor.store.verify import Expected, check_files

FICLONE = 0x40049409
"""_IOW(0x94, 9, int) of linux/fs.h: share the blocks of another file, copy on write."""

TRACKER_BYTES_MAX = 32
"""A part that is a file of at most so many bytes with a number in it names the program's newest step, as Megatron's
latest_checkpointed_iteration.txt does."""

COPY_BYTES = 8 * 1024 * 1024
ROUNDS_FROM = 10**9
"""Partial directories of adopted checkpoints have numbers from here on, so that none is that of a round."""

Signature = tuple[tuple[str, int, int, int], ...]
"""Path, size, time of the last change and inode of every file: two equal ones, and nobody has written in between."""


class Refused(Exception):
    """This item cannot become a checkpoint; the message says why. `verdict` as in a report."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


class How(msgspec.Struct, frozen=True):
    """How an item is adopted. `number`: how many were tried before in this attempt. `replaces`: an older copy of it, which is
    given up for this one."""

    number: int
    mode: Mode
    replaces: bool = False


class _File(msgspec.Struct, frozen=True):
    """One file to copy, and its path below the checkpoint."""

    source: Path
    path: str


def signature(item: Item) -> Signature:
    """What tells whether an item is still being written. Raises Refused, OSError."""
    return tuple(
        (file.path, seen.st_size, seen.st_mtime_ns, seen.st_ino) for file in _files(item) for seen in (os.lstat(file.source),)
    )


def sizes_of(item: Item) -> dict[str, int]:
    """Its files as they would be named in a checkpoint, with their sizes in bytes. Raises Refused, OSError."""
    return {file.path: os.lstat(file.source).st_size for file in _files(item)}


def names_of(item: Item) -> frozenset[str]:
    """What kinds of files it is made of. Raises Refused, OSError."""
    return kinds(file.path for file in _files(item))


def adopt(root: Path, item: Item, meant: Manifest, how: How, stop: Stop | None = None) -> tuple[Outcome, Path | None]:
    """Copy, check and commit one item; the outcome, and the checkpoint's path if there is one now.

    `meant` is its manifest but for the files. Raises Refused when it is damaged or changes, and OSError when it cannot be read or
    written; nothing is left behind then but for the sweep.
    """
    partial = make_partial(root, item.step, meant.epoch, ROUNDS_FROM + how.number)
    try:
        entries = _checked(partial, _copied(item, partial), how.mode, stop)
    except (Refused, OSError):
        discard(root, partial)
        raise
    target = root / step_name(item.step)
    # Killed from here to the commit, the sweep gives the old copy its name back unless there is something newer.
    old = _out_of_the_way(target, item.step) if how.replaces else None
    outcome = commit(root, partial, msgspec.structs.replace(meant, files=entries, verified=how.mode))
    match outcome:
        case Committed(path=path) | AlreadyThere(path=path):
            if old is not None:
                with contextlib.suppress(OSError):
                    destroy(old)  # What does not go is for the sweep.
            return outcome, path
        case _:
            if old is not None and not os.path.lexists(target):
                old.rename(target)
            discard(root, partial)
            return outcome, None


def _out_of_the_way(target: Path, step: int) -> Path | None:
    """The older copy, on its way out; None if it is protected, or damaged, which the commit sees to."""
    try:
        epoch = read_manifest(target).epoch
    except ManifestError:
        return None
    return take_out(target, step, epoch)


def _checked(partial: Path, copied: tuple[Expected, ...], mode: Mode, stop: Stop | None) -> tuple[FileEntry, ...]:
    """The copies' manifest entries. Their digests only say that they are what was read: what the program wrote is whole if the
    checksums inside agree, so those are asked for, and the digests compared afterwards."""
    asked = copied if mode == "structure" else tuple(msgspec.structs.replace(want, xxh3_128="") for want in copied)
    report, entries = check_files(partial, asked, mode, stop=stop)
    if report.verdict is not Verdict.INTACT:
        raise Refused(report.verdict, report.reason)
    read = {want.path: want.xxh3_128 for want in copied}
    for entry in entries:
        if read[entry.path] and entry.xxh3_128 != read[entry.path]:
            raise Refused(Verdict.CORRUPT, f"{entry.path}: the copy on the disk is not what was read")
    return entries


def resume_path(checkpoint: Path, manifest: Manifest) -> Path:
    """What a program resumes from: its own file or directory if the checkpoint was adopted as one, else the checkpoint."""
    parts = () if manifest.adopted is msgspec.UNSET else manifest.adopted
    return checkpoint / parts[0] if len(parts) == 1 else checkpoint


def other_step_named(item: Item) -> str:
    """Which part of an item names another step than the item's, and which; "" if none does. Raises OSError."""
    for path in item.paths:
        try:
            fd = open_regular(path)
        except NotRegular:
            continue  # A directory; whatever else it may be is refused when it is to be copied.
        try:
            data = read_up_to(fd, TRACKER_BYTES_MAX + 1)
        finally:
            os.close(fd)
        text = data.decode("ascii", "replace").strip() if len(data) <= TRACKER_BYTES_MAX else ""
        if text.isdecimal() and int(text) != item.step:
            return f"{path.name} names step {int(text)}"
    return ""


def put_aside(path: Path) -> str:
    """Rename a damaged original, so that a program which looks for the newest by itself leaves it; what went wrong, or ""."""
    for k in range(100):
        target = path.with_name(f".damaged-{path.name}" + (f".{k}" if k else ""))
        if os.path.lexists(target):
            continue
        try:
            path.rename(target)
            sync_directory(path.parent)
        except OSError as error:
            return str(error)
        return ""
    return f"{path}: too many damaged ones of this name"


def _files(item: Item) -> list[_File]:
    """Every file of an item. Raises Refused for what is no regular file."""
    found: list[_File] = []
    names = [path.name for path in item.paths]
    if len(set(names)) < len(names):
        raise Refused(Verdict.FOREIGN, f"two patterns give the same name {names[0]!r}")
    for path in item.paths:
        if not path.is_dir() or path.is_symlink():
            found.append(_File(path, path.name))
            continue
        tree = list_tree(path, skip="")
        if tree.refused:
            raise Refused(Verdict.FOREIGN, f"{path.name}/{tree.refused[0][0]} {tree.refused[0][1]}")
        found += [_File(path / name, f"{path.name}/{name}") for name in sorted(tree.files)]
    if not found:
        raise Refused(Verdict.MISSING, f"{item.paths[0].name} is empty")
    return found


def _copied(item: Item, partial: Path) -> tuple[Expected, ...]:
    """Copy all of an item into the partial directory."""
    expected = []
    before = signature(item)
    for file in _files(item):
        target = partial / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        expected.append(_copy(file, target))
    if signature(item) != before:
        raise Refused(Verdict.UNKNOWN, f"{item.paths[0].name} was written to while it was copied")
    return tuple(expected)


def _copy(file: _File, target: Path) -> Expected:
    """Copy one file by sharing its blocks, else by its bytes with their digest."""
    try:
        source_fd = open_regular(file.source)
    except NotRegular as error:
        raise Refused(Verdict.FOREIGN, f"{file.path} {error}") from error
    try:
        target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(source_fd).st_size
            digest = "" if _shares_blocks(source_fd, target_fd) else _copy_bytes(source_fd, target_fd, size)
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)
    if digest is None:
        raise Refused(Verdict.UNKNOWN, f"{file.path} became shorter while it was copied")
    return Expected(file.path, size, digest, 0)


def _shares_blocks(source_fd: int, target_fd: int) -> bool:
    try:
        fcntl.ioctl(target_fd, FICLONE, source_fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False  # Another file system, or one that cannot (EXDEV, EOPNOTSUPP, EINVAL, ENOTTY).
    return True


def _copy_bytes(source_fd: int, target_fd: int, size: int) -> str | None:
    """The XXH3-128 of what was read; None if the file ended early."""
    digest = xxhash.xxh3_128()
    with mmap.mmap(-1, COPY_BYTES) as buffer, memoryview(buffer) as view:
        at = 0
        while at < size:
            count = os.preadv(source_fd, [view[: min(COPY_BYTES, size - at)]], at)
            if count == 0:
                return None
            # Released at once: a view that a traceback holds (the disk is full) keeps the buffer from being closed, which raises.
            with view[:count] as read:
                digest.update(read)
                _write_all(target_fd, read)
            at += count
    return digest.hexdigest()


def _write_all(fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        with data[at:] as rest:
            at += os.write(fd, rest)


def parts_of(paths: Sequence[Path]) -> tuple[str, ...]:
    """As the manifest records them."""
    return tuple(path.name for path in paths)
