"""Which checkpoints may go, and how they go.

Owns the rules of `--keep` and `--keep-every`, and the order in which what nobody will use is removed (trash.py has how). Must
not touch a name that the store did not write. Counting names instead of whole checkpoints is how others lost their only good one
(field case 88): damaged and unreadable ones neither count nor go, and one whose bytes were not read yet does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from ckpt_supervisor.store.commit import point_latest
from ckpt_supervisor.store.fence import check_epoch
from ckpt_supervisor.store.layout import parse_partial, parse_trash
from ckpt_supervisor.store.look import Stop, list_names
from ckpt_supervisor.store.scan import Candidate, scan
from ckpt_supervisor.store.trash import NEVER_COMMITTED, Pause, clear_out, destroy, settled, take_out


class Removed(msgspec.Struct, frozen=True):
    """`names` are gone. `problems`: what was not removed and why, also what has its name back; the next sweep looks again."""

    names: tuple[str, ...]
    problems: tuple[str, ...]


NOT_OURS = Removed((), ("another coordinator holds the directory",))


def to_prune(
    candidates: Iterable[Candidate], keep: int, protected_steps: Collection[int], every_steps: int = 0
) -> tuple[Candidate, ...]:
    """Those that may go: whole, older than the `keep` newest fully verified ones, and not protected. Newest first.

    Milestones, whose step is a multiple of `every_steps`, stay and do not count. Those of rank 0 alone do not push out those of
    all ranks, which hold more: the two kinds are counted apart.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one checkpoint is kept")
    counted = {True: 0, False: 0}
    going = []
    for candidate in _whole(candidates):
        of_all = _is_of_all(candidate)
        is_milestone = _is_milestone(candidate, every_steps)
        if not is_milestone and candidate.step not in protected_steps:
            if counted[True] >= keep or (not of_all and counted[False] >= keep):
                going.append(candidate)
        if not is_milestone and _is_verified(candidate):
            counted[of_all] += 1
    return tuple(going)


def to_make_room(
    candidates: Iterable[Candidate], short_bytes: int, protected_steps: Collection[int], every_steps: int = 0
) -> tuple[Candidate, ...]:
    """The oldest ones that have to go beyond `--keep` for so many bytes, oldest first; () if that would not be enough.

    Never the newest fully verified one, nor anything newer, nor the newest one of all ranks, nor milestones and protected ones.
    """
    whole = _whole(candidates)
    newest = next((candidate for candidate in whole if _is_verified(candidate)), None)
    if newest is None or short_bytes <= 0:
        return ()
    of_all = next((candidate.step for candidate in whole if _is_verified(candidate) and _is_of_all(candidate)), -1)
    going: list[Candidate] = []
    for candidate in reversed(whole):
        if candidate.step >= newest.step or short_bytes <= 0:
            break
        if candidate.step in (of_all, *protected_steps) or _is_milestone(candidate, every_steps):
            continue
        going.append(candidate)
        short_bytes -= 0 if candidate.manifest is None else candidate.manifest.total_bytes
    return tuple(going) if short_bytes <= 0 else ()


def remove(candidate: Candidate, pause: Pause | None = None) -> Removed:
    """Remove a checkpoint. It leaves its name in one step, and that is on the disk before any of its files goes."""
    epoch = candidate.manifest.epoch if candidate.manifest is not None else NEVER_COMMITTED
    return _removed(candidate.path, lambda: take_out(candidate.path, candidate.step, epoch), pause)


def sweep(
    root: str | os.PathLike[str],
    epoch: int,
    pause: Pause | None = None,
    known_whole: Collection[int] = (),
    stop: Stop | None = None,
) -> Removed:
    """Remove the partial directories of older epochs and what an interrupted removal left; nothing else.

    Only while we hold DIR. A partial one is renamed before it is deleted: an old coordinator that still runs can then no
    longer commit it. A whole checkpoint on its way out may get its name back (`trash.settled`, also for the last two).
    """
    directory = Path(root)
    done = Removed((), ())
    try:
        found = [name for name in list_names(directory) if _is_left_over(name, epoch)]
        for name in sorted(found, key=_step_on_its_way, reverse=True):  # Newest first: of several whole ones that one stays.
            if pause is not None:
                pause()
            if not check_epoch(directory, epoch):
                return _and(done, NOT_OURS)
            done = _and(done, _swept(directory / name, pause, known_whole, stop))
        if not found and not check_epoch(directory, epoch):
            return NOT_OURS
    except OSError as error:
        return _and(done, Removed((), (str(error),)))
    return done


def _swept(path: Path, pause: Pause | None, known_whole: Collection[int], stop: Stop | None) -> Removed:
    unfinished = parse_partial(path.name)
    if unfinished is not None:
        return _removed(path, lambda: clear_out(path, unfinished[0]), pause)
    try:
        fate, why = settled(path.parent, path, known_whole, stop)
    except OSError as error:
        return Removed((), (f"{path.name}: {error}",))
    if fate == "go":
        return _removed(path, lambda: path, pause)
    return Removed((), (f"{path.name} {why}",)) if fate == "back" else Removed((), (f"{path.name} is left: {why}",))


def update_latest(root: str | os.PathLike[str]) -> str:
    """Point DIR/latest to the newest candidate without a known problem; what went wrong, "" if nothing."""
    try:
        newest = next((candidate for candidate in scan(root) if candidate.problem is None), None)
    except OSError as error:
        return str(error)
    return "no checkpoint to point to" if newest is None else point_latest(root, newest.path.name)


def _whole(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those with a manifest and without a known problem, newest first."""
    whole = [candidate for candidate in candidates if candidate.manifest is not None and candidate.problem is None]
    return sorted(whole, key=lambda candidate: -candidate.step)


def _is_verified(candidate: Candidate) -> bool:
    return candidate.manifest is not None and candidate.manifest.verified == "full"


def _is_of_all(candidate: Candidate) -> bool:
    return candidate.manifest is not None and len(candidate.manifest.ranks) >= candidate.manifest.world_size


def _is_milestone(candidate: Candidate, every_steps: int) -> bool:
    return every_steps > 0 and candidate.step % every_steps == 0


def _is_left_over(name: str, epoch: int) -> bool:
    unfinished = parse_partial(name)
    return parse_trash(name) is not None if unfinished is None else unfinished[1] < epoch


def _step_on_its_way(name: str) -> tuple[int, int, int]:
    return parse_trash(name) or parse_partial(name) or (-1, 0, 0)


def _removed(path: Path, out: Callable[[], Path | None], pause: Pause | None) -> Removed:
    """`out` renames it and says what is to be deleted, if anything."""
    try:
        going = out()
        if going is None:
            return Removed((), ())
        destroy(going, pause)
    except FileNotFoundError:
        return Removed((), ())
    except OSError as error:
        return Removed((), (f"{path.name}: {error}",))
    return Removed((path.name,), ())


def _and(first: Removed, second: Removed) -> Removed:
    return Removed(first.names + second.names, first.problems + second.problems)
