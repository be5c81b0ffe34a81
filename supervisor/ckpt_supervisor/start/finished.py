"""That training came to its end by itself: DIR/done.json, so that what is finished is not trained again.

Owns that record. Slurm requeues a job for reasons of its own (a node that fails right after the end, an administrator, a job
script that goes on after the step), and the same step then starts once more. The record is written only after the command's own
end with 0 and no notice in force, never by a trap of the job script, which does not know why it runs (field case 65). It stops
nothing but that very step of that very job with that very command: anybody else may want more steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.config import Options
from ckpt_supervisor.start.startup import Job

NAME = "done.json"
"""As in store/layout.py, which is not needed for it before the command runs."""

FORMAT = 1
BYTES_MAX = 16_384


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The record. `step`: of the newest checkpoint then, -1 for none; `command`: digest of the command line."""

    job: str
    attempt: int
    step_id: str
    epoch: int
    step: int
    ended_at: str
    command: str


def word(options: Options, job: Job) -> str:
    """Why nothing is started: this step's training had come to its end in an earlier attempt. "" where it had not.

    One that is to be trained again all the same loses its record: the next interruption is no end.
    """
    done = read(options.dir)
    if done is None or job.slurm is None or (done.job, done.step_id) != (job.name, job.step_id):
        return ""
    is_ours = done.attempt < job.attempt and done.command == digest(options.command)
    if is_ours and not options.train_again:
        at = f"step {done.step}" if done.step >= 0 else "no checkpoint"
        return (
            f"this job's training came to its end at {done.ended_at} (attempt {done.attempt}, {at}); not started again; "
            "--train-again starts it all the same"
        )
    with contextlib.suppress(OSError):
        (options.dir / NAME).unlink()
    return ""


def note(post: Callable[[Callable[[], None]], object], options: Options, job: Job, epoch: int, step: int | None) -> None:
    """At the end of a run: write the record, by way of `post`, as it touches a disk. `step` is None where it is no such end.

    Without Slurm nobody starts anything by himself, so there is none.
    """
    if job.task != 0:
        return
    if step is not None and job.slurm is not None:
        ended_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = Done(job.name, job.attempt, job.step_id, epoch, step, ended_at, digest(options.command))
        post(functools.partial(_write, options.dir, done))
    else:
        post(functools.partial(_forget, options.dir, job.name))


def read(directory: Path) -> Done | None:
    """The record; None if there is none that can be read as one."""
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = json.loads(os.read(fd, BYTES_MAX))
        finally:
            os.close(fd)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            return None
        return _checked(found)
    except (OSError, ValueError, RecursionError):
        return None


def digest(command: Sequence[str]) -> str:
    """XXH3-128 of a command line."""
    import xxhash

    return xxhash.xxh3_128_hexdigest("\0".join(command).encode(errors="surrogateescape"))


def _checked(found: dict[str, Any]) -> Done | None:
    types = {"job": str, "attempt": int, "step_id": str, "epoch": int, "step": int, "ended_at": str, "command": str}
    if any(type(found.get(name)) is not wanted for name, wanted in types.items()):
        return None
    return Done(**{name: found[name] for name in types})


def _write(directory: Path, done: Done) -> None:
    """In one step, and on the disk: half of it must not be there, nor come back without the checkpoint that it names."""
    fresh = directory / f".{NAME}-{done.epoch}"
    try:
        with fresh.open("w") as file:
            json.dump({"format": FORMAT, **dataclasses.asdict(done)}, file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(directory / NAME)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        say(f"that training is done could not be written down ({error}): if Slurm requeues this job it trains on")


def _forget(directory: Path, job: str) -> None:
    """Another job has trained on here and has come to no end: what is there is not finished any more."""
    done = read(directory)
    if done is not None and done.job != job:
        with contextlib.suppress(OSError):
            (directory / NAME).unlink()
