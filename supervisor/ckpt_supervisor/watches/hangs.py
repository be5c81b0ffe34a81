"""The watch on hangs: hears where the ranks are, has looked why one stands still, and tells it once.

Owns what is done when core/hangs.py finds a rank that stands still: the kinds (standing.py), the stacks of every rank below this
supervisor (dumps.py), the journal's lines and the one on stderr, and the words about it between supervisors. Must not do anything
about it: that is the machine's, by --on-hang. Silent while a round is running or a notice is in force: their deadlines count.

Each supervisor judges its own ranks. What it has to know of the others is only who is busy with what is no step (`Busy`, which
the coordinator passes on to all as `Excused`), as its own ranks may be waiting for those.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_client import wire

from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core import between
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry, spans
from ckpt_supervisor.core.hangs import DOINGS_MAX, RANKS_MAX, Detector, Doing, Stall
from ckpt_supervisor.core.state import Phase, State
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.linux import procfs

if TYPE_CHECKING:  # Imported when there is a hang; only a step of several tasks has the third.
    from ckpt_supervisor.tasks.others import Coordinating, Following
    from ckpt_supervisor.watches.dumps import Dump
    from ckpt_supervisor.watches.standing import Way

FRESH = 3
"""What another task is busy with holds for so many times in which it is said again."""

LANE = "hang"
"""Of its own: stacks take up to 30 s, and what else is watched touches DIR, whose file server may be what training waits for."""

DUMPED_MAX = 64
"""Most ranks below one supervisor whose stacks are taken; those that stand still come first."""

SHOWN_MAX = 8
"""Most ranks that are described one by one; all of them are in the journal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a look at the ranks that stand still has found."""

    stalls: tuple[Stall, ...]
    ways: tuple[Way, ...]
    dumps: tuple[Dump, ...]


class Hangs:
    """The watch of one supervisor. `view`: the machine's state. `ends`: what connects it to the step's others."""

    def __init__(
        self,
        launch: Launch,
        lanes: Lanes,
        feed: Callable[[ev.Event], None],
        log: Callable[[Entry], None],
        view: Callable[[], State],
        ends: tuple[Coordinating | None, Following | None] = (None, None),
    ) -> None:
        self._launch = launch
        self._lanes = lanes
        self._feed = feed
        self._log = log
        self._view = view
        self._coordinating, self._following = ends
        floor_ms = launch.options.hang_floor_ms
        assert floor_ms is not None
        self._floor_ms = floor_ms
        self._every_ms = wire.progress_ms(floor_ms)
        self._detector = Detector(floor_ms)
        self.clock = _now_ms
        self._at_ms: int | None = None
        self._looks = False
        """A look at ranks that stand still is under way."""
        self._hung: frozenset[wire.Who] = frozenset()
        """Ranks of the hang that was told last, as far as they have not moved since."""
        self._went_back: set[wire.Who] = set()
        self._busy: dict[int, tuple[int, tuple[Doing, ...]]] = {}
        """By task: when it said so last, and what its ranks are busy with."""
        self._said_ms = 0
        self._waiting: list[ev.Stalled] = []
        """Hangs that were found while a checkpoint was committed."""
        if self._coordinating is not None:
            self._coordinating.on_hangs = self._from_task
        if self._following is not None:
            self._following.on_hangs = lambda word: self._detector.excuse(word.doings, self.clock())

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When the next look is due."""
        return (self._at_ms,)

    def heard(self, word: wire.Said) -> None:
        """Learn from a rank's progress."""
        if not isinstance(word, wire.Progress):
            return
        now = self.clock()
        if word.who not in self._went_back and self._detector.went_back(word):
            self._tell_went_back(word)
        if self._detector.heard(word, now) and word.who in self._hung:
            self._hung -= {word.who}
            if not self._hung:
                self._log(Entry("hang_over", "info", {"rank": word.who.rank, "rank_pid": word.who.pid, "step": word.entered.n}))
        if self._at_ms is None:
            self._at_ms = self._detector.next_ms(now)

    def _tell_went_back(self, word: wire.Progress) -> None:
        """Training that begins from scratch in spite of a checkpoint loses all of it, and looks well."""
        if len(self._went_back) >= RANKS_MAX:
            return
        self._went_back.add(word.who)
        text = f"rank {word.who.rank} is at step {word.entered.n}, before what it was given to go on from: does training load it?"
        self._log(
            Entry(
                "rank_went_back",
                "warning",
                {"rank": word.who.rank, "rank_pid": word.who.pid, "step": word.entered.n, "text": text},
            )
        )
        if len(self._went_back) == 1:
            say(text)

    def look(self, now_ms: int) -> None:
        """See who stands still, if it is time."""
        if self._waiting and self._view().phase is Phase.RUNNING:
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self._is_told(event)
        if self._at_ms is None or now_ms < self._at_ms:
            return
        for who in self._detector.silent(now_ms):
            if who.pid <= children.PID_MAX and procfs.state_of(who.pid) in ("gone", "zombie"):
                self._detector.ended(who)  # In the middle of an evaluation, say, which others would be excused for.
        self._tell_busy(now_ms)
        stalls = self._detector.look(now_ms)
        if not self._looks and not self._is_quiet() and any(not self._detector.is_told(stall.who) for stall in stalls):
            self._look_why(now_ms)
        next_ms = self._detector.next_ms(now_ms)
        if next_ms is not None and any(not self._detector.is_told(stall.who) for stall in stalls):
            next_ms = max(
                next_ms, now_ms + self._every_ms
            )  # It is looked at, or may not be told yet: its time has come long ago.
        self._at_ms = next_ms

    def _is_quiet(self) -> bool:
        """A notice has deadlines of its own."""
        following = self._following
        if following is not None and not following.is_lost:
            return not following.is_calm
        # A save on request, or by time, is no reason to be silent: who does not come to its step may be what hangs. Who has come
        # is parked, and not judged.
        state = self._view()
        return state.phase.value >= Phase.VERIFYING.value or state.notice is not None

    # --- between supervisors ------------------------------------------------------------------------------------------

    def _tell_busy(self, now_ms: int) -> None:
        """What ranks here are busy with is told to the others, now and then."""
        if now_ms - self._said_ms < self._every_ms:
            return
        own = self._detector.busy(now_ms)
        if self._following is not None and own and not self._following.is_lost:
            self._said_ms = now_ms
            self._following.tell(between.Busy(self._launch.job.task, own))
        elif self._coordinating is not None:
            old_ms = now_ms - FRESH * self._every_ms
            self._busy = {task: said for task, said in self._busy.items() if said[0] >= old_ms}
            doings = sorted({*own, *(doing for _, some in self._busy.values() for doing in some)})
            if doings:
                self._said_ms = now_ms
                self._coordinating.excuse(between.Excused(tuple(doings[:DOINGS_MAX])), [*range(1, self._launch.job.tasks)])

    def _from_task(self, word: between.Busy | between.Stuck) -> None:
        """What another task's supervisor says of its ranks."""
        match word:
            case between.Busy(task=task, doings=doings):
                now = self.clock()
                if 0 < task < self._launch.job.tasks:
                    self._busy[task] = (now, doings)
                self._detector.excuse(doings, now)
                if self._at_ms is None:
                    self._at_ms = now  # Without ranks of its own this task has to pass it on all the same.
            case between.Stuck(task=task, ranks=ranks, kind=kind, text=text):
                say(f"task {task}: {text}")
                self._is_told(ev.Stalled(task, ranks, kind, text))

    # --- a hang -------------------------------------------------------------------------------------------------------

    def _look_why(self, now_ms: int) -> None:
        from ckpt_supervisor.watches import dumps, standing

        stalls = self._detector.near(now_ms)
        words = {word.who: word for word in self._detector.words()}
        first = [words.pop(stall.who) for stall in stalls if stall.who in words]
        asked = [*first, *words.values()][:DUMPED_MAX]
        silent_ms = FRESH * self._every_ms
        taker = dumps.Taker(self._launch.env, self._launch.claims)

        def examine() -> Found:
            ways, taken = standing.ways(stalls, silent_ms), tuple(taker.take(asked))
            return Found(stalls, tuple(standing.by_now(stalls, ways)), taken)

        def examined(found: Found | Broken) -> None:
            if isinstance(found, Broken):
                self._log(Entry("hang_not_examined", "error", {"reason": f"{type(found.error).__name__}: {found.error}"}))
                found = Found(stalls, (standing.UNSEEN,) * len(stalls), ())
            self._examined(found)

        self._looks = True
        self._lanes.post(LANE, "looking at ranks that stand still", examine, examined)

    def _examined(self, found: Found) -> None:
        from ckpt_supervisor.watches.standing import GONE

        self._looks = False
        pairs = list(zip(found.stalls, found.ways, strict=True))
        for stall, way in pairs:
            if way.kind == GONE:
                self._detector.drop(stall.who)
        # Meanwhile one may have moved, or ended: that is no hang of it.
        still = {stall.who for stall in self._detector.near(self.clock())}
        stuck = [(stall, way) for stall, way in pairs if stall.who in still]
        if not stuck or self._is_quiet():
            return None
        for stall, _ in stuck:
            self._detector.tell(stall.who)
        self._hung = frozenset(stall.who for stall, _ in stuck)
        gone = [(stall, way) for stall, way in pairs if way.kind == GONE]
        return self._tell([*gone, *stuck], found.dumps)

    def _tell(self, pairs: list[tuple[Stall, Way]], taken: tuple[Dump, ...]) -> None:
        """The journal, stderr, and the machine, which decides what is done about it."""
        from ckpt_supervisor.watches.standing import KINDS

        pairs = sorted(pairs, key=lambda pair: (KINDS.index(pair[1].kind), pair[0].who.rank))
        longest = max((stall for stall, _ in pairs), key=lambda stall: stall.stood_ms)
        kind, text = pairs[0][1].kind, text_of(pairs)
        ranks = tuple(sorted(stall.who.rank for stall, _ in pairs))
        numbers = {
            "stood_ms": longest.stood_ms,
            "limit_ms": longest.limit_ms,
            "slow_step_ms": longest.slow_ms,
            "floor_ms": self._floor_ms,
        }
        ways = [
            {"rank": stall.who.rank, "rank_pid": stall.who.pid, "kind": way.kind, "at": stall.at, "silent_ms": stall.silent_ms}
            for stall, way in pairs
        ]
        fields = {"kind": kind, "ranks": spans([*ranks]), "text": text, **numbers, "ways": ways}
        self._log(Entry("hang_suspected", "warning", fields))
        for dump in taken:
            self._log(Entry("stack", "info", {"rank": dump.rank, "rank_pid": dump.pid, "by": dump.by, "text": dump.text}))
        following = self._following
        if following is not None and not following.is_lost:
            following.tell(
                between.Stuck(self._launch.job.task, ranks, kind, text)
            )  # It is told on stderr where all come together.
            return
        say(f"{text}; the stacks are in the journal: ckptctl log --event stack --dir {self._launch.options.dir}")
        self._is_told(ev.Stalled(self._launch.job.task, ranks, kind, text))

    def _is_told(self, event: ev.Stalled) -> None:
        """The machine decides; not while a checkpoint is verified and committed, which is over soon."""
        before = self._view()
        if Phase.VERIFYING.value <= before.phase.value <= Phase.COMMITTING.value:
            self._waiting = [*self._waiting, event][-DOINGS_MAX:]
            return
        self._feed(event)
        after, how = self._view(), self._launch.options.on_hang
        if how != "warn" and before.notice is None and after.notice is None and after.restarts == before.restarts:
            say(f"--on-hang {how}: nothing is done about it; no start in place is left (--restarts), or the job is not requeued")


def text_of(pairs: list[tuple[Stall, Way]]) -> str:
    """One line for people: for how long, and in which way each rank stands still, the one that the others wait for first."""
    longest = max((stall for stall, _ in pairs), key=lambda stall: stall.stood_ms)
    groups: dict[tuple[str, str], list[int]] = {}
    for stall, way in pairs:
        groups.setdefault((way.text, stall.at), []).append(stall.who.rank)
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)} {at} {way}" for (way, at), ranks in groups.items()]
    more = f"; and {len(parts) - SHOWN_MAX} more ways" if len(parts) > SHOWN_MAX else ""
    why = f"{_seconds(longest.limit_ms)} are allowed"
    if longest.slow_ms:
        why += f", as slow steps take {_seconds(longest.slow_ms)}"
    return f"training seems to hang: no progress for {_seconds(longest.stood_ms)} ({why}): {'; '.join(parts[:SHOWN_MAX])}{more}"


def _listed(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:SHOWN_MAX]))
    return some if len(ranks) <= SHOWN_MAX else f"{some} and {len(ranks) - SHOWN_MAX} more"


def _seconds(ms: int) -> str:
    return f"{ms / 1_000:.0f} s" if ms >= 10_000 else f"{ms / 1_000:.1f} s"


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
