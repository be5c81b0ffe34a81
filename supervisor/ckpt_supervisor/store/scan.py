"""Which checkpoints are there, and which one to resume from.

Owns the order of candidates and the fallback to an older one. Must not delete, repair or resume anything. Only names
and manifests count: modification times lie (field case 91), and DIR/latest is a convenience that can be gone or point
to something damaged (field case 95).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ckpt_supervisor.store.layout import LATEST, LATEST_BYTES_MAX, parse_step, step_name
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, Stop, list_names, open_regular, read_up_to
from ckpt_supervisor.store.manifest import Manifest
from ckpt_supervisor.store.stream import Cache
from ckpt_supervisor.store.verdict import Finding, Mode, Report, Verdict, report_of
from ckpt_supervisor.store.verify import Progress, survey_checkpoint, verify_checkpoint


class Candidate(msgspec.Struct, frozen=True):
    """A name that a committed checkpoint has, newest steps first in every list.

    `problem` is what a cheap look found; None does not mean that the bytes were read.
    """

    step: int
    path: Path
    manifest: Manifest | None
    problem: Finding | None


class Search(msgspec.Struct, frozen=True):
    """What else is known of the checkpoint that is looked for.

    `wanted`: only these are looked through. `named`: a step that has to be there, whatever the listing says.
    `again_s`: pauses, for all of them together, before one that could not be looked at is looked at once more.
    """

    wanted: Callable[[Candidate], bool] | None = None
    named: int | None = None
    again_s: tuple[float, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """What to resume from.

    `passed_over`: newer ones, newest first, each with why. `unknown`: one of those, or the directory itself, could not
    be looked at (`reason` says what): the newest one may be whole all the same.
    """

    chosen: Candidate | None
    passed_over: tuple[tuple[Candidate, Report], ...]
    unknown: bool
    reason: str = ""


def scan(root: str | os.PathLike[str], stop: Stop | None = None) -> tuple[Candidate, ...]:
    """All candidates, newest step first; () if there is no such directory. Raises OSError when it cannot be listed."""
    patience = Patience(stop)
    return tuple(_surveyed(step, path, patience) for step, path in _steps(root, patience))


def _steps(root: str | os.PathLike[str], patience: Patience) -> list[tuple[int, Path]]:
    """What has a committed checkpoint's name, newest step first; nothing is opened. Raises OSError."""
    try:
        names = patience.look(lambda: list_names(root))
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise
    steps = sorted(((step, name) for name in names if (step := parse_step(name)) is not None), reverse=True)
    return [(step, Path(root) / name) for step, name in steps]


def _surveyed(step: int, path: Path, patience: Patience) -> Candidate:
    manifest, problem = survey_checkpoint(path, patience)
    return Candidate(step, path, manifest, problem)


def newest_intact(
    root: str | os.PathLike[str],
    mode: Mode = "full",
    progress: Progress | None = None,
    threads: int = 2,
    stop: Stop | None = None,
    search: Search | None = None,
    cache: Cache = "leave",
) -> Choice:
    """The newest intact checkpoint. One that was committed on its structure alone is read in full whatever the mode.

    Older ones than the chosen one are not looked at: with a thousand of them on a slow disk that would be the longest part.
    """
    patience, search = Patience(stop), search if search is not None else Search()
    waiting: Stop = stop if stop is not None else threading.Event()
    pauses = iter(search.again_s)
    while True:
        try:
            steps = _steps(root, patience)
            break
        except OSError as error:
            pause_s = next(pauses, None)
            if pause_s is None or waiting.wait(pause_s):
                return Choice(None, (), unknown=True, reason=f"{os.fspath(root)} cannot be looked at: {error.strerror}")
    if search.named is not None and all(step != search.named for step, _ in steps):
        steps = sorted([*steps, (search.named, Path(root) / step_name(search.named))], reverse=True)

    def judge(candidate: Candidate) -> Report:
        manifest = candidate.manifest
        if manifest is None or candidate.problem is not None:
            return report_of(() if candidate.problem is None else (candidate.problem,), 0, mode)
        needed: Mode = "full" if manifest.verified == "structure" else mode
        return verify_checkpoint(candidate.path, needed, threads, progress, stop, cache=cache)

    passed_over: list[tuple[Candidate, Report]] = []
    for step, path in steps:
        candidate = _surveyed(step, path, patience)
        if search.wanted is not None and not search.wanted(candidate):
            continue
        report = judge(candidate)
        while report.verdict is Verdict.UNKNOWN and (pause_s := next(pauses, None)) is not None and not waiting.wait(pause_s):
            candidate = _surveyed(step, path, Patience(stop))
            report = judge(candidate)
        if report.verdict is Verdict.INTACT:
            return _choice(candidate, passed_over)
        passed_over.append((candidate, report))
    return _choice(None, passed_over)


def latest_step(root: str | os.PathLike[str]) -> int | None:
    """The step that DIR/latest names, whatever is there; None if it cannot be read as one.

    A link, or a file with the name in it where the file system has no links.
    """
    path = Path(root) / LATEST
    try:
        text = os.fsencode(path.readlink())
    except OSError:  # EINVAL: not a link
        try:
            fd = open_regular(path)
        except (NotRegular, OSError):
            return None
        try:
            text = read_up_to(fd, LATEST_BYTES_MAX)
        except OSError:
            return None
        finally:
            os.close(fd)
    return parse_step(os.fsdecode(text).strip().rstrip("/").rpartition("/")[2])


def is_there_late(root: str | os.PathLike[str], step: int, again_s: tuple[float, ...], stop: Stop | None = None) -> bool:
    """Whether a checkpoint that something names is there, which on a network file system may be seen late.

    Each look lists the directory afresh, which goes to the server, and then asks for the name itself. What could not be
    looked at counts as there: judging it says why.
    """
    waiting: Stop = stop if stop is not None else threading.Event()
    path = Path(root) / step_name(step)
    for pause_s in (0.0, *again_s):
        if pause_s and waiting.wait(pause_s):
            break
        try:
            list_names(root)
            path.lstat()
        except OSError as error:
            if error.errno not in NOT_THERE:
                return True
        else:
            return True
    return False


def _choice(chosen: Candidate | None, passed_over: list[tuple[Candidate, Report]]) -> Choice:
    unknown = [
        f"{candidate.path.name}: {report.reason}" for candidate, report in passed_over if report.verdict is Verdict.UNKNOWN
    ]
    return Choice(chosen, tuple(passed_over), bool(unknown), "; ".join(unknown))
