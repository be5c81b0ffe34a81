"""Budgets of requeues where they are easily miscounted: before the past is read, after a start in place, a signal of no limit."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.core.state import Kind, Phase

from tests.support.core_story import IN_SLURM, Story, none_of, the, who

NOT_FOUND = 127
DAY_MS = 86_400_000


def looks(story: Story, **seen: object) -> None:
    """All looks that are asked for come back with this."""
    for _ in range(8):
        if story.state.looking:
            story.look(**seen)  # type: ignore[arg-type]
        story.wait(400)


def test_a_command_that_fails_before_the_past_is_read_waits_for_its_budget() -> None:
    """It is not even found: without the wait every attempt would take itself for the first one, and the job never stop."""
    story = Story(dataclasses.replace(IN_SLURM, max_crashes=2))
    story.feed(ev.CommandExited(NOT_FOUND))
    assert none_of(story.wait(3_000), do.Meet, do.Exit)
    story.feed(ev.Recalled(History(crashes=2)))
    assert story.exit.code == NOT_FOUND
    assert "training has failed by itself 3 times now, and --max-crashes is 2" in story.exit.line
    assert none_of(story.all, do.Meet, do.CallRequeue)


def test_within_its_budget_it_comes_back_as_soon_as_that_is_known() -> None:
    """One of two was used."""
    story = Story(dataclasses.replace(IN_SLURM, max_crashes=2))
    story.feed(ev.CommandExited(NOT_FOUND))
    the(story.feed(ev.Recalled(History(crashes=1))), do.Meet)


def test_a_past_that_is_never_read_does_not_keep_the_job_from_coming_back() -> None:
    """The file system hangs: what is not known uses up nothing, and the wait has a bound."""
    story = Story(dataclasses.replace(IN_SLURM, max_crashes=2))
    story.feed(ev.CommandExited(NOT_FOUND))
    assert the(story.wait(30_000), do.Meet)


@pytest.mark.parametrize(("used", "code"), [(1, 85), (2, NOT_FOUND)])
def test_exit_n_waits_for_the_budget_as_well(used: int, code: int) -> None:
    """--requeue exit:85 asks for a requeue too."""
    story = Story(dataclasses.replace(IN_SLURM, max_crashes=2, requeue="exit", requeue_exit=85))
    story.feed(ev.CommandExited(NOT_FOUND))
    assert none_of(story.wait(3_000), do.Exit)
    story.feed(ev.Recalled(History(crashes=used)))
    assert story.exit.code == code


def test_a_hang_starts_nothing_again_while_a_notice_waits_for_its_look() -> None:
    """No round is running, and the way out goes its way all the same."""
    story = Story(dataclasses.replace(IN_SLURM, on_hang="restart", restarts=3), 1)
    story.feed(ev.Recalled(History(saves_ms=(60_000,), holds_ms=(60_000,))))
    story.signal("SIGTERM")
    assert story.state.phase is Phase.RUNNING
    assert none_of(story.feed(ev.Stalled(0, (0,), "no progress", "no step for 400 s")), do.StartCommand)
    assert story.state.restarts == 0


def test_what_was_committed_before_a_start_in_place_is_progress() -> None:
    """Saved, failed, started again in place, failed again: that attempt got further, so the brake leaves it alone."""
    story = Story(dataclasses.replace(IN_SLURM, restarts=1, max_crashes=99), 1)
    story.feed(ev.Recalled(History(stalled=10)))
    story.signal("SIGUSR2")
    story.save(7)
    the(story.feed(ev.CommandExited(137)), do.StartCommand)
    story.state = machine.resumed(story.state, "/ckpt/step-000000007", 7)
    story.hello(0, 1, pid=200)
    assert the(story.feed(ev.CommandExited(137)), do.Meet)


def test_without_a_new_checkpoint_a_start_in_place_is_no_progress() -> None:
    """The same from the step that it began with."""
    story = Story(dataclasses.replace(IN_SLURM, restarts=1, max_crashes=99), 1)
    story.state = machine.resumed(story.state, "/ckpt/step-000000005", 5)
    story.feed(ev.Recalled(History(stalled=10)))
    story.feed(ev.CommandExited(137))
    story.state = machine.resumed(story.state, "/ckpt/step-000000005", 5)
    story.hello(0, 1, pid=200)
    story.feed(ev.CommandExited(137))
    assert "11 attempts in a row" in story.exit.line


def test_a_sigterm_long_before_the_limit_uses_up_no_budget_of_the_limit() -> None:
    """`scancel --signal=TERM`, an administrator: a day is left, so it is not the limit that ends it, and the line says so."""
    story = Story(dataclasses.replace(IN_SLURM, max_timeouts=0), 1)
    story.feed(ev.Recalled(History()))
    story.signal("SIGTERM")
    story.look(end_in_ms=DAY_MS)
    story.save(7)
    story.end(0)
    looks(story, end_in_ms=DAY_MS)
    assert story.notice.cause is Cause.NO_END
    assert the(story.all, do.Commit).cause == "SIGTERM"
    assert story.asked(do.Meet)


@pytest.mark.parametrize("left_ms", [0, 5_000, 590_000])
def test_a_sigterm_close_to_the_limit_is_of_the_limit(left_ms: int) -> None:
    """The controller has not written it down yet."""
    story = Story(dataclasses.replace(IN_SLURM, max_timeouts=0), 1)
    story.feed(ev.Recalled(History()))
    story.signal("SIGTERM")
    story.look(end_in_ms=left_ms)
    assert story.notice.cause is Cause.LIMIT_AHEAD
    story.save(7)
    story.end(0)
    looks(story, end_in_ms=left_ms)
    assert "its time limit has ended it once now, and --max-timeouts is 0" in story.exit.line


def test_a_stop_of_the_ranks_own_with_a_notice_in_force_has_the_notices_time() -> None:
    """The look is still awaited when rank 0 comes to its multiple of --every-steps: that round has no 15 minutes."""
    policy = dataclasses.replace(IN_SLURM, every_steps=10)
    story = Story(policy, 1)
    story.feed(ev.Recalled(History(saves_ms=(60_000,), holds_ms=(60_000,))))
    story.signal("SIGTERM")
    assert story.state.round is None, "60 s do not fit into KillWait, and the look may tell of more"
    story.feed(wire.Arrived(who(0), wire.NO_ROUND, Position(10, 0)))
    assert story.round.kind is Kind.LEAVE
    assert story.round.save_by_ms == story.notice.budget.save_by_ms


def test_the_ends_of_what_made_way_for_a_start_in_place_use_up_no_other_one() -> None:
    """Two tasks: one fails, and the other's command is ended with it before the next start; that end comes late."""
    story = Story(dataclasses.replace(IN_SLURM, tasks=2, restarts=2))
    for rank in (0, 1):
        story.feed(wire.Hello(who(rank, task=rank), wire.VERSION, 2, rank, False))
    assert the(story.feed(ev.CommandExited(1, 1)), do.StartCommand).restart == 1
    assert none_of(story.feed(ev.CommandExited(137, 0)), do.StartCommand, do.Exit)
    assert (story.state.restarts, story.state.code, len(story.state.codes)) == (1, None, 0)
