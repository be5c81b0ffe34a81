"""What the loop asks of the disk: one function for each command of the machine, as plain data in and out.

Owns the translation between the machine's words and the store's. Every function may block: they run in lanes, return results, and
raise nothing that a disk can cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_client.wire import SavedFile

from ckpt_supervisor import store
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core.commands import Commit, Verify
from ckpt_supervisor.core.events import CommitResult
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.linux import procfs

if TYPE_CHECKING:
    from ckpt_supervisor.start.startup import Job

SEEN_LATE_S = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Pauses before files of another node are looked for once more."""

WRITTEN_LATE_S: dict[bool, tuple[float, ...]] = {True: (0.05, 0.1, 0.2, 0.4, 0.5, 0.75), False: (0.05, 0.1, 0.15)}
"""Pauses for a file that is still open for writing, by whether every byte is read, and so time is there: 2 s and 0.3 s."""

Entries = tuple[store.FileEntry, ...]

Checked = tuple[str, int, Entries]
"""What is wrong ("" when intact), bytes read, and the manifest's entries."""


def measured(check: Callable[[Verify, store.Cache], Checked], command: Verify) -> tuple[Checked, dict[str, Any]]:
    """`check` with the bytes read from the disk and not from the page cache, and what that cost, for the journal.

    `disk_bytes`: what this process has had from a disk or a file server meanwhile. To drop cached pages is only advice to the
    kernel: where this is less than `bytes`, the rest was in memory all the same.
    """
    began, before = time.monotonic(), procfs.bytes_from_storage()
    checked = check(command, "fresh")
    took_s, after = time.monotonic() - began, procfs.bytes_from_storage()
    speed = round(checked[1] / took_s / 1e9, 3) if took_s > 0 else None
    had = after - before if before is not None and after is not None else None
    return checked, {"bytes": checked[1], "ms": round(took_s * 1000), "gb_per_s": speed, "disk_bytes": had}


def check(command: Verify, cache: store.Cache = "leave") -> Checked:
    """Verify a round's files: what is wrong ("" when intact), bytes read, and the manifest's entries.

    Files that other tasks' ranks wrote are read there. Here they have to be seen with their sizes, which on a shared file system
    may take a moment after they were closed on another node.
    """
    problem = _still_written(command)
    if problem:
        return problem, 0, ()
    mode: store.Mode = "full" if command.full else "structure"
    others = tuple(wanted for share in command.shares for wanted in _expected(share.files))
    pauses = iter(SEEN_LATE_S if others else ())
    while True:
        report, entries = store.check_files(command.partial, _expected(command.files), mode=mode, elsewhere=others, cache=cache)
        late = report.verdict in (store.Verdict.MISSING, store.Verdict.TRUNCATED)
        pause_s = next(pauses, None) if late else None
        if pause_s is None:
            return _problem(report), report.bytes_read, entries
        threading.Event().wait(pause_s)


def check_share(command: Verify, cache: store.Cache = "leave") -> Checked:
    """Verify what the ranks of this task wrote, and have it flushed: another node's fsync does not reach this one's cache."""
    problem = _still_written(command)
    if problem:
        return problem, 0, ()
    mode: store.Mode = "full" if command.full else "structure"
    report, entries = store.check_files(command.partial, _expected(command.files), mode=mode, share=True, cache=cache)
    problem = _problem(report)
    if not problem:
        try:
            for entry in entries:
                store.sync_file(Path(command.partial) / entry.path)
        except OSError as error:
            problem = f"cannot be flushed to the disk: {error.strerror}"
    return problem, report.bytes_read, () if problem else entries


def _still_written(command: Verify) -> str:
    """Whether somebody below us goes on writing although every rank has said that it saved (field case 97); "" if not.

    A save() that leaves the writing to a thread or a child looks like that. What is read now may be another thing a moment later.
    """
    for pause_s in WRITTEN_LATE_S[command.full]:
        if procfs.writer_in(command.partial, procfs.descendants()) is None:
            return ""
        threading.Event().wait(pause_s)
    writer = procfs.writer_in(command.partial, procfs.descendants())
    if writer is None:
        return ""
    return f"{store.one_line(writer[1])} is still being written by process {writer[0]}: save() has returned too early"


def is_spoken_for(command: Verify, entries: Entries) -> bool:
    """Whether the client has digested every file: it wrote them itself, and nobody goes on writing once it has said so."""
    files = (*command.files, *(each for share in command.shares for each in share.files))
    return all(file.xxh3_128 for _, file in files) and all(entry.rank is not None for entry in entries)


def _expected(files: tuple[tuple[int, SavedFile], ...]) -> tuple[store.Expected, ...]:
    return tuple(store.Expected(file.path, file.size_bytes, file.xxh3_128, rank) for rank, file in files)


def _problem(report: store.Report) -> str:
    return "" if report.verdict is store.Verdict.INTACT else f"{report.verdict.value}: {report.reason}"


def commit(
    directory: Path, job: Job, epoch: int, command: Commit, entries: Entries, created_at: str, place: store.Place | None = None
) -> tuple[CommitResult, str]:
    """Commit a verified round; the result and, where there is something to say, why.

    `place`: the directory as it was at the start. Removed under the run it is taken anew: a run that trains on for days without
    a save loses more than whoever removed it can have wanted. Not by a cancelled one, which makes room for the next.
    """
    manifest = store.Manifest(
        step=command.step,
        world_size=max(1, command.world_size),
        ranks=command.ranks,
        job=job.name,
        attempt=job.attempt,
        epoch=epoch,
        cause=command.cause,
        created_at=created_at,
        verified="full" if command.verified == "full" else "structure",
        save_ms=max(0, command.save_ms),
        files=entries,
    )
    outcome = store.commit(directory, command.partial, manifest)
    said: list[str] = []
    if place is not None and isinstance(outcome, store.Fenced):
        place.is_lost = True
    is_over = place is None or command.cause == Cause.CANCELLED.value
    if isinstance(outcome, store.Unheld) and not is_over and _retaken(directory, job, epoch, place):
        said = [f"{outcome.reason}: this run has taken it anew, and what was in it is gone"]
        outcome = store.commit(directory, command.partial, manifest)
        say(said[0])
    match outcome:
        case store.Committed(put_aside=aside, latest_problem=problem):
            said += [f"a damaged one of the same step was put aside as {aside.name}"] if aside is not None else []
            said += [f"latest could not be replaced: {problem}"] if problem else []
            return CommitResult.COMMITTED, "; ".join(said)
        case store.AlreadyThere():
            return CommitResult.ALREADY_THERE, "; ".join([*said, "an intact checkpoint of this step was there and stays"])
        case store.Fenced(holder=holder):
            return CommitResult.FENCED, f"held by {store.describe_holder(holder)}" if holder is not None else ""
        case store.CommitFailed(errno_name=name, reason=reason):
            return CommitResult.FAILED, "; ".join([*said, f"{name}: {reason}"])


def _retaken(directory: Path, job: Job, epoch: int, place: store.Place | None) -> bool:
    try:
        return place is not None and store.retake_epoch(directory, epoch, job.name, job.attempt, job.step_id, place)
    except OSError:
        return False


def drop(directory: Path, partial: str) -> str:
    """Remove the partial directory of a round that was given up; what went wrong, or ""."""
    return store.discard(directory, partial)
