"""Phases between steps: the `with` block of `hook.phase()` and `loop.phase()`.

Owns the test at the boundaries inside a phase. Must not count positions (place.py does) nor wait (attachment.py does). Without safe
points an evaluation of five minutes would swallow every notice.
"""

from __future__ import annotations

from types import TracebackType

from ckpt_client.attachment import Attachment
from ckpt_client.place import Place
from ckpt_client.wire import Position


class Phase:
    """A phase after step `n`. Entering it, its safe points and leaving it are boundaries."""

    __slots__ = ("_alone", "_attachment", "_last", "_n", "_place", "name")

    def __init__(self, name: str, place: Place, attachment: Attachment | None, n: int, *, alone: bool, last: bool) -> None:
        self.name = name
        self._place = place
        self._attachment = attachment
        self._n = n
        self._alone = alone
        self._last = last  # No step follows (rule 9).

    def __enter__(self) -> Phase:
        test(self._place.enter(self._n, alone=self._alone), self._attachment)
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        here = self._place.leave(last=self._last)
        # With an exception under way this is no place to park or to save.
        if kind is None:
            test(here, self._attachment)

    def safe_point(self) -> None:
        """A point inside the phase where a checkpoint may be taken."""
        test(self._place.safe_point(), self._attachment)


def test(here: Position | None, attachment: Attachment | None) -> None:
    """Stop at a boundary if something is asked for. `entered` is stored already (rule 1)."""
    if here is None or attachment is None:
        return
    rank = attachment.rank
    if here.n >= rank.due or rank.hold > rank.done:
        attachment.boundary(here)
