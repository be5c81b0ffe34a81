"""The starts of a run as its journals tell of them: when each began, how far it came, and how it ended.

Owns the reading of task 0's journals for people. Must not decide anything, nor ask anybody else: whether a start that has written
no last word is alive is not known here. Reads the head and the tail of the newest few journals; a damaged line is passed over,
and what is not written down is not known. What could not be read, or is not whole, is told beside the starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.view.reading import File, file_of, moment, opened, parse

HEAD_BYTES = 65_536
TAIL_BYTES = 262_144
STARTS_MAX = 50
"""So many of the newest starts are read."""

POSITIONS_MAX = 10
"""The speed is that between so many of the newest positions that the journal tells of."""

WARNINGS_MAX = 3

_LEFT_OUT = "is left out"

SAYS_NOTHING = frozenset({"requeued already", "not known", "no end in sight"})
"""Causes that tell nothing of why it left, once it was on its way out or had called for the requeue itself."""

_SAID_AT_ROUND = frozenset({"go", "rank_saving", "rank_written", "verified"})


class Open(msgspec.Struct, frozen=True):
    """A save that runs: `stage` is what has happened last, `ranks` how many have come so far."""

    number: int
    kind: str
    stage: str
    ranks: int
    of: int


class Attempt(msgspec.Struct):
    """One start of a job step. Instants are those of its own host's clock; None for what is not known."""

    epoch: int
    job: str
    number: int
    """SLURM_RESTART_COUNT; not consecutive."""
    step_id: str
    host: str = ""
    pid: int = 0
    began: datetime | None = None
    last: datetime | None = None
    is_whole: bool = True
    """Nothing of its journal was left out."""
    attached: bool = False
    started: bool = False
    """Its command has begun at least once."""
    resume_step: int = -1
    """Where it began; not where a start in place did."""
    committed: int = -1
    committed_at: datetime | None = None
    positions: list[tuple[datetime, int]] = msgspec.field(default_factory=list)
    """When it had finished how many steps, newest last."""
    round: Open | None = None
    notice: str = ""
    """Cause of the notice in force, or of the last one."""
    in_notice: bool = False
    called: bool = False
    """It has called for the requeue: what Slurm says of the job from here on is of that."""
    left: str = ""
    """`fresh` or `stale` once it was on its way out."""
    requeue: str = ""
    """What the call came to."""
    refused: str = ""
    code: int | None = None
    """What it exited with; None: no such word."""
    line: str = ""
    interval: dict[str, Any] = msgspec.field(default_factory=dict)
    recalled: dict[str, Any] = msgspec.field(default_factory=dict)
    """What it was told of the attempts before, as far as requeues rest on it."""
    saved_at: datetime | None = None
    """When the last periodic interval began."""
    end_s: int | None = None
    warnings: list[tuple[datetime, str]] = msgspec.field(default_factory=list)

    @property
    def reached(self) -> int:
        """The highest number of finished steps that anything tells of."""
        return max((self.resume_step, self.committed, *(step for _, step in self.positions)))

    @property
    def steps_per_s(self) -> float | None:
        """How fast it was lately, saves included."""
        if len(self.positions) < 2:
            return None
        (since, first), (until, last) = self.positions[0], self.positions[-1]
        took_s = (until - since).total_seconds()
        return (last - first) / took_s if took_s > 0 and last > first else None


class Told(NamedTuple):
    """The starts of a job, oldest first, and what of them is not known."""

    starts: list[Attempt]
    notes: list[str]
    """Newest first."""
    is_newest_told: bool
    """The newest start is among them."""


def attempts(directory: Path, job: str = "", step_id: str = "") -> list[Attempt]:
    """The starts of this job (of any with ""), oldest first. Raises OSError when the journals cannot be looked at."""
    return told(directory, job, step_id).starts


def told(directory: Path, job: str = "", step_id: str = "") -> Told:
    """The same, and what is incomplete: one journal that cannot be read hides no other. Raises OSError."""
    found: list[Attempt] = []
    notes: list[str] = []
    is_newest_told = True
    wanted = (file for file in _journals(directory) if job in ("", file.job) and step_id in ("", file.step_id))
    for place, file in enumerate(islice(wanted, STARTS_MAX)):
        attempt = Attempt(file.epoch, file.job, file.attempt, file.step_id)
        problem = _take_file(attempt, file)
        if problem.startswith(_LEFT_OUT):
            problem = f"attempt {file.attempt} {problem}"
            is_newest_told = is_newest_told and place > 0
        else:
            found.append(attempt)
        if problem:
            notes.append(f"incomplete: {problem}")
    return Told(found[::-1], notes, is_newest_told)


def jobs(directory: Path) -> list[str]:
    """Names of the jobs that have journals here, the newest start's first. Raises OSError."""
    return list(dict.fromkeys(file.job for file in _journals(directory)))


def _journals(directory: Path) -> list[File]:
    """One of each start, task 0's where that is there; newest start first. Raises OSError."""
    try:
        names = store.list_names(directory / store.JOURNAL)
    except FileNotFoundError:
        return []
    files = (file for file in (file_of(directory / store.JOURNAL / name) for name in names) if file is not None)
    found: dict[tuple[int, str, int, str], File] = {}
    for file in sorted(files, key=lambda file: file.task):
        found.setdefault((file.epoch, file.job, file.attempt, file.step_id), file)
    return [found[key] for key in sorted(found, reverse=True)]


def _take_file(attempt: Attempt, file: File) -> str:
    """Take in what a journal tells; what is wrong with it, which begins with _LEFT_OUT where nothing could be taken."""
    name = file.path.name
    if file.task:
        return f"{_LEFT_OUT}: there is no journal of its task 0"
    try:
        data, attempt.is_whole = _data(file.path)
    except OSError as error:
        return f"{_LEFT_OUT}: {name} cannot be read: {error.strerror or error}"
    lines = [raw for raw in data.split(b"\n") if raw and not raw.isspace()]
    known = [line for line in map(parse, lines) if line is not None]
    read(attempt, known)
    is_torn = bool(data) and not data.endswith(b"\n")
    damaged = len(lines) - len(known) - (is_torn and parse(lines[-1]) is None)
    problems = []
    if damaged:
        problems.append(f"{damaged} damaged {'line' if damaged == 1 else 'lines'} in {name}")
    if is_torn and attempt.code is None:
        problems.append(f"{name} ends in the middle of a line: it was cut, or the disk was full")
    if any(line.get("cut") is True for line in known):
        problems.append(f"lines of {name} were too long, and its writer has cut them")
    return "; ".join(problems)


def _data(path: Path) -> tuple[bytes, bool]:
    """Head and tail of a journal, in whole lines but for the last one, and whether that is all of it. Raises OSError."""
    with os.fdopen(opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        rest = max(len(head), size - TAIL_BYTES)
        file.seek(rest)
        tail = file.read(TAIL_BYTES)
    if rest == len(head):
        return head + tail, True
    return head.rpartition(b"\n")[0] + b"\n" + tail.partition(b"\n")[2], False


def read(attempt: Attempt, lines: Iterable[dict[str, Any]]) -> Attempt:
    """The start with what these lines say of it, in their order."""
    for line in lines:
        at = moment(str(line.get("ts", "")))
        if at is None:
            continue
        attempt.began = attempt.began or at
        attempt.last = at
        if not attempt.host:
            attempt.host, attempt.pid = str(line.get("host", "")), _number(line.get("pid"), 0)
        _take(attempt, str(line.get("event")), line, at)
        _take_round(attempt, str(line.get("event")), line)
        if line.get("level") in ("warning", "error"):
            attempt.warnings = [*attempt.warnings, (at, _warning(line))][-WARNINGS_MAX:]
    return attempt


def _take(attempt: Attempt, event: str, line: dict[str, Any], at: datetime) -> None:
    match event:
        case "command_started":
            attempt.resume_step = attempt.resume_step if attempt.started else _number(line.get("resume_step"), -1)
            attempt.started, attempt.saved_at = True, at
        case "rank_hello" if not attempt.attached:
            attempt.attached = True
            _reached(attempt, at, max(0, attempt.resume_step))
        case "agreed":
            _reached(attempt, at, _number(line.get("step"), -1))
        case "progress":
            _reached(attempt, at, _number(line.get("step"), -1))
        case "interval":
            why = line.get("why")
            attempt.interval = {key: _amount(line.get(key)) for key in ("every_ms", "cost_ms", "mtbi_ms")}
            attempt.interval["why"] = why if isinstance(why, str) else None
        case "recalled":
            attempt.recalled = {key: _amount(line.get(key)) for key in ("timeouts", "crashes", "stalled")}
        case "commit" if line.get("result") in ("committed", "already there"):
            attempt.committed, attempt.committed_at = _number(line.get("step"), -1), at
        case "adopted":
            steps = line.get("steps")
            if isinstance(steps, list) and steps and all(isinstance(step, int) for step in steps):
                attempt.committed, attempt.committed_at = max(steps), at
        case "notice":
            cause = str(line.get("cause", ""))
            is_known = attempt.notice not in ("", *SAYS_NOTHING) and bool(attempt.left or attempt.called)
            attempt.notice, attempt.in_notice = attempt.notice if is_known and cause in SAYS_NOTHING else cause, True
        case "requeue_called":
            attempt.called = True
        case "notice_over":
            attempt.notice, attempt.in_notice = "", False
        case "leaving":
            attempt.left = str(line.get("outcome", ""))
        case "requeue":
            attempt.requeue = str(line.get("result", ""))
        case "look":
            attempt.end_s = _number(line.get("end_s"), 0) or None
        case "refused":
            attempt.refused = str(line.get("text", ""))
        case "exit":
            attempt.code, attempt.line = _number(line.get("code"), -1), str(line.get("line", ""))
        case _:
            pass


def _take_round(attempt: Attempt, event: str, line: dict[str, Any]) -> None:
    current = attempt.round
    match event:
        case "round_begun":
            ranks = line.get("ranks")
            attempt.round = Open(_number(line.get("round"), 0), str(line.get("kind", "")), "begun", 0, _counted(ranks))
        case "round_committed" | "round_given_up":
            attempt.round = None
            attempt.saved_at = moment(str(line.get("ts", "")))
        case "agreed" if current is not None:
            attempt.round = msgspec.structs.replace(current, stage="agreed", ranks=0)
        case "rank_agreed" if current is not None and current.stage == "begun":
            attempt.round = msgspec.structs.replace(current, ranks=current.ranks + _counted(line.get("ranks", [0])))
        case _ if event in _SAID_AT_ROUND and current is not None:
            ranks = _counted(line.get("ranks", [0])) if event.startswith("rank_") else 0
            before = current.ranks if current.stage == event else 0
            attempt.round = msgspec.structs.replace(current, stage=event, ranks=before + ranks)
        case _:
            pass


def _counted(ranks: object) -> int:
    """How many ranks [0, "2-7"] names."""
    count = 0
    for part in ranks if isinstance(ranks, list) else ():
        first, dash, last = str(part).partition("-")
        if first.isdecimal() and (not dash or last.isdecimal()):
            count += int(last or first) - int(first) + 1
    return count


def _reached(attempt: Attempt, at: datetime, step: int) -> None:
    if step >= 0 and (not attempt.positions or step != attempt.positions[-1][1]):
        attempt.positions = [*attempt.positions, (at, step)][-POSITIONS_MAX:]


def _warning(line: dict[str, Any]) -> str:
    text = next(filter(None, map(line.get, ("text", "reason", "line", "problem", "why", "how"))), "")
    rank = f" rank {line['rank']}" if isinstance(line.get("rank"), int) else ""
    name = str(line.get("event", "")).replace("_", " ")
    if name == "command exited":
        name = f"{name} with status {_number(line.get('code'), -1)}"
    return f"{text}" if name == "warning" else f"{name}{rank}: {text}" if text else f"{name}{rank}"


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _amount(value: object) -> int | None:
    """A whole number of something, None for anything else: scripts are promised it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
