"""Chart: finished steps against wall-clock time over all attempts, with checkpoints as points and interruptions as lines.

Owns what is drawn of it and what is said of it. Must not judge a checkpoint (seen.py) nor derive a fact (story.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_supervisor.view.facts import Attempt, Commit, Run
from ckpt_supervisor.view.report import seen as look
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.causes import FAMILIES, OTHER, family_of
from ckpt_supervisor.view.report.palette import BLUE, GREY, ORANGE, RED, SOFT, TEAL, Colour
from ckpt_supervisor.view.report.safe import label
from ckpt_supervisor.view.report.words import Names, axis_instant, count, counted, instant, is_sane, listed, span

POINTS_MAX = 6_000
CHECKPOINTS_MAX = 3_000
LINES_MAX = 60
"""Above so many ends their lines would be a wall before the rest."""

MANY = 150
"""More points than this would run together."""

MARKERS: Mapping[str, tuple[str, str, Colour]] = {
    look.FULL: ("checkpoint, checked in full", "circle", TEAL),
    look.STRUCTURE: ("checkpoint, structure only", "diamond", ORANGE),
    look.REMOVED: ("checkpoint, removed since", "circle-open", GREY),
    look.BAD: ("checkpoint, damaged or missing now", "x", RED),
    look.UNSEEN: ("checkpoint, not looked at", "square-open", SOFT),
}


def chart(run: Run, seen: Mapping[int, look.Seen]) -> shape.Chart:
    """The whole chart."""
    lines = [_points(one) for one in run.attempts]
    commits = [(one, commit) for one in run.attempts for commit in one.commits if is_sane(commit.step)]
    title = "Steps and checkpoints"
    known = [point for line in lines for point in line]
    if not known and not commits:
        return shape.Chart("steps", title, "Nothing is known of finished steps: no attempt has told of any.", None)
    called = Names(run)
    tables = (_checkpoints(commits, seen, called), _ends(run, called))
    top = max([step for _, step in known] + [commit.step for _, commit in commits])
    dots = _dots(commits, seen, called)
    below = [trace for trace in dots if trace["name"] == MARKERS[look.REMOVED][0]]  # They may hide nothing.
    above = [trace for trace in dots if trace not in below]
    traces = [*below, *_line(lines), *above, *_marks(run, top, called)]
    layout = {
        "xaxis": shape.time_axis(),
        "yaxis": shape.axis("finished steps", rangemode="tozero", tickformat=",~r" if top < 100_000 else "~s"),
        "hovermode": "closest",
    }
    dropped = len(commits) - CHECKPOINTS_MAX
    notes = (f"{counted(dropped, 'older checkpoint')} left out of the picture.",) if dropped > 0 else ()
    caption = _said(run, known, commits, seen)
    return shape.Chart("steps", title, caption, shape.figure(traces, layout), 520, tables, notes)


def _points(one: Attempt) -> list[tuple[int, int]]:
    """Where an attempt began, how it came on, where it ended."""
    found = set(one.progress)
    found.update((commit.at_ns, commit.step) for commit in one.commits)
    if one.began_ns is not None and (one.resume_step >= 0 or found):
        found.add((one.began_ns, max(0, one.resume_step)))
    if one.ended_ns is not None and one.reached is not None:
        found.add((one.ended_ns, one.reached))
    return sorted(point for point in found if is_sane(point[1]))


def _line(lines: Iterable[list[tuple[int, int]]]) -> list[dict[str, Any]]:
    drawn = [line for line in lines if line]
    each = max(8, POINTS_MAX // max(1, len(drawn)))
    x: list[str | None] = []
    y: list[int | None] = []
    for line in drawn:
        points = shape.thinned(line, each, lambda point: point[1])
        x += [*(axis_instant(at) for at, _ in points), None]
        y += [*(step for _, step in points), None]
    if not x:
        return []
    how = {"mode": "lines", "line": {"color": BLUE.light, "width": 2}, "connectgaps": False}
    return [
        {
            "type": "scatter",
            "name": "finished steps",
            "legendrank": 1,
            "x": x,
            "y": y,
            **how,
            "hovertemplate": "%{x}<br>step %{y:,}<extra></extra>",
        }
    ]


def _dots(commits: list[tuple[Attempt, Commit]], seen: Mapping[int, look.Seen], called: Names) -> list[dict[str, Any]]:
    traces = []
    drawn = commits[-CHECKPOINTS_MAX:]
    last = {commit.step: number for number, (_, commit) in enumerate(drawn)}
    for state in look.STATES:
        title, symbol, colour = MARKERS[state]
        own = [
            (one, commit)
            for number, (one, commit) in enumerate(drawn)
            if _state(commit, seen, is_last=last[commit.step] == number) == state
        ]
        if own:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": title,
                    "x": [axis_instant(commit.at_ns) for _, commit in own],
                    "y": [commit.step for _, commit in own],
                    "text": [label(f"attempt {called(one)}, {commit.kind or 'kind of save not known'}") for one, commit in own],
                    "marker": {"symbol": symbol, "size": _size(state, len(own)), "color": colour.light},
                    "hovertemplate": f"step %{{y:,}}, %{{x}}<br>%{{text}}<br>{label(title)}<extra></extra>",
                }
            )
    return traces


def _size(state: str, many: int) -> int:
    return 11 if state == look.BAD else 9 if state != look.REMOVED or many <= MANY else 5


def _state(commit: Commit, seen: Mapping[int, look.Seen], is_last: bool) -> str:
    """A step that was committed again lies there once: what was there before it is gone."""
    found = seen.get(commit.step)
    if found is None:
        return look.UNSEEN
    return found.state if is_last or found.state == look.UNSEEN else look.REMOVED


def _marks(run: Run, top: int, called: Names) -> list[dict[str, Any]]:
    """A line over the whole height for each end, a family a trace, so that the legend can hide it; of very many only its mark."""
    has_lines = len([one for one in run.attempts if one.cause and one.ended_ns is not None]) <= LINES_MAX
    height = max(1, top) * 1.06
    traces = []
    for family in (*FAMILIES, OTHER):
        ends = [(one, one.ended_ns) for one in run.attempts if one.cause and family_of(one.cause) is family]
        x: list[str | None] = []
        y: list[float | None] = []
        text: list[str] = []
        for one, at in ends:
            if at is None:
                continue
            x += [axis_instant(at), axis_instant(at), None] if has_lines else [axis_instant(at)]
            y += [0, height, None] if has_lines else [height]
            text += [label(f"attempt {called(one)}: {one.cause}")] * (3 if has_lines else 1)
        if x:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if has_lines else "markers",
                    "name": family.title,
                    "x": x,
                    "y": y,
                    "text": text,
                    "legendrank": 2_000,
                    "line": {"color": family.colour.light, "width": 1.5, "dash": family.dash},
                    "marker": {
                        "symbol": family.symbol,
                        "size": [0, 10, 0] * (len(x) // 3) if has_lines else 10,
                        "color": family.colour.light,
                        "opacity": 1,
                        "line": {"width": 0},
                    },
                    "hovertemplate": "%{text}<br>%{x}<extra></extra>",
                }
            )
    return traces


def _said(run: Run, known: list[tuple[int, int]], commits: list[tuple[Attempt, Commit]], seen: Mapping[int, look.Seen]) -> str:
    parts = ["Finished steps against time, one line for each attempt."]
    if known:
        first, last = min(known), max(known)
        highest = max(step for _, step in known)
        parts.append(
            f"From step {count(first[1])} at {instant(first[0])} to step {count(last[1])} at {instant(last[0])} UTC; "
            f"the highest step that was reached is {count(highest)}."
        )
    states = [
        seen[commit.step].state for commit in {commit.step: commit for _, commit in commits}.values() if commit.step in seen
    ]
    if commits:
        told = [f"{count(states.count(state))} {_STATE_WORDS[state]}" for state in look.STATES if state in states]
        newest = max(commit.step for _, commit in commits)
        parts.append(f"{counted(len(commits), 'commit')}, the newest of step {count(newest)}: {listed(told)}.")
    lost = max(run.attempts, key=lambda one: one.lost_steps or 0, default=None)
    if lost is not None and lost.lost_steps:
        parts.append(
            f"Most was lost by attempt {Names(run)(lost)}: {counted(lost.lost_steps, 'step')} ({span(lost.lost_ms)} of training)."
        )
    return " ".join(parts)


_STATE_WORDS: Mapping[str, str] = {
    look.FULL: "checked in full and there",
    look.STRUCTURE: "there, checked by structure only",
    look.REMOVED: "removed since",
    look.BAD: "damaged or missing now",
    look.UNSEEN: "that could not be looked at",
}


def _checkpoints(commits: list[tuple[Attempt, Commit]], seen: Mapping[int, look.Seen], called: Names) -> shape.Table:
    rows = []
    for one, commit in commits:
        found = seen.get(commit.step)
        state = "not looked at" if found is None else f"{_STATE_WORDS[found.state]}: {found.text}"
        rows.append((count(commit.step), instant(commit.at_ns), called(one), commit.kind or "-", commit.mode or "-", state))
    head = ("Step", "Committed (UTC)", "Attempt", "Kind of save", "Checked", "Now")
    return shape.table("Checkpoints that were committed", head, rows, (0, 2))


def _ends(run: Run, called: Names) -> shape.Table:
    rows = [
        (
            called(one),
            one.job,
            instant(one.ended_ns),
            one.cause or "not known",
            count(one.reached),
            count(one.kept),
            count(one.lost_steps),
        )
        for one in run.attempts
    ]
    head = ("Attempt", "Job", "Ended (UTC)", "Cause", "Steps reached", "Newest checkpoint", "Steps lost")
    return shape.table("How the attempts ended", head, rows, (0, 4, 5, 6))
