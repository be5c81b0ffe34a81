"""Reading files in threads: the digest and the record checksums of one file, and one task per file over many.

Owns threads and buffers, and what reading does to the page cache. Must not map a file: one that is cut while it is mapped is a
SIGBUS, not an exception (field case 77). Reads go into anonymous mmap buffers, since into a large bytearray they are 4 to 5
times slower (measured).
How one file uses several threads: each reads every n-th block, takes its CRCs, and waits for its turn to feed the digest,
which goes in order. Each feeds what it has read itself: that another thread takes waiting blocks along saves the waiting,
and costs up to twice the CPU time, since the bytes are in the other core's caches (measured).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
import xxhash

from ckpt_supervisor.store.crc import combine, crc32
from ckpt_supervisor.store.formats.structure import Extent
from ckpt_supervisor.store.look import Stop

T = TypeVar("T")

BLOCK_BYTES = 4 * 1024 * 1024
"""Less means more turns to wait for: one in six is slept for, and to wake a core of a virtual machine takes as long as reading
half a block; 5 % less speed at half the size. More gains nothing and leaves the caches (measured).
"""

THREADS_MAX = 64

Cache = Literal["leave", "spare", "fresh"]
"""What reading does to the page cache. `leave`: nothing, since what has just been saved or chosen is read again soon.
`spare`: what was read is let go of, so that a look at many old checkpoints does not push out the data of the training.
`fresh`: what is cached is dropped before (see `drop_cached`), so that the bytes come from the disk.
"""


class Shrunk(Exception):
    """The file ended before its size; `offset` is where."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"ended at byte {offset}")
        self.offset = offset


class Stopped(Exception):
    """The caller asked to end early."""


class Source(msgspec.Struct, frozen=True):
    """An open file, how much of it to read, and the extents to check; these are sorted and do not overlap.

    `digest`: whether to take it. `spare`: let go of what was read (see `Cache`).
    """

    fd: int
    size: int
    extents: Sequence[Extent]
    digest: bool = True
    spare: bool = False


class Content(msgspec.Struct, frozen=True):
    """What reading a whole file gave: its XXH3-128 in hex ("" if it was not wanted), and the extents whose CRC32 is another."""

    xxh3_128: str
    bad: tuple[Extent, ...]


class Buffers:
    """Blocks of memory to read into, which go from file to file: to make and to touch one costs more than a small file."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """One that nobody else has."""
        with contextlib.suppress(IndexError):
            return self._free.pop()  # One step of the interpreter, as append is: no lock is needed.
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # A kernel without huge pages; with them it is 1 to 5 % (measured).
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)

    def give_back(self, buffer: memoryview) -> None:
        """For the next one."""
        self._free.append(buffer)


def read_content(
    source: Source, threads: int, on_bytes: Callable[[int], None], stop: Stop | None, buffers: Buffers | None = None
) -> Content:
    """Read all of it. `on_bytes` is told the size of each block. Raises OSError, Shrunk, Stopped."""
    count = max(1, min(threads, THREADS_MAX, -(-source.size // BLOCK_BYTES)))
    pool = Buffers() if buffers is None else buffers
    reading = _Reading(source, count, on_bytes, stop, pool)
    run_threads(count, reading.work)
    if reading.problem is not None:
        raise reading.problem
    bad = tuple(source.extents[index] for index in sorted(reading.bad))
    return Content(reading.digest.hexdigest() if source.digest else "", bad)


def drop_cached(fd: int) -> None:
    """Have this file read from the disk next time: flush it, then ask the kernel to forget it. Raises OSError.

    That is advice (posix_fadvise(2)): pages that a process has mapped stay, and what a network file system's server or a disk's
    own cache hold is out of its reach.
    """
    os.fsync(fd)  # Without this, pages that are not written yet would stay.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


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


class _Turns:
    """Whose turn it is, passed on from thread to thread. A queue for each: they wait and wake outside the interpreter."""

    def __init__(self, threads: int) -> None:
        self._queues: tuple[queue.SimpleQueue[bool], ...] = tuple(queue.SimpleQueue() for _ in range(threads))
        self._queues[0].put(True)

    def wait(self, index: int) -> bool:
        """Wait for this thread's turn; False when there are no more turns."""
        return self._queues[index].get()

    def pass_on(self, index: int) -> None:
        """Let the next thread have its turn."""
        self._queues[(index + 1) % len(self._queues)].put(True)

    def end(self) -> None:
        """No more turns, for anybody; one that was given already may still be taken."""
        for waiting in self._queues:
            waiting.put(False)


class _Reading:
    """One file being read by several threads. `problem` is the first one that any of them met, `bad` the extents by number."""

    def __init__(
        self, source: Source, threads: int, on_bytes: Callable[[int], None], stop: Stop | None, buffers: Buffers
    ) -> None:
        self._source = source
        self._threads = threads
        self._ends = [extent.end for extent in source.extents]
        self._on_bytes = on_bytes
        self._stop = stop
        self._buffers = buffers
        self._turns = _Turns(threads)
        self._open: dict[int, int] = {}
        """The extent that goes on in the next block, by number: the CRC32 of what has been read of it."""
        self.bad = {index for index, extent in enumerate(source.extents) if _is_bad_anyway(extent, source.size)}
        self.digest = xxhash.xxh3_128()
        self.problem: OSError | Shrunk | Stopped | None = None

    def work(self, index: int) -> None:
        """Read every n-th block from this index on."""
        buffer = self._buffers.take()
        done = False
        try:
            self._blocks(index, buffer)
            done = True
        except (OSError, Shrunk, Stopped) as error:
            self.problem = self.problem or error
        finally:
            self._buffers.give_back(buffer)
            if not done:
                self._turns.end()  # Whatever ended this thread, the others must not wait for its turn.

    def _blocks(self, index: int, buffer: memoryview) -> None:
        source = self._source
        for offset in range(index * BLOCK_BYTES, source.size, self._threads * BLOCK_BYTES):
            if self._stop is not None and self._stop.is_set():
                raise Stopped
            block = buffer[: min(BLOCK_BYTES, source.size - offset)]
            _fill(source.fd, block, offset)
            parts = self._crcs_of(block, offset) if self._ends else ()
            if not self._turns.wait(index):
                return
            if source.digest:
                self.digest.update(block)
            for part in parts:
                self._join(*part, offset + len(block))
            self._on_bytes(len(block))
            self._turns.pass_on(index)
            if source.spare:
                os.posix_fadvise(source.fd, offset, len(block), os.POSIX_FADV_DONTNEED)

    def _crcs_of(self, block: memoryview, offset: int) -> list[tuple[int, int, int]]:
        """(extent, CRC32, length) of the part in this block of each extent that goes beyond it; the others are compared here."""
        parts: list[tuple[int, int, int]] = []
        extents, end = self._source.extents, offset + len(block)
        for index in range(bisect_right(self._ends, offset), len(extents)):
            extent = extents[index]
            if extent.start >= end:
                break
            if extent.start >= offset and extent.end <= end:
                if crc32(block[extent.start - offset : extent.end - offset]) != extent.crc32:
                    self.bad.add(index)
                continue
            part = block[max(extent.start, offset) - offset : min(extent.end, end) - offset]
            parts.append((index, crc32(part), len(part)))
        return parts

    def _join(self, index: int, crc: int, length: int, end: int) -> None:
        """Add the part up to `end` to an extent that lies in several blocks. In turn, so that the parts come in order."""
        extent = self._source.extents[index]
        whole = combine(self._open.pop(index, 0), crc, length)
        if end < extent.end:
            self._open[index] = whole
        elif whole != extent.crc32:
            self.bad.add(index)


def _is_bad_anyway(extent: Extent, size: int) -> bool:
    """Whether reading the blocks would not show it: nothing is read of an empty extent, nor of what is beyond the file."""
    return extent.end > size or (extent.start >= extent.end and extent.crc32 != 0)


def _fill(fd: int, block: memoryview, offset: int) -> None:
    """Read exactly this block."""
    filled = 0
    while filled < len(block):
        count = os.preadv(fd, [block[filled:]], offset + filled)
        if count == 0:
            raise Shrunk(offset + filled)
        filled += count
