"""What becomes of a job whose training fails by itself, hangs, or gets nowhere: budgets, restarts in place, the brake."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.events import RequeueResult
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the, who


def story_of(policy: Policy, history: History | None = None, ranks: int = 1) -> Story:
    """A running job with this history."""
    story = Story(policy, ranks)
    story.feed(ev.Recalled(history or History()))
    return story


def meet_and_call(story: Story) -> None:
    """The other steps are ready, the look before the call finds the job running."""
    story.wait(1_100)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look()
    the(story.all, do.CallRequeue)


def crash(story: Story, code: int = 1, n: int = 7) -> tuple[do.Command, ...]:
    """A rank dies of an exception at this step, and the command with it."""
    story.feed(wire.Failed(next(iter(story.state.ranks)).who, 0, "ValueError: boom", n))
    return story.feed(ev.CommandExited(code))


def test_a_training_that_fails_by_itself_is_not_requeued_by_default() -> None:
    """--max-crashes 0: the trainer's own status, and no call."""
    story = story_of(IN_SLURM)
    crash(story, 3)
    assert story.exit.code == 3
    assert none_of(story.all, do.CallRequeue, do.Meet)


def test_within_its_budget_a_crash_is_requeued_and_ends_with_its_own_status() -> None:
    """--max-crashes 2, one used."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2), History(crashes=1))
    crash(story, 3)
    assert story.notice.cause is Cause.CRASHED
    meet_and_call(story)
    story.requeued(RequeueResult.ACCEPTED)
    story.signal()
    assert story.exit.code == 3
    assert "training failed by itself with status 3" in story.exit.line
    assert "Slurm has accepted the requeue" in story.exit.line


def test_a_look_that_shows_its_own_requeue_changes_neither_status_nor_line() -> None:
    """Slurm's signal and a look come before the call returns: Restarts has risen by the supervisor's own call."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2))
    crash(story, 3)
    meet_and_call(story)
    story.signal()
    story.look(restarts=1)
    assert story.notice.cause is Cause.REQUEUED
    assert story.exit.code == 3
    assert story.exit.line.startswith("training failed by itself with status 3; there is no checkpoint; Slurm has accepted")


def test_a_crash_that_somebody_else_requeues_first_ends_with_its_own_status() -> None:
    """An operator's `scontrol requeue` comes before the call: no save was tried, and training has failed."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2))
    crash(story, 3)
    story.signal()
    story.look("COMPLETING", restarts=1, end_in_ms=None)
    story.wait(5_000)
    while story.state.looking:
        story.look("COMPLETING", restarts=1, end_in_ms=None)
    story.wait(5_000)
    assert story.notice.cause is Cause.REQUEUED
    assert (story.exit.code, story.asked(do.CallRequeue)) == (3, [])
    assert story.exit.line.startswith("training failed by itself with status 3; there is no checkpoint; ")


def test_a_crash_that_is_preempted_before_it_is_requeued_has_tried_no_save() -> None:
    """Slurm brings it back: the status of an interruption, and a line that says what stands."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2))
    crash(story, 3)
    story.signal()
    story.look("RUNNING", preempted_in_ms=0, grace_ms=15_000, end_in_ms=15_000)
    assert story.notice.cause is Cause.PREEMPTED
    story.wait(1_100)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look("RUNNING", preempted_in_ms=0, grace_ms=15_000, end_in_ms=15_000)
    story.signal()
    story.look("COMPLETING", restarts=1, end_in_ms=None)
    assert story.notice.cause is Cause.REQUEUED
    story.wait(5_000)
    assert story.exit.code == 76
    assert story.exit.line.startswith("preempted; there is no checkpoint; ")


def test_a_crash_beyond_its_budget_ends_with_the_trainers_status_and_says_what_was_used() -> None:
    """Row 3: no loop."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2), History(crashes=2))
    crash(story, 3)
    assert (story.exit.code, story.asked(do.CallRequeue)) == (3, [])
    assert "after 2 of 2 requeues (--max-crashes)" in story.exit.line


def test_a_cancelled_job_is_not_revived_by_its_crash() -> None:
    """The look before the call finds it cancelled."""
    story = story_of(dataclasses.replace(IN_SLURM, max_crashes=2))
    crash(story)
    story.wait(1_100)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look("COMPLETING", end_in_ms=0)
    assert story.asked(do.CallRequeue) == []
    story.wait(60_000)
    assert story.exit.code == 143


def test_in_place_first_then_by_the_queue() -> None:
    """--restarts 1 --max-crashes 1: one start in place, then the requeue."""
    story = story_of(dataclasses.replace(IN_SLURM, restarts=1, max_crashes=1))
    assert the(story.feed(ev.CommandExited(137)), do.StartCommand) == do.StartCommand(1, 0)
    story.hello(0, 1, pid=200)
    story.feed(ev.CommandExited(137))
    assert story.notice.cause is Cause.CRASHED
    meet_and_call(story)


def test_the_same_failure_at_the_same_step_is_no_accident() -> None:
    """It ends with its status, although starts and requeues are left."""
    story = story_of(dataclasses.replace(IN_SLURM, restarts=5, max_crashes=5))
    assert the(crash(story, 1, 7), do.StartCommand).restart == 1
    story.hello(0, 1, pid=200)
    crash(story, 1, 7)
    assert story.exit.code == 1
    assert story.exit.line.endswith("at the same step as before: not started again")


@pytest.mark.parametrize(("code", "n"), [(2, 7), (1, 8)])
def test_another_step_or_another_status_is_tried_again(code: int, n: int) -> None:
    """Each one counts toward --restarts."""
    story = story_of(dataclasses.replace(LOCAL, restarts=5))
    crash(story, 1, 7)
    story.hello(0, 1, pid=200)
    assert the(crash(story, code, n), do.StartCommand) == do.StartCommand(2, 1_000)


def test_without_the_ranks_own_word_of_its_step_nothing_is_taken_for_the_same() -> None:
    """A rank that is killed says nothing: 137 twice is no proof."""
    story = story_of(dataclasses.replace(LOCAL, restarts=3))
    for restart in (1, 2, 3):
        assert the(story.feed(ev.CommandExited(137)), do.StartCommand).restart == restart
        story.hello(0, 1, pid=200 + restart)
    story.feed(ev.CommandExited(137))
    assert story.exit.code == 137
    assert "after 3 of 3 starts in place (--restarts)" in story.exit.line


def test_what_is_known_beyond_the_status_is_in_the_line() -> None:
    """A kill for lack of memory is no riddle with 137."""
    story = story_of(LOCAL)
    story.feed(ev.CommandExited(137, why="the kernel killed it for lack of memory"))
    assert story.exit.line == "training failed by itself with status 137: the kernel killed it for lack of memory"


# --- the time limit, and the brake ----------------------------------------------------------------------------------------


def limit_reached(story: Story) -> None:
    """The limit has come, a save is made, and training leaves."""
    story.signal()
    while story.state.looking:
        story.look("COMPLETING", "TimeLimit", end_in_ms=0)
    story.save()
    story.end(0)


def test_the_time_limit_has_a_budget_of_its_own() -> None:
    """Field case 46: two requeues because of the limit were allowed, and were made; a preemption still comes back."""
    policy = dataclasses.replace(IN_SLURM, max_timeouts=2)
    story = story_of(policy, History(timeouts=2))
    limit_reached(story)
    story.wait(5_000)
    assert (story.exit.code, story.asked(do.CallRequeue)) == (75, [])
    assert "its time limit has ended it 3 times now, and --max-timeouts is 2" in story.exit.line
    story = story_of(policy, History(timeouts=2))
    story.signal()
    story.look(preempted_in_ms=-40, end_in_ms=30_000)
    story.save()
    story.end(0)
    assert the(story.all, do.Meet)


def preempted_unsaved(story: Story) -> None:
    """Preempted, and the rank cannot save."""
    story.signal()
    story.look(preempted_in_ms=-40, end_in_ms=30_000)
    for _ in range(2):
        if story.state.round is None:
            break
        member = next(iter(story.round.members))
        story.feed(wire.Failed(member.who, story.round.number, "no"))
    story.end(0)
    story.wait(3_000)


def test_attempts_that_get_nowhere_are_stopped_by_a_brake() -> None:
    """Ten attempts in a row that had their time and committed nothing: the eleventh is the last."""
    story = story_of(IN_SLURM, History(stalled=10))
    story.wait(61_000)
    preempted_unsaved(story)
    assert story.exit.code == 76
    assert "11 attempts in a row had their time and committed nothing new (--max-stalled 10)" in story.exit.line
    assert story.asked(do.CallRequeue) == []


@pytest.mark.parametrize("before", [History(stalled=9), History()])
def test_before_that_they_come_back(before: History) -> None:
    """The budget is of attempts in a row."""
    story = story_of(IN_SLURM, before)
    story.wait(61_000)
    preempted_unsaved(story)
    assert the(story.all, do.Meet)


def test_an_attempt_that_had_no_time_is_not_stopped() -> None:
    """Row 4: preempted within seconds of the start."""
    story = story_of(IN_SLURM, History(stalled=10))
    story.wait(5_000)
    preempted_unsaved(story)
    assert the(story.all, do.Meet)


def test_a_start_that_takes_longer_than_the_time_limit_is_stopped_by_the_brake() -> None:
    """No rank attaches before the limit, every time: all of its time is what an attempt can have."""
    story = Story(IN_SLURM)
    story.feed(ev.Recalled(History(stalled=10)))
    story.wait(20_000)
    story.signal()
    story.look("COMPLETING", "TimeLimit", end_in_ms=0)
    story.end(0)
    story.wait(3_000)
    assert "11 attempts in a row had their time and committed nothing new" in story.exit.line
    assert story.asked(do.CallRequeue) == []


def test_hangs_that_are_requeued_are_stopped_by_the_brake() -> None:
    """A training that hangs in its first minute in every attempt would come back for ever."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang="requeue"), History(stalled=10))
    story.feed(STALLED)
    story.end(137)
    story.wait(3_000)
    assert "11 attempts in a row had their time and committed nothing new" in story.exit.line
    assert story.asked(do.CallRequeue) == []


def test_exit_n_is_not_said_when_the_job_is_not_to_come_back() -> None:
    """--requeue exit:85 would bring it back all the same."""
    policy = dataclasses.replace(IN_SLURM, requeue="exit", requeue_exit=85, max_timeouts=0)
    story = story_of(policy)
    limit_reached(story)
    story.wait(10_000)
    assert story.exit.code == 75


# --- a requeue that Slurm refuses -----------------------------------------------------------------------------------------


def refused(policy: Policy) -> Story:
    """A preempted, saved job whose requeue Slurm refuses."""
    story = story_of(policy)
    story.signal()
    story.look(preempted_in_ms=-40, end_in_ms=30_000)
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look(preempted_in_ms=-1_000, end_in_ms=29_000)
    story.requeued(RequeueResult.REFUSED, "Requested operation is presently disabled")
    return story


def test_a_refusal_names_the_ways_out() -> None:
    """Field case 50: never a silent success."""
    story = refused(IN_SLURM)
    assert story.exit.code == 75
    assert "--requeue exit:N" in story.exit.line
    assert "--resubmit CMD" in story.exit.line


def test_the_owners_own_command_brings_it_back() -> None:
    """--resubmit: run once, and what it said is in the last line."""
    story = refused(dataclasses.replace(IN_SLURM, resubmits=True))
    assert len(story.asked(do.Resubmit)) == 1
    assert story.asked(do.Exit) == []
    story.feed(ev.Resubmitted(True, "Submitted batch job 77"))
    assert story.exit.code == 75
    assert "--resubmit has brought it back (Submitted batch job 77)" in story.exit.line


def test_a_resubmit_that_fails_is_said() -> None:
    """Nobody believes that the job comes back."""
    story = refused(dataclasses.replace(IN_SLURM, resubmits=True))
    story.feed(ev.Resubmitted(False, "status 1: sbatch: error"))
    assert "the command of --resubmit failed (status 1: sbatch: error)" in story.exit.line


# --- hangs ----------------------------------------------------------------------------------------------------------------

STALLED = ev.Stalled(0, (0,), "no progress", "no step for 400 s")


def test_by_default_a_hang_is_told_and_nothing_else() -> None:
    """--on-hang warn."""
    story = story_of(IN_SLURM)
    assert story.feed(STALLED) == ()
    assert story.state.phase is Phase.RUNNING


def test_a_hang_is_started_again_in_place_as_often_as_restarts_allow_and_then_by_the_queue() -> None:
    """--on-hang restart --restarts 1."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang="restart", restarts=1))
    assert the(story.feed(STALLED), do.StartCommand) == do.StartCommand(1, 0)
    story.hello(0, 1, pid=200)
    story.feed(STALLED)
    assert story.notice.cause is Cause.HUNG
    story.wait(60_000)
    assert story.asked(do.EndCommand)


def test_one_hang_that_every_task_tells_of_uses_one_start_in_place() -> None:
    """Each task looks at its own ranks: their words come seconds apart, and those after the first one are of what has ended."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang="restart", restarts=3), ranks=3)
    found = [story.feed(dataclasses.replace(STALLED, task=number, ranks=(number,))) for number in range(3)]
    assert [the(found[0], do.StartCommand).restart, *found[1:]] == [1, (), ()]
    assert (story.state.restarts, story.state.notice) == (1, None)


def test_a_hang_that_is_to_be_requeued_ends_training_and_calls_once() -> None:
    """--on-hang requeue: 76, as the older checkpoint stands."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang="requeue"))
    story.feed(STALLED)
    story.wait(1_100)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look()
    story.requeued(RequeueResult.ACCEPTED)
    story.signal()
    story.wait(30_000)
    story.feed(ev.CommandExited(137))
    assert story.exit.code == 76
    assert "training hung" in story.exit.line


def test_a_look_that_shows_its_own_requeue_does_not_make_a_failed_save_of_a_hang() -> None:
    """No save was tried: the line says that training hung, whatever Slurm says of the job by then."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang="requeue"))
    story.feed(STALLED)
    meet_and_call(story)
    story.requeued(RequeueResult.ACCEPTED)
    story.signal()
    story.look(restarts=1)
    story.feed(ev.CommandExited(137))
    assert story.notice.cause is Cause.REQUEUED
    assert story.exit.code == 76
    assert "training hung" in story.exit.line
    assert "this save did not make it" not in story.exit.line


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("how", ["restart", "requeue"])
def test_a_hang_before_the_step_that_was_agreed_gives_the_round_up_and_is_acted_upon(how: str, agreed: bool) -> None:
    """Rank 1 stands still, rank 0 waits at the step of a periodic save: without this until --save-timeout, again and again."""
    story = story_of(dataclasses.replace(IN_SLURM, on_hang=how, restarts=1), ranks=2)  # type: ignore[arg-type]
    story.signal("SIGUSR2")
    assert story.state.phase is Phase.AGREEING
    if agreed:
        for member in story.round.members:
            story.feed(wire.Ack(member.who, story.round.number, wire.Position(7, 0)))
        story.feed(wire.Arrived(who(0), story.round.number, wire.Position(7, 0)))
        assert story.state.phase is Phase.SAVING
    story.feed(STALLED)
    assert story.state.round is None
    assert story.told(wire.Abort)
    if how == "restart":
        assert the(story.all, do.StartCommand).restart == 1
    else:
        assert story.notice.cause is Cause.HUNG


def test_a_hang_in_a_round_that_is_only_told_leaves_the_round_alone() -> None:
    """--on-hang warn, the default: its own time ends it."""
    story = story_of(IN_SLURM, ranks=2)
    story.signal("SIGUSR2")
    assert story.feed(STALLED) == ()
    assert story.state.round is not None


def test_nothing_is_done_about_a_hang_while_a_notice_is_in_force() -> None:
    """The way out goes its way."""
    story = story_of(dataclasses.replace(LOCAL, on_hang="requeue", restarts=3))
    story.signal()
    assert story.feed(STALLED) == ()


def test_a_task_that_hangs_is_named_and_all_tasks_start_again() -> None:
    """Two tasks: one start for both."""
    story = Story(dataclasses.replace(IN_SLURM, tasks=2, on_hang="restart", restarts=1))
    story.feed(wire.Hello(who(0), wire.VERSION, 2, 0, False))
    story.feed(wire.Hello(who(1, task=1), wire.VERSION, 2, 1, False))
    found = story.feed(dataclasses.replace(STALLED, task=1, ranks=(1,)))
    assert the(found, do.StartCommand).restart == 1
