"""Which checkpoints may go, and how they go.

Owns the rules of `--keep` and the removal of what nobody will use. Must not run while a round runs, and must not touch
a name that the store did not write. Counting names instead of whole checkpoints is how others lost their only good one
(field case 88): damaged and unreadable ones neither count nor go, and one whose bytes were not read yet does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

import msgspec

from ckpt_supervisor.store.commit import point_latest
from ckpt_supervisor.store.durable import delete, move_aside, sync_directory
from ckpt_supervisor.store.fence import check_epoch
from ckpt_supervisor.store.layout import parse_partial, parse_trash, trash_name
from ckpt_supervisor.store.look import list_names
from ckpt_supervisor.store.scan import Candidate, scan


class Removed(msgspec.Struct, frozen=True):
    """`names` are gone. `problems`: what could not be removed and why; the next sweep tries again."""

    names: tuple[str, ...]
    problems: tuple[str, ...]


def to_prune(candidates: Iterable[Candidate], keep: int, protected_steps: Collection[int]) -> tuple[Candidate, ...]:
    """Those that may go: whole, older than the `keep` newest fully verified ones, and not protected. Newest first."""
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one checkpoint is kept")
    whole = [candidate for candidate in candidates if candidate.manifest is not None and candidate.problem is None]
    whole.sort(key=lambda candidate: -candidate.step)
    counted = 0
    going = []
    for candidate in whole:
        if counted >= keep and candidate.step not in protected_steps:
            going.append(candidate)
        if candidate.manifest is not None and candidate.manifest.verified == "full":
            counted += 1
    return tuple(going)


def remove(candidate: Candidate) -> Removed:
    """Remove a checkpoint. It leaves its name in one step, and that is on the disk before any of its files goes."""
    epoch = candidate.manifest.epoch if candidate.manifest is not None else 0
    return _remove(candidate.path, partial(trash_name, candidate.step, epoch))


def sweep(root: str | os.PathLike[str], epoch: int) -> Removed:
    """Remove the partial directories of older epochs and what an interrupted removal left; nothing else.

    Only if we hold DIR. A partial one is renamed before it is deleted: an old coordinator that still runs can then no
    longer commit it.
    """
    directory = Path(root)
    names: list[str] = []
    problems: list[str] = []
    try:
        if not check_epoch(directory, epoch):
            return Removed((), ("another coordinator holds the directory",))
        found = list_names(directory)
    except OSError as error:
        return Removed((), (str(error),))
    for name in sorted(found):
        unfinished = parse_partial(name)
        if unfinished is not None and unfinished[1] < epoch:
            done = _remove(directory / name, partial(trash_name, unfinished[0], epoch))
        elif parse_trash(name) is not None:
            done = _remove(directory / name, None)
        else:
            continue
        names.extend(done.names)
        problems.extend(done.problems)
    return Removed(tuple(names), tuple(problems))


def update_latest(root: str | os.PathLike[str]) -> str:
    """Point DIR/latest to the newest candidate without a known problem; what went wrong, "" if nothing."""
    try:
        newest = next((candidate for candidate in scan(root) if candidate.problem is None), None)
    except OSError as error:
        return str(error)
    return "no checkpoint to point to" if newest is None else point_latest(root, newest.path.name)


def _remove(path: Path, trash: Callable[[int], str] | None) -> Removed:
    try:
        going = path
        if trash is not None:
            going = move_aside(path, path.parent, trash)
            sync_directory(path.parent)
        delete(going)
    except FileNotFoundError:
        return Removed((), ())
    except OSError as error:
        return Removed((), (f"{path.name}: {error}",))
    return Removed((path.name,), ())
