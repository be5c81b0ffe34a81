"""One hour of a training run as its listeners tell of it, and what the detector of hangs makes of it.

Owns the trace: steps with jitter and drift, first steps, evaluations with and without a phase, of all ranks or of one, saves, a
suspended node, and in half of the runs a rank that stops for good. The words are made by the client's own Pace and judged by the
supervisor's own Detector; only the training is imitated. `python -m tests.sim.hangs --runs 2000`, `--seed 7` for one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_client import wire
from ckpt_client.progress import Pace
from ckpt_client.wire import Position, Who
from ckpt_supervisor.core import hangs

HOUR_MS = 3_600_000
LISTENER_MS = 1_000
"""A listener that nothing is asked of wakes this often."""

WORD_MS = 300
"""So late a word may come."""

UNSEEN_MS = wire.PROGRESS_MS_MAX
"""A wait before a save that is shorter than the time between two words passes for a part of the step."""

FLOORS_MS = (60_000, 120_000, 300_000)
STEPS_MS = (150, 400, 2_000, 15_000, 60_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """From this instant on a rank is here. `mute`: C code has the interpreter, and the listener cannot speak."""

    at_ms: int
    here: Position
    doing: str
    phase: str = ""
    mute: bool = False


@dataclasses.dataclass(slots=True)
class Trace:
    """A run: what each rank does, and what is true of it."""

    floor_ms: int
    marks: list[list[Mark]]
    naps: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """When the whole node stands still, and for how long."""
    hung_ms: int | None = None
    """When the rank that hangs has moved for the last time."""
    slow_ms: int = 0
    """The slowest step before that, of those that hold nobody but themselves."""


class Training:
    """Makes a trace: all ranks in lock-step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.floor_ms = rng.choice(FLOORS_MS)
        self.step_ms = rng.choice([step for step in STEPS_MS if step <= self.floor_ms // 2])
        self.now = 0
        self.n = rng.choice((0, 0, 5_000))
        self.unseen_ms = 0
        """What is shorter than the time between two words may go unseen, and passes for a part of a step."""
        self.first_ms = self.slowest_ms = self.timed = 0
        """How long the first step takes, the slowest one since, and how many have come since."""
        self.report_ms = rng.randrange(5_000, 400_000)
        self.trace = Trace(self.floor_ms, [[] for _ in range(rng.choice((1, 2, 4)))])
        self.hangs_at_ms = rng.randrange(HOUR_MS // 6, HOUR_MS) if rng.random() < 0.5 else None

    def make(self) -> Trace:
        """The whole hour."""
        rng = self.rng
        self._all("starting")
        self.now += rng.randrange(1_000, 60_000)
        self.first_ms = rng.randrange(20_000, 120_000)
        self._step(self.first_ms, mute=rng.random() < 0.3)
        first_ms = self.now
        while self.now < HOUR_MS:
            if self.hangs_at_ms is not None and self.now >= self.hangs_at_ms:
                self._hang()
                break
            took = self._took()
            self._step(took)
            self.trace.slow_ms = max(self.trace.slow_ms, took + self.unseen_ms)
            self.slowest_ms = max(self.slowest_ms, took)
            self.timed += 1
            self._between()
        # Until some steps are timed the first one stands for them; a step beside a nap is seen with up to a word's time of it.
        few_ms = first_ms if self.timed <= hangs.TIMED_MIN + 1 else 0
        self.trace.slow_ms = max(self.trace.slow_ms, few_ms, wire.PROGRESS_MS_MAX if self.trace.naps else 0)
        return self.trace

    def _took(self) -> int:
        drift = 1 + self.now / HOUR_MS
        took = self.step_ms * drift * self.rng.lognormvariate(0, 0.3)
        chance = self.rng.random()
        if chance < 0.002:
            took *= 3
        took = min(took, self._longest_ms())
        if 0.002 <= chance < 0.002 + self.step_ms / HOUR_MS:  # Once an hour or so: an evaluation that nobody has announced.
            took = max(took, self.rng.randrange(self.floor_ms * 3 // 4))
        return int(took) + 1

    def _longest_ms(self) -> int:
        """No step is longer: beyond the floor and three of those before it, it would be told of, and rightly.

        Of each of these the ranks' words, one in so many seconds, may show that much less.
        """
        slow_ms = self.slowest_ms if self.timed >= hangs.TIMED_MIN else max(self.slowest_ms, self.first_ms)
        return self.floor_ms + hangs.MULTIPLE * (slow_ms - wire.PROGRESS_MS_MAX)

    def _between(self) -> None:
        """What comes after a step now and then."""
        rng, often = self.rng, self.step_ms / 300_000
        report = Mark(self.now, Position(self.n, 0), "phase", "report")
        saving = Mark(self.now, Position(self.n + 1, 0), "saving")
        kinds: tuple[Callable[[], None], ...] = (
            lambda: self._evaluate(rng.choice((0, 0, 8))),
            lambda: self._alone(report, int(self.report_ms * rng.lognormvariate(0, 0.3))),
            self._save,
            lambda: self._alone(saving, rng.randrange(5_000, 400_000)),
        )
        self.unseen_ms = 0
        for kind in rng.sample(kinds, len(kinds)):
            began_ms = self.now
            if rng.random() < often:  # Each about every five minutes.
                kind()
            if self.now - began_ms < 2 * wire.PROGRESS_MS_MAX:
                self.unseen_ms += self.now - began_ms
        if rng.random() < often / 12:
            self.trace.naps.append((self.now, rng.randrange(60_000, 1_500_000)))
            self.now += self.trace.naps[-1][1]

    def _all(self, doing: str, *, phase: str = "", k: int = 0, mute: bool = False) -> None:
        here = Position(self.n, k) if doing in ("phase", "starting") else Position(self.n + 1, 0)
        for marks in self.trace.marks:
            marks.append(Mark(self.now, here, doing, phase, mute))

    def _step(self, took: int, *, mute: bool = False) -> None:
        self._all("training", mute=mute)
        self.now += took
        self.n += 1

    def _evaluate(self, safe_points: int) -> None:
        for k in range(1, safe_points + 2):
            self._all("phase", phase="eval", k=k)
            self.now += self.rng.randrange(30_000, 50_000) // (safe_points + 1)

    def _save(self) -> None:
        self._all("parked")
        self.now += self.rng.randrange(50, 3_000)
        self._all("saving")
        self.now += self.rng.randrange(5_000, 200_000)
        self._all("parked")
        self.now += self.rng.randrange(50, 3_000)

    def _alone(self, mark: Mark, took: int) -> None:
        """Rank 0 is busy, and the others wait for it in the next step."""
        self._all("training")
        self.trace.marks[0][-1] = dataclasses.replace(mark, at_ms=self.now)
        self.now += took

    def _hang(self) -> None:
        """One rank stops in a step; the others come to the next collective, at once or in a step's time."""
        lost = self.rng.randrange(len(self.trace.marks))
        self._all("training")
        self.trace.hung_ms = self.now
        if self.rng.random() < 0.5:
            # Not before it was heard once: a rank that goes mute in a phase may still be in it for all that anybody knows.
            mark = self.trace.marks[lost][-1]
            at_ms = mark.at_ms + wire.PROGRESS_MS_MAX
            self.trace.marks[lost].append(dataclasses.replace(mark, at_ms=at_ms, mute=True))
        if self.rng.random() < 0.5:
            self.now += min(self.step_ms, 1_000)
            self.n += 1
            for number, marks in enumerate(self.trace.marks):
                if number != lost:
                    marks.append(Mark(self.now, Position(self.n + 1, 0), "training"))


class Rank:
    """What the client's Pace looks at."""

    def __init__(self, number: int, marks: list[Mark]) -> None:
        self.who = Who(number, 0, 100 + number)
        self._marks = marks
        self._next = 0
        self._mark = marks[0]

    def move(self, now_ms: int) -> None:
        """Be where training is by now."""
        while self._next < len(self._marks) and self._marks[self._next].at_ms <= now_ms:
            self._mark = self._marks[self._next]
            self._next += 1

    def position(self) -> Position:
        """As protocol.Rank has it."""
        return self._mark.here

    @property
    def doing(self) -> str:
        """As protocol.Rank has it."""
        return self._mark.doing

    @property
    def phase(self) -> str:
        """As protocol.Rank has it."""
        return self._mark.phase

    @property
    def mute(self) -> bool:
        """Its listener cannot speak."""
        return self._mark.mute


def trace_of(seed: int) -> Trace:
    """The trace of this seed."""
    return Training(random.Random(seed)).make()


def nap_end(trace: Trace, at_ms: int) -> int | None:
    """When the nap at this instant ends; None if the node is awake."""
    return next((began + took for began, took in trace.naps if began <= at_ms < began + took), None)


def instants(trace: Trace, rng: random.Random, end_ms: int) -> Iterator[tuple[int, int]]:
    """When each rank's listener wakes; nobody does in a nap, and all do after it."""

    def row(number: int) -> Iterator[tuple[int, int]]:
        at_ms = rng.randrange(LISTENER_MS)
        while at_ms < end_ms:
            nap = nap_end(trace, at_ms)
            at_ms = at_ms if nap is None else nap + rng.randrange(50)
            yield at_ms, number
            at_ms += LISTENER_MS

    return heapq.merge(*(row(number) for number in range(len(trace.marks))))


def first_stall(trace: Trace, seed: int, make: Callable[[int], Any] = hangs.Detector) -> tuple[int, hangs.Stall] | None:
    """When the detector first sees a rank stand still, and how."""
    rng = random.Random(-seed - 1)
    detector = make(trace.floor_ms)
    ranks = [Rank(number, marks) for number, marks in enumerate(trace.marks)]
    paces = [Pace(rank, wire.progress_ms(trace.floor_ms)) for rank in ranks]  # type: ignore[arg-type]
    end_ms = HOUR_MS if trace.hung_ms is None else trace.hung_ms + 20 * HOUR_MS
    due_ms: int | None = None
    for at_ms, number in instants(trace, rng, end_ms):
        rank = ranks[number]
        rank.move(at_ms)
        word = None if rank.mute else paces[number].look(at_ms)
        if due_ms is not None and due_ms <= at_ms:
            look_ms = due_ms if nap_end(trace, due_ms) is None else at_ms
            stalls = detector.look(look_ms)
            if stalls:
                return look_ms, stalls[0]
            due_ms = detector.next_ms(look_ms)
        if word is not None:
            now_ms = at_ms + rng.randrange(WORD_MS)
            detector.heard(word, now_ms)
            due_ms = detector.next_ms(now_ms) if due_ms is None else due_ms
    return None


def problem_of(seed: int, make: Callable[[int], Any] = hangs.Detector) -> str:
    """What is wrong with the detector's answer for this seed, or ""."""
    trace = trace_of(seed)
    found = first_stall(trace, seed, make)
    if found is None:
        return "" if trace.hung_ms is None else f"seed {seed}: the hang at {trace.hung_ms} ms was not found"
    at_ms, stall = found
    if trace.hung_ms is None or at_ms <= trace.hung_ms:
        return f"seed {seed}: a hang at {at_ms} ms that is none: {stall}"
    late_ms = at_ms - trace.hung_ms - trace.floor_ms - hangs.MULTIPLE * (trace.slow_ms + UNSEEN_MS)
    return "" if late_ms <= 0 else f"seed {seed}: the hang at {trace.hung_ms} ms was found {late_ms} ms too late: {stall}"


def main() -> None:
    """Many seeds, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    seeds = range(args.runs) if args.seed is None else (args.seed,)
    problems = [problem for seed in seeds if (problem := problem_of(seed))]
    real = sum(trace_of(seed).hung_ms is not None for seed in seeds)
    print(*problems, f"{len(seeds)} hours, {real} of them with a hang: {len(problems)} wrong", sep="\n")


if __name__ == "__main__":
    main()
