"""Files of torch.save since torch 1.6: a zip archive, records stored without compression, `<top>/data.pkl` first.

Owns what torch's archives look like, one to a file or many in a row as in the `.distcp` files of
torch.distributed.checkpoint. Must not unpickle, inflate or import torch. torch.load never looks at the CRC32s that
torch.save writes (tried: a flipped bit loads without a word), so they are read here. With
torch.serialization.set_crc32_options(False) all of them are 0, which means "no checksums".

What torch writes around the records is known byte by byte (torch 2.13 measured, one of 2019 by its source): local
headers that repeat the directory's, padding of the letter Z, a descriptor behind each record that is not empty, and no
gap anywhere. All of that is checked where an archive is torch's own, which its padding tells. So of a single flipped
bit nothing is left unseen but the two versions in the 64-bit end record, which nobody reads. Without checksums the
records' own bytes are.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import chain

from ckpt_supervisor.store.formats.structure import Damage, Extent, Structure
from ckpt_supervisor.store.formats.zip_tables import (
    HAS_DESCRIPTOR,
    IN_ZIP64,
    LOCAL,
    LOCAL_MAGIC,
    NAME_BYTES_MAX,
    STORED,
    Local,
    Record,
    Window,
    find_directory,
    read_locals,
    read_records,
    shown,
)

FORMAT = "torch zip"
CHAIN_FORMAT = "torch zips"
CHAIN_MAX = 200_000
CHAIN_EXTENTS_MAX = 2_000_000
"""Most archives in one file, and most records in all of them."""

_FIRST_RECORD = b"/data.pkl"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_PADDING_TAG, _PADDING = b"FB", b"Z"


def read_structure(fd: int, size: int) -> Structure | None:
    """None if this is not one archive of torch.save. Raises Damage, or OSError."""
    return read_window(fd, 0, size, may_have_comment=True)


def read_window(fd: int, start: int, size: int, may_have_comment: bool = False) -> Structure | None:
    """The same for bytes [start, start + size) of a file. Offsets in the answer count from the file's start."""
    window = Window(fd, start, size)
    begins = begins_like_ours(window, 0)
    try:
        directory = find_directory(window, may_have_comment)
        if directory.shift < 0 or directory.start < 0:
            raise window.damage("the archive's directory is not where its end says", max(0, directory.start))
        if directory.shift > 0:
            if not begins or begins_like_ours(window, directory.shift):
                return None  # a chain of archives, or one behind something else
            raise window.damage(f"{directory.shift} bytes too many before this directory", directory.start)
        records = sorted(read_records(window, directory), key=lambda record: record.offset)
    except Damage:
        if begins:
            raise
        return None
    if not begins and not (records and records[0].offset == 0 and records[0].name.endswith(_FIRST_RECORD)):
        return None
    # From here on it is ours: by its first bytes, or by its directory although its first bytes are damaged.
    if not any(record.name.endswith(_FIRST_RECORD) for record in records):
        raise window.damage("the archive's directory lists no data.pkl", directory.start)
    return Structure(FORMAT, _extents(window, records, directory.start))


def read_chain(fd: int, size: int) -> Structure | None:
    """The structure of a file that holds several archives, one behind the other. Raises Damage, or OSError.

    Only the end of a file says where its last archive starts, so it is read from behind. A chain that was cut between
    two archives is a shorter chain; only `.metadata` beside it can tell (dcp.py).
    """
    if not begins_like_ours(Window(fd, 0, min(size, LOCAL.size + NAME_BYTES_MAX)), 0):
        return None
    parts: list[tuple[Extent, ...]] = []
    end, count = size, 0
    for _ in range(CHAIN_MAX):
        window = Window(fd, 0, end)
        start = find_directory(window, may_have_comment=False).shift
        if not 0 <= start < end or not begins_like_ours(window, start):
            raise window.damage("no archive of torch starts where the end of this one says", end)
        if start == 0 and not parts:
            return None  # one archive, no chain
        structure = read_window(fd, start, end - start)
        if structure is None:
            raise window.damage("not an archive of torch", start)
        parts.append(structure.extents)
        count += len(structure.extents)
        if count > CHAIN_EXTENTS_MAX:
            return None
        if start == 0:
            return Structure(CHAIN_FORMAT, tuple(chain.from_iterable(reversed(parts))) if all(parts) else ())
        end = start
    return None


def begins_like_ours(window: Window, offset: int) -> bool:
    """Whether the header of a record data.pkl stands there."""
    head = window.read(LOCAL.size, offset)
    if len(head) < LOCAL.size or not head.startswith(LOCAL_MAGIC):
        return False
    name_bytes: int = LOCAL.unpack(head)[9]
    return name_bytes <= NAME_BYTES_MAX and window.read(name_bytes, offset + LOCAL.size).endswith(_FIRST_RECORD)


def _extents(window: Window, records: list[Record], directory_start: int) -> tuple[Extent, ...]:
    """Check all that stands between the records, and give their places; none if no checksum speaks for them."""
    found = list(zip(records, read_locals(window, records, directory_start), strict=True))
    kinds = Counter(_kind(record) for record, local in found if _PADDING_TAG in local.extra)
    ours = kinds.most_common(1)[0][0] if kinds else None
    free_from = 0
    for record, local in found:
        # A record of another kind and without padding was added by another tool.
        is_ours = ours is not None and (_kind(record) == ours or _PADDING_TAG in local.extra)
        problem = _oddity(record, local, ours) if is_ours else _contradiction(record, local)
        if problem:
            raise window.damage(f"record {shown(record)} {problem}", record.offset)
        if ours is not None and record.offset != free_from:
            raise window.damage(f"bytes before record {shown(record)} belong to none", free_from)
        free_from = local.end + len(local.behind)
    extents = tuple(
        Extent(window.start + local.start, window.start + local.end, record.crc32, shown(record))
        for record, local in found
        if record.method == STORED
    )
    # A compressed record (torch writes none) would have to be inflated: then no checksum speaks for the whole file.
    has_checksums = len(extents) == len(records) and any(extent.crc32 for extent in extents)
    return extents if has_checksums else ()


def _contradiction(record: Record, local: Local) -> str:
    """Where the header before a record, or the descriptor behind it, says otherwise than the directory."""
    _, _, flags, method, _, _, crc32, stored, size = local.fields
    if method != record.method:
        return "is compressed in two ways"
    if not flags & HAS_DESCRIPTOR:
        if crc32 != record.crc32:
            return "has two checksums"
        if IN_ZIP64 not in (stored, size) and (stored, size) != (record.stored, record.size):
            return "has two sizes"
    elif local.behind.startswith(_DESCRIPTOR_MAGIC) and not local.behind.startswith(_descriptors(record)):
        return "has two checksums or sizes"
    return ""


def _kind(record: Record) -> tuple[object, ...]:
    """What one writer writes the same for all its records."""
    return record.written_by, record.time


def _oddity(record: Record, local: Local, ours: tuple[object, ...] | None) -> str:
    """What torch would not have written around this record."""
    _, version, flags, method, *time, crc32, stored, size = local.fields
    if _kind(record) != ours:
        return "has a broken directory entry"
    if (version, flags, method, tuple(time)) != (record.version, record.flags, record.method, record.time):
        return "has another header than its directory entry"
    if crc32 or stored or size or (record.crc32 and not record.size):  # torch leaves them to the descriptor
        return "has two checksums or sizes"
    wide = sum(value >= IN_ZIP64 for value in (record.stored, record.size, record.offset))
    field = struct.pack("<HH", 1, 8 * wide) if wide else b""
    if record.extra[:4] != field or len(record.extra) != len(field) + 8 * wide:
        return "has a broken directory entry"
    # The size as stored is not known yet when the header is written: 0 there (torch 2.13 measured).
    unknown = record.extra[:12] + bytes(8) + record.extra[20:] if record.size >= IN_ZIP64 else record.extra
    prefix = record.extra if local.extra.startswith(record.extra) else unknown
    if not local.extra.startswith(prefix):
        return "has another header than its directory entry"
    padding = local.extra[len(prefix) :]
    stated = len(padding) - len(_PADDING_TAG) - 2
    if padding[:4] != _PADDING_TAG + (stated & 0xFFFF).to_bytes(2, "little") or padding[4:].strip(_PADDING):
        return "has broken padding"
    if flags & HAS_DESCRIPTOR and local.behind not in _descriptors(record):
        return "is not followed by its descriptor"
    if not flags & HAS_DESCRIPTOR and (local.behind or record.stored):
        return "is followed by bytes that belong to none"
    return ""


def _descriptors(record: Record) -> tuple[bytes, bytes]:
    """What stands behind a record, in its long and its short form."""
    crc32, stored, size = record.crc32, record.stored, record.size
    long = struct.pack("<4sLQQ", _DESCRIPTOR_MAGIC, crc32, stored, size)
    short = struct.pack("<4sLLL", _DESCRIPTOR_MAGIC, crc32, stored & 0xFFFFFFFF, size & 0xFFFFFFFF)
    return long, short
