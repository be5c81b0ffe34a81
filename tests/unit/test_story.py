"""What happened to a run, from journals that are whole: causes, steps kept and lost, and what the time was spent with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_supervisor.view import story
from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.pieces import milliseconds
from ckpt_supervisor.view.totals import gained, is_least, label, totals

from tests.support import many_lines
from tests.support.journals import BEGIN_S, Start, preempted

DAY_LATER_NS = (BEGIN_S + 86_400) * 10**9
CAUSES = {"preempted late": "preempted", "lost": "lost without a word"}


def told(directory: Path, job: str = "", now_ns: int = DAY_LATER_NS, alive: story.Seen = None) -> Run:
    """The run as it is read a day later."""
    return story.read(directory, job, now_ns=now_ns, alive=alive)


def spent(one: Attempt) -> dict[str, int]:
    """Seconds of each kind, rounded."""
    return {kind: round(ms / 1000) for kind in story.KINDS if (ms := milliseconds(one.spans, kind))}


def test_a_week_of_all_causes_is_told_as_it_was_made_up(tmp_path: Path) -> None:
    """Each cause, each step kept and lost, and each exit status, of 12 attempts on 4 nodes."""
    made = many_lines.write(tmp_path, lines=6_000, tasks=4, attempts=12)
    run = story.read(tmp_path, now_ns=made[-1].ended_ms * 10**6 + DAY_LATER_NS)
    assert [one.cause for one in run.attempts] == [CAUSES.get(one.cause, one.cause) for one in made]
    assert [one.code for one in run.attempts] == [one.code for one in made]
    assert [one.kept for one in run.attempts] == [one.kept for one in made]
    for one, as_made in zip(run.attempts, made, strict=True):
        lost = 0 if as_made.cause == "finished" else as_made.lost_steps
        if is_least(one):
            assert one.lost_steps is not None
            assert lost - 22 <= one.lost_steps <= lost, "no more is told than was lost; a line of progress may be torn"
        else:
            assert one.lost_steps == lost, as_made.cause
    assert totals(run).steps == made[-1].reached


def test_a_preempted_start_that_saved_and_the_next_one_that_went_on_from_it(tmp_path: Path) -> None:
    """The pieces follow each other without gap; nothing was lost; the queue is what lies between."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 90).ended(260, 0)
    first, second = told(tmp_path).attempts
    assert (first.cause, first.detail, first.outcome, first.requeue) == ("preempted", "by SIGTERM", "fresh", "accepted")
    assert (first.kept, first.reached, first.lost_steps, gained(first)) == (90, 90, 0, 90)
    assert first.is_exact
    assert spent(first) == {"starting": 1, "training": 88, "saving": 4, "verifying": 0, "leaving": 1}
    assert (first.saves, first.failed_saves, first.hold_ms, first.out_ms) == (2, 0, 4_200, 3_200)
    assert all(one.end_ns == after.begin_ns for one, after in zip(first.spans, first.spans[1:], strict=False))
    assert second.spans[0].kind == "queued"
    assert spent(second)["queued"] == round(200 - 94.2)
    assert (second.cause, second.resume_step, second.lost_steps) == ("finished", 90, 0)
    assert told(tmp_path).notes == ()


def failed(start: Start) -> None:
    """A rank dies of an exception after 70 steps."""
    start.say(71, "rank_failed", "warning", rank=0, reason="ValueError: loss is nan", step=70).ended(72, 1)


def stale(start: Start) -> None:
    """The last save is given up at the step that was agreed, after all had come to it."""
    start.notice(71, "preempted").say(71, "round_begun", round=2, kind="save and leave", ranks=[0], save_left_ms=9_000)
    start.say(71, "agreed", round=2, step=70, safe_point=0).say(71.1, "go", round=2, after_ms=100)
    start.say(80, "rank_late", "warning", round=2, rank=0, after_ms=9_000, reason="it was not ready in time")
    start.say(80, "round_given_up", "warning", round=2, step=70, took_ms=9_000, ranks={"0": "late"}, reason="rank 0: late")
    start.leave(80, "stale", 76, reason="rank 0: late", requeue="accepted")


def hung(start: Start) -> None:
    """It stands still after 70 steps."""
    start.say(71, "progress", "debug", step=70, ahead=70, per_step_ms=1_000, phase="")
    start.say(700, "stalled", "warning", ranks=[0], kind="no progress", text="training stands still")
    start.notice(700, "training hung", "hang").leave(701, "stale", 76, requeue="accepted")


def starved(start: Start) -> None:
    """The kernel kills it."""
    start.say(71, "progress", "debug", step=70, ahead=70, per_step_ms=1_000, phase="")
    start.say(71, "oom_kill", "warning", kills=1, limit_of="job", limit_bytes=1, text="the kernel has killed a process")
    start.ended(72, 137)


def killed(start: Start) -> None:
    """Its supervisor is killed."""
    start.say(71, "progress", "debug", step=70, ahead=70, per_step_ms=1_000, phase="")


def no_end(start: Start) -> None:
    """A signal that was no end, and then the time limit."""
    start.notice(60, "no end in sight", "SIGUSR1", 3600).say(63, "notice_over", reason="no end in sight: training goes on")
    start.save(64, 2, 60, "save and go on").notice(71, "time limit reached").leave(71, "stale", 76)


def by_hand(start: Start) -> None:
    """Somebody has it requeued."""
    start.notice(71, "requeued already").save(71, 2, 70, "save and leave").leave(74, "fresh", 75)


def ahead(start: Start) -> None:
    """The watch of the time limit; the requeue itself makes it "requeued already", which is no news."""
    start.notice(71, "end of the time limit ahead", "end-time watch").save(71, 2, 70, "save and leave")
    start.say(74, "leaving", outcome="fresh", step=70, reason="").say(74, "requeue_called")
    start.notice(74.1, "requeued already").say(74.2, "requeue", result="accepted", reason="").exit(75, 75)


def cancelled(start: Start) -> None:
    """scancel."""
    start.notice(71, "cancelled").save(71, 2, 70, "save and leave").leave(74, "fresh", 143)


def asked(start: Start) -> None:
    """ckptctl save --leave."""
    start.say(71, "asked", what="leave_after_save", every_ms=None, requeue=False, by="ada")
    start.notice(71, "asked to leave", "ckptctl save --leave").save(71, 2, 70, "save and leave").leave(74, "fresh", 75)


def then_requeued(start: Start) -> None:
    """Preempted, the save takes too long, and Slurm requeues it by itself when the grace is over."""
    start.notice(71, "not known").notice(71.1, "preempted").say(71.1, "round_begun", round=2, kind="save and leave", ranks=[0])
    start.say(71.1, "agreed", round=2, step=70, safe_point=0).say(71.2, "go", round=2, after_ms=100)
    start.notice(80, "requeued already").say(81, "round_given_up", "warning", round=2, step=70, reason="the time is over")
    start.leave(81, "stale", 76, reason="the time is over")


def node(start: Start) -> None:
    """Another node goes away."""
    start.say(70, "progress", "debug", step=70, ahead=71, per_step_ms=1_000, phase="")
    start.say(71, "task_gone", "warning", of_task=1, host_of_task="node1", task_pid=7)
    start.notice(71, "node failure", "task_gone").leave(71, "stale", 76, requeue="already pending")


def good(start: Start) -> None:
    """It ends by itself, while a signal came too."""
    start.say(71, "progress", "debug", step=70, ahead=70, per_step_ms=1_000, phase="")
    start.say(71, "rank_finished", rank=0).notice(71, "preempted").ended(72, 0)


WAYS: dict[str, tuple[Callable[[Start], None], str, int | None]] = {
    "failed": (failed, "training failed", 20),
    "stale": (stale, "preempted", 20),
    "hung": (hung, "training hung", 20),
    "starved": (starved, "out of memory", 20),
    "killed": (killed, "lost without a word", 20),
    "no_end": (no_end, "time limit reached", 0),
    "by_hand": (by_hand, "requeued already", 0),
    "ahead": (ahead, "end of the time limit ahead", 0),
    "cancelled": (cancelled, "cancelled", 0),
    "asked": (asked, "asked to leave", 0),
    "then_requeued": (then_requeued, "preempted", 20),
    "node": (node, "node failure", 21),
    "good": (good, "finished", 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_end_has_its_cause_and_its_lost_steps(tmp_path: Path, way: str) -> None:
    """A start that has committed step 50 ends in this way."""
    end, cause, lost = WAYS[way]
    end(Start(tmp_path).begin(0).save(51, 1, 50))
    (one,) = told(tmp_path, alive=(1, False)).attempts
    assert (one.cause, one.lost_steps) == (cause, lost)
    assert (spent(one).get("lost", 0) > 0) == (lost != 0)


def test_a_start_that_was_refused_or_that_could_not_run_its_command(tmp_path: Path) -> None:
    """They have lost nothing, and say why."""
    Start(tmp_path, 1).say(0, "refused", "error", text="another job holds the directory").exit(0.1, 76)
    Start(tmp_path, 2).say(9, "refused", "error", text="only damaged checkpoints are there").exit(9.1, 76)
    Start(tmp_path, 3).say(19, "command_not_started", "error", reason="no such file", code=127).exit(19.1, 127)
    run = told(tmp_path)
    assert [one.cause for one in run.attempts] == ["refused", "only damaged checkpoints", "could not be started"]
    assert run.attempts[0].detail == "another job holds the directory"
    assert [one.lost_steps for one in run.attempts] == [0, 0, 0]
    assert totals(run).interruptions == 1


@pytest.mark.parametrize(
    ("code", "word"), [(1, "status 1"), (77, "status 77"), (139, "SIGSEGV"), (137, "SIGKILL"), (3, "status 3")]
)
def test_a_status_of_training_is_a_failure_whatever_it_is(tmp_path: Path, code: int, word: str) -> None:
    """Field case 63: never shown as success, and the signal is named."""
    Start(tmp_path).begin(0).save(51, 1, 50).ended(60, code)
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.code) == ("training failed", code)
    assert word in one.detail


@pytest.mark.parametrize("code", [75, 76, 143, 85])
def test_a_run_that_was_stopped_is_not_finished(tmp_path: Path, code: int) -> None:
    """Field case 65: only the trainer's own exit with 0, and no status of the supervisor's, is a good end."""
    start = Start(tmp_path).begin(0).notice(71, "time limit reached").say(72, "command_exited", code=0)
    start.exit(73, code)
    (one,) = told(tmp_path).attempts
    assert one.cause == "time limit reached"


def test_the_last_start_is_what_a_run_has_come_to(tmp_path: Path) -> None:
    """Field case 66: preempted once and finished then, the run has finished; both attempts are there."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 90).ended(260, 0)
    run = told(tmp_path)
    assert [one.cause for one in run.attempts] == ["preempted", "finished"]
    assert totals(run).ended == {"preempted": 1, "finished": 1}


def test_restarts_in_place_lose_steps_inside_of_one_attempt(tmp_path: Path) -> None:
    """Two crashes at 70 and 65 steps, each gone on from step 50, and then a good end."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    for number, at_s, step in ((1, 72, 70), (2, 92, 65)):
        start.say(at_s, "rank_failed", "warning", rank=0, reason="OSError: disk", step=step)
        start.say(at_s, "command_exited", "warning", code=1).begin(at_s + 1, 50, restart=number)
    start.ended(150, 0)
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.restarts, one.lost_steps) == ("finished", 2, 20 + 15)
    assert spent(one)["lost"] == pytest.approx(70 - 52 + 92 - 74, abs=3)
    assert [kind for _, kind, _ in one.marks] == ["restart", "restart"]


def test_what_the_next_start_really_went_on_from_counts(tmp_path: Path) -> None:
    """The newest checkpoint was damaged: more is lost than the first start knew, and it is said why."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 50).ended(260, 0)
    first, _ = told(tmp_path).attempts
    assert first.lost_steps == 40
    assert first.notes == ("the next start went on from step 50, not from step 90, which was committed",)


def test_a_start_without_a_last_word_is_at_it_if_its_process_lives_or_its_journal_is_fresh(tmp_path: Path) -> None:
    """Seen alive, seen dead, fresh, old, and followed by another start."""
    killed(Start(tmp_path).begin(0).save(51, 1, 50))
    just_now = (BEGIN_S + 100) * 10**9
    assert [told(tmp_path, alive=(1, True)).attempts[0].is_running, told(tmp_path).attempts[0].is_running] == [True, None]
    assert told(tmp_path, now_ns=just_now).attempts[0].is_running is True
    assert told(tmp_path, now_ns=just_now).attempts[0].cause == ""
    assert told(tmp_path, now_ns=just_now).attempts[0].lost_steps == 0
    dead = told(tmp_path, alive=(1, False)).attempts[0]
    assert (dead.is_running, dead.cause, dead.lost_steps, is_least(dead)) == (False, "lost without a word", 20, True)
    Start(tmp_path, 2, job="4712").begin(200, 50).ended(260, 0)
    assert told(tmp_path, "4711", now_ns=just_now).attempts[0].cause == "lost without a word", "another job has the directory"


def test_a_start_that_told_its_memory_every_minute_and_then_nothing_is_over(tmp_path: Path) -> None:
    """A quarter of an hour of silence is enough, where there were such lines; without them it may be at it."""
    start = Start(tmp_path).begin(0)
    assert told(tmp_path).attempts[0].is_running is None
    start.say(60, "memory", "debug", tree_bytes=1, used_bytes=1, limit_bytes=2, limit_of="job")
    assert told(tmp_path).attempts[0].is_running is False


def test_two_jobs_in_one_directory_are_two_runs_and_a_resubmitted_one_is_the_same(tmp_path: Path) -> None:
    """By job; array elements too. --resubmit makes a new number of the same run."""
    preempted(tmp_path, 1, 0)
    preempted(tmp_path, 2, 0, 200, 90, job="100_3")
    preempted(tmp_path, 3, 1, 400, 180)
    assert [[one.epoch for one in run.attempts] for run in story.runs(told(tmp_path))] == [[1, 3], [2]]
    assert [run.jobs for run in story.runs(told(tmp_path))] == [("4711",), ("100_3",)]
    Start(tmp_path, 4, 2).begin(600, 270).notice(650, "time limit reached").say(
        651, "resubmit", accepted=True, reason="Submitted batch job 4800"
    ).leave(652, "stale", 76)
    Start(tmp_path, 5, 0, job="4800").begin(700, 270).ended(760, 0)
    assert [run.jobs for run in story.runs(told(tmp_path))] == [("4711", "4800"), ("100_3",)]
    assert told(tmp_path, "4711").jobs == ("4711",)


def test_attempts_of_one_number_are_told_apart_by_their_epoch(tmp_path: Path) -> None:
    """Without Slurm every start is attempt 0; `why --attempt 0#2` names one (field case 54)."""
    for epoch in (1, 2):
        preempted(tmp_path, epoch, 0, 200 * epoch, 90 * (epoch - 1), job="local-pc", step_id="local")
    run = told(tmp_path)
    assert [label(one, run) for one in run.attempts] == ["0#1", "0#2"]


def test_an_array_element_and_a_name_with_hyphens_are_read_from_the_right(tmp_path: Path) -> None:
    """`local-my-pc-0-local-7-0.jsonl` is job local-my-pc."""
    preempted(tmp_path, 7, 0, job="local-my-pc", step_id="local")
    assert told(tmp_path).jobs == ("local-my-pc",)


def test_an_heir_tells_how_it_ended_where_the_coordinators_node_was_lost(tmp_path: Path) -> None:
    """Task 1 decides for itself; its clock is 90 s ahead, and its notice counts at the coordinator's time all the same."""
    first = Start(tmp_path, host="node0").begin(0, ranks=2)
    other = Start(tmp_path, task=1, host="node1", ahead_s=90)
    first.say(0.5, "task_joined", of_task=1, host_of_task="node1", task_pid=901)
    for at_s in (0.9, 1.0):
        other.say(at_s, "rank_hello", rank=1, rank_pid=5001, world_size=2, generation=0, sharded=False)
    other.say(1, "command_started", command=["python"], resume_from="", resume_step=-1, restart=0)
    other.say(70, "coordinator_lost", "warning", reason="nothing was heard of it").notice(71, "node failure", "task_gone")
    other.say(72, "leaving", outcome="stale", step=-1, reason="the coordinator is lost").exit(73, 76, "node failure")
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.code, one.outcome, one.tasks, one.tasks_told) == ("node failure", 76, "stale", 2, 2)
    assert one.hosts == ("node0", "node1")
    assert one.notice is not None
    assert (one.notice.at_ns / 1e9 - BEGIN_S, one.out_ms) == (pytest.approx(71, abs=1), 2_000)
    assert "90." in one.notes[0]
    assert "ahead of that of node0" in one.notes[0]


@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_that_is_killed_in_its_last_save_has_done_no_step_more(tmp_path: Path, has_left: bool) -> None:
    """Its step is exact; one that lived on after the save was given up may have done one more."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    start.notice(71, "preempted").say(71, "round_begun", round=2, kind="save and leave", ranks=[0], save_left_ms=9_000)
    start.say(71, "agreed", round=2, step=70, safe_point=0).say(71.1, "go", round=2, after_ms=100)
    start.say(80, "round_given_up", "warning", round=2, step=70, took_ms=9_000, ranks={"0": "late"}, reason="rank 0: late")
    if has_left:
        start.say(81, "rank_left", rank=0, went_on=False)
    start.leave(82, "stale", 76, reason="rank 0: late")
    (one,) = told(tmp_path).attempts
    assert (one.lost_steps, one.is_exact, is_least(one)) == (20, not has_left, has_left)


def test_a_word_that_is_old_news_does_not_move_the_begin_of_what_was_lost(tmp_path: Path) -> None:
    """At a notice the journal tells what was heard last, which may be the step of the last save."""
    start = Start(tmp_path).begin(0).save(51, 1, 50).say(70, "progress", "debug", step=50, ahead=50, per_step_ms=None, phase="")
    failed(start)
    (one,) = told(tmp_path).attempts
    assert one.lost_steps == 20
    assert one.lost_ms == pytest.approx(18_900, abs=100), "from the end of the save on"


def test_a_program_that_saves_by_itself_trains_all_the_time_and_keeps_what_was_adopted(tmp_path: Path) -> None:
    """No rank ever attaches: the command's time is training, up to the last step that it wrote."""
    start = Start(tmp_path).say(0, "command_started", command=["x"], resume_from="", resume_step=-1, restart=0)
    start.say(50, "adopted", steps=[40], problem="").notice(60, "preempted").say(60, "phase", "debug", after="LEAVING")
    start.say(70, "adopted", steps=[55], problem="").leave(71, "fresh", 75, requeue="accepted")
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.kept, one.lost_steps, one.lost_ms) == ("preempted", 55, 0, 0)
    assert spent(one) == {"training": 60, "leaving": 12}


def test_a_last_line_that_slurm_cut_off_after_the_requeue_is_no_riddle(tmp_path: Path) -> None:
    """The requeue was accepted and nothing came after it."""
    start = Start(tmp_path).begin(0).notice(91, "preempted").save(91, 1, 90, "save and leave")
    start.say(94, "leaving", outcome="fresh", step=90, reason="").say(94, "requeue", result="accepted", reason="")
    (one,) = told(tmp_path).attempts
    assert (one.cause, one.code, one.is_running, one.lost_steps) == ("preempted", None, False, 0)


def test_the_memory_of_all_tasks_is_summed(tmp_path: Path) -> None:
    """Two tasks of 10 and 20 GB hold 30, with the nearest limit beside it."""
    first = Start(tmp_path).begin(0)
    second = Start(tmp_path, task=1)
    for at_s in (60, 120):
        for start, held in ((first, 10), (second, 20)):
            fields = {"tree_bytes": held * 10**9, "used_bytes": held * 10**9, "limit_bytes": 64 * 10**9, "limit_of": "job"}
            start.say(at_s, "memory", "debug", **fields)
    first.ended(150, 0)
    (one,) = story.read(tmp_path).attempts
    assert one.memory[-1][1:] == (30 * 10**9, 64 * 10**9)
    assert story.read(tmp_path, wanted=story.Wanted(memory=False)).attempts[0].memory[-1][1] == 10 * 10**9


def test_totals_count_what_became_progress(tmp_path: Path) -> None:
    """goodput leaves out what was lost; MTBI rests on interruptions only; a person's end is none."""
    failed(Start(tmp_path, 1).begin(0).save(51, 1, 50))
    shifted = Start(tmp_path, 2, 1).begin(100, 50)
    shifted.notice(150, "cancelled").save(150, 1, 100, "save and leave").leave(153, "fresh", 143)
    sums = totals(told(tmp_path))
    assert (sums.attempts, sums.saves, sums.interruptions, sums.lost_steps, sums.steps) == (2, 2, 1, 20, 100)
    assert sums.ended == {"training failed": 1, "cancelled": 1}
    assert sums.allocated_ms == pytest.approx(72_100 + 53_600, abs=5)
    assert sums.goodput == pytest.approx((sums.kinds_ms["training"]) / sums.allocated_ms)
    assert sums.kinds_ms["lost"] > 15_000
    assert sums.mtbi_ms == sum(sums.kinds_ms[kind] for kind in ("training", "saving", "verifying", "lost"))
    assert sums.queued_ms == pytest.approx(27_900, abs=5)
