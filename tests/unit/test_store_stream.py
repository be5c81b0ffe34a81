"""Reading in threads gives what reading in one piece gives, and always comes to an end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from ckpt_supervisor.store import crc
from ckpt_supervisor.store.formats import Extent
from ckpt_supervisor.store.stream import (
    BLOCK_BYTES,
    Buffers,
    Content,
    Shrunk,
    Source,
    Stopped,
    drop_cached,
    read_content,
    run_threads,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st


def nothing(_: int) -> None:
    """Do not count."""


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_two_neighbours_is_the_crc_of_both(first: bytes, second: bytes) -> None:
    """Joining two CRC32s gives that of the whole, in C and in plain Python."""
    whole = zlib.crc32(first + second)
    pair = zlib.crc32(first), zlib.crc32(second), len(second)
    assert crc.combine(*pair) == whole
    assert crc.combine_plain(*pair) == whole
    assert crc.crc32(memoryview(first + second)) == whole


def test_without_the_fast_library_the_slow_one_stands_in() -> None:
    """A machine without a wheel of isal still gets right CRC32s."""
    code = (
        "import sys; sys.modules['isal'] = None; sys.modules['isal.isal_zlib'] = None\n"
        "import zlib; from ckpt_supervisor.store import crc\n"
        "assert crc.crc32 is zlib.crc32 and crc.combine is crc.combine_plain\n"
        "print(crc.combine(zlib.crc32(b'ab'), zlib.crc32(b'c'), 1) == zlib.crc32(b'abc'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77])
def test_any_number_of_threads_gives_the_same_digest_and_checksums(tmp_path: Path, size: int, threads: int) -> None:
    """Digest, extents that cross blocks, and the count of bytes do not depend on how the reading is shared out."""
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    path = tmp_path / "file"
    path.write_bytes(data)
    cuts = sorted({0, size // 7, size // 2, size // 2, max(0, size - 3), size})
    spans = [*pairwise(cuts), (size, size)]
    good = [Extent(start, end, zlib.crc32(data[start:end]), f"{start}") for start, end in spans]
    bad = [Extent(start, end, zlib.crc32(data[start:end]) ^ 1, f"{start}") for start, end in spans]
    counted: list[int] = []
    with path.open("rb") as file:
        content = read_content(Source(file.fileno(), size, good), threads, counted.append, None)
        assert content.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
        assert content.bad == ()
        assert sum(counted) == size
        assert read_content(Source(file.fileno(), size, bad), threads, nothing, None).bad == tuple(bad)


def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    """A file that is shorter than it was is an answer with the offset, for each number of threads."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (BLOCK_BYTES + 10))
    for threads in (1, 2, 3):
        with path.open("rb") as file, pytest.raises(Shrunk) as caught:
            read_content(Source(file.fileno(), 4 * BLOCK_BYTES, ()), threads, nothing, None)
        assert caught.value.offset >= BLOCK_BYTES + 10


def test_a_stop_ends_the_reading(tmp_path: Path) -> None:
    """A stop that comes in the middle of a file is obeyed within the blocks that are under way."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(40 * BLOCK_BYTES)
    stop = threading.Event()
    seen: list[int] = []

    def stop_after_two(count: int) -> None:
        seen.append(count)
        if len(seen) == 2:
            stop.set()

    with path.open("rb") as file, pytest.raises(Stopped):
        read_content(Source(file.fileno(), 40 * BLOCK_BYTES, ()), 2, stop_after_two, stop)
    assert len(seen) <= 6


def test_an_error_in_one_thread_does_not_leave_the_others_waiting() -> None:
    """A descriptor that cannot be read is an OSError, not a hang."""
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            read_content(Source(read_end, 9 * BLOCK_BYTES, ()), 3, nothing, None)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_an_error_in_the_callers_own_word_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """A progress function that cannot write ends the reading with its error, in whichever thread it was called."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(9 * BLOCK_BYTES)

    def complain(_: int) -> None:
        raise BrokenPipeError("mine")

    for threads in (1, 3):
        with path.open("rb") as file, pytest.raises(BrokenPipeError, match="mine"):
            read_content(Source(file.fileno(), 9 * BLOCK_BYTES, ()), threads, complain, None)


def test_the_bytes_are_told_in_order_and_never_by_two_at_a_time(tmp_path: Path) -> None:
    """Whoever reads a block, the digest and the count go through the file from its start to its end."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(20 * BLOCK_BYTES + 5)
    inside = threading.Lock()
    told: list[int] = []

    def count(size: int) -> None:
        assert inside.acquire(blocking=False)
        told.append(size)
        inside.release()

    with path.open("rb") as reader:
        read_content(Source(reader.fileno(), 20 * BLOCK_BYTES + 5, ()), 4, count, None)
    assert told == [BLOCK_BYTES] * 20 + [5]


def test_buffers_go_from_file_to_file(tmp_path: Path) -> None:
    """Many small files need no more buffers than one, and a reading that ends with an error gives its buffers back."""
    buffers = Buffers()
    first = buffers.take()
    buffers.give_back(first)
    for size in (0, 100, 1000, BLOCK_BYTES):
        path = tmp_path / str(size)
        path.write_bytes(b"y" * size)
        with path.open("rb") as file:
            digest = read_content(Source(file.fileno(), size, ()), 2, nothing, None, buffers).xxh3_128
            assert digest == xxhash.xxh3_128_hexdigest(b"y" * size)
            with pytest.raises(Shrunk):
                read_content(Source(file.fileno(), size + 1, ()), 1, nothing, None, buffers)
    assert buffers.take() is first


def test_checksums_alone_take_no_digest(tmp_path: Path) -> None:
    """Without the digest the extents are compared all the same, also those that are empty or reach beyond the file."""
    data = os.urandom(2 * BLOCK_BYTES)
    path = tmp_path / "file"
    path.write_bytes(data)
    good = [Extent(0, 0, 0, "empty"), Extent(0, len(data), zlib.crc32(data), "all")]
    bad = [Extent(0, 0, 1, "empty"), Extent(0, 9, zlib.crc32(data[:9]) ^ 1, "start"), Extent(9, len(data) + 1, 0, "beyond")]
    with path.open("rb") as file:
        for threads in (1, 2):
            assert read_content(Source(file.fileno(), len(data), good, digest=False), threads, nothing, None) == Content("", ())
            assert read_content(Source(file.fileno(), len(data), bad, digest=False), threads, nothing, None).bad == tuple(bad)


def test_what_is_spared_or_dropped_is_read_all_the_same(tmp_path: Path) -> None:
    """Giving up the page cache of a file, before reading it or behind the reader, changes nothing that is read."""
    data = os.urandom(3 * BLOCK_BYTES + 1)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        drop_cached(file.fileno())
        content = read_content(Source(file.fileno(), len(data), (), spare=True), 2, nothing, None)
        assert content.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
        drop_cached(file.fileno())
        assert file.read() == data


def test_what_cannot_be_flushed_is_not_dropped_in_silence() -> None:
    """An fsync that fails is told: what is in memory alone must not be lost from there as well."""
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            drop_cached(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_every_task_runs_once() -> None:
    """Spreading tasks over threads runs each of them exactly once, also when there are fewer tasks than threads."""
    for count in (0, 1, 3, 100):
        lock = threading.Lock()
        done: list[int] = []

        def task(item: int, lock: threading.Lock = lock, done: list[int] = done) -> None:
            with lock:
                done.append(item)

        spread(range(count), 4, task)
        assert sorted(done) == list(range(count))


def test_work_runs_under_each_number_once() -> None:
    """The first piece of work runs in the caller's thread, the others beside it."""
    ran: dict[int, bool] = {}
    run_threads(3, lambda index: ran.__setitem__(index, threading.current_thread() is threading.main_thread()))
    assert ran == {0: True, 1: False, 2: False}
