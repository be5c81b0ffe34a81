"""Which checkpoints are there, and which one to resume from.

Owns the order of candidates and the fallback to an older one. Must not delete, repair or resume anything. Only names
and manifests count: modification times lie (field case 91), and DIR/latest is a convenience that can be gone or point
to something damaged (field case 95).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ckpt_supervisor.store.layout import parse_step
from ckpt_supervisor.store.look import NOT_THERE, Patience, Stop, list_names
from ckpt_supervisor.store.manifest import Manifest
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
    try:
        names = patience.look(lambda: list_names(root))
    except OSError as error:
        if error.errno in NOT_THERE:
            return ()
        raise
    steps = sorted(((step, name) for name in names if (step := parse_step(name)) is not None), reverse=True)
    candidates = []
    for step, name in steps:
        path = Path(root) / name
        manifest, problem = survey_checkpoint(path, patience)
        candidates.append(Candidate(step, path, manifest, problem))
    return tuple(candidates)


def newest_intact(
    root: str | os.PathLike[str],
    mode: Mode = "full",
    progress: Progress | None = None,
    threads: int = 2,
    stop: Stop | None = None,
) -> Choice:
    """The newest intact checkpoint. One that was committed on its structure alone is read in full whatever the mode."""
    try:
        candidates = scan(root, stop)
    except OSError as error:
        return Choice(None, (), unknown=True, reason=f"{os.fspath(root)} cannot be looked at: {error.strerror}")
    passed_over: list[tuple[Candidate, Report]] = []
    for candidate in candidates:
        report = _judge(candidate, mode, progress, threads, stop)
        if report.verdict is Verdict.INTACT:
            return _choice(candidate, passed_over)
        passed_over.append((candidate, report))
    return _choice(None, passed_over)


def _judge(candidate: Candidate, mode: Mode, progress: Progress | None, threads: int, stop: Stop | None) -> Report:
    if candidate.manifest is None or candidate.problem is not None:
        return report_of(() if candidate.problem is None else (candidate.problem,), 0, mode)
    needed: Mode = "full" if candidate.manifest.verified == "structure" else mode
    return verify_checkpoint(candidate.path, needed, threads, progress, stop)


def _choice(chosen: Candidate | None, passed_over: list[tuple[Candidate, Report]]) -> Choice:
    unknown = [
        f"{candidate.path.name}: {report.reason}" for candidate, report in passed_over if report.verdict is Verdict.UNKNOWN
    ]
    return Choice(chosen, tuple(passed_over), bool(unknown), "; ".join(unknown))
