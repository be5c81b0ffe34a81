"""When the job is looked at, when the last save begins by itself, and what a notice is worth (docs/slurm.md, sections 1, 3)."""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import notices
from ckpt_supervisor.core.budget import cut
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.core.state import Kind, Phase

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the, who

WATCHED = dataclasses.replace(IN_SLURM, lead_ms=30_000)
WAIT_MS = IN_SLURM.kill_wait_ms
HOUR_MS = 3_600_000


def answer_looks(story: Story, **seen: object) -> None:
    """Every look that is asked for from now on, also a further one, sees the same."""
    for _ in range(2 * len(notices.RELOOKS_MS) + 2):
        if story.state.looking:
            story.look(**seen)  # type: ignore[arg-type]
        relook_ms = story.state.notice.relook_ms if story.state.notice is not None else None
        if relook_ms is not None:
            story.wait(max(0, relook_ms - story.now))


# --- what a signal means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGUSR1"], ["SIGUSR1", "SIGTERM"], ["SIGTERM", "SIGUSR1"], ["SIGHUP"]])
def test_the_cause_and_the_kill_come_from_the_look_and_never_from_the_signal(signals: list[str]) -> None:
    """Field case 24: with and without `preempt_send_user_signal`, in either order, the outcome is the same."""
    story = Story(WATCHED, ranks=2)
    for name in signals:
        story.signal(name, after_ms=0)
    story.now += 5
    kill_ms = story.now + 30 + 20_000 + WAIT_MS
    while story.state.looking:
        story.look(preempted_in_ms=-30, end_in_ms=kill_ms - WAIT_MS - story.now - 30)
    assert story.notice.cause is Cause.PREEMPTED
    assert story.notice.kill_at_ms == kill_ms
    assert story.round.kind is Kind.LEAVE
    assert story.told(wire.Prepare, 100) == [wire.Prepare(1)]


def test_a_notice_begins_its_round_before_the_look_is_back() -> None:
    """No time is lost: the ranks are asked in the same step, with KillWait as the time that is surely there."""
    story = Story(IN_SLURM, ranks=2)
    found = story.signal()
    assert the(found, do.LookUp)
    assert [say.word for say in found if isinstance(say, do.Say)] == [wire.Prepare(1)] * 2
    assert story.notice.budget == cut(story.now, story.now + WAIT_MS)
    assert story.round.save_by_ms == story.notice.budget.save_by_ms


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_rehearsed_notice_saves_and_lets_training_go_on(ranks: int) -> None:
    """Field case 26: `scancel --signal=USR1` in mid-run; RUNNING, the end hours away, so no end is in sight."""
    story = Story(WATCHED, ranks)
    story.signal("SIGUSR1")
    if ranks:
        story.save(7)
    answer_looks(story, end_in_ms=HOUR_MS)
    assert story.state.notice is None
    assert story.state.phase is Phase.RUNNING
    assert len(story.asked(do.Commit)) == ranks
    assert none_of(story.all, do.EndCommand, do.Meet, do.CallRequeue, do.Exit)


def test_a_rehearsal_that_is_known_as_such_before_go_tells_all_ranks_to_go_on() -> None:
    """The leave round turns back into one after which training goes on."""
    story = Story(WATCHED, ranks=2)
    story.signal("SIGUSR1")
    answer_looks(story, end_in_ms=HOUR_MS)
    assert story.round.kind is Kind.SAVE
    story.agree(7)
    assert story.told(wire.Go) == [wire.Go(1, "go_on")] * 2
    story.write(7)
    assert [say.word for say in story.commit(7) if isinstance(say, do.Say)] == [wire.Abort(1, "committed, go on")] * 2


def test_one_look_is_not_enough_to_call_a_notice_a_rehearsal() -> None:
    """The first look may be 60 ms too early: the next one sees the preemption, and the round stays what it was."""
    story = Story(WATCHED, ranks=1)
    story.signal("SIGUSR1")
    story.look(end_in_ms=HOUR_MS)
    assert story.state.notice is not None
    assert the(story.wait(notices.RELOOKS_MS[0]), do.LookUp)
    story.look(preempted_in_ms=-100, end_in_ms=20_000)
    assert story.notice.cause is Cause.PREEMPTED
    assert story.round.kind is Kind.LEAVE


def test_a_sigterm_is_never_a_rehearsal() -> None:
    """TERM while RUNNING with PreemptTime None is no warning either: a step limit, say. The deadline is KillWait from it."""
    story = Story(WATCHED, ranks=1)
    story.signal("SIGTERM")
    first_ms = story.now
    answer_looks(story, end_in_ms=HOUR_MS)
    assert story.notice.kill_at_ms == first_ms + WAIT_MS
    assert story.round.kind is Kind.LEAVE


def test_a_far_notice_counts_where_nobody_else_would_save_before_the_end() -> None:
    """With the end-time watch off, `--signal=USR1@1200` is all the warning there is."""
    story = Story(IN_SLURM, ranks=1)
    story.signal("SIGUSR1")
    answer_looks(story, end_in_ms=1_200_000)
    assert story.notice.cause is Cause.LIMIT_AHEAD
    assert story.round.kind is Kind.LEAVE


@pytest.mark.parametrize("meaning", [ev.Meaning.LEAVE, ev.Meaning.INTERRUPT])
def test_without_slurm_the_kill_is_the_grace_after_the_signal(meaning: ev.Meaning) -> None:
    """Local mode: nobody is asked, and no cause is ever "cancelled"."""
    story = Story(dataclasses.replace(LOCAL, grace_ms=12_000), ranks=1)
    found = story.signal("SIGINT", meaning)
    assert none_of(found, do.LookUp)
    assert story.kill_in_ms == 12_000
    assert story.notice.cause is Cause.LOCAL


def test_the_second_ctrl_c_ends_at_once() -> None:
    """Without Slurm: the round is given up, and training is killed without further waiting."""
    story = Story(LOCAL, ranks=1)
    story.signal("SIGINT")
    story.agree(7)
    found = [*story.signal("SIGINT"), *story.feed(ev.Tick(), 0)]
    assert the(found, do.EndCommand)
    story.feed(ev.CommandExited(137))
    assert story.exit.code == 76


# --- looks --------------------------------------------------------------------------------------------------------------------


def test_one_look_runs_at_a_time_and_a_signal_during_it_causes_exactly_one_more() -> None:
    """scontrol is asked gently; what the running look says may be from before the signal."""
    story = Story(IN_SLURM, ranks=1)
    assert the(story.signal(), do.LookUp)
    for _ in range(3):
        assert none_of(story.signal(), do.LookUp)
    assert the(story.look(preempted_in_ms=-30, end_in_ms=20_000), do.LookUp)
    story.look(preempted_in_ms=-60, end_in_ms=19_970)
    assert not story.state.looking


def test_a_state_that_does_not_explain_the_signal_is_looked_at_again_a_few_times_and_no_more() -> None:
    """After 100, 300 and 1,000 ms: then it is taken as it is."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    pauses = []
    while story.state.looking:
        story.look()
        began_ms = story.now
        story.wait(1_500)
        if story.state.looking:
            assert story.state.asked_ms is not None
            pauses.append(story.state.asked_ms - began_ms)
    assert pauses == list(notices.RELOOKS_MS)


def test_every_further_signal_is_looked_into_afresh() -> None:
    """A scancel may have come meanwhile: the count of further looks begins anew."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    answer_looks(story)
    looks = len(story.asked(do.LookUp))
    story.signal()
    answer_looks(story)
    assert len(story.asked(do.LookUp)) - looks == 1 + len(notices.RELOOKS_MS)


def test_a_look_that_fails_falls_back_to_kill_wait_and_is_tried_again() -> None:
    """Row 16: a frozen controller; the time that is surely there is used, and a later look may still explain."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    first_ms = story.now
    story.no_look(after_ms=5_000)
    assert story.notice.kill_at_ms == first_ms + WAIT_MS
    assert story.notice.cause is Cause.UNKNOWN
    assert the(story.wait(notices.RELOOKS_MS[0]), do.LookUp)
    story.look(preempted_in_ms=-5_100, end_in_ms=14_900)
    assert story.notice.cause is Cause.PREEMPTED
    assert story.notice.kill_at_ms > first_ms + WAIT_MS


def test_without_signals_the_end_time_is_looked_at_every_five_minutes() -> None:
    """`scontrol update TimeLimit` moves it; and not more often, also where the look fails."""
    story = Story(IN_SLURM, started=False)
    assert story.asked(do.LookUp) == [do.LookUp("start")]
    story.look(end_in_ms=24 * HOUR_MS)
    for _ in range(3):
        assert none_of(story.wait(notices.REFRESH_MS - 1), do.LookUp)
        assert the(story.wait(1), do.LookUp)
        story.look(end_in_ms=24 * HOUR_MS, after_ms=0)


def test_a_failed_look_at_the_start_is_tried_again_soon_and_then_once_a_minute() -> None:
    """The number of restarts at the start is worth knowing; a controller that is down is still not pestered."""
    story = Story(IN_SLURM, started=False)
    story.no_look(after_ms=100)
    assert the(story.wait(notices.FIRST_RETRY_MS), do.LookUp)
    story.look(end_in_ms=HOUR_MS)
    story.wait(notices.REFRESH_MS)
    story.no_look(after_ms=100)
    assert none_of(story.wait(notices.REVIVE_CHECK_STALE_MS - 1), do.LookUp)
    assert the(story.wait(1), do.LookUp)


def test_the_first_look_settles_how_often_the_job_had_been_restarted() -> None:
    """One interruption can count 2, so SLURM_RESTART_COUNT may lag: what stood there at the start is no requeue."""
    story = Story(IN_SLURM, started=False)
    story.look(restarts=2)
    story.signal()
    story.look("COMPLETING", restarts=2, end_in_ms=0)
    assert story.notice.cause is Cause.CANCELLED


def test_a_look_that_sees_the_end_without_a_signal_is_the_notice() -> None:
    """Not under srun no signal may come at all; the refresh sees the preemption."""
    story = Story(IN_SLURM, ranks=1)
    story.wait(notices.REFRESH_MS)
    story.look(preempted_in_ms=-3_000, end_in_ms=17_000)
    assert story.notice.cause is Cause.PREEMPTED
    assert story.kill_in_ms == 17_000 + WAIT_MS
    assert story.round.kind is Kind.LEAVE


# --- the end-time watch ---------------------------------------------------------------------------------------------------------


def watched(end_in_ms: int, ranks: int = 1) -> Story:
    """A job that ends so long after the supervisor's start, as the first look has seen."""
    story = Story(WATCHED, started=False)
    story.look(end_in_ms=end_in_ms, after_ms=0)
    for rank in range(ranks):
        story.hello(rank, ranks)
    return story


def run_until_notice(story: Story, end_ms: int) -> int:
    """Time passes, each look sees this end; when the last save began."""
    while story.state.notice is None:
        assert story.deadline is not None
        story.wait(max(0, story.deadline - story.now))
        if story.state.looking:
            story.look(end_in_ms=end_ms - story.now, after_ms=0)
    return story.now


def test_the_watch_begins_the_last_save_before_the_end_of_the_jobs_time() -> None:
    """Field cases 30 and 32: counted back from the job's end, not from the start of training; no signal was needed."""
    story = watched(120_000)
    end_ms = story.state.end_at_ms
    assert end_ms is not None
    assert run_until_notice(story, end_ms) == end_ms - 30_000
    assert story.notice.name == "end-time watch"
    assert story.notice.cause is Cause.LIMIT_AHEAD
    assert story.round.kind is Kind.LEAVE
    assert story.notice.kill_at_ms == end_ms + WAIT_MS
    story.save(7)
    story.end(0)
    assert the(story.all, do.Meet)
    assert story.now < end_ms


def test_the_watch_looks_once_more_shortly_before_it_acts() -> None:
    """Field case 30: `scontrol update TimeLimit` in mid-run moves the request; the old end is not acted on."""
    story = watched(120_000)
    end_ms = story.state.end_at_ms
    assert end_ms is not None
    found = story.wait(end_ms - 30_000 - notices.WATCH_LOOK_MS - story.now)
    assert the(found, do.LookUp)
    later_ms = end_ms + 120_000
    story.look(end_in_ms=later_ms - story.now, after_ms=0)
    story.wait(notices.WATCH_LOOK_MS + 1_000)
    assert story.state.notice is None
    assert run_until_notice(story, later_ms) == later_ms - 30_000


def test_the_lead_grows_with_the_longest_save() -> None:
    """Twice the longest one so far is set aside beside the 30 s."""
    story = watched(600_000)
    end_ms = story.state.end_at_ms
    assert end_ms is not None
    story.signal("SIGUSR2")
    story.agree(7)
    story.write(7, save_ms=40_000)
    story.commit(7)
    assert run_until_notice(story, end_ms) == end_ms - 110_000


def test_a_short_job_is_not_spent_on_its_last_save() -> None:
    """Never in the first half of the time that was left at first sight."""
    story = watched(40_000)
    began_ms, end_ms = story.now, story.state.end_at_ms
    assert end_ms is not None
    assert run_until_notice(story, end_ms) >= began_ms + 20_000 - 20


def test_the_watch_acts_on_what_it_knows_when_the_look_fails() -> None:
    """A controller that is down at the wrong moment must not cost the last save."""
    story = watched(120_000)
    end_ms = story.state.end_at_ms
    assert end_ms is not None
    story.wait(end_ms - 30_000 - notices.WATCH_LOOK_MS - story.now)
    story.no_look(after_ms=2_500)
    story.wait(600)
    assert story.notice.name == "end-time watch"


def test_during_a_round_the_watch_makes_that_round_the_last_one() -> None:
    """No second round beside it: as with any notice (docs/protocol.md, rule 12)."""
    story = watched(120_000)
    end_ms = story.state.end_at_ms
    assert end_ms is not None
    story.wait(end_ms - 33_000 - story.now)
    story.look(end_in_ms=end_ms - story.now, after_ms=0)
    story.signal("SIGUSR2")
    story.wait(3_500)
    assert story.round.number == 1
    assert story.round.kind is Kind.LEAVE


@pytest.mark.parametrize("policy", [IN_SLURM, LOCAL], ids=["off", "local"])
def test_without_a_watch_nothing_begins_by_itself(policy: object) -> None:
    """--lead off, or no Slurm."""
    story = Story(policy)  # type: ignore[arg-type]
    if story.state.looking or policy is IN_SLURM:
        story.look(end_in_ms=60_000)
    story.wait(200_000)
    assert story.state.notice is None


def test_a_warning_that_comes_early_is_given_the_time_that_is_really_left() -> None:
    """Field case 31: `@30` that came 36 s and more before; remaining time is read from the job's end, not from the option."""
    for left_ms in (32_000, 66_000, 92_000):
        story = Story(WATCHED, ranks=1)
        story.signal("SIGUSR1")
        story.look(end_in_ms=left_ms)
        assert story.kill_in_ms == left_ms + WAIT_MS
        order = story.state.round
        assert order is not None
        assert order.save_by_ms == cut(story.now, story.notice.kill_at_ms).save_by_ms


# --- later signals only shorten -------------------------------------------------------------------------------------------


def test_once_explained_a_kill_only_comes_nearer() -> None:
    """Field case 34: whatever later looks see."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    story.look(preempted_in_ms=-30, end_in_ms=20_000)
    kill_ms = story.notice.kill_at_ms
    for end_in_ms in (60_000, 15_000, 90_000, 2_000, 40_000):
        story.look(preempted_in_ms=-200, end_in_ms=end_in_ms)
        assert story.notice.kill_at_ms <= kill_ms
        kill_ms = story.notice.kill_at_ms


def test_a_further_sigterm_is_that_of_the_end_until_a_look_says_otherwise() -> None:
    """A scancel in the grace has KillWait and no more, also if the look hangs; a look that still sees the grace gives it back."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    story.look(preempted_in_ms=-30, end_in_ms=20_000)
    kill_ms = story.notice.kill_at_ms
    story.signal(after_ms=3_000)
    assert story.notice.kill_at_ms == story.now + WAIT_MS < kill_ms
    assert story.round.save_by_ms == story.notice.budget.save_by_ms
    story.look(preempted_in_ms=-3_060, end_in_ms=16_970)
    assert story.notice.kill_at_ms == kill_ms


def test_a_guess_is_replaced_by_the_first_look_that_explains() -> None:
    """KillWait is the guess; a preemption with a longer grace gives its time back to the running round."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    guess_ms = story.round.save_by_ms
    story.look(preempted_in_ms=-30, end_in_ms=20_000)
    assert story.round.save_by_ms > guess_ms
    assert story.round.number == 1


def test_ranks_are_told_the_time_that_is_left_as_a_duration() -> None:
    """Two nodes' clocks cannot be compared: SaveAt says how long, counted from when it is said."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    story.look(preempted_in_ms=-30, end_in_ms=20_000)
    story.feed(wire.Ack(who(0), 1, wire.Position(7, 0)))
    order = story.told(wire.SaveAt)[-1]
    assert order.left_ms == story.round.save_by_ms - story.now
    assert 0 < order.left_ms < 20_000 + WAIT_MS
    story.wait(1_000)
    assert story.told(wire.SaveAt)[-1].left_ms == order.left_ms - 1_000


def test_ranks_are_late_while_somebody_is_waited_for_at_the_agreed_step_until_go() -> None:
    """A rank whose training thread hangs still answers Prepare, from its listener: the step is fixed, and nobody is waited for
    but that one."""
    story = Story(IN_SLURM, ranks=2)
    story.signal()
    last_ms = story.notice.budget.save_by_ms - notices.LATE_MS
    assert last_ms > (story.notice.first_ms + story.notice.budget.save_by_ms) // 2
    assert not notices.ranks_are_late(story.state, last_ms - 1)
    assert notices.ranks_are_late(story.state, last_ms)
    for rank in range(2):
        story.feed(wire.Ack(who(rank), 1, wire.Position(7, 0)))
    story.feed(wire.Arrived(who(0), 1, wire.Position(7, 0)))
    assert story.state.phase is Phase.SAVING
    assert not notices.ranks_are_late(story.state, last_ms - 1)
    assert notices.ranks_are_late(story.state, last_ms)
    story.feed(wire.Arrived(who(1), 1, wire.Position(7, 0)))
    assert story.round.go
    assert not notices.ranks_are_late(story.state, last_ms)
