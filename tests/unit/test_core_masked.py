"""Training that has failed behind a command that ends with 0 (field cases 16 and 63), and what is no failure."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import between, masked, notices, relay, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import describe
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, the, who

STEP = dataclasses.replace(LOCAL, tasks=2)
DIED = wire.Failed(who(0), wire.NO_ROUND, "RuntimeError: boom", 7)
FINISHED = wire.Finished(who(0), wire.NO_ROUND)


def over(story: Story, code: int = 0, *, pid: int = 0) -> Story:
    """The command ends, and last words have had their time."""
    story.feed(ev.CommandExited(code, pid=pid))
    story.wait(masked.SETTLE_TASKS_MS)
    return story


def test_a_rank_that_has_ended_without_a_word_proves_nothing() -> None:
    """`os._exit(0)` after the loop, a fork child's end, a Finished that was lost, a trial that its agent ended: all are well.

    A rank that was killed by a signal behind a shell that says 0 looks the same, and is not told apart.
    """
    story = Story(LOCAL, 2)
    story.feed(wire.Finished(who(0), wire.NO_ROUND))
    story.gone(0)
    story.gone(1)
    over(story)
    assert (story.exit.code, story.exit.line) == (0, "training ended by itself")


def test_a_rank_that_died_of_an_exception_is_a_failure_with_its_reason() -> None:
    """It says so itself, after its loop's end has said Finished; nothing more is waited for."""
    story = Story(LOCAL, 1)
    story.feed(FINISHED)
    story.feed(DIED)
    story.gone(0)
    story.feed(ev.CommandExited(0))
    assert story.exit.code == 1
    assert "rank 0 (pid 100): RuntimeError: boom" in story.exit.line
    assert "the command ended with status 0 all the same" in story.exit.line


def test_it_is_in_the_journal() -> None:
    """As a warning, with the rank and its reason."""
    story = Story(LOCAL, 1)
    story.feed(DIED)
    before, event = story.state, ev.CommandExited(0)
    entries = describe(event, before, story.state, story.feed(event), story.now)
    assert [entry for entry in entries if entry.event == "status_masked"] == []  # Of the state before.
    entries = describe(event, before, story.state, story.commands, story.now)
    (told,) = [entry for entry in entries if entry.event == "status_masked"]
    assert (told.level, told.fields) == ("warning", {"reason": "rank 0 (pid 100): RuntimeError: boom", "command_code": 0})


def test_it_is_started_again_like_any_crash() -> None:
    """--restarts; and the deaths of the start before do not count for the next one."""
    story = Story(dataclasses.replace(LOCAL, restarts=1), 1)
    story.feed(DIED)
    story.gone(0)
    over(story)
    assert the(story.all, do.StartCommand).restart == 1
    assert story.state.phase is Phase.RUNNING
    story.feed(ev.RankGone(who(0), "its process has ended"))
    story.feed(ev.CommandExited(0))
    assert story.exit.code == 0


def test_training_that_is_over_is_not_waited_for() -> None:
    """Every rank has said so: no time is lost."""
    story = Story(LOCAL, 2)
    for rank in range(2):
        story.feed(wire.Finished(who(rank), wire.NO_ROUND))
    story.feed(ev.CommandExited(0))
    assert story.exit.code == 0


def test_a_program_that_never_attached_is_not_waited_for() -> None:
    """Nothing is known of its end but its status."""
    story = Story(LOCAL)
    story.feed(ev.CommandExited(0))
    assert story.exit.code == 0


@pytest.mark.parametrize(
    "order", ["exited gone finished", "gone exited finished", "gone finished exited", "exited finished gone"]
)
def test_last_words_may_come_in_any_order(order: str) -> None:
    """They come by other descriptors than the command's end."""
    story = Story(LOCAL, 1)
    events: dict[str, ev.Event] = {
        "exited": ev.CommandExited(0),
        "gone": ev.RankGone(who(0), "its process has ended"),
        "finished": FINISHED,
    }
    for name in order.split():
        story.feed(events[name], 2)
    assert story.exit.code == 0


def test_an_exception_that_is_told_of_after_the_end_is_a_failure_too() -> None:
    """The word was on its way when the process ended."""
    story = Story(LOCAL, 1)
    story.gone(0)
    story.feed(ev.CommandExited(0))
    story.feed(DIED)
    assert story.exit.code == 1
    assert "RuntimeError: boom" in story.exit.line


def test_a_rank_that_lives_on_proves_nothing() -> None:
    """It is waited for half a second, and no longer."""
    story = Story(LOCAL, 1)
    story.feed(ev.CommandExited(0))
    story.wait(masked.SETTLE_MS - 1)
    assert story.asked(do.Exit) == []
    assert story.deadline == story.now + 1
    story.wait(1)
    assert story.exit.code == 0


def test_the_last_process_of_a_rank_counts() -> None:
    """A sweep agent starts trainers one after the other: the first has died, the last is well."""
    story = Story(LOCAL, 1)
    story.feed(DIED)
    story.gone(0)
    story.hello(0, 1, pid=555)
    story.feed(wire.Finished(who(0, pid=555), wire.NO_ROUND))
    assert over(story).exit.code == 0


def test_and_one_that_died_last_is_a_failure() -> None:
    """However well those before it were."""
    story = Story(LOCAL, 1)
    story.feed(FINISHED)
    story.gone(0)
    story.hello(0, 1, pid=555)
    story.feed(wire.Failed(who(0, pid=555), wire.NO_ROUND, "boom", 7))
    story.feed(ev.RankGone(who(0, pid=555), "its process has ended"))
    assert over(story).exit.code == 1


def test_a_program_that_steps_in_for_one_that_has_died_and_does_not_attach_is_not_seen() -> None:
    """`python train.py || python recover.py`: 1, as documented; where it attaches in its place, its own end counts."""
    story = Story(LOCAL, 1)
    story.feed(DIED)
    story.gone(0)
    story.wait(60_000)
    assert over(story).exit.code == 1


def test_an_older_generation_does_not_count() -> None:
    """torchrun has started its workers again, and they have come to the end."""
    story = Story(LOCAL, 2)
    story.feed(wire.Failed(who(1), wire.NO_ROUND, "boom", 7))
    story.gone(1)
    for rank in range(2):
        story.hello(rank, 2, generation=1)
        story.feed(wire.Finished(who(rank, 1), wire.NO_ROUND))
    assert over(story).exit.code == 0


def test_a_command_that_is_the_rank_itself_has_its_own_status() -> None:
    """Nothing hides it: an interpreter in which an exception was seen may end well. Nor is `os._exit(0)` waited for."""
    story = Story(LOCAL, 1)
    story.feed(DIED)
    story.gone(0)
    story.feed(ev.CommandExited(0, pid=100))
    assert story.exit.code == 0
    story = Story(LOCAL, 1)
    story.feed(ev.CommandExited(0, pid=100))
    assert story.exit.code == 0


def test_a_status_that_is_not_zero_is_told_as_it_is() -> None:
    """Nothing is masked."""
    story = Story(LOCAL, 1)
    story.feed(DIED)
    story.gone(0)
    story.feed(ev.CommandExited(77))
    assert story.exit.code == 77


def test_with_a_notice_in_force_nothing_changes() -> None:
    """75 and 76 as ever."""
    story = Story(LOCAL, 1)
    story.signal()
    story.gone(0)
    story.feed(ev.CommandExited(0))
    story.wait(masked.SETTLE_TASKS_MS)
    assert story.exit.code == 76


# --- a notice while last words are awaited ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LOCAL, IN_SLURM], ids=["local", "slurm"])
def test_a_notice_that_comes_after_the_commands_end_makes_no_interruption_of_it(policy: Policy) -> None:
    """The run was over, and nothing is to be brought back."""
    story = Story(policy, 1)
    story.gone(0)
    story.feed(ev.CommandExited(0))
    story.signal()
    if policy.can_look:
        story.look(preempted_in_ms=0, end_in_ms=30_000)
    story.wait(masked.SETTLE_MS)
    assert (story.exit.code, story.exit.line) == (0, "training ended by itself")
    assert story.asked(do.CallRequeue) == []


def test_a_rehearsal_after_the_commands_end_changes_nothing() -> None:
    """Nor does the save signal."""
    story = Story(IN_SLURM, 1)
    story.feed(ev.CommandExited(0))
    story.signal("SIGUSR1")
    story.signal("SIGUSR2")
    story.look(end_in_ms=10_000_000)
    story.wait(masked.SETTLE_MS)
    assert story.exit.code == 0


def test_a_rank_that_is_heard_to_have_died_then_has_not_come_to_its_end() -> None:
    """Interrupted before its last word was here: as with any other crash on the way out, an older checkpoint stands."""
    story = Story(LOCAL, 1)
    story.feed(ev.CommandExited(0))
    story.signal()
    story.feed(DIED)
    story.wait(masked.SETTLE_TASKS_MS)
    assert story.exit.code == 76
    assert "RuntimeError: boom" in story.exit.line


def test_the_end_of_the_jobs_time_makes_no_interruption_of_it_either() -> None:
    """It comes in the very half second; nor is the machine woken over and over for it."""
    policy = dataclasses.replace(IN_SLURM, lead_ms=60_000)
    story = Story(policy, started=False)
    story.look(end_in_ms=300_000)
    story.hello(0, 1)
    watch_ms = notices.watch_at_ms(policy, story.state)
    assert watch_ms is not None
    story.wait(watch_ms - 300 - story.now)
    story.look(end_in_ms=watch_ms + 60_000 - story.now - 30)
    story.feed(ev.CommandExited(0))
    assert story.now < watch_ms
    for _ in range(3):
        if story.state.exit_code is None:
            assert story.deadline is not None
            story.feed(ev.Tick(), max(0, story.deadline - story.now))
    assert (story.exit.code, story.state.notice) == (0, None)
    assert story.now > watch_ms


# --- several tasks ------------------------------------------------------------------------------------------------------------


def report(**said: object) -> between.Report:
    """What task 1 says of itself."""
    return between.Report(1, between.VERSION, STEP.epoch, "b", 501, restart=0, **said)  # type: ignore[arg-type]


def both(**said: object) -> Story:
    """Rank 0 below task 0 has come to its end, and so has its command; task 1 says this."""
    story = Story(STEP)
    feed(story, report())
    for rank in range(2):
        story.feed(wire.Hello(who(rank, task=rank), wire.VERSION, 2, 0, False))
    story.feed(FINISHED)
    story.feed(ev.CommandExited(0))
    feed(story, report(**said))
    return story


def feed(story: Story, word: between.Report) -> None:
    """As the shell does."""
    for event in tasks.unfold(STEP, story.state, word):
        story.feed(event)


OF_TASK_1 = who(1, task=1)
GONE = ((OF_TASK_1, "its process has ended"),)


def test_a_goodbye_that_was_lost_on_the_way_is_said_again_in_the_report() -> None:
    """A lost frame must not make a failure of a training that is over."""
    assert both(code=0, gone=GONE, finished=(OF_TASK_1,)).exit.code == 0


def test_another_tasks_rank_that_failed_behind_its_command_ends_the_step_with_1() -> None:
    """After its last word, which may come after all else."""
    story = both(code=0, gone=GONE)
    assert story.asked(do.Exit) == []
    story.feed(wire.Failed(OF_TASK_1, wire.NO_ROUND, "boom", 7), masked.SETTLE_TASKS_MS - 100)
    assert story.exit.code == 1
    assert "rank 1 (task 1, pid 101)" in story.exit.line
    assert story.asked(do.Announce)[-1].stand.code == 1


def test_another_tasks_command_that_is_the_rank_itself_has_its_own_status() -> None:
    """The report says which process the command was."""
    assert both(code=0, gone=GONE, command=OF_TASK_1.pid).exit.code == 0


def test_a_relay_repeats_who_has_finished_and_what_the_command_was() -> None:
    """Until the next start, or another process of that rank; one that dies of an exception has not finished."""
    story = relay.start(1, STEP.epoch, "b", 501, 1_000)
    other = who(0, task=1)
    hellos = [wire.Hello(rank, wire.VERSION, 2, 0, False) for rank in (OF_TASK_1, other)]
    ends = [wire.Finished(rank, wire.NO_ROUND) for rank in (OF_TASK_1, other)]
    words: list[relay.Event] = [between.Stand(STEP.epoch, restart=0), *hellos, *ends]
    for word in (*words, wire.Failed(other, wire.NO_ROUND, "boom", 1), ev.CommandExited(0, pid=9)):
        story, commands = relay.step(STEP, story, word, 1_001)
    (said,) = [command.word for command in commands if isinstance(command, do.SendUp)]
    assert isinstance(said, between.Report)
    assert (said.finished, said.command) == ((OF_TASK_1,), 9)
    story, _ = relay.step(STEP, story, between.Stand(STEP.epoch, restart=1), 1_002)
    assert (story.finished, story.command) == ((), 0)
