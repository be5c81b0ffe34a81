"""`ckptctl status` over journals that are not as they should be: it shows what is there, and says what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.view.ended import has_ended
from ckpt_supervisor.view.log import Tail
from ckpt_supervisor.view.reading import opened

from tests.support.ctl_stage import caller


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls ckptctl in this process, with a state directory of its own and no Slurm."""
    monkeypatch.setenv("CKPT_SUPERVISE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


def put(root: Path, epoch: int, *, job: str = "77", number: int | None = None, task: int = 0, end: str = "\n") -> Path:
    """The journal of a start that was ended with 0, its last line with this end; its path."""
    attempt = epoch - 1 if number is None else number
    own = {"job": job, "attempt": attempt, "step_id": "0", "epoch": epoch, "task": task, "host": "node7", "pid": 4242}
    events: list[dict[str, Any]] = [
        {"event": "command_started", "resume_step": 1200},
        {"event": "commit", "step": 61200, "result": "committed"},
        {"event": "exit", "code": 0, "line": "training ended"},
    ]
    lines = [
        json.dumps({"ts": f"2026-01-31T{10 + epoch}:0{place}:00.000000Z", "mono_ms": place, "level": "info", **own, **event})
        for place, event in enumerate(events)
    ]
    path = root / "journal" / f"{job}-{attempt}-0-{epoch}-{task}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + end)
    return path


def spoil(path: Path, how: str) -> None:
    """Put something else in the place of a journal."""
    kept = path.rename(path.with_suffix(".kept"))
    if how == "fifo":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        path.symlink_to(kept)


@pytest.mark.parametrize(
    ("how", "why"), [("fifo", "not a regular file"), ("directory", "not a regular file"), ("link", "a link, no journal of ours")]
)
def test_what_is_no_journal_is_said_and_the_others_are_shown(call: Any, tmp_path: Path, how: str, why: str) -> None:
    """A pipe must not hold it up, a link is not followed, and one bad file hides no other."""
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    put(tmp_path, 3)
    spoil(path, how)
    told = call("status", "--dir", tmp_path)
    assert told.code == 0
    said = " ".join(told.out.split())
    assert f"incomplete attempt 1 is left out: {path.name} cannot be read: {why}" in said
    assert "training ended" in said
    (value,) = [json.loads(line) for line in call("status", "--dir", tmp_path, "--json").lines]
    assert [one["epoch"] for one in value["attempts"]] == [1, 3]
    assert value["notes"] == [f"incomplete: attempt 1 is left out: {path.name} cannot be read: {why}"]
    log = call("log", "--dir", tmp_path)
    assert log.code == 3
    assert f"{path.name} cannot be read: {why}" in log.err
    assert call("timeline", "--dir", tmp_path).code == 0


def test_how_a_job_stands_is_not_known_where_its_newest_journal_cannot_be_read(call: Any, tmp_path: Path) -> None:
    """What is shown is of the start before, so the status is that of a look that failed."""
    put(tmp_path, 1)
    spoil(put(tmp_path, 2), "fifo")
    assert call("status", "--dir", tmp_path).code == 3
    spoil(tmp_path / "journal" / "77-0-0-1-0.jsonl", "fifo")
    told = call("status", "--dir", tmp_path)
    assert (told.code, told.out) == (3, "")
    assert "attempt 0 is left out" in told.err


def test_a_start_without_its_coordinators_journal_is_said_to_be_left_out(call: Any, tmp_path: Path) -> None:
    """Task 1 alone tells that there was one."""
    put(tmp_path, 1, task=1)
    put(tmp_path, 2)
    told = call("status", "--dir", tmp_path)
    assert told.code == 0
    assert "attempt 0 is left out: there is no journal of its task 0" in " ".join(told.out.split())


def test_a_cut_or_damaged_journal_is_incomplete(call: Any, tmp_path: Path) -> None:
    """As timeline says it."""
    path = put(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    said = " ".join(call("status", "--dir", tmp_path).out.split())
    assert f"incomplete {path.name} ends in the middle of a line" in said
    path.write_bytes(whole.replace(b'"event"', b'\x00event"', 1))
    said = " ".join(call("status", "--dir", tmp_path).out.split())
    assert f"incomplete 1 damaged line in {path.name}" in said
    path.write_bytes(whole)
    assert "incomplete" not in call("status", "--dir", tmp_path).out


def test_the_cut_in_the_middle_of_a_long_journal_is_no_damage(call: Any, tmp_path: Path) -> None:
    """Only its head and its tail are read."""
    path = put(tmp_path, 1)
    first, *rest = path.read_text().splitlines(keepends=True)
    filler = json.dumps({"ts": "2026-01-31T11:00:30.000000Z", "event": "phase", "text": "x" * 900}) + "\n"
    path.write_text(first + filler * 600 + "".join(rest))
    assert "incomplete" not in call("status", "--dir", tmp_path).out


def test_no_other_reader_follows_a_link_or_waits_for_a_pipe(tmp_path: Path) -> None:
    """The holder's last word, a file that is watched, and what all readers open with."""
    path = put(tmp_path, 1)
    assert has_ended(tmp_path, 1)
    spoil(path, "link")
    assert not has_ended(tmp_path, 1)
    with pytest.raises(OSError, match="a link, no journal of ours"):
        opened(path)
    path.unlink()
    os.mkfifo(path)
    assert not has_ended(tmp_path, 1)
    with pytest.raises(OSError, match="not a regular file"):
        list(Tail(path).lines())


def test_an_element_is_asked_for_where_a_whole_array_is_named(call: Any, tmp_path: Path) -> None:
    """One line that names them."""
    for epoch in range(1, 4):
        put(tmp_path, epoch, job=f"100_{epoch}")
    told = call("status", "100", "--dir", tmp_path)
    assert (told.code, told.out) == (2, "")
    assert told.err == "ckptctl: job 100 is an array: say one of its elements: 100_1, 100_2, 100_3\n"


def test_starts_that_are_the_same_attempt_are_told_apart(call: Any, tmp_path: Path) -> None:
    """As timeline and why call them."""
    for epoch in range(1, 3):
        put(tmp_path, epoch, number=0)
    put(tmp_path, 3, number=1)
    told = call("status", "--dir", tmp_path)
    assert [line.split()[0] for line in told.lines if "training ended" in line and "2026" in line] == ["0#1", "0#2", "1"]
    assert " 61,200 " in told.out


def test_a_narrow_terminal_is_not_overflown(call: Any, tmp_path: Path) -> None:
    """40 columns, and a reader's own word of how many there are."""
    from datetime import datetime, timezone

    from ckpt_supervisor.ctl import status
    from ckpt_supervisor.ctl.job_standing import Outside, standing
    from ckpt_supervisor.view import status as view
    from ckpt_supervisor.view.attempts import attempts
    from ckpt_supervisor.view.checkpoints import Look
    from ckpt_supervisor.watches.places import Home

    for epoch in range(1, 4):
        put(tmp_path, epoch, number=epoch // 3)
    starts = attempts(tmp_path, "77", "0")
    job = status.Job(Home("77", "0", tmp_path), starts, Outside(None), standing(starts[-1], Outside(None)), None)
    shown = status.shown_as(job)
    for width in (40, 50, 60, 80):
        lines = view.block(shown, Look(width, False, datetime(2026, 2, 1, tzinfo=timezone.utc)))
        assert [line for line in lines if len(line) > width] == []
        assert any("training end" in line for line in lines)
