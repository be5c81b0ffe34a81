"""Journals that are cut, damaged, missing or of clocks that disagree: the right result or a clear word, never a traceback.

Row 3 of the inspection's table, for `ckptctl timeline` and `ckptctl why`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from ckpt_supervisor.view import run_record, story, timeline, why
from ckpt_supervisor.view.facts import Run
from ckpt_supervisor.view.telling import EVENTS as EVENTS_READ
from ckpt_supervisor.view.told_rounds import WORDS
from ckpt_supervisor.view.totals import totals
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.journals import Start, preempted
from tests.unit.test_story import DAY_LATER_NS, failed, told

LOOKS = timeline.Looks(80, False, True)


def drawn(run: Run) -> str:
    """Everything that the two commands make of a run."""
    made = []
    for one in story.runs(run):
        made += timeline.block(one, LOOKS)
        made.append(json.dumps(run_record.record(one)))
        attempt = why.chosen(one)
        assert attempt is not None
        made += why.lines(attempt, one, why.Said(), 80)
        made.append(json.dumps(why.record(attempt, one, why.Said())))
    return "\n".join(made)


def made_up(directory: Path) -> list[Path]:
    """A preempted start of two tasks, one that failed, and a good one; their files."""
    preempted(directory).say(1, "task_joined", of_task=1, host_of_task="node1", task_pid=901)
    other = Start(directory, task=1).say(1, "rank_hello", rank=1, rank_pid=5001, world_size=2, generation=0, sharded=False)
    other.say(92, "signal", signal="SIGTERM", meaning="save and leave").exit(95, 75, "the coordinator's status")
    failed(Start(directory, 2, 1).begin(200, 90).save(251, 1, 140))
    Start(directory, 3, 2).begin(300, 140).ended(360, 0)
    return sorted((directory / "journal").iterdir())


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """The files of an undamaged directory."""
    with tempfile.TemporaryDirectory() as made:
        return {path.name: path.read_bytes() for path in made_up(Path(made))}


@pytest.fixture(scope="module")
def before(whole: dict[str, bytes]) -> Run:
    """What is read of them."""
    return read_with(whole)


def read_with(files: dict[str, bytes]) -> Run:
    """What is read of these files."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made) / "journal"
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        run = story.read(Path(made), now_ns=DAY_LATER_NS)
        if run.attempts:
            drawn(run)
        return run


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_that_is_cut_at_any_byte_tells_what_it_still_has(
    data: st.DataObject, whole: dict[str, bytes], before: Run
) -> None:
    """The other starts are told as before. The cut one has its cause, or is lost, with a word where it is cut within a line."""
    name = data.draw(st.sampled_from(sorted(whole)))
    at = data.draw(st.integers(0, len(whole[name])))
    after = read_with({**whole, name: whole[name][:at]})
    cut_epoch = int(name.rsplit("-", 2)[1])
    for one, as_before in zip(after.attempts, before.attempts, strict=True):
        if one.epoch != cut_epoch:
            assert (one.cause, one.code, one.kept) == (as_before.cause, as_before.code, as_before.kept)
        elif one.cause != as_before.cause and whole[name][:at][-1:] not in (b"\n", b""):
            assert any("incomplete" in note for note in one.notes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_flipped_byte_costs_one_line_at_most(data: st.DataObject, whole: dict[str, bytes], before: Run) -> None:
    """Whatever it hits, and whatever it becomes; starts in other files are told as before."""
    name = data.draw(st.sampled_from(sorted(whole)))
    at = data.draw(st.integers(0, len(whole[name]) - 1))
    flipped = bytearray(whole[name])
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    after = read_with({**whole, name: bytes(flipped)})
    epoch = int(name.rsplit("-", 2)[1])
    assert len(after.attempts) == len(before.attempts)
    for one, as_before in zip(after.attempts, before.attempts, strict=True):
        if one.epoch != epoch:
            assert (one.cause, one.code, one.kept) == (as_before.cause, as_before.code, as_before.kept)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.sampled_from(sorted(EVENTS_READ | WORDS))
NAMES = (
    "ts mono_ms round rank ranks step steps ahead cause by left_ms save_left_ms code line result reason after kind resume_step "
    "restart of_task save_ms hold_ms verify_ms bytes text tree_bytes limit_bytes saves_ms every_ms after_ms accepted outcome "
    "host_of_task world_size what mode"
)
KEYS = st.sampled_from(NAMES.split())


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(st.tuples(EVENTS, st.dictionaries(KEYS, VALUES, max_size=6)), max_size=12))
def test_any_values_in_any_events_bring_no_traceback(lines: list[tuple[str, dict[str, object]]]) -> None:
    """A file may hold anything that is JSON."""
    stamp = {"ts": "2026-01-05T08:00:00.000000Z", "mono_ms": 1}
    data = "".join(json.dumps({**stamp, "event": event, **fields}) + "\n" for event, fields in lines)
    read_with({"4711-0-0-1-0.jsonl": data.encode(), "4711-1-0-2-1.jsonl": data.encode()})


def test_a_missing_file_of_a_task_or_of_the_coordinator_is_told(whole: dict[str, bytes]) -> None:
    """Both starts are there, with what is known; the notes say which file is missing."""
    names = sorted(whole)
    without_task = read_with({name: data for name, data in whole.items() if name != "4711-0-0-1-1.jsonl"})
    assert without_task.attempts[0].notes == ("incomplete: no journal of task 1",)
    assert without_task.attempts[0].cause == "preempted"
    assert "4711-0-0-1-0.jsonl" in names
    headless = read_with({name: data for name, data in whole.items() if name != "4711-0-0-1-0.jsonl"})
    first = headless.attempts[0]
    assert (first.code, first.tasks) == (75, 1)
    assert "incomplete: the coordinator's journal is missing" in first.notes[0]
    assert [one.cause for one in headless.attempts[1:]] == ["training failed", "finished"]
    assert "incomplete" in drawn(headless)


def test_nothing_is_made_of_empty_files_of_foreign_names_and_of_a_directory(tmp_path: Path) -> None:
    """A file that is empty is a start of which nothing is known; other names are no journals."""
    place = tmp_path / "journal"
    place.mkdir()
    (place / "notes.jsonl").write_text("{}\n")
    (place / "4711-0-0-2-0.jsonl").mkdir()
    (place / "4711-0-0-1-0.jsonl").touch()
    run = told(tmp_path)
    assert [one.epoch for one in run.attempts] == [1, 2]
    assert "cannot be read" in run.attempts[1].notes[0]
    assert "4711" in drawn(run)


def test_hosts_whose_clocks_are_90_s_apart_make_no_queue_of_less_than_nothing(tmp_path: Path) -> None:
    """The next start's host is 150 s behind, so it seems to begin before the first one has ended: that is said."""
    preempted(tmp_path, host="node0")
    Start(tmp_path, 2, 1, host="node9", ahead_s=-150).begin(200, 90).ended(260, 0)
    run = told(tmp_path)
    assert [one.cause for one in run.attempts] == ["preempted", "finished"]
    assert all(span.end_ns >= span.begin_ns for one in run.attempts for span in one.spans)
    assert totals(run).queued_ms is None
    assert any("the clocks of node0 and node9 differ" in note for note in run.notes)


def test_a_clock_that_is_set_while_it_runs_changes_no_length(tmp_path: Path) -> None:
    """An hour back in the middle of the training: the monotonic clock tells how long it took."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    start.ahead_s = -3_600
    failed(start)
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.lost_steps) == ("training failed", 20)
    assert one.ended_ns is not None
    assert one.began_ns is not None
    assert (one.ended_ns - one.began_ns) / 1e9 == pytest.approx(72.1, abs=0.1)
    assert any("was set by" in note for note in one.notes)
