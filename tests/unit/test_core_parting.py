"""The three stages of the command's end: Leave, SIGTERM, SIGKILL; who is asked when, and who is not."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import between, parting, relay, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import describe
from ckpt_supervisor.core.describe_relay import describe as describe_relay
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the, who

LEAVE_MS = LOCAL.leave_ms
TASKS = dataclasses.replace(IN_SLURM, tasks=2)


def told_to_leave(policy: object = LOCAL, ranks: int = 1) -> tuple[Story, int]:
    """Saved and committed: the ranks have just heard Leave. And since when."""
    story = Story(policy, ranks)  # type: ignore[arg-type]
    story.signal()
    story.save()
    assert story.state.phase is Phase.LEAVING
    assert story.told(wire.Leave)
    return story, story.now


def instants(story: Story, limit_ms: int = 20_000) -> dict[type, int]:
    """When SIGTERM and SIGKILL came, from now on, nothing else happening."""
    found: dict[type, int] = {}
    began_ms = story.now
    while story.now < began_ms + limit_ms and story.state.phase is not Phase.DONE:
        deadline_ms = story.deadline
        if deadline_ms is None:
            break
        for command in story.feed(ev.Tick(), max(0, deadline_ms - story.now)):
            if isinstance(command, do.AskCommand | do.EndCommand):
                found[type(command)] = story.now
    return found


def test_a_command_that_stays_is_asked_and_then_killed_each_after_its_own_time() -> None:
    """Field case 121: order acknowledged, clean exit asked, TERM, KILL."""
    story, left_ms = told_to_leave()
    found = instants(story)
    assert found == {do.AskCommand: left_ms + LEAVE_MS - parting.ASK_MOST_MS, do.EndCommand: left_ms + LEAVE_MS}
    assert [command.why for command in story.asked(do.AskCommand)] == ["its time to end by itself was over"]


@pytest.mark.parametrize(
    ("leave_ms", "asked_ms"),
    [(9_000, 7_000), (3_000, 2_000), (1_500, 1_000), (900, 600), (500, 200), (499, None), (200, None)],
)
def test_the_time_of_sigterm_is_a_third_within_bounds(leave_ms: int, asked_ms: int | None) -> None:
    """At most 2 s, at least 0.3 s, and never so much that nobody could leave; with no time it is killed at once."""
    story, left_ms = told_to_leave(dataclasses.replace(LOCAL, leave_timeout_ms=leave_ms))
    found = instants(story)
    assert found.get(do.AskCommand) == (None if asked_ms is None else left_ms + asked_ms)
    assert found[do.EndCommand] == left_ms + leave_ms


def test_a_command_that_has_ended_is_not_asked() -> None:
    """Ranks left as they were told: nobody gets a signal."""
    story, _ = told_to_leave()
    story.end(0)
    story.wait(20_000)
    assert story.asked(do.AskCommand) == [] == story.asked(do.EndCommand)


def test_a_command_that_ends_at_sigterm_is_not_killed() -> None:
    """Its status is that of the signal, and changes nothing."""
    story, _ = told_to_leave()
    story.wait(LEAVE_MS - 1_000)
    assert the(story.all, do.AskCommand)
    story.feed(ev.CommandExited(143))
    story.wait(20_000)
    assert story.asked(do.EndCommand) == []
    assert story.exit.code == 75


def test_it_is_asked_once() -> None:
    """However long it takes to the kill, and whatever comes in between."""
    story, _ = told_to_leave(dataclasses.replace(LOCAL, leave_timeout_ms=9_000))
    story.wait(7_500)
    story.feed(wire.Left(who(0), 1, again=True))
    story.signal()
    story.wait(10_000)
    assert len(story.asked(do.AskCommand)) == 1 == len(story.asked(do.EndCommand))


def test_a_rank_that_goes_on_brings_both_nearer() -> None:
    """It hears Preempted and goes on: 1.5 s in all."""
    story, left_ms = told_to_leave(dataclasses.replace(LOCAL, leave_timeout_ms=9_000))
    story.feed(wire.Left(who(0), 1, again=True))
    found = instants(story)
    assert found == {do.AskCommand: left_ms + parting.IGNORED_MS * 2 // 3, do.EndCommand: left_ms + parting.IGNORED_MS}


def test_a_rank_that_goes_on_late_is_still_asked_before_it_is_killed() -> None:
    """Its time is over when it says so; the signal comes first all the same."""
    story, _ = told_to_leave(dataclasses.replace(LOCAL, leave_timeout_ms=9_000))
    story.wait(4_000)
    said_ms = story.now + 10
    assert the(story.feed(wire.Left(who(0), 1, again=True)), do.AskCommand)
    assert instants(story) == {do.EndCommand: said_ms + parting.ASK_LEAST_MS}


def test_a_rank_that_goes_on_after_it_was_asked_is_killed_soon() -> None:
    """Nothing is asked again."""
    story, left_ms = told_to_leave(dataclasses.replace(LOCAL, leave_timeout_ms=9_000))
    story.wait(7_100)
    asked_ms = left_ms + 7_000
    story.feed(wire.Left(who(0), 1, again=True))
    assert len(story.asked(do.AskCommand)) == 1
    assert instants(story) == {do.EndCommand: asked_ms + parting.ASK_LEAST_MS}


def test_a_kill_that_comes_nearer_brings_both_nearer() -> None:
    """A scancel in the grace: KillWait runs from there."""
    policy = dataclasses.replace(IN_SLURM, leave_timeout_ms=60_000, kill_wait_ms=10_000)
    story = Story(policy, 1)
    story.signal()
    story.look(preempted_in_ms=0, end_in_ms=100_000)
    story.save()
    story.wait(2_000)
    story.signal()
    story.look("COMPLETING", end_in_ms=0)
    killed_ms = story.notice.kill_at_ms
    found = instants(story)
    assert story.notice.kill_at_ms == killed_ms
    assert found[do.EndCommand] == story.notice.budget.leave_by_ms
    assert 300 <= found[do.EndCommand] - found[do.AskCommand] <= 2_000


def test_a_second_ctrl_c_kills_at_once() -> None:
    """A person does not want to wait."""
    story, _ = told_to_leave()
    story.signal("SIGINT")
    story.feed(ev.SignalCame("SIGINT", ev.Meaning.INTERRUPT))
    assert story.asked(do.AskCommand) == []
    assert the(story.all, do.EndCommand)


def test_training_that_ends_by_itself_is_not_asked() -> None:
    """It has left its loop, and has until its time is over."""
    story = Story(LOCAL, 1)
    story.feed(wire.Finished(who(0), wire.NO_ROUND))
    story.signal()
    assert story.state.leaving is not None
    assert story.state.leaving.own_end
    assert list(instants(story, 60_000)) == [do.EndCommand]


def left_alone() -> Story:
    """Rank 0 had come to its end before the notice, and is gone since; rank 1 is in its loop. There is a minute."""
    story = Story(dataclasses.replace(LOCAL, grace_ms=60_000), 2)
    story.feed(wire.Finished(who(0), wire.NO_ROUND))
    story.signal()
    assert story.state.leaving is not None
    assert story.state.leaving.own_end
    story.gone(0)
    return story


def alone_ms(story: Story) -> int:
    """So long it may be at its last steps."""
    part_ms = (story.notice.budget.leave_by_ms - story.now) // parting.LEFT_ALONE_PART
    assert parting.LEFT_ALONE_LEAST_MS < part_ms < parting.LEFT_ALONE_MOST_MS
    return part_ms


def test_who_comes_to_its_end_when_it_was_told_to_leave_has_the_time_for_it() -> None:
    """Its last step took longer than that. An export follows the loop: it is not asked to end, and the status is its own."""
    story = left_alone()
    story.wait(alone_ms(story) + 10)
    assert story.told(wire.Leave, 101)
    story.feed(wire.Finished(who(1), max(1, story.state.newest_round)))
    assert story.wait(30_000) == []
    story.gone(1)
    story.feed(ev.CommandExited(0))
    assert (story.exit.code, story.exit.line) == (0, "training ended by itself")


def test_a_second_ctrl_c_ends_those_who_are_left_alone_at_once() -> None:
    """At the very moment when they would be told."""
    story = left_alone()
    until_ms = alone_ms(story)
    story.signal("SIGINT")
    story.feed(ev.SignalCame("SIGINT", ev.Meaning.INTERRUPT), until_ms)
    assert story.asked(do.EndCommand)
    assert story.told(wire.Leave) == []


def test_ranks_that_are_left_alone_by_those_at_their_end_are_told_to_leave_after_all() -> None:
    """Field case 61: rank 0 came to its end at the notice, and rank 1 waits in a collective with it. The grace is not used up."""
    story = left_alone()
    story.wait(alone_ms(story) - 20)
    assert story.told(wire.Leave) == []
    before, commands = story.state, story.wait(30)
    assert story.told(wire.Leave, 101)
    assert story.told(wire.Leave, 100) == []
    entries = describe(ev.Tick(), before, story.state, tuple(commands), story.now)
    assert [entry.fields for entry in entries if entry.event == "left_alone"] == [{"ranks": [1]}]
    told_ms = story.now
    assert instants(story, 20_000)[do.EndCommand] <= told_ms + 10_000


def test_those_who_come_to_their_end_a_moment_after_the_others_are_not_told_to_leave() -> None:
    """The last steps of rank 1 take longer than rank 0's way out: training has come to its end by itself."""
    story = left_alone()
    story.wait(alone_ms(story) - 20)
    story.feed(wire.Finished(who(1), wire.NO_ROUND))
    story.wait(5_000)
    story.gone(1)
    story.wait(5_000)
    assert story.told(wire.Leave) == []
    story.feed(ev.CommandExited(0))
    assert (story.exit.code, story.exit.line) == (0, "training ended by itself")


def test_a_program_that_saves_by_itself_is_not_asked() -> None:
    """Its own signal was handed on; SIGTERM would cut its save short."""
    story = Story(dataclasses.replace(LOCAL, passes="SIGUSR1"))
    story.signal()
    assert the(story.all, do.PassSignal)
    assert list(instants(story, 60_000)) == [do.EndCommand]


def test_where_nobody_hears_leave_the_command_is_asked_at_once() -> None:
    """A program that never attached: it ends as at any SIGTERM, and has 2 s for it."""
    story = Story(LOCAL)
    assert the(story.signal(), do.AskCommand).why == "no rank had attached yet"
    asked_ms = story.now
    assert instants(story) == {do.EndCommand: asked_ms + parting.ASK_MOST_MS}


def test_with_no_time_left_a_command_that_nobody_can_tell_is_killed_at_once() -> None:
    """No time for a clean end."""
    story = Story(dataclasses.replace(LOCAL, grace_ms=100))
    assert none_of(story.signal(), do.AskCommand)
    assert the(story.all, do.EndCommand)


def test_the_journal_says_that_it_was_asked_and_why() -> None:
    """Beside `command_ended`, in their order."""
    story = Story(LOCAL)
    before = story.state
    event = ev.SignalCame("SIGTERM", ev.Meaning.LEAVE)
    commands = story.feed(event)
    entries = describe(event, before, story.state, commands, story.now)
    (asked,) = [entry for entry in entries if entry.event == "command_asked"]
    assert (asked.level, asked.fields) == ("info", {"why": "no rank had attached yet"})


# --- several tasks ------------------------------------------------------------------------------------------------------------


def test_the_commands_of_all_tasks_are_asked_together() -> None:
    """The launchers of all nodes get SIGTERM alike: each task's supervisor asks its own."""
    story = Story(TASKS)
    for event in tasks.unfold(TASKS, story.state, between.Report(1, between.VERSION, TASKS.epoch, "b", 77, restart=0)):
        story.feed(event)
    story.signal()
    assert the(story.all, do.AskCommand)
    stand = story.asked(do.Announce)[-1].stand
    assert (stand.ask, stand.end) == ("no rank had attached yet", "")
    story.wait(parting.ASK_MOST_MS)
    assert story.asked(do.Announce)[-1].stand.end == "no rank had attached yet"


def test_a_task_asks_its_command_once_and_then_ends_it() -> None:
    """The word is said again every second."""
    story = relay.start(1, 4, "b", 77, 1_000)
    asked: list[do.RelayCommand] = []
    words = [between.Stand(4, restart=0), *[between.Stand(4, restart=0, ask="over")] * 3, between.Stand(4, restart=0, end="over")]
    for now_ms, word in enumerate(words, 1_001):
        before = story
        story, commands = relay.step(TASKS, story, word, now_ms)
        lines = list(describe_relay(word, before, story, commands))
        found = [command for command in commands if isinstance(command, do.AskCommand | do.EndCommand)]
        assert [entry.fields for entry in lines if entry.event.startswith("command_")] == [{"why": "over"} for _ in found]
        asked += found
    assert asked == [do.AskCommand("over"), do.EndCommand("over")]


def test_a_task_whose_command_has_ended_asks_nobody() -> None:
    """Nor is the next start asked for what was wanted of the one before."""
    story = relay.start(1, 4, "b", 77, 1_000)
    story, _ = relay.step(TASKS, story, between.Stand(4, restart=0), 1_001)
    story, _ = relay.step(TASKS, story, between.Stand(4, restart=0, ask="over"), 1_002)
    story, _ = relay.step(TASKS, story, ev.CommandExited(143), 1_003)
    story, commands = relay.step(TASKS, story, between.Stand(4, restart=1), 1_004)
    assert the(commands, do.StartCommand)  # type: ignore[arg-type]
    assert not story.asked
    story, commands = relay.step(TASKS, story, ev.CommandExited(0), 1_005)
    _, commands = relay.step(TASKS, story, between.Stand(4, restart=1, ask="over"), 1_006)
    assert not any(isinstance(command, do.AskCommand) for command in commands)
