"""One finding: what is wrong, how grave it is, and what to do.

Owns the words for graveness and their order. Pure. Every id is described in docs/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "unknown", "note", "ok"]

ORDER: tuple[Severity, ...] = ("error", "warning", "unknown", "note", "ok")
"""The gravest first."""


class Finding(msgspec.Struct, frozen=True):
    """What one look has shown.

    `ok`: looked at, and good. `unknown`: could not be looked at, which is never taken for good. `note`: worth knowing, not wrong.
    """

    id: str
    severity: Severity
    text: str
    """What is wrong, with its numbers, on one line."""
    advice: str = ""
    """What to do about it, on one line."""

    @property
    def is_wrong(self) -> bool:
        """Whether somebody should do something."""
        return self.severity in ("error", "warning")

    @property
    def line(self) -> str:
        """Both on one line, as the start says it."""
        return f"{self.text}; {self.advice}" if self.advice else self.text


Findings = list[Finding]


def error(name: str, text: str, advice: str) -> Finding:
    """Work will be lost, or nothing will start."""
    return Finding(name, "error", text, advice)


def warning(name: str, text: str, advice: str) -> Finding:
    """Work may be lost in some case."""
    return Finding(name, "warning", text, advice)


def unknown(name: str, text: str, advice: str = "") -> Finding:
    """Could not look."""
    return Finding(name, "unknown", text, advice)


def note(name: str, text: str, advice: str = "") -> Finding:
    """Not wrong."""
    return Finding(name, "note", text, advice)


def ok(name: str, text: str) -> Finding:
    """Looked at, and good."""
    return Finding(name, "ok", text)


def wrong(findings: Iterable[Finding]) -> Findings:
    """Those that somebody should do something about."""
    return [finding for finding in findings if finding.is_wrong]
