"""Making a checked partial directory a checkpoint, in one step that a crash cannot split.

Owns the order of a commit: fsync of every file, manifest, fsync of the directories, the fence, rename, fsync of DIR,
and only then `latest`. Must not check content (verify.py has) nor delete a checkpoint. What the environment does is a
value, never an exception: a full disk at this point is an outcome that the coordinator names.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from pathlib import Path

import msgspec

from ckpt_supervisor.store.durable import delete, move_aside, move_out, sync_directory, sync_file, write_file
from ckpt_supervisor.store.fence import check_epoch, read_holder
from ckpt_supervisor.store.holder import Holder, describe_holder
from ckpt_supervisor.store.layout import (
    LATEST,
    LATEST_BYTES_MAX,
    LATEST_NEW,
    MANIFEST,
    damaged_name,
    parse_claim,
    parse_partial,
    parse_step,
    partial_name,
    step_name,
    trash_name,
)
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, list_names, list_tree, open_regular, read_up_to
from ckpt_supervisor.store.manifest import Manifest, encode_manifest
from ckpt_supervisor.store.scan import Candidate
from ckpt_supervisor.store.verdict import Verdict
from ckpt_supervisor.store.verify import Expected, check_files, verify_checkpoint

RACE_PAUSES_MS = (0, 10, 500)
"""Pauses before each try: somebody else may take the name between our look and our rename, and a name that another node
has made may be seen late."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What symlink(2) says on a file system that has none: EPERM by its manual page, ENOTSUP of CIFS, ENOSYS of FUSE."""


class Committed(msgspec.Struct, frozen=True):
    """It is on the disk under its name.

    `put_aside`: where a damaged one of the same step went. `latest_problem`: why DIR/latest could not follow, "" if it
    did.
    """

    path: Path
    put_aside: Path | None
    latest_problem: str


class AlreadyThere(msgspec.Struct, frozen=True):
    """An intact checkpoint of this step was there and stays; the new one is dropped (`drop_problem`: why not)."""

    path: Path
    drop_problem: str


class Fenced(msgspec.Struct, frozen=True):
    """Somebody else holds the directory now; nothing was changed. None: the name of whoever that is cannot be read."""

    holder: Holder | None


class CommitFailed(msgspec.Struct, frozen=True):
    """It did not work; the partial directory is left to the sweep. `errno_name` as in errno(3), such as ENOSPC."""

    errno_name: str
    reason: str


class Unheld(CommitFailed, frozen=True):
    """Nobody holds the directory: it was removed, or emptied, and whoever wrote last has made it anew (fence.retake_epoch)."""


Outcome = Committed | AlreadyThere | Fenced | CommitFailed


def make_partial(root: str | os.PathLike[str], step: int, epoch: int, round_: int) -> Path:
    """A new, empty directory for the ranks to write to. Raises OSError; never takes one that is there."""
    path = Path(root) / partial_name(step, epoch, round_)
    path.mkdir()
    return path


def discard(root: str | os.PathLike[str], partial: str | os.PathLike[str]) -> str:
    """Remove a partial directory whose round has failed; what went wrong, "" if nothing."""
    named = parse_partial(Path(partial).name)
    if named is None:
        return f"{Path(partial).name} is not a partial checkpoint"
    going = Path(root) / Path(partial).name
    try:
        delete(move_out(going, Path(root), functools.partial(trash_name, named[0], 0)))  # 0: it was no checkpoint (trash.py)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return ""


def commit(root: str | os.PathLike[str], partial: str | os.PathLike[str], manifest: Manifest, sync_files: bool = True) -> Outcome:
    """Commit `root`/`partial` as this manifest's step. `sync_files=False` when whoever wrote them has synced them."""
    directory = Path(root)
    source = directory / Path(partial).name
    named = parse_partial(source.name)
    if named is None or named[:2] != (manifest.step, manifest.epoch):
        return CommitFailed("EINVAL", f"{source.name} is not a partial of step {manifest.step}, epoch {manifest.epoch}")
    try:
        data = encode_manifest(manifest)
    except ValueError as error:
        return CommitFailed("EINVAL", f"the manifest would not be readable: {error}")
    try:
        for pause_ms in RACE_PAUSES_MS:
            threading.Event().wait(pause_ms / 1000)
            outcome = _commit_once(directory, source, manifest, data, sync_files)
            if outcome is not None:
                return outcome
    except OSError as error:
        return CommitFailed(errno.errorcode.get(error.errno or 0, "EIO"), str(error))
    return CommitFailed("EEXIST", f"{step_name(manifest.step)} was taken by somebody else {len(RACE_PAUSES_MS)} times")


def point_latest(root: str | os.PathLike[str], name: str) -> str:
    """Make DIR/latest name this checkpoint, in one step; what went wrong, "" if nothing.

    Nothing is decided by it, so a failure here is never one of the commit (field case 102). A file of that name that the store
    has not written is somebody's own pointer, DeepSpeed's for one, and stays.
    """
    try:
        if _is_somebodys(Path(root) / LATEST):
            return f"{LATEST} is a file that the store has not written, and is left alone"
    except OSError as error:
        return str(error)
    problem = ""
    for _ in RACE_PAUSES_MS:
        try:
            _replace_latest(Path(root), name)
        except (FileExistsError, FileNotFoundError) as error:  # another process does the same now (field case 96)
            problem = str(error)
        except OSError as error:
            return str(error)
        else:
            return ""
    return problem


def promote(root: str | os.PathLike[str], candidate: Candidate, epoch: int, threads: int = 2) -> str:
    """Read a checkpoint that was committed on its structure alone, and record that it is whole.

    What went wrong, "" if nothing. The new manifest replaces the old one in one step; its temporary name is one that
    the sweep removes.
    """
    manifest = candidate.manifest
    if manifest is None:
        return f"{candidate.path.name} has no manifest"
    wanted = [Expected(file.path, file.bytes, file.xxh3_128, file.rank) for file in manifest.files]
    report, entries = check_files(candidate.path, wanted, "full", threads)
    if report.verdict is not Verdict.INTACT:
        return f"{report.verdict.value}: {report.reason}"
    fresh = Path(root) / trash_name(manifest.step, epoch, os.getpid())
    try:
        if not check_epoch(root, epoch):
            return "another coordinator holds the directory"
        write_file(fresh, encode_manifest(msgspec.structs.replace(manifest, verified="full", files=entries)))
        fresh.rename(candidate.path / MANIFEST)
        sync_directory(candidate.path)
    except OSError as error:
        return str(error)
    return ""


def _replace_latest(directory: Path, name: str) -> None:
    """A link; a file that holds the name where the file system has no links (field case 113)."""
    fresh = directory / LATEST_NEW
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        write_file(fresh, name.encode() + b"\n", exclusive=True)
    fresh.rename(directory / LATEST)


def _is_somebodys(path: Path) -> bool:
    """Whether this is a file with something else in it than a checkpoint's name. Raises OSError."""
    try:
        fd = open_regular(path)
    except NotRegular:
        return False  # A link, as a rule; a directory is not replaced by a rename.
    except OSError as error:
        if error.errno in NOT_THERE:
            return False
        raise
    try:
        text = read_up_to(fd, LATEST_BYTES_MAX).strip(b"\0 \n")
    finally:
        os.close(fd)
    return text != b"" and parse_step(os.fsdecode(text)) is None


def _commit_once(directory: Path, source: Path, manifest: Manifest, data: bytes, sync_files: bool) -> Outcome | None:
    """One try; None if the name was taken under our hands."""
    target = directory / step_name(manifest.step)
    if not check_epoch(directory, manifest.epoch):
        return _not_ours(directory)
    is_taken = _is_there(target)
    if is_taken:
        report = verify_checkpoint(target)
        if report.verdict is Verdict.INTACT:
            sync_directory(directory)  # whoever renamed it may have failed, or died, before this
            return AlreadyThere(target, discard(directory, source))
        if report.verdict is Verdict.UNKNOWN:  # it may be whole: neither replaced nor taken for whole
            return CommitFailed("EIO", f"{target.name} exists and cannot be looked at: {report.reason}")
    changed = _seal(source, manifest, data, sync_files)
    if changed:
        return CommitFailed("EBUSY", f"{changed} has changed since it was checked")
    return _take_name(directory, source, target, manifest, replaces=is_taken)


def _take_name(directory: Path, source: Path, target: Path, manifest: Manifest, replaces: bool) -> Outcome | None:
    """The instant of the commit.

    A damaged one is moved aside first, and that is on the disk before its name is taken: of two renames that a power
    cut splits the later one alone would otherwise bury it.
    """
    if not check_epoch(directory, manifest.epoch):
        return _not_ours(directory)
    put_aside = None
    if replaces:
        put_aside = move_aside(target, directory, functools.partial(damaged_name, manifest.step, manifest.epoch))
        sync_directory(directory)
    if not _rename_unless_taken(source, target):
        return None
    sync_directory(directory)
    return Committed(target, put_aside, point_latest(directory, target.name))


def why_not_ours(root: str | os.PathLike[str]) -> str:
    """Why this run may commit nothing any more, in words."""
    try:
        outcome = _not_ours(Path(root))
    except OSError as error:
        return str(error)
    if isinstance(outcome, CommitFailed):
        return outcome.reason
    holder = outcome.holder if isinstance(outcome, Fenced) else None
    return "another run owns the directory now" + ("" if holder is None else f" ({describe_holder(holder)})")


def _not_ours(directory: Path) -> Outcome:
    """Who holds the directory instead."""
    holder = read_holder(directory)
    if holder is None and not any(parse_claim(name) is not None for name in list_names(directory)):
        return Unheld("ENOENT", f"{directory} was removed or emptied while this run was using it")
    return Fenced(holder)


def _is_there(path: Path) -> bool:
    """Unlike os.path.lexists, which takes every error for "not there" (field case 111). Raises OSError."""
    try:
        Patience().look(lambda: os.lstat(path))
    except OSError as error:
        if error.errno in NOT_THERE:
            return False
        raise
    return True


def _rename_unless_taken(source: Path, target: Path) -> bool:
    """Whether the name was free (an empty directory counts as free: rename(2))."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _seal(source: Path, manifest: Manifest, data: bytes, sync_files: bool) -> str:
    """Put files, manifest and directories on the disk. The name of a file that is not as it was checked, "" if none."""
    tree = Patience().look(lambda: list_tree(source, skip=MANIFEST))
    sizes = {file.path: file.bytes for file in manifest.files}
    changed = [path for path, _ in tree.refused]
    changed += sorted(path for path in {*sizes, *tree.files} if sizes.get(path) != tree.files.get(path))
    if sync_files and not changed:
        changed = [path for path, size in sizes.items() if sync_file(source / path).st_size != size]
    if changed:
        return changed[0]
    write_file(source / MANIFEST, data)
    for below in reversed(tree.directories):
        sync_directory(source / below)
    return ""
