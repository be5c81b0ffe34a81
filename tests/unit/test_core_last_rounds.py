"""How often a last save is tried, and when a fresh checkpoint is left to be the last one."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import turns
from ckpt_supervisor.core.state import Kind, Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, who

SAVE_MS = 8_000


@pytest.mark.parametrize(("left_ms", "one_more"), [(SAVE_MS * 3 // 2 - 200, False), (SAVE_MS * 3 // 2 + 500, True)])
def test_a_last_save_right_after_a_commit_is_begun_only_with_time_to_spare(left_ms: int, one_more: bool) -> None:
    """The notice came after Go. A save that would just fit, and then does not, would hide a checkpoint that stands."""
    story = Story(LOCAL, 1)
    story.signal("SIGUSR2")
    story.agree()
    story.signal()
    number = story.round.number
    story.feed(wire.Saving(who(0), number))
    spent_ms = story.notice.budget.save_by_ms - story.now - left_ms
    story.feed(wire.Saved(who(0), number, 7, (), SAVE_MS), spent_ms - 30)
    story.commit()
    if one_more:
        assert story.round.kind is Kind.LEAVE
        return
    assert story.state.phase is Phase.LEAVING
    story.end(0)
    assert story.exit.code == 75
    assert "step 7 is committed" in story.exit.line


def failed(story: Story) -> None:
    """The round that runs is given up."""
    story.feed(wire.Failed(who(0), story.round.number, "the save raised"))


def test_a_last_save_that_has_failed_twice_is_not_tried_again_once_the_look_is_over() -> None:
    """The notice signal, while the look that tells it from a rehearsal is awaited."""
    story = Story(dataclasses.replace(IN_SLURM, kill_wait_ms=90_000), 1)
    story.signal("SIGUSR1")
    for tries in range(1, turns.TRIES_MAX + 1):
        assert story.round.tries == tries
        failed(story)
    assert story.state.phase.name == "RUNNING"
    story.hello(1, 1)  # Nobody who comes now is a reason for one more.
    assert story.state.phase.name == "RUNNING"
    story.wait(turns.LOOK_MS)
    assert story.state.phase is Phase.LEAVING
    assert story.state.leaving is not None
    assert "the save raised" in story.state.leaving.reason
    assert len(story.told(wire.Prepare, 100)) == turns.TRIES_MAX


def test_a_later_notice_has_tries_of_its_own() -> None:
    """The one before was a rehearsal, whose saves have failed."""
    story = Story(dataclasses.replace(IN_SLURM, kill_wait_ms=90_000), 1)
    story.signal("SIGUSR1")
    for _ in range(turns.TRIES_MAX):
        failed(story)
    while story.state.notice is not None:
        assert story.state.phase is Phase.RUNNING
        story.wait(50)
        if story.state.looking:
            story.look(end_in_ms=None)
    story.wait(5_000)
    assert story.asked(do.Exit) == []
    story.feed(ev.SignalCame("SIGTERM", ev.Meaning.LEAVE))
    assert story.round.tries == 1
