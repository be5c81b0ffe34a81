"""What it costs to read every byte of a checkpoint: beside reading alone, beside sha256, and beside zipfile's own check.

Owns the baselines: preadv into the same buffers and in blocks of the same size, hashlib's sha256 behind it, and
zipfile.ZipFile.testzip. All files are in the page cache, and all ways are taken in turns. Must not use the network or a GPU.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import xxhash
from ckpt_supervisor import store
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.store.stream import BLOCK_BYTES, Buffers, run_threads

from tests.bench.figure import Row, pause

SIZE_BYTES = 2 << 30
"""Of the checkpoint with a digest."""
ARCHIVE_BYTES = 1 << 30
RECORDS = 288
SLOW_BYTES = 1 << 29
"""What sha256 and testzip read: they take seconds for the rest, and their speed does not depend on the size."""
ROUNDS = 9
SLOW_ROUNDS = 3
THREADS = 2
NAP_MS = 1

BAR_DIGEST = 1 / 0.85
BAR_SHA256 = 1 / 4.0
BAR_ARCHIVE = 1 / 0.55
BAR_TESTZIP_TWO = 1 / 3.5
BAR_TESTZIP_ONE = 1 / 2.0
BAR_LATE_MS = 50.0


def measure() -> list[Row]:
    """All figures of reading. A share or a multiple is shown as time of ours by time of theirs."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        return [*_digests(Path(place)), *_archives(Path(place))]


def _digests(place: Path) -> list[Row]:
    """A committed checkpoint of one large file."""
    checkpoint = _committed(place, SIZE_BYTES)
    file = checkpoint / "state.pt"
    sides: dict[str, list[float]] = {"plain": [], "ours": [], "alone": []}
    _plain(file, SIZE_BYTES, THREADS)
    for _ in range(ROUNDS):
        sides["plain"].append(_timed(lambda: _plain(file, SIZE_BYTES, THREADS)))
        sides["ours"].append(_timed(lambda: _verify(checkpoint)))
        sides["alone"].append(_timed(lambda: _plain(file, SIZE_BYTES, THREADS, digest=True)))
    slow = [_timed(lambda: _plain(file, SLOW_BYTES, THREADS, sha256=True)) for _ in range(SLOW_ROUNDS)]
    late_ms = _latest_ms(checkpoint)
    file.unlink()
    ratios = _ratios(sides["ours"], sides["plain"])
    ratio, sha256_s = statistics.median(ratios), statistics.median(slow) * SIZE_BYTES / SLOW_BYTES
    ours_s, plain_s = statistics.median(sides["ours"]), statistics.median(sides["plain"])
    alone = statistics.median(_ratios(sides["alone"], sides["plain"]))
    return [
        Row(
            f"verify with digests, {SIZE_BYTES >> 30} GiB, {THREADS} threads",
            ratio,
            "of reading alone",
            BAR_DIGEST,
            f"{100 / ratio:.0f} % of its speed ({100 / max(ratios):.0f} to {100 / min(ratios):.0f}); "
            f"{_speed(SIZE_BYTES, ours_s)} of {_speed(SIZE_BYTES, plain_s)}; one file, so one digest fed in order",
        ),
        Row(
            "reading with a hash for each thread, in no order",
            alone,
            "of reading alone",
            None,
            f"{100 / alone:.0f} % of its speed: the hash itself leaves no more on these cores",
        ),
        Row(
            "the same, against sha256 of hashlib",
            ours_s / sha256_s,
            "",
            BAR_SHA256,
            f"{sha256_s / ours_s:.1f} times as fast, on the same threads",
        ),
        Row(
            "a loop beside it, latest wake-up",
            late_ms[-1],
            "ms",
            BAR_LATE_MS,
            f"of {len(late_ms)} while 2 GiB are verified in a lane; p50 {statistics.median(late_ms):.2f} ms",
        ),
    ]


def _archives(place: Path) -> list[Row]:
    """A file of torch.save, which has CRC32s of its own and, where we did not write it, no digest."""
    file = place / "archive.pt"
    _write_archive(file, ARCHIVE_BYTES, RECORDS)
    small = place / "small.pt"
    _write_archive(small, SLOW_BYTES, RECORDS)
    small_plain = [_timed(lambda: _testzip(small)) for _ in range(SLOW_ROUNDS)]
    testzip_s = statistics.median(small_plain) * ARCHIVE_BYTES / SLOW_BYTES
    sides: dict[str, list[float]] = {"plain": [], "checksums": [], "both": [], "one": []}
    _plain(file, ARCHIVE_BYTES, THREADS)
    for _ in range(ROUNDS):
        sides["plain"].append(_timed(lambda: _plain(file, ARCHIVE_BYTES, THREADS)))
        sides["checksums"].append(_timed(lambda: _foreign(file, THREADS)))
        sides["both"].append(_timed(lambda: _unreported(file, place)))
        sides["one"].append(_timed(lambda: _foreign(file, 1)))
    ours_s, one_s = statistics.median(sides["checksums"]), statistics.median(sides["one"])
    rows = []
    for what, name in (("torch zip by its CRC32s", "checksums"), ("the same with a digest as well", "both")):
        ratio = statistics.median(_ratios(sides[name], sides["plain"]))
        how = f"{100 / ratio:.0f} % of its speed; {_speed(ARCHIVE_BYTES, statistics.median(sides[name]))}, {THREADS} threads"
        rows.append(Row(what, ratio, "of reading alone", BAR_ARCHIVE, how))
    for count, took_s, bar in ((2, ours_s, BAR_TESTZIP_TWO), (1, one_s, BAR_TESTZIP_ONE)):
        how = f"{testzip_s / took_s:.1f} times as fast"
        rows.append(Row(f"CRC32s on {count} threads, against testzip", took_s / testzip_s, "", bar, how))
    return rows


def _committed(place: Path, size: int) -> Path:
    """A committed checkpoint with one file of this size."""
    epoch = store.take_epoch(place, "1", 0, "0").epoch
    partial = store.make_partial(place, 1, epoch, 1)
    part = os.urandom(1 << 24)
    with (partial / "state.pt").open("wb") as file:
        for _ in range(size // len(part)):
            file.write(part)
    report, entries = store.check_files(partial, [store.Expected("state.pt", size, "", 0)])
    assert report.verdict is store.Verdict.INTACT, report
    manifest = store.Manifest(
        step=1, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="bench", created_at="", verified="full",
        files=entries,
    )  # fmt: skip
    outcome = store.commit(place, partial, manifest)
    assert isinstance(outcome, store.Committed), outcome
    return outcome.path


def _write_archive(path: Path, size: int, records: int) -> None:
    """An archive as torch.save writes it: stored records with CRC32s, data.pkl first."""
    part = os.urandom(size // records)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        for number in range(records):
            archive.writestr(f"archive/data/{number}", struct.pack("<Q", number) + part[8:])
        archive.writestr("archive/version", b"3\n")
    with path.open("rb") as file:
        os.fsync(file.fileno())  # Writing it out must not go on while it is read.


def _plain(path: Path, size: int, threads: int, *, digest: bool = False, sha256: bool = False) -> None:
    """Nothing but preadv, block by block; or each thread with a hash of its own behind it."""
    buffers = Buffers()
    fd = os.open(path, os.O_RDONLY)

    def work(index: int) -> None:
        buffer = buffers.take()
        update = xxhash.xxh3_128().update if digest else hashlib.sha256().update if sha256 else None
        for offset in range(index * BLOCK_BYTES, size, threads * BLOCK_BYTES):
            count = os.preadv(fd, [buffer], offset)
            if update is not None:
                update(buffer[:count])

    try:
        run_threads(threads, work)
    finally:
        os.close(fd)


def _verify(checkpoint: Path) -> None:
    report = store.verify_checkpoint(checkpoint, threads=THREADS)
    assert report.verdict is store.Verdict.INTACT, report


def _foreign(path: Path, threads: int) -> None:
    report = store.check_foreign(path, threads=threads)
    assert report.verdict is store.Verdict.INTACT and not report.unchecked, report


def _unreported(path: Path, place: Path) -> None:
    """As before a commit, when only the file itself says what it should be: checksums and the digest for the manifest."""
    expected = [store.Expected(path.name, path.stat().st_size, "", 0)]
    report, entries = store.check_files(place, expected, threads=THREADS, share=True)
    assert report.verdict is store.Verdict.INTACT and entries[0].xxh3_128, report


def _testzip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def _latest_ms(checkpoint: Path) -> list[float]:
    """How late a thread that sleeps for a millisecond at a time wakes up while a lane verifies; sorted."""
    over = threading.Event()
    late: list[float] = []
    with Lanes(("store",)) as lanes:
        lanes.post("store", "verifying", lambda: [_verify(checkpoint) for _ in range(3)], lambda _: over.set())
        while not over.is_set():
            began = time.perf_counter()
            pause(NAP_MS / 1000)
            late.append(1000 * (time.perf_counter() - began) - NAP_MS)
            lanes.deliver()
    return sorted(late)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _speed(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.1f} GB/s"
