"""When the lines of one journal were: one clock that only goes forward, made of the two that each line has.

Owns that reading. Must not compare journals with each other (clocks.py). Why two: `ts` steps when somebody sets the clock, and
`mono_ms` says nothing of the hour; and a damaged line may have any number in either. Where they disagree, the one that stays
nearer to the line before counts.
"""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.view.reading import moment_ns

AGREE_NS = 1_000_000_000
"""The two clocks drift apart by less than that between two lines, unless one of them was set or is damaged."""

SOON_MS = 1_000
_MS = 1_000_000


class Instants:
    """The clock of one journal, which is `ahead_ns` before the coordinator's. `steps_ns`: by how much it was seen to be set."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.steps_ns = 0
        self._ahead_ns = ahead_ns
        self._last_ns: int | None = None
        self._last_mono_ms: int | None = None
        self._apart_ns = 0

    def at(self, line: dict[str, Any]) -> int | None:
        """When this line was, ns since the epoch; None where it does not say. Never before the line that was asked for last."""
        mono_ms = line.get("mono_ms")
        if not isinstance(mono_ms, int) or isinstance(mono_ms, bool) or not 0 <= mono_ms < 1 << 53:
            mono_ms = None
        elif self._last_mono_ms is not None and self._last_ns is not None and 0 <= mono_ms - self._last_mono_ms < SOON_MS:
            self._last_ns += (mono_ms - self._last_mono_ms) * _MS
            self._last_mono_ms = mono_ms
            return self._last_ns  # Within so little nothing can be wrong by much: no need to read the other one.
        wall_ns = moment_ns(line.get("ts"))
        wall_ns = None if wall_ns is None else wall_ns - self._ahead_ns
        if self._last_ns is None or self._last_mono_ms is None:
            if wall_ns is not None:
                self._last_ns, self._last_mono_ms = wall_ns, mono_ms
            return wall_ns
        by_mono_ns = None if mono_ms is None else self._last_ns + (mono_ms - self._last_mono_ms) * _MS
        by_wall_ns = None if wall_ns is None else wall_ns - self._apart_ns
        at_ns = self._chosen(by_mono_ns, by_wall_ns)
        if at_ns is None:
            return None
        if at_ns == by_mono_ns and mono_ms is not None:
            if wall_ns is not None and by_wall_ns is not None and abs(by_wall_ns - at_ns) > AGREE_NS:
                self._apart_ns += by_wall_ns - at_ns  # Set meanwhile, or damaged: the next line says which.
                self.steps_ns = max(self.steps_ns, abs(self._apart_ns))
            if at_ns >= self._last_ns:
                self._last_ns, self._last_mono_ms = at_ns, mono_ms
        elif at_ns > self._last_ns:
            self._last_mono_ms += (at_ns - self._last_ns) // _MS
            self._last_ns = at_ns
        return max(at_ns, self._last_ns)

    def _chosen(self, by_mono_ns: int | None, by_wall_ns: int | None) -> int | None:
        if by_mono_ns is None or by_wall_ns is None:
            return by_wall_ns if by_mono_ns is None else by_mono_ns
        if abs(by_mono_ns - by_wall_ns) <= AGREE_NS:
            return by_mono_ns
        last_ns = self._last_ns or 0
        near = [one for one in (by_mono_ns, by_wall_ns) if one >= last_ns - AGREE_NS]
        return min(near, key=lambda one: abs(one - last_ns), default=last_ns)
