"""How far training has come: which step a word tells of, when it is told, and that what was heard last is never left out."""

from __future__ import annotations

from typing import Any

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position, Who
from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.watches.progress import EVERY_MS, Progress, finished_steps


class Stage:
    """A watch with a clock of its own."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.watch = Progress(lambda entry: self.lines.append({"event": entry.event, "level": entry.level, **entry.fields}))
        self.now = 1_000_000
        self.watch.clock = lambda: self.now

    def at(self, step: int, rank: int = 0, *, after_ms: int = 0, generation: int = 0, phase: str = "") -> None:
        """A rank has finished so many steps and is in the next one, or in a phase."""
        self.now += after_ms
        entered = Position(step, 1) if phase else Position(step + 1, 0)
        self.watch.heard(wire.Progress(Who(rank, generation, 100 + rank), entered, "phase" if phase else "training", phase))

    def event(self, name: str) -> None:
        """A line of the journal."""
        self.watch.told(Entry(name, "info", {}), Stamp(0, 0))

    @property
    def steps(self) -> list[int]:
        """What was told."""
        return [line["step"] for line in self.lines]


def word(entered: tuple[int, int], doing: Any, phase: str = "") -> wire.Progress:
    """What a rank's listener says."""
    return wire.Progress(Who(0, 0, 1), Position(*entered), doing, phase)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (word((7, 0), "starting"), None),
        (word((8, 0), "training"), 7),
        (word((8, 0), "parked"), 7),
        (word((8, 0), "saving"), 7),
        (word((7, 1), "phase", "eval"), 7),
        (word((7, 0), "phase", "alone"), 7),
        (word((7, 0), "parked", "alone"), 7),
        (word((7, 3), "parked", "eval"), 7),
        (word((8, 0), "over"), 7),
        (wire.Arrived(Who(0, 0, 1), 3, Position(7, 0)), 7),
        (wire.Saved(Who(0, 0, 1), 3, 7, (), 5), 7),
        (wire.Failed(Who(0, 0, 1), wire.NO_ROUND, "boom", 7), 7),
        (wire.Failed(Who(0, 0, 1), 3, "not now"), None),
        (wire.Finished(Who(0, 0, 1), wire.NO_ROUND), None),
    ],
)
def test_a_word_tells_how_many_steps_are_finished(said: wire.Said, step: int | None) -> None:
    """A position between two steps is the end of the step that runs; in a phase the steps before it are all done."""
    assert finished_steps(said) == step


def test_it_is_told_at_once_and_then_every_ten_seconds_if_it_has_moved() -> None:
    """With the time of a step since the last line. What does not move is told once."""
    stage = Stage()
    for step in range(10, 60, 10):
        stage.at(step, after_ms=5_000)
    assert stage.steps == [10, 30, 50]
    assert [line["per_step_ms"] for line in stage.lines] == [None, 500.0, 500.0]
    assert {(line["event"], line["level"]) for line in stage.lines} == {("progress", "debug")}
    for _ in range(10):
        stage.at(50, after_ms=EVERY_MS)
    assert stage.steps == [10, 30, 50]


def test_the_rank_that_is_least_far_counts() -> None:
    """Lost is what not all have done. The farthest is told beside it, and the phase of the one that is behind."""
    stage = Stage()
    stage.at(5, rank=0)
    stage.at(9, rank=1)
    stage.at(8, rank=0, after_ms=EVERY_MS, phase="eval")
    assert (stage.lines[-1]["step"], stage.lines[-1]["ahead"], stage.lines[-1]["phase"]) == (8, 9, "eval")


@pytest.mark.parametrize("name", ["rank_gone", "command_exited", "notice", "leaving", "exit"])
def test_what_was_heard_last_is_told_when_nothing_may_come_after_it(name: str) -> None:
    """Or nobody would know what was lost. The time of a step is that between the words, not until now."""
    stage = Stage()
    stage.at(5)
    stage.at(7, after_ms=1_000)
    assert stage.steps == [5]
    stage.now += 4_000
    stage.event(name)
    stage.event(name)
    assert stage.steps == [5, 7]
    assert stage.lines[-1]["per_step_ms"] == 500.0


def test_a_start_in_place_begins_anew() -> None:
    """Its steps are lower again, and ranks that are no more do not hold the number down."""
    stage = Stage()
    stage.at(50, rank=0)
    stage.at(40, rank=1)
    stage.event("command_exited")
    stage.event("command_started")
    stage.event("notice")
    assert stage.steps == [50, 40]
    stage.at(31, rank=0)
    assert stage.steps == [50, 40, 31]
    assert stage.lines[-1]["per_step_ms"] is None


def test_a_launchers_own_restart_forgets_the_ranks_before() -> None:
    """torchrun starts all of them anew, perhaps fewer; words of the ones before that come late say nothing."""
    stage = Stage()
    stage.at(50, rank=0)
    stage.at(10, rank=1)
    stage.at(20, rank=0, generation=1, after_ms=EVERY_MS)
    stage.at(55, rank=0, generation=0, after_ms=EVERY_MS)
    assert stage.steps == [50, 20]


def test_the_time_of_a_step_does_not_span_a_launchers_restart() -> None:
    """From 50 back to 40 and on to 60 are 20 steps, not 10: nothing is told of how long each took."""
    stage = Stage()
    stage.at(50)
    stage.at(60, generation=1, after_ms=4 * EVERY_MS)
    stage.at(80, generation=1, after_ms=EVERY_MS)
    assert [line["per_step_ms"] for line in stage.lines] == [None, None, 500.0]


def test_it_wakes_the_loop_for_nothing() -> None:
    """Words do that anyway."""
    stage = Stage()
    stage.watch.look(0)
    assert stage.watch.times_ms == ()
    stage.event("notice")
    assert stage.lines == []
