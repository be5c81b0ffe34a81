"""How far training had come at which time, and how many steps of it have to be done again.

Owns that count. Pure. Must not know events (telling.py). A step is known exactly where all ranks stood at it (the Go of a save),
or where a rank died of an exception; what ranks said on their way is the least that they had done.
"""

from __future__ import annotations

import bisect
import re
from typing import Any

from ckpt_supervisor.view.values import number, text

POSITIONS_MAX = 20_000
"""So many points of one start; then every other one goes."""


_AT = re.compile(r"at step (\d{1,15})( in the phase )?")
_MS = 1_000_000


class Steps:
    """One attempt. `lost`: steps that were done, and are to be done again."""

    def __init__(self) -> None:
        self.lost = 0
        self.series: list[tuple[int, int]] = []
        """(instant, finished steps), over all starts in place."""
        self._positions: list[tuple[int, int]] = []
        self._exact: int | None = None
        self.hung_ns: int | None = None
        """Since when it stands still, if it has been told so."""

    def start(self) -> None:
        """Training begins anew, from whatever step."""
        self._positions, self._exact, self.hung_ns = [], None, None

    @property
    def reached(self) -> int | None:
        """The highest step of this start that is known; None for none."""
        if not self._positions:
            return None
        last = self._positions[-1][1]
        return last if self._exact is None else max(last, self._exact)

    @property
    def is_exact(self) -> bool:
        """It was told by a rank that died there."""
        return self._exact is not None and self._exact == self.reached

    def reach(self, at_ns: int, step: int | None) -> None:
        """So many steps were finished then. Ranks say it at different times: a lower number says nothing."""
        if step is None or step < 0 or (self._positions and step < self._positions[-1][1]):
            return
        self._positions.append((at_ns, step))
        self.series.append((at_ns, step))
        if len(self._positions) > POSITIONS_MAX:
            del self._positions[1::2]
        if len(self.series) > POSITIONS_MAX:
            del self.series[1::2]

    def hang(self, at_ns: int, line: dict[str, Any]) -> None:
        """Ranks stand at these steps. Those before are finished for sure; in a phase, that one too."""
        ways = line.get("ways")
        for way in ways if isinstance(ways, list) else ():
            found = _AT.match(text(way.get("at"))) if isinstance(way, dict) else None
            if found is not None:
                self.reach(at_ns, int(found[1]) - (0 if found[2] else 1))
        stood_ms = number(line.get("stood_ms"))
        self.hung_ns = None if stood_ms is None else at_ns - max(0, stood_ms) * _MS

    def die(self, at_ns: int, step: int | None) -> None:
        """A rank has died after this many steps."""
        if step is not None and step >= 0:
            self.reach(at_ns, step)
            self._exact = step if self._exact is None else max(step, self._exact)

    def stood(self, at_ns: int | None, step: int | None) -> None:
        """All ranks stood at this step then; which one it was is told only later."""
        if step is None or step < 0 or at_ns is None:
            return
        for points in (self._positions, self.series):
            place = bisect.bisect_right(points, (at_ns, step))
            before = points[place - 1] if place else None
            if before != (at_ns, step) and (before is None or before[1] <= step):
                points.insert(place, (at_ns, step))

    def lose(self, base: int) -> int | None:
        """Everything after this step is to be done again; since when it was done, None for nothing."""
        reached = self.reached
        base = max(0, base)
        if reached is None or reached <= base:
            return None
        self.lost += reached - base
        # A word may tell of a step that was finished long before: the first one that tells of it counts.
        at_it = [at_ns for at_ns, at in self._positions if at == base]
        before = [at_ns for at_ns, at in self._positions if at < base]
        return at_it[0] if at_it else before[-1] if before else self._positions[0][0]


def thinned(points: list[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """At most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return tuple(points)
    stride = (len(points) - 1) / (most - 1)
    return tuple(points[round(place * stride)] for place in range(most))
