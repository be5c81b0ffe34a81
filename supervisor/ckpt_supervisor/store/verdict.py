"""What a look at a checkpoint found: verdict, findings, report.

Owns the words of a verification and their order of weight. Must not touch a disk: these values travel to the journal
and to the resume gate. "Could not look" is a verdict of its own (`unknown`), because a disk that does not answer must
never read as a checkpoint that is not there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Literal

import msgspec

from ckpt_supervisor.text import one_line

Mode = Literal["full", "structure"]
"""`full` reads every byte; `structure` looks at names, sizes and the tables inside the files."""


class Verdict(enum.Enum):
    """One word about a checkpoint or a file."""

    INTACT = "intact"
    MISSING = "missing"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    MIXED = "mixed"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


_WEIGHT = (
    Verdict.MISSING,
    Verdict.TRUNCATED,
    Verdict.CORRUPT,
    Verdict.MIXED,
    Verdict.FOREIGN,
    Verdict.UNKNOWN,
)
"""Which verdict names the whole when files disagree.

Known damage outweighs "could not look", since looking again cannot mend it.
"""


SHOWN_MAX = 300
"""Longest part of a path that a line shows."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    `path` is relative to the checkpoint, "" for the checkpoint itself; `offset` in bytes, if known.
    """

    verdict: Verdict
    path: str
    offset: int | None
    reason: str

    @property
    def where(self) -> str:
        """`state.pt at byte 4096`, "" for the whole checkpoint."""
        at = f" at byte {self.offset}" if self.offset is not None else ""
        return one_line(self.path[:SHOWN_MAX]) + at

    @property
    def told(self) -> str:
        """`state.pt at byte 4096: CRC32 does not match`: for lines that name the verdict before it."""
        return f"{self.where}: {one_line(self.reason)}" if self.where else one_line(self.reason)

    def __str__(self) -> str:
        """`state.pt at byte 4096: corrupt: CRC32 does not match`."""
        word = f"{self.verdict.value}: {one_line(self.reason)}"
        return f"{self.where}: {word}" if self.where else word


class Report(msgspec.Struct, frozen=True):
    """The outcome of one verification. `unchecked`: files whose bytes no checksum of any kind speaks for."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    bytes_read: int
    mode: Mode
    unchecked: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The weightiest finding in words, one line, without the verdict; "" when intact."""
        finding = weightiest(self.findings)
        return "" if finding is None else finding.told


def weightiest(findings: Iterable[Finding]) -> Finding | None:
    """The finding that names the whole: the first one of the weightiest verdict."""
    return min(findings, key=lambda finding: _WEIGHT.index(finding.verdict), default=None)


def report_of(findings: Iterable[Finding], bytes_read: int, mode: Mode, unchecked: Iterable[str] = ()) -> Report:
    """The report over these findings; intact when there are none."""
    found = tuple(findings)
    first = weightiest(found)
    return Report(Verdict.INTACT if first is None else first.verdict, found, bytes_read, mode, tuple(unchecked))
