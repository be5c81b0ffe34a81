"""What is told of an end: the cause stays the first one that was known, training that nobody saved is named, and deaths."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry, describe
from ckpt_supervisor.core.leaving import OWN_END
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.lines import Lines

from tests.support.core_story import IN_SLURM, LOCAL, Story, the, who

WATCHED = dataclasses.replace(IN_SLURM, lead_ms=30_000)


def told(story: Story, event: ev.Event) -> tuple[Entry, ...]:
    """Feed an event; the journal's lines for it."""
    before = story.state
    commands = story.feed(event)
    return describe(event, before, story.state, commands, story.now)


def test_the_sigterm_of_our_own_requeue_does_not_hide_who_asked() -> None:
    """`ckptctl save --leave --requeue`: the last line says so, and not SIGTERM."""
    story = Story(IN_SLURM, 1)
    story.feed(ev.Asked("leave_after_save", requeue=True, who="ckptctl save by ann"))
    story.signal("SIGUSR2")
    story.save()
    story.end(0)
    the(story.all, do.Meet)
    story.feed(ev.Met(True, ""))
    while story.state.looking:
        story.look()
    the(story.all, do.CallRequeue)
    story.requeued(ev.RequeueResult.ACCEPTED)
    story.signal("SIGTERM")
    story.wait(10_000)  # The look at what it was may not be back by then.
    assert story.exit.line.startswith("asked to leave; step 7 is committed; Slurm has accepted the requeue")


def test_somebody_else_who_ends_the_job_before_that_is_named() -> None:
    """A SIGTERM while the save that was asked for runs is of another cause."""
    story = Story(LOCAL, 1)
    story.feed(ev.Asked("leave_after_save", requeue=True, who="ckptctl save by ann"))
    story.signal("SIGUSR2")
    story.signal("SIGTERM")
    story.save()
    story.end(0)
    story.wait(10_000)
    assert story.exit.line.startswith("SIGTERM; step 7 is committed")


@pytest.mark.parametrize(
    ("policy", "ran_ms", "more"),
    [
        (LOCAL, 120_000, "; no rank ever attached, so nothing was saved"),
        (LOCAL, 20_000, ""),
        (dataclasses.replace(LOCAL, adopts=True), 120_000, ""),
    ],
    ids=["long", "short", "adopts"],
)
def test_training_that_nobody_saved_says_so_at_its_end(policy: Policy, ran_ms: int, more: str) -> None:
    """After a minute or more; a short run had nothing to save, and one with --adopt saves by itself."""
    story = Story(policy)
    story.wait(ran_ms)
    story.feed(ev.CommandExited(0))
    story.feed(ev.Adopted((), "", final=True))
    assert story.exit.line == OWN_END + more


def test_a_run_whose_ranks_attached_ends_with_the_plain_line() -> None:
    """However it was saved."""
    story = Story(LOCAL, 1)
    story.wait(120_000)
    story.end(0, left=False)
    story.wait(5_000)
    assert story.exit.line == OWN_END


def test_the_first_rank_that_dies_without_a_word_is_a_warning_with_its_number() -> None:
    """Under torchrun the command's own status comes later and names nobody; those that it ends then are no news."""
    story = Story(LOCAL, 3)
    (first,) = told(story, ev.RankGone(who(1), "its process has ended"))
    assert (first.event, first.level, first.fields["rank"]) == ("rank_gone", "warning", 1)
    assert first.fields["how"] == "its process has ended, without a last word: killed, or by os._exit"
    (second,) = told(story, ev.RankGone(who(0), "its process has ended"))
    assert (second.level, second.fields["how"]) == ("info", "its process has ended")


def test_a_rank_that_dies_when_it_was_asked_to_leave_is_no_warning() -> None:
    """As every one does."""
    story = Story(LOCAL, 2)
    story.signal()
    story.save()
    assert [entry.level for entry in told(story, ev.RankGone(who(1), "its process has ended"))] == ["info"]


def test_lingering_says_until_when_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """The end is known, and so is when the last save begins."""
    story = Story(dataclasses.replace(WATCHED, lingers=True), 1)
    entries: list[Entry] = []
    story.signal("SIGUSR1")
    for _ in range(4):
        while story.state.looking:
            before = story.state
            story.look(end_in_ms=600_000)
            entries += describe(ev.Recalled(story.state.history), before, story.state, (), story.now)
        story.wait(310)
    before = story.state
    story.save()
    entries += describe(ev.Recalled(story.state.history), before, story.state, (), story.now)
    (over,) = [entry for entry in entries if entry.event == "notice_over"]
    assert over.fields["reason"].startswith("no end is near, 600 s are left")
    assert 590_000 < over.fields["left_ms"] <= 600_000
    Lines.tell(Lines.__new__(Lines), over, story.policy, story.state, story.now)
    line = capfd.readouterr().err
    assert line.startswith("ckpt-supervise: no end is near, 600 s are left: ")
    assert line.endswith("training goes on after the save; the last save begins in 9 min\n")
