"""The watch that obeys `ckptctl save`, over the real machine: each request once, and its answer is what really happened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile, Who
from ckpt_supervisor import store
from ckpt_supervisor.adapters.lanes import Broken
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.watches import control_files
from ckpt_supervisor.watches.control import LOOK_EVERY_MS, LOOK_LATER_MS, Control
from ckpt_supervisor.watches.control_files import Answer, Request

RANK = Who(0, 0, 100)
FAR_MS = 1 << 60
"""Later than the monotonic clock will ever be."""


class AtOnce:
    """Lanes that do their work on the spot."""

    def post(self, lane: str, what: str, work: Callable[[], Any], done: Callable[[Any], None], *, wakes: bool = True) -> None:  # noqa: ARG002
        """As Lanes.post."""
        assert lane == "control"
        result: Any
        try:
            result = work()
        except (OSError, control_files.NotOurs) as error:
            result = Broken(what, error)
        done(result)


class Scene:
    """A watch on a directory, and the machine that it feeds, with one rank that does what it is told."""

    def __init__(self, root: Path, attached: bool = True) -> None:
        self.root = root
        self.policy = Policy(directory=str(root), epoch=3)
        self.state, _ = machine.start(self.policy, 1_000)
        self.now = 1_000
        self.events: list[ev.Event] = []
        self.lines: list[Entry] = []
        job = SimpleNamespace(name="77", step_id="0", attempt=2, slurm=None)
        launch = SimpleNamespace(job=job, epoch=3, options=SimpleNamespace(dir=root), env={})
        self.watch = Control(cast("Any", launch), cast("Any", AtOnce()), self.feed, self.lines.append, lambda: self.state)
        if attached:
            self.feed(wire.Hello(RANK, wire.VERSION, 1, 0, sharded=False))

    def feed(self, event: ev.Event) -> None:
        """To the machine, and written down."""
        self.events.append(event)
        self.now += 10
        self.state, _ = machine.step(self.policy, self.state, event, self.now)

    def ask(self, **changes: Any) -> str:
        """Put a request there, let the watch look; its nonce."""
        given = {"what": "save", "who": "alice", "host": "login1", "at": "2026-01-31T12:00:00+00:00", **changes}
        asked = Request(control_files.new_nonce(), "77", "0", 2, 3, **given)
        control_files.make_place(self.root, os.geteuid())
        control_files.post(self.root, asked)
        self.watch.look(FAR_MS)
        return asked.nonce

    def answer(self, nonce: str) -> Answer:
        """What was said so far."""
        found = control_files.read_answer(self.root, nonce)
        assert found is not None
        return found

    def saved(self, step: int, result: ev.CommitResult = ev.CommitResult.COMMITTED, reason: str = "") -> None:
        """The rank and the disk do their part of the round that runs."""
        number = self.state.newest_round
        files = (SavedFile("state.pt", 10, "ab"),)
        for event in (
            wire.Ack(RANK, number, Position(step, 0)),
            wire.Arrived(RANK, number, Position(step, 0)),
            wire.Saving(RANK, number),
            wire.Saved(RANK, number, step, files, 5),
            ev.Verified(number, "full", "", 10),
            ev.Committed(number, step, result, reason),
        ):
            self.feed(event)
        self.watch.look(self.now)

    def told(self, event: str) -> list[dict[str, Any]]:
        """The journal's lines of this event."""
        return [entry.fields for entry in self.lines if entry.event == event]


def test_save_now_is_the_event_of_a_save_signal_and_its_end_is_told(tmp_path: Path) -> None:
    """Taken with the round that has begun; saved with the step and the path once that is committed."""
    scene = Scene(tmp_path)
    nonce = scene.ask()
    assert scene.events[-1] == ev.SignalCame("ckptctl save", ev.Meaning.SAVE)
    assert (scene.answer(nonce).result, scene.answer(nonce).reason) == ("taken", "round 1 has begun")
    scene.saved(7)
    assert scene.answer(nonce) == Answer(nonce, "saved", 7, str(tmp_path / "step-000000007"), "")
    (line,) = scene.told("control_asked")
    assert (line["what"], line["who"], line["from_host"]) == ("save", "alice", "login1")
    (line,) = scene.told("control_done")
    assert (line["result"], line["step"]) == ("saved", 7)


def test_a_save_that_is_given_up_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Training goes on; the one who waits hears why there is no checkpoint."""
    scene = Scene(tmp_path)
    nonce = scene.ask()
    scene.saved(7, ev.CommitResult.FAILED, "ENOSPC: No space left on device")
    assert scene.answer(nonce).result == "refused"
    assert "ENOSPC" in scene.answer(nonce).reason


def test_while_a_save_runs_that_one_counts(tmp_path: Path) -> None:
    """No second round behind it; both who asked hear of the same step."""
    scene = Scene(tmp_path)
    first, second = scene.ask(), scene.ask()
    assert scene.answer(second).reason == "a save was running already (round 1): it counts"
    scene.saved(9)
    assert [scene.answer(nonce).step for nonce in (first, second)] == [9, 9]
    assert scene.state.newest_round == 1


def test_leaving_waits_for_the_save_that_runs_and_then_begins_the_last_one(tmp_path: Path) -> None:
    """Ranks train on after the running one; the one after it is a leave round from its beginning."""
    scene = Scene(tmp_path)
    first = scene.ask()
    last = scene.ask(what="leave", requeue=True)
    assert scene.answer(last).reason == "a save is running; the one after it is the last"
    assert not any(isinstance(event, ev.Asked) for event in scene.events)
    scene.saved(9)
    assert scene.answer(first).step == 9
    assert ev.Asked("leave_after_save", requeue=True, who="alice") in scene.events
    assert scene.state.notice is not None
    scene.saved(12)
    assert scene.answer(last).step == 12
    assert scene.answer(scene.ask()).reason.startswith("the job is on its way out already")


def test_protect_marks_the_checkpoint_as_ckptctl_keep_does(tmp_path: Path) -> None:
    """Once it is committed; when it is not there the answer says so, and that it was saved."""
    scene = Scene(tmp_path)
    (tmp_path / "step-000000007").mkdir()
    nonce = scene.ask(protect=True)
    assert store.kept_steps(tmp_path) == frozenset()
    scene.saved(7)
    assert store.kept_steps(tmp_path) == {7}
    assert (scene.answer(nonce).result, scene.answer(nonce).reason) == ("saved", "it is protected from being pruned")
    nonce = scene.ask(protect=True)
    scene.saved(8)
    assert scene.answer(nonce).result == "saved"
    assert "could not be protected: there is no step-000000008" in scene.answer(nonce).reason


def test_another_interval_is_asked_for_without_a_save(tmp_path: Path) -> None:
    """A time, or auto; no round begins."""
    scene = Scene(tmp_path)
    assert scene.answer(scene.ask(what="every", every_ms=600_000)).result == "done"
    assert scene.events[-1] == ev.Asked("every", 600_000, who="alice")
    scene.ask(what="every")
    assert scene.events[-1] == ev.Asked("every", None, who="alice")
    assert scene.state.round is None


def test_nobody_to_save_is_said(tmp_path: Path) -> None:
    """Before a rank has attached there is nothing to save."""
    scene = Scene(tmp_path, attached=False)
    assert scene.answer(scene.ask()).reason.startswith("no rank can save now: none has attached yet")


def test_a_job_on_its_way_out_obeys_nothing(tmp_path: Path) -> None:
    """It saves for its notice already; the interval would be that of nobody."""
    scene = Scene(tmp_path)
    scene.feed(ev.SignalCame("SIGTERM", ev.Meaning.LEAVE))
    for what in ("save", "leave", "every"):
        answer = scene.answer(scene.ask(what=what))
        assert (answer.result, "on its way out already (signal)" in answer.reason) == ("refused", True)


def test_what_is_refused_is_named_in_the_journal_once(tmp_path: Path) -> None:
    """A directory that cannot be removed is not told again at every look."""
    scene = Scene(tmp_path)
    scene.watch.look(FAR_MS)
    stays = tmp_path / "control" / f"{'0' * 32}.json"
    (stays / "x").mkdir(parents=True)
    for _ in range(3):
        scene.watch.look(FAR_MS)
    (line,) = scene.told("control_refused")
    assert (line["file"], line["reason"], line["removed"]) == (stays.name, "it is a directory", False)


def test_a_directory_that_cannot_be_used_is_told_once_and_looked_at_later(tmp_path: Path) -> None:
    """Somebody else's file in the way: training is not touched; the next look is a minute later, and finds it made."""
    scene = Scene(tmp_path)
    (tmp_path / "control").touch()
    for _ in range(3):
        scene.watch.look(FAR_MS)
    (line,) = scene.told("control_off")
    assert line["reason"] == f"ckptctl save cannot reach this run: {tmp_path / 'control'} is a file"
    (later,) = scene.watch.times_ms
    (tmp_path / "control").unlink()
    assert scene.answer(scene.ask()).result == "taken"
    (soon,) = scene.watch.times_ms
    assert later is not None
    assert soon is not None
    assert later - soon > LOOK_LATER_MS - LOOK_EVERY_MS - 30_000


def test_it_does_not_look_before_its_time(tmp_path: Path) -> None:
    """One listing every few seconds, however often the loop turns."""
    scene = Scene(tmp_path)
    scene.watch.look(FAR_MS)
    (next_ms,) = scene.watch.times_ms
    assert next_ms is not None
    control_files.post(tmp_path, Request("1" * 32, "77", "0", 2, 3, "save", "alice", "login1", ""))
    scene.watch.look(next_ms - 1)
    assert control_files.read_answer(tmp_path, "1" * 32) is None
    scene.watch.look(next_ms)
    assert scene.answer("1" * 32).result == "taken"
