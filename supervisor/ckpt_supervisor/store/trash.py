"""How a checkpoint leaves its name, and what becomes of what is on its way out: DIR/.trash-step-…

Owns the removal itself, and the last look before it. Must not decide which checkpoints may go (retention.py). Between the
rename and the first file that goes a process may die, or wait for an hour while somebody saves. What is found under such a name
is then a whole checkpoint, and what it was to make way for may have turned out to be damaged, or a person may have protected it
in that very instant. So the name is given back when there is a mark, or when nothing newer is intact (`settled`).

A checkpoint takes the epoch of its manifest into the new name. What never was one (a partial, the file of a test or of a
manifest) has epoch 0, which no coordinator has: a partial may be sealed and whole, and is no checkpoint all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Literal

from ckpt_supervisor.store.durable import delete, move_aside, move_out, sync_directory
from ckpt_supervisor.store.layout import parse_trash, step_name, trash_name
from ckpt_supervisor.store.look import TREE_DEPTH_MAX, Patience, Stop
from ckpt_supervisor.store.manifest import Manifest
from ckpt_supervisor.store.marks import kept_steps
from ckpt_supervisor.store.scan import Search, newest_intact, scan
from ckpt_supervisor.store.survey import survey_checkpoint
from ckpt_supervisor.store.verdict import Verdict

Pause = Callable[[], object]
"""Called before each small piece of a removal; it may wait, while somebody saves for example."""

NEVER_COMMITTED = 0
"""The epoch in the name of what never was a checkpoint."""

Fate = Literal["go", "back", "left"]


def take_out(path: Path, step: int, epoch: int) -> Path | None:
    """Rename a checkpoint, so that it is on its way out; None if it stays, since it is protected. Raises OSError."""
    root = path.parent
    going = move_aside(path, root, partial(trash_name, step, epoch))
    try:
        is_kept = step in kept_steps(root)
    except OSError:
        going.rename(path)  # Whether there is a mark could not be seen: as good as one.
        raise
    if is_kept:
        going.rename(path)  # It was protected while it was on its way out.
    sync_directory(root)
    return None if is_kept else going


def clear_out(path: Path, step: int) -> Path:
    """The same for what never was a checkpoint: nobody can commit it any more. Raises OSError."""
    going = move_out(path, path.parent, partial(trash_name, step, NEVER_COMMITTED))
    if going != path:
        sync_directory(path.parent)
    return going


def destroy(going: Path, pause: Pause | None = None) -> None:
    """Delete what is on its way out, one file after the other if there is a `pause`. Raises OSError."""
    if pause is not None:
        _thin_out(going, pause)
    delete(going)


def settled(
    root: str | os.PathLike[str], going: Path, known_whole: Collection[int] = (), stop: Stop | None = None
) -> tuple[Fate, str]:
    """What becomes of something on its way out, and in words why it is not deleted.

    `back`: it has its name back. `left`: that cannot be said, or cannot be done now. `known_whole`: steps that were read in full;
    of others all bytes of the newest one are read, which happens only where a removal was cut off before its first file.
    """
    manifest, unseen = _was_checkpoint(going)
    if unseen:
        return "left", unseen
    if manifest is None:
        return "go", ""
    name = step_name(manifest.step)
    is_free = not os.path.lexists(Path(root) / name)
    if is_free and manifest.step in kept_steps(root):
        return _back(going, Path(root) / name, "it is protected")
    newer = [one for one in scan(root, stop) if one.step >= manifest.step and one.problem is None]
    if any(one.step in known_whole for one in newer):
        return "go", ""
    choice = newest_intact(root, stop=stop, search=Search(lambda one: one.step >= manifest.step))
    if choice.chosen is not None:
        return "go", ""
    if choice.unknown:
        return "left", f"whether anything newer is intact cannot be said ({choice.reason})"
    if not is_free:
        return "left", f"it is whole and nothing newer is, but {name} is taken by a damaged one"
    return _back(going, Path(root) / name, "nothing newer is intact")


def _was_checkpoint(going: Path) -> tuple[Manifest | None, str]:
    """Its manifest if it was a checkpoint and nothing of it is gone; why that cannot be said."""
    parts = parse_trash(going.name)
    manifest, problem = survey_checkpoint(going, Patience())
    if problem is not None and problem.verdict is Verdict.UNKNOWN:
        return None, str(problem)
    is_whole = parts is not None and manifest is not None and problem is None and (manifest.step, manifest.epoch) == parts[:2]
    return (manifest, "") if is_whole and parts is not None and parts[1] != NEVER_COMMITTED else (None, "")


def _back(going: Path, target: Path, why: str) -> tuple[Fate, str]:
    going.rename(target)
    sync_directory(target.parent)
    return "back", f"was on its way out and is {target.name} again: {why}"


def _thin_out(name: str | Path, pause: Pause, depth: int = TREE_DEPTH_MAX, within: int | None = None) -> None:
    """Remove the files below a directory, one after the other. What does not go, and the directories, are for `delete` to see to.

    By descriptors, so that nothing is followed out of it. Raises nothing.
    """
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        pause()
                        with contextlib.suppress(OSError):
                            os.unlink(entry.name, dir_fd=fd)
                    elif depth > 0:
                        _thin_out(entry.name, pause, depth - 1, fd)
        finally:
            os.close(fd)
