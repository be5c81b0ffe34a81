"""The watch on how far training has come: a line in the journal every now and then, so that it is known after any end.

Owns how often that is told, and how many steps a rank has finished by its words. Must not cost anything: it wakes the loop for
nothing, looks at nothing, and writes only when the step has moved. Without it a journal told of a step only when one was saved.

Only task 0's supervisor has it, and hears its own ranks: they step together with all others, so theirs is the job's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ckpt_client import wire

from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.hangs import RANKS_MAX

EVERY_MS = 10_000

LAST_AT = frozenset(
    {"rank_gone", "rank_failed", "rank_finished", "rank_left", "command_exited", "notice", "leaving", "round_given_up", "exit"}
)
"""At these what was heard last is told at once: nothing may come after it."""


class Heard(NamedTuple):
    """What a rank has said: its finished steps, when that was, its launcher's count of starts, the phase that it is in."""

    step: int
    at_ms: int
    generation: int
    phase: str


class Progress:
    """The watch."""

    def __init__(self, log: Callable[[Entry], None]) -> None:
        self._log = log
        self.clock = _now_ms
        self._ranks: dict[int, Heard] = {}
        self._told: Heard | None = None
        """What was told last, and when that was."""
        self._told_ms = 0

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """Never: a word wakes the loop anyway."""
        return ()

    def look(self, now_ms: int) -> None:
        """Nothing is looked at."""

    def heard(self, word: wire.Said) -> None:
        """Learn from a word where its rank is."""
        step, who, now_ms = finished_steps(word), word.who, self.clock()
        if step is None or (who.rank not in self._ranks and len(self._ranks) >= RANKS_MAX):
            return
        before = self._ranks.get(who.rank)
        if before is not None and who.generation < before.generation:
            return
        if before is not None and who.generation > before.generation:
            # Started anew by its launcher, and all others with it, perhaps as fewer ones.
            self._ranks = {number: one for number, one in self._ranks.items() if one.generation >= who.generation}
            before = self._told = None
        if before is None or step >= before.step:
            self._ranks[who.rank] = Heard(step, now_ms, who.generation, word.phase if isinstance(word, wire.Progress) else "")
        if self._told is None or now_ms - self._told_ms >= EVERY_MS:
            self._tell()

    def told(self, entry: Entry, _at: Stamp) -> None:
        """Hear the journal's own lines: what ends a start, and what begins the next one."""
        if entry.event == "command_started":
            self._ranks, self._told = {}, None
        elif entry.event in LAST_AT:
            self._tell()

    def _tell(self) -> None:
        if not self._ranks:
            return
        told, least = self._told, min(self._ranks.values(), key=lambda one: one.step)
        if told is not None and told.step == least.step:
            return
        self._told, self._told_ms = least, self.clock()
        took_ms = None if told is None or least.step < told.step else (least.at_ms - told.at_ms) / (least.step - told.step)
        fields = {
            "step": least.step,
            "ahead": max(one.step for one in self._ranks.values()),
            "per_step_ms": None if took_ms is None else round(took_ms, 3),
            "phase": least.phase,
        }
        self._log(Entry("progress", "debug", fields))


def finished_steps(word: wire.Said) -> int | None:
    """How many steps this rank has finished by this word; None where it does not tell.

    A Progress has the position that the rank will be at if it goes on: between two steps that is the end of the step that it is
    at (docs/protocol.md, rule 1). Only in a phase, or past its safe points, are the steps before it all finished.
    """
    match word:
        case wire.Progress(entered=entered, doing=doing, phase=phase):
            if doing == "starting":
                return None
            return entered.n if phase or doing == "phase" or entered.k > 0 else max(0, entered.n - 1)
        case wire.Arrived(at=at):
            return at.n
        case wire.Saved(n=n) | wire.Failed(n=n):
            return n if n >= 0 else None
        case _:
            return None


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
