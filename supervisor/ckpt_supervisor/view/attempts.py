"""The starts of a run as its journals tell of them: when each began, how far it came, and how it ended.

Owns the reading of task 0's journals for people. Must not decide anything, nor ask anybody else: whether a start that has written
no last word is alive is not known here. Reads the head and the tail of the newest few journals; a damaged line is passed over,
and what is not written down is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.view.log import moment, parse

NAME_PARTS = 5
"""A journal's name is <job>-<attempt>-<step_id>-<epoch>-<task>."""

HEAD_BYTES = 65_536
TAIL_BYTES = 262_144
STARTS_MAX = 50
"""So many of the newest starts are read."""

POSITIONS_MAX = 10
"""The speed is that between so many of the newest positions that the journal tells of."""

WARNINGS_MAX = 3

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


def attempts(directory: Path, job: str = "", step_id: str = "") -> list[Attempt]:
    """The starts of this job (of any with ""), oldest first. Raises OSError when the journals cannot be looked at."""
    found: list[Attempt] = []
    for epoch, name, path in _journals(directory):
        if len(found) >= STARTS_MAX:
            break
        if (job and name[0] != job) or (step_id and name[2] != step_id):
            continue
        number = int(name[1]) if name[1].isdecimal() else 0
        lines, is_whole = _lines(path)
        found.append(read(Attempt(epoch, name[0], number, name[2], is_whole=is_whole), lines))
    return found[::-1]


def jobs(directory: Path) -> list[str]:
    """Names of the jobs that have journals here, the newest start's first. Raises OSError."""
    return list(dict.fromkeys(name[0] for _, name, _ in _journals(directory)))


def _journals(directory: Path) -> list[tuple[int, tuple[str, str, str], Path]]:
    """Task 0's as (epoch, (job, attempt, step), path), newest start first. Raises OSError."""
    found: list[tuple[int, tuple[str, str, str], Path]] = []
    try:
        names = store.list_names(directory / store.JOURNAL)
    except FileNotFoundError:
        return []
    for name in names:
        parts = name.removesuffix(".jsonl").rsplit("-", NAME_PARTS - 1)
        if name.endswith(".jsonl") and len(parts) == NAME_PARTS and parts[4] == "0" and parts[3].isdecimal():
            found.append((int(parts[3]), (parts[0], parts[1], parts[2]), directory / store.JOURNAL / name))
    return sorted(found, reverse=True)


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Head and tail of a journal, and whether that is all of it. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        rest = max(len(head), size - TAIL_BYTES)
        file.seek(rest)
        tail = file.read(TAIL_BYTES)
    is_whole = rest == len(head)
    data = head + tail if is_whole else head + b"\n" + tail
    return [line for line in map(parse, data.splitlines()) if line is not None], is_whole


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
