"""`ckptctl timeline`: what each attempt of a run spent its time with, as bars, with the totals below.

Owns the drawing for a terminal. Must not read anything or decide what a time was spent with. Every kind has a
character of its own, so that bars can be read without colours; what comes from a journal goes through `harmless`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ckpt_supervisor.view import causes
from ckpt_supervisor.view.amounts import counted, instant, number, percent, span_text
from ckpt_supervisor.view.bars import Letter, Scale, bar, legend, marks
from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.plain import harmless
from ckpt_supervisor.view.totals import Totals, allocated, gained, is_least, label, totals

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SHOWN_MAX = 40
"""So many of the newest attempts are drawn; --json has all."""

WIDTH_MAX = 240
WIDTH_DEFAULT = 100
"""Where the output is no terminal."""

DETAIL_MAX = 40
CAUSE_MAX = 200
_GAP = "  "
_MARKED = {
    "notice": "notice",
    "restart": "restart in place",
    "hang": "hang",
    "oom": "memory",
    "task": "task lost",
    "asked": "asked",
}


class Looks(msgspec.Struct, frozen=True):
    """What the terminal can show."""

    width: int
    colour: bool
    unicode: bool


def block(run: Run, looks: Looks, shown_max: int = SHOWN_MAX) -> list[str]:
    """One run in lines."""
    made = io.StringIO()
    console = _console(made, looks)
    for part in _parts(run, looks, shown_max):
        console.print(part)
    return [line.rstrip() for line in made.getvalue().rstrip("\n").split("\n")]


def _console(made: io.StringIO, looks: Looks) -> Console:
    from rich.console import Console

    return Console(
        file=made,
        width=looks.width,
        force_terminal=looks.colour,
        color_system="standard" if looks.colour else None,
        no_color=not looks.colour,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
        legacy_windows=False,
        _environ={},
    )


def _parts(run: Run, looks: Looks, shown_max: int) -> Iterable[RenderableType]:
    from rich.text import Text

    sums = totals(run)
    shown = run.attempts[-shown_max:]
    yield Text(_title(run), style="bold")
    yield Text(_told(run, sums))
    scale = Scale.of(shown, run.now_ns, max(10, looks.width - len(_GAP)))
    if len(run.attempts) > len(shown):
        yield Text(f"{len(run.attempts) - len(shown)} attempts before are not drawn: see --json, or --last N")
    for one in shown:
        yield Text("")
        yield from _attempt(one, run, scale, looks)
    yield Text("")
    yield _spent(sums, looks, scale)
    there = legend(shown)
    if there:
        yield Text(f"{_GAP}below the bars: {there}")
    yield Text("")
    yield _table(sums)
    for note in _notes(run):
        yield Text(f"note: {note}", style="yellow")


def _title(run: Run) -> str:
    return harmless(f"{_names(run)} in {run.directory}")


def _names(run: Run) -> str:
    """The job, and the step where it is not the only one's."""
    names = []
    for job in run.jobs:
        steps = {one.step_id for one in run.attempts if one.job == job}
        step = f" step {next(iter(steps))}" if len(steps) == 1 and steps != {"local"} else ""
        names.append(f"job {job}{step}")
    return ", then ".join(names)


def _told(run: Run, sums: Totals) -> str:
    first = next((one.began_ns for one in run.attempts if one.began_ns is not None), None)
    last = run.attempts[-1]
    good = "" if sums.goodput is None else f", goodput {percent(sums.goodput)}"
    steps = "" if sums.steps is None else f", {number(sums.steps)} steps kept"
    lost = "" if not sums.lost_steps else f", {number(sums.lost_steps)} lost"
    return harmless(f"{instant(first)} UTC; {counted(sums.attempts, 'attempt')}, {standing(last)}{good}{steps}{lost}")


def standing(attempt: Attempt) -> str:
    """How an attempt stands, in a few words."""
    if attempt.cause:
        return attempt.cause
    if attempt.is_running:
        return f"{attempt.spans[-1].kind} now" if attempt.spans else "at it now"
    return "still at it, or lost: its journal does not say"


def _attempt(one: Attempt, run: Run, scale: Scale, looks: Looks) -> Iterable[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    style = "green" if one.cause in causes.GOOD else "bold" if one.cause in causes.NO_INTERRUPTION else "bold red"
    length = span_text(allocated(one))
    head = Text(harmless(f"{label(one, run)}{_GAP}{instant(one.began_ns)}{_GAP}{length}{_GAP}{_steps(one)}"))
    cause = Text(harmless(_ended(one), max(CAUSE_MAX, looks.width)), style=style)
    if len(head.plain) + 2 * len(_GAP) + len(cause.plain) <= looks.width:
        yield head + Text(_GAP) + cause
    else:
        yield head
        yield Padding(cause, (0, 0, 0, len(_GAP)))
    letters, styles = bar(one, run.now_ns, scale, looks.unicode)
    drawn = Text(_GAP)
    for tint, row in itertools.groupby(zip(letters, styles, strict=True), key=lambda one: one[1]):
        drawn.append("".join(letter for letter, _ in row), style=tint)
    yield drawn
    below = marks(one, scale)
    if below:
        yield Text(_GAP + below, style="bold")


def _steps(one: Attempt) -> str:
    """From where to where, and what was lost."""
    if one.resume_step < 0 and one.reached is None and one.is_told:
        return "no step"
    count = gained(one)
    kept = "?" if count is None else number(count)
    return f"+{kept} steps" + _lost(one)


def _lost(one: Attempt) -> str:
    if one.cause == causes.FINISHED and not one.lost_steps and not is_least(one):
        return ""
    if one.lost_steps is None:
        return ", lost: not known"
    if not one.lost_steps and not one.cause and one.code is None:
        return ", none lost so far"
    least = "at least " if is_least(one) else ""
    if not one.lost_steps:
        return ", perhaps some lost" if least else ", none lost"
    return f", {least}{number(one.lost_steps)} lost"


def _ended(one: Attempt) -> str:
    """The cause, and what became of the job."""
    is_short = len(one.detail) <= DETAIL_MAX
    detail = f" ({one.detail})" if one.detail else ""
    has_tried = one.cause not in (causes.FAILED, causes.HUNG, causes.OUT_OF_MEMORY)
    stale = ", its last save did not make it" if has_tried else ""
    saved = {"fresh": ", saved", "stale": stale}.get(one.outcome, "")
    back = ""
    if one.requeue in ("accepted", "already pending"):
        back = ", requeued"
    elif one.requeue:
        back = f", requeue {one.requeue}" if one.requeue != "resubmitted" else ", resubmitted"
    return f"{standing(one)}{detail if is_short else ''}{saved}{back}{'' if is_short else detail}"


def _spent(sums: Totals, looks: Looks, scale: Scale) -> RenderableType:
    """The kinds, which is also what the bars' characters mean."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=True)
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    whole = sum(sums.kinds_ms.values())
    for kind, spent in sums.kinds_ms.items():
        if not spent:
            continue
        letter = Letter.of(kind, looks.unicode)
        share = percent(spent / whole) if whole else "-"
        table.add_row(Text(letter.char * 2, style=letter.style), kind, span_text(spent), share)
    table.add_row("", "a column", f"{span_text(scale.ns_per_cell / 1e6)}", "")
    return table


def _table(sums: Totals) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(sums):
        table.add_row(name, harmless(value))
    return table


def rows(sums: Totals) -> list[tuple[str, str]]:
    """The totals, as they are told."""
    unknown = "not known"
    ended = ", ".join(f"{count} {cause}" for cause, count in sums.ended.items()) or "-"
    share = f" ({percent(sums.hold_ms / sums.allocated_ms)})" if sums.allocated_ms else ""
    out = "no notice" if sums.out_ms is None else span_text(sums.out_ms)
    if sums.out_ms is not None and sums.out_ms_most != sums.out_ms:
        out = f"{out} as a rule, {span_text(sums.out_ms_most or 0)} at most"
    queued = unknown if sums.queued_ms is None else span_text(sums.queued_ms)
    after_lost = "; after an attempt without a last word, from its last line on" if causes.LOST in sums.ended else ""
    good = unknown if sums.goodput is None else f"{percent(sums.goodput)} of {span_text(sums.allocated_ms)} became progress"
    if sums.pending_ms:
        good += f" ({span_text(sums.pending_ms)} since the last commit not counted)"
    left_out = _left_out(sums)
    good += left_out
    between = unknown if sums.mtbi_ms is None else span_text(sums.mtbi_ms)
    return [
        ("goodput", good),
        ("lost", _lost_sum(sums) + left_out),
        ("save stall", f"{span_text(sums.hold_ms)}{share}"),
        ("saves", f"{sums.saves}, and {sums.failed_saves} failed"),
        ("notice to out", out),
        ("queued", f"{queued} between attempts (when the job was submitted is in no journal{after_lost})"),
        ("MTBI", f"{between} ({counted(sums.interruptions, 'interruption')})"),
        ("attempts", f"{sums.attempts}: {ended}"),
    ]


def _left_out(sums: Totals) -> str:
    """That the sums are not of all starts."""
    if not sums.left_out:
        return ""
    return f"; {counted(sums.left_out, 'start')} {'is' if sums.left_out == 1 else 'are'} left out (see the notes)"


def _lost_sum(sums: Totals) -> str:
    if sums.lost_steps is None:
        return "not known"
    if not sums.lost_steps:
        return "no step that is known of; any step after the last word is lost as well" if sums.lost_is_least else "nothing"
    least = "at least " if sums.lost_is_least else ""
    return f"{least}{counted(sums.lost_steps, 'step')}, {span_text(sums.lost_ms)} of time"


def _notes(run: Run) -> list[str]:
    """What is incomplete, each once."""
    own = [f"attempt {label(one, run)}: {note}" for one in run.attempts for note in one.notes if note not in run.notes]
    notes = [harmless(note) for note in (*run.notes, *own)]
    most = 12
    return notes if len(notes) <= most else [*notes[:most], f"and {len(notes) - most} more: see --json"]
