"""What an interruption comes to, case by case, as the machine alone decides it: from the signal to the exit status.

The same cases run on real Slurm in tests/slurm. Here every answer of Slurm, ranks and disk is given by hand, so that what is
decided on which answer can be said to the millisecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import leaving, parting
from ckpt_supervisor.core.events import RequeueResult
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import FILE, IN_SLURM, LOCAL, Story, none_of, the, who

RESUMED = dataclasses.replace(IN_SLURM, resume_step=5, resume_from="/ckpt/step-000000005")
GRACE_MS = 20_000


def preempted(ranks: int = 2, policy: object = RESUMED) -> Story:
    """A job in its grace: the TERM has come, and the look has said why."""
    story = Story(policy, ranks)  # type: ignore[arg-type]
    story.signal()
    grace(story)
    return story


def grace(story: Story) -> tuple[do.Command, ...]:
    """The look comes back: preempted, the grace ends 20 s after the first signal."""
    spent_ms = story.now + 30 - story.notice.first_ms
    return story.look(preempted_in_ms=-spent_ms, end_in_ms=GRACE_MS - spent_ms)


def call(story: Story) -> None:
    """From the end of training to the requeue call: the other steps are ready, and the job is still in its grace."""
    assert the(story.all, do.Meet)
    story.feed(ev.Met(True, ""))
    assert story.state.looking
    while story.state.looking:
        grace(story)  # Twice where a signal came during the first one.
    assert the(story.all, do.CallRequeue)


def order(story: Story, *kinds: type) -> list[str]:
    """Names of the commands and words of these kinds, in the order of their first appearance."""
    names = [type(command.word if isinstance(command, do.Say) else command) for command in story.all]
    return [kind.__name__ for kind in sorted(kinds, key=names.index)]


def check_requeued(story: Story, code: int) -> None:
    """One requeue was called, after the way out began, and the job comes back; the supervisor left with this status."""
    assert len(story.asked(do.CallRequeue)) == 1
    assert story.exit.code == code
    assert "Slurm has accepted the requeue" in story.exit.line


def check_not_requeued(story: Story, code: int) -> None:
    """Nothing was called."""
    assert story.asked(do.CallRequeue) == []
    assert story.exit.code == code


# --- rows 1 and 2: preempted ----------------------------------------------------------------------------------------------


def test_a_preempted_job_saves_commits_leaves_requeues_and_exits_in_this_order() -> None:
    """Row 1, field cases 39 and 40: the requeue comes last, and exit 75 after it is accepted and its TERM has come."""
    story = preempted()
    story.agree(7)
    story.write(7, save_ms=3_000, after_ms=1_500)
    story.commit(7)
    committed_ms = story.now
    assert story.told(wire.Leave, 100) == [wire.Leave(1)] == story.told(wire.Leave, 101)
    story.end(0)
    call(story)
    story.requeued()
    assert story.asked(do.Exit) == []
    story.signal()
    assert order(story, do.Exit, do.CallRequeue, do.Meet, wire.Leave, do.Commit, do.Verify, wire.Go, wire.Prepare) == [
        "Prepare", "Go", "Verify", "Commit", "Leave", "Meet", "CallRequeue", "Exit",
    ]  # fmt: skip
    check_requeued(story, 75)
    assert "step 7 is committed" in story.exit.line
    assert story.now - committed_ms < 500
    partial = "/ckpt/.partial-step-000000007-4-1"
    assert the(story.all, do.Commit) == do.Commit(1, partial, 7, 2, (0, 1), "preempted", "full", 3_020)


def test_nobody_leaves_before_the_requeues_sigterm_has_come() -> None:
    """It follows the accepted requeue by 40 ms; without it the supervisor stays 3 s, and not longer."""
    story = preempted()
    story.save()
    story.end(0)
    call(story)
    accepted_ms = story.now + 10
    story.requeued()
    story.wait(leaving.TERM_MS - 1)
    assert story.asked(do.Exit) == []
    story.wait(1)
    assert story.now == accepted_ms + leaving.TERM_MS
    check_requeued(story, 75)


@pytest.mark.parametrize("code", [0, 1, 137, 139])
def test_the_status_of_training_changes_nothing_once_it_was_told_to_leave(code: int) -> None:
    """Row 2, field case 61: a rank that exits 0, fails or crashes after Leave was interrupted all the same."""
    story = preempted()
    story.save()
    story.end(code, left=False)
    call(story)
    story.requeued()
    story.signal()
    check_requeued(story, 75)


def test_training_that_does_not_end_is_ended_and_does_not_hold_up_the_requeue() -> None:
    """Row 2: the requeue is asked for beside it after a second; a rank that says that it goes on gets 1.5 s in all."""
    story = preempted()
    story.save()
    left_ms = story.now
    story.feed(wire.Left(who(0), 1, again=False))
    story.feed(wire.Left(who(0), 1, again=True))
    found = story.wait(1_000)
    assert the(found, do.Meet)
    assert none_of(found, do.EndCommand)
    call(story)
    ended = story.wait(parting.IGNORED_MS)
    assert the(ended, do.EndCommand)
    assert len(story.asked(do.AskCommand)) == 1
    assert story.now - left_ms < 3_500
    story.feed(ev.CommandExited(137))
    story.requeued()
    story.signal()
    check_requeued(story, 75)


def test_training_that_cannot_be_killed_does_not_hold_the_supervisor() -> None:
    """A process in uninterruptible sleep is left behind 2 s after its SIGKILL."""
    story = preempted()
    story.save()
    story.wait(1_000)
    call(story)
    story.requeued()
    story.signal()
    found = story.wait(30_000)
    assert [type(command) for command in found if not isinstance(command, do.Say)] == [do.AskCommand, do.EndCommand, do.Exit]
    check_requeued(story, 75)


# --- rows 3, 5 and 7: the end has begun already ------------------------------------------------------------------------------


def requeued_look(story: Story) -> None:
    """Somebody, or Slurm itself, has requeued the job: Restarts is one more."""
    story.look("COMPLETING", restarts=1, end_in_ms=None)


def test_a_job_that_is_requeued_already_saves_within_kill_wait_and_is_not_requeued_again() -> None:
    """Rows 3 and 7: no grace, or `scontrol requeue` by somebody else."""
    story = Story(RESUMED, ranks=2)
    story.signal()
    signalled_ms = story.now
    requeued_look(story)
    assert story.notice.cause is Cause.REQUEUED
    assert story.notice.kill_at_ms == signalled_ms + RESUMED.kill_wait_ms
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    requeued_look(story)
    check_not_requeued(story, 75)
    assert "the job comes back by itself" in story.exit.line


def test_without_grace_a_save_that_does_not_make_it_leaves_the_older_checkpoint_before_the_kill() -> None:
    """Row 3: within KillWait either a commit or the older one, and out before the SIGKILL."""
    story = Story(RESUMED, ranks=2)
    story.signal()
    kill_ms = story.now + RESUMED.kill_wait_ms
    requeued_look(story)
    story.agree()
    while story.asked(do.EndCommand) == []:
        story.wait(1_000)
    story.feed(ev.CommandExited(137))
    story.feed(ev.Met(True, ""))
    requeued_look(story)
    assert story.now < kill_ms - 500
    check_not_requeued(story, 76)
    assert "step-000000005 stands" in story.exit.line


def test_at_the_time_limit_the_save_has_kill_wait_and_the_job_is_requeued_by_us() -> None:
    """Row 5, field case 46: SIGTERM comes twice, and Slurm itself does not bring back what has timed out."""
    story = Story(RESUMED, ranks=2)
    story.signal()
    first_ms = story.now
    story.look("COMPLETING", "TimeLimit", end_in_ms=0)
    story.signal(after_ms=1_000)
    story.look("COMPLETING", "TimeLimit", end_in_ms=-1_000)
    assert story.notice.cause is Cause.TIME_LIMIT
    assert story.notice.kill_at_ms == first_ms + RESUMED.kill_wait_ms
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    story.look("COMPLETING", "TimeLimit", end_in_ms=-2_000)
    story.requeued(RequeueResult.PENDING, "Job is pending execution")
    story.wait(leaving.TERM_MS)
    check_requeued(story, 75)
    assert len(story.asked(do.Commit)) == 1


# --- row 4: the warning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_ms", [36_000, 60_000, 96_000])
def test_a_warning_before_the_limit_saves_and_requeues_with_the_time_that_is_really_left(left_ms: int) -> None:
    """Row 4, field case 31: the warning came 2 s to 36 s early; what counts is the job's end, and never TIMEOUT."""
    story = Story(dataclasses.replace(RESUMED, lead_ms=30_000), ranks=2)
    story.signal("SIGUSR1")
    story.look(end_in_ms=left_ms)
    assert story.notice.cause is Cause.LIMIT_AHEAD
    assert story.kill_in_ms == left_ms + RESUMED.kill_wait_ms
    limit_ms = story.now + left_ms
    story.save()
    assert story.told(wire.Leave)
    story.end(0)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look(end_in_ms=limit_ms - story.now)
    story.requeued()
    story.signal()
    check_requeued(story, 75)
    assert story.now < limit_ms


# --- row 6: cancelled --------------------------------------------------------------------------------------------------------


def cancelled(story: Story) -> None:
    """A person's scancel, as the job shows it; a job that was in its grace keeps its PreemptTime."""
    story.look("COMPLETING", end_in_ms=0, preempted_in_ms=-9_000 if story.state.notice and story.notice.preempt_ms else None)


def test_a_cancelled_job_saves_and_exits_143_and_is_never_requeued() -> None:
    """Row 6, field case 45."""
    story = Story(RESUMED, ranks=2)
    story.signal()
    cancelled(story)
    story.save()
    story.end(0)
    story.wait(5_000)
    check_not_requeued(story, 143)
    assert story.asked(do.Meet) == []
    assert "step 7 is committed" in story.exit.line


def test_a_cancelled_job_whose_save_does_not_make_it_is_cancelled_too() -> None:
    """Saved if there is time; 143 either way."""
    story = Story(RESUMED, ranks=2)
    story.signal()
    cancelled(story)
    story.agree()
    story.feed(wire.Failed(who(1), story.round.number, "disk full"))
    story.end(1)
    story.wait(25_000)
    check_not_requeued(story, 143)


@pytest.mark.parametrize("when", ["agreeing", "saving", "committed", "leaving", "meeting", "looking"])
def test_a_job_that_is_cancelled_after_its_preemption_is_not_revived(when: str) -> None:
    """Row 6: the look right before the call, and one after every further signal, see the scancel wherever it comes."""
    story = preempted()
    parts: list[tuple[str, Callable[[], object]]] = [
        ("agreeing", story.agree),
        ("saving", story.write),
        ("committed", story.commit),
        ("leaving", lambda: story.end(0)),
        ("meeting", lambda: story.feed(ev.Met(True, ""))),
        ("looking", lambda: cancelled(story)),
    ]
    for name, part in parts:
        if name == when and when != "looking":
            story.signal()
            cancelled(story)
        if story.state.phase is not Phase.DONE:
            part()
    story.wait(5_000)
    check_not_requeued(story, 143)


def test_a_scancel_in_the_grace_brings_the_kill_nearer() -> None:
    """KillWait from its SIGTERM is all that is left, whatever was left of the grace; a later look never moves it away again."""
    story = preempted()
    far_ms = story.notice.kill_at_ms
    story.signal(after_ms=2_000)
    cancelled_ms = story.now
    cancelled(story)
    assert story.notice.kill_at_ms == min(far_ms, cancelled_ms + RESUMED.kill_wait_ms) < far_ms
    story.signal()
    cancelled(story)
    assert story.notice.kill_at_ms <= cancelled_ms + RESUMED.kill_wait_ms


# --- rows 9 and 10: signals during and without a save -----------------------------------------------------------------------


def test_the_save_signal_saves_and_training_goes_on() -> None:
    """Row 9, field case 26: committed, released, pruned; no notice, no way out, and the next one works the same."""
    story = Story(RESUMED, ranks=2)
    for number, n in ((1, 7), (2, 9)):
        story.signal("SIGUSR2")
        story.agree(n)
        story.write(n)
        found = story.commit(n)
        assert [say.word for say in found if isinstance(say, do.Say)] == [wire.Abort(number, "committed, go on")] * 2
        assert the(found, do.Prune)
        assert story.state.phase is Phase.RUNNING
    assert story.state.notice is None
    assert [commit.cause for commit in story.asked(do.Commit)] == ["save and go on"] * 2
    assert none_of(story.all, do.Meet, do.CallRequeue, do.Exit, do.EndCommand)


@pytest.mark.parametrize("when", ["agreeing", "saving", "verifying", "committing"])
def test_any_number_of_signals_during_one_save_makes_one_save_one_commit_one_requeue(when: str) -> None:
    """Row 10, field case 34: TERM, TERM, USR1, TERM; later ones only shorten the deadline."""
    story = preempted()

    def storm(now: str) -> None:
        if now == when:
            for name in ("SIGTERM", "SIGUSR1", "SIGTERM"):
                before_ms = story.notice.kill_at_ms
                story.signal(name)
                grace(story)
                assert story.notice.kill_at_ms <= before_ms

    storm("agreeing")
    story.agree()
    storm("saving")
    story.write()
    storm("verifying")
    number = story.round.number
    story.feed(ev.Verified(number, "full", "", 1_000))
    storm("committing")
    story.feed(ev.Committed(number, 7, ev.CommitResult.COMMITTED, ""))
    story.end(0)
    call(story)
    story.requeued()
    story.signal()
    check_requeued(story, 75)
    assert len(story.asked(do.Verify)) == len(story.asked(do.Commit)) == 1
    assert set(story.told(wire.Go, 100)) == {wire.Go(1, "leave")}


# --- rows 11 and 12: nobody who could save, or somebody who does not -----------------------------------------------------------


def leave_stale(story: Story) -> None:
    """The rest of the way, with the requeue accepted; it was all over before the kill."""
    if not story.asked(do.Meet):
        story.wait(1_000)
    call(story)
    story.requeued()
    story.signal()
    assert story.now < story.notice.kill_at_ms - 500
    check_requeued(story, 76)
    assert "step-000000005 stands" in story.exit.line


def test_a_notice_before_any_rank_has_attached_does_not_wait_out_the_budget() -> None:
    """Row 11: there is nobody to ask for a save, so the command is told to end at once; the older checkpoint stands."""
    story = Story(RESUMED)
    story.signal()
    story.feed(ev.Tick(), 1)
    assert the(story.all, do.AskCommand)
    story.feed(ev.CommandExited(143))
    leave_stale(story)
    assert "no rank had attached yet" in story.exit.line
    assert story.now < 1_500


def test_without_a_checkpoint_the_line_says_that_there_is_none() -> None:
    """Nothing stands: the next run starts from scratch, and the user is told."""
    story = Story(LOCAL)
    story.signal()
    story.wait(10)
    story.feed(ev.CommandExited(143))
    assert story.exit.code == 76
    assert "there is no checkpoint" in story.exit.line
    assert story.exit.line.endswith("start the same command again")


def test_a_rank_that_is_killed_in_mid_save_is_named_and_not_waited_for() -> None:
    """Row 12: its pidfd tells at once."""
    story = preempted()
    story.agree()
    story.feed(wire.Saving(who(0), 1))
    found = story.gone(1)
    assert story.told(wire.Abort, 100)
    assert the(found, do.DropPartial) == do.DropPartial("/ckpt/.partial-step-000000007-4-1")
    story.end(1)
    leave_stale(story)
    assert "rank 1 (pid 101) gone: its process has ended" in story.exit.line


def test_a_save_that_raises_is_tried_once_more_and_then_named() -> None:
    """Row 12: with time left a second try is made, in a directory of its own; a third is not."""
    story = preempted()
    for number in (1, 2):
        assert story.round.number == number
        story.agree()
        story.feed(wire.Saved(who(0), number, 7, (FILE,), 10))
        story.feed(wire.Failed(who(1), number, "OSError: disk full"))
    assert [drop.partial for drop in story.asked(do.DropPartial)] == [
        "/ckpt/.partial-step-000000007-4-1", "/ckpt/.partial-step-000000007-4-2",
    ]  # fmt: skip
    assert story.told(wire.Leave, 100)
    story.end(0)
    leave_stale(story)
    assert "rank 1 (pid 101) failed: OSError: disk full" in story.exit.line


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hung"])
def test_a_rank_that_is_stopped_or_whose_save_hangs_is_named_and_everybody_is_out_before_the_kill(*, stopped: bool) -> None:
    """Row 12: whether it says nothing at all or says for ever that it is saving, the time for the save ends."""
    story = preempted()
    story.agree()
    story.feed(wire.Saved(who(0), 1, 7, (FILE,), 10))
    while story.state.phase is Phase.SAVING:
        story.wait(1_000)
        if not stopped:
            story.feed(wire.Saving(who(1), 1))
    assert story.kill_in_ms > 5_000
    assert story.state.leaving is not None
    while not story.asked(do.EndCommand):
        story.wait(500)
    story.feed(ev.CommandExited(137))
    leave_stale(story)
    assert "rank 1 (pid 101)" in story.exit.line


def test_files_that_are_not_intact_are_not_committed() -> None:
    """Verification says no: tried once more, then the older one stands, and nothing of this round was ever committed."""
    story = preempted()
    for number in (1, 2):
        story.agree()
        story.write()
        story.feed(ev.Verified(number, "full", "truncated: state.pt", 5))
    assert story.asked(do.Commit) == []
    story.end(0)
    leave_stale(story)
    assert "verification: truncated: state.pt" in story.exit.line


# --- row 15: not interrupted at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 77, 126, 127, 139])
@pytest.mark.parametrize("ranks", [0, 2])
def test_training_that_ends_by_itself_keeps_its_own_status(code: int, ranks: int) -> None:
    """Row 15: whether or not it attached; no requeue, and one line."""
    story = Story(RESUMED, ranks)
    for rank in range(ranks):
        story.feed(wire.Finished(who(rank), wire.NO_ROUND) if code == 0 else ev.RankGone(who(rank), "x"))
    story.feed(ev.CommandExited(code))
    check_not_requeued(story, code)
    assert ("failed" in story.exit.line) == (code != 0)


def test_a_crash_during_a_periodic_save_is_a_crash() -> None:
    """The round is given up, its directory removed, and the status is the command's."""
    story = Story(RESUMED, ranks=2)
    story.signal("SIGUSR2")
    story.agree()
    story.gone(0)
    found = story.feed(ev.CommandExited(139))
    assert the(found, do.Exit).code == 139
    assert the(story.all, do.DropPartial)


def test_a_failing_command_is_started_again_in_place_as_often_as_told_and_not_when_interrupted() -> None:
    """--restarts 2: status 1 twice, then it is passed on; after a notice never."""
    story = Story(dataclasses.replace(LOCAL, restarts=2), ranks=1)
    for restart in (1, 2):
        assert the(story.feed(ev.CommandExited(1)), do.StartCommand) == do.StartCommand(restart, (restart - 1) * 1_000)
    story.feed(ev.CommandExited(1))
    assert story.exit.code == 1
    told = Story(dataclasses.replace(LOCAL, restarts=2), ranks=1)
    told.signal()
    told.feed(wire.Ack(who(0), 1, Position(7, 0)))
    told.feed(ev.CommandExited(1))
    assert told.asked(do.StartCommand) == []
    assert told.exit.code == 76
