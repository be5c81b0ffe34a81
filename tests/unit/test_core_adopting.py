"""Programs that save by themselves, as the machine sees them: --adopt and --pass-signal (design section 7, exit table)."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_supervisor.core import between, describe, machine, relay
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.adopting import CLOSE_LEAST_MS, CLOSE_MS, LOOK_EVERY_MS
from ckpt_supervisor.core.policy import EXIT_CANCELLED, EXIT_INTERRUPTED, EXIT_STALE, NOT_LOOKED
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the

ADOPTS = dataclasses.replace(LOCAL, adopts=True)
PASSES = dataclasses.replace(LOCAL, adopts=True, passes="SIGTERM")
IN_JOB = dataclasses.replace(IN_SLURM, adopts=True, passes="SIGTERM")


def found(story: Story, *steps: int, problem: str = "", after_ms: int = 10) -> tuple[do.Command, ...]:
    """The look that was asked for last comes back."""
    return story.feed(ev.Adopted(steps, problem, story.asked(do.Adopt)[-1].final), after_ms)


# --- while the program runs -------------------------------------------------------------------------------------------------


def test_what_the_program_writes_is_looked_for_again_and_again() -> None:
    """One look at a time, each some seconds after the one before; without --adopt there is none."""
    story = Story(ADOPTS)
    story.wait(LOOK_EVERY_MS)
    assert story.asked(do.Adopt) == [do.Adopt(False)]
    story.wait(10 * LOOK_EVERY_MS)
    assert len(story.asked(do.Adopt)) == 1
    assert the(found(story, 500), do.Prune)
    assert (story.state.committed_step, story.state.committed_here) == (500, True)
    story.wait(LOOK_EVERY_MS)
    assert len(story.asked(do.Adopt)) == 2
    assert none_of(found(story), do.Prune)
    plain = Story(LOCAL)
    plain.wait(10 * LOOK_EVERY_MS)
    assert plain.asked(do.Adopt) == []


def test_training_that_ends_by_itself_is_looked_at_once_more_before_the_end() -> None:
    """What it wrote last is kept too; its own status counts."""
    story = Story(ADOPTS)
    assert story.feed(ev.CommandExited(0)) == (do.Adopt(True),)
    assert story.state.phase is Phase.RUNNING
    found(story, 900)
    assert story.exit.code == 0
    assert story.state.committed_step == 900


def test_a_look_that_is_under_way_at_the_end_is_followed_by_the_last_one() -> None:
    """The one that had begun while the program ran leaves out what was still being written."""
    story = Story(ADOPTS)
    story.wait(LOOK_EVERY_MS)
    assert story.feed(ev.CommandExited(3)) == ()
    assert found(story) == (do.Adopt(True),)
    found(story)
    assert story.exit.code == 3


def test_a_last_look_that_hangs_ends_in_its_time() -> None:
    """A dead disk does not hold the job for ever."""
    story = Story(ADOPTS)
    story.feed(ev.CommandExited(0))
    story.wait(CLOSE_MS - 100)
    assert story.asked(do.Exit) == []
    story.wait(200)
    assert story.exit.code == 0


def test_a_command_that_is_started_again_in_place_is_looked_at_before() -> None:
    """It resumes from what it wrote last."""
    story = Story(dataclasses.replace(ADOPTS, restarts=1))
    story.feed(ev.CommandExited(9))
    assert story.asked(do.StartCommand) == []
    assert the(found(story, 7), do.StartCommand) == do.StartCommand(1)
    assert story.state.closing_ms is None
    story.feed(ev.CommandExited(9))
    found(story)
    assert story.exit.code == 9


# --- a notice -----------------------------------------------------------------------------------------------------------------


def test_a_notice_hands_the_signal_on_and_waits_for_the_end() -> None:
    """Then the last look, then the way out: 75, never the program's own 0 (a script's next line would run)."""
    story = Story(PASSES)
    assert the(story.signal(), do.PassSignal)
    assert story.state.phase is Phase.LEAVING
    assert none_of(story.wait(5_000), do.EndCommand, do.Exit)
    assert story.feed(ev.CommandExited(0)) == (do.Adopt(True),)
    assert none_of(story.wait(1_000), do.Exit)
    found(story, 123)
    assert story.exit.code == EXIT_INTERRUPTED
    assert "step 123 is committed" in story.exit.line


@pytest.mark.parametrize("code", [0, 1, 143])
def test_the_status_of_a_program_that_was_signalled_changes_nothing(code: int) -> None:
    """Frameworks leave with anything."""
    story = Story(PASSES)
    story.signal()
    story.feed(ev.CommandExited(code))
    found(story, 5)
    assert story.exit.code == EXIT_INTERRUPTED


def test_a_program_that_has_written_nothing_new_leaves_an_older_one_standing() -> None:
    """76, and the line says why."""
    story = Story(PASSES)
    story.wait(LOOK_EVERY_MS)
    found(story, 100)
    story.signal()
    story.feed(ev.CommandExited(0))
    found(story)
    assert story.exit.code == EXIT_STALE
    assert "the program has written nothing new" in story.exit.line
    assert "step-000000100 stands" in story.exit.line


def test_a_damaged_last_file_is_named() -> None:
    """The reason of the look is that of the line."""
    story = Story(PASSES)
    story.signal()
    story.feed(ev.CommandExited(0))
    found(story, problem="step_000300.pt: truncated: the archive has no end")
    assert story.exit.code == EXIT_STALE
    assert "step_000300.pt: truncated" in story.exit.line


def test_a_program_that_does_not_end_is_ended_in_time_for_the_requeue() -> None:
    """What brings the job back comes first."""
    story = Story(IN_JOB)
    story.signal()
    story.look("COMPLETING", "TimeLimit")
    asked = story.wait(story.notice.budget.leave_by_ms - story.now)
    assert the(asked, do.EndCommand)
    assert story.state.phase is Phase.REQUEUEING
    assert the(asked, do.Meet)


def test_no_requeue_is_called_while_the_program_saves_or_its_files_are_looked_at() -> None:
    """The requeue's own SIGTERM and KillWait would end both."""
    story = Story(IN_JOB)
    story.signal()
    story.look(preempted_in_ms=0, end_in_ms=60_000)
    assert none_of(story.wait(20_000), do.Meet, do.CallRequeue)
    story.feed(ev.CommandExited(0))
    assert none_of(story.wait(5_000), do.Meet, do.CallRequeue)
    found(story, 8)
    assert the(story.all, do.Meet)
    story.feed(ev.Met(True, ""))
    story.look(preempted_in_ms=-30_000, end_in_ms=30_000)
    assert the(story.all, do.CallRequeue)
    story.requeued()
    story.signal()
    assert story.exit.code == EXIT_INTERRUPTED
    assert "step 8 is committed" in story.exit.line


def test_files_that_cannot_be_looked_at_in_time_do_not_hold_the_requeue() -> None:
    """The next start looks again; the line says so."""
    story = Story(IN_JOB)
    story.signal()
    story.look("COMPLETING", "TimeLimit")
    story.feed(ev.CommandExited(0))
    story.wait(story.notice.budget.leave_by_ms - story.now)
    assert story.state.phase is Phase.REQUEUEING
    story.feed(ev.Met(True, ""))
    story.look("COMPLETING", "TimeLimit")
    story.requeued()
    story.signal()
    assert story.exit.code == EXIT_STALE
    assert "the next start does it" in story.exit.line


def test_a_cancelled_job_is_adopted_and_not_requeued() -> None:
    """143, as for any other."""
    story = Story(IN_JOB)
    story.signal()
    story.look("COMPLETING", "None")
    story.feed(ev.CommandExited(0))
    found(story, 4)
    assert story.exit.code == EXIT_CANCELLED
    assert story.asked(do.CallRequeue) == []
    assert "step 4 is committed" in story.exit.line


def test_a_program_that_slurms_own_broadcast_has_ended_counts_as_interrupted() -> None:
    """Its end may be seen a moment before the supervisor's own signal is."""
    story = Story(IN_JOB)
    assert story.feed(ev.CommandExited(0)) == (do.Adopt(True),)
    found(story, 6, after_ms=CLOSE_LEAST_MS // 2)
    assert story.asked(do.Exit) == []
    story.signal(after_ms=50)
    assert story.state.phase is Phase.LEAVING
    assert story.asked(do.PassSignal) == []
    story.look("COMPLETING", "TimeLimit")
    found(story, after_ms=50)
    assert the(story.all, do.Meet)


def test_a_program_that_saves_at_a_rehearsed_notice_and_ends_is_interrupted() -> None:
    """The look that tells a rehearsal is still out when it ends: it has had the signal, so its end is the answer."""
    story = Story(dataclasses.replace(IN_JOB, passes="SIGUSR1"))
    story.signal("SIGUSR1")
    assert story.state.phase is Phase.RUNNING
    assert story.feed(ev.CommandExited(0)) == (do.Adopt(True),)
    assert story.state.phase is Phase.LEAVING
    found(story, 11)
    assert story.asked(do.Exit) == []


def test_a_grace_that_a_look_finds_to_be_longer_is_the_programs_to_save_in() -> None:
    """The first guess is KillWait from the signal; a program that saves for longer than that is not ended for it."""
    story = Story(IN_JOB)
    story.signal()
    story.look(preempted_in_ms=0, end_in_ms=300_000)
    assert none_of(story.wait(200_000), do.EndCommand, do.Meet)
    story.feed(ev.CommandExited(0))
    found(story, 8)
    assert story.state.committed_step == 8
    assert the(story.all, do.Meet)


def test_a_kill_that_comes_nearer_ends_a_program_that_still_saves_sooner() -> None:
    """A scancel in the grace: KillWait is what is left."""
    story = Story(IN_JOB)
    story.signal()
    story.look(preempted_in_ms=0, end_in_ms=300_000)
    story.wait(10_000)
    story.signal()
    story.look("COMPLETING")
    assert the(story.wait(story.policy.kill_wait_ms), do.EndCommand)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_ended_well_before_a_notice_has_ended_by_itself(code: int) -> None:
    """Its last files are still being copied when the time limit's end comes near: a finished job is not requeued for that."""
    story = Story(IN_JOB)
    assert story.feed(ev.CommandExited(code)) == (do.Adopt(True),)
    story.wait(CLOSE_LEAST_MS + 100)
    story.signal()
    assert story.state.phase is Phase.RUNNING
    found(story, 900)
    assert story.exit.code == code
    assert none_of(story.all, do.Meet, do.PassSignal)


def test_a_last_look_after_the_end_is_given_up_for_a_notice_in_its_time() -> None:
    """And at once for a person's second ctrl-C."""
    story = Story(PASSES)
    story.feed(ev.CommandExited(0))
    story.wait(CLOSE_LEAST_MS + 100)
    story.signal("SIGINT")
    assert story.asked(do.Exit) == []
    story.signal("SIGINT")
    assert story.exit.code == 0


def test_a_notice_before_the_command_was_started_waits_for_nobody() -> None:
    """Nothing runs that could save: the node is not held for the whole grace."""
    story = Story(dataclasses.replace(PASSES, resume_step=NOT_LOOKED))
    asked = story.signal()
    assert none_of(asked, do.PassSignal)
    assert the([*asked, *story.wait(1_000)], do.EndCommand)
    story.feed(ev.CommandExited(137))
    assert story.exit.code == EXIT_STALE


def test_a_second_ctrl_c_does_not_wait_for_the_last_look() -> None:
    """A copy that takes its time is the next start's."""
    story = Story(PASSES)
    story.signal("SIGINT")
    story.feed(ev.CommandExited(0))
    assert story.asked(do.Adopt) == [do.Adopt(True)]
    story.signal("SIGINT")
    assert story.exit.code == EXIT_STALE
    assert "the next start does it" in story.exit.line


def test_the_crash_of_one_of_several_tasks_takes_nothing_for_whole_that_others_still_write() -> None:
    """Their commands run on until the step's end: what is there is looked at by the next start."""
    policy = dataclasses.replace(ADOPTS, tasks=2)
    story = Story(policy)
    story.feed(between.Report(1, between.VERSION, policy.epoch, "b", 77, restart=0))
    story.feed(ev.CommandExited(9, task=1))
    assert story.asked(do.Adopt) == []
    assert story.exit.code == 9


def test_a_step_that_is_a_checkpoint_already_and_was_written_again_counts() -> None:
    """The handler saves the step that the last periodic save had: nothing is newer, and nothing is lost."""
    story = Story(PASSES)
    story.wait(LOOK_EVERY_MS)
    found(story, 100)
    story.signal()
    story.feed(ev.CommandExited(0))
    story.feed(ev.Adopted((), "", True, again=100))
    assert story.exit.code == EXIT_INTERRUPTED
    assert "step 100 is committed" in story.exit.line


def test_a_second_ctrl_c_ends_a_program_that_still_saves() -> None:
    """Without Slurm a person has the last word."""
    story = Story(PASSES)
    story.signal("SIGINT")
    assert the(story.signal("SIGINT"), do.EndCommand)


def test_ranks_that_are_attached_are_asked_as_ever() -> None:
    """A program with our client in it saves in a round, whatever --pass-signal says."""
    story = Story(PASSES, ranks=1)
    story.signal()
    assert story.asked(do.PassSignal) == []
    assert story.state.phase is Phase.AGREEING


def test_without_pass_signal_a_notice_ends_the_program_and_an_older_one_stands() -> None:
    """--adopt alone takes what was there; nobody can be asked for more."""
    story = Story(ADOPTS)
    story.wait(LOOK_EVERY_MS)
    found(story, 40)
    assert the(story.signal(), do.AskCommand)
    story.feed(ev.CommandExited(143))
    assert story.exit.code == EXIT_STALE
    assert "step-000000040 stands" in story.exit.line


# --- several tasks ------------------------------------------------------------------------------------------------------------


def test_the_other_tasks_hear_that_the_signal_is_to_be_handed_on() -> None:
    """Each supervisor signals what is below it, once for each start of its command."""
    policy = dataclasses.replace(PASSES, tasks=2)
    story = Story(policy)
    story.feed(between.Report(1, between.VERSION, policy.epoch, "b", 77, restart=0))
    story.signal()
    assert story.asked(do.Announce)[-1].stand.passed
    follower = relay.start(1, policy.epoch, "b", 77, 0)
    follower, commands = relay.step(policy, follower, between.Stand(policy.epoch, restart=0), 10)
    assert the(commands, do.StartCommand)
    told = between.Stand(policy.epoch, restart=0, passed=True, left_ms=9_000)
    follower, commands = relay.step(policy, follower, told, 20)
    assert the(commands, do.PassSignal)
    _, commands = relay.step(policy, follower, told, 30)
    assert none_of(commands, do.PassSignal)


def test_the_last_look_waits_for_the_commands_of_all_tasks() -> None:
    """A shard that another task is still writing is not there yet."""
    policy = dataclasses.replace(PASSES, tasks=2)
    story = Story(policy)
    story.feed(between.Report(1, between.VERSION, policy.epoch, "b", 77, restart=0))
    story.signal()
    story.feed(ev.CommandExited(0))
    assert story.asked(do.Adopt) == []
    story.feed(ev.CommandExited(0, task=1))
    assert story.asked(do.Adopt) == [do.Adopt(True)]


def test_an_heir_says_that_nobody_looks_at_what_the_program_wrote() -> None:
    """It ended in its time; only the coordinator could have made a checkpoint of its files."""
    policy = dataclasses.replace(IN_JOB, heir=1, can_look=False)
    follower = relay.start(1, policy.epoch, "b", 77, 0)
    follower, _ = relay.step(policy, follower, between.Stand(policy.epoch, restart=0), 10)
    heir, _ = relay.inherit(policy, follower, 5_000)
    heir, commands = machine.step(policy, heir, ev.SignalCame("SIGTERM", ev.Meaning.LEAVE), 5_010)
    assert the(commands, do.PassSignal)
    before = heir
    heir, commands = machine.step(policy, heir, ev.CommandExited(0), 6_000)
    assert heir.leaving is not None
    assert "the next start" in heir.leaving.reason
    told = describe.describe(ev.CommandExited(0), before, heir, commands, 6_000)
    assert [entry.fields["outcome"] for entry in told if entry.event == "leaving"] == ["stale"]


def test_an_heir_whose_command_was_never_started_leaves_at_once() -> None:
    """There is nobody to signal and nobody to wait for."""
    policy = dataclasses.replace(IN_JOB, heir=1, can_look=False)
    follower = relay.start(1, policy.epoch, "b", 77, 0)
    heir, _ = relay.inherit(policy, follower, 5_000)
    heir, commands = machine.step(policy, heir, ev.SignalCame("SIGTERM", ev.Meaning.LEAVE), 5_010)
    assert none_of(commands, do.PassSignal)
    assert heir.leaving is not None
    assert heir.leaving.end_command_at_ms <= 5_010


# --- the journal --------------------------------------------------------------------------------------------------------------


def test_the_journal_tells_what_became_of_it_once_it_is_known() -> None:
    """`leaving` comes when the last look is over: the next start reads its outcome."""
    story = Story(PASSES)
    entries: list[describe.Entry] = []
    for event in (ev.SignalCame("SIGTERM", ev.Meaning.LEAVE), ev.CommandExited(0), ev.Adopted((5,), "", True)):
        before = story.state
        commands = story.feed(event)
        entries += describe.describe(event, before, story.state, commands, story.now)
    told = [(entry.event, entry.fields.get("outcome")) for entry in entries if entry.event in ("leaving", "adopted", "exit")]
    assert told == [("adopted", None), ("leaving", "fresh"), ("exit", None)]
