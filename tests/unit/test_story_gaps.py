"""What is told where whole journals are missing: the coordinator's of a start, or all of a start. Nothing is made up of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_supervisor.view import story, timeline, why
from ckpt_supervisor.view.facts import Run
from ckpt_supervisor.view.pieces import milliseconds
from ckpt_supervisor.view.report import headline
from ckpt_supervisor.view.totals import gained, totals

from tests.support.journals import Start, preempted
from tests.unit.test_story import told

LOOKS = timeline.Looks(100, colour=False, unicode=True)


def headless(directory: Path, code: int) -> None:
    """Only what task 1 has written of a start from step 90: it is told the coordinator's status."""
    start = Start(directory, 2, 1, task=1).begin(200, 90)
    start.say(295, "command_exited", code=0).exit(296, code, "the coordinator's status")


def of(run: Run, place: int) -> dict[str, str]:
    """Titles and sentences of one attempt."""
    return dict(why.facts(run.attempts[place], run, why.Said()))


def drawn(run: Run) -> str:
    """The timeline, its spaces as one each."""
    return " ".join(" ".join(timeline.block(run, LOOKS)).split())


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize(("code", "word"), [(75, "interrupted"), (76, "did not make it"), (143, "cancelled")])
def test_a_start_without_its_coordinators_journal_did_not_fail_and_lost_nobody_knows_what(
    tmp_path: Path, code: int, word: str, is_empty: bool
) -> None:
    """The status of the other tasks is the supervisor's own; no traceback is to be looked for, and no kind of time is made up."""
    preempted(tmp_path)
    headless(tmp_path, code)
    if is_empty:
        Start(tmp_path, 2, 1)
    run = told(tmp_path)
    one = run.attempts[1]
    assert (one.cause, one.lost_steps, one.kept, one.is_told) == ("not known", None, None, False)
    assert word in one.detail
    assert milliseconds(one.spans, "training") > 90_000
    said = of(run, 1)
    assert said["lost"].startswith("not known")
    assert "there is no checkpoint" not in said["lost"]
    assert "no save" not in said["late"]
    assert said["change"].startswith("look for the journal of task 0")
    assert gained(one) is None
    assert "lost: not known" in drawn(run)
    assert totals(run).left_out == 1
    assert "1 start is left out" in drawn(run)
    assert all(
        "1 start left out (see the notes)" in card.more for card in headline.cards(run) if card.title in ("Goodput", "Lost")
    )


def test_a_journal_that_was_removed_under_its_run_is_called_incomplete(tmp_path: Path) -> None:
    """What is left of it begins in the middle; the mark stands where that was."""
    start = Start(tmp_path, 0, 1)
    start.say(200, "journal_anew", level="warning", text="the file was removed; what was in it is gone")
    start.say(210, "signal", signal="SIGTERM", meaning="save and leave").exit(220, 75, "SIGTERM; step 9 is committed")
    (one,) = told(tmp_path).attempts
    assert any("was removed while it was written" in note for note in one.notes)
    assert [mark[-1] for mark in one.marks] == ["the file was removed; what was in it is gone"]


def test_a_task_that_had_to_decide_for_itself_tells_the_cause_of_a_start_without_its_coordinators_journal(tmp_path: Path) -> None:
    """Its own notice; what it was doing until then is there too."""
    start = Start(tmp_path, 1, 0, task=1).begin(0)
    start.notice(90, "node failure", "coordinator_lost").say(91, "leaving", outcome="stale", step=-1, reason="x").exit(92, 76)
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.lost_steps) == ("node failure", None)
    assert [span.kind for span in one.spans] == ["starting", "training", "leaving"]


def test_what_a_start_without_its_coordinators_journal_has_kept_is_told_by_the_next_one(tmp_path: Path) -> None:
    """It began at 90, and the next one at 140: so many steps were kept."""
    preempted(tmp_path)
    headless(tmp_path, 75)
    Start(tmp_path, 3, 2).begin(400, 140).save(451, 1, 190).ended(460, 0)
    run = told(tmp_path)
    assert [one.kept for one in run.attempts] == [90, 140, 190]
    assert "step 140 stands" in of(run, 1)["lost"]
    assert totals(run).steps == 190


def test_a_start_whose_files_are_all_missing_is_told_and_left_out_of_the_sums(tmp_path: Path) -> None:
    """Attempt 1 of epoch 2: a note, no queue, and nothing lost before it is taken for kept."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    start.say(71, "progress", "debug", step=70, ahead=70, per_step_ms=1_000, phase="")
    Start(tmp_path, 3, 2).begin(400, 140).ended(460, 0)
    run = told(tmp_path)
    (note,) = run.notes
    assert note.startswith("incomplete: no journal of start 2 (attempt 1)")
    assert "never wrote one" in note
    assert run.attempts[0].lost_steps == 20
    assert totals(run).queued_ms is None
    assert totals(run).left_out == 1
    assert "1 start is left out" in drawn(run)
    assert note in [text for title, text in why.facts(run.attempts[0], run, why.Said()) if title == "note"]


def test_starts_of_other_jobs_and_those_before_the_first_journal_are_no_gap(tmp_path: Path) -> None:
    """Journals are pruned from the oldest on; an epoch of a directory is of any job."""
    preempted(tmp_path, 5, 3)
    preempted(tmp_path, 6, 0, 200, 90, job="4712")
    preempted(tmp_path, 7, 4, 400, 180)
    assert story.read(tmp_path, "4711").notes == ()
    assert told(tmp_path).notes == ()
    assert [totals(one).left_out for one in story.runs(told(tmp_path))] == [0, 0]


def test_a_number_that_no_start_has_is_told_softly_and_left_out_of_no_sum(tmp_path: Path) -> None:
    """Attempt 1 took no epoch: it was refused before it came so far, or never ran ckpt-supervise."""
    preempted(tmp_path)
    preempted(tmp_path, 2, 2, 200, 90)
    run = told(tmp_path)
    assert run.notes == ("no journal of attempt 1 of job 4711: it never wrote one, or it is missing",)
    assert totals(run).left_out == 0


def test_a_start_that_goes_on_from_a_newer_step_than_was_told_is_noted(tmp_path: Path) -> None:
    """Something is missing between them, or was copied there."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 500).ended(260, 0)
    run = told(tmp_path)
    assert any("from step 500" in note and "step 90" in note for note in run.attempts[1].notes)


def test_a_start_that_was_refused_in_between_has_told_of_no_step(tmp_path: Path) -> None:
    """Its command never ran: that the next one goes on from step 90 is nothing odd."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).say(150, "refused", text="another job holds the directory").exit(150.1, 76)
    Start(tmp_path, 3, 2).begin(200, 90).ended(260, 0)
    run = told(tmp_path)
    assert [one.notes for one in run.attempts] == [(), (), ()]


def test_a_start_that_is_at_it_has_lost_nothing_so_far(tmp_path: Path) -> None:
    """What will come of it nobody knows."""
    Start(tmp_path).begin(0).save(51, 1, 50)
    assert "none lost so far" in drawn(told(tmp_path, alive=(1, True)))


def test_one_damaged_line_is_one_line(tmp_path: Path) -> None:
    """Not lines."""
    start = preempted(tmp_path)
    with start.path.open("a") as file:
        file.write("nonsense\n")
    run = told(tmp_path)
    assert run.notes == ("incomplete: 1 damaged line was passed over",)
    assert run.attempts[0].notes == (f"incomplete: 1 damaged line in {start.path.name}",)


def test_an_epoch_of_any_size_makes_one_note(tmp_path: Path) -> None:
    """A foreign name: nothing is counted one by one."""
    preempted(tmp_path)
    Start(tmp_path, 10**15, 1).begin(200, 90).ended(260, 0)
    run = told(tmp_path)
    assert run.notes[0].startswith("incomplete: no journal of starts 2 to 999999999999999")


def test_a_hang_tells_how_far_it_had_come_and_its_time_is_no_training(tmp_path: Path) -> None:
    """It stood at step 70 for 20 s before it was started again in place: 69 steps are finished."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    ways = [{"rank": 0, "rank_pid": 5000, "kind": "stopped", "at": "at step 70", "silent_ms": 20_000}]
    start.say(90, "hang_suspected", "warning", kind="stopped", ranks=[0], text="hangs", stood_ms=20_000, limit_ms=1, ways=ways)
    start.begin(100, 50, restart=1).save(151, 2, 100).ended(160, 0)
    (one,) = told(tmp_path).attempts
    assert (one.lost_steps, one.lost_before_is_least) == (19, True)
    assert milliseconds(one.spans, "lost") >= 30_000


def test_a_host_whose_clock_is_hours_behind_or_ahead_adds_no_time_in_the_queue(tmp_path: Path) -> None:
    """The next start seems to begin before the one before it: no time is made of that, and it is noted."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1, ahead_s=-7_200).begin(200, 90).ended(300, 75)
    Start(tmp_path, 3, 2).begin(400, 180).ended(460, 0)
    run = told(tmp_path)
    assert totals(run).queued_ms is None
    assert any("differ" in note for note in run.notes)
