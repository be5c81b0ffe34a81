"""Files of torch.save since torch 1.6: a zip archive, records stored without compression, `<top>/data.pkl` first.

Owns the walk over the archive's tables. Must not unpickle, inflate or import torch. torch.load never looks at the
CRC32s that torch.save writes (tried: a flipped bit loads without a word), so they are read here. With
torch.serialization.set_crc32_options(False) all of them are 0, which means "no checksums". Layout: PKWARE APPNOTE 6.3.

A `.distcp` file of torch.distributed.checkpoint is a chain of such archives. Its end points to the last one only, so it
is left to the plain reader.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec

from ckpt_supervisor.store.formats.structure import Damage, Extent, Structure
from ckpt_supervisor.store.verdict import Verdict

RECORDS_MAX = 200_000
DIRECTORY_BYTES_MAX = 64 * 1024 * 1024
NAME_BYTES_MAX = 4096

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCAL_MAGIC, _ENTRY_MAGIC, _END_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCATOR_64_MAGIC, _END_64_MAGIC = b"PK\x06\x07", b"PK\x06\x06"
_COMMENT_BYTES_MAX = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
_STORED, _ENCRYPTED, _HAS_DESCRIPTOR = 0, 0x1, 0x8
_FIRST_RECORD = b"/data.pkl"


class _Directory(msgspec.Struct, frozen=True):
    """The central directory: [start, end), the records it says it has, and the bytes before the archive (`shift`)."""

    start: int
    end: int
    records: int
    shift: int


class _Record(msgspec.Struct, frozen=True):
    name: bytes
    offset: int
    stored: int
    size: int
    crc32: int
    method: int


def read_structure(fd: int, size: int) -> Structure | None:
    """None if this is not one archive of torch.save. Raises Damage, or OSError."""
    if not _begins_like_ours(fd, 0):
        return None
    directory = _find_directory(fd, size)
    if directory.shift < 0:
        raise Damage(Verdict.CORRUPT, directory.start, "the archive's directory is not where its end says")
    if directory.shift > 0:
        if _begins_like_ours(fd, directory.shift):
            return None  # a chain of archives
        raise Damage(Verdict.CORRUPT, directory.start, f"{directory.shift} bytes too many before this directory")
    records = sorted(_records(fd, directory), key=lambda record: record.offset)
    if not any(record.name.endswith(_FIRST_RECORD) for record in records):
        raise Damage(Verdict.CORRUPT, directory.start, "the archive's directory lists no data.pkl")
    extents = tuple(_extents(fd, records, directory.start))
    # A compressed record (torch writes none) would have to be inflated: then no checksum speaks for the whole file.
    has_checksums = len(extents) == len(records) and any(extent.crc32 for extent in extents)
    return Structure("torch zip", extents if has_checksums else ())


def _begins_like_ours(fd: int, offset: int) -> bool:
    head = os.pread(fd, _LOCAL.size, offset)
    if len(head) < _LOCAL.size or not head.startswith(_LOCAL_MAGIC):
        return False
    name_bytes = _LOCAL.unpack(head)[9]
    return name_bytes <= NAME_BYTES_MAX and os.pread(fd, name_bytes, offset + _LOCAL.size).endswith(_FIRST_RECORD)


def _find_directory(fd: int, size: int) -> _Directory:
    """Read the end of the archive, and its 64-bit form where there is one (torch always writes it)."""
    position = _find_end(fd, size)
    _, disk, start_disk, here, records, length, start, _ = _END.unpack(_exactly(fd, _END.size, position))
    end, stated = position, None
    locator = os.pread(fd, _LOCATOR_64.size, max(0, position - _LOCATOR_64.size))
    if len(locator) == _LOCATOR_64.size and locator.startswith(_LOCATOR_64_MAGIC):
        # Found by its place, not by the locator's offset: in a chain that one counts from its own archive's start.
        end, stated = position - _LOCATOR_64.size - _END_64.size, _LOCATOR_64.unpack(locator)[2]
        fields = _END_64.unpack(_exactly(fd, _END_64.size, end)) if end >= 0 else (b"",)
        if fields[0] != _END_64_MAGIC:
            raise Damage(Verdict.CORRUPT, max(0, end), "the archive's 64-bit end is not before its locator")
        disk, start_disk, here, records, length, start = fields[4:]
    if disk or start_disk or here != records:
        raise Damage(Verdict.CORRUPT, position, "the archive says that it is spread over several volumes")
    if records > RECORDS_MAX or length > DIRECTORY_BYTES_MAX:
        raise Damage(Verdict.CORRUPT, position, f"a directory of {records} records in {length} bytes is out of bounds")
    shift = end - length - start
    if stated is not None and stated != end - shift:
        raise Damage(Verdict.CORRUPT, position, "the archive's locator and its 64-bit end do not agree")
    return _Directory(end - length, end, records, shift)


def _find_end(fd: int, size: int) -> int:
    """Offset of the end record, which is the last thing in the file but for a comment of a length it states."""
    tail_bytes = min(size, _END.size + _COMMENT_BYTES_MAX)
    tail = _exactly(fd, tail_bytes, size - tail_bytes)
    at = tail.rfind(_END_MAGIC)
    last = at
    while at >= 0:
        if at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[7] == len(tail):
            return size - tail_bytes + at
        at = tail.rfind(_END_MAGIC, 0, at)
    if last >= 0 and last + _END.size < len(tail):
        end = size - tail_bytes + last + _END.size
        raise Damage(Verdict.CORRUPT, end, f"{size - end} bytes after the archive's end")
    raise Damage(Verdict.TRUNCATED, size, "the archive has no end: the file was cut, or its last part overwritten")


def _records(fd: int, directory: _Directory) -> Iterator[_Record]:
    data = _exactly(fd, directory.end - directory.start, directory.start)
    at = 0
    for _ in range(directory.records):
        if at + _ENTRY.size > len(data) or data[at : at + 4] != _ENTRY_MAGIC:
            raise Damage(Verdict.CORRUPT, directory.start + at, "the archive's directory is broken")
        fields = _ENTRY.unpack_from(data, at)
        flags, method, crc32, stored, size = fields[3], fields[4], *fields[7:10]
        name_bytes, extra_bytes, comment_bytes, offset = *fields[10:13], fields[16]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_bytes
        next_at = extra_at + extra_bytes + comment_bytes
        if next_at > len(data) or name_bytes > NAME_BYTES_MAX or flags & _ENCRYPTED:
            raise Damage(Verdict.CORRUPT, directory.start + at, "the archive's directory is broken")
        size, stored, offset = _widen(data[extra_at : extra_at + extra_bytes], size, stored, offset)
        if method == _STORED and stored != size:
            raise Damage(Verdict.CORRUPT, directory.start + at, "a record has two sizes")
        yield _Record(data[name_at:extra_at], offset, stored, size, crc32, method)
        at = next_at
    if at != len(data):
        raise Damage(Verdict.CORRUPT, directory.start + at, "the archive's directory is longer than its records")


def _widen(extra: bytes, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """Take from the 64-bit extra field those of the three that do not fit 32 bits, in this order."""
    values = [size, stored, offset]
    if _IN_ZIP64 not in values:
        return size, stored, offset
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            size, stored, offset = (next(wide, value) if value == _IN_ZIP64 else value for value in values)
            return size, stored, offset
        at += 4 + length
    return size, stored, offset


def _extents(fd: int, records: list[_Record], directory_start: int) -> Iterator[Extent]:
    """Check that each record lies where the directory says, behind the one before it, and give its bytes."""
    free_from = 0
    for record in records:
        name = record.name.decode("utf-8", "replace")
        if record.offset < free_from or record.offset + _LOCAL.size > directory_start:
            raise Damage(Verdict.CORRUPT, record.offset, f"record {name} lies over another or outside the file")
        head = _exactly(fd, _LOCAL.size + len(record.name), record.offset)
        fields = _LOCAL.unpack_from(head)
        name_bytes, extra_bytes = fields[9:11]
        if fields[0] != _LOCAL_MAGIC or name_bytes != len(record.name) or head[_LOCAL.size :] != record.name:
            raise Damage(Verdict.CORRUPT, record.offset, f"record {name} is not where the archive's directory says")
        if not fields[2] & _HAS_DESCRIPTOR and fields[6] != record.crc32:
            raise Damage(Verdict.CORRUPT, record.offset, f"record {name} has two checksums")
        start = record.offset + _LOCAL.size + name_bytes + extra_bytes
        free_from = start + record.stored
        if free_from > directory_start:
            raise Damage(Verdict.CORRUPT, record.offset, f"record {name} reaches over the archive's directory")
        if record.method == _STORED:
            yield Extent(start, free_from, record.crc32, name)


def _exactly(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise Damage(Verdict.TRUNCATED, offset + len(data), "the file ends inside the archive's tables")
    return data
