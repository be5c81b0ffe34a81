"""What a format reader says about one file.

Owns the value types between the format readers and the verification. Must not read anything.
"""

from __future__ import annotations

import msgspec

from ckpt_supervisor.store.verdict import Verdict


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


class Damage(Exception):
    """The file is of the reader's format, and broken."""

    def __init__(self, verdict: Verdict, offset: int | None, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.offset = offset
        self.reason = reason
