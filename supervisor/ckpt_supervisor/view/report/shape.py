"""What the charts of the report have in common: their parts, the ground they are drawn on, and how much of a series is drawn.

Owns the form of a chart, a table, and thinning. Must not know what any of them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ckpt_supervisor.view.report.palette import GRID, INK, PAPER, SOFT
from ckpt_supervisor.view.report.safe import label

T = TypeVar("T")

ROWS_MAX = 250
"""Most rows of a table; the rest is counted below it, and `ckptctl report --json` has all."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', sans-serif"


class Table(msgspec.Struct, frozen=True):
    """Rows of plain text; the page makes it harmless. `left_out`: so many more there are."""

    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: frozenset[int] = frozenset()
    """Columns that are set flush right."""
    left_out: int = 0


class Chart(msgspec.Struct, frozen=True):
    """One chart with what it says in words. All texts are plain, but those inside `figure`, which are harmless already."""

    name: str
    title: str
    caption: str
    figure: dict[str, Any] | None
    """As plotly.graph_objects has checked it; None where there is nothing to draw, and `caption` says why."""
    height: int = 420
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, ...]], numbers: Sequence[int] = ()) -> Table:
    """A table of the last ROWS_MAX rows at most: what was last is what is asked for."""
    kept = list(rows[-ROWS_MAX:])
    return Table(caption, tuple(head), kept, frozenset(numbers), len(rows) - len(kept))


def figure(traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """Checked by plotly. Raises ValueError for what plotly does not know, which would be a fault of ours."""
    import plotly.graph_objects as go

    ground = {
        "template": go.layout.Template(),
        "paper_bgcolor": PAPER.light,
        "plot_bgcolor": PAPER.light,
        "font": {"family": FONT, "size": 13, "color": INK.light},
        "margin": {"l": 12, "r": 12, "t": 12, "b": 12, "autoexpand": True},
        "hoverlabel": {
            "bgcolor": PAPER.light, "bordercolor": SOFT.light, "font": {"color": INK.light, "size": 13}, "align": "left",
        },
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "bgcolor": PAPER.light,
            "font": {"size": 12, "color": INK.light}, "itemsizing": "constant", "traceorder": "normal",
        },
        "showlegend": True,
    }  # fmt: skip
    made = go.Figure(data=list(traces), layout={**ground, **layout}).to_plotly_json()
    return {"data": made["data"], "layout": made["layout"]}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis in the colours of the page."""
    return {
        "title": {"text": label(title), "font": {"color": SOFT.light, "size": 12}, "standoff": 8},
        "gridcolor": GRID.light,
        "zerolinecolor": GRID.light,
        "linecolor": SOFT.light,
        "tickcolor": SOFT.light,
        "tickfont": {"color": SOFT.light, "size": 12},
        "automargin": True,
        "showline": True,
        **more,
    }


def time_axis(title: str = "time (UTC)", **more: Any) -> dict[str, Any]:
    """An axis of instants."""
    return axis(title, type="date", nticks=8, hoverformat="%Y-%m-%d %H:%M:%S", **more)


def thinned(points: Sequence[T], most: int, value: Callable[[T], float]) -> list[T]:
    """At most about `most` of them, with the first, the last, and the least and greatest of each stretch: no peak is lost."""
    if len(points) <= max(4, most):
        return list(points)
    stretches = max(1, most // 2 - 1)
    kept = {0, len(points) - 1}
    for number in range(stretches):
        begin, end = number * len(points) // stretches, (number + 1) * len(points) // stretches
        stretch = range(begin, end)
        kept.add(min(stretch, key=lambda at: value(points[at])))
        kept.add(max(stretch, key=lambda at: value(points[at])))
    return [points[at] for at in sorted(kept)]
