"""Phases between steps: the `with` block of `hook.phase()` and `loop.phase()`.

Owns the test at the boundaries inside a phase. Must not count positions (place.py does) nor wait (attachment.py does).
Without safe points an evaluation of five minutes would swallow every notice.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from ckpt_client.attachment import Attachment
from ckpt_client.place import Place
from ckpt_client.wire import Position


class Stay(NamedTuple):
    """Where a phase stands: after step `n`; entered by some ranks only; with no step to follow."""

    n: int
    alone: bool
    last: bool


class Phase:
    """A phase between two steps. Entering it, its safe points and leaving it are boundaries."""

    __slots__ = ("_attachment", "_outer", "_place", "_stay", "name")

    def __init__(self, name: str, place: Place, attachment: Attachment | None, stay: Stay) -> None:
        self.name = name
        self._place = place
        self._attachment = attachment
        self._stay = stay
        self._outer = ""

    def __enter__(self) -> Phase:
        self._outer = self._place.name_phase(self.name)
        stop_if_asked(self._place.enter(self._stay.n, alone=self._stay.alone), self._attachment)
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._place.name_phase(self._outer)
        here = self._place.leave(last=self._stay.last)
        # With an exception under way this is no place to park or to save.
        if kind is None:
            stop_if_asked(here, self._attachment)

    def safe_point(self) -> None:
        """A point inside the phase where a checkpoint may be taken."""
        stop_if_asked(self._place.safe_point(), self._attachment)


def stop_if_asked(here: Position | None, attachment: Attachment | None) -> None:
    """Stop at a boundary if something is asked for. `entered` is stored already (rule 1)."""
    if here is None or attachment is None:
        return
    rank = attachment.rank
    if rank.hold > rank.done or here.n >= rank.due:
        attachment.boundary(here)
