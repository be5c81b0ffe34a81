"""Many journals as one stream of lines in order of time, in memory that does not grow with them.

Owns the order of lines: by time, on the coordinator's clock (clocks.py), and a start after the starts before it. Must not know
what is wanted beyond a line's first keys, nor how lines look. No file is kept open: each is read a block at a time, so neither
the number of files nor one that vanishes, is cut or replaced meanwhile matters. Epochs rise with every start in a directory, so
only files of the starts that overlap, and of the next one, are looked into: the first line does not wait for all of them.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ckpt_supervisor.view import clocks
from ckpt_supervisor.view.clocks import Offset
from ckpt_supervisor.view.reading import BLOCK_BYTES, VERSION, Counts, File, Splitter, moment_ns, opened, parse

BUFFERED_BYTES_MAX = 33_554_432
"""What is read ahead of all files together."""

BLOCK_BYTES_MIN = 4_096
FIRST_BYTES = 16_384
TAIL_BYTES = 16_384
MARGIN_NS = 3_600_000_000_000
"""A start is looked into when the lines before it come this close: its files' clocks may differ by so much."""

TASKS_TOLD_MAX = 100_000
NAMES_MAX = 10_000

_HEAD = re.compile(rb'\{"ts": ?"([0-9:.T-]{26}Z)", ?"mono_ms": ?-?[0-9]+, ?"event": ?"([^"\\]+)", ?"level": ?"([a-z]+)"')
_EXIT = re.compile(rb'"event": ?"exit"')
"""How the journal's own lines begin, with blanks as another JSON writer puts them; others are decoded to be judged."""


class Sift(NamedTuple):
    """What can be told by a line's first keys. `levels`: those that are left out; instants on the coordinator's clock."""

    levels: frozenset[bytes] = frozenset()
    events: frozenset[bytes] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    letters: bytes = b""
    """Lower-case letters that a wanted line holds as they are."""


class Seen:
    """What was noticed on the way, for a word about it afterwards."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        """Events that there are."""
        self.tasks: dict[int, dict[int, str]] = {}
        """By epoch: the tasks that its coordinator tells of, and their hosts."""
        self.offsets: dict[tuple[str, str], Offset] = {}
        """Large differences of clocks, by (host, whose clock it was compared with)."""
        self.unreadable: dict[str, str] = {}
        """Files that could not be read, or not to their ends, and why."""
        self.newer = 0
        """The highest version of lines above the one that is known."""

    def task_joined(self, epoch: int, line: dict[str, Any] | None) -> None:
        """The coordinator tells of a task."""
        task, host = (None, "") if line is None else (line.get("of_task"), line.get("host_of_task"))
        tasks = self.tasks.setdefault(epoch, {})
        if isinstance(task, int) and len(tasks) < TASKS_TOLD_MAX:
            tasks[task] = str(host)

    def version(self, line: dict[str, Any] | None) -> None:
        """The version of a file's lines, by its first one."""
        number = None if line is None else line.get("v")
        if isinstance(number, int) and number > VERSION:
            self.newer = max(self.newer, number)


class Source:
    """One journal that is read on. `pending`: wanted lines of the newest block as (order, line), the next one last."""

    def __init__(self, file: File, sift: Sift, seen: Seen) -> None:
        self.file = file
        self.offset: Offset | None = None
        self.shift_ns = 0
        """Added for the order alone, where the clocks of two starts contradict each other."""
        self.counts = Counts()
        self.pending: list[tuple[int, bytes]] = []
        self._sift, self._seen = sift, seen
        self._splitter = Splitter(self.counts)
        self._position = 0
        self._inode: int | None = None
        self._last_ns = -(2**63)
        self._at_ns = self._last_ns

    def fill(self, block_bytes: int) -> bool:
        """Read until there is a wanted line; False at the file's end. A file that cannot be read ends there, and is noted."""
        while not self.pending:
            try:
                block = self._read(block_bytes)
            except OSError as error:
                self._seen.unreadable[self.file.path.name] = error.strerror or str(error)
                return False
            if not block:
                return False
            self._take_in(block)
        return True

    def _read(self, block_bytes: int) -> bytes:
        fd = opened(self.file.path)
        try:
            status = os.fstat(fd)
            if (self._inode is not None and status.st_ino != self._inode) or status.st_size < self._position:
                # Cut or replaced: it is another file, from its begin.
                self._position, self._splitter = 0, Splitter(self.counts)
            self._inode = status.st_ino
            block = os.pread(fd, block_bytes, self._position)
        finally:
            os.close(fd)
        if not self._position and block:
            self._seen.version(parse(block.partition(b"\n")[0]))
        self._position += len(block)
        self.counts.torn = int(self._splitter.is_torn)
        return block

    def _take_in(self, block: bytes) -> None:
        found: list[tuple[int, bytes]] = []
        before = self._at_ns
        is_ordered = True
        for raw in self._splitter.lines(block):
            if self._wants(raw):
                is_ordered = is_ordered and self._at_ns >= before
                before = self._at_ns
                found.append((before, raw))
        self.counts.torn = int(self._splitter.is_torn)
        if not is_ordered:
            found.sort(key=_instant)  # A little: an event is stamped when it happens, and written by another thread.
        last, shift_ns = self._last_ns, self.shift_ns
        for place, (at, raw) in enumerate(found):
            # A clock that was set back does not send lines before those that were written earlier.
            last = max(last, at + shift_ns)
            found[place] = (last, raw)
        self._last_ns = last
        found.reverse()
        self.pending = found

    def _wants(self, raw: bytes) -> bool:
        """Whether this line is worth decoding; its instant is then in `_at_ns`."""
        match = _HEAD.match(raw)
        if match is None or not raw.endswith(b"}"):
            if not raw or raw.isspace():
                return False
            line = parse(raw)
            if line is None:
                self.counts.lines += 1
                self.counts.damaged += 1
                return False
            stamp = str(line.get("ts"))
            name, level = (str(line.get(key)).encode(errors="replace") for key in ("event", "level"))
        else:
            start, name, level = match.groups()
            stamp = start.decode()
        self.counts.lines += 1
        sift, seen = self._sift, self._seen
        if name not in seen.names and len(seen.names) < NAMES_MAX:
            seen.names.add(name)
        if name == b"task_joined" and not self.file.task:
            seen.task_joined(self.file.epoch, parse(raw))
        if level in sift.levels or (sift.events is not None and name not in sift.events):
            return False
        if sift.letters and sift.letters not in raw.lower():
            return False
        at = moment_ns(stamp)
        if at is not None:
            self._at_ns = at if self.offset is None else at - self.offset.ns
        if sift.since_ns is not None and (at is None or self._at_ns < sift.since_ns):
            return False
        return sift.until_ns is None or (at is not None and self._at_ns <= sift.until_ns)


def _instant(pair: tuple[int, bytes]) -> int:
    return pair[0]


class Merge:
    """The lines of these files, which may be added to while it runs.

    `tell`: of a difference of clocks, once for each pair of hosts, and whether instants are corrected by it or the order alone.
    """

    def __init__(self, sift: Sift, seen: Seen, tell: Callable[[Offset, bool], None]) -> None:
        self._sift, self._seen, self._tell = sift, seen, tell
        self.sources: dict[str, Source] = {}

    def lines(self, files: Iterable[File]) -> Iterator[tuple[Source, bytes]]:
        """Of these files, which are new here, in order."""
        ordered = sorted(files, key=lambda file: (file.epoch, file.task, file.path.name))
        starts = [list(group) for _, group in itertools.groupby(ordered, key=lambda file: file.epoch)][::-1]
        heap: list[tuple[int, int, int, str, Source]] = []
        following: _Start | None = None
        before: _End | None = None
        while heap or starts or following is not None:
            if following is None and starts:
                following = _Start(self._not_before(starts[-1][0]), [])
                if self._sift.until_ns is not None and following.begin_ns > self._sift.until_ns:
                    starts.pop()
                    following = None
                    continue
            if following is not None and (not heap or heap[0][0] >= following.begin_ns):
                if following.sources:
                    for source in following.sources:
                        heapq.heappush(heap, _entry(source))
                    following = None
                else:
                    following, before = self._looked_into(starts.pop(), before)
                continue
            yield from self._run(heap, heap[0][-1], 2**63 if following is None else following.begin_ns)

    def again(self, sources: Iterable[Source]) -> Iterator[tuple[Source, bytes]]:
        """What these have grown by, in order."""
        heap = [_entry(source) for source in sources if source.fill(BLOCK_BYTES)]
        heapq.heapify(heap)
        while heap:
            yield from self._run(heap, heap[0][-1], 2**63)

    def measure(self, files: Iterable[File]) -> None:
        """Compare the clocks of one start."""
        for (epoch, task), offset in clocks.offsets(files).items():
            for source in self.sources.values():
                if (source.file.epoch, source.file.task) == (epoch, task):
                    source.offset = offset
            key = (offset.host, offset.to_host)
            if offset.is_large and key not in self._seen.offsets:
                self._seen.offsets[key] = offset
                self._tell(offset, True)

    def _run(self, heap: list[Any], source: Source, until: int) -> Iterator[tuple[Source, bytes]]:
        """Lines of the first source for as long as it is the first."""
        rest = heap[1:3]
        limit = min(until, min(rest)[0]) if rest else until
        pending = source.pending
        yield source, pending.pop()[1]
        while pending and pending[-1][0] < limit:
            yield source, pending.pop()[1]
        if not pending and not source.fill(self._block_bytes(len(heap))):
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, _entry(source))

    def _block_bytes(self, files: int) -> int:
        return max(BLOCK_BYTES_MIN, min(BLOCK_BYTES, BUFFERED_BYTES_MAX // max(1, files)))

    def _not_before(self, file: File) -> int:
        """What is certainly earlier than a start's first line, from one look at its coordinator's file."""
        begin_ns = None if file.task else moment_ns(_edges(file)[0].get("ts"))
        return -(2**63) if begin_ns is None else begin_ns - MARGIN_NS

    def _looked_into(self, members: list[File], before: _End | None) -> tuple[_Start | None, _End | None]:
        """The files of one start, each with its first wanted lines; None where there are none."""
        made = [Source(file, self._sift, self._seen) for file in members]
        self.sources.update({source.file.path.name: source for source in made})
        self.measure(members)
        end, shift_ns = _shift(members[0], before)
        if shift_ns and end is not None:
            self._contradiction(end, shift_ns)
        for source in made:
            source.shift_ns = shift_ns
            source.fill(min(FIRST_BYTES, self._block_bytes(2 * len(made))))
        some = [source for source in made if source.pending]
        begin_ns = min((source.pending[-1][0] for source in some), default=0)
        return _Start(begin_ns, some) if some else None, end or before

    def _contradiction(self, end: _End, shift_ns: int) -> None:
        offset = Offset(-shift_ns / 1e6, None, end.host, end.before)
        key = (offset.host, offset.to_host)
        if offset.is_large and key not in self._seen.offsets:
            self._seen.offsets[key] = offset
            self._tell(offset, False)


class _Start(NamedTuple):
    """Files of one epoch that have wanted lines, the first of them at `begin_ns`.

    Without files it is not looked into yet, and no line of it is earlier than that.
    """

    begin_ns: int
    sources: list[Source]


class _End(NamedTuple):
    """How a coordinator's journal ends, on its own clock and shifted as its lines are."""

    file: File
    host: str
    exit_ns: int | None
    before: str
    """The host of the start before."""


def _entry(source: Source) -> tuple[int, int, int, str, Source]:
    file = source.file
    return source.pending[-1][0], file.epoch, file.task, file.path.name, source


def _shift(file: File, before: _End | None) -> tuple[_End | None, int]:
    """How a start ends, and by how much its lines have to be shifted to come after the end of the same job's start before it.

    A job is requeued after its coordinator has left. Where it begins before that, on another host, the clocks of the two differ.
    """
    if file.task:
        return None, 0
    first, last = _edges(file)
    host = str(first.get("host", ""))
    begin_ns, shift_ns = moment_ns(first.get("ts")), 0
    if (
        before is not None and before.exit_ns is not None and begin_ns is not None and host != before.host
        and (before.file.job, before.file.step_id) == (file.job, file.step_id) and before.file.attempt < file.attempt
    ):  # fmt: skip
        shift_ns = max(0, before.exit_ns - begin_ns)
    exit_ns = moment_ns(last.get("ts"))
    return _End(file, host, None if exit_ns is None else exit_ns + shift_ns, "" if before is None else before.host), shift_ns


def _edges(file: File) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first line of a journal, and the one that says that its supervisor exits; empty where there is none."""
    try:
        fd = opened(file.path)
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, TAIL_BYTES, 0)
            tail = os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return {}, {}
    first = parse(head.partition(b"\n")[0]) or {}
    for raw in reversed(tail.split(b"\n")):
        if _EXIT.search(raw):
            return first, parse(raw) or {}
    return first, {}
