"""How far the clocks of a step's nodes are apart, from what their journals say of the same message.

Owns the pairs of lines of which one cannot have come before the other, and what follows from them. Must not judge which clock
is right: all are told against the coordinator's (task 0). A word that task 3 sends is written down by task 3, then by the
coordinator; what the coordinator sends is written down there first. So each pair bounds the difference from one side, however
slow the network is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ckpt_supervisor.view.plain import harmless
from ckpt_supervisor.view.reading import Counts, File, Splitter, event_in, moment_ns, opened, parse, spans

HEAD_BYTES = 16_384
LONG_HEAD_BYTES = 196_608
COORDINATOR_HEAD_BYTES_MAX = 16_777_216
"""So much of a journal is looked at: the first pairs come when a step starts, and the coordinator's file tells of every task.
The long one is for a command as long as a line of the journal can be."""

SLACK_MS = 20
"""Differences below this are none: a line is stamped at the end of the turn that it tells of."""

LARGE_MS = 1_000
"""From here on a difference is told: deadlines rest on clocks."""

PAIRED_MAX = 8
"""So many lines of a task are enough: its start and a save or two."""

RANKS_MAX = 100_000
HOST_CHARS_MAX = 64

_PAIRED = frozenset(
    {
        b"rank_hello",
        b"rank_gone",
        b"command_exited",
        b"verified",
        b"task_joined",
        b"go",
        b"command_started",
        b"command_not_started",
    }
)
"""A task writes down the first four, and then the coordinator does. The coordinator lets a task in, which then starts the
command; it says Go, and then files are verified."""


class Offset(msgspec.Struct, frozen=True):
    """A task's clock is ahead of the coordinator's by `ms`, give or take `within_ms`; None: by that much at least."""

    ms: float
    within_ms: float | None
    host: str
    to_host: str

    @property
    def ns(self) -> int:
        """To be taken from an instant of the task's, for the coordinator's."""
        return int(self.ms * 1_000_000)

    @property
    def is_large(self) -> bool:
        """Whether it is to be told."""
        return abs(self.ms) >= LARGE_MS

    @property
    def text(self) -> str:
        """A sentence of it."""
        way = "ahead of" if self.ms > 0 else "behind"
        least = "at least " if self.within_ms is None else ""
        return f"the clock of {self.host} is {least}{abs(self.ms) / 1000:.1f} s {way} that of {self.to_host}"


class Bounds:
    """What two journals, the coordinator's and one task's, say of the difference of their clocks."""

    def __init__(self) -> None:
        self.lower: int | None = None
        self.upper: int | None = None

    def sent_up(self, task_ns: int, coordinator_ns: int) -> None:
        """The task wrote it down before the coordinator did."""
        bound = task_ns - coordinator_ns
        self.lower = bound if self.lower is None else max(self.lower, bound)

    def sent_down(self, coordinator_ns: int, task_ns: int) -> None:
        """The coordinator wrote it down before the task did what follows."""
        bound = task_ns - coordinator_ns
        self.upper = bound if self.upper is None else min(self.upper, bound)

    def offset(self, host: str, to_host: str) -> Offset | None:
        """None where the clocks may well agree, or where the pairs contradict each other: a clock was set meanwhile."""
        lower = None if self.lower is None else self.lower / 1e6
        upper = None if self.upper is None else self.upper / 1e6
        is_ahead, is_behind = lower is not None and lower > SLACK_MS, upper is not None and upper < -SLACK_MS
        if not (is_ahead or is_behind):
            return None
        if lower is not None and upper is not None:
            if lower > upper + SLACK_MS:
                return None
            return Offset((lower + upper) / 2, abs(upper - lower) / 2, host, to_host)
        bound = lower if lower is not None else upper
        assert bound is not None
        return Offset(bound, None, host, to_host)


def offsets(files: Iterable[File]) -> dict[tuple[int, int], Offset]:
    """By (epoch, task): whose clock is not the coordinator's. Files that cannot be read say nothing.

    All files of an epoch have to be among them; those of the coordinator's own host are not looked into.
    """
    found: dict[tuple[int, int], Offset] = {}
    ordered = sorted(files, key=lambda file: (file.epoch, file.job, file.step_id, file.task))
    for (epoch, _, _), group in itertools.groupby(ordered, key=lambda file: (file.epoch, file.job, file.step_id)):
        members = list(group)
        if members[0].task == 0 and len(members) > 1:
            found.update({(epoch, task): offset for task, offset in _of_one_start(members)})
    return found


def _of_one_start(members: Sequence[File]) -> Iterator[tuple[int, Offset]]:
    limit = min(COORDINATOR_HEAD_BYTES_MAX, HEAD_BYTES * len(members))
    told = _Told(_head(members[0], limit, PAIRED_MAX * len(members)))
    for file in members[1:]:
        if not file.task:
            continue
        lines = _head(file, HEAD_BYTES, PAIRED_MAX)
        host = _host(lines[0]) if lines else ""
        if not host or not told.host or host == told.host:
            continue
        offset = told.compare(file.task, lines).offset(host, told.host)
        if offset is not None:
            yield file.task, offset


class _Told:
    """What the coordinator's journal says of the tasks' words, and when."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.host = ""
        self._joined: dict[int, int] = {}
        self._go: dict[int, int] = {}
        self._up: dict[tuple[str, int, int | None], int] = {}
        """When it heard of an event of (rank, process) or (task, round) first; without the process where several are one line."""
        for line in lines:
            self.host = self.host or _host(line)
            at = moment_ns(line.get("ts"))
            if at is not None:
                self._take(line, at)

    def _take(self, line: dict[str, Any], at: int) -> None:
        event, task = line["event"], _number(line.get("of_task"))
        match event:
            case "task_joined" if task is not None:
                self._joined.setdefault(task, at)
            case "go":
                self._go.setdefault(_number(line.get("round")) or 0, at)
            case "rank_hello" | "rank_gone":
                for key in _of_ranks(line):
                    self._up.setdefault(key, at)
            case "verified" | "command_exited" if task is not None:
                self._up.setdefault((event, task, _number(line.get("round"))), at)
            case _:
                pass

    def compare(self, task: int, lines: Iterable[dict[str, Any]]) -> Bounds:
        """What a task's journal says against it. Of an event that comes again only the first one is sure to be the same."""
        bounds = Bounds()
        seen: set[tuple[str, int, int | None]] = set()
        for line in lines:
            at, event = moment_ns(line.get("ts")), line["event"]
            if at is None:
                continue
            if event in ("command_started", "command_not_started") and task in self._joined:
                bounds.sent_down(self._joined[task], at)
            number = _number(line.get("round"))
            if event == "verified" and number in self._go:
                bounds.sent_down(self._go[number], at)
            keys = _of_ranks(line) if event in ("rank_hello", "rank_gone") else [(str(event), task, number)]
            for key in keys:
                told = self._up.get(key)
                first_of = (key[0], key[1], None)
                if told is None and first_of not in seen:
                    told = self._up.get(first_of)
                if told is not None and key not in seen:
                    bounds.sent_up(at, told)
                seen |= {key, first_of}
        return bounds


def _of_ranks(line: dict[str, Any]) -> list[tuple[str, int, int | None]]:
    """The keys of a line that is about one rank's process, or about several ranks."""
    event, rank = str(line["event"]), _number(line.get("rank"))
    if rank is not None:
        return [(event, rank, _number(line.get("rank_pid")))]
    many = (range(first, last + 1) for first, last in spans(line.get("ranks")))
    return [(event, number, None) for number in itertools.islice(itertools.chain.from_iterable(many), RANKS_MAX)]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _host(line: dict[str, Any]) -> str:
    host = line.get("host")
    return harmless(host, HOST_CHARS_MAX) if isinstance(host, str) else ""


def _head(file: File, limit: int, most: int) -> list[dict[str, Any]]:
    """The first line of a file, and those near its begin that may be half of a pair."""
    try:
        fd = opened(file.path)
        try:
            data = os.pread(fd, limit, 0)
            if len(data) == limit and data.count(b"\n") < most:
                data = os.pread(fd, max(limit, LONG_HEAD_BYTES), 0)
        finally:
            os.close(fd)
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for raw in Splitter(Counts()).lines(data):
        if len(found) >= most:
            break
        name = event_in(raw)
        if not found or name is None or name in _PAIRED:
            line = parse(raw)
            if line is not None and (not found or str(line["event"]).encode(errors="replace") in _PAIRED):
                found.append(line)
    return found
