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
from ckpt_supervisor.store.stream import BLOCK_BYTES, Shrunk, Source, Stopped, read_content, run_threads, spread
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
    """A progress function that raises in the first thread ends the reading with its error."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(9 * BLOCK_BYTES)

    def complain(_: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyError("mine")

    with path.open("rb") as file, pytest.raises(KeyError, match="mine"):
        read_content(Source(file.fileno(), 9 * BLOCK_BYTES, ()), 3, complain, None)


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
