"""What happened to a run, from its journals: attempts, what each spent its time with, what it saved, lost, and why it ended.

Owns the reading of a directory as a Run (facts.py), and what one start says of another: what it went on from, how long it was
waited for. Must not decide anything about a run, draw, or ask anybody else. A file that is missing, torn or damaged leaves out
what it had: `notes` says so. The coordinator's journal (task 0) tells everything of a start; the other tasks' are asked where it
has no end, and for their memory.

Instants are wall-clock nanoseconds since the epoch on the coordinator's clock.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ckpt_supervisor.view import causes, clocks, gaps, loads, reading
from ckpt_supervisor.view.facts import (
    KINDS,
    PROGRESS_MAX,
    WORDS_ROUNDS_MAX,
    Attempt,
    Commit,
    Notice,
    Round,
    Run,
    Span,
    Word,
)
from ckpt_supervisor.view.pieces import milliseconds
from ckpt_supervisor.view.telling import EVENTS, Telling
from ckpt_supervisor.view.told_rounds import WORDS

__all__ = [
    "ALL", "KINDS", "PROGRESS_MAX", "WORDS_ROUNDS_MAX", "Attempt", "Commit", "Notice", "Round", "Run", "Seen", "Span", "Wanted",
    "Word", "read", "runs",
]  # fmt: skip

STARTS_MAX = 1_000
"""So many of the newest starts of a directory are read."""

TAIL_BYTES = 4 * 1024 * 1024
"""So much of a coordinator's journal is looked through for the ranks' words of the newest rounds."""

HEAD_BYTES = 150
"""An event's name stands before this place of a line."""

HEIRS_MAX = 256
"""So many other tasks' journals are asked how a start ended whose coordinator does not say it, or why training failed."""

CLOCKS_MAX = 5
"""So many clocks that are apart are told of, for each start."""

FRESH_NS = 180 * 1_000_000_000
"""A start whose last line is younger is at work: every supervisor writes a line a minute while training runs."""

_DETAILS = frozenset({"verified"})
_REASONS = frozenset({"oom_kill", "guard_lost"})
_RANK = re.compile(rb'"event": ?"rank_')
_ROUND = b'"round":'
SILENT_NS = 900 * 1_000_000_000
"""A start that has written its memory down every minute, and nothing for so long, is over."""

SKEW_NS = 1_000_000_000
_HEIRS = frozenset({"notice", "notice_over", "leaving", "requeue_called", "requeue", "resubmit", "exit", "coordinator_lost"})


class Wanted(NamedTuple):
    """What is read beside the story itself.

    words: how far each rank came in the newest rounds, and how large saves were; memory: that of the other tasks.
    """

    words: bool = True
    memory: bool = False


ALL = Wanted(words=True, memory=True)
Seen = tuple[int, bool] | None
"""The epoch of a start whose process could be looked for, and whether it lives."""


def read(
    directory: Path, job: str = "", step_id: str = "", *, alive: Seen = None, wanted: Wanted = ALL, now_ns: int | None = None
) -> Run:
    """The starts of this job (of all with "", of all elements of an array), oldest first. Raises OSError.

    `alive`: which start's process was looked at.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    groups: dict[tuple[int, str, int, str], list[reading.File]] = {}
    epochs: set[int] = set()
    for file in reading.files(directory):
        epochs.add(file.epoch)
        if _is_of(file.job, job) and step_id in ("", file.step_id):
            groups.setdefault((file.epoch, file.job, file.attempt, file.step_id), []).append(file)
    keys = sorted(groups)
    notes = [f"{len(keys) - STARTS_MAX} starts before are left out"] if len(keys) > STARTS_MAX else []
    counts = reading.Counts()
    told = [_start(groups[key], counts, wanted) for key in keys[-STARTS_MAX:]]
    attempts = tuple(one.attempt for one in told)
    missing = gaps.within(gaps.gaps_of(epochs), attempts)
    _side_by_side(told, now_ns, max(epochs, default=0), alive, missing)
    notes += gaps.notes(missing, attempts)
    if counts.damaged:
        notes.append(f"incomplete: {_lines(counts.damaged, 'damaged ')} passed over")
    if counts.cut:
        notes.append(f"incomplete: {_lines(counts.cut)} too long for their journal, which has cut them")
    notes += _clocks(attempts)
    return Run(directory=str(directory), attempts=attempts, now_ns=now_ns, notes=tuple(notes), gaps=missing)


def _lines(count: int, how: str = "") -> str:
    return f"{count} {how}{'line was' if count == 1 else 'lines were'}"


def runs(run: Run) -> list[Run]:
    """One Run for each job (and step) of a directory, by first begin; a job that --resubmit has brought back is the same run."""
    found: list[list[Attempt]] = []
    for one in run.attempts:
        for row in found:
            last = row[-1]
            is_same = (last.job, last.step_id) == (one.job, one.step_id)
            if is_same or (last.requeue == "resubmitted" and last.job != one.job and one.resume_step == (last.kept or -1)):
                row.append(one)
                break
        else:
            found.append([one])
    return [msgspec.structs.replace(run, attempts=tuple(row), gaps=gaps.within(run.gaps, row)) for row in found]


def _is_of(name: str, asked: str) -> bool:
    """Whether a job is asked for: itself, or, by the number of its array, an element of that."""
    return asked in ("", name) or (asked.isdecimal() and name.startswith(f"{asked}_"))


def _start(files: list[reading.File], counts: reading.Counts, wanted: Wanted) -> Telling:
    """One start from the journals of its tasks."""
    first = files[0]
    telling = Telling(Attempt(job=first.job, attempt=first.attempt, epoch=first.epoch, step_id=first.step_id, tasks=len(files)))
    notes: list[str] = []
    own = next((file for file in files if file.task == 0), None)
    if own is None:
        notes.append("incomplete: the coordinator's journal is missing (that of task 0), its tasks' tell little")
        telling.attempt.is_told = False
    else:
        _tell(telling, own, EVENTS if wanted.words else EVENTS - _DETAILS, notes, counts)
        if wanted.words:
            _words(telling, own.path)
    others = [file for file in files if file.task != 0]
    if own is not None and others and telling.attempt.began_ns is None:
        notes.append(f"incomplete: {own.path.name} (the coordinator's journal) tells nothing")
        telling.attempt.is_told = False
    is_open = telling.attempt.code is None
    ahead_ns: dict[int, int] = {}
    if others and (is_open or wanted.memory):
        apart = clocks.offsets(files)
        ahead_ns = {task: offset.ns for (_, task), offset in apart.items()}
        notes += list(dict.fromkeys(offset.text for offset in apart.values() if offset.is_large))[:CLOCKS_MAX]
    if others and is_open:
        _heirs(telling, others[:HEIRS_MAX], ahead_ns, counts)
    if telling.needs_reasons:
        _reasons(telling, others[:HEIRS_MAX])
    if wanted.memory:
        loads.read(telling.loads, others, ahead_ns)
    told = {file.task for file in files}
    missing = sorted(telling.tasks - told)
    if missing and own is not None:
        named = ", ".join(str(task) for task in missing[:5]) + (", ..." if missing[5:] else "")
        notes.append(f"incomplete: no journal of task {named}")
    attempt = telling.told()
    attempt.memory = loads.summed(telling.loads)
    attempt.cause, attempt.detail = causes.cause_of(telling, attempt)
    if telling.instants.steps_ns >= SKEW_NS:
        notes.append(f"the clock of {attempt.host or 'its host'} was set by {telling.instants.steps_ns / 1e9:.0f} s meanwhile")
    if telling.rounds.dropped:
        notes.append(f"{telling.rounds.dropped} rounds before are left out")
    attempt.notes = tuple(notes)
    return telling


def _tell(telling: Telling, file: reading.File, events: frozenset[str], notes: list[str], counts: reading.Counts) -> None:
    reader = reading.Reader(file.path, events)
    is_anew = False
    try:
        for line in reader.lines():
            is_anew |= line.get("event") == "journal_anew"
            telling.take(line)
    except OSError as error:
        notes.append(f"incomplete: {file.path.name} cannot be read: {error.strerror or error}")
    counts.add(reader.counts)
    if is_anew:
        notes.append(f"incomplete: {file.path.name} was removed while it was written; what was before is not known")
    if reader.counts.damaged:
        notes.append(f"incomplete: {reader.counts.damaged} damaged line{'s' * (reader.counts.damaged != 1)} in {file.path.name}")
    if reader.counts.torn and telling.attempt.code is None:
        notes.append(f"incomplete: {file.path.name} ends in the middle of a line: it was cut, or the disk was full")


def _words(telling: Telling, path: Path) -> None:
    """The ranks' own words of the newest rounds: by far most lines are such words, and only the last ones are shown."""
    newest = telling.rounds.newest()
    if not newest:
        return
    names = {name.encode() for name in WORDS}
    rounds = {str(one).encode() for one in newest}
    try:
        fd = reading.opened(path)
    except OSError:
        return  # It could be read a moment ago; what it told then stands.
    try:
        for raw in _tail(fd):
            if _RANK.search(raw, 0, HEAD_BYTES) and reading.event_in(raw) in names:
                line = reading.parse(raw) if raw.partition(_ROUND)[2].partition(b",")[0].strip() in rounds else None
                if line is not None:
                    telling.rounds.word(str(line["event"]), line)
    except OSError:
        return
    finally:
        os.close(fd)


def _tail(fd: int) -> Iterator[bytes]:
    """The whole lines of its last part. Raises OSError."""
    since = max(0, os.fstat(fd).st_size - TAIL_BYTES)
    os.lseek(fd, since, os.SEEK_SET)
    splitter = reading.Splitter(reading.Counts())
    left = TAIL_BYTES
    while left > 0 and (block := os.read(fd, min(left, reading.BLOCK_BYTES))):
        left -= len(block)
        yield from splitter.lines(block)


def _heirs(telling: Telling, files: list[reading.File], ahead_ns: Mapping[int, int], counts: reading.Counts) -> None:
    """How a start ended whose coordinator does not say it: a task that had to decide for itself, or that was told the status."""
    is_all = telling.attempt.began_ns is None
    for file in files:
        reader = reading.Reader(file.path, None if is_all else _HEIRS)
        named = Attempt(job=file.job, attempt=file.attempt, epoch=file.epoch, step_id=file.step_id)
        heir = Telling(named, ahead_ns.get(file.task, 0))
        try:
            for line in reader.lines():
                heir.take(line)
        except OSError:
            continue
        counts.add(reader.counts)
        telling.inherit(heir, is_all)


def _reasons(telling: Telling, files: list[reading.File]) -> None:
    """What only a task's own supervisor has seen of a failure: that the kernel has killed a process of its node."""
    for file in files:
        try:
            for line in reading.Reader(file.path, _REASONS).lines():
                telling.reason(line, file.task)
        except OSError:
            continue


def _side_by_side(told: list[Telling], now_ns: int, newest_epoch: int, alive: Seen, missing: Sequence[gaps.Gap]) -> None:
    """What one start says of the one before it: what of that was lost, and how long the next one was waited for."""
    queues: dict[tuple[str, str], gaps.Queues] = {}
    for place, telling in enumerate(told):
        attempt = telling.attempt
        key = (attempt.job, attempt.step_id)
        after = next((one for one in told[place + 1 :] if _goes_on(one.attempt, attempt)), None)
        if attempt.code is None:
            is_newest = after is None and attempt.epoch == newest_epoch
            attempt.is_running = _is_at_work(telling, now_ns, alive) if is_newest else False
            if attempt.is_running is not False:
                attempt.cause, attempt.detail = causes.RUNNING, ""
        begun = (one.attempt for one in told[place + 1 :] if one.has_told and _goes_on(one.attempt, attempt))
        _lose(telling, next(begun, None), missing)
        queues.setdefault(key, gaps.Queues()).take(attempt, missing)


def _goes_on(one: Attempt, before: Attempt) -> bool:
    return (one.job, one.step_id) == (before.job, before.step_id) or before.requeue == "resubmitted"


def _is_at_work(telling: Telling, now_ns: int, alive: Seen) -> bool | None:
    """Whether the newest start lives: as it was seen, or by the age of its last line."""
    attempt = telling.attempt
    if alive is not None and alive[0] == attempt.epoch:
        return alive[1]
    age_ns = None if attempt.ended_ns is None else now_ns - attempt.ended_ns
    if age_ns is not None and age_ns < FRESH_NS:
        return True
    if age_ns is not None and attempt.requeue in ("accepted", "already pending"):
        return False  # Slurm has ended it; its last line may not have been written.
    return False if age_ns is not None and telling.loads and age_ns > SILENT_NS else None


def _lose(telling: Telling, after: Attempt | None, missing: Sequence[gaps.Gap]) -> None:
    """`after`: the next start of which it is known what its command went on from."""
    attempt = telling.attempt
    is_between = after is not None and gaps.is_between(missing, attempt, after)
    if after is not None and not attempt.is_told and not is_between and after.resume_step >= max(0, attempt.resume_step):
        attempt.kept = after.resume_step  # Nobody else tells what it has kept.
    base = -1 if attempt.kept is None else attempt.kept
    if after is not None and telling.has_told and after.resume_step > base:
        newer = gaps.resumed_newer(attempt, after)
        after.notes = (*after.notes, newer) if newer else after.notes
    # A newer step was made by a start between them, where one is missing: what is lost here is lost all the same.
    if after is not None and after.resume_step != base and not (is_between and after.resume_step > base):
        if after.resume_step < base:
            how = f"went on from step {after.resume_step}" if after.resume_step >= 0 else "began from scratch"
            attempt.fell_to = max(0, after.resume_step)
            attempt.notes = (*attempt.notes, f"the next start {how}, not from step {base}, which was committed")
        base = after.resume_step
    is_open = attempt.code is None and attempt.is_running is not False
    telling.lost_from(base, is_all_kept=attempt.cause == causes.FINISHED or is_open)


def _clocks(attempts: Iterable[Attempt]) -> list[str]:
    """What has to be said of clocks, each once."""
    said = (note for one in attempts for note in one.notes if "clock" in note)
    return list(dict.fromkeys(said))


def queued_ms(attempt: Attempt) -> int | None:
    """How long it waited in the queue, as far as the start before it tells."""
    return milliseconds(attempt.spans, "queued") if any(span.kind == "queued" for span in attempt.spans) else None
