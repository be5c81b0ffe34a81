"""`ckptctl log`: the journals of a directory as readable lines, merged by time.

Owns selection and wording of lines. Reads files line by line with bounds; a damaged line is counted, never fatal.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ckpt_supervisor.text import one_line

LINE_BYTES_MAX = 1_000_000
FILES_MAX = 100_000

LEVELS = ("debug", "info", "warning", "error")
_STAMPS = frozenset({"ts", "mono_ms", "event", "level", "job", "attempt", "step_id", "epoch", "task", "host", "pid", "v"})
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "debug": "\x1b[2m"}
_AGO = re.compile(r"(\d+)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines to show; None or "" for all."""

    job: str = ""
    attempt: int | None = None
    rank: int | None = None
    round: int | None = None
    event: tuple[str, ...] = ()
    level: str = "info"
    since: datetime | None = None
    until: datetime | None = None
    grep: str = ""

    def takes(self, line: dict[str, Any]) -> bool:
        """Whether this line is wanted."""
        if LEVELS.index(self.level) > _level(line):
            return False
        if self.job and line.get("job") != self.job:
            return False
        if self.event and line.get("event") not in self.event:
            return False
        for key, value in (("attempt", self.attempt), ("round", self.round)):
            if value is not None and line.get(key) != value:
                return False
        if self.rank is not None and line.get("rank") != self.rank and not _names(line.get("ranks"), self.rank):
            return False
        stamp = moment(str(line.get("ts", "")))
        if (self.since and (stamp is None or stamp < self.since)) or (self.until and (stamp is None or stamp > self.until)):
            return False
        return not self.grep or self.grep.lower() in readable(line).lower()


def _names(ranks: object, rank: int) -> bool:
    """Whether a line that is about several ranks ([3, "8-15"], or a table of them) is about this one."""
    if isinstance(ranks, dict):
        return str(rank) in ranks
    for part in ranks if isinstance(ranks, list) else ():
        first, dash, last = str(part).partition("-")
        if first.isdecimal() and (not dash or last.isdecimal()) and int(first) <= rank <= int(last or first):
            return True
    return False


def read_time(text: str, now: datetime) -> datetime:
    """An instant: RFC 3339 (UTC when nothing else is said), or how long ago (`30m`, `2h`). Raises ValueError."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        try:
            return now - timedelta(seconds=int(ago[1]) * _SECONDS[ago[2]])
        except OverflowError:
            return datetime.min.replace(tzinfo=timezone.utc)
    stamp = moment(text)
    if stamp is None:
        raise ValueError(f"{text!r} is neither a time such as 2026-01-31T12:00:00 nor an age such as 30m")
    return stamp


def moment(text: str) -> datetime | None:
    """An RFC 3339 text as an instant, None if it is none."""
    try:
        stamp = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=timezone.utc)


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
        with self.path.open("rb") as file:
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


def parse(raw: bytes) -> dict[str, Any] | None:
    """One line of a journal, None if it is damaged."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "event" in line else None


def merged(tails: Iterable[Tail]) -> list[dict[str, Any]]:
    """The new lines of several files, in order of time."""
    lines = [line for tail in tails for line in tail.lines()]
    return sorted(lines, key=lambda line: (str(line.get("ts", "")), _number(line.get("mono_ms"))))


def readable(line: dict[str, Any], colour: bool = False) -> str:
    """One line for people: time, job and attempt, what happened, and its numbers."""
    stamp = moment(str(line.get("ts", "")))
    when = stamp.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if stamp else "?"
    who = f"{line.get('job', '?')}/{line.get('attempt', '?')}"
    details = " ".join(f"{key}={_value(value)}" for key, value in line.items() if key not in _STAMPS)
    text = one_line(f"{when}  {who}  {str(line.get('event', '?')).replace('_', ' '):<18} {details}".rstrip())
    tint = _COLOURS.get(str(line.get("level")), "") if colour else ""
    return f"{tint}{text}\x1b[0m" if tint else text


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
