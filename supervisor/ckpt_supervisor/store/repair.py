"""Putting a directory in order after something went wrong in it, without deleting a checkpoint.

Owns what lies beside the checkpoints (partials, trash, what was put aside), the quarantine of damaged ones and the
mending of DIR/latest. Must not delete anything that was ever committed, touch a name that the store does not write, or
act on anything but a full look at the bytes: names and sizes do not say that a checkpoint is damaged, and an I/O error
does not either. Each change is one rename, and DIR is synced after it, so that a crash leaves the old or the new name.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from ckpt_supervisor.store.commit import discard, point_latest
from ckpt_supervisor.store.durable import delete, move_aside, sync_directory
from ckpt_supervisor.store.idle import Held, taken_since
from ckpt_supervisor.store.layout import (
    LATEST,
    LATEST_BYTES_MAX,
    damaged_name,
    parse_damaged,
    parse_failed,
    parse_partial,
    parse_step,
    parse_trash,
)
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, Stop, list_names, list_tree, open_regular, read_up_to
from ckpt_supervisor.store.manifest import Manifest
from ckpt_supervisor.store.scan import Candidate
from ckpt_supervisor.store.survey import survey_checkpoint
from ckpt_supervisor.store.trash import settled
from ckpt_supervisor.store.verdict import Finding, Report, Verdict
from ckpt_supervisor.store.verify import Progress, verify_checkpoint

CERTAIN = frozenset({Verdict.MISSING, Verdict.TRUNCATED, Verdict.CORRUPT, Verdict.MIXED})
"""Verdicts that say damage. `unknown` may be whole; `foreign` may be somebody's and whole."""

Kind = Literal["checkpoint", "damaged", "failed", "partial", "trash"]


class Leftover(msgspec.Struct, frozen=True):
    """What lies in a directory beside its checkpoints: put aside as damaged, or as training fails from it, being written, or on
    its way out."""

    kind: Kind
    step: int
    epoch: int
    path: Path


class Examined(msgspec.Struct, frozen=True):
    """A checkpoint, what reading all of it said, and what its directory was before that (None: it was not there)."""

    candidate: Candidate
    report: Report
    identity: tuple[int, ...] | None


class Done(msgspec.Struct, frozen=True):
    """One change: `name` is now `became` ("" if it is gone). `problem`: why it was not made, "" if it was."""

    name: str
    became: str
    problem: str


def leftovers(root: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """What lies beside the checkpoints, newest step first; () if there is no such directory. Raises OSError."""
    try:
        names = Patience().look(lambda: list_names(root))
    except OSError as error:
        if error.errno in NOT_THERE:
            return ()
        raise
    found = []
    kinds: tuple[Kind, ...] = ("damaged", "failed", "partial", "trash")
    for name in names:
        for kind, parse in zip(kinds, (parse_damaged, parse_failed, parse_partial, parse_trash), strict=True):
            parts = parse(name)
            if parts is not None:
                found.append(Leftover(kind, parts[0], parts[1], Path(root) / name))
    return tuple(sorted(found, key=lambda one: (-one.step, one.kind, one.epoch, one.path.name)))


def glance(path: str | os.PathLike[str]) -> tuple[Manifest | None, Finding | None]:
    """A cheap look at one checkpoint wherever it lies: its manifest, and what is wrong by names and sizes."""
    return survey_checkpoint(Path(path), Patience())


def tree_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes of all files below a directory, None if they cannot be counted."""
    try:
        tree = list_tree(path, skip="")
    except OSError:
        return None
    return sum(tree.files.values())


def examine(candidate: Candidate, threads: int = 2, progress: Progress | None = None, stop: Stop | None = None) -> Examined:
    """Read every byte of a checkpoint."""
    before = _identity(candidate.path)
    return Examined(candidate, verify_checkpoint(candidate.path, "full", threads, progress, stop), before)


def quarantine(root: str | os.PathLike[str], examined: Examined, held: Held) -> Done:
    """Rename a damaged checkpoint to `.damaged-…`, unless somebody has started here or it is not what was read."""
    path = examined.candidate.path
    manifest = examined.candidate.manifest
    problem = taken_since(root, held)
    now = _identity(path)
    if not problem and (now is None or now != examined.identity):
        problem = "it has changed since it was read"
    if problem:
        return Done(path.name, "", problem)
    name_of = partial(damaged_name, examined.candidate.step, 0 if manifest is None else manifest.epoch)
    try:
        became = move_aside(path, Path(root), name_of)
        sync_directory(Path(root))
    except OSError as error:
        return Done(path.name, "", str(error))
    return Done(path.name, became.name, "")


def sweep_one(root: str | os.PathLike[str], leftover: Leftover, held: Held) -> Done:
    """Remove a partial of an epoch that is over, or what an interrupted removal left; never anything else."""
    name = leftover.path.name
    problem = taken_since(root, held)
    if not problem and leftover.kind == "partial":
        problem = held.why_open(leftover.epoch) or discard(root, leftover.path)
    elif not problem and leftover.kind == "trash":
        problem = _delete(root, leftover.path)
    elif not problem:
        problem = "is neither a partial nor trash"
    return Done(name, "", problem)


def latest_name(root: str | os.PathLike[str]) -> str | None:
    """What DIR/latest says: the name of a checkpoint, "" for something that is not ours, None if there is none.

    Raises OSError when it cannot be looked at.
    """
    path = Path(root) / LATEST
    try:
        named = os.fspath(path.readlink())
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        if error.errno != errno.EINVAL:
            raise
        named = _written_in(path)
    # A link may have been made by hand with the whole path; one that leaves the directory is somebody else's word.
    where, name = os.path.split(named.rstrip("/"))
    is_here = os.path.realpath(Path(root) / where) == os.path.realpath(root)
    return name if is_here and parse_step(name) is not None else ""


def mend_latest(root: str | os.PathLike[str], name: str, held: Held) -> Done:
    """Point DIR/latest to this checkpoint. A file or directory of that name that is not ours is left alone."""
    problem = taken_since(root, held)
    try:
        is_link = (Path(root) / LATEST).is_symlink()
        if not problem and not is_link and latest_name(root) == "":
            problem = "is not a link or pointer of ours"
        if not problem:
            problem = point_latest(root, name)
        if not problem:
            sync_directory(Path(root))
    except OSError as error:
        problem = str(error)
    return Done(LATEST, name, problem)


def _written_in(path: Path) -> str:
    """The one line of a pointer file, "" if it is something else."""
    try:
        fd = open_regular(path)
    except NotRegular:
        return ""
    try:
        data = read_up_to(fd, LATEST_BYTES_MAX + 1)
    finally:
        os.close(fd)
    return "" if len(data) > LATEST_BYTES_MAX else os.fsdecode(data).removesuffix("\n")


def _identity(path: Path) -> tuple[int, ...] | None:
    """Which directory this is, and when it was last changed: another one under the same name has other numbers."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_ctime_ns


def _delete(root: str | os.PathLike[str], path: Path) -> str:
    """Why it was not deleted: it may be a whole checkpoint, and the newest intact one."""
    try:
        fate, why = settled(root, path)
        if fate != "go":
            return why
        delete(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return ""
