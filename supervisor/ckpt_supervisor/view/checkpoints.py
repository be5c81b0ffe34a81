"""`ckptctl ls` and `show`: checkpoints as a table, as words, and as JSON.

Owns columns, units, colours and the keys of the JSON. Must not look at a disk or judge a checkpoint. Everything that a
manifest says may have been written by anybody, so nothing of it reaches a terminal that the terminal would obey.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import msgspec

from ckpt_supervisor.store import Finding, Manifest, Verdict
from ckpt_supervisor.text import one_line, size_text
from ckpt_supervisor.view.log import moment

FILES_SHOWN = 10

_COLOURS = {"intact": "\x1b[32m", "unknown": "\x1b[33m", "foreign": "\x1b[33m", "dim": "\x1b[2m", "bold": "\x1b[1m"}
_DAMAGED = "\x1b[31m"
_END = "\x1b[0m"
_GAP = "  "
_RIGHT = frozenset({"STEP", "AGE", "SIZE", "RANKS"})
_DROPPED_FIRST = ("JOB", "CAUSE", "RANKS")
"""Columns that a narrow terminal does without."""

_CELL_MAX = 24
_CAUSE_MAX = 28
"""The longest of ours, "end of the time limit ahead", has 27 letters."""

_LAST_MIN = 24
"""Least room for the verdict and what goes with it."""


class Row(msgspec.Struct, frozen=True):
    """One line of a list. `kind`: checkpoint, damaged (put aside), failed (set aside, training fails from it), partial, trash.

    `marks`: latest, protected, milestone. `bytes`: measured, where no manifest states it.
    """

    kind: str
    step: int
    path: str
    manifest: Manifest | None = None
    problem: Finding | None = None
    epoch: int | None = None
    bytes: int | None = None
    marks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """The word of a cheap look; None for what was never committed, and for what was put aside and looks whole.

        Such a one was found damaged by its bytes, which this look has not read.
        """
        if self.problem is not None:
            return str(self.problem.verdict.value)
        if self.kind != "checkpoint":
            return None
        return str((Verdict.UNKNOWN if self.manifest is None else Verdict.INTACT).value)

    @property
    def size(self) -> int | None:
        """Bytes by the manifest, else as measured."""
        return self.bytes if self.manifest is None else self.manifest.total_bytes


class Look(NamedTuple):
    """How to draw: `width` in columns (None: as long as it gets), colours, and what time it is."""

    width: int | None
    colour: bool
    now: datetime


def record(row: Row, now: datetime) -> dict[str, Any]:
    """A row for scripts; every key is always there."""
    manifest = row.manifest
    return {
        "step": row.step,
        "kind": row.kind,
        "path": row.path,
        "verdict": row.verdict,
        "reason": None if row.problem is None else str(row.problem),
        "bytes": row.size,
        "ranks": None if manifest is None else list(manifest.ranks),
        "world_size": None if manifest is None else manifest.world_size,
        "created_at": None if manifest is None else manifest.created_at,
        "age_s": age_s(manifest, now),
        "cause": None if manifest is None else manifest.cause,
        "job": None if manifest is None else manifest.job,
        "attempt": None if manifest is None else manifest.attempt,
        "epoch": row.epoch if manifest is None else manifest.epoch,
        "verified": None if manifest is None else manifest.verified,
        "adopted": list(adopted(manifest)),
        "latest": "latest" in row.marks,
        "protected": "protected" in row.marks,
        "milestone": "milestone" in row.marks,
    }


def table(rows: Iterable[Row], look: Look) -> list[str]:
    """The rows below a head, as wide as they need to be and no wider than the terminal."""
    cells = [_cells(row, look.now) for row in rows]
    names = [name for name in (cells[0] if cells else {}) if name != "VERDICT"]
    widths = {name: max(len(name), *(len(line[name]) for line in cells)) for name in names}
    for name in _DROPPED_FIRST:
        used = sum(widths.values()) + len(_GAP) * len(widths)
        if look.width is None or used + _LAST_MIN <= look.width:
            break
        widths.pop(name, None)
    used = sum(widths.values()) + len(_GAP) * len(widths)
    room = None if look.width is None else max(_LAST_MIN, look.width - used)
    lines = [painted(_aligned(dict(zip(widths, widths, strict=True)), widths) + "VERDICT", "bold", look.colour)]
    pad = max((len(line["VERDICT"].partition("\t")[0]) for line in cells), default=0)
    for line in cells:
        word, _, notes = line["VERDICT"].partition("\t")
        last = cut(f"{word:<{pad}}{_GAP}{notes}".rstrip() if notes else word, room)
        lines.append(_aligned(line, widths) + painted(last, word, look.colour, upto=len(word)))
    return lines


def _cells(row: Row, now: datetime) -> dict[str, str]:
    manifest = row.manifest
    word = row.verdict or {"damaged": "put aside", "failed": "set aside", "partial": "partial", "trash": "going"}[row.kind]
    notes = list(row.marks)
    if adopted(manifest):
        notes.append("adopted")
    if manifest is not None and manifest.verified == "structure":
        notes.append("only its structure was verified")
    if row.kind == "damaged":
        notes.append("as damaged in its bytes: see ckptctl verify PATH" if row.verdict is None else "put aside")
    if row.kind == "failed":
        notes.append(f"training fails from it; back by: ckptctl repair --restore {row.step}")
    if row.kind == "partial":
        notes.append(f"epoch {row.epoch}")
    if row.problem is not None:
        notes.append(row.problem.told)
    ranks = "-"
    if manifest is not None:
        some = len(manifest.ranks) != manifest.world_size
        ranks = f"{len(manifest.ranks)} of {manifest.world_size}" if some else str(manifest.world_size)
    return {
        "STEP": str(row.step),
        "AGE": age_text(manifest, now),
        "SIZE": "-" if row.size is None else size_text(row.size),
        "RANKS": ranks,
        "CAUSE": "-" if manifest is None else cut(one_line(manifest.cause), _CAUSE_MAX),
        "JOB": "-" if manifest is None else cut(one_line(f"{manifest.job}/{manifest.attempt}"), _CELL_MAX),
        "VERDICT": f"{word}\t{one_line(', '.join(notes))}",
    }


def _aligned(line: dict[str, str], widths: dict[str, int]) -> str:
    cells = (line[name].rjust(width) if name in _RIGHT else line[name].ljust(width) for name, width in widths.items())
    return "".join(cell + _GAP for cell in cells)


def words(row: Row, resume: str, look: Look, files: int = FILES_SHOWN) -> list[str]:
    """One checkpoint in words. `resume`: what the next start would do with it."""
    manifest = row.manifest
    verdict = row.verdict or ("not looked into" if row.kind in ("damaged", "failed") else "none")
    head = painted(f"step {row.step}", "bold", look.colour) + f"  {one_line(row.path)}"
    by_what = "by names and sizes; ckptctl verify reads the bytes" if row.problem is None else row.problem.told
    if row.verdict is None:
        by_what = ""
    facts = [("verdict", painted(verdict, verdict, look.colour) + (f", {by_what}" if by_what else ""))]
    if row.kind != "checkpoint":
        what = {"damaged": "put aside as damaged", "partial": "being written, or left by a start that died"}
        what["failed"] = f"set aside, as training failed from it; back by: ckptctl repair --restore {row.step}"
        facts.append(("kind", what.get(row.kind, "on its way out")))
    if manifest is not None:
        facts += _facts(manifest, look.now)
    if adopted(manifest):
        facts.append(("adopted", one_line(f"a copy of {listed(adopted(manifest))}, which the program itself wrote")))
    if row.marks:
        facts.append(("marks", ", ".join(row.marks)))
    facts.append(("resume", resume))
    if manifest is not None:
        facts += _file_facts(manifest, files)
    return [head, *(f"  {name:<10}{text}" for name, text in facts)]


def _facts(manifest: Manifest, now: datetime) -> list[tuple[str, str]]:
    stamp = moment(manifest.created_at)
    saved = one_line(manifest.created_at[:40])
    if stamp is not None:
        saved = f"{_in_utc(stamp)} ({age_text(manifest, now)} ago)"
    ranks = f"all {manifest.world_size}"
    if len(manifest.ranks) != manifest.world_size:
        shown = ", ".join(str(rank) for rank in manifest.ranks[:8]) + (", …" if len(manifest.ranks) > 8 else "")
        ranks = f"{len(manifest.ranks)} of {manifest.world_size}: {shown}"
    verified = {"full": "every byte was read before the commit", "structure": "only names, sizes and tables were looked at"}
    return [
        ("saved", saved),
        ("cause", one_line(manifest.cause)),
        ("by", one_line(f"job {manifest.job}, attempt {manifest.attempt}, epoch {manifest.epoch}")),
        ("ranks", ranks),
        ("verified", f"{manifest.verified}: {verified[manifest.verified]}"),
        ("size", f"{size_text(manifest.total_bytes)} in {counted(len(manifest.files), 'file')}"),
    ]


def _in_utc(stamp: datetime) -> str:
    try:
        return f"{stamp.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except OverflowError:  # the year 1 or 9999, as something that cannot be read as a time would be
        return stamp.isoformat()


def _file_facts(manifest: Manifest, files: int) -> list[tuple[str, str]]:
    shown = manifest.files[:files]
    pad = max((len(one_line(file.path)) for file in shown), default=0)
    lines = []
    for file in shown:
        rank = "nobody reported it" if file.rank is None else f"rank {file.rank}"
        digest = f"xxh3_128 {file.xxh3_128}" if file.xxh3_128 else "no digest"
        lines.append(f"{one_line(file.path):<{pad}}  {size_text(file.bytes):>9}  {digest}  {rank}")
    if len(manifest.files) > len(shown):
        lines.append(f"and {len(manifest.files) - len(shown)} more (--files {len(manifest.files)}, or --json)")
    return [("files" if number == 0 else "", line) for number, line in enumerate(lines)]


def adopted(manifest: Manifest | None) -> tuple[str, ...]:
    """Names of what a program itself wrote and this is a copy of; () if the store was given it."""
    return () if manifest is None or manifest.adopted is msgspec.UNSET else manifest.adopted


def age_s(manifest: Manifest | None, now: datetime) -> int | None:
    """Seconds since it was made, by the clock of whoever made it; never below 0. None if it does not say."""
    stamp = None if manifest is None else moment(manifest.created_at)
    return None if stamp is None else max(0, int((now - stamp).total_seconds()))


def age_text(manifest: Manifest | None, now: datetime) -> str:
    """An age for people: 12s, 5m, 3h, 2d; "-" if it is not known."""
    seconds = age_s(manifest, now)
    if seconds is None:
        return "-"
    for unit, size, most in (("s", 1, 60), ("m", 60, 3_600), ("h", 3_600, 48 * 3_600)):
        if seconds < most:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86_400}d"


def counted(count: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first few, and how many more."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def cut(text: str, width: int | None) -> str:
    """The text in so many columns, with a mark where something is left out."""
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def painted(text: str, word: str, colour: bool, upto: int | None = None) -> str:
    """The first `upto` letters of a text in the colour of a verdict, or of `dim` and `bold`."""
    if not colour:
        return text
    tint = _COLOURS.get(word) or (_DAMAGED if word in {verdict.value for verdict in Verdict} else _COLOURS["dim"])
    end = len(text) if upto is None else upto
    return f"{tint}{text[:end]}{_END}{text[end:]}"
