"""The watch on hangs between supervisors: who is busy is told to all, what stands still to the coordinator, and nothing twice.

Lanes, ends and the machine's state are stand-ins here; tests/process/test_hangs.py has the real ones.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckpt_client import wire
from ckpt_client.wire import Position, Progress, Who
from ckpt_supervisor import standing
from ckpt_supervisor.core import between
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.hangs import Doing, Stall
from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.hangs import Found, Hangs
from ckpt_supervisor.standing import Way

FLOOR_MS = 1_000
BUSY = Doing("phase", "eval", Position(5, 1))


@dataclasses.dataclass
class End:
    """Either end of the way between supervisors."""

    is_lost: bool = False
    is_calm: bool = True
    on_hangs: Any = None
    told: list[Any] = dataclasses.field(default_factory=list)

    def tell(self, word: Any) -> None:
        """To the coordinator."""
        self.told.append(word)

    def excuse(self, word: Any, numbers: list[int]) -> None:
        """To the other tasks."""
        self.told.append((word, numbers))


class Stage:
    """A watch among stand-ins. Its lane does nothing: what it would find is handed in."""

    def __init__(self, *, coordinating: End | None = None, following: End | None = None, task: int = 0) -> None:
        self.entries: list[Entry] = []
        self.events: list[ev.Event] = []
        self.posted: list[Any] = []
        self.state = SimpleNamespace(phase=Phase.RUNNING, notice=None)
        options = SimpleNamespace(hang_floor_ms=FLOOR_MS, dir=Path("ckpt"))
        launch: Any = SimpleNamespace(options=options, env={}, claims=None, job=SimpleNamespace(task=task, tasks=3))
        lanes: Any = SimpleNamespace(post=lambda _lane, _what, _work, done: self.posted.append(done))
        ends: Any = (coordinating, following)
        self.watch = Hangs(launch, lanes, self.events.append, self.entries.append, lambda: self.state, ends)  # type: ignore[arg-type]
        self.now = 1_000_000
        self.watch.clock = lambda: self.now
        self.n = 0

    def say(self, doing: Any = "training", *, k: int = 0, phase: str = "") -> None:
        """A word of rank 0, which is this process."""
        self.watch.heard(Progress(Who(0, 0, os.getpid()), Position(self.n, k), doing, phase))

    def train(self) -> None:
        """Past its first step."""
        for self.n in range(5):
            self.say("starting" if self.n == 0 else "training")

    def look(self, later_ms: int = 0) -> None:
        """Turns of the loop, for so long."""
        for _ in range(0, later_ms + 1, 200):
            self.now += 200
            self.watch.look(self.now)

    def names(self) -> list[str]:
        """The journal's events so far."""
        return [entry.event for entry in self.entries]

    def examined(self) -> None:
        """What a look at the rank that stands still finds."""
        word = Who(0, 0, os.getpid())
        stall = Stall(word, Position(self.n, 0), "training", "", 3_000, 900, 10, 100)
        self.posted.pop()(Found((stall,), (Way(standing.NO_PROGRESS, "answers, and makes no progress"),), ()))


def test_a_hang_is_examined_in_a_lane_and_told_once() -> None:
    """The journal, the machine; a second look says nothing more until it has moved."""
    stage = Stage()
    stage.train()
    stage.look(3_000)
    assert (len(stage.posted), stage.names()) == (1, [])
    stage.examined()
    assert stage.names() == ["hang_suspected"]
    assert [type(event) for event in stage.events] == [ev.Stalled]
    stage.look(3_000)
    assert (len(stage.posted), stage.names()) == (0, ["hang_suspected"])
    stage.n += 1
    stage.say()
    assert stage.names() == ["hang_suspected", "hang_over"]


def test_what_moves_while_it_is_examined_is_no_hang() -> None:
    """The look takes half a second and longer."""
    stage = Stage()
    stage.train()
    stage.look(3_000)
    stage.n += 1
    stage.say()
    stage.examined()
    assert (stage.names(), stage.events) == ([], [])


def test_nothing_is_told_while_a_notice_is_in_force() -> None:
    """Its deadlines count; the machine is on its way out."""
    stage = Stage()
    stage.train()
    stage.state.notice = object()
    stage.look(3_000)
    assert stage.posted == []
    stage.state.notice = None
    stage.state.phase = Phase.SAVING
    stage.look(3_000)
    assert stage.posted == []


def test_a_relay_says_who_is_busy_and_who_is_stuck_and_does_not_decide() -> None:
    """The coordinator is told; the machine here is idle. One that has lost the coordinator decides by itself."""
    end = End()
    stage = Stage(following=end, task=2)
    stage.train()
    stage.say("phase", k=1, phase="eval")
    stage.look()
    assert end.told == [between.Busy(2, (Doing("phase", "eval", Position(4, 1)),))]
    stage.n += 1
    stage.say()
    stage.look(3_000)
    stage.examined()
    assert (type(end.told[-1]), end.told[-1].task, end.told[-1].ranks) == (between.Stuck, 2, (0,))
    assert stage.events == []
    lost = Stage(following=End(is_lost=True), task=2)
    lost.train()
    lost.look(3_000)
    lost.examined()
    assert [type(event) for event in lost.events] == [ev.Stalled]


def test_the_coordinator_passes_on_who_is_busy_and_has_the_machine_told_who_is_stuck() -> None:
    """Also without ranks of its own; a task's word holds for some seconds and not for ever."""
    end = End()
    stage = Stage(coordinating=end)
    end.on_hangs(between.Busy(1, (BUSY,)))
    stage.look()
    assert end.told == [(between.Excused((BUSY,)), [1, 2])]
    end.on_hangs(between.Stuck(2, (7,), "stopped", "training seems to hang"))
    assert stage.events == [ev.Stalled(2, (7,), "stopped", "training seems to hang")]
    end.told.clear()
    stage.now += 60_000
    stage.look()
    assert end.told == []


def test_who_waits_for_a_rank_of_another_task_is_excused() -> None:
    """Rank 0 of the job evaluates alone, below another supervisor."""
    end = End()
    stage = Stage(following=end, task=1)
    stage.train()
    doing = Doing("phase", "eval", Position(4, 0))
    end.on_hangs(between.Excused((doing,)))
    for _ in range(20):
        stage.look()
        end.on_hangs(between.Excused((doing,)))
    assert stage.posted == []
    stage.look(3_000)
    assert len(stage.posted) == 1


def test_words_that_are_not_of_progress_are_nothing_to_it() -> None:
    """The loop hands all of them on."""
    stage = Stage()
    stage.watch.heard(wire.Finished(Who(0, 0, 1), 0))
    assert stage.watch.times_ms == (None,)
