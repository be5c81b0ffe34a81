"""Writes what happened, one JSON line an event, to a file of this attempt and task.

Owns the file's name, the shape of a line and its bounds. Must not decide what is worth a line, and must never stop a
run: a line that cannot be written is counted and the run goes on. Each line is one write(2) to a file opened with
O_APPEND, so what was written is whole whatever happens to this process afterwards. Everything here may block on the
disk: `open` and `write` belong into one worker thread; only `stamp` belongs to the loop. structlog takes 150 to 190
ms to import, so `open` does that, after the command has started.
"""

from __future__ import annotations

import collections
import errno
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_Item = TypeVar("_Item")

LINE_BYTES_MAX = 65_536
"""Longer lines are cut, and say so: "cut": true."""

VERSION = 1
"""Of the lines (docs/journal.md). It rises only when what readers know changes its meaning; a new event or field does not."""

FULL_BYTES = 2_147_483_648
"""A file that has grown to this tells of warnings, errors, commits and the way out only: nobody saves that often on purpose."""

STOP_BYTES = 2 * FULL_BYTES
"""And one of this size of the way out only."""

THE_END = frozenset({"signal", "notice", "leaving", "requeue", "command_exited", "exit"})
"""What is written however large the file is: a few lines of each start."""

BUFFERED_MAX = 10_000
"""Events kept while the file is not open; later ones are counted and dropped."""

TEXT_CHARS_MAX = 8_000
"""Longer texts in a line are cut, even if there is room."""

_DEPTH_MAX = 8
_INT_BITS_MAX = 128
_ITEM_BYTES = 30  # A float, or null with its comma and brackets.
_CHAR_BYTES_MAX = 12  # "\\ud83d\\ude00"
_LEAST_BYTES = 400
_FRAME_BYTES = 2_000  # What the last value may take beyond its room, and `"cut":true`.
_IDENTITY = ("ts", "mono_ms", "event", "level", "job", "attempt", "step_id", "epoch", "task", "host", "pid", "v")
_RESERVED = frozenset({*_IDENTITY, "cut"})
_FILE_MODE = 0o640

LOOK_EVERY_MS = 5_000
"""So often it is looked whether the file still has a name."""


class Stamp(NamedTuple):
    """When an event was."""

    wall_ns: int
    mono_ms: int


class Who(NamedTuple):
    """Whose journal it is. `epoch` tells apart the starts within one attempt."""

    job: str
    attempt: int
    step_id: str
    epoch: int
    task: int


def file_name(who: Who) -> str:
    """`<job>-<attempt>-<step_id>-<epoch>-<task>.jsonl`: one file per attempt and task, never truncated."""
    return f"{who.job}-{who.attempt}-{who.step_id}-{who.epoch}-{who.task}.jsonl".replace("/", "_").replace("\0", "_")


def _say(line: str) -> None:
    try:
        os.write(2, f"ckpt-supervise: {line}\n".encode(errors="replace"))
    except OSError:
        return  # A broken stderr never stops a save.


class Journal:
    """Use `open` once, then `write`, in one thread. Events written before `open` are kept until then."""

    def __init__(self, directory: Path, who: Who, say: Callable[[str], None] = _say) -> None:
        self.path = directory / file_name(who)
        self.lost = 0
        """Lines that could not be written, and events dropped before the file was open."""
        self._who = who
        self._say = say
        self._said = False
        self._early: collections.deque[tuple[str, str, Stamp, Mapping[str, Any]]] = collections.deque()
        self._logger: Any = None
        self._fd: int | None = None
        self._torn = False
        self._written = False
        self._unreported = 0
        self._size = 0
        self._is_full = False
        self._looked_ms = 0

    def stamp(self) -> Stamp:
        """Now. Taken where the event happens, not where it is written."""
        return Stamp(time.time_ns(), time.monotonic_ns() // 1_000_000)

    def open(self) -> str | None:
        """Make the file, write what waited for it. What is wrong, or None; when it cannot be made each write tries again."""
        structlog = load_structlog()
        identity = {**self._who._asdict(), "host": socket.gethostname(), "pid": os.getpid(), "v": VERSION}
        # wrap_logger, and not structlog.configure: the configuration is ours alone, and nobody else's is touched.
        self._logger = structlog.wrap_logger(
            _Lines(self._put),
            processors=[in_order, structlog.processors.JSONRenderer(serializer=bounded_json)],
            wrapper_class=structlog.BoundLogger,
        ).bind(**identity)
        problem = self._make_file()
        early, self._early = self._early, collections.deque()
        for event, level, stamp, fields in early:
            self.write(event, level, stamp, fields)
        return problem

    def write(self, event: str, level: str, stamp: Stamp, fields: Mapping[str, Any]) -> None:
        """One line. A field with the name of one of the journal's own keys gets an underscore."""
        if self._logger is None:
            if len(self._early) < BUFFERED_MAX:
                self._early.append((event, level, stamp, fields))
            else:
                self._count_lost()
            return
        text = _instant(stamp)
        if self._is_removed():
            anew = {"text": "the file was removed; what was in it is gone"}
            self._logger.msg("journal_anew", level="warning", ts=text, mono_ms=stamp.mono_ms, fields=anew)
        if self._size > FULL_BYTES and not self._is_full:
            self._is_full = True
            full = {"bytes": self._size, "text": "only warnings, errors, commits and the way out are written from here on"}
            self._logger.msg("journal_full", level="warning", ts=text, mono_ms=stamp.mono_ms, fields=full)
        if self._size > FULL_BYTES and event not in THE_END:
            if self._size > STOP_BYTES or (level in ("debug", "info") and event != "commit"):
                return
        self._logger.msg(event, level=level, ts=text, mono_ms=stamp.mono_ms, fields=_own(fields))
        if self._unreported and self._written:
            count, self._unreported = self._unreported, 0
            self._logger.msg("journal_lines_lost", level="warning", ts=text, mono_ms=stamp.mono_ms, fields={"lines": count})

    def text(self, event: str, level: str, stamp: Stamp, fields: Mapping[str, Any]) -> str:
        """The same line for others than the file, without its end."""
        identity = {**self._who._asdict(), "host": socket.gethostname(), "pid": os.getpid(), "v": VERSION}
        own = {"ts": _instant(stamp), "mono_ms": stamp.mono_ms, "event": event, "level": level}
        return bounded_json(in_order(None, "", {**own, **identity, "fields": _own(fields)}))

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_removed(self) -> bool:
        """Whether somebody has removed the file; it is made anew then. (NFS hides a removal by this node until it is closed.)"""
        now_ms = time.monotonic_ns() // 1_000_000
        if self._fd is None or now_ms < self._looked_ms + LOOK_EVERY_MS:
            return False
        self._looked_ms = now_ms
        try:
            if os.fstat(self._fd).st_nlink > 0:
                return False
        except OSError as error:
            if error.errno != errno.ESTALE:  # What NFS says where another node has removed it.
                return False
        self.close()
        self._is_full = False
        # Not empty, it is the same one: what NFS has said was passing.
        return self._make_file() is None and self._size == 0

    def _make_file(self) -> str | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            return self._complain(error)
        return None

    def _put(self, line: str) -> None:
        """One line, one write. After half a line (a full disk takes what fits) the next one starts on a line of its own."""
        self._written = False
        if self._fd is None and self._make_file() is not None:
            self._count_lost()
            return
        assert self._fd is not None
        data = f"\n{line}\n".encode() if self._torn else f"{line}\n".encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._complain(error)
            self._count_lost()
            return
        self._size += written
        self._torn = written < len(data)
        self._written = not self._torn
        if self._torn:
            self._count_lost()

    def _count_lost(self) -> None:
        self.lost += 1
        self._unreported += 1

    def _complain(self, error: OSError) -> str:
        problem = f"{self.path}: {error.strerror}"
        if not self._said:
            self._said = True
            self._say(f"the journal cannot be written, going on without it: {problem}")
        return problem


def _own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event under names that are none of the journal's own."""
    return {f"{key}_" if key in _RESERVED else str(key): value for key, value in fields.items()}


def _instant(stamp: Stamp) -> str:
    """RFC 3339, UTC."""
    whole = datetime.fromtimestamp(stamp.wall_ns // 1_000_000_000, timezone.utc)
    when = whole.replace(microsecond=stamp.wall_ns // 1_000 % 1_000_000)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def load_structlog() -> Any:
    """structlog, without the rich that it would use for a console: 3.4 MB in each supervisor, for nothing.

    None in sys.modules is how Python is told that a module cannot be imported; it is taken back at once.
    """
    is_hidden = "rich" not in sys.modules
    if is_hidden:
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        if is_hidden:
            del sys.modules["rich"]
    return structlog


class _Lines:
    """The end of structlog's chain of processors."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self.msg = put


def in_order(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> dict[str, Any]:
    """When, what and who first, then the fields: lines that are read by people too."""
    # The fields come as one value: as keywords some names would clash with structlog's own parameters.
    return {**{key: entry[key] for key in _IDENTITY if key in entry}, **entry["fields"]}


def bounded_json(entry: Mapping[str, Any], **_options: Any) -> str:
    """The entry as one line of ASCII, of at most LINE_BYTES_MAX bytes with its end; what is cut is marked."""
    room = _Room(LINE_BYTES_MAX - _FRAME_BYTES)
    plain = room.plain(entry, _DEPTH_MAX)
    if room.cut:
        plain["cut"] = True
    return json.dumps(plain, separators=(",", ":"))


class _Room:
    """The bytes that a line still has. Work is bounded by it too: no more of a value is looked at than fits."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.cut = False

    def plain(self, value: Any, depth: int) -> Any:
        """The value as JSON can hold it: no NaN, no foreign objects, nothing too long or too deep."""
        self.left -= _ITEM_BYTES
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value.bit_length() <= _INT_BITS_MAX:
            self.left -= len(str(value))
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if depth > 0 and isinstance(value, Mapping):
            return {self._text(str(key)): self.plain(item, depth - 1) for key, item in self._while_room(value.items(), depth)}
        if depth > 0 and isinstance(value, list | tuple | set | frozenset):
            return [self.plain(item, depth - 1) for item in self._while_room(value, depth)]
        return self._text(hex(value) if isinstance(value, int) else str(value))

    def _while_room(self, items: Iterable[_Item], depth: int) -> Iterator[_Item]:
        """The items that there is room for. One field takes half of what is left at most: those after it are to be seen too."""
        floor = _LEAST_BYTES if depth == _DEPTH_MAX else max(_LEAST_BYTES, self.left // 2)
        for item in items:
            if self.left < floor:
                self.cut = True
                return
            yield item

    def _text(self, text: str) -> str:
        kept = text[:TEXT_CHARS_MAX]
        if len(json.dumps(kept)) > self.left:
            kept = kept[: max(0, self.left // _CHAR_BYTES_MAX)]
        if len(kept) < len(text):
            self.cut = True
            kept = f"{kept}... [{len(text) - len(kept)} more]"
        self.left -= len(json.dumps(kept))
        return kept


class Damage:
    """What `read_lines` passed over."""

    lines = 0
    torn = False
    """The last line has no end: it is being written, or its writer was killed or found the disk full."""


def read_lines(path: Path, damage: Damage | None = None) -> Iterator[dict[str, Any]]:
    """The events of a journal. Damaged lines are counted and passed over. Raises OSError when the file cannot be read."""
    damage = damage if damage is not None else Damage()
    with path.open("rb") as file:
        while raw := file.readline(LINE_BYTES_MAX):
            damage.torn = not raw.endswith(b"\n")
            if not raw.strip():
                continue
            try:
                entry = json.loads(raw)
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict):
                yield entry
            else:
                damage.lines += 1
