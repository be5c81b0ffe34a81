"""`ckptctl status`: how a job stands, as a block for people and as JSON.

Owns the lines, their order and their units. Must not look at a disk, ask anybody, or decide how a job stands
(ctl/job_standing.py). What comes from a journal or a manifest may have been written by anybody: nothing of it reaches a terminal
that would obey it.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec

from ckpt_supervisor.text import one_line, size_text, time_text
from ckpt_supervisor.view.attempts import Attempt
from ckpt_supervisor.view.checkpoints import Look, Row, age_s, counted, cut, painted

TITLE = 14
"""Columns before a fact."""

LINES_MAX = 4
BAR_CELLS = 60
END_MAX = 60
"""Without a terminal's width."""

SHOWN_MAX = 12
"""So many of the newest starts are in the table; --json has all that were read."""

NOTES_MAX = 4
CELLS_LEAST = 16
"""So many columns are left for how a start ended, or the table does without others."""

NARROW = 64
"""In fewer columns the words about the bar of times come below it."""

BEGAN = 1
"""The column that is set flush left."""

_GAP = "  "
_WORDS = {
    "training": "intact",
    "saving": "intact",
    "finished": "intact",
    "failed": "corrupt",
    "lost": "corrupt",
    "refused": "corrupt",
}
_WAYS = {"time_limit": "at the time limit", "failed": "failed by itself", "interrupted": "interrupted", "lost": "lost"}


class Status(msgspec.Struct, frozen=True):
    """One step of a job. `ends`: how each start ended, beside `starts`; `checkpoint`: the newest without a known problem."""

    job: str
    step_id: str
    dir: str
    word: str
    text: str
    starts: tuple[Attempt, ...]
    ends: tuple[str, ...]
    ways: dict[str, int]
    checkpoint: Row | None = None
    checkpoint_problem: str = ""
    end: datetime | None = None
    slurm: str = ""
    lives: bool = False
    """The newest start is at work as far as anybody can tell."""
    notes: tuple[str, ...] = ()
    """What is incomplete."""


def record(status: Status, now: datetime) -> dict[str, Any]:
    """For scripts; every key is always there, null for what is not known."""
    last, due = status.starts[-1], next_save(status)
    row = status.checkpoint
    return {
        "job": status.job,
        "step_id": status.step_id,
        "dir": status.dir,
        "state": status.word,
        "text": status.text,
        "slurm_state": status.slurm or None,
        "attempt": last.number,
        "epoch": last.epoch,
        "host": last.host or None,
        "pid": last.pid or None,
        "began_at": _iso(last.began),
        "last_word_at": _iso(last.last),
        "finished_steps": last.reached if last.reached >= 0 else None,
        "steps_per_s": None if last.steps_per_s is None else round(last.steps_per_s, 4),
        "checkpoint": _checkpoint(row, now),
        "every_ms": last.interval.get("every_ms"),
        "every_why": last.interval.get("why"),
        "save_cost_ms": last.interval.get("cost_ms"),
        "mtbi_ms": last.interval.get("mtbi_ms"),
        "next_save_at": _iso(due),
        "limit_at": _iso(status.end),
        "ended": dict(status.ways),
        "budgets": {key: last.recalled.get(key) for key in ("timeouts", "crashes", "stalled")},
        "warnings": [{"at": _iso(at), "text": text} for at, text in last.warnings],
        "notes": list(status.notes),
        "attempts": [_attempt(one, end) for one, end in zip(status.starts, status.ends, strict=True)],
    }


def _checkpoint(row: Row | None, now: datetime) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"step": row.step, "path": row.path, "bytes": row.size, "age_s": age_s(row.manifest, now)}


def _attempt(one: Attempt, end: str) -> dict[str, Any]:
    return {
        "attempt": one.number,
        "epoch": one.epoch,
        "host": one.host or None,
        "began_at": _iso(one.began),
        "last_word_at": _iso(one.last),
        "resume_step": one.resume_step if one.resume_step >= 0 else None,
        "committed_step": one.committed if one.committed >= 0 else None,
        "code": one.code,
        "end": end,
    }


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def block(status: Status, look: Look, unicode: bool = True) -> list[str]:
    """The job in a few lines, its starts as a table, and a bar of their times."""
    last = status.starts[-1]
    tint = _WORDS.get(status.word, "unknown")
    name = f"job {status.job}" + (f" step {status.step_id}" if status.step_id not in ("", "local") else "")
    room = 1_000 if look.width is None else max(10, look.width - len(status.word) - len(_GAP))
    head = painted(cut(one_line(name), room), "bold", look.colour) + _GAP + painted(status.word, tint, look.colour)
    facts = [("", status.text), ("directory", status.dir), *_facts(status, last, look.now)]
    lines = [head]
    for title, text in facts:
        lines += _wrapped(title, one_line(text), look.width) if text else []
    lines += ["", *_table(status, look)]
    bar = _bar(status, look, unicode)
    return [*lines, *(["", *bar] if bar else [])]


def _wrapped(title: str, text: str, width: int | None) -> list[str]:
    """A fact on as many lines as a terminal needs."""
    room = 1_000_000 if width is None else max(20, width - TITLE - 1)
    parts = textwrap.wrap(text, room, break_on_hyphens=False, max_lines=LINES_MAX, placeholder=" …")
    return [f"  {title if number == 0 else '':<{TITLE - 2}}{part}" for number, part in enumerate(parts)]


def _facts(status: Status, last: Attempt, now: datetime) -> list[tuple[str, str]]:
    since = "" if last.began is None else f", for {span_text((now - last.began).total_seconds())}"
    where = f"{last.host}, process {last.pid}, attempt {last.number}{since}" if status.lives else ""
    facts = [("at", where), ("steps", _steps(last, status.lives)), ("checkpoint", _newest(status, now))]
    facts += [("interval", _interval(status, last, now)), ("time left", _left(status, now)), ("ended", _ways(status.ways))]
    facts.append(("budgets", _budgets(last)))
    said = "" if status.lives or last.last is None else f"{span_text((now - last.last).total_seconds())} ago"
    facts.append(("last word", said))
    titles = ["warnings", *[""] * len(last.warnings)]
    facts += [(title, f"{at:%m-%d %H:%M:%S}  {text}") for title, (at, text) in zip(titles, last.warnings, strict=False)]
    return facts + _incomplete(status.notes)


def _incomplete(notes: tuple[str, ...]) -> list[tuple[str, str]]:
    told = [note.removeprefix("incomplete: ") for note in notes[:NOTES_MAX]]
    more = len(notes) - len(told)
    told += [f"and {counted(more, 'note')} more: see --json"] if more > 0 else []
    return list(zip(["incomplete", *[""] * len(told)], told, strict=False))


def _steps(last: Attempt, lives: bool) -> str:
    if last.reached < 0:
        return ""
    speed = "" if last.steps_per_s is None or not lives else f"; {last.steps_per_s:.3g} steps/s lately, saves included"
    return f"{last.reached:,} finished when last heard of{speed}"


def _newest(status: Status, now: datetime) -> str:
    row = status.checkpoint
    if row is None:
        return status.checkpoint_problem or "none"
    seconds = age_s(row.manifest, now)
    age = "" if seconds is None else f", {span_text(seconds)} ago"
    return f"step {row.step:,}{age}, {'-' if row.size is None else size_text(row.size)}; whole by names and sizes"


def next_save(status: Status) -> datetime | None:
    """When the next save by time is due, as far as the journal tells; None where there is none."""
    last = status.starts[-1]
    every_ms = last.interval.get("every_ms")
    if not status.lives or not isinstance(every_ms, int) or every_ms <= 0 or last.saved_at is None or last.round is not None:
        return None
    try:
        return last.saved_at + timedelta(milliseconds=every_ms)
    except OverflowError:
        return None


def _interval(status: Status, last: Attempt, now: datetime) -> str:
    every_ms = last.interval.get("every_ms")
    if not last.interval:
        return ""
    if not isinstance(every_ms, int) or every_ms <= 0:
        return "no saves by time"
    why = [str(last.interval.get("why") or "")]
    cost_ms, mtbi_ms = last.interval.get("cost_ms"), last.interval.get("mtbi_ms")
    if isinstance(cost_ms, int):
        why.append(f"a save costs {time_text(cost_ms)}")
    if isinstance(mtbi_ms, int):
        why.append(f"an interruption every {span_text(mtbi_ms / 1000)}")
    told = ", ".join(filter(None, why))
    due = next_save(status)
    until = "" if due is None else f"; the next save in {span_text(max(0.0, (due - now).total_seconds()))}"
    return f"every {span_text(every_ms / 1000)}{f' ({told})' if told else ''}{until}"


def _left(status: Status, now: datetime) -> str:
    if status.end is None or not status.lives:
        return ""
    left_s = (status.end - now).total_seconds()
    return f"{span_text(left_s)} until the time limit" if left_s > 0 else "the time limit is reached"


def _ways(ways: dict[str, int]) -> str:
    return ", ".join(f"{count} {_WAYS.get(way, way)}" for way, count in ways.items() if count)


def _budgets(last: Attempt) -> str:
    """What the limits on requeues are counted against, as it was when this attempt began."""
    names = (
        ("timeouts", "{} used for the time limit"),
        ("crashes", "{} for crashes"),
        ("stalled", "{} in a row without progress"),
    )
    counts = [(last.recalled.get(key), words) for key, words in names]
    return (
        ", ".join(words.format(count) for count, words in counts if isinstance(count, int)) if any(n for n, _ in counts) else ""
    )


def _table(status: Status, look: Look) -> list[str]:
    shown = list(zip(status.starts, status.ends, strict=True))[-SHOWN_MAX:]
    head = ("ATTEMPT", "BEGAN (UTC)", "LASTED", "FROM", "NEWEST", "END")
    names = Counter(one.number for one in status.starts)
    rows = [_cells(one, end or (status.word if one is status.starts[-1] else "lost"), look.now, status) for one, end in shown]
    rows = [
        (row[0] if names[one.number] == 1 else f"{row[0]}#{one.epoch}", *row[1:])
        for row, (one, _) in zip(rows, shown, strict=True)
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    columns, room = _columns(widths, look.width)
    lines = []
    for number, row in enumerate([head, *rows]):
        cells = [row[c].ljust(widths[c]) if c == BEGAN else row[c].rjust(widths[c]) for c in columns]
        line = _GAP + _GAP.join([*cells, cut(row[-1], room)])
        lines.append(painted(line, "bold", look.colour) if number == 0 else line)
    if len(status.starts) > len(shown):
        lines.append(f"{_GAP}and {counted(len(status.starts) - len(shown), 'start')} before: see --json")
    return lines


def _columns(widths: list[int], width: int | None) -> tuple[tuple[int, ...], int]:
    """Which columns there is room for before the last one, and how much is left for that."""
    room = END_MAX
    columns: tuple[int, ...] = ()
    for columns in ((0, BEGAN, 2, 3, 4), (0, BEGAN, 2, 4), (0, BEGAN, 4), (0, 4), (0,)):
        room = END_MAX if width is None else width - sum(widths[c] + len(_GAP) for c in columns) - len(_GAP)
        if room >= CELLS_LEAST:
            break
    return columns, max(1, room)


def _cells(one: Attempt, end: str, now: datetime, status: Status) -> tuple[str, ...]:
    until = now if one is status.starts[-1] and status.lives else one.last
    lasted = "-" if one.began is None or until is None else span_text((until - one.began).total_seconds())
    began = "-" if one.began is None else f"{one.began:%Y-%m-%d %H:%M}"
    steps = ("-" if step < 0 else f"{step:,}" for step in (one.resume_step, one.committed))
    return (str(one.number), began, lasted, *steps, one_line(end))


def _bar(status: Status, look: Look, unicode: bool) -> list[str]:
    """When somebody trained, over the time from the first start to now; two shades tell neighbours apart."""
    spans = []
    for one in status.starts[-SHOWN_MAX:]:
        until = look.now if one is status.starts[-1] and status.lives else one.last
        if one.began is not None and until is not None:
            spans.append((one.began, max(one.began, until)))
    if len(spans) < 2:
        return []
    first, final = spans[0][0], max(until for _, until in spans)
    total_s = (final - first).total_seconds()
    if total_s <= 0:
        return []
    is_narrow = look.width is not None and look.width < NARROW
    beside = 3 if is_narrow else 40
    cells = BAR_CELLS if look.width is None else max(10, min(BAR_CELLS, look.width - beside))
    shades, gap = (("█", "▓"), "·") if unicode else (("#", "="), ".")
    drawn = [gap] * cells
    for number, (began, until) in enumerate(spans):
        start = min(cells - 1, int((began - first).total_seconds() / total_s * cells))
        stop = max(start + 1, int((until - first).total_seconds() / total_s * cells))
        drawn[start:stop] = shades[number % 2] * (min(stop, cells) - start)
    ran_s = sum((until - began).total_seconds() for began, until in spans)
    share = f"{counted(len(spans), 'start')} in {span_text(total_s)}, {min(100, round(100 * ran_s / total_s))} % of it running"
    line = f"{_GAP}{''.join(drawn[:cells])}"
    return [line, *_wrapped_plain(share, look.width)] if is_narrow else [f"{line}  {share}"]


def _wrapped_plain(text: str, width: int | None) -> list[str]:
    return [f"{_GAP}{part}" for part in textwrap.wrap(text, max(20, (width or NARROW) - len(_GAP) - 1))]


def span_text(seconds: float) -> str:
    """A duration for people: 12s, 5m 10s, 3h 12m, 2d 4h."""
    whole = max(0, int(seconds))
    for (unit, size), (less, part) in ((("d", 86_400), ("h", 3_600)), (("h", 3_600), ("m", 60)), (("m", 60), ("s", 1))):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{less}" if rest else "")
    return f"{whole}s" if seconds >= 10 or seconds <= whole else f"{seconds:.1f}s"
