"""The watch on hangs between supervisors: who is busy is told to all, what stands still to the coordinator, and nothing twice.

Lanes, ends and the machine's state are stand-ins here; tests/process/test_hangs.py has the real ones.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position, Progress, Who
from ckpt_supervisor.adapters.lanes import Broken
from ckpt_supervisor.core import between
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.hangs import Doing, Stall
from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.errands import LANES
from ckpt_supervisor.watches import standing
from ckpt_supervisor.watches.hangs import Found, Hangs
from ckpt_supervisor.watches.standing import Way

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
        self.state = SimpleNamespace(phase=Phase.RUNNING, notice=None, restarts=0)
        options = SimpleNamespace(hang_floor_ms=FLOOR_MS, dir=Path("ckpt"), on_hang="warn")
        launch: Any = SimpleNamespace(options=options, env={}, claims=None, job=SimpleNamespace(task=task, tasks=3))
        self.lanes: set[str] = set()
        lanes: Any = SimpleNamespace(post=self.post)
        ends: Any = (coordinating, following)
        self.watch = Hangs(launch, lanes, self.events.append, self.entries.append, lambda: self.state, ends)  # type: ignore[arg-type]
        self.now = 1_000_000
        self.watch.clock = lambda: self.now
        self.n = 0

    def post(self, lane: str, _what: str, _work: Any, done: Any) -> None:
        """What a lane would be given."""
        self.lanes.add(lane)
        self.posted.append(done)

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
    stage.state.phase = Phase.COMMITTING
    stage.look(3_000)
    assert stage.posted == []


@pytest.mark.parametrize("phase", [Phase.AGREEING, Phase.SAVING])
def test_a_hang_before_the_step_of_a_save_is_told(phase: Phase) -> None:
    """A save by time would otherwise keep it silent until --save-timeout, and the next one again."""
    stage = Stage()
    stage.train()
    stage.state.phase = phase
    stage.look(3_000)
    stage.examined()
    assert stage.names() == ["hang_suspected"]


def test_what_another_task_tells_during_a_commit_reaches_the_machine_after_it() -> None:
    """It is told once only, and the machine does nothing about it while a checkpoint is committed."""
    end = End()
    stage = Stage(coordinating=end)
    stage.state.phase = Phase.COMMITTING
    end.on_hangs(between.Stuck(1, (4,), "no progress", "stands still"))
    stage.look()
    assert stage.events == []
    stage.state.phase = Phase.RUNNING
    stage.look()
    assert stage.events == [ev.Stalled(1, (4,), "no progress", "stands still")]


def test_a_hang_that_nothing_can_be_done_about_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """--on-hang restart with no start left, and --requeue never."""
    stage = Stage()
    stage.watch._launch.options.on_hang = "restart"  # type: ignore[misc]
    stage.train()
    stage.look(3_000)
    stage.examined()
    assert "--on-hang restart: nothing is done about it" in capfd.readouterr().err


def test_a_hang_that_may_not_be_told_yet_does_not_keep_the_loop_awake() -> None:
    """While it is examined, or a round or a notice is in force: its time has come long ago, and it is looked at now and then."""
    stage = Stage()
    stage.train()
    stage.look(3_000)
    assert len(stage.posted) == 1
    (examined_at_ms,) = stage.watch.times_ms
    stage.state.notice = object()
    stage.look(3_000)
    (quiet_at_ms,) = stage.watch.times_ms
    assert examined_at_ms is not None
    assert quiet_at_ms is not None
    assert min(examined_at_ms - 1_003_200, quiet_at_ms - stage.now) > 0
    asked = 0
    for _ in range(2_000):
        stage.now += 1
        asked += stage.watch.times_ms[0] is not None and stage.watch.times_ms[0] <= stage.now
        stage.watch.look(stage.now)
    assert asked <= 11


def test_it_is_examined_in_a_lane_that_no_dead_disk_holds_up() -> None:
    """The lane of the other watches lists DIR: the file server that training waits for would hold up the look at training."""
    stage = Stage()
    stage.train()
    stage.look(3_000)
    assert stage.lanes == {"hang"}
    assert "hang" in LANES


def test_a_hang_that_cannot_be_examined_is_told_all_the_same() -> None:
    """No more descriptors, say: --on-hang counts, and it is not tried again and again."""
    stage = Stage()
    stage.train()
    stage.look(3_000)
    stage.posted.pop()(Broken("looking", OSError(24, "Too many open files")))
    assert stage.names() == ["hang_not_examined", "hang_suspected"]
    assert [type(event) for event in stage.events] == [ev.Stalled]
    stage.look(3_000)
    assert (len(stage.posted), len(stage.entries)) == (0, 2)


def test_who_has_ended_while_stacks_were_taken_stands_no_more() -> None:
    """Training is started again as soon as another task has told of the hang; what this one still tells is of no process."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    stalls = [Stall(Who(0, 0, pid), Position(5, 0), "training", "", 3_000, 900, 10, 100) for pid in (ended.pid, os.getpid())]
    found = standing.by_now(stalls, [Way(standing.STOPPED, "is stopped")] * 2)
    assert [way.kind for way in found] == [standing.GONE, standing.STOPPED]


def test_a_rank_that_does_not_go_on_from_what_it_was_given_is_told_of_once() -> None:
    """It attached to go on from step 40, and its first step was step 1: it began from scratch."""
    stage = Stage()
    stage.n = 41
    stage.say("starting")
    for stage.n in (2, 3):
        stage.say()
    assert stage.names() == ["rank_went_back"]
    assert stage.entries[0].fields["step"] == 2
    well = Stage()
    for well.n in (41, 42):
        well.say("starting" if well.n == 41 else "training")
    well.say("phase", k=1, phase="eval")
    assert well.names() == []


def test_a_rank_that_is_not_heard_is_looked_at_whether_it_is_there() -> None:
    """One that is gone excuses nobody; one that C code keeps from speaking does."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    end = End()
    stage = Stage(following=end, task=1)
    for rank, pid in enumerate((os.getpid(), ended.pid)):
        stage.watch.heard(Progress(Who(rank, 0, pid), Position(5, 1 + rank), "phase", "eval"))
    stage.look(2_000)
    assert end.told[0].doings == (Doing("phase", "eval", Position(5, 1)), Doing("phase", "eval", Position(5, 2)))
    assert end.told[-1].doings == (Doing("phase", "eval", Position(5, 1)),)


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
