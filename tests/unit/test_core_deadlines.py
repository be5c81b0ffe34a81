"""Deadlines: how long a save takes is known by then, and decides whether one is begun; how often to save by time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import interval
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.policy import Cause, Policy
from ckpt_supervisor.core.state import Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the

SLOW = History(saves_ms=(30_000, 31_000))
WATCHED = dataclasses.replace(IN_SLURM, lead_ms=30_000)


def recalled(policy: Policy = IN_SLURM, history: History = SLOW, ranks: int = 1) -> Story:
    """A job whose earlier attempts are known."""
    story = Story(policy, ranks)
    story.feed(ev.Recalled(history))
    return story


def test_a_save_that_cannot_end_in_the_grace_is_not_begun_and_the_reason_has_both_numbers() -> None:
    """Row 1, field case 29: saves took 30 s, GraceTime is 15 s, KillWait 6: nobody is asked to save, and it is requeued."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal()
    assert story.state.phase is Phase.RUNNING, "the guess at the signal is not enough to leave a save out"
    story.look(preempted_in_ms=-40, end_in_ms=15_000)
    story.wait(10)
    assert story.told(wire.Prepare) == []
    assert story.state.leaving is not None
    assert story.state.leaving.reason.startswith("no save was begun: it takes 30.0 s (the shortest of the last 2), and ")
    assert story.state.leaving.reason.endswith(" s were left for it")
    assert story.told(wire.Leave)


def test_a_cancelled_job_needs_no_time_for_a_requeue_and_its_save_has_it() -> None:
    """KillWait of 6 s, saves of 4 s: left out for the sake of a requeue that nobody asks for, it cost the steps of an hour."""
    policy = dataclasses.replace(IN_SLURM, kill_wait_ms=6_000)
    story = recalled(policy, dataclasses.replace(SLOW, saves_ms=(4_000,)))
    story.signal()
    story.look("COMPLETING", end_in_ms=0)
    assert story.notice.cause is Cause.CANCELLED
    story.wait(10)
    assert len(story.told(wire.Prepare)) == 1


def test_a_last_save_that_was_given_up_makes_the_watch_begin_the_next_one_sooner() -> None:
    """It takes longer than it had: known in this attempt, and after a requeue (History.tried_ms)."""
    story = recalled(WATCHED, History(tried_ms=26_000))
    assert story.state.longest_save_ms == 26_000
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=30_000), History())
    story.signal()
    story.agree()
    story.wait(30_000)
    assert story.state.given_up is not None
    assert 10_000 < story.state.longest_save_ms < 30_000


def test_a_guess_that_seems_too_short_waits_for_the_look_and_then_the_save_is_begun() -> None:
    """KillWait alone would not do, but the look finds a grace of 90 s."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal()
    assert story.told(wire.Prepare) == []
    story.look(preempted_in_ms=-40, end_in_ms=90_000)
    story.wait(10)
    assert len(story.told(wire.Prepare)) == 1


def test_where_nobody_can_be_asked_the_guess_decides_at_once() -> None:
    """Local mode: the grace is what it is."""
    story = recalled(LOCAL)
    story.signal()
    assert story.told(wire.Prepare) == []
    assert story.state.leaving is not None


def test_a_look_that_never_comes_is_waited_for_two_seconds() -> None:
    """Then the guess has to do."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal()
    story.wait(1_900)
    assert story.state.leaving is None
    story.wait(200)
    assert story.state.leaving is not None


def test_the_saves_of_this_attempt_count_before_those_of_attempts_before() -> None:
    """One that took 20 ms was seen: another one fits easily."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal("SIGUSR2")
    story.save()
    assert len(story.state.saves_ms) == 1
    story.signal()
    assert len(story.told(wire.Prepare)) == 2


def test_a_save_that_is_running_is_finished_whatever_was_measured_before() -> None:
    """After Go nothing is given up for being slow before its time is over (field case 35)."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal("SIGUSR2")
    story.agree()
    assert story.told(wire.Go)
    story.signal()
    story.look(preempted_in_ms=-40, end_in_ms=15_000)
    assert story.state.phase is Phase.SAVING
    story.write()
    story.commit()
    assert story.state.leaving is not None
    assert story.state.leaving.fresh


def test_a_round_that_has_not_begun_to_save_is_given_up_when_it_would_not_end() -> None:
    """Its ranks stand at the step, and are released."""
    story = recalled(dataclasses.replace(IN_SLURM, kill_wait_ms=6_000))
    story.signal("SIGUSR2")
    story.signal()
    story.look(preempted_in_ms=-40, end_in_ms=15_000)
    story.agree()
    assert story.told(wire.Go) == []
    assert story.state.leaving is not None
    assert story.state.leaving.reason.startswith("no save was begun: ")


def test_the_watch_begins_earlier_where_earlier_attempts_were_slow() -> None:
    """30 s and twice the longest save: 92 s before the end, not 30."""
    story = Story(WATCHED, 1)
    story.feed(ev.Recalled(SLOW))
    story.look(end_in_ms=600_000)
    story.wait(600_000 - 92_000 - 1_000)
    assert story.state.notice is None
    while story.state.looking:
        story.look(end_in_ms=93_000 - 100, after_ms=1)
    story.wait(1_500)
    assert story.notice.cause is Cause.LIMIT_AHEAD


@pytest.mark.parametrize(("left_ms", "goes_on"), [(120_000, True), (36_000, False)])
def test_an_early_notice_of_the_limit_lingers_until_the_watch_begins_the_last_save(left_ms: int, goes_on: bool) -> None:
    """--linger: saved at once, and training uses the time that is left; close before the watch it leaves."""
    story = Story(dataclasses.replace(WATCHED, lingers=True), 1)
    story.signal("SIGUSR1")
    for _ in range(4):
        while story.state.looking:
            story.look(end_in_ms=left_ms)
        story.wait(310)
    story.save()
    assert (story.state.notice is None) is goes_on
    assert (story.state.phase is Phase.RUNNING) is goes_on
    assert story.state.committed_step == 7


def test_without_linger_the_same_notice_leaves() -> None:
    """The default is to be out early."""
    story = Story(WATCHED, 1)
    story.signal("SIGUSR1")
    for _ in range(4):
        while story.state.looking:
            story.look(end_in_ms=120_000)
        story.wait(310)
    story.save()
    assert story.state.leaving is not None


# --- the interval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_ms", "mtbi_ms"), [(10_000, 3_600_000), (30_000, 21_600_000), (5_000, 86_400_000), (60_000, 7_200_000)]
)
def test_dalys_interval_loses_least(cost_ms: int, mtbi_ms: int) -> None:
    """Of all intervals: what saving costs and what is lost with failures that come by chance, by Daly's own model of both."""

    def lost(every_ms: float) -> float:
        return mtbi_ms * (math.exp((every_ms + cost_ms) / mtbi_ms) - 1) / every_ms

    found = interval.daly_ms(cost_ms, mtbi_ms)
    best = min((step * 1_000 for step in range(30, 20_000)), key=lost)
    assert lost(found) <= lost(best) * 1.001, (found, best)


def test_saves_never_take_more_than_a_tenth_of_the_time() -> None:
    """However often the run is interrupted."""
    assert interval.daly_ms(60_000, 120_000) == 600_000
    assert interval.daly_ms(10, 1_000) == interval.LEAST_MS


def test_the_interval_begins_with_the_guess_and_follows_what_is_measured() -> None:
    """--every auto: first by the prior and a guessed cost, then by the first save's."""
    story = Story(dataclasses.replace(LOCAL, every_auto=True), 1)
    first = story.state.interval
    assert first is not None
    assert (first.why, first.cost_ms, first.mtbi_ms) == ("auto, no save measured yet", interval.FIRST_COST_MS, 21_600_000)
    story.wait(first.every_ms)
    assert len(story.told(wire.Prepare)) == 1
    story.agree()
    story.write(after_ms=60_000)
    story.commit()
    second = story.state.interval
    assert second is not None
    assert second.why == "auto"
    assert second.cost_ms is not None
    assert 59_000 < second.cost_ms < 61_000
    assert second.every_ms > 2 * first.every_ms
    assert story.state.next_save_ms is not None
    assert abs(story.state.next_save_ms - story.now - second.every_ms) < 1_000


def test_interruptions_that_were_seen_make_it_shorter() -> None:
    """Eleven in ten hours, against a guess of one in six: it saves more than twice as often."""
    calm, rough = (
        recalled(dataclasses.replace(LOCAL, every_auto=True), history).state.interval
        for history in (History(holds_ms=(10_000,)), History(holds_ms=(10_000,), interruptions=11, ran_ms=36_000_000))
    )
    assert calm is not None
    assert rough is not None
    assert rough.mtbi_ms is not None
    assert 4_700_000 < rough.mtbi_ms < 4_900_000
    assert rough.every_ms * 2 < calm.every_ms + 60_000


def test_another_interval_holds_from_the_moment_it_is_asked_for() -> None:
    """`ckptctl save --every`."""
    story = Story(dataclasses.replace(LOCAL, every_ms=3_600_000), 1)
    story.feed(ev.Asked("every", 60_000))
    story.wait(59_000)
    assert story.told(wire.Prepare) == []
    story.wait(1_100)
    assert len(story.told(wire.Prepare)) == 1
    story.save()
    assert story.state.next_save_ms is not None
    assert 59_000 < story.state.next_save_ms - story.now <= 60_000
    story.feed(ev.Asked("every", None))
    assert story.state.interval is not None
    assert story.state.interval.why == "auto"


def test_without_every_there_is_no_interval_and_nothing_becomes_due() -> None:
    """The default."""
    story = Story(LOCAL, 1)
    assert (story.state.interval, story.state.next_save_ms) == (None, None)
    assert none_of(story.wait(100_000_000), do.Say)


# --- the owner's wish to leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requeue", [False, True])
def test_asked_to_leave_it_leaves_after_the_next_save_with_no_step_run_after_it(requeue: bool) -> None:
    """The round is a leave round from its beginning; the job comes back only if that was asked for."""
    story = Story(dataclasses.replace(IN_SLURM, every_ms=600_000), 1)
    story.feed(ev.Asked("leave_after_save", requeue=requeue, who="ckptctl save by ann"))
    assert story.state.phase is Phase.RUNNING
    story.wait(600_000)
    while story.state.looking:
        story.look()
    story.agree()
    order = story.told(wire.SaveAt)[-1]
    assert order.then == "leave"
    story.write()
    story.commit()
    story.end(0)
    if requeue:
        assert the(story.all, do.Meet)
    else:
        story.wait(10_000)
        assert story.asked(do.CallRequeue) == []
        assert story.exit.code == 75
        assert "not requeued: its owner asked it to leave (ckptctl save by ann)" in story.exit.line


def test_a_last_save_that_was_asked_for_and_does_not_make_it_costs_nothing() -> None:
    """Training goes on, and the next save is the last one."""
    story = Story(dataclasses.replace(LOCAL, every_ms=600_000), 1)
    story.feed(ev.Asked("leave_after_save"))
    story.wait(600_000)
    story.agree()
    member = next(iter(story.round.members))
    story.feed(wire.Failed(member.who, story.round.number, "disk full"))
    if story.state.phase is not Phase.RUNNING:
        story.agree()
        story.feed(wire.Failed(member.who, story.round.number, "disk full"))
    assert (story.state.phase, story.state.notice, story.state.leaving) == (Phase.RUNNING, None, None)
    story.wait(600_000)
    story.save(8)
    assert story.state.leaving is not None
    assert story.state.leaving.fresh
