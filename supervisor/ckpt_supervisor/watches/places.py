"""Which directory a job's checkpoints are in: one small file a step in the user's state directory, which outlives the job.

Owns those files, and the reading of what tasks/meeting.py has there while a step runs. The journal of a job that has ended, or
that waits in the queue, is found through them: `ckptctl status JOB`. A convenience: where the state directory cannot be used,
--dir is the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckpt_supervisor.tasks.meeting import FILE_BYTES_MAX, STEPS_MAX, state_directory

JOBS_MAX = 1_000
"""So many jobs are remembered; the oldest go."""

NAMES_MAX = 100_000

_JOB = re.compile(r"([0-9]{1,18}(?:_[0-9]{1,18})?)(?:\.([0-9]{1,18}|batch))?")


class Home(NamedTuple):
    """Where one step of a job has its checkpoints."""

    job: str
    step_id: str
    dir: Path


def parse_job(text: str) -> tuple[str, str]:
    """`4711`, `4711.0`, `100_3.batch` as job and step, "" for all steps; anything else is a job's name. Raises ValueError."""
    match = _JOB.fullmatch(text)
    if match is not None:
        return match[1], match[2] or ""
    if not text or "/" in text or "\0" in text or text.startswith("."):
        raise ValueError(f"{text!r} is no job: write 4711, 100_3 for an element of an array, or 4711.0 for one step")
    return text, ""


def is_number(job: str) -> bool:
    """Whether Slurm may know a job of this name."""
    match = _JOB.fullmatch(job)
    return match is not None and match[2] is None


def remember(env: Mapping[str, str], home: Home) -> str:
    """Note where this step has its checkpoints; what went wrong, "" if nothing."""
    below = state_directory(env) / "places"
    path = below / home.job / f"{home.step_id}.json"
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"dir": str(home.dir), "at": time.time()}))
        fresh.replace(path)
        os.utime(path.parent)
        _forget_the_oldest(below)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def homes(env: Mapping[str, str], job: str, step_id: str = "") -> list[Home]:
    """The steps of this job that are known, by step; those at work as tasks/meeting.py has them, else those that were."""
    found: dict[str, Home] = {}
    for below in ("places", "jobs"):  # Who is at work counts.
        for path in _files(state_directory(env) / below / job):
            where = _dir_of(path)
            if where is not None and step_id in ("", path.stem):
                found[path.stem] = Home(job, path.stem, where)
    return [found[name] for name in sorted(found, key=lambda name: (not name.isdecimal(), name.zfill(18)))]


def elements(env: Mapping[str, str], array: str) -> list[str]:
    """The elements of this array that are known, such as `100_3`."""
    found: set[str] = set()
    for below in ("places", "jobs"):
        with contextlib.suppress(OSError), os.scandir(state_directory(env) / below) as entries:
            found |= {entry.name for entry in islice(entries, NAMES_MAX) if entry.name.startswith(f"{array}_")}
    return sorted(found, key=lambda name: (len(name), name))


def _files(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, STEPS_MAX)]
    except OSError:
        return []
    return [directory / name for name in sorted(names) if name.endswith(".json")]


def _dir_of(path: Path) -> Path | None:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    where = record.get("dir") if isinstance(record, dict) else None
    return Path(where) if isinstance(where, str) and where.startswith("/") and "\0" not in where else None


def _forget_the_oldest(below: Path) -> None:
    """Raises OSError."""
    with os.scandir(below) as entries:
        names = [entry.name for entry in islice(entries, NAMES_MAX)]
    if len(names) <= JOBS_MAX:
        return
    ages = sorted((_changed(below / name), name) for name in names)
    for _, name in ages[: len(names) - JOBS_MAX]:
        for path in _files(below / name):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (below / name).rmdir()


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
