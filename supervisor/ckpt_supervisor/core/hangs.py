"""Which ranks stand still: learned from where they say they are, judged against their own pace.

Pure: no clock, whole milliseconds, an instant is an argument. Owns the limit from which on standing still is a hang. Must not
know why a rank stands (watches/standing.py looks), nor what is done about it.

Theory. A rank says every few seconds where it is and for how long its listener has seen it there. From that its steps are timed:
one by one where they are longer than a second, by their mean where several came between two words. The *slow end* is the slowest
of at least the last 100 steps and the last hour. The limit is the floor (--hang-floor) and three times the slow end: a run with
steps of 40 ms is judged after the floor, one with steps of 10 minutes after half an hour more, and an evaluation that no phase
announces is a slow step from its first time on.

What is no step has an allowance of its own: the first step (compilers, caches), a save, and a phase until it has been passed
three times; then the phase's own slow end counts. A rank that is parked is never judged: the machine's deadlines do that. While
a rank is in any of these it may be waited for by those that are at its step or beyond it, so their time does not count: an
evaluation by rank 0 alone is no hang of the others. Those behind it can come to its step without it, and are judged; so are those
that are in the very same thing at the same place, as they have the same allowance.

Time in which nobody looked (this process was stopped, as by `scontrol suspend`) does not count: the ranks were stopped as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import NamedTuple

from ckpt_client import wire
from ckpt_client.wire import Position, Progress, Who

MULTIPLE = 3
"""How many of its slow steps a rank may stand still, beyond the floor."""

SAMPLE_MS = 1_000
"""The listener looks this often: that a step was over is seen so late."""

NAP_MS = 15_000
"""Looks come every 5 s and sooner: after longer than this the looking process was stopped meanwhile."""

FIRST_MS = 3_600_000
"""The first step may take an hour: compilers, caches, the first batch of a slow file system."""

BUSY_MS = 1_800_000
"""So long may a save take, and a phase that nothing is known of; --save-timeout ends a save sooner."""

FLOORS = 6
"""Those two are no less than so many floors."""

TIMED_MIN = 3
"""Until so many steps have been timed the first one stands for them; until it was passed so often, a phase is a new one."""

WINDOW_STEPS = 100
WINDOW_MS = 3_600_000

PHASES_MAX = 100
"""Most names of phases whose times are kept for a rank."""

DOINGS_MAX = 16
"""Most different things that ranks of one supervisor are busy with."""

SILENT_MAX = 64
"""Most ranks that are not heard any more whose processes are looked at in a turn."""

RANKS_MAX = 4_096
"""Most ranks below one supervisor that are watched."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """A rank that stands still for longer than it may."""

    who: Who
    entered: Position
    doing: str
    phase: str
    stood_ms: int
    limit_ms: int
    slow_ms: int
    """The slow end of what it was measured against."""
    silent_ms: int
    """Since its last word."""

    @property
    def at(self) -> str:
        """Where, for people."""
        if self.doing == "starting":
            return "before its first step"
        phase = f" in the phase {self.phase!r}" if self.doing == "phase" else ""
        return f"at step {self.entered.n}{phase}{' while saving' if self.doing == 'saving' else ''}"


class Slow:
    """The slow end of a row of times: the longest of the last ones."""

    __slots__ = ("_before_ms", "_began_ms", "_count", "_now_ms", "timed")

    def __init__(self) -> None:
        self.timed = 0
        self._before_ms = self._now_ms = self._count = 0
        self._began_ms: int | None = None

    def add(self, took_ms: int, count: int, now_ms: int) -> None:
        """So many of them took this long each."""
        if self._began_ms is None:
            self._began_ms = now_ms
        if self._count >= WINDOW_STEPS and now_ms - self._began_ms >= WINDOW_MS:
            self._before_ms, self._now_ms, self._count, self._began_ms = self._now_ms, 0, 0, now_ms
        self._now_ms = max(self._now_ms, took_ms)
        self._count += count
        self.timed += count

    @property
    def ms(self) -> int:
        """The longest of this window and the one before."""
        return max(self._before_ms, self._now_ms)


class Doing(NamedTuple):
    """What ranks are busy with that is no step, and where: who waits for one of them is excused."""

    doing: str
    phase: str
    at: Position


class Pace:
    """What is known of one rank."""

    __slots__ = (
        "changed_ms",
        "ended",
        "excused_ms",
        "first_ms",
        "first_n",
        "heard_ms",
        "phases",
        "steps",
        "told",
        "visit_ms",
        "word",
    )

    def __init__(self, word: Progress, now: int) -> None:
        self.word = word
        self.first_n = word.entered.n
        self.first_ms = 0
        """How long its first step took."""
        self.changed_ms = now
        self.excused_ms = now
        self.heard_ms = now
        self.steps = Slow()
        self.phases: dict[str, Slow] = {}
        self.visit_ms = 0
        """The longest time between two safe points of the phase that it is in."""
        self.told = False
        self.ended = False
        """Its process is there no more, and it has not said that it was over."""

    @property
    def is_first(self) -> bool:
        """In or before its first step: its second boundary ends that with steps(), its first with attach(); one fits both."""
        return self.word.doing in ("starting", "training") and self.word.entered.n < self.first_n + 2

    @property
    def busy(self) -> Doing | None:
        """What it does, if that is no step."""
        word = self.word
        return Doing(word.doing, word.phase, word.entered) if word.doing != "training" or self.is_first else None

    def slow(self) -> Slow:
        """The times that it is measured against."""
        return self.phases.get(self.word.phase, Slow()) if self.word.doing == "phase" else self.steps


class Detector:
    """All ranks below one supervisor."""

    def __init__(self, floor_ms: int) -> None:
        self._floor_ms = floor_ms
        self._every_ms = wire.progress_ms(floor_ms)
        self._silent_ms = 3 * self._every_ms
        # What a rank does is seen a second late, and told a word later: the promised time is to be kept all the same.
        self._least_ms = max(floor_ms - self._every_ms - SAMPLE_MS, floor_ms // 2)
        self._ranks: dict[int, Pace] = {}
        self._looked_ms: int | None = None
        self._asleep_ms = 0

    # --- what comes in ----------------------------------------------------------------------------------------------

    def heard(self, word: Progress, now_ms: int) -> bool:
        """A rank has said where it is. Whether it was told to hang, and goes on."""
        now = self._awake(now_ms)
        pace = self._ranks.get(word.who.rank)
        if pace is None or pace.word.who != word.who:
            self._begin(word, now)
            return False
        before = pace.word
        moves = (before.entered, before.doing, before.phase) != (word.entered, word.doing, word.phase)
        goes_on = pace.told and moves
        if moves:
            self._moved(pace, word, now)
        pace.word, pace.heard_ms, pace.told = word, now, pace.told and not goes_on
        if word.doing == "over":
            del self._ranks[word.who.rank]
        return goes_on

    def went_back(self, word: Progress) -> bool:
        """Whether this rank is below the boundary that it was to come to first: it has not loaded what it was given."""
        pace = self._pace(word.who)
        return pace is not None and word.doing not in ("starting", "phase", "over") and word.entered.n < pace.first_n

    def excuse(self, others: Collection[Doing], now_ms: int) -> None:
        """These are busy, here or elsewhere in the job: the time of who may be waiting for them does not count."""
        now = self._awake(now_ms)
        for pace in self._ranks.values() if others else ():
            own, n = pace.busy, pace.word.entered.n
            if any(other.at.n <= n and other != own for other in others):
                pace.excused_ms = now

    def drop(self, who: Who) -> None:
        """This rank's process has ended."""
        if self._pace(who) is not None:
            del self._ranks[who.rank]

    def silent(self, now_ms: int) -> tuple[Who, ...]:
        """Who is not heard any more."""
        now = self._awake(now_ms)
        mute = (pace.word.who for pace in self._ranks.values() if not pace.ended and now - pace.heard_ms > self._silent_ms)
        return tuple(itertools.islice(mute, SILENT_MAX))

    def ended(self, who: Who) -> None:
        """The process of this rank is gone: it stands still, and whoever waits for it waits in vain."""
        pace = self._pace(who)
        if pace is not None:
            pace.ended = True

    def near(self, now_ms: int) -> tuple[Stall, ...]:
        """Who stands still, or has stood for half of the time after which it does: they are in it together."""
        now = self._awake(now_ms)
        found = (self._stall(pace, now, 2) for _, pace in sorted(self._ranks.items()))
        return tuple(stall for stall in found if stall is not None)

    def tell(self, who: Who) -> None:
        """Its stall is told; not again until it has moved."""
        pace = self._pace(who)
        if pace is not None:
            pace.told = True

    def is_told(self, who: Who) -> bool:
        """Whether that is so."""
        pace = self._pace(who)
        return pace is not None and pace.told

    # --- what is found ----------------------------------------------------------------------------------------------

    def look(self, now_ms: int) -> tuple[Stall, ...]:
        """Who stands still by now, with those that have been told of."""
        self.excuse(self.busy(now_ms), now_ms)
        now = self._awake(now_ms)
        found = (self._stall(pace, now) for _, pace in sorted(self._ranks.items()))
        return tuple(stall for stall in found if stall is not None)

    def busy(self, now_ms: int) -> tuple[Doing, ...]:
        """What ranks here are busy with that is no step, as long as each of these may take."""
        now = self._awake(now_ms)
        busy = {pace.busy for pace in self._ranks.values() if not pace.ended and not self._is_over(pace, now)}
        return tuple(sorted(one for one in busy if one is not None)[:DOINGS_MAX])

    def next_ms(self, now_ms: int) -> int | None:
        """When to look again, if nothing is heard; None while nobody is watched."""
        now = self._awake(now_ms)
        times = [now + self._every_ms] if self._ranks else []
        for pace in self._ranks.values():
            limit, _ = self._limit(pace, now)
            if limit is not None and not pace.told:
                times.append(max(self._since(pace, now) + limit, now + 1))
        return min(times) + self._asleep_ms if times else None

    def words(self) -> tuple[Progress, ...]:
        """The last word of each rank that is watched."""
        return tuple(pace.word for _, pace in sorted(self._ranks.items()))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _pace(self, who: Who) -> Pace | None:
        pace = self._ranks.get(who.rank)
        return pace if pace is not None and pace.word.who == who else None

    def _awake(self, now_ms: int) -> int:
        """The instant on a clock that stands while this process does."""
        before, self._looked_ms = self._looked_ms, now_ms
        if before is not None and now_ms - before > NAP_MS:
            self._asleep_ms += now_ms - before
        return now_ms - self._asleep_ms

    def _begin(self, word: Progress, now: int) -> None:
        """A process that was not known: another start, or another generation, whose pace is its own."""
        generation = word.who.generation
        if any(pace.word.who.generation > generation for pace in self._ranks.values()):
            return
        self._ranks = {number: pace for number, pace in self._ranks.items() if pace.word.who.generation >= generation}
        if word.doing != "over" and (word.who.rank in self._ranks or len(self._ranks) < RANKS_MAX):
            self._ranks[word.who.rank] = Pace(word, now)

    def _moved(self, pace: Pace, word: Progress, now: int) -> None:
        """It is elsewhere, or does something else, than it said last; what it did until then took its time."""
        before = pace.word
        changed = max(pace.heard_ms, now - word.stood_ms)
        took = max(0, changed - pace.changed_ms - SAMPLE_MS)
        if pace.is_first:
            pace.first_ms = max(pace.first_ms, took)
        elif before.doing == "training":
            # It may have waited for somebody before it was excused last. A hang that is over makes the next limit no hours.
            own = max(0, took - max(0, pace.excused_ms - pace.changed_ms))
            own = min(own, self._limit(pace, now)[0] or own) if pace.told else own
            steps = max(1, word.entered.n - before.entered.n)
            pace.steps.add(math.ceil(own / steps), 0 if pace.excused_ms > pace.changed_ms else steps, now)
        elif before.doing == "phase":
            pace.visit_ms = max(pace.visit_ms, took)
            if (word.doing, word.phase) != (before.doing, before.phase):
                self._passed(pace, before.phase, now)
        pace.changed_ms = changed

    def _passed(self, pace: Pace, name: str, now: int) -> None:
        """A phase is over."""
        if name in pace.phases or len(pace.phases) < PHASES_MAX:
            pace.phases.setdefault(name, Slow()).add(pace.visit_ms, 1, now)
        pace.visit_ms = 0

    def _is_over(self, pace: Pace, now: int) -> bool:
        """Whether it stands where it is for longer than it may, whoever else is busy."""
        limit, _ = self._limit(pace, now)
        return limit is not None and now - pace.changed_ms >= limit

    def _since(self, pace: Pace, now: int) -> int:
        """From when on its standing still counts. One that is not heard may have moved until it was heard last."""
        silent = now - pace.heard_ms > self._silent_ms
        return max(pace.changed_ms, pace.excused_ms, pace.heard_ms if silent else 0)

    def _limit(self, pace: Pace, now: int) -> tuple[int | None, int]:
        """How long it may stand where it is, None for as long as it likes, and the slow end that this comes from."""
        doing, slow = pace.word.doing, pace.slow()
        if pace.ended:
            return self._least_ms, 0
        if doing == "parked" and now - pace.heard_ms <= self._silent_ms:
            return None, 0
        if pace.is_first:
            return max(FIRST_MS, 2 * FLOORS * self._floor_ms), 0
        if doing in ("saving", "parked") or (doing == "phase" and slow.timed < TIMED_MIN):
            return max(BUSY_MS, FLOORS * self._floor_ms), 0
        slow_ms = max(slow.ms, pace.first_ms) if doing == "training" and slow.timed < TIMED_MIN else slow.ms
        return self._least_ms + MULTIPLE * slow_ms, slow_ms

    def _stall(self, pace: Pace, now: int, part: int = 1) -> Stall | None:
        limit, slow_ms = self._limit(pace, now)
        stood = now - self._since(pace, now)
        if limit is None or stood * part < limit:
            return None
        word = pace.word
        return Stall(word.who, word.entered, word.doing, word.phase, stood, limit, slow_ms, now - pace.heard_ms)
