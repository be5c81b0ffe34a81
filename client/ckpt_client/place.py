"""Where the training thread stands: its position while phases come and go (docs/protocol.md, rule 8).

Owns the count of safe points and what `entered` says inside phases. Must not lock, wait or talk: each method stores `entered`
first and returns the position of the boundary that the caller then tests (rule 1), None where there is no boundary.

Inside a phase that all ranks enter, safe point k after step n is at (n, k), and its end counts as one more. Inside a phase that
only some ranks enter positions stand still: the others have no boundary there, so every point in it is the boundary that all
last had in common, which is (n, 0) unless a common phase came before it.
"""

from __future__ import annotations

from ckpt_client.protocol import Rank
from ckpt_client.wire import Position


class Place:
    """The training thread's position between two steps. Written by that thread only."""

    __slots__ = ("_alone", "_rank", "k", "n")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.n = -1
        self.k = 0
        self._alone: list[bool] = []  # One entry for each phase that is open, the innermost last.

    def at(self, n: int) -> Position:
        """The boundary after step n. Passing it twice, as after a phase, gives what all ranks then have."""
        if n != self.n:
            self.n, self.k = n, 0
        return Position(n, self.k)

    def enter(self, n: int, *, alone: bool) -> Position | None:
        """Enter a phase after step n. The first one after a step is itself the boundary of that step."""
        nested = bool(self._alone)
        if not nested:
            self.at(n)
        self._alone.append(alone or (nested and self._alone[-1]))
        self._store_entered()
        return Position(self.n, 0) if not nested and self.k == 0 else None

    def safe_point(self) -> Position | None:
        """Pass a safe point. Outside a phase there is none."""
        if not self._alone:
            return None
        if not self._alone[-1]:
            self.k += 1
        self._store_entered()
        return Position(self.n, self.k)

    def leave(self, *, last: bool) -> Position | None:
        """Leave the innermost phase. `last`: no step follows, so `entered` stays here (rule 9)."""
        alone = self._alone.pop()
        if self._alone:
            self._store_entered()
            # Leaving a phase of its own is the last boundary at its position, also inside a common one.
            return Position(self.n, self.k) if alone and not self._alone[-1] else None
        if not alone:
            self.k += 1
        here = Position(self.n, self.k)
        self._rank.entered = here if last else self.n
        return here

    def name_phase(self, name: str) -> str:
        """Say which phase this is, "" for none; the one before."""
        before, self._rank.phase = self._rank.phase, name
        return before

    def inside(self) -> bool:
        """Whether a phase is open."""
        return bool(self._alone)

    def _store_entered(self) -> None:
        self._rank.entered = Position(self.n, self.k if self._alone[-1] else self.k + 1)
