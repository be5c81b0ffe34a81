"""Reading files in threads: the digest and the record checksums of one file, and one task per file over many.

Owns threads and buffers. Must not map a file: one that is cut while it is mapped is a SIGBUS, not an exception (field
case 77). Reads go into anonymous mmap buffers, since into a large bytearray they are 4 to 5 times slower (measured).
How one file uses several threads: each reads every n-th block and takes its CRCs, which can be joined in any order, and
then waits for its turn to feed the digest, which cannot. Reading costs far more than digesting, so the turns are short.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import xxhash

from ckpt_supervisor.store.crc import combine, crc32
from ckpt_supervisor.store.formats.structure import Extent
from ckpt_supervisor.store.look import Stop

T = TypeVar("T")

BLOCK_BYTES = 2 * 1024 * 1024
THREADS_MAX = 64


class Shrunk(Exception):
    """The file ended before its size; `offset` is where."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"ended at byte {offset}")
        self.offset = offset


class Stopped(Exception):
    """The caller asked to end early."""


class Source(msgspec.Struct, frozen=True):
    """An open file, how much of it to read, and the extents to check; these are sorted and do not overlap."""

    fd: int
    size: int
    extents: Sequence[Extent]


class Content(msgspec.Struct, frozen=True):
    """What reading a whole file gave: its XXH3-128 in hex, and the extents whose CRC32 is another."""

    xxh3_128: str
    bad: tuple[Extent, ...]


def read_content(source: Source, threads: int, on_bytes: Callable[[int], None], stop: Stop | None) -> Content:
    """Read all of it. `on_bytes` is told the size of each block. Raises OSError, Shrunk, Stopped."""
    blocks = -(-source.size // BLOCK_BYTES)
    reading = _Reading(source, max(1, min(threads, THREADS_MAX, blocks)), on_bytes, stop)
    run_threads(reading.threads, reading.work)
    if reading.problem is not None:
        raise reading.problem
    bad = tuple(extent for extent, crc in zip(source.extents, reading.crcs, strict=True) if crc != extent.crc32)
    return Content(reading.digest.hexdigest(), bad)


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0) here and work(1) ... work(count - 1) in threads, and wait for all.

    Daemon threads: one that hangs in a read from a dead server must not keep the process from ending.
    """
    ended: list[int] = []

    def run(index: int) -> None:
        work(index)
        ended.append(index)

    others = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(1, count)]
    for thread in others:
        thread.start()
    try:
        run(0)
    finally:
        for thread in others:
            thread.join()
    if len(ended) != count:
        raise RuntimeError("a reader thread ended by an error of its own; it is printed above")


def spread(tasks: Sequence[T], threads: int, task: Callable[[T], None]) -> None:
    """Run `task` once for each item, in up to `threads` threads."""
    waiting = iter(tasks)
    lock = threading.Lock()

    def work(_: int) -> None:
        while True:
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            task(item)

    run_threads(max(1, min(threads, THREADS_MAX, len(tasks))), work)


class _Reading:
    """One file being read by several threads. `problem` is the first one that any of them met."""

    def __init__(self, source: Source, threads: int, on_bytes: Callable[[int], None], stop: Stop | None) -> None:
        self._source = source
        self._ends = [extent.end for extent in source.extents]
        self._on_bytes = on_bytes
        self._stop = stop
        self._turn = threading.Condition()
        self._next = 0
        self._over = False
        self.threads = threads
        self.crcs = [0] * len(source.extents)
        self.digest = xxhash.xxh3_128()
        self.problem: OSError | Shrunk | Stopped | None = None

    def work(self, index: int) -> None:
        """Read every n-th block from this index on."""
        done = False
        try:
            self._blocks(index)
            done = True
        except (OSError, Shrunk, Stopped) as error:
            self.problem = self.problem or error
        finally:
            if not done:
                with self._turn:  # whatever ended this thread, the others must not wait for its turn
                    self._over = True
                    self._turn.notify_all()

    def _blocks(self, index: int) -> None:
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for offset in range(index * BLOCK_BYTES, self._source.size, self.threads * BLOCK_BYTES):
            if self._stop is not None and self._stop.is_set():
                raise Stopped
            block = buffer[: min(BLOCK_BYTES, self._source.size - offset)]
            _fill(self._source.fd, block, offset)
            crcs = self._crcs_of(block, offset)
            with self._turn:
                while self._next != offset and not self._over:
                    self._turn.wait()
                if self._over:
                    return
                self.digest.update(block)
                for extent, crc, length in crcs:
                    self.crcs[extent] = combine(self.crcs[extent], crc, length)
                self._on_bytes(len(block))
                self._next = offset + len(block)
                self._turn.notify_all()

    def _crcs_of(self, block: memoryview, offset: int) -> list[tuple[int, int, int]]:
        """(extent, CRC32, length) of each extent's part in this block."""
        parts: list[tuple[int, int, int]] = []
        end = offset + len(block)
        for index in range(bisect_right(self._ends, offset), len(self._ends)):
            extent = self._source.extents[index]
            if extent.start >= end:
                break
            part = block[max(extent.start, offset) - offset : min(extent.end, end) - offset]
            parts.append((index, crc32(part), len(part)))
        return parts


def _fill(fd: int, block: memoryview, offset: int) -> None:
    """Read exactly this block."""
    filled = 0
    while filled < len(block):
        count = os.preadv(fd, [block[filled:]], offset + filled)
        if count == 0:
            raise Shrunk(offset + filled)
        filled += count
