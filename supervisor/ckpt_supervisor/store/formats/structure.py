"""What a format reader says about one file, or about the files of one directory together.

Owns the value types between the format readers and the verification. Must not read anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ckpt_supervisor.store.verdict import Finding, Verdict

LISTING_BYTES_MAX = 256 * 1024 * 1024
"""Of a larger list of what is in a directory only the names of files are looked at."""


class Extent(msgspec.Struct, frozen=True):
    """Bytes [start, end) of a file, and the CRC32 that the file itself states for them."""

    start: int
    end: int
    crc32: int
    name: str


class Structure(msgspec.Struct, frozen=True):
    """A well-formed file. `extents` is empty when the file carries no checksums; sorted and disjoint otherwise."""

    format: str
    extents: tuple[Extent, ...] = ()


class Folder(msgspec.Struct, frozen=True):
    """A directory of a checkpoint, as a reader of sets sees it.

    `name` is the directory's own, such as checkpoint-500. `files`: every regular file at or below it, by path relative
    to it, with its size in bytes. `open_file` gives a descriptor for one of them, which the caller closes; it raises
    NotRegular or OSError. `listing_bytes_max`: how large a list of contents may be to be gone through item by item, which
    takes 11 s for 100,000 of them in 25 MB (measured); of a larger one only the names of files are looked at.
    """

    name: str
    files: Mapping[str, int]
    open_file: Callable[[str], int]
    listing_bytes_max: int = LISTING_BYTES_MAX


class SetLook(msgspec.Struct, frozen=True):
    """What a directory of a known layout is, by what its files say of each other.

    `findings`: what is wrong, paths relative to the folder. `extents`: checksums that are known of single files only
    through another one, sorted and disjoint; such a file's own structure need not be read any more.
    """

    format: str
    findings: tuple[Finding, ...] = ()
    extents: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)


class Damage(Exception):
    """The file is of the reader's format, and broken."""

    def __init__(self, verdict: Verdict, offset: int | None, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.offset = offset
        self.reason = reason
