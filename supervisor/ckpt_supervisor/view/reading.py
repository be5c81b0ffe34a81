"""How journals are read: which files there are, their lines one after the other, and what was passed over.

Owns the names of the files, the bounds of a line and of a read, and what damage is. Must not know what an event means, sort, or
hold more of a file than a block: a directory may hold a million lines. A file may hold anything, so every value of a line has to
be checked by whoever uses it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

LINE_BYTES_MAX = 1_000_000
"""Longer lines are damage: the journal's own are at most 64 KiB."""

BLOCK_BYTES = 131_072
"""So much of a file is read at a time."""

FILES_MAX = 100_000
VERSION = 1
"""The version of the lines that is known here (docs/journal.md)."""

_NAME_PARTS = 5
_HEAD_BYTES = 200
_EVENT = b'"event":"'
_EVENTS = (_EVENT, b'"event": "')
"""As the journal writes it, and as another JSON writer does."""

_CUTS = (b'"cut":true}', b'"cut": true}')
_STAMP_CHARS = 27
"""2026-01-31T12:00:00.000000Z, as the journal writes it."""

_MINUTES_MAX = 20_000
_SPAN_S = 10**11
"""Instants further from 1970 than some 3,000 years are nobody's."""

_decode = msgspec.json.Decoder().decode
_minutes: dict[str, int] = {}
"""What has been worked out: `2026-01-31T12:00:` is so many ns since 1970, and thousands of lines begin with it."""


class File(NamedTuple):
    """A journal, by its name: <job>-<attempt>-<step_id>-<epoch>-<task>.jsonl."""

    path: Path
    job: str
    attempt: int
    step_id: str
    epoch: int
    task: int


class Counts(msgspec.Struct):
    """What a reader has seen, and what of it could not be used."""

    lines: int = 0
    """Whole lines, wanted or not."""
    damaged: int = 0
    """No JSON, no event, or too long."""
    torn: int = 0
    """1 if the file ends in the middle of a line."""
    cut: int = 0
    """Lines of which their writer had left something out."""

    def add(self, other: Counts) -> None:
        """Take in what another one has counted."""
        self.lines += other.lines
        self.damaged += other.damaged
        self.torn += other.torn
        self.cut += other.cut


def file_of(path: Path) -> File | None:
    """What the name of a journal says; None for a name that is no journal's."""
    name = path.name
    parts = name.removesuffix(".jsonl").rsplit("-", _NAME_PARTS - 1)
    if len(parts) != _NAME_PARTS or not name.endswith(".jsonl"):
        return None
    job, attempt, step_id, epoch, task = parts
    if not all(part.isascii() and part.isdecimal() for part in (attempt, epoch, task)):
        return None
    return File(path, job, int(attempt), step_id, int(epoch), int(task))


def files(directory: Path) -> list[File]:
    """The journals of a checkpoint directory, by epoch and task. Raises OSError when they cannot be looked at."""
    return listed(directory)[0]


def listed(directory: Path) -> tuple[list[File], list[str]]:
    """The same, and the names of what else calls itself .jsonl there, which is not read. Raises OSError."""
    found: list[File] = []
    foreign: list[str] = []
    place = directory / "journal"
    with os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.endswith(".jsonl") or len(found) >= FILES_MAX:
                continue
            file = file_of(place / entry.name)
            if file is not None:
                found.append(file)
            elif len(foreign) < FILES_MAX:
                foreign.append(entry.name)
    return sorted(found, key=lambda file: (file.epoch, file.task, file.path.name)), sorted(foreign)


def opened(path: Path) -> int:
    """A descriptor of a regular file, for reading. Raises OSError: no link is followed, and no pipe may hold the reader up."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link, no journal of ours", str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "not a regular file", str(path))
    return fd


class Splitter:
    """Cuts what is read into lines. What has no end yet is kept for the next block, as far as a line may be long."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._rest = b""
        self._is_skipping = False

    @property
    def kept(self) -> int:
        """Bytes of a line whose end has not been seen."""
        return len(self._rest)

    @property
    def is_torn(self) -> bool:
        """The last line has no end."""
        return bool(self._rest) or self._is_skipping

    def lines(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends."""
        if self._is_skipping:
            _, end, block = block.partition(b"\n")
            if not end:
                return []
            self._is_skipping = False
        lines = (self._rest + block).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            self._counts.damaged += 1
            self._rest, self._is_skipping = b"", True
        return lines


class Reader:
    """Reads one journal from its begin to its end. `wanted`: only these events; other lines are passed over undecoded."""

    def __init__(self, path: Path, wanted: frozenset[str] | None = None) -> None:
        self.path = path
        self.counts = Counts()
        self._wanted = None if wanted is None else frozenset(name.encode(errors="surrogatepass") for name in wanted)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Its lines, in the order of the file. Raises OSError when it cannot be read."""
        splitter = Splitter(self.counts)
        fd = opened(self.path)
        try:
            while block := os.read(fd, BLOCK_BYTES):
                for raw in splitter.lines(block):
                    line = self._taken(raw)
                    if line is not None:
                        yield line
        finally:
            os.close(fd)
        self.counts.torn = int(splitter.is_torn)

    def _taken(self, raw: bytes) -> dict[str, Any] | None:
        counts = self.counts
        if not raw or raw.isspace():
            return None
        counts.lines += 1
        if raw.endswith(_CUTS):
            counts.cut += 1
        if self._wanted is not None:
            name = event_in(raw)
            if name is not None and name not in self._wanted:
                return None
        line = parse(raw)
        if line is None:
            counts.damaged += 1
            return None
        if self._wanted is not None and str(line["event"]).encode(errors="surrogatepass") not in self._wanted:
            return None
        return line


def event_in(raw: bytes) -> bytes | None:
    """What a line of the journal's own making tells of, without decoding it; None where it has to be decoded."""
    if not (raw.startswith(b'{"ts":') and raw.endswith(b"}") and len(raw) <= LINE_BYTES_MAX):
        return None
    for key in _EVENTS:
        at = raw.find(key, 0, _HEAD_BYTES)
        if at >= 0:
            break
    else:
        return None
    name = raw[at + len(key) : raw.find(b'"', at + len(key))]
    return None if b"\\" in name else name


def parse(raw: bytes) -> dict[str, Any] | None:
    """One line of a journal, None if it is damaged."""
    if len(raw) > LINE_BYTES_MAX:
        return None
    try:
        line = _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        line = _slowly(raw)
    return line if isinstance(line, dict) and "event" in line else None


def _slowly(raw: bytes) -> Any:
    """What is JSON for Python alone: half a surrogate pair, from a path that is no UTF-8."""
    try:
        return json.loads(raw, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refused(text: str) -> float:
    """NaN and Infinity, which Python alone reads and writes. Raises ValueError."""
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def moment_ns(ts: object) -> int | None:
    """An RFC 3339 text as nanoseconds since 1970, None if it is none. UTC when it says nothing else."""
    if not isinstance(ts, str):
        return None
    minute = _minutes.get(ts[:17])
    if minute is not None and len(ts) == _STAMP_CHARS and ts[26] == "Z" and ts[19] == ".":
        rest = ts[17:19] + ts[20:26]
        if rest.isascii() and rest.isdecimal() and ts[17] < "6":
            return minute + int(rest) * 1_000
    return _moment_slowly(ts)


def _moment_slowly(ts: str) -> int | None:
    stamp = moment(ts)
    if stamp is None:
        return None
    try:
        since = stamp - datetime(1970, 1, 1, tzinfo=timezone.utc)
    except OverflowError:
        return None
    if abs(since.days) * 86_400 > _SPAN_S:
        return None
    whole = (since.days * 86_400 + since.seconds) * 1_000_000_000
    if len(ts) == _STAMP_CHARS and ts[16] == ts[13] == ":" and ts[19] == "." and ts[26] == "Z":
        if len(_minutes) >= _MINUTES_MAX:
            _minutes.clear()
        _minutes[ts[:17]] = whole - stamp.second * 1_000_000_000
    return whole + since.microseconds * 1_000


def moment(text: str) -> datetime | None:
    """An RFC 3339 text as an instant, None if it is none."""
    try:
        stamp = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=timezone.utc)


def names_rank(ranks: object, rank: int) -> bool:
    """Whether a line's `ranks` ([3, "8-15"], or a table by rank) are about this one."""
    if isinstance(ranks, dict):
        return str(rank) in ranks
    return any(first <= rank <= last for first, last in spans(ranks))


def spans(ranks: object) -> Iterator[tuple[int, int]]:
    """[3, "8-15"] as (3, 3), (8, 15). What is none of these is passed over."""
    for part in ranks if isinstance(ranks, list) else ():
        first, dash, last = str(part).partition("-")
        if _is_number(first) and (not dash or _is_number(last)):
            yield int(first), int(last or first)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
