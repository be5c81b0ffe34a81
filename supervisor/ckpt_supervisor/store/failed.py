"""Checkpoints that are whole by every check, and from which training fails all the same: DIR/.failed-step-…

Owns how such a one leaves its name, the record beside it of why, how it gets its name back, and when it goes in the end. Must not
judge which one that is (start/resume_gate.py), nor delete one before training has got past it. The record is on the disk before
the name changes, and stays when the name is given back: starts that it has answered for do not count a second time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from ckpt_supervisor.store.commit import point_latest
from ckpt_supervisor.store.durable import NAMES_TRIED_MAX, sync_directory, write_file
from ckpt_supervisor.store.layout import failed_name, parse_failed, parse_why_failed, step_name, trash_name, why_failed_name
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, list_names, open_regular, read_up_to
from ckpt_supervisor.store.marks import kept_steps
from ckpt_supervisor.store.retention import Removed
from ckpt_supervisor.store.scan import Candidate, latest_step
from ckpt_supervisor.store.trash import Pause, clear_out, destroy

FORMAT = 1
WHY_BYTES_MAX = 64 * 1024
STARTS_MAX = 50
"""Most starts that a record names."""

REASON_CHARS_MAX = 500


class FailedStart(msgspec.Struct, frozen=True):
    """One start that failed right after resuming: its epoch, the command's status, and what a rank had said."""

    epoch: int
    code: int | None = None
    reason: str = ""


class WhyFailed(msgspec.Struct, frozen=True, kw_only=True):
    """Why a checkpoint was set aside. `epoch`: of the start that did it; failures up to that one are answered for."""

    format: int = FORMAT
    step: int
    epoch: int
    at: str
    text: str
    starts: tuple[FailedStart, ...]


class SetAside(msgspec.Struct, frozen=True):
    """A checkpoint that was set aside; `why` is None where its record is gone or cannot be read."""

    step: int
    epoch: int
    path: Path
    why: WhyFailed | None


def set_aside(candidate: Candidate, why: WhyFailed) -> Path:
    """Rename a checkpoint out of the way, with its record. Raises OSError."""
    root, epoch = candidate.path.parent, 0 if candidate.manifest is None else candidate.manifest.epoch
    short = tuple(msgspec.structs.replace(start, reason=start.reason[:REASON_CHARS_MAX]) for start in why.starts[:STARTS_MAX])
    data = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(why, starts=short)), indent=1) + b"\n"
    for k in range(NAMES_TRIED_MAX):
        target = root / failed_name(candidate.step, epoch, k)
        if os.path.lexists(target):
            continue
        fresh = root / trash_name(candidate.step, 0, os.getpid())  # A name that the sweep removes if we die here.
        write_file(fresh, data)
        fresh.rename(root / why_failed_name(target.name))
        sync_directory(root)
        candidate.path.rename(target)
        sync_directory(root)
        return target
    raise OSError(errno.EEXIST, f"{NAMES_TRIED_MAX} names are taken", str(root / failed_name(candidate.step, epoch, 0)))


def lead_past(root: str | os.PathLike[str], step: int, instead: str) -> str:
    """DIR/latest names `instead` if it named this step, which was set aside; what went wrong, "" if nothing."""
    return point_latest(root, instead) if latest_step(root) == step else ""


def all_set_aside(root: str | os.PathLike[str]) -> tuple[SetAside, ...]:
    """Those that lie there, newest step first. Raises OSError when the directory cannot be listed."""
    directory = Path(root)
    found = [(parts, name) for name in _names(directory) if (parts := parse_failed(name)) is not None]
    return tuple(
        SetAside(parts[0], parts[1], directory / name, read_why(directory / why_failed_name(name)))
        for parts, name in sorted(found, reverse=True)
    )


def answered_for(root: str | os.PathLike[str]) -> dict[int, int]:
    """Up to which epoch failures from a step are answered for, by step: it was set aside then. Raises OSError."""
    found: dict[int, int] = {}
    for name in _names(Path(root)):
        parts = parse_why_failed(name)
        why = None if parts is None else read_why(Path(root) / name)
        if why is not None and parts is not None and why.step == parts[0]:
            found[why.step] = max(why.epoch, found.get(why.step, -1))
    return found


def read_why(path: Path) -> WhyFailed | None:
    """A record; None if there is none that can be read."""
    try:
        fd = open_regular(path)
        try:
            data = read_up_to(fd, WHY_BYTES_MAX)
        finally:
            os.close(fd)
        why = msgspec.json.decode(data, type=WhyFailed)
    except (NotRegular, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return why if why.format == FORMAT else None


def give_back(one: SetAside) -> Path:
    """Give a checkpoint its name back; its record stays. Raises OSError, FileExistsError if there is another one of its step."""
    target = one.path.parent / step_name(one.step)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, f"there is another {target.name}", str(target))
    one.path.rename(target)
    sync_directory(target.parent)
    return target


def clear_past(root: str | os.PathLike[str], keep: int, whole: Iterable[Candidate], pause: Pause | None = None) -> Removed:
    """Remove those that training has got past, and records without a checkpoint.

    Past means: as many later steps as --keep asks for were committed since and are fully verified; under its own name it would be
    pruned by then. What a person protects stays.
    """
    directory = Path(root)
    names: list[str] = []
    problems: list[str] = []
    try:
        verified = [one for one in whole if one.manifest is not None and one.manifest.verified == "full"]
        kept = kept_steps(directory)
        for one in all_set_aside(directory):
            since = one.epoch if one.why is None else one.why.epoch
            later = sum(other.step > one.step and _epoch(other) >= since for other in verified)
            if later < keep or one.step in kept:
                continue
            if pause is not None:
                pause()
            try:
                destroy(clear_out(one.path, one.step), pause)
                names.append(one.path.name)
            except OSError as error:
                problems.append(f"{one.path.name}: {error}")
        _clear_records(directory, _names(directory))
    except OSError as error:
        problems.append(str(error))
    return Removed(tuple(names), tuple(problems))


def _clear_records(directory: Path, names: Collection[str]) -> None:
    there = set(names)
    for name in there:
        parts = parse_why_failed(name)
        if parts is not None and failed_name(*parts) not in there and step_name(parts[0]) not in there:
            (directory / name).unlink(missing_ok=True)


def _epoch(candidate: Candidate) -> int:
    return -1 if candidate.manifest is None else candidate.manifest.epoch


def _names(directory: Path) -> list[str]:
    try:
        return Patience().look(lambda: list_names(directory))
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise
