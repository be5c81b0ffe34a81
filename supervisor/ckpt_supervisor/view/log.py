"""`ckptctl log`: which lines of the journals are shown, and how a line reads.

Owns selection and wording of lines. Must not read more than a growing file (merging.py does the rest), nor write anywhere.
Nothing of a line reaches a terminal that the terminal would obey.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_supervisor.view.plain import harmless
from ckpt_supervisor.view.reading import FILES_MAX, LINE_BYTES_MAX, moment, moment_ns, names_rank, opened, parse

if TYPE_CHECKING:
    from ckpt_supervisor.view.merging import Sift

__all__ = [
    "FILES_MAX", "LEVELS", "LINE_BYTES_MAX", "Nodes", "Tail", "Wanted", "heading", "journals", "merged", "moment", "parse",
    "read_time", "readable",
]  # fmt: skip

LINE_CHARS_MAX = 20_000
"""So much of a line is shown; a stack of the journal's own is at most 8,000 characters."""

LEVELS = ("debug", "info", "warning", "error")

_STAMPS = frozenset({"ts", "mono_ms", "event", "level", "job", "attempt", "step_id", "epoch", "task", "host", "pid", "v"})
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "debug": "\x1b[2m"}
_DIM, _BOLD, _END = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_AGO = re.compile(r"([0-9]+)\s*(s|m|h|d|w)\s*")
_AGES = re.compile(rf"(?:{_AGO.pattern})+")
_TODAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_EVENT_CHARS_MAX = 80
_NAME_CHARS_MAX = 200
_LETTERS = re.compile(r"[a-z]{2,}")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines to show; None or "" for all."""

    job: str = ""
    step_id: str = ""
    attempt: int | None = None
    epoch: int | None = None
    rank: int | None = None
    round: int | None = None
    event: tuple[str, ...] = ()
    level: str = "info"
    since: datetime | None = None
    until: datetime | None = None
    grep: str = ""
    node: str = ""

    def takes(self, line: dict[str, Any], at_ns: int | None = None, nodes: Nodes | None = None) -> bool:
        """Whether this line is wanted. `at_ns`: when it was, if its own clock is not to be believed."""
        if LEVELS.index(self.level) > _level(line):
            return False
        if self.job and not self.takes_job(str(line.get("job"))):
            return False
        if self.event and line.get("event") not in self.event:
            return False
        if self.step_id and line.get("step_id") != self.step_id:
            return False
        for key, value in (("attempt", self.attempt), ("epoch", self.epoch), ("round", self.round)):
            if value is not None and line.get(key) != value:
                return False
        if self.rank is not None and line.get("rank") != self.rank and not names_rank(line.get("ranks"), self.rank):
            return False
        if self.node and not (nodes or Nodes()).has(line, self.node):
            return False
        if self.since is not None or self.until is not None:
            at_ns = moment_ns(line.get("ts")) if at_ns is None else at_ns
            if at_ns is None or not _instant(self.since, at_ns) <= at_ns <= _instant(self.until, at_ns):
                return False
        return not self.grep or self.grep.lower() in readable(line).lower()

    def takes_job(self, name: str) -> bool:
        """Whether this job is wanted: itself, or the array that it is an element of."""
        return not self.job or name == self.job or name.startswith(f"{self.job}_")

    def takes_start(self, job: str, step_id: str, attempt: int, epoch: int) -> bool:
        """Whether this start may have wanted lines."""
        return (
            self.takes_job(job)
            and self.step_id in ("", step_id)
            and self.attempt in (None, attempt)
            and self.epoch in (None, epoch)
        )

    def sift(self) -> Sift:
        """What of this can be told before a line is decoded."""
        from ckpt_supervisor.view.merging import Sift  # Here: whoever wants a line's words alone does not need the merge.

        text = self.grep.lower()
        # An escape and `node=` are of `readable`'s own making.
        letters = "" if "\\" in text or "node" in text else max(_LETTERS.findall(text), key=len, default="")
        return Sift(
            levels=frozenset(name.encode() for name in LEVELS[: LEVELS.index(self.level)]),
            events=frozenset(name.encode(errors="replace") for name in self.event) or None,
            since_ns=None if self.since is None else _instant(self.since, 0),
            until_ns=None if self.until is None else _instant(self.until, 0),
            letters=letters.encode(),
        )


def _instant(moment_of: datetime | None, otherwise: int) -> int:
    """Nanoseconds since 1970, also of a moment that no clock has ever shown."""
    if moment_of is None:
        return otherwise
    since = moment_of - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000


class Nodes:
    """Which tasks of which start are on which node, as coordinators tell of them."""

    def __init__(self, hosts: dict[int, dict[int, str]] | None = None) -> None:
        self.hosts = {} if hosts is None else hosts

    def has(self, line: dict[str, Any], node: str) -> bool:
        """Whether a line was written on this node, or is about one of its tasks."""
        if _same(line.get("host"), node) or _same(line.get("host_of_task"), node):
            return True
        epoch, task = line.get("epoch"), line.get("of_task")
        if not isinstance(epoch, int):
            return False
        tasks = self.hosts.get(epoch, {})
        many = line.get("of_tasks")
        return _same(tasks.get(task) if isinstance(task, int) else None, node) or (
            isinstance(many, list) and any(_same(host, node) and names_rank(many, number) for number, host in tasks.items())
        )


def _same(host: object, node: str) -> bool:
    """`node012` is node012.cluster.example too."""
    return isinstance(host, str) and (host == node or host.partition(".")[0] == node)


def read_time(text: str, now: datetime) -> datetime:
    """An instant: RFC 3339 (UTC if it does not say), `09:06` today, or how long ago (`30m`, `2h30m`). Raises ValueError."""
    today = _TODAY.fullmatch(text.strip())
    if today:
        return now.replace(hour=int(today[1]), minute=int(today[2]), second=int(today[3] or 0), microsecond=0)
    if _AGES.fullmatch(text.strip()):
        try:
            return now - timedelta(seconds=sum(int(many) * _SECONDS[unit] for many, unit in _AGO.findall(text)))
        except (OverflowError, ValueError):  # int() refuses thousands of digits.
            return datetime.min.replace(tzinfo=timezone.utc)
    stamp = moment(text.strip())
    if stamp is None:
        raise ValueError(f"{text!r} is neither a time such as 2026-01-31T12:00:00 nor an age such as 30m; 09:30 is one of today")
    return stamp


def journals(directory: Path) -> list[Path]:
    """The journal files of a checkpoint directory. Raises OSError when they cannot be looked at."""
    place = directory / "journal"
    return sorted(path for path in place.iterdir() if path.suffix == ".jsonl")[:FILES_MAX]


@dataclasses.dataclass(slots=True)
class Tail:
    """A journal file that is read on as it grows.

    `damaged` counts lines that could not be read, `torn` says that the file ends in the middle of a line.
    """

    path: Path
    offset: int = 0
    damaged: int = 0
    torn: bool = False

    def lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are new; a line without its end waits for the next call. Raises OSError."""
        with os.fdopen(opened(self.path), "rb") as file:
            file.seek(self.offset)
            while True:
                raw = file.readline(LINE_BYTES_MAX)
                # Torn, or still being written.
                self.torn = bool(raw) and not raw.endswith(b"\n") and len(raw) < LINE_BYTES_MAX
                if not raw or self.torn:
                    return
                self.offset += len(raw)
                line = parse(raw)
                if line is None:
                    self.damaged += 1
                else:
                    yield line


def merged(tails: Iterable[Tail]) -> list[dict[str, Any]]:
    """The new lines of several files, in order of time."""
    lines = [line for tail in tails for line in tail.lines()]
    return sorted(lines, key=lambda line: (str(line.get("ts", "")), _number(line.get("mono_ms"))))


def readable(line: dict[str, Any], colour: bool = False, ahead_ns: int = 0) -> str:
    """One line for people: time, job and attempt, what happened, and its numbers; task and node where it was not task 0.

    `ahead_ns`: by how much the clock that has stamped it is ahead of the coordinator's.
    """
    when = _when(line.get("ts"), ahead_ns)
    who = f"{line.get('job', '?')}/{line.get('attempt', '?')}"
    event = str(line.get("event", "?")).replace("_", " ")
    details = " ".join([f"{key}={_value(value)}" for key, value in line.items() if key not in _STAMPS])
    task = line.get("task")
    if isinstance(task, int) and task > 0:
        details = f"{details} task={task} node={_value(line.get('host'))}".lstrip()
    text = harmless(f"{when}  {who}  {event:<18} {details}".rstrip(), LINE_CHARS_MAX)
    if not colour:
        return text
    tint = _COLOURS.get(str(line.get("level")), "")
    if tint:
        return f"{tint}{text}{_END}"
    start = harmless(f"{when}  {who}  ", _NAME_CHARS_MAX)
    name = harmless(event, _EVENT_CHARS_MAX)
    if not text.startswith(start + name):
        return text
    return f"{_DIM}{start}{_END}{_BOLD}{name}{_END}{text[len(start) + len(name) :]}"


def heading(line: dict[str, Any], tasks: int, colour: bool) -> str:
    """What goes between two starts on a terminal."""
    step = line.get("step_id")
    words = [f"job {line.get('job', '?')}", f"attempt {line.get('attempt', '?')}"]
    words += [f"step {step}"] if step not in (None, "", "0", "local", "batch") else []
    words += [str(line.get("host", "?")), f"{tasks} tasks" if tasks > 1 else "1 task", f"start {line.get('epoch', '?')}"]
    text = harmless("-- " + ", ".join(words) + " --", _NAME_CHARS_MAX)
    return f"{_BOLD}{text}{_END}" if colour else text


def _when(ts: object, ahead_ns: int) -> str:
    """To the millisecond, as 2026-01-31 12:00:01.500."""
    at_ns = moment_ns(ts)
    if at_ns is None:
        return "?"
    if not ahead_ns and isinstance(ts, str) and len(ts) == 27 and ts[26] == "Z":
        return f"{ts[:10]} {ts[11:23]}"
    stamp = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=(at_ns - ahead_ns) // 1_000)
    return stamp.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"' if " " in value or not value else value
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"))
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _level(line: dict[str, Any]) -> int:
    level = line.get("level")
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0
