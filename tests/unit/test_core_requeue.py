"""When the requeue is not to be had: refused, unknown, impossible, or not ours to call yet (docs/slurm.md, section 2).

Rows 16 and 16b of the cases that must hold. Unknown is not refused: who leaves the step in a grace loses the job on 22.05, who
stays until the kill is requeued by Slurm itself.
"""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_client import wire
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import leaving
from ckpt_supervisor.core.events import RequeueResult
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Asking, Phase
from ckpt_supervisor.core.views import NoView

from tests.support.core_story import IN_SLURM, LOCAL, Story, none_of, the, who

BLIND = dataclasses.replace(IN_SLURM, can_look=False)


def grace(story: Story, *, batch: bool = True) -> None:
    """Every look that is outstanding comes back: preempted, with 20 s to go from now on."""
    while story.state.looking:
        story.look(preempted_in_ms=-100, end_in_ms=20_000, batch=batch)


def saved(policy: Policy = IN_SLURM, ranks: int = 1) -> Story:
    """A preempted job that has saved, and whose training has ended: it meets the other steps now."""
    story = Story(policy, ranks)
    story.signal()
    grace(story)
    story.save()
    story.end(0)
    assert story.state.phase is Phase.REQUEUEING
    assert len(story.asked(do.Meet)) == 1
    return story


def called(policy: Policy = IN_SLURM) -> Story:
    """The same, and the requeue is under way."""
    story = saved(policy)
    story.feed(ev.Met(True, ""))
    grace(story)
    assert len(story.asked(do.CallRequeue)) == 1
    return story


def test_a_job_that_is_held_does_not_come_back_by_itself_and_the_line_says_what_lets_it() -> None:
    """scontrol requeuehold: "it comes back" would leave it in the queue until somebody wonders."""
    story = Story(IN_SLURM, 1)
    story.signal()
    story.look("COMPLETING", "job_requeued_in_held_state", restarts=1, end_in_ms=None)
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    story.look("COMPLETING", "job_requeued_in_held_state", restarts=1, end_in_ms=None)
    assert "holds the job (job_requeued_in_held_state): scontrol release lets it start again" in story.exit.line
    assert "by itself" not in story.exit.line


@pytest.mark.parametrize(
    "reason",
    ["Requested operation is presently disabled", "Only batch jobs are accepted or processed"],
    ids=["disabled", "batch"],
)
def test_a_definite_refusal_ends_with_75_and_says_why_and_what_to_do(reason: str) -> None:
    """Row 16: --no-requeue, or no batch job; asked once, and nothing is waited for after the answer."""
    story = called()
    story.requeued(RequeueResult.REFUSED, reason)
    assert story.exit.code == 75
    for part in ("step 7 is committed", f"not requeued: Slurm refused the requeue ({reason})", "start the same command again"):
        assert part in story.exit.line


def test_a_job_that_is_no_batch_job_is_not_asked_to_be_requeued() -> None:
    """Row 16: salloc; the look right before the call tells, so no call is made."""
    story = saved()
    story.feed(ev.Met(True, ""))
    grace(story, batch=False)
    assert story.asked(do.CallRequeue) == []
    assert story.exit.code == 75
    assert "not started by sbatch" in story.exit.line


def test_a_job_that_does_not_exist_any_more_is_not_asked_to_be_requeued() -> None:
    """A definite "no such job" is an answer, and not a failure to look."""
    story = saved()
    story.feed(ev.Met(True, ""))
    story.no_look(definite=True, after_ms=50)
    assert story.asked(do.CallRequeue) == []
    assert story.exit.code == 75
    assert "Slurm cannot be asked" in story.exit.line


def test_a_requeue_whose_result_is_unknown_is_looked_at_and_tried_again_with_growing_pauses() -> None:
    """Row 16: killed by the broadcast, timed out, "Unexpected message received": a look before every call."""
    story = called()
    pauses = []
    for _ in range(7):
        calls = len(story.asked(do.CallRequeue))
        story.requeued(RequeueResult.UNKNOWN, "killed by signal 15")
        began_ms = story.now
        while not story.state.looking:
            story.feed(ev.Tick(), (story.deadline or 0) - story.now)
        pauses.append(story.now - began_ms)
        assert len(story.asked(do.CallRequeue)) == calls
        grace(story)
        assert len(story.asked(do.CallRequeue)) == calls + 1
    assert pauses == [*leaving.PAUSES_MS, leaving.PAUSES_MS[-1], leaving.PAUSES_MS[-1]]
    story.requeued()
    story.signal()
    assert story.exit.code == 75
    assert "Slurm has accepted the requeue" in story.exit.line


def test_a_call_that_succeeded_with_its_answer_lost_is_found_out_by_the_look_and_not_repeated() -> None:
    """Restarts has risen: that was the requeue; its SIGTERM is on the way or here."""
    story = called()
    story.requeued(RequeueResult.UNKNOWN, "timed out")
    story.wait(leaving.PAUSES_MS[0])
    story.look("COMPLETING", restarts=1, end_in_ms=None)
    assert len(story.asked(do.CallRequeue)) == 1
    assert story.exit.code == 75


@pytest.mark.parametrize("result", [RequeueResult.ACCEPTED, RequeueResult.PENDING])
def test_a_job_that_is_pending_already_counts_as_requeued(result: RequeueResult) -> None:
    """A second call fails with "Job is pending execution": success."""
    story = called()
    story.requeued(result, "Job is pending execution")
    assert story.state.requeue is not None
    assert story.state.requeue.asking is Asking.ACCEPTED
    story.signal()
    assert story.exit.code == 75


def test_while_the_controller_is_away_it_stays_and_requeues_when_it_is_back() -> None:
    """Row 16: 18 s without an answer, looks and calls alike; never lost, never given up before the kill."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    story.no_look(after_ms=5_000)
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    away_ms = story.now
    while story.now < away_ms + 18_000:
        story.wait(1_000)
        if story.state.looking:
            story.no_look(after_ms=3_000)
    assert story.asked(do.Exit) == story.asked(do.CallRequeue) == []
    while not story.state.looking:
        story.wait(500)
    grace(story)
    story.requeued()
    story.signal()
    assert story.exit.code == 75
    assert "accepted" in story.exit.line


def test_without_scontrol_it_stays_in_the_step_until_it_is_killed() -> None:
    """Row 16: who stays is requeued by Slurm at the end of the grace; no call can be made, and none is pretended."""
    story = Story(BLIND, ranks=1)
    story.signal()
    story.save()
    story.end(0)
    story.feed(ev.Met(True, ""))
    story.wait(IN_SLURM.kill_wait_ms)
    assert story.asked(do.Exit) == []
    assert none_of(story.all, do.LookUp, do.CallRequeue)
    story.wait(leaving.STAY_MS)
    assert story.exit.code == 75
    assert "not requeued: requeue not confirmed: scontrol was not found" in story.exit.line


def test_a_requeue_that_is_never_answered_is_stayed_for_long_beyond_the_kill() -> None:
    """A frozen controller carries it out on waking; leaving meanwhile could lose the job."""
    story = called()
    kill_ms = story.notice.kill_at_ms
    story.wait(kill_ms + leaving.STAY_MS - story.now - 1)
    assert story.asked(do.Exit) == []
    story.wait(1)
    assert "requeue not confirmed" in story.exit.line
    assert len(story.asked(do.CallRequeue)) == 1


def test_a_supervisor_that_was_stopped_past_the_kill_still_tries_the_requeue() -> None:
    """Suspended in mid-save and continued an hour later: the time to stay counts from the requeue's begin then."""
    story = Story(IN_SLURM, ranks=1)
    story.signal()
    grace(story)
    story.agree()
    story.feed(ev.CommandExited(137), 3_600_000)
    story.wait(100)
    assert story.asked(do.Exit) == []
    story.feed(ev.Met(True, ""))
    grace(story)
    assert len(story.asked(do.CallRequeue)) == 1


def test_the_last_step_done_requeues_and_the_first_one_waits_for_it() -> None:
    """Row 16b: two steps side by side, saves of 1 s and 8 s; the first one's requeue would kill the other's save."""
    story = saved()
    asked = []
    for _ in range(10):
        story.feed(ev.Met(False, "step 1 is still saving"))
        asked.append(the(story.wait(leaving.MEET_AGAIN_MS), do.Meet))
    assert story.asked(do.CallRequeue) == []
    story.feed(ev.Met(True, ""))
    grace(story)
    assert len(story.asked(do.CallRequeue)) == 1


def test_a_step_that_never_gets_done_is_not_waited_for_beyond_the_time_of_the_requeue() -> None:
    """The share of the requeue is the requeue's, and what saves too slowly would not have made it."""
    story = saved()
    while not story.state.looking:
        story.feed(ev.Met(False, "step 1 is still saving"), 100)
        assert story.now <= story.notice.budget.leave_by_ms + 200
        story.wait(leaving.MEET_AGAIN_MS - 100)
    assert story.now >= story.notice.budget.leave_by_ms
    grace(story)
    assert len(story.asked(do.CallRequeue)) == 1


def test_a_state_directory_that_hangs_does_not_cost_the_requeue() -> None:
    """No answer of the other steps: a convenience, waited for at most two seconds."""
    story = saved()
    assert none_of(story.wait(leaving.MEET_MS - 1), do.LookUp)
    assert the(story.wait(1), do.LookUp)
    grace(story)
    assert len(story.asked(do.CallRequeue)) == 1


def test_with_preempt_mode_cancel_the_requeue_in_the_grace_brings_the_job_back() -> None:
    """Row 16b: Slurm would cancel it at the end of the grace; the look is that of any preemption."""
    story = called()
    assert story.notice.cause.value == "preempted"
    story.requeued()
    story.signal()
    assert story.exit.code == 75


@pytest.mark.parametrize(
    ("policy", "code", "words"),
    [
        (dataclasses.replace(IN_SLURM, requeue="never"), 75, "--requeue never"),
        (dataclasses.replace(IN_SLURM, requeue="exit", requeue_exit=85), 85, "exit 85 asks Slurm to requeue"),
        (LOCAL, 75, "no Slurm to requeue it"),
    ],
    ids=["never", "exit", "local"],
)
def test_where_no_requeue_is_to_be_called_it_ends_with_training(policy: Policy, code: int, words: str) -> None:
    """--requeue never, --requeue exit:85, and no Slurm at all: no meeting, no call."""
    story = Story(policy, ranks=1)
    story.signal()
    grace(story)
    story.save()
    story.end(0)
    assert none_of(story.all, do.Meet, do.CallRequeue)
    assert story.exit.code == code
    assert words in story.exit.line
    assert "step 7 is committed" in story.exit.line


def test_a_job_that_is_cancelled_while_the_requeue_is_tried_again_is_not_revived() -> None:
    """The look before the second call sees it, as the one before the first does."""
    story = called()
    story.requeued(RequeueResult.UNKNOWN, "timed out")
    story.wait(leaving.PAUSES_MS[0])
    story.look("COMPLETING", end_in_ms=0, preempted_in_ms=-4_000)
    story.wait(5_000)
    assert len(story.asked(do.CallRequeue)) == 1
    assert story.exit.code == 143


def test_a_signal_during_the_look_before_the_call_makes_it_look_again() -> None:
    """What the first look said may be from before a scancel."""
    story = saved()
    story.feed(ev.Met(True, ""))
    assert story.state.looking
    story.signal()
    story.look(preempted_in_ms=-100, end_in_ms=20_000)
    assert story.asked(do.CallRequeue) == []
    story.look("COMPLETING", end_in_ms=0, preempted_in_ms=-4_000)
    story.wait(5_000)
    assert story.asked(do.CallRequeue) == []
    assert story.exit.code == 143


def test_a_look_that_fails_is_no_permission_to_requeue() -> None:
    """ "Could not look" is never taken for "not cancelled"."""
    story = saved()
    story.feed(ev.Met(True, ""))
    for _ in range(3):
        story.feed(ev.Looked(NoView("timed out", False), "x"), 3_000)
        assert story.asked(do.CallRequeue) == []
        while not story.state.looking:
            story.wait(100)


def test_a_sigterm_before_the_call_is_not_that_of_the_requeue() -> None:
    """Only one that comes after the call can be: else an early one would let the supervisor leave too soon."""
    story = saved()
    story.signal()
    story.feed(ev.Met(True, ""))
    grace(story)
    story.requeued()
    assert story.asked(do.Exit) == []
    story.signal()
    assert story.exit.code == 75


def test_ranks_that_ask_again_on_the_way_out_are_told_to_leave() -> None:
    """Leave may have been lost: whoever is parked hears it in answer, and everybody once a second."""
    story = Story(IN_SLURM, ranks=2)
    story.signal()
    grace(story)
    story.save()
    for word in (wire.Arrived(who(0), 1, (7, 0)), wire.Saved(who(0), 1, 7, (), 5)):  # type: ignore[arg-type]
        assert story.feed(word) == (do.Say(100, wire.Leave(1)),)
    assert {say.pid for say in story.wait(1_000) if isinstance(say, do.Say)} == {100, 101}
