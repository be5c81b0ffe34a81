"""Row 6 of hangs: an hour of a mixed trace, many times over; and that the simulation sees a detector that is wrong."""

from __future__ import annotations

import pytest
from ckpt_client import wire
from ckpt_client.wire import Progress
from ckpt_supervisor.core import hangs

from tests.sim.hangs import HOUR_MS, first_stall, problem_of, trace_of

RUNS = 60
"""In CI; `python -m tests.sim.hangs --runs 2000` plays more."""

LOOKED_MAX = 400
"""A planted fault is seen within so many hours."""


def test_an_hour_of_mixed_training_has_no_false_hang_and_a_real_one_is_found_in_time() -> None:
    """First steps, evaluations and slow saves of 40 s and longer; found within 3 slow steps and the floor. Names the seed."""
    problems = [problem for seed in range(RUNS) if (problem := problem_of(seed))]
    assert problems == []


def test_the_traces_hold_what_they_are_to_hold() -> None:
    """Both halves: hours with a hang and hours without, and in them all that is no step."""
    traces = [trace_of(seed) for seed in range(60)]
    assert 10 < sum(trace.hung_ms is not None for trace in traces) < 50
    seen = {(mark.doing, mark.phase) for trace in traces for marks in trace.marks for mark in marks}
    assert seen >= {("starting", ""), ("training", ""), ("phase", "eval"), ("phase", "report"), ("parked", ""), ("saving", "")}
    assert any(trace.naps for trace in traces)
    assert max(mark.at_ms for trace in traces for mark in trace.marks[0]) > HOUR_MS * 0.9


class NoExcuse(hangs.Detector):
    """A planted fault: who waits for a busy rank is judged all the same."""

    def excuse(self, *_: object) -> None:
        """Nobody is."""


class PhaseIsAStep(hangs.Detector):
    """A planted fault: what a rank does is not looked at."""

    def heard(self, word: Progress, now_ms: int) -> bool:
        """Always training."""
        return super().heard(Progress(word.who, word.entered, "training", "", word.stood_ms), now_ms)


class Asleep(hangs.Detector):
    """A planted fault: the time of a suspended node counts."""

    def _awake(self, now_ms: int) -> int:
        return now_ms


class Deaf(hangs.Detector):
    """A planted fault: a rank that says nothing is not judged."""

    def look(self, now_ms: int) -> tuple[hangs.Stall, ...]:
        """Only those that were heard just now."""
        return tuple(stall for stall in super().look(now_ms) if stall.silent_ms < self._silent_ms)


class Patient(hangs.Detector):
    """A planted fault: four slow steps are waited for."""

    def _limit(self, pace: hangs.Pace, now: int) -> tuple[int | None, int]:
        limit, slow_ms = super()._limit(pace, now)
        return (None if limit is None else limit + slow_ms + 2 * wire.PROGRESS_MS_MAX), slow_ms


@pytest.mark.parametrize("planted", [NoExcuse, PhaseIsAStep, Asleep, Deaf, Patient], ids=lambda kind: kind.__name__)
def test_a_planted_fault_is_seen(planted: type[hangs.Detector]) -> None:
    """Each of them within some hundred hours."""
    assert any(problem_of(seed, planted) for seed in range(LOOKED_MAX))


def test_the_same_seed_gives_the_same_hour() -> None:
    """A seed that was printed can be replayed."""
    assert trace_of(7) == trace_of(7)
    assert first_stall(trace_of(7), 7) == first_stall(trace_of(7), 7)
