"""The tables of a zip archive: its end, its directory, and the header before each record.

Owns their layout (PKWARE APPNOTE 6.3) and what can be said of them without knowing who wrote the archive. Must not read
the records themselves. An archive is a window of a file: offsets inside it count from its start, those in Extent and
Damage from the file's.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec

from ckpt_supervisor.store.formats.structure import Damage
from ckpt_supervisor.store.verdict import Verdict

RECORDS_MAX = 200_000
DIRECTORY_BYTES_MAX = 64 * 1024 * 1024
NAME_BYTES_MAX = 4096

LOCAL = struct.Struct("<4s5H3L2H")
LOCAL_MAGIC = b"PK\x03\x04"
IN_ZIP64 = 0xFFFFFFFF
STORED, HAS_DESCRIPTOR = 0, 0x8

_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY_MAGIC, _END_MAGIC = b"PK\x01\x02", b"PK\x05\x06"
_LOCATOR_64_MAGIC, _END_64_MAGIC = b"PK\x06\x07", b"PK\x06\x06"
_COMMENT_BYTES_MAX = 0xFFFF
_ENCRYPTED = 0x1
_SMALL_BYTES = 64 * 1024
_PEEK_BYTES = 192
"""What is read behind a local header in the same call: its name and torch's padding, as a rule."""


class Window:
    """Bytes [start, start + size) of an open file. A small one is read in one call."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self.fd = fd
        self.start = start
        self.size = size
        self._all = os.pread(fd, size, start) if size <= _SMALL_BYTES else None

    def read(self, count: int, offset: int) -> bytes:
        """That many bytes, fewer at the window's end."""
        if self._all is not None:
            return self._all[offset : offset + count]
        return os.pread(self.fd, min(count, self.size - offset), self.start + offset)

    def exactly(self, count: int, offset: int) -> bytes:
        """That many bytes. Raises Damage if the file ends before, also because it has shrunk."""
        data = self.read(count, offset)
        if len(data) != count:
            raise self.damage("the file ends inside the archive's tables", offset + len(data), Verdict.TRUNCATED)
        return data

    def damage(self, reason: str, offset: int, verdict: Verdict = Verdict.CORRUPT) -> Damage:
        """To be raised."""
        return Damage(verdict, self.start + offset, reason)


class Directory(msgspec.Struct, frozen=True):
    """The central directory: [start, end), the records it says it has, and the bytes before the archive (`shift`)."""

    start: int
    end: int
    records: int
    shift: int


class Record(msgspec.Struct, frozen=True):
    """What the directory says of a record. `written_by` are the fields that no reader needs."""

    name: bytes
    offset: int
    stored: int
    size: int
    crc32: int
    method: int
    flags: int
    version: int
    time: tuple[int, int]
    extra: bytes
    written_by: tuple[int, int, int, int, int]


class Local(msgspec.Struct, frozen=True):
    """What stands before a record and behind it: the header's fields and extra field, and up to the next header."""

    fields: tuple[bytes, int, int, int, int, int, int, int, int]
    extra: bytes
    start: int
    end: int
    behind: bytes


def find_directory(window: Window, may_have_comment: bool) -> Directory:
    """Read the end of the archive, and its 64-bit form where there is one (torch always writes it). Raises Damage."""
    position = _find_end(window, may_have_comment)
    _, disk, start_disk, here, records, length, start, _ = _END.unpack(window.exactly(_END.size, position))
    end = position
    locator = window.read(_LOCATOR_64.size, max(0, position - _LOCATOR_64.size))
    if len(locator) == _LOCATOR_64.size and locator.startswith(_LOCATOR_64_MAGIC):
        # Found by its place, not by the locator's offset: in a chain that one counts from its own archive's start.
        end = position - _LOCATOR_64.size - _END_64.size
        fields = _END_64.unpack(window.exactly(_END_64.size, end)) if end >= 0 else (b"",)
        if fields[0] != _END_64_MAGIC or fields[1] != _END_64.size - 12:
            raise window.damage("the archive's 64-bit end is not before its locator", max(0, end))
        narrow = (disk, start_disk, here, records, length, start)
        if not all(wide == small or small in (0xFFFF, IN_ZIP64) for wide, small in zip(fields[4:], narrow, strict=True)):
            raise window.damage("the archive's two ends do not agree", position)
        disk, start_disk, here, records, length, start = fields[4:]
        _, locator_disk, stated, disks = _LOCATOR_64.unpack(locator)
        if locator_disk or disks != 1 or stated != start + length:
            raise window.damage("the archive's locator and its 64-bit end do not agree", position)
    if disk or start_disk or here != records:
        raise window.damage("the archive says that it is spread over several volumes", position)
    if records > RECORDS_MAX or length > DIRECTORY_BYTES_MAX:
        raise window.damage(f"a directory of {records} records in {length} bytes is out of bounds", position)
    return Directory(end - length, end, records, end - length - start)


def _find_end(window: Window, may_have_comment: bool) -> int:
    """Offset of the end record, which is the last thing in the archive but for a comment of a length it states."""
    size = window.size
    last_bytes = window.read(_END.size, size - _END.size) if size >= _END.size else b""
    if len(last_bytes) == _END.size and last_bytes.startswith(_END_MAGIC) and last_bytes.endswith(b"\0\0"):
        return size - _END.size
    tail_bytes = min(size, _END.size + (_COMMENT_BYTES_MAX if may_have_comment else 0))
    tail = window.exactly(tail_bytes, size - tail_bytes)
    at = tail.rfind(_END_MAGIC)
    last = at
    while at >= 0:
        if at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[7] == len(tail):
            return size - tail_bytes + at
        at = tail.rfind(_END_MAGIC, 0, at)
    if last >= 0 and last + _END.size < len(tail):
        end = size - tail_bytes + last + _END.size
        raise window.damage(f"{size - end} bytes after the archive's end", end)
    raise window.damage("the archive has no end: the file was cut, or its last part overwritten", size, Verdict.TRUNCATED)


def read_records(window: Window, directory: Directory) -> Iterator[Record]:
    """The directory's entries, in its order. Raises Damage."""
    if directory.start < 0:
        raise window.damage("the archive's directory starts before the archive", 0)
    data = window.exactly(directory.end - directory.start, directory.start)
    at = 0
    for _ in range(directory.records):
        if at + _ENTRY.size > len(data) or data[at : at + 4] != _ENTRY_MAGIC:
            raise window.damage("the archive's directory is broken", directory.start + at)
        fields = _ENTRY.unpack_from(data, at)
        version, flags, method, *time, crc32, stored, size = fields[2:10]
        name_bytes, extra_bytes, comment_bytes, offset = *fields[10:13], fields[16]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_bytes
        next_at = extra_at + extra_bytes + comment_bytes
        if next_at > len(data) or name_bytes > NAME_BYTES_MAX or flags & _ENCRYPTED:
            raise window.damage("the archive's directory is broken", directory.start + at)
        extra = data[extra_at : extra_at + extra_bytes]
        size, stored, offset = _widen(extra, size, stored, offset)
        if method == STORED and stored != size:
            raise window.damage("a record has two sizes", directory.start + at)
        written_by = (fields[1], comment_bytes, *fields[13:16])
        name = data[name_at:extra_at]
        yield Record(name, offset, stored, size, crc32, method, flags, version, (time[0], time[1]), extra, written_by)
        at = next_at
    if at != len(data):
        raise window.damage("the archive's directory is longer than its records", directory.start + at)


def _widen(extra: bytes, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """Take from the 64-bit extra field those of the three that do not fit 32 bits, in this order."""
    values = [size, stored, offset]
    if IN_ZIP64 not in values:
        return size, stored, offset
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            size, stored, offset = (next(wide, value) if value == IN_ZIP64 else value for value in values)
            return size, stored, offset
        at += 4 + length
    return size, stored, offset


def read_locals(window: Window, records: list[Record], directory_start: int) -> Iterator[Local]:
    """Check that each record, in the order of places, lies where the directory says and behind the one before it."""
    free_from, limit = 0, directory_start
    for index, record in enumerate(records):
        name = shown(record)
        if record.offset < free_from or record.offset + LOCAL.size > limit:
            raise window.damage(f"record {name} lies over another or outside the file", record.offset)
        name_end = LOCAL.size + len(record.name)
        head = window.read(name_end + _PEEK_BYTES, record.offset)
        if len(head) < name_end:
            raise window.damage("the file ends inside the archive's tables", record.offset + len(head), Verdict.TRUNCATED)
        *fields, name_bytes, extra_bytes = LOCAL.unpack_from(head)
        if fields[0] != LOCAL_MAGIC or name_bytes != len(record.name) or head[LOCAL.size : name_end] != record.name:
            raise window.damage(f"record {name} is not where the archive's directory says", record.offset)
        if name_end + extra_bytes > len(head):
            head = window.exactly(name_end + extra_bytes, record.offset)
        start = record.offset + name_end + extra_bytes
        free_from = start + record.stored
        if free_from > limit:
            raise window.damage(f"record {name} reaches over the archive's directory", record.offset)
        following = records[index + 1].offset if index + 1 < len(records) else limit
        behind = window.read(max(0, min(following - free_from, _PEEK_BYTES)), free_from)
        yield Local(tuple(fields), head[name_end : name_end + extra_bytes], start, free_from, behind)


def shown(record: Record) -> str:
    """A record's name in a message."""
    return record.name.decode("utf-8", "replace")
