"""What a look at the job means: docs/slurm.md section 3, row by row, for both versions of Slurm.

Two clocks meet here: Slurm tells wall clock, the answer is on the machine's own. They are far apart in every test.
"""

from __future__ import annotations

import dataclasses

import pytest
from ckpt_supervisor.core.policy import Cause, Policy, Reading, lead_ms, read, runs
from ckpt_supervisor.core.views import JobView

from tests.support.core_story import view

NOW = 5_000
WAIT_MS = 30_000
POLICY = Policy(directory="/ckpt", slurm=True, can_look=True, start_restarts=2, kill_wait_ms=WAIT_MS)


def looked(state: str, reason: str = "None", *, restarts: int = 2, **more: object) -> JobView:
    """A look at a job that had been restarted twice when this attempt began."""
    return view(NOW, state, reason, restarts=restarts, **more)  # type: ignore[arg-type]


def reading(job: JobView, earlier_preempted_in_ms: int | None = None, since_ms: int | None = None) -> Reading:
    """What that look means; `earlier_preempted_in_ms`: the PreemptTime that an earlier look of this notice saw."""
    earlier_ms = None if earlier_preempted_in_ms is None else job.looked_ms + earlier_preempted_in_ms
    return read(job, POLICY, NOW, earlier_ms, since_ms)


@pytest.mark.parametrize(
    ("job", "cause", "kill_in_ms", "explained"),
    [
        # Preempted, in the grace. 27 % of notices see SIGNALING. After EndTime Slurm takes its time, then KillWait begins.
        (looked("RUNNING", preempted_in_ms=-200, end_in_ms=20_000), Cause.PREEMPTED, 20_000 + WAIT_MS, True),
        (looked("SIGNALING", preempted_in_ms=0, end_in_ms=20_000), Cause.PREEMPTED, 20_000 + WAIT_MS, True),
        # The same with TimeLimit=UNLIMITED: EndTime is Unknown, so PreemptTime and the partition's GraceTime have to do.
        (looked("RUNNING", preempted_in_ms=-2_000, end_in_ms=None, grace_ms=20_000), Cause.PREEMPTED, 18_000 + WAIT_MS, True),
        (looked("RUNNING", preempted_in_ms=-2_000, end_in_ms=None), Cause.PREEMPTED, WAIT_MS, True),
        # The grace is over and the kill is late (Slurm checks every 30 s): nothing negative.
        (looked("RUNNING", preempted_in_ms=-25_000, end_in_ms=-5_000), Cause.PREEMPTED, WAIT_MS, True),
        # A warning, `scancel --signal`, a step's own limit: the state does not say why.
        (looked("RUNNING", end_in_ms=60_000), Cause.LIMIT_AHEAD, 60_000 + WAIT_MS, False),
        (looked("RUNNING", end_in_ms=-12_000), Cause.LIMIT_AHEAD, WAIT_MS, False),
        (looked("RUNNING", end_in_ms=None), Cause.NO_END, None, False),
        # The time limit.
        (looked("COMPLETING", "TimeLimit", end_in_ms=0), Cause.TIME_LIMIT, WAIT_MS, True),
        (looked("TIMEOUT", "TimeLimit", end_in_ms=-1_000), Cause.TIME_LIMIT, WAIT_MS, True),
        # scancel, also of a job in its grace, which keeps its PreemptTime.
        (looked("COMPLETING", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        (looked("COMPLETING", preempted_in_ms=-4_000, end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        (looked("CANCELLED", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        # Node failure with --no-requeue.
        (looked("COMPLETING", "NodeDown", end_in_ms=0, requeue=False), Cause.NODE_FAILURE, WAIT_MS, True),
        (looked("NODE_FAIL", "NodeDown", end_in_ms=0), Cause.NODE_FAILURE, WAIT_MS, True),
        # The batch shell was killed: 22.05 and 24.11 give different reasons; a person's doing either way.
        (looked("COMPLETING", "JobLaunchFailure", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        (looked("COMPLETING", "RaisedSignal:10", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        # The script has ended and the step ran in the background: like a scancel, and treated as one.
        (looked("COMPLETING", "NonZeroExitCode", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        (looked("COMPLETED", end_in_ms=0), Cause.CANCELLED, WAIT_MS, True),
        # Requeued by somebody, by a preemption without grace, after a node failure, or requeued and held.
        (looked("COMPLETING", restarts=3, end_in_ms=3_600_000), Cause.REQUEUED, WAIT_MS, True),
        (looked("COMPLETING", restarts=3, end_in_ms=None), Cause.REQUEUED, WAIT_MS, True),
        (looked("PENDING", "BeginTime", restarts=3, end_in_ms=None), Cause.REQUEUED, WAIT_MS, True),
        (looked("COMPLETING", "job_requeued_in_held_state", restarts=3, end_in_ms=None), Cause.REQUEUED, WAIT_MS, True),
        # One interruption can count 2.
        (looked("COMPLETING", restarts=4, end_in_ms=None), Cause.REQUEUED, WAIT_MS, True),
    ],
)  # fmt: skip
def test_each_row_of_the_table_gives_its_cause_and_its_kill_time(
    job: JobView, cause: Cause, kill_in_ms: int | None, explained: bool
) -> None:
    """Cause, instant of the kill on the machine's clock, and whether that explains a signal."""
    found = reading(job)
    assert found.cause is cause
    assert found.explained is explained
    assert found.kill_at_ms == (None if kill_in_ms is None else NOW + kill_in_ms)


@pytest.mark.parametrize("state", ["COMPLETING", "RUNNING", "PENDING", "TIMEOUT", "SIGNALING"])
@pytest.mark.parametrize("reason", ["None", "TimeLimit", "NodeDown", "BeginTime"])
@pytest.mark.parametrize("preempted_in_ms", [None, 0, -5_000])
def test_a_job_with_more_restarts_is_requeued_already_whatever_else_it_says(
    state: str, reason: str, preempted_in_ms: int | None
) -> None:
    """Restarts come before the reason and before PreemptTime: a second requeue would fail, or count twice."""
    job = looked(state, reason, restarts=3, preempted_in_ms=preempted_in_ms, end_in_ms=0)
    assert reading(job).cause is Cause.REQUEUED


def test_fewer_restarts_than_at_the_start_are_no_requeue() -> None:
    """SLURM_RESTART_COUNT and Restarts need not agree to the number: only more of them mean anything."""
    assert reading(looked("COMPLETING", restarts=1, end_in_ms=0)).cause is Cause.CANCELLED


@pytest.mark.parametrize(
    ("requeue", "earlier_ms", "cause"),
    [
        (False, None, Cause.PREEMPTED),  # --no-requeue: it cannot be revived anyway.
        (False, -20_000, Cause.PREEMPTED),
        (True, -20_000, Cause.PREEMPTED),  # PreemptMode=CANCEL: PreemptTime has moved to the end of the grace.
        (True, None, Cause.CANCELLED),  # scancel in the very second of the notice looks like this on 22.05.
        (True, 0, Cause.CANCELLED),  # PreemptTime has not moved: cancelled in that second.
    ],
)
def test_a_job_that_ends_at_its_preempt_time_is_taken_for_cancelled_when_in_doubt(
    requeue: bool, earlier_ms: int | None, cause: Cause
) -> None:
    """The end of a grace without requeue, and a scancel in the second of the notice, differ by what was seen before."""
    job = looked("COMPLETING", preempted_in_ms=0, end_in_ms=0, requeue=requeue)
    assert reading(job, earlier_ms).cause is cause


def test_the_time_limit_in_the_grace_is_still_a_preemption() -> None:
    """EndTime is the earlier of both, and Slurm requeues: PREEMPTED, not TIMEOUT."""
    job = looked("RUNNING", preempted_in_ms=-1_000, end_in_ms=4_000)
    assert reading(job) == Reading(Cause.PREEMPTED, NOW + 4_000 + WAIT_MS, explained=True)


@pytest.mark.parametrize("state", ["COMPLETING", "TIMEOUT", "NODE_FAIL", "CANCELLED"])
def test_kill_wait_runs_from_the_sigterm_and_not_from_the_look(state: str) -> None:
    """A look can take seconds: the end of the job began with its SIGTERM, so that is where KillWait counts from."""
    job = looked(state, end_in_ms=-3_000)
    assert reading(job, since_ms=NOW - 3_000).kill_at_ms == NOW - 3_000 + WAIT_MS


def test_a_look_at_a_running_job_is_not_moved_by_an_earlier_signal() -> None:
    """There the kill is told by the job's own times."""
    job = looked("RUNNING", preempted_in_ms=0, end_in_ms=20_000)
    assert reading(job, since_ms=NOW - 3_000).kill_at_ms == NOW + 20_000 + WAIT_MS


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "SUSPENDED", "CONFIGURING", "STAGE_OUT", "RESIZING", "STOPPED"])
def test_states_in_the_place_of_running_are_running(state: str) -> None:
    """Slurm shows flags there; one that is not known must not look like the end of the job."""
    assert runs(looked(state))
    assert reading(looked(state, preempted_in_ms=0, end_in_ms=9_000)).cause is Cause.PREEMPTED


@pytest.mark.parametrize(
    "state", ["COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"]
)
def test_states_of_the_end_are_not_running(state: str) -> None:
    """They begin KillWait."""
    assert not runs(looked(state))
    assert reading(looked(state, end_in_ms=0)).kill_at_ms == NOW + WAIT_MS


def test_only_what_is_seen_decides() -> None:
    """Cause and kill are a function of the look and the options: a signal's number is no argument at all (field case 24)."""
    job = looked("RUNNING", preempted_in_ms=0, end_in_ms=20_000)
    same = dataclasses.replace(job, batch=False, requeue=False)
    assert reading(job) == reading(job) == reading(same)


@pytest.mark.parametrize(
    ("given_ms", "auto", "longest_save_ms", "expected"),
    [
        (None, True, 5_000, None),
        (30_000, True, 0, 30_000),
        (30_000, True, 45_000, 120_000),
        (90_000, False, 45_000, 90_000),
        (0, False, 45_000, 0),
    ],
)
def test_the_lead_grows_with_the_longest_save_unless_it_was_given(
    given_ms: int | None, auto: bool, longest_save_ms: int, expected: int | None
) -> None:
    """Twice the longest save is set aside beside the fixed part; a lead that was told is taken as it is."""
    policy = dataclasses.replace(POLICY, lead_ms=given_ms, lead_auto=auto)
    assert lead_ms(policy, longest_save_ms) == expected


@pytest.mark.parametrize(
    ("kill_wait_ms", "told_ms", "expected"),
    [
        (30_000, None, 7_500),
        (120_000, None, 10_000),
        (4_000, None, 1_500),
        (0, None, 1_500),
        (30_000, 0, 0),
        (30_000, 60_000, 60_000),
    ],
)
def test_the_time_to_leave_is_a_share_of_kill_wait_within_bounds(kill_wait_ms: int, told_ms: int | None, expected: int) -> None:
    """A quarter, at least 1.5 s and at most 10 s, unless it was told."""
    assert dataclasses.replace(POLICY, kill_wait_ms=kill_wait_ms, leave_timeout_ms=told_ms).leave_ms == expected
