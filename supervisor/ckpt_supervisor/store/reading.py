"""One pass over the files of a directory: each one's structure, checksums and digest against what was said of it.

Owns the order of reading and the findings about single files. Must not change anything, map a file, follow a link or
unpickle. It ends at the first file that is wrong: nothing after it can make the checkpoint good, and the time belongs to
the next candidate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ckpt_supervisor.store.formats import Damage, Extent, Structure, broken_promise, read_structure
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, Stop, open_regular
from ckpt_supervisor.store.manifest import FileEntry
from ckpt_supervisor.store.origin import origin_of, zeros_in
from ckpt_supervisor.store.stream import Buffers, Cache, Content, Shrunk, Source, Stopped, drop_cached, read_content, spread
from ckpt_supervisor.store.survey import Expected, size_problem
from ckpt_supervisor.store.verdict import Finding, Mode, Verdict

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read), from several threads but never at the same time."""


HOLLOW_BYTES = 1 << 40
HOLLOW_PARTS = 1_000
"""A file from this size on with less than such a part of it on the disk is not read: that would take hours or for ever."""


class Pass(msgspec.Struct):
    """One pass over the files of a directory, shared by its threads under `lock`.

    `extents`: checksums of files that another file states (see SetLook). `cache`: what reading does to the page cache.
    `digests_wanted`: also of files that nobody has given one of; without, their bytes are only held against their checksums.
    `is_committed`: the digests are those of a manifest, and say all; what a reader of a format thinks of the same bytes today
    says only where the damage is, for it may be stricter than the one that was asked when they were committed. `deep`: it
    counts all the same, and so do the checksums inside.
    """

    directory: Path
    mode: Mode
    threads: int
    progress: Progress | None
    stop: Stop | None
    patience: Patience
    extents: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    cache: Cache = "leave"
    digests_wanted: bool = True
    is_committed: bool = False
    deep: bool = False
    buffers: Buffers = msgspec.field(default_factory=Buffers)
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    total_bytes: int = 0
    bytes_read: int = 0
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    entries: list[FileEntry] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    unchecked: list[str] = msgspec.field(default_factory=list)

    def on_bytes(self, count: int) -> None:
        """A block was read."""
        with self.lock:
            self.bytes_read += count
            if self.progress is not None:
                self.progress(self.bytes_read, self.total_bytes)


def read_files(passing: Pass, wanted: Sequence[Expected]) -> None:
    """Look into every file. A file that is a large part of the whole gets all threads; the others get one each."""
    passing.total_bytes = sum(want.bytes for want in wanted)
    passing.digests = {want.xxh3_128: want.path for want in wanted if want.xxh3_128}
    large_bytes = passing.total_bytes // (2 * max(1, passing.threads)) + 1
    for want in wanted:
        if want.bytes >= large_bytes:
            _look_into(passing, want, passing.threads)
    small = sorted((want for want in wanted if want.bytes < large_bytes), key=lambda want: -want.bytes)
    spread(small, passing.threads, lambda want: _look_into(passing, want, 1))


def _look_into(passing: Pass, want: Expected, threads: int) -> None:
    if passing.findings:
        return
    try:
        entry, is_checked = passing.patience.look(lambda: _check_file(passing, want, threads))
    except _Wrong as error:
        finding = error.finding
    except NotRegular as error:
        finding = Finding(Verdict.FOREIGN, want.path, None, str(error))
    except Stopped:
        finding = Finding(Verdict.UNKNOWN, want.path, None, "the check was ended before this file was read")
    except OSError as error:
        verdict, reason = Verdict.UNKNOWN, f"cannot be read: {error.strerror}"
        if error.errno in NOT_THERE:
            verdict, reason = Verdict.MISSING, "is not there"
        finding = Finding(verdict, want.path, None, reason)
    else:
        with passing.lock:
            passing.entries.append(entry)
            if not is_checked:
                passing.unchecked.append(want.path)
        return
    with passing.lock:
        passing.findings.append(finding)


class _Wrong(Exception):
    """This file is not what it should be."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def _check_file(passing: Pass, want: Expected, threads: int) -> tuple[FileEntry, bool]:
    """The file's manifest entry, and whether a checksum speaks for its bytes.

    Raises _Wrong, NotRegular, Stopped, OSError.
    """
    fd = open_regular(passing.directory / want.path)
    try:
        seen = os.fstat(fd)
        size = seen.st_size
        if size != want.bytes:
            is_listed_only = want.rank is None and not want.xxh3_128  # its size is what the listing saw
            raise _Wrong(_resized(want, size) if is_listed_only else size_problem(want.path, want.bytes, size))
        if passing.cache == "fresh" and passing.mode == "full":
            _drop_cached(fd, want)
        if size >= HOLLOW_BYTES and seen.st_blocks * 512 < size // HOLLOW_PARTS:
            raise _Wrong(Finding(Verdict.CORRUPT, want.path, None, f"{size} bytes, of which almost none were ever written"))
        structure = _structure_or_digest(passing, fd, want, threads)
        if structure is None:
            return FileEntry(want.path, size, want.xxh3_128, want.rank), True
        if passing.mode == "structure":
            return FileEntry(want.path, size, want.xxh3_128, want.rank), want.xxh3_128 != ""
        digest = _check_content(passing, fd, want, structure, threads)
        is_checked = want.xxh3_128 != "" or bool(structure.extents) or size == 0
        return FileEntry(want.path, size, digest, want.rank), is_checked
    except Shrunk as error:
        raise _Wrong(Finding(Verdict.TRUNCATED, want.path, error.offset, "was cut while it was read")) from error
    finally:
        os.close(fd)


def _drop_cached(fd: int, want: Expected) -> None:
    """Never tried again: the kernel tells of a failed write once, and the fsync of the commit would find nothing any more."""
    try:
        drop_cached(fd)
    except OSError as error:
        raise _Wrong(Finding(Verdict.UNKNOWN, want.path, None, f"cannot be flushed to the disk: {error.strerror}")) from error


def _resized(want: Expected, size: int) -> Finding:
    """A file whose size changes under our eyes."""
    if size < want.bytes:
        return Finding(Verdict.TRUNCATED, want.path, size, "was cut while it was read")
    return Finding(Verdict.CORRUPT, want.path, want.bytes, "is still being written")


def _structure_or_digest(passing: Pass, fd: int, want: Expected, threads: int) -> Structure | None:
    """None where the structure is not what its reader expects, and the digest says that nothing has changed since the commit."""
    try:
        return _structure(passing, fd, want)
    except _Wrong as broken:
        if not passing.is_committed or passing.deep or passing.mode == "structure" or not want.xxh3_128:
            raise
        try:
            _check_content(passing, fd, want, Structure("not read"), threads)
        except _Wrong:
            raise broken from None
    return None


def _structure(passing: Pass, fd: int, want: Expected) -> Structure:
    known = passing.extents.get(want.path)
    if known is not None:
        return Structure("part of a set", known)
    try:
        structure = read_structure(fd, want.bytes)
    except Damage as error:
        now = os.fstat(fd).st_size
        if now != want.bytes:
            raise _Wrong(_resized(want, now)) from error
        # The size is the reported one: what looks cut was overwritten. A stray's size is nobody's word.
        was_overwritten = error.verdict is Verdict.TRUNCATED and (want.rank is not None or want.xxh3_128)
        verdict = Verdict.CORRUPT if was_overwritten else error.verdict
        raise _Wrong(Finding(verdict, want.path, error.offset, error.reason)) from error
    if structure.format == "plain" and not want.xxh3_128:
        broken = broken_promise(fd, want.bytes, want.path)
        if broken is not None:
            raise _Wrong(Finding(broken.verdict, want.path, broken.offset, broken.reason))
    return structure


def _check_content(passing: Pass, fd: int, want: Expected, structure: Structure, threads: int) -> str:
    """Read all bytes: against the rank's digest, else against the checksums in the file. The digest found."""
    extents = () if want.xxh3_128 and not passing.deep else structure.extents
    content = _read(passing, fd, want, extents, threads)
    now = os.fstat(fd).st_size
    if now != want.bytes:
        raise _Wrong(_resized(want, now))
    bad, verdict, reasons = content.bad, Verdict.CORRUPT, ["CRC32 does not match"]
    if want.xxh3_128 and content.xxh3_128 != want.xxh3_128:
        origin = origin_of(passing.directory, want.path, content.xxh3_128, passing.digests)
        if structure.extents and not extents and origin is None:  # read once more, to say where
            bad = _read(passing, fd, want, structure.extents, threads).bad
        reasons = [f"XXH3-128 is {content.xxh3_128}, not {want.xxh3_128}"]
        if origin is not None:
            verdict = origin[0]
            reasons.append(origin[1])
    elif not bad:
        return content.xxh3_128
    reasons += [zeros] if (zeros := zeros_in(fd, want.bytes, bad)) else []
    where = f" (record {bad[0].name})" if bad else ""
    raise _Wrong(Finding(verdict, want.path, bad[0].start if bad else None, ": ".join(reasons) + where))


def _read(passing: Pass, fd: int, want: Expected, extents: Sequence[Extent], threads: int) -> Content:
    digest = passing.digests_wanted or want.xxh3_128 != ""
    source = Source(fd, want.bytes, extents, digest=digest, spare=passing.cache == "spare")
    return read_content(source, threads, passing.on_bytes, passing.stop, passing.buffers)
