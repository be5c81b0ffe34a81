"""The bars of `ckptctl timeline`: time as columns of a terminal.

Owns which character and colour a kind has, the scale, and what wins a column that several kinds share. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_supervisor.view.facts import Attempt, Span

_LETTERS = {
    "queued": ("·", ".", "bright_black"),
    "starting": ("░", ":", "cyan"),
    "training": ("█", "#", "green"),
    "saving": ("▓", "S", "blue"),
    "verifying": ("▒", "v", "bright_blue"),
    "leaving": ("▄", ">", "magenta"),
    "lost": ("╳", "x", "red"),  # noqa: RUF001 - it is no letter, and looks like none in a row
}
_MARKS = {"notice": "N", "restart": "R", "hang": "H", "oom": "O", "task": "T", "asked": "A"}
SAVE = "'"
"""Below a bar, where a save was committed; not where most columns would have one."""

SAVES_SHARE = 0.5
_SHORT = frozenset({"queued", "starting", "verifying", "leaving", "lost"})
"""Each is to be seen in the bar at least once, however short it was."""


class Letter(NamedTuple):
    """How a kind is drawn."""

    char: str
    style: str

    @classmethod
    def of(cls, kind: str, unicode: bool) -> Letter:
        """The letter of this kind."""
        rich, plain, style = _LETTERS[kind]
        return cls(rich if unicode else plain, style)


class Scale(NamedTuple):
    """One column of all bars is so long, so that their lengths can be compared; each begins at its own begin."""

    cells: int
    ns_per_cell: float

    @classmethod
    def of(cls, attempts: Iterable[Attempt], now_ns: int, cells: int) -> Scale:
        """The longest one fills the columns."""
        longest = max((until - since for since, until in (reach(one, now_ns) for one in attempts)), default=0)
        return cls(cells, max(1.0, longest / cells))


def reach(one: Attempt, now_ns: int) -> tuple[int, int]:
    """From its time in the queue to its end; one that is at it reaches to now."""
    since = one.spans[0].begin_ns if one.spans else one.began_ns or 0
    until = one.spans[-1].end_ns if one.spans else one.ended_ns or since
    if one.is_running and now_ns > until:
        until = now_ns
    return since, max(since, until)


def bar(one: Attempt, now_ns: int, scale: Scale, unicode: bool) -> tuple[str, list[str]]:
    """The characters of a bar, and the colour of each."""
    kinds = cells(one, now_ns, scale)
    letters = [Letter.of(kind, unicode) for kind in kinds]
    return "".join(letter.char for letter in letters), [letter.style for letter in letters]


def cells(one: Attempt, now_ns: int, scale: Scale) -> list[str]:
    """What each column shows: the kind that has most of it, but every short kind once at least."""
    since, until = reach(one, now_ns)
    spans = _to_now(one, until)
    count = min(scale.cells, max(1, round((until - since) / scale.ns_per_cell)))
    width = max(1.0, (until - since) / count)
    share: list[dict[str, float]] = [{} for _ in range(count)]
    for span in spans:
        for place in range(_place(span.begin_ns, since, width, count), _place(span.end_ns, since, width, count) + 1):
            part = min(span.end_ns, since + (place + 1) * width) - max(span.begin_ns, since + place * width)
            if part > 0:
                share[place][span.kind] = share[place].get(span.kind, 0) + part
    last = spans[0].kind if spans else "starting"
    kinds = []
    for column in share:
        last = max(column, key=lambda kind: column[kind]) if column else last
        kinds.append(last)
    _show_short(kinds, share)
    return kinds


def _to_now(one: Attempt, until: int) -> Sequence[Span]:
    if not one.spans or one.spans[-1].end_ns >= until:
        return one.spans
    last = one.spans[-1]
    return (*one.spans[:-1], Span(last.kind, last.begin_ns, until))


def _place(at_ns: int, since: int, width: float, count: int) -> int:
    return max(0, min(count - 1, int((at_ns - since) / width)))


def _show_short(kinds: list[str], share: list[dict[str, float]]) -> None:
    """A kind that has won no column gets the one where it has most, unless that one is the only one of another kind."""
    for kind in sorted(_SHORT - set(kinds), key=list(_LETTERS).index):
        places = [place for place, column in enumerate(share) if kind in column and kinds.count(kinds[place]) > 1]
        if places:
            kinds[max(places, key=lambda place: share[place][kind])] = kind


def marks(one: Attempt, scale: Scale) -> str:
    """The line below a bar: a letter where something happened, "" for none. The first one of a column counts."""
    if not one.spans:
        return ""
    since, until = reach(one, 0)
    count = min(scale.cells, max(1, round((until - since) / scale.ns_per_cell)))
    width = max(1.0, (until - since) / count)
    drawn = [" "] * count
    saves = {_place(commit.at_ns, since, width, count) for commit in one.commits}
    if len(saves) <= count * SAVES_SHARE:
        for place in saves:
            drawn[place] = SAVE
    for at_ns, kind, _ in one.marks:
        place = _place(at_ns, since, width, count)
        if kind in _MARKS and drawn[place] in (" ", SAVE):
            drawn[place] = _MARKS[kind]
    return "".join(drawn).rstrip()


def legend(one: Iterable[Attempt]) -> str:
    """What the letters below the bars mean, of those that are there."""
    words = {"notice": "notice", "restart": "restart in place", "hang": "hang", "oom": "out of memory", "task": "task lost"}
    there = {kind for attempt in one for _, kind, _ in attempt.marks}
    named = {**words, "asked": "asked by its owner"}
    return ", ".join([f"{SAVE} committed", *(f"{letter} {named[kind]}" for kind, letter in _MARKS.items() if kind in there)])
