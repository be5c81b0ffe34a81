"""Which lines --on-event tells, in which order, and how long it may take. The lane is a stand-in; commands run in
tests/process/test_shell_command.py."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckpt_supervisor.adapters.journal import Journal, Stamp, Who
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import Kind
from ckpt_supervisor.event_names import EVENTS, TOLD
from ckpt_supervisor.lines import Lines
from ckpt_supervisor.processes import shell_command
from ckpt_supervisor.watches import notify
from ckpt_supervisor.watches.notify import END_MS, KILL_MS, LANE, OWN_MS, TIMEOUT_S, WAITING_MAX, Notify

TURNED = ("round_turned", "info", {"round": 7, "kind": Kind.LEAVE.value})
LAST_ROUND = ("round_begun", "info", {"round": 7, "kind": Kind.LEAVE.value})


class Stage:
    """The watch, with a lane that runs nothing by itself."""

    def __init__(self, directory: Path, *chosen: str, command: str = "true", out_in_ms: int | None = None) -> None:
        self.posted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.directory = directory
        lanes: Any = SimpleNamespace(post=self.post, room=lambda _: True)
        self.lines = Lines(Journal(directory / "journal", Who("77", 1, "0", 3, 0)), lanes)
        now_ms = time.monotonic_ns() // 1_000_000
        notice = None if out_in_ms is None else SimpleNamespace(budget=SimpleNamespace(out_by_ms=now_ms + out_in_ms))
        options = SimpleNamespace(on_event=command, on_event_for=chosen, dir=directory, notice_signals=(), save_signals=())
        launch: Any = SimpleNamespace(options=options, env={}, job=SimpleNamespace(name="77"), claims=_NoClaims())
        self.written: list[dict[str, Any]] = []
        self.lines.listen(lambda entry, at: self.written.append(json.loads(self.lines.text(entry, at))))
        self.watch = Notify(launch, lanes, self.lines, lambda: SimpleNamespace(notice=notice))  # type: ignore[arg-type, return-value]

    def post(self, lane: str, _what: str, work: Any, done: Any, *, wakes: bool = True) -> None:
        """What a lane would be given."""
        assert lane == LANE
        assert not wakes
        self.posted.append((work, done))

    def say(self, *lines: tuple[str, str, dict[str, Any]]) -> int:
        """Write these lines; how many of them are told."""
        before = len(self.posted)
        for event, level, fields in lines:
            self.lines.log(Entry(event, level, fields))
        return len(self.posted) - before

    def over(self, result: Any) -> None:
        """What is told first came to this."""
        self.posted.pop(0)[1](result)

    def told(self, name: str) -> list[dict[str, Any]]:
        """The journal's lines of this event."""
        return [line for line in self.written if line["event"] == name]


class _NoClaims:
    """Nothing is started on this stage."""


def line(event: str, level: str = "info", **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """A line of the journal."""
    return event, level, fields


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([line("command_started")], 1),
        ([line("notice", cause="preempted")], 1),
        ([line("command_exited", "info", code=0)], 0),
        ([line("command_exited", "warning", code=1)], 1),
        ([line("commit", round=7, step=9)], 0),
        ([LAST_ROUND, line("commit", round=7, step=9)], 1),
        ([line("round_begun", round=7, kind="periodic"), TURNED, line("commit", round=7)], 1),
        ([LAST_ROUND, line("round_turned", round=7, kind="periodic"), line("commit", round=7)], 0),
        ([line("stalled", "warning", text="x")], 0),
        ([line("stalled", "warning", text="x", of_task=2)], 1),
        ([line("progress", "debug", step=1), line("memory", "debug"), line("rank_saving", rank=1)], 0),
        ([line("event_command_failed", "warning", of_event="x", reason="y")], 0),
    ],
)  # fmt: skip
def test_without_a_choice_what_matters_is_told(tmp_path: Path, lines: list[Any], told: int) -> None:
    """Not each periodic save, nor that a command ended as it should; never its own failures."""
    assert Stage(tmp_path).say(*lines) == told


def test_only_what_was_chosen_is_told(tmp_path: Path) -> None:
    """Whatever it is; but not what says that telling failed."""
    stage = Stage(tmp_path, "commit", "event_command_failed")
    assert stage.say(line("commit", round=1, step=1), line("exit", code=0, line=""), line("notice")) == 1
    assert stage.say(line("event_command_failed", "warning", of_event="x", reason="y")) == 0


def test_more_than_a_few_that_wait_are_dropped_and_counted(tmp_path: Path) -> None:
    """The first at once, the rest of the burst together when there is room again. The end is always told."""
    stage = Stage(tmp_path, "notice", "exit")
    assert stage.say(*[line("notice")] * (WAITING_MAX + 5)) == WAITING_MAX
    assert [one["events"] for one in stage.told("event_command_dropped")] == [{"notice": 1}]
    stage.over("")
    assert stage.say(line("notice"), line("notice")) == 1
    assert [one["events"] for one in stage.told("event_command_dropped")] == [{"notice": 1}, {"notice": 4}, {"notice": 1}]
    assert stage.say(line("exit", code=0, line="")) == 1


def test_a_failure_is_journaled_each_time_and_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A broken webhook must not fill the job's output."""
    stage = Stage(tmp_path)
    stage.say(line("notice"), line("leaving"))
    stage.over("it ended with 1")
    stage.over("it ended with 1")
    assert [(one["of_event"], one["reason"]) for one in stage.told("event_command_failed")] == [
        ("notice", "it ended with 1"),
        ("leaving", "it ended with 1"),
    ]
    assert capfd.readouterr().err.count("--on-event has failed") == 1


def test_once_the_end_is_decided_there_is_little_time_and_the_last_of_it_is_for_the_end(tmp_path: Path) -> None:
    """A command that hangs at that moment is given up early enough for the last one."""
    stage = Stage(tmp_path)
    began = time.monotonic()
    until = stage.watch._give_up(False)
    assert until() >= began + TIMEOUT_S
    stage.say(line("exit", code=75, line=""))
    ended = time.monotonic()
    assert until() <= ended + (END_MS - OWN_MS) / 1_000
    last = stage.watch._give_up(True)()
    assert began + (END_MS - OWN_MS) / 1_000 < last <= ended + END_MS / 1_000
    assert stage.watch.lanes_at_end == {LANE: END_MS + KILL_MS}


def test_the_end_is_not_told_when_the_supervisor_has_to_be_out_by_now(tmp_path: Path) -> None:
    """Coming back matters more. The journal has what nobody was told of."""
    stage = Stage(tmp_path, command=f"touch {tmp_path / 'ran'}", out_in_ms=0)
    stage.say(line("exit", code=75, line=""))
    work, done = stage.posted[0]
    result = work()
    assert result is None
    done(result)
    assert [one["events"] for one in stage.told("event_command_dropped")] == [{"exit": 1}]
    assert not (tmp_path / "ran").exists()


def test_what_was_written_before_it_began_to_listen_is_told(tmp_path: Path) -> None:
    """The command's start is, as nothing stands before that."""
    lanes: Any = SimpleNamespace(post=lambda *_, **__: None, room=lambda _: True)
    lines = Lines(Journal(tmp_path, Who("77", 1, "0", 3, 0)), lanes)
    lines.log(Entry("command_started", "info", {}))
    heard: list[str] = []
    lines.listen(lambda entry, _: heard.append(entry.event))
    lines.log(Entry("notice", "info", {}))
    lines.write()
    assert heard == ["command_started", "notice"]


def test_lines_that_are_put_together_are_heard_once(tmp_path: Path) -> None:
    """What many ranks say at once is one line for whoever listens, too."""
    lanes: Any = SimpleNamespace(post=lambda *_, **__: None, room=lambda _: True)
    lines = Lines(Journal(tmp_path, Who("77", 1, "0", 3, 0)), lanes)
    heard: list[dict[str, Any]] = []
    lines.listen(lambda entry, _: heard.append(entry.fields))
    lines.gather()
    for rank in range(20):
        lines.log(Entry("rank_saving", "info", {"rank": rank}))
    assert heard == []
    lines.fold()
    assert heard == [{"ranks": list(range(20))}]


def test_the_line_is_the_journals_own(tmp_path: Path) -> None:
    """Key by key, in its order."""
    journal = Journal(tmp_path, Who("77", 1, "0", 3, 0))
    journal.open()
    stamp = Stamp(1_795_967_256_000_123_456, 41_000)
    fields = {"cause": "preempted", "left_ms": 5, "pid": 1, "text": 'a"\n\x1b\ud83d'}
    journal.write("notice", "info", stamp, fields)
    journal.close()
    assert f"{journal.text('notice', 'info', stamp, fields)}\n" == journal.path.read_text()


def test_the_names_of_events_are_those_of_the_documents() -> None:
    """event_names.py has what docs/journal.md has: add a new event in both. What is told by default is among them."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "journal.md").read_text()
    assert set(re.findall(r"^\| `([a-z_]+)` \| (?:debug|info|warning|error)", text, re.MULTILINE)) == EVENTS
    assert set(TOLD) <= EVENTS


def test_a_command_that_takes_long_is_given_up_before_the_flush_is() -> None:
    """What the last moments are made of: the kill of a command comes before the process ends, so nothing is left behind."""
    assert Notify.lanes_at_end[LANE] >= END_MS + 500
    assert notify.LAST <= EVENTS
    assert shell_command.REAP_S < TIMEOUT_S
