"""Chart: memory of everything below the supervisors, against the limit.

Owns the lines and what is said of them. The memory is that of all tasks together, and a limit is one node's: it is drawn
times the number of nodes, as if each had the nearest one. Must not say that there is no limit where none was seen.
"""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.text import size_text
from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.palette import BLUE, RED
from ckpt_supervisor.view.report.words import Names, axis_instant, instant, is_sane

POINTS_MAX = 4_000
SINGLE = 7
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1, "bytes"))

Point = tuple[int, int, int]


def chart(run: Run) -> shape.Chart:
    """The whole chart."""
    title = "Memory"
    lines = [_line(one) for one in run.attempts]
    points = [point for line in lines for point in line]
    if not points:
        return shape.Chart("memory", title, "The journals hold no word of memory.", None)
    most = max(max(used, limit) for _, used, limit in points)
    per, unit = next((per, unit) for per, unit in _UNITS if most >= per or per == 1)
    each = max(8, POINTS_MAX // len([line for line in lines if line]))
    thin = [shape.thinned(line, each, lambda point: point[1]) for line in lines if line]
    traces = [_trace("processes of the job", thin, 1, per, {"color": BLUE.light, "width": 2})]
    if any(limit for _, _, limit in points):
        limited = {"color": RED.light, "width": 2, "dash": "dash", "shape": "hv"}
        traces.append(_trace("limit", [_turns(line) for line in thin], 2, per, limited))
    layout = {
        "xaxis": shape.time_axis(),
        "yaxis": shape.axis(unit, rangemode="tozero", tickformat=",~r"),
        "hovermode": "x unified" if len(points) < 2_000 else "closest",
    }
    called = Names(run)
    rows = [(called(one), *_row(line)) for one, line in zip(run.attempts, lines, strict=True) if line]
    head = ("Attempt", "Most", "When (UTC)", "Limit then", "Share of it", "At the end")
    tables = (shape.table("Memory of each attempt", head, rows, (0, 1, 3, 4, 5)),)
    return shape.Chart("memory", title, _said(points), shape.figure(traces, layout), 360, tables)


def _line(one: Attempt) -> list[Point]:
    nodes = len(one.hosts) or (1 if one.tasks_told <= 1 else 0)
    return [(at, held, limit * nodes) for at, held, limit in one.memory if is_sane(held) and is_sane(limit)]


def _turns(line: list[Point]) -> list[Point]:
    """Only where the limit changes, and both ends."""
    ends = {0, len(line) - 1}
    return [point for at, point in enumerate(line) if at in ends or point[2] != line[at - 1][2]]


def _trace(name: str, lines: list[list[Point]], place: int, per: int, line: dict[str, Any]) -> dict[str, Any]:
    x: list[str | None] = []
    y: list[float | None] = []
    for points in lines:
        x += [*(axis_instant(point[0]) for point in points), None]
        y += [*(round(point[place] / per, 4) if point[place] else None for point in points), None]
    how: dict[str, Any] = {"mode": "lines", "line": line, "connectgaps": False, "hovertemplate": "%{x}: %{y:,.4~g}"}
    if any(len(points) == 1 for points in lines):  # A line of one point is none.
        sizes = [SINGLE if len(points) == 1 else 0 for points in lines for _ in range(len(points) + 1)]
        how |= {"mode": "lines+markers", "marker": {"size": sizes, "color": line["color"], "opacity": 1, "line": {"width": 0}}}
    return {"type": "scatter", "name": name, "x": x, "y": y, **how}


def _row(line: list[Point]) -> tuple[str, ...]:
    at, used, limit = max(line, key=lambda point: point[1])
    return (size_text(used), instant(at), _limit(limit), _share(used, limit), size_text(line[-1][1]))


def _limit(limit: int) -> str:
    return size_text(limit) if limit else "none seen"


def _share(used: int, limit: int) -> str:
    return f"{100 * used / limit:.0f} %" if limit else "-"


def _said(points: list[Point]) -> str:
    at, used, _ = max(points, key=lambda point: point[1])
    nearest = max((point for point in points if point[2]), key=lambda point: point[1] / point[2], default=None)
    said = (
        "Memory of all processes of the job over time, without what they share, and the limit of all its nodes together. "
        f"The most is {size_text(used)} at {instant(at)} UTC."
    )
    if nearest is None:
        return f"{said} No limit was seen."
    share = f"{_share(nearest[1], nearest[2])} of {size_text(nearest[2])}"
    return f"{said} Nearest to the limit: {share}, at {instant(nearest[0])} UTC."
