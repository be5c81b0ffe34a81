"""A step of several supervisors, as its coordinator decides: who is there, what they tell, and who is lost."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile
from ckpt_supervisor.core import between, masked, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.between import Report
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, Story, none_of, the, who

STEP = dataclasses.replace(IN_SLURM, tasks=3)
SAVES = dataclasses.replace(STEP, every_steps=5)
AGAIN = dataclasses.replace(STEP, restarts=2)


def report(
    task: int,
    *,
    signals: int = 0,
    restart: int = 0,
    code: int | None = None,
    gone: tuple[int, ...] = (),
    pid: int = 0,
    **odd: int,
) -> Report:
    """What this task says of itself: of its signals that so many SIGTERMs came."""
    said = (("SIGTERM", "LEAVE", signals),) if signals else ()
    lost = tuple((who(rank, task=task), "its process has ended") for rank in gone)
    known = {"version": between.VERSION, "epoch": STEP.epoch, **odd}
    return Report(task, known["version"], known["epoch"], f"node{task}", pid or 500 + task, said, restart, code, lost)


class Step(Story):
    """Three tasks, one rank below each, all of them attached."""

    def __init__(self, policy: object = STEP, tasks_here: int = 3) -> None:
        super().__init__(policy)  # type: ignore[arg-type]
        for task in range(1, tasks_here):
            self.reported(report(task))
        for rank in range(tasks_here):
            self.feed(wire.Hello(who(rank, task=rank), wire.VERSION, tasks_here, 0, False), 0)

    def reported(self, word: Report, after_ms: int = 10) -> list[do.Command]:
        """One report, as the shell feeds it."""
        first = len(self.all)
        for event in tasks.unfold(self.policy, self.state, word):
            self.feed(event, after_ms)
            after_ms = 0
        return self.all[first:]

    def pass_ms(self, ms: int, silent: tuple[int, ...] = (), **said: int) -> list[do.Command]:
        """So much time, in which every other task goes on reporting."""
        first = len(self.all)
        for _ in range(ms // 500):
            self.wait(500)
            for task in range(1, 3):
                if task not in silent:
                    self.reported(report(task, **said), 0)  # type: ignore[arg-type]
        return self.all[first:]

    def written(self, n: int = 7) -> None:
        """A round up to the check: each rank has written a file of its own."""
        self.agree(n)
        for member in self.round.members:
            file = SavedFile(f"rank-{member.who.rank}", 1_000, "ab")
            self.feed(wire.Saved(member.who, self.round.number, n, (file,), 40))

    def verified(self, task: int, problem: str = "", verified: str = "full") -> tuple[do.Command, ...]:
        """A task's answer to Check."""
        return self.feed(ev.Verified(self.round.number, verified, problem, 1_000, task))

    def stands(self) -> list[between.Stand]:
        """All that was announced so far."""
        return [announced.stand for announced in self.asked(do.Announce)]


# --- who is there -----------------------------------------------------------------------------------------------------


def test_a_task_that_reports_is_told_where_the_step_stands() -> None:
    """At its first word, and only it."""
    story = Story(STEP)
    told = the(story.feed(report(1)), do.Announce)
    assert (told.tasks, told.stand.restart, told.stand.code) == ((1,), 0, None)
    assert none_of(story.feed(report(1)), do.Announce)


def test_all_tasks_are_told_again_every_second() -> None:
    """A lost frame must not take the only word of something with it."""
    story = Step()
    before = len(story.asked(do.Announce))
    story.wait(5_000)
    assert 4 <= len(story.asked(do.Announce)) - before <= 6
    assert all(announced.tasks is None for announced in story.asked(do.Announce)[before:])


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (report(1, version=9), "speaks version 9"),
        (report(1, epoch=9), "follows epoch 9"),
        (report(3), "task 3 of a step of 3 tasks"),
        (report(1, pid=7), "is taken by process 501 on node1"),
    ],
)
def test_a_task_that_cannot_take_part_is_turned_away_by_name(word: Report, why: str) -> None:
    """Another release, another attempt, a number that is not there or is taken; nothing else that it says counts."""
    story = Step()
    turned = [command for command in story.reported(word) if isinstance(command, do.TurnAway)]
    assert [why in command.reason for command in turned] == [True]
    assert story.state.notice is None


def test_a_step_of_one_task_announces_nothing() -> None:
    """Its supervisor has nobody to talk to."""
    story = Story(IN_SLURM, ranks=2)
    story.signal()
    story.save()
    story.wait(10_000)
    assert none_of(story.all, do.Announce, do.TurnAway, do.CheckAgain)


# --- signals ----------------------------------------------------------------------------------------------------------


def test_one_broadcast_that_reaches_all_tasks_is_one_signal() -> None:
    """A little apart, in whatever order."""
    story = Step()
    story.reported(report(2, signals=1))
    story.signal()
    story.reported(report(1, signals=1))
    assert story.notice.signals == 1
    assert len([look for look in story.asked(do.LookUp) if "SIGTERM" in look.why]) == 1


def test_a_second_broadcast_is_a_second_signal_and_no_more_however_many_tasks_tell_of_it() -> None:
    """Slurm ends a job with two in a row."""
    story = Step()
    story.signal()
    story.signal()
    for task in (1, 2):
        story.reported(report(task, signals=2))
    assert story.notice.signals == 2


def test_a_report_that_is_repeated_tells_of_no_new_signal() -> None:
    """All of it is absolute."""
    story = Step()
    for _ in range(3):
        story.reported(report(1, signals=1))
    assert story.notice.signals == 1


def test_the_same_signal_long_after_is_a_new_one() -> None:
    """A notice, and the end of its grace."""
    story = Step()
    story.signal()
    story.wait(tasks.BROADCAST_MS + 1_000)
    story.reported(report(1, signals=1))
    assert story.notice.signals == 2


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_task_that_is_not_heard_is_gone_and_so_are_its_ranks() -> None:
    """After 4.5 s; the others stay."""
    story = Step()
    story.pass_ms(tasks.GONE_MS + 1_000, silent=(1,))
    assert [task.gone for task in story.state.tasks] == [True, False]
    assert [rank.live for rank in story.state.ranks] == [True, False, True]


def test_a_task_that_is_heard_again_brings_its_ranks_back() -> None:
    """Its network was cut: the same process, the same ranks."""
    story = Step()
    story.pass_ms(tasks.GONE_MS + 1_000, silent=(1,))
    assert the(tuple(story.reported(report(1))), do.Announce).tasks == (1,)
    assert all(rank.live for rank in story.state.ranks)


def test_a_coordinator_that_was_stopped_itself_takes_nobody_for_gone() -> None:
    """Nobody could be heard meanwhile."""
    story = Step()
    story.feed(ev.Tick(), 20_000)
    assert not any(task.gone for task in story.state.tasks)
    story.reported(report(1))
    story.reported(report(2))
    story.pass_ms(6_000)
    assert not any(task.gone for task in story.state.tasks)


@pytest.mark.parametrize("stage", ["agreeing", "saving", "verifying"])
def test_a_round_is_given_up_when_a_task_of_it_is_lost(stage: str) -> None:
    """Before its ranks' files were verified; everybody else is released at once."""
    story = Step(SAVES)
    if stage == "verifying":
        story.signal("SIGUSR2")
        story.written()
        story.verified(0)
        story.verified(2)
    elif stage == "saving":
        story.signal("SIGUSR2")
        story.agree()
    else:
        story.signal("SIGUSR2")
    number = story.round.number
    story.pass_ms(tasks.GONE_MS + 1_000, silent=(1,))
    assert story.state.round is None
    assert {say.pid for say in story.asked(do.Say) if say.word == wire.Abort(number, getattr(say.word, "reason", ""))} >= {
        100,
        102,
    }


def test_a_round_whose_files_that_task_has_verified_is_committed_all_the_same() -> None:
    """What becomes of a task after its answer does not matter to the checkpoint."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    story.verified(1)
    story.pass_ms(tasks.GONE_MS + 1_000, silent=(1,))
    story.verified(0)
    assert the(story.verified(2), do.Commit).ranks == (0, 1, 2)


def test_a_killed_task_ends_training_as_a_killed_rank_does() -> None:
    """Its connection was closed, and it has not come back."""
    story = Step()
    story.feed(ev.TaskCut(1))
    story.pass_ms(tasks.DIED_MS + 1_000, silent=(1,))
    assert story.exit.code == tasks.EXIT_KILLED


def test_a_connection_that_is_made_again_at_once_costs_nothing() -> None:
    """libzmq does so by itself."""
    story = Step()
    story.feed(ev.TaskCut(1))
    story.pass_ms(tasks.DIED_MS + 2_000)
    assert story.state.phase is Phase.RUNNING
    assert all(rank.live for rank in story.state.ranks)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_training_has_ended_when_the_commands_of_all_tasks_have() -> None:
    """They end at different times."""
    story = Step()
    story.feed(ev.CommandExited(0))
    story.reported(report(2, code=0))
    assert story.state.phase is Phase.RUNNING
    story.reported(report(1, code=0))
    story.wait(masked.SETTLE_TASKS_MS)  # No rank has said that its training is over.
    assert story.exit.code == 0
    assert story.stands()[-1].code == 0


def test_the_failure_of_one_tasks_command_ends_training() -> None:
    """The others would wait for it in a collective."""
    story = Step()
    story.reported(report(2, code=77))
    assert (story.exit.code, story.stands()[-1].code) == (77, 77)


def test_all_commands_are_started_again_together_and_an_exit_status_of_the_start_before_is_not_believed() -> None:
    """A report may be late."""
    story = Step(AGAIN)
    assert the(tuple(story.reported(report(2, code=77))), do.StartCommand).restart == 1
    assert story.stands()[-1].restart == -1
    for _ in range(3):
        assert none_of(tuple(story.reported(report(2, code=77))), do.StartCommand, do.Exit)


def test_who_was_told_to_leave_is_not_taken_for_a_failure() -> None:
    """The exit statuses of commands that end on the way out change nothing."""
    story = Step()
    story.signal()
    story.look(preempted_in_ms=0, end_in_ms=30_000)
    story.written()
    for task in range(3):
        story.verified(task)
    story.feed(ev.Committed(story.round.number, 7, ev.CommitResult.COMMITTED, ""))
    assert story.state.phase is Phase.LEAVING
    story.reported(report(1, code=143))
    assert none_of(story.all, do.Exit)
    assert story.stands()[-1].fresh


# --- verification -----------------------------------------------------------------------------------------------------


def test_each_task_verifies_what_its_own_ranks_wrote() -> None:
    """And nobody reads a byte twice."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    (verify,) = story.asked(do.Verify)
    assert [(rank, file.path) for rank, file in verify.files] == [(0, "rank-0")]
    found = [(share.task, share.pids, share.files[0][1].path) for share in verify.shares]
    assert found == [
        (1, (101,), "rank-1"),
        (2, (102,), "rank-2"),
    ]


def test_nothing_is_committed_before_every_task_has_answered() -> None:
    """In any order, and each answer counts once."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    for task in (2, 2, 0, 0):
        assert none_of(story.verified(task), do.Commit)
    assert the(story.verified(1), do.Commit).verified == "full"


def test_one_share_that_was_checked_by_structure_alone_counts_for_all() -> None:
    """A checkpoint is verified as well as its least verified file."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    story.verified(0)
    story.verified(2, verified="structure")
    assert the(story.verified(1), do.Commit).verified == "structure"


def test_a_share_that_is_not_intact_fails_the_round_by_name() -> None:
    """Of which task's ranks it is."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    story.verified(2, "rank-2 is truncated")
    assert story.state.given_up is not None
    assert story.state.given_up.reason == "verification of task 2's ranks: rank-2 is truncated"


def test_tasks_that_have_not_answered_are_asked_again_every_second() -> None:
    """The question or its answer may be lost; who has answered is not asked."""
    story = Step()
    story.signal("SIGUSR2")
    story.written()
    story.verified(0)
    story.verified(1)
    story.pass_ms(3_500)
    again = story.asked(do.CheckAgain)
    assert 3 <= len(again) <= 4
    assert {share.task for command in again for share in command.shares} == {2}


# --- periodic saves ---------------------------------------------------------------------------------------------------


def test_a_rank_that_stands_at_its_own_stop_is_let_go_once_training_has_failed() -> None:
    """Another task's command has failed and the saves that were running are waited for: no new round begins."""
    story = Step(SAVES)
    story.signal("SIGUSR2")
    story.agree()
    story.reported(report(2, code=77))
    assert story.state.phase is Phase.RUNNING
    assert story.state.writing
    stop = wire.Arrived(who(0), wire.NO_ROUND, Position(10, 0))
    assert the(story.feed(stop), do.Say).word == wire.Abort(wire.NO_ROUND, "this round is over")
    assert story.state.round is None


def test_a_task_that_was_killed_in_the_last_seconds_is_no_good_end() -> None:
    """All others have ended with 0: its closed connection says 137 in time, and not that training ended by itself."""
    step = Step()
    for task in (1, 0):
        step.reported(report(task, code=0)) if task else step.feed(ev.CommandExited(0))
    step.feed(ev.TaskCut(2))
    assert step.state.code is None
    step.pass_ms(3_000, silent=(2,))
    assert step.state.code is None
    step.pass_ms(4_000, silent=(2,))
    assert step.exit.code == 137


def test_a_supervisor_that_has_said_goodbye_before_its_connection_closed_ends_no_training() -> None:
    """A fault of its own has ended it, with its ranks still training: saves end, as nobody hears of them."""
    step = Step()
    step.feed(Report(1, between.VERSION, STEP.epoch, "node1", 501, bye=True))
    step.feed(ev.TaskCut(1))
    step.pass_ms(20_000, silent=(1,))
    assert step.state.phase is Phase.RUNNING
    assert step.asked(do.Exit) == []
    task = step.state.tasks.get(1)
    assert task is not None
    assert task.gone
