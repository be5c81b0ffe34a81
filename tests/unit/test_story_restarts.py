"""Training that starts again inside one attempt, by our restart or its launcher's: what that loses, and that it goes on."""

from __future__ import annotations

from pathlib import Path

from ckpt_supervisor.view import story, why
from ckpt_supervisor.view.facts import Attempt
from ckpt_supervisor.view.pieces import milliseconds
from ckpt_supervisor.view.totals import is_least, totals

from tests.support.journals import BEGIN_S, Start, preempted

NOW_NS = (BEGIN_S + 86_400) * 10**9


def told(directory: Path) -> Attempt:
    """The only attempt that there is."""
    (one,) = story.read(directory, now_ns=NOW_NS).attempts
    return one


def spent(one: Attempt) -> dict[str, int]:
    """Seconds of each kind, rounded."""
    return {kind: round(ms / 1000) for kind in story.KINDS if (ms := milliseconds(one.spans, kind))}


def raised(start: Start, at_s: float, step: int, ranks: int = 1) -> Start:
    """An exception leaves the loop: the hook says that the loop is over, then why, and its process goes."""
    for rank in range(ranks):
        start.say(at_s, "rank_finished", rank=rank)
    start.say(at_s, "rank_failed", "warning", rank=0, reason="ValueError: nan", step=step)
    for rank in range(ranks):
        start.say(at_s + 0.1, "rank_gone", "warning", rank=rank, rank_pid=5000 + rank, how="its process has ended")
    return start


def hello(start: Start, at_s: float, generation: int, ranks: int = 1) -> Start:
    """The ranks of a start by the launcher attach."""
    for rank in range(ranks):
        pid = 6000 + 10 * generation + rank
        start.say(at_s, "rank_hello", rank=rank, rank_pid=pid, world_size=ranks, generation=generation, sharded=False)
    return start


def test_what_a_launcher_starts_again_is_training_and_what_it_had_done_since_the_last_save_is_lost(tmp_path: Path) -> None:
    """torchrun --max-restarts: no new command, ranks of the next generation. Steps 51 to 80 are done twice."""
    start = Start(tmp_path).begin(0, ranks=2).save(51, 1, 50, ranks=2)
    hello(raised(start, 83, 80, ranks=2), 90, 1, ranks=2).save(141, 2, 100, ranks=2).ended(150, 0)
    one = told(tmp_path)
    assert (one.lost_steps, one.restarts, is_least(one)) == (30, 1, False)
    assert spent(one) == {"starting": 8, "training": 108, "saving": 4, "lost": 30, "leaving": 0}
    assert [kind for _, kind, _ in one.marks] == ["restart"]


def test_steps_after_a_launchers_restart_are_counted_from_the_checkpoint_on(tmp_path: Path) -> None:
    """It fell from 80 to 50, came to 60 and was saved there: 30 steps were lost, not 20."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    hello(raised(start, 83, 80), 90, 1).notice(101, "preempted").save(101, 2, 60, "save and leave")
    start.leave(103.6, "fresh", 75, requeue="accepted")
    one = told(tmp_path)
    assert (one.reached, one.kept, one.lost_steps) == (60, 60, 30)


def test_ranks_that_a_launcher_has_ended_have_not_finished_though_they_say_so(tmp_path: Path) -> None:
    """One is killed, the other is sent SIGTERM and leaves by sys.exit; what both had done is lost."""
    start = Start(tmp_path).begin(0, ranks=2).save(51, 1, 50, ranks=2).say(80, "progress", "debug", step=77, ahead=77)
    start.say(80, "rank_gone", "warning", rank=1, rank_pid=5001, how="killed").say(81, "rank_finished", rank=0)
    start.say(82, "rank_gone", rank=0, rank_pid=5000, how="its process has ended")
    hello(start, 90, 1, ranks=2).save(141, 2, 100, ranks=2).ended(150, 0)
    one = told(tmp_path)
    assert (one.lost_steps, is_least(one), one.restarts) == (27, True, 1)


def test_a_late_rank_of_the_same_start_is_no_restart(tmp_path: Path) -> None:
    """Ranks attach one after the other, and one that is gone does not make the others begin anew."""
    start = Start(tmp_path).begin(0, ranks=2).say(5, "rank_gone", "warning", rank=1, rank_pid=5001, how="killed")
    start.say(6, "rank_hello", rank=1, rank_pid=5009, world_size=2, generation=0, sharded=False)
    start.say(50, "progress", "debug", step=49, ahead=49).ended(60, 1)
    one = told(tmp_path)
    assert (one.restarts, one.lost_steps) == (0, 49)


def test_a_second_program_of_one_command_trains_as_well(tmp_path: Path) -> None:
    """`prepare.py && train.py`, each with the line in its loop: the first one's good end loses nothing."""
    start = Start(tmp_path).begin(0).save(11, 1, 10).say(14, "rank_finished", rank=0)
    start.say(14, "rank_gone", rank=0, rank_pid=5000, how="its process has ended")
    start.say(20, "rank_hello", rank=0, rank_pid=5001, world_size=1, generation=0, sharded=False)
    start.save(60, 2, 50).say(70, "rank_finished", rank=0).ended(70, 0)
    one = told(tmp_path)
    assert (one.lost_steps, one.restarts) == (0, 0)
    assert spent(one)["training"] == 13 - 2 + 50 - 2


def test_a_kill_before_a_restart_in_place_has_lost_steps_that_nobody_has_told(tmp_path: Path) -> None:
    """It was killed 30 s after its save, without a word, and the run finished all the same: perhaps something was lost."""
    start = Start(tmp_path).begin(0).save(51, 1, 50).say(83, "command_exited", "warning", code=137)
    start.begin(90, 50, restart=1).save(141, 2, 100).ended(150, 0)
    run = story.read(tmp_path, now_ns=NOW_NS)
    assert (run.attempts[0].lost_steps, is_least(run.attempts[0])) == (0, True)
    assert totals(run).lost_is_least


def test_an_attempt_that_was_killed_before_any_word_of_its_steps_is_not_told_as_without_loss(tmp_path: Path) -> None:
    """Its rank had attached, so it trained; how far is not known."""
    Start(tmp_path).begin(0)
    (one,) = story.read(tmp_path, now_ns=NOW_NS, alive=(1, False)).attempts
    assert (one.lost_steps, is_least(one)) == (0, True)


def test_why_an_attempt_failed_is_not_what_it_had_survived_before(tmp_path: Path) -> None:
    """An exception, then a restart in place that is killed: the exception is no reason of the end."""
    start = raised(Start(tmp_path).begin(0), 20, 19).say(20.2, "command_exited", "warning", code=1)
    start.begin(30, restart=1).ended(60, 137)
    one = told(tmp_path)
    assert (one.cause, one.detail) == ("training failed", "status 137 (SIGKILL)")


def test_a_start_that_goes_on_from_an_older_checkpoint_or_from_none_has_its_steps_done_again(tmp_path: Path) -> None:
    """The newest one was put aside, or all of them: what had been committed is lost, and is no progress a second time."""
    for place, (resume, lost) in enumerate(((90, 0), (30, 60), (-1, 90))):
        directory = tmp_path / str(place)
        preempted(directory)
        Start(directory, 2, 1).begin(200, resume).save(211, 1, max(0, resume) + 10).ended(260, 0)
        run = story.read(directory, now_ns=NOW_NS)
        assert (run.attempts[0].lost_steps, totals(run).steps) == (lost, max(0, resume) + 10)
        assert bool(run.attempts[0].notes) == (lost > 0)


def test_a_start_that_was_refused_in_between_says_nothing_of_where_the_next_one_went_on(tmp_path: Path) -> None:
    """Its command never ran; the one after it went on from an older checkpoint."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).say(150, "refused", text="only damaged checkpoints").exit(150.1, 76)
    Start(tmp_path, 3, 2).begin(200, 30).ended(260, 0)
    assert [one.lost_steps for one in story.read(tmp_path, now_ns=NOW_NS).attempts] == [60, 0, 0]


def test_an_array_is_asked_for_by_its_number(tmp_path: Path) -> None:
    """All elements that have journals there, and no job whose number only begins alike."""
    for epoch, job in enumerate(("100_1", "100_2", "1001", "100"), 1):
        preempted(tmp_path, epoch, at_s=500 * epoch, job=job)
    assert story.read(tmp_path, "100", now_ns=NOW_NS).jobs == ("100_1", "100_2", "100")
    assert story.read(tmp_path, "100_2", now_ns=NOW_NS).jobs == ("100_2",)
    assert story.read(tmp_path, "10", now_ns=NOW_NS).jobs == ()


def test_why_tells_of_a_next_start_that_did_not_go_on_from_what_stands(tmp_path: Path) -> None:
    """Both numbers, and how far it had come for sure."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 30).ended(260, 0)
    run = story.read(tmp_path, now_ns=NOW_NS)
    lost = dict(why.facts(run.attempts[0], run, why.Said()))["lost"]
    assert lost.startswith("60 steps")
    assert lost.endswith("(it had come to step 90); step 90 stands, but the next start went on from step 30")


def test_a_next_start_that_does_not_say_where_it_went_on_is_none_from_scratch(tmp_path: Path) -> None:
    """Its line was cut, as that of a command that is too long for a line."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).say(200, "command_started", command=[], cut=True).ended(260, 0)
    assert story.read(tmp_path, now_ns=NOW_NS).attempts[0].lost_steps == 0
