"""Chart: how long saves took, and what of: agreeing on a step, waiting until all stand there, writing, verifying.

Owns the bars and what is said of them. Must not hide a failed one: where there are more saves than can be drawn, of each
stretch the slowest is drawn, and each failed one as long as those fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_supervisor.view.facts import Round, Run
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.palette import BLUE, GREY, ORANGE, PURPLE, RED, TEAL, Colour
from ckpt_supervisor.view.report.safe import label
from ckpt_supervisor.view.report.words import UNKNOWN, Names, count, counted, instant, span

DRAWN_MAX = 300

PARTS: Mapping[str, tuple[str, Colour]] = {
    "agree": ("agree on a step", PURPLE),
    "arrive": ("until all stand there", BLUE),
    "write": ("write", ORANGE),
    "verify": ("verify and commit", TEAL),
}


class Save(NamedTuple):
    """One round with its attempt."""

    number: int
    attempt: str
    round: Round
    parts: tuple[int | None, int | None, int | None, int | None]

    @property
    def known_ms(self) -> int:
        """Its parts together."""
        return sum(part or 0 for part in self.parts)

    @property
    def whole_ms(self) -> int | None:
        """From its begin to its end; None if neither an end nor a part is known."""
        if self.round.end_ns is not None:
            return max(self.known_ms, (self.round.end_ns - self.round.begin_ns) // 1_000_000)
        return self.known_ms or None

    @property
    def is_failed(self) -> bool:
        """It was given up, or nothing says that it was committed."""
        return not self.round.committed


def gathered(run: Run) -> list[Save]:
    """All rounds in order."""
    found = [(one, item) for one in run.attempts for item in one.rounds]
    found.sort(key=lambda pair: pair[1].begin_ns)
    name = Names(run)
    return [Save(number, name(one), item, _parts(item)) for number, (one, item) in enumerate(found, 1)]


def _parts(item: Round) -> tuple[int | None, int | None, int | None, int | None]:
    return (item.agree_ms, item.arrive_ms, item.write_ms, item.verify_ms)


def chart(run: Run) -> shape.Chart:
    """The whole chart."""
    title = "Saves and their parts"
    saves = gathered(run)
    if not saves:
        return shape.Chart("saves", title, "No save was begun, as far as the journals tell.", None)
    drawn = _chosen(saves)
    per, unit = (1_000, "seconds") if max((save.whole_ms or 0) for save in drawn) < 600_000 else (60_000, "minutes")
    traces = [*_bars(drawn, per), *_failed(drawn, per)]
    layout = {
        "xaxis": shape.axis("save, in the order of time", type="category", nticks=12, tickangle=0, showgrid=False),
        "yaxis": shape.axis(unit, rangemode="tozero", tickformat=",~r"),
        "barmode": "stack",
        "bargap": 0.15,
        "hovermode": "closest",
    }
    notes = (f"{len(drawn)} of {len(saves):,} saves are drawn: the slowest of each stretch, and failed ones.",)
    return shape.Chart(
        "saves",
        title,
        _said(saves),
        shape.figure(traces, layout),
        420,
        (_table(saves),),
        notes if len(drawn) < len(saves) else (),
    )


def _chosen(saves: Sequence[Save]) -> list[Save]:
    if len(saves) <= DRAWN_MAX:
        return list(saves)
    failed = [save.number for save in saves if save.is_failed][-DRAWN_MAX // 2 :]
    stretches = DRAWN_MAX - len(failed)
    kept = set(failed)
    for number in range(stretches):
        stretch = saves[number * len(saves) // stretches : (number + 1) * len(saves) // stretches]
        kept.add(max(stretch, key=lambda save: save.whole_ms or 0).number)
    return [save for save in saves if save.number in kept]


def _bars(drawn: Sequence[Save], per: int) -> list[dict[str, Any]]:
    x = [str(save.number) for save in drawn]
    text = [label(_named(save)) for save in drawn]
    traces = []
    for place, (title, colour) in enumerate(PARTS.values()):
        values = [save.parts[place] for save in drawn]
        if any(values):
            traces.append(_bar(title, colour, (x, [None if ms is None else ms / per for ms in values], text), per))
    rest = [max(0, (save.whole_ms or 0) - save.known_ms) if save.is_failed else 0 for save in drawn]
    if any(rest):
        traces.append(_bar("until it was given up", GREY, (x, [ms / per for ms in rest], text), per))
        traces[-1]["marker"]["pattern"] = {"shape": "/", "fillmode": "replace", "fgcolor": GREY.light, "size": 6, "solidity": 0.4}
    return traces


def _bar(title: str, colour: Colour, values: tuple[list[str], list[float | None], list[str]], per: int) -> dict[str, Any]:
    x, y, text = values
    unit = "s" if per == 1_000 else "min"
    hover = {"hovertext": text, "hovertemplate": f"%{{hovertext}}<br>{title}: %{{y:.3~f}} {unit}<extra></extra>"}
    return {"type": "bar", "name": title, "x": x, "y": y, "marker": {"color": colour.light, "line": {"width": 0}}, **hover}


def _named(save: Save) -> str:
    step = "" if save.round.step is None else f", step {save.round.step:,}"
    kind = save.round.kind or "kind not known"
    return f"save {save.number}: attempt {save.attempt}, round {save.round.number}{step}, {kind}"


def _failed(drawn: Sequence[Save], per: int) -> list[dict[str, Any]]:
    failed = [save for save in drawn if save.is_failed]
    if not failed:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "failed",
            "x": [str(save.number) for save in failed],
            "y": [(save.whole_ms or 0) / per for save in failed],
            "text": [label(f"{_named(save)}: {save.round.reason or 'no word of its end'}", 160) for save in failed],
            "marker": {"symbol": "x", "size": 11, "color": RED.light},
            "hovertemplate": "%{text}<extra>failed</extra>",
            "cliponaxis": False,
        }
    ]


def _said(saves: Sequence[Save]) -> str:
    done = [save for save in saves if not save.is_failed]
    failed = len(saves) - len(done)
    parts = [f"How long each of {counted(len(saves), 'save')} took, by its parts; {failed or 'none'} failed."]
    timed = sorted((save for save in done if save.whole_ms), key=lambda save: save.whole_ms or 0)
    if timed:
        middle, slowest = timed[len(timed) // 2], timed[-1]
        parts.append(
            f"The median of those that were committed is {span(middle.whole_ms)}; the slowest took {span(slowest.whole_ms)}"
        )
        longest = max(range(len(PARTS)), key=lambda place: slowest.parts[place] or 0)
        share = slowest.parts[longest]
        where = f"attempt {slowest.attempt}, round {slowest.round.number}"
        title = list(PARTS.values())[longest][0]
        parts[-1] += f" ({where}; {span(share)} of it: {title})." if share else f" ({where})."
    return " ".join(parts)


def _table(saves: Sequence[Save]) -> shape.Table:
    rows = []
    for save in saves:
        item = save.round
        outcome = "committed" if item.committed else f"failed: {item.reason}" if item.reason else "no word of its end"
        told = tuple(span(ms) if ms is not None else "-" for ms in save.parts)
        whole = "-" if save.whole_ms is None else span(save.whole_ms)
        step = "-" if item.step is None else count(item.step)
        began = instant(item.begin_ns)
        rows.append(
            (
                str(save.number),
                save.attempt,
                str(item.number),
                item.kind or UNKNOWN,
                began,
                step,
                *told,
                whole,
                outcome,
            )
        )
    head = (
        "Save",
        "Attempt",
        "Round",
        "Kind",
        "Begun (UTC)",
        "Step",
        "Agree",
        "Arrive",
        "Write",
        "Verify",
        "Together",
        "Outcome",
    )
    return shape.table("Saves", head, rows, (0, 1, 2, 5, 6, 7, 8, 9, 10))
