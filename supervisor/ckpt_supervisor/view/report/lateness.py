"""Chart: how much later than the first one each rank was in the last rounds, as a heat map.

Owns what counts as late, and how many ranks share a row. Of each rank the last word of a round counts: written, else
arrived, else agreed; it is compared with the first rank that said the same. Must not average: a row of several ranks shows
its latest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt_supervisor.view.facts import Attempt, Round, Run, Word
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.palette import HEAT, INK, SOFT
from ckpt_supervisor.view.report.safe import label
from ckpt_supervisor.view.report.words import Names, count, counted, span

ROUNDS_MAX = 40
RANKS_MAX = 128
"""Rows; with more ranks several neighbours share one."""

LATEST_MAX = 100

STRONGEST_S = 0.1
"""What is so late has the strongest colour where nobody was later."""


class Late(NamedTuple):
    """One rank in one round. `late_ms` is None where it said nothing."""

    rank: int
    late_ms: int | None
    problem: str
    said: str


def chart(run: Run) -> shape.Chart:
    """The whole chart."""
    title = "Who was late"
    found = [(one, item) for one in run.attempts for item in one.rounds if item.words]
    found = sorted(found, key=lambda pair: pair[1].begin_ns)[-ROUNDS_MAX:]
    if not found:
        return shape.Chart("lateness", title, "No rank has said a word in a round, as far as the journals tell.", None)
    columns = [_lateness(item.words) for _, item in found]
    names = _names(found, Names(run))
    ranks = sorted({late.rank for column in columns for late in column})
    size = -(-len(ranks) // RANKS_MAX)
    groups = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    rows = [str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups]
    traces = _traces(columns, names, groups, rows)
    layout = {
        "xaxis": shape.axis(
            "round (attempt / round)", type="category", range=[-0.5, len(names) - 0.5], nticks=10, tickangle=0, showgrid=False
        ),
        "yaxis": shape.axis("rank", type="category", range=[len(rows) - 0.5, -0.5], nticks=16, showgrid=False),
        "hovermode": "closest",
    }
    notes = () if size == 1 else (f"{counted(len(ranks), 'rank')}: each row shows the latest of up to {size}.",)
    height = max(300, min(760, 190 + 12 * len(rows)))
    return shape.Chart(
        "lateness", title, _said(columns, names), shape.figure(traces, layout), height, (_table(columns, names),), notes
    )


def _names(found: Sequence[tuple[Attempt, Round]], called: Names) -> list[str]:
    names: list[str] = []
    for one, item in found:
        name = f"{called(one)} / {item.number}"
        names.append(f"{name} ({names.count(name) + 1})" if name in names else name)
    return names


def _lateness(words: Sequence[Word]) -> list[Late]:
    stages = [("written", "written_ms"), ("arrived", "arrived_ms"), ("agreed", "agreed_ms")]
    firsts = {key: min((ms for word in words if (ms := getattr(word, key)) is not None), default=0) for _, key in stages}
    found = []
    for word in words:
        last = next(((said, key) for said, key in stages if getattr(word, key) is not None), None)
        if last is None:
            found.append(Late(word.rank, None, word.problem or "said nothing", "nothing"))
        else:
            late_ms: int = getattr(word, last[1]) - firsts[last[1]]
            found.append(Late(word.rank, late_ms, word.problem, last[0]))
    return found


def _traces(
    columns: Sequence[Sequence[Late]], names: Sequence[str], groups: Sequence[Sequence[int]], rows: Sequence[str]
) -> list[dict[str, Any]]:
    row_of = {rank: number for number, group in enumerate(groups) for rank in group}
    z: list[list[float | None]] = [[None] * len(names) for _ in rows]
    text: list[list[str]] = [[""] * len(names) for _ in rows]
    crosses: dict[tuple[int, int], str] = {}
    for at, column in enumerate(columns):
        for late in column:
            row = row_of[late.rank]
            before = z[row][at]
            if late.late_ms is not None and (before is None or late.late_ms / 1_000 > before):
                z[row][at] = late.late_ms / 1_000
                text[row][at] = f"rank {late.rank}, {late.said}: {span(late.late_ms)} after the first one"
            if late.problem:
                crosses[row, at] = label(f"rank {late.rank}: {late.problem}", 160)
    most = max([STRONGEST_S, *(late_s for row in z for late_s in row if late_s is not None)])
    scale = [[number / (len(HEAT) - 1), colour.light] for number, colour in enumerate(HEAT)]
    bar = {
        "title": {"text": "seconds<br>late", "font": {"size": 12, "color": SOFT.light}},
        "tickfont": {"size": 12, "color": SOFT.light},
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 4,
    }
    heat = {
        "type": "heatmap", "name": "lateness", "x": list(names), "y": list(rows), "z": z, "text": text,
        "colorscale": scale, "zmin": 0, "zmax": most,
        "colorbar": bar, "hoverongaps": False, "xgap": 1, "ygap": 1 if len(rows) <= 64 else 0,
        "hovertemplate": "round %{x}<br>%{text}<extra></extra>",
    }  # fmt: skip
    if not crosses:
        return [{**heat, "showlegend": False}]
    failed = {
        "type": "scatter", "mode": "markers", "name": "failed, late or gone",
        "x": [names[at] for _, at in crosses], "y": [rows[row] for row, _ in crosses], "text": list(crosses.values()),
        "marker": {"symbol": "x-thin", "size": 9, "color": INK.light, "line": {"width": 2, "color": INK.light}},
        "hovertemplate": "round %{x}<br>%{text}<extra></extra>",
    }  # fmt: skip
    return [heat, failed]


def _said(columns: Sequence[Sequence[Late]], names: Sequence[str]) -> str:
    many = counted(len(columns), "round")
    parts = [f"How much later than the first one each rank was in the last {many}: the stronger the colour, the later."]
    pairs = [(late, name) for column, name in zip(columns, names, strict=True) for late in column]
    timed = [(late.late_ms, late, name) for late, name in pairs if late.late_ms is not None]
    if timed:
        worst, late, name = max(timed, key=lambda item: item[0])
        latest = f"The latest was rank {late.rank} in round {name}, {span(worst)} after the first one ({late.said})."
        parts.append(latest if worst else "Nobody was late.")
    last: dict[int, int] = {}
    for column in columns:
        known = [late for late in column if late.late_ms is not None]
        if len(known) > 1 and any(late.late_ms for late in known):
            rank = max(known, key=lambda item: item.late_ms or 0).rank
            last[rank] = last.get(rank, 0) + 1
    if last:
        rank = max(last, key=lambda item: last[item])
        parts.append(f"Rank {rank} was last in {last[rank]} of them.")
    troubled = {late.rank for late, _ in pairs if late.problem}
    if troubled:
        parts.append(f"A cross marks who failed, was late or gone: {counted(len(troubled), 'rank')}.")
    return " ".join(parts)


def _table(columns: Sequence[Sequence[Late]], names: Sequence[str]) -> shape.Table:
    pairs = [(late, name) for column, name in zip(columns, names, strict=True) for late in column]
    pairs.sort(key=lambda pair: (bool(pair[0].problem), pair[0].late_ms or 0), reverse=True)
    rows = [
        (name, count(late.rank), late.said, "-" if late.late_ms is None else span(late.late_ms), late.problem or "-")
        for late, name in pairs[:LATEST_MAX]
    ]
    head = ("Attempt / round", "Rank", "Last word", "After the first one", "Problem")
    made = shape.table("The latest of all, failed ones first", head, rows, (1, 3))
    return shape.Table(made.caption, made.head, made.rows, made.numbers, len(pairs) - len(made.rows))
