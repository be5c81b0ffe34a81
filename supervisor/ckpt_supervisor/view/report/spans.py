"""Chart: what each attempt spent its time with, one bar an attempt, with what happened as marks on it.

Owns the bars. The time is counted from the attempt's own start, and its wait in the queue stands left of it, so that short
attempts of a long run can still be read. Must not change a sum: where an attempt has more spans than can be drawn, slices of
its time are drawn with the kinds in order inside each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_supervisor.view.facts import KINDS, Attempt, Run, Span
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.palette import BLUE, GREY, INK, ORANGE, PINK, PURPLE, RED, TEAL, Colour
from ckpt_supervisor.view.report.safe import label
from ckpt_supervisor.view.report.words import Names, counted, instant, listed, span

ROWS_MAX = 150
SPANS_MAX = 6_000
MARKS_MAX = 600
ROW_PX = 24

PAINT: Mapping[str, tuple[Colour, str]] = {
    "queued": (GREY, "."),
    "starting": (PURPLE, ""),
    "training": (BLUE, ""),
    "saving": (ORANGE, ""),
    "verifying": (TEAL, ""),
    "leaving": (PINK, ""),
    "lost": (RED, "/"),
}
SYMBOLS: Mapping[str, str] = {
    "notice": "triangle-down",
    "restart": "cross-thin",
    "hang": "hourglass",
    "oom": "x",
    "task": "bowtie",
    "warning": "diamond",
}
"""Of marks; what is not here (`requeue`, at every end) is in the table alone."""
_MS = 1_000_000
UNITS = ((172_800_000, 3_600_000, "hours"), (600_000, 60_000, "minutes"), (0, 1_000, "seconds"))


def names(attempts: Sequence[Attempt], called: Names) -> list[str]:
    """A short name for each row, no two alike."""
    several = len({one.job for one in attempts}) > 1
    found: list[str] = []
    for one in attempts:
        name = f"{label(one.job, 14)}: {called(one)}" if several else f"attempt {called(one)}"
        same = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({same + 1})" if same else name)
    return found


def chart(run: Run) -> shape.Chart:
    """The whole chart."""
    title = "What the time went into"
    attempts = [one for one in run.attempts if one.spans]
    if not attempts:
        return shape.Chart("time", title, "Nothing is known of how the time was spent.", None)
    drawn = attempts[-ROWS_MAX:]
    called = Names(run)
    rows = names(drawn, called)
    longest = max(_from_start(one, one.spans[-1].end_ns) for one in drawn)
    per, unit = next((per, unit) for least, per, unit in UNITS if longest >= least)
    each = max(20, SPANS_MAX // len(drawn))
    spans = [_fitting(one.spans, each) for one in drawn]
    traces = [trace for kind in KINDS if (trace := _bars(kind, drawn, spans, (rows, per))) is not None]
    traces += _marks(drawn, rows, per)
    layout = {
        "xaxis": shape.axis(f"{unit} since its start", zeroline=True, tickformat=",~r"),
        "yaxis": shape.axis(
            "", type="category", categoryorder="array", categoryarray=rows, range=[len(rows) - 0.5, -0.5], showline=False
        ),
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
    }
    notes = _notes(len(attempts) - len(drawn), any(len(a) != len(one.spans) for a, one in zip(spans, drawn, strict=True)))
    height = 170 + ROW_PX * len(drawn)
    return shape.Chart(
        "time",
        title,
        _said(attempts, called),
        shape.figure(traces, layout),
        height,
        (_table(attempts, called), _events(attempts, called)),
        notes,
    )


def _start(one: Attempt) -> int:
    """Where it began to run: after the queue."""
    if one.began_ns is not None:
        return one.began_ns
    return next((part.begin_ns for part in one.spans if part.kind != "queued"), one.spans[0].end_ns)


def _from_start(one: Attempt, ns: int) -> float:
    return (ns - _start(one)) / _MS


def _fitting(spans: Sequence[Span], most: int) -> list[Span]:
    """The spans, or as many slices as fit, each with its kinds in order: sums stay what they are."""
    if len(spans) <= most:
        return list(spans)
    first, last = spans[0].begin_ns, spans[-1].end_ns
    slices = max(1, most // len(KINDS))
    sums: list[dict[str, int]] = [{} for _ in range(slices)]
    width = max(1, -(-(last - first) // slices))
    for part in spans:
        at = part.begin_ns
        while at < part.end_ns:
            number = min(slices - 1, (at - first) // width)
            end = part.end_ns if number == slices - 1 else min(part.end_ns, first + (number + 1) * width)
            sums[number][part.kind] = sums[number].get(part.kind, 0) + end - at
            at = end
    found: list[Span] = []
    for number, parts in enumerate(sums):
        at = first + number * width
        for kind in KINDS:
            length = parts.get(kind, 0)
            if length and found and found[-1].kind == kind and found[-1].end_ns == at:
                found[-1] = Span(kind, found[-1].begin_ns, at + length)
            elif length:
                found.append(Span(kind, at, at + length))
            at += length
    return found


def _bars(
    kind: str, drawn: Sequence[Attempt], spans: Sequence[Sequence[Span]], ground: tuple[list[str], int]
) -> dict[str, Any] | None:
    rows, per = ground
    base: list[float] = []
    length: list[float] = []
    y: list[str] = []
    text: list[str] = []
    for one, parts, row in zip(drawn, spans, rows, strict=True):
        for part in parts:
            if part.kind == kind:
                ms = (part.end_ns - part.begin_ns) / _MS
                base.append(round(_from_start(one, part.begin_ns) / per, 6))
                length.append(round(ms / per, 6))
                y.append(row)
                text.append(f"{kind}: {span(ms)}")
    if not y:
        return None
    colour, pattern = PAINT[kind]
    marker: dict[str, Any] = {"color": colour.light, "line": {"width": 0}}
    if pattern:
        marker["pattern"] = {"shape": pattern, "fillmode": "replace", "fgcolor": colour.light, "size": 6, "solidity": 0.5}
    hover = {"hovertext": text, "hovertemplate": "%{y}<br>%{hovertext}<extra></extra>"}
    return {"type": "bar", "orientation": "h", "name": kind, "x": length, "base": base, "y": y, "marker": marker, **hover}


def _marks(drawn: Sequence[Attempt], rows: Sequence[str], per: int) -> list[dict[str, Any]]:
    """What happened, as points; where there are too many, warnings go first."""
    found = [(row, one, mark) for row, one in zip(rows, drawn, strict=True) for mark in one.marks if mark[1] in SYMBOLS]
    if len(found) > MARKS_MAX:
        found = [item for item in found if item[2][1] != "warning"]
    traces = []
    for kind, symbol in SYMBOLS.items():
        own = [item for item in found[-MARKS_MAX:] if item[2][1] == kind]
        if own:
            marker = {"symbol": symbol, "size": 9, "color": INK.light, "line": {"color": INK.light, "width": 1.5}}
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": kind,
                    "x": [round(_from_start(one, at) / per, 6) for _, one, (at, _, _) in own],
                    "y": [row for row, _, _ in own],
                    "text": [label(text) for _, _, (_, _, text) in own],
                    "marker": marker,
                    "hovertemplate": f"%{{y}}: {kind}<br>%{{text}}<extra></extra>",
                }
            )
    return traces


def _notes(rows: int, is_sliced: bool) -> tuple[str, ...]:
    notes = []
    if rows > 0:
        notes.append(f"{counted(rows, 'older attempt')} left out of the picture; the table has the last {shape.ROWS_MAX}.")
    if is_sliced:
        notes.append(
            "Attempts with very many spans are drawn in slices of time, the kinds in order inside each; the sums are exact."
        )
    return tuple(notes)


def sums(one: Attempt) -> dict[str, float]:
    """Milliseconds of each kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for part in one.spans:
        found[part.kind] = found.get(part.kind, 0.0) + (part.end_ns - part.begin_ns) / _MS
    return found


def _said(attempts: Sequence[Attempt], called: Names) -> str:
    totals = dict.fromkeys(KINDS, 0.0)
    for one in attempts:
        for kind, ms in sums(one).items():
            totals[kind] = totals.get(kind, 0.0) + ms
    told = [f"{span(ms)} {kind}" for kind, ms in totals.items() if ms > 0]
    longest = max(attempts, key=lambda one: one.spans[-1].end_ns - _start(one))
    many = counted(len(attempts), "attempt")
    parts = [f"One bar for each of {many}, coloured by what it did; its wait in the queue is left of 0."]
    parts.append(f"Together: {listed(told)}.")
    parts.append(f"The longest one is attempt {called(longest)}, with {span(_from_start(longest, longest.spans[-1].end_ns))}.")
    waited = max(attempts, key=lambda one: sums(one)["queued"])
    if sums(waited)["queued"] > 0:
        parts.append(f"Attempt {called(waited)} waited longest in the queue: {span(sums(waited)['queued'])}.")
    return " ".join(parts)


def _table(attempts: Sequence[Attempt], called: Names) -> shape.Table:
    rows = []
    for one in attempts:
        found = sums(one)
        rows.append((called(one), one.job, instant(one.began_ns), *(span(found[kind]) if found[kind] else "-" for kind in KINDS)))
    head = ("Attempt", "Job", "Began (UTC)", *KINDS)
    return shape.table("Time of each attempt by kind", head, rows, (0, *range(3, 3 + len(KINDS))))


def _events(attempts: Sequence[Attempt], called: Names) -> shape.Table:
    rows = [(called(one), instant(at), kind, text) for one in attempts for at, kind, text in one.marks]
    return shape.table("What happened", ("Attempt", "When (UTC)", "Kind", "In words"), rows, (0,))
