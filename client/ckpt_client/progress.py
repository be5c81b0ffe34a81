"""What a rank says of its progress while nobody asks: a word every few seconds, for a supervisor that looks out for hangs.

Owns how often, and how long training has stood where it is. Must do nothing in the training thread, nor read a clock: the
listener looks at `entered`, which is stored at every boundary anyway, whenever it is awake. So a step costs what it did before,
and a step that is shorter than the second between two looks does not show by itself, only in how far training has come.

Where the supervisor does not ask for it (CKPT_SUPERVISE_PROGRESS, in ms) nothing is said. It asks for 5 s unless `--hang-floor`
says otherwise: a sixtieth of the five minutes from which on a hang is told at all, and one word of 60 bytes in the time in
which the listener wakes five times anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_client import wire
from ckpt_client.protocol import Rank
from ckpt_client.wire import Doing, Position

EVERY_MS_MIN = 100
"""Not more often than that, whatever is asked for."""


def every_ms(environment: Mapping[str, str]) -> int:
    """How often this process's supervisor wants to hear of its progress; 0 for never."""
    text = environment.get(wire.PROGRESS, "")
    asked = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return max(asked, EVERY_MS_MIN) if asked else 0


class Pace:
    """One rank's progress, as its listener sees it. Used by the listener, under the owner's lock."""

    __slots__ = ("_dump", "_next_ms", "_rank", "_seen", "_since_ms", "every_ms")

    def __init__(self, rank: Rank, every_ms: int, dump: tuple[int, int] = (0, -1)) -> None:
        """`dump`: the signal at which this process writes its stacks, and the descriptor that it writes them to."""
        self.every_ms = every_ms
        self._rank = rank
        self._dump = dump
        self._seen: tuple[Position, Doing, str] | None = None
        self._since_ms = 0
        self._next_ms: int | None = None

    def look(self, now_ms: int) -> wire.Progress | None:
        """See where training is; the word for it when it is time for one."""
        before, (_, doing, _) = self._seen, self._see(now_ms)
        # Its first boundary is told at once: it shows whether training went on from what it was given.
        is_first = before is not None and before[1] == "starting" != doing
        return None if not is_first and self._next_ms is not None and now_ms < self._next_ms else self.word(now_ms)

    def word(self, now_ms: int) -> wire.Progress:
        """The word for it, now."""
        here, doing, phase = self._see(now_ms)
        self._next_ms = now_ms + self.every_ms
        return wire.Progress(self._rank.who, here, doing, phase, now_ms - self._since_ms, *self._dump)

    def _see(self, now_ms: int) -> tuple[Position, Doing, str]:
        seen = self._rank.position(), self._rank.doing, str(self._rank.phase)[: wire.PHASE_CHARS_MAX]
        if seen != self._seen:
            self._seen, self._since_ms = seen, now_ms
        return seen
