"""Ranks that attach anew inside one start of the command: their launcher (torchrun) has started them again, or another program.

Owns when that is so. Pure. Must not know what it means for steps and time (telling.py). A launcher counts its starts, and its
count comes with each rank's first word; where nothing counts, ranks begin anew when all that were there are gone.
"""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.view.values import number, ranks_of

RANKS_MAX = 1 << 16


class Waves:
    """The ranks that are there."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._there: set[int] = set()
        self._has_finished = False
        self._has_failed = False

    @property
    def ended_well(self) -> bool:
        """The ranks before have left their loops by themselves, as far as they have said."""
        return self._has_finished and not self._has_failed

    def hello(self, line: dict[str, Any]) -> bool:
        """Ranks attach; whether they are the first ones of another start than those before."""
        generation, before = number(line.get("generation")) or 0, self._generation
        if before is not None and generation < before:
            return False  # Late, of a start that is over.
        is_anew = before is not None and (generation > before or not self._there)
        if is_anew:
            self._there.clear()
        if before is not None and generation > before:
            self._has_failed = True  # Or nobody would have started it again. Ranks that were ended by it may say Finished.
        self._generation = generation
        self._there.update(ranks_of(line, RANKS_MAX - len(self._there)))
        return is_anew

    def gone(self, line: dict[str, Any]) -> None:
        """Ranks are gone."""
        self._there.difference_update(ranks_of(line, RANKS_MAX))

    def finished(self) -> None:
        """A rank has left its loop by itself, or by an exception: that is told after it."""
        self._has_finished = True

    def failed(self) -> None:
        """A rank has died of an exception."""
        self._has_failed = True

    def begin(self) -> None:
        """What was said of an end was said of the ranks before."""
        self._has_finished = self._has_failed = False
