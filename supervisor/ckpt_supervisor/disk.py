"""What the loop asks of the disk: one function for each command of the machine, as plain data in and out.

Owns the translation between the machine's words and the store's. Every function may block: they run in lanes, return results, and
raise nothing that a disk can cause.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from ckpt_client.wire import SavedFile

from ckpt_supervisor import store
from ckpt_supervisor.config import Options
from ckpt_supervisor.core.commands import Commit, Verify
from ckpt_supervisor.core.events import CommitResult
from ckpt_supervisor.core.policy import EXIT_INTERRUPTED
from ckpt_supervisor.core.state import Kind

if TYPE_CHECKING:
    from ckpt_supervisor.startup import Job

NAME_PARTS = 5
"""A journal's name is <job>-<attempt>-<step_id>-<epoch>-<task>."""

JOURNAL_TAIL_BYTES = 262_144
"""How much of an earlier attempt's journal is read."""

LINES_MAX = 20
"""Most checkpoints that are named as passed over."""

SEEN_LATE_S = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Pauses before files of another node are looked for once more."""

Entries = tuple[store.FileEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """What the command resumes from (path "" for nothing), what to tell, and why it may not start ("" if it may)."""

    path: str
    step: int
    lines: tuple[str, ...]
    refusal: str = ""
    damaged: frozenset[int] = frozenset()
    """Steps that were looked at and are not whole."""
    several: bool = False
    """It holds files of more ranks than rank 0."""


NOTHING = Resume("", -1, ())


def choose(options: Options, epoch: int, progress: Callable[[int, int], None] | None) -> Resume:
    """The newest intact checkpoint, with a word for each newer one. Only damaged ones: a refusal, not a start from zero."""
    choice = store.newest_intact(options.dir, mode=options.verify, progress=progress)
    lines = [
        f"passed over {candidate.path.name}: {report.verdict.value}: {report.reason}"
        for candidate, report in choice.passed_over[:LINES_MAX]
    ]
    damaged = frozenset(candidate.step for candidate, _ in choice.passed_over)
    if choice.unknown:
        lines.append(f"could not look at everything: {choice.reason}")
    if choice.chosen is not None:
        if choice.chosen.manifest is not None and choice.chosen.manifest.verified == "structure":
            # It has just been read in full: from now on it counts toward --keep.
            problem = store.promote(options.dir, choice.chosen, epoch)
            if problem:
                lines.append(f"{choice.chosen.path.name} could not be marked as fully verified: {problem}")
        manifest = choice.chosen.manifest
        several = manifest is not None and len(manifest.ranks) > 1
        return Resume(str(choice.chosen.path), choice.chosen.step, tuple(lines), damaged=damaged, several=several)
    if options.allow_restart_from_scratch:
        return Resume("", -1, tuple(lines), damaged=damaged)
    if choice.unknown:
        return Resume("", -1, tuple(lines), f"{options.dir} cannot be looked at, so nothing is started: {choice.reason}")
    if choice.passed_over:
        refusal = (
            f"{options.dir} holds {len(choice.passed_over)} checkpoints and none is intact; to start from scratch all the same, "
            "say --allow-restart-from-scratch"
        )
        return Resume("", -1, tuple(lines), refusal)
    return Resume("", -1, tuple(lines), damaged=damaged)


def last_failure(directory: Path, job: str, epoch: int) -> str:
    """What kept the attempt before this one from saving, from its journal; "" if it saved, or if nothing can be read.

    A save that needs more time than a notice gives is told at the next start, with both numbers, not only in an unread log.
    """
    earlier = []
    for path in (directory / store.JOURNAL).glob("*.jsonl"):
        name = path.stem.rsplit("-", 4)
        # Task 0's: the other ones' decide nothing.
        if len(name) == NAME_PARTS and (name[0], name[4]) == (job, "0") and name[3].isdecimal() and int(name[3]) < epoch:
            earlier.append((int(name[3]), path))
    if not earlier:
        return ""
    path = max(earlier)[1]
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - JOURNAL_TAIL_BYTES))
        lines = [msgspec.json.decode(line) for line in file.read(JOURNAL_TAIL_BYTES).splitlines() if _is_whole(line)]
    notice, had, failure, began_ms = "", "", "", None
    for line in lines:
        at_ms, left_ms = line.get("mono_ms"), line.get("save_left_ms")
        match line.get("event"):
            case "notice":
                notice = str(line.get("cause"))
                if isinstance(left_ms, int) and isinstance(at_ms, int) and began_ms is not None:
                    # What was known at the signal was a guess; the look that follows it tells the real time.
                    had = f"; it had {(at_ms - began_ms + left_ms) / 1000:.1f} s for the save"
            case "round_begun" | "round_turned" if line.get("kind") == Kind.LEAVE.value:
                began_ms = at_ms if isinstance(at_ms, int) else None
                had = f"; it had {left_ms / 1000:.1f} s for the save" if isinstance(left_ms, int) else ""
            case "round_given_up":
                began_ms = None
            case "leaving" if line.get("outcome") == "stale":
                failure = f"the attempt before this one could not save ({notice}): {line.get('reason')}{had}"
            case "exit" if line.get("code") in (0, EXIT_INTERRUPTED):
                failure = ""  # Training came to its end all the same, or a late commit came through.
    return failure


def _is_whole(line: bytes) -> bool:
    return line.startswith(b"{") and line.endswith(b"}")


def check(command: Verify) -> tuple[str, int, Entries]:
    """Verify a round's files: what is wrong ("" when intact), bytes read, and the manifest's entries.

    Files that other tasks' ranks wrote are read there. Here they have to be seen with their sizes, which on a shared file system
    may take a moment after they were closed on another node.
    """
    mode: store.Mode = "full" if command.full else "structure"
    others = tuple(wanted for share in command.shares for wanted in _expected(share.files))
    pauses = iter(SEEN_LATE_S if others else ())
    while True:
        report, entries = store.check_files(command.partial, _expected(command.files), mode=mode, elsewhere=others)
        late = report.verdict in (store.Verdict.MISSING, store.Verdict.TRUNCATED)
        pause_s = next(pauses, None) if late else None
        if pause_s is None:
            return _problem(report), report.bytes_read, entries
        threading.Event().wait(pause_s)


def check_share(command: Verify) -> tuple[str, int, Entries]:
    """Verify what the ranks of this task wrote, and have it flushed: another node's fsync does not reach this one's cache."""
    mode: store.Mode = "full" if command.full else "structure"
    report, entries = store.check_files(command.partial, _expected(command.files), mode=mode, share=True)
    problem = _problem(report)
    if not problem:
        try:
            for entry in entries:
                store.sync_file(Path(command.partial) / entry.path)
        except OSError as error:
            problem = f"cannot be flushed to the disk: {error.strerror}"
    return problem, report.bytes_read, () if problem else entries


def _expected(files: tuple[tuple[int, SavedFile], ...]) -> tuple[store.Expected, ...]:
    return tuple(store.Expected(file.path, file.size_bytes, file.xxh3_128, rank) for rank, file in files)


def _problem(report: store.Report) -> str:
    return "" if report.verdict is store.Verdict.INTACT else f"{report.verdict.value}: {report.reason}"


def commit(directory: Path, job: Job, epoch: int, command: Commit, entries: Entries, created_at: str) -> tuple[CommitResult, str]:
    """Commit a verified round; the result and, where there is something to say, why."""
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
        files=entries,
    )
    outcome = store.commit(directory, command.partial, manifest)
    match outcome:
        case store.Committed(put_aside=aside, latest_problem=problem):
            said = [f"a damaged one of the same step was put aside as {aside.name}"] if aside is not None else []
            said += [f"latest could not be replaced: {problem}"] if problem else []
            return CommitResult.COMMITTED, "; ".join(said)
        case store.AlreadyThere():
            return CommitResult.ALREADY_THERE, "an intact checkpoint of this step was there and stays"
        case store.Fenced(holder=holder):
            return CommitResult.FENCED, f"held by {holder}" if holder is not None else ""
        case store.CommitFailed(errno_name=name, reason=reason):
            return CommitResult.FAILED, f"{name}: {reason}"


def drop(directory: Path, partial: str) -> str:
    """Remove the partial directory of a round that was given up; what went wrong, or ""."""
    return store.discard(directory, partial)


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """Checkpoints that were removed, and what could not be."""

    names: tuple[str, ...]
    problems: tuple[str, ...]


def prune(options: Options, epoch: int, protected: frozenset[int], damaged: frozenset[int]) -> Pruned:
    """Remove what --keep does not keep, one after the other, each crash-safe, for as long as we hold the directory.

    `damaged`: steps that were read in full and are not whole, whatever a look at names and sizes says: they do not count.
    """
    names: list[str] = []
    problems: list[str] = []
    try:
        whole = [candidate for candidate in store.scan(options.dir) if candidate.step not in damaged]
        candidates = store.to_prune(whole, options.keep, protected)
    except OSError as error:
        return Pruned((), (str(error),))
    for candidate in candidates:
        try:
            if not store.check_epoch(options.dir, epoch):
                return Pruned(tuple(names), (*problems, "another run holds the directory now"))
        except OSError as error:
            return Pruned(tuple(names), (*problems, str(error)))
        removed = store.remove(candidate)
        names.append(candidate.path.name)
        problems += removed.problems
    return Pruned(tuple(names), tuple(problems))


def sweep(options: Options, epoch: int) -> Pruned:
    """Remove what earlier epochs left half done."""
    try:
        removed = store.sweep(options.dir, epoch)
    except OSError as error:
        return Pruned((), (str(error),))
    return Pruned(removed.names, removed.problems)
