"""What must not come back: jobs that a person cancelled, and trainings that ended by themselves.

Owns: rows 6, 7 and 15 of the must-hold table and field cases 45, 63 and 65 (as far as exit statuses go).
Must not: take a quiet moment for proof; that no requeue was asked for stands in slurmctld's log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import BOTH, check_out_before_the_kill, check_requeued, check_resumed_at, check_saved
from tests.support.slurm_stage import THEN, TRAPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

KEEPS_THE_STATUS = "{run}\nrc=$?\necho rc=$rc\nexit $rc\n"


def check_cancelled(run: Run) -> None:
    """Left with 143, and the job is CANCELLED for good: nobody has asked for a requeue."""
    assert run.wait_exit() == 143
    record = run.wait_state("CANCELLED")
    assert record["Restarts"] == "0"
    assert run.requeue_calls() == []
    assert run.requeued_at() == []
    assert "STAGE2" not in run.output()
    check_out_before_the_kill(run)
    run.verify()


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_cancelled_job_is_saved_if_there_is_time_and_stays_cancelled(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 6 and field case 45: scancel in mid-training, and scancel of a preempted job while its save runs."""
    stage = new_stage(nodes=3, proctrack=proctrack, kill_wait=15)
    plain = stage.submit("-p", "low", toy="--save-ms 1000", script=TRAPPED)
    preempted = stage.submit("-p", "low", toy="--save-ms 6000", script=THEN)
    too_slow = stage.submit("-p", "low", toy="--save-ms 40000", script=TRAPPED)
    stage.started()
    preempted.preempt()
    preempted.wait_event("notice", cause="preempted")
    preempted.wait_line("saving")
    for run in (preempted, plain, too_slow):
        run.cancel()
    for run in stage.runs:
        check_cancelled(run)
    check_saved(plain)
    check_saved(preempted)
    assert too_slow.committed() == []
    assert "not requeued, as a person ended this job" in plain.output()


def test_a_requeue_by_somebody_else_is_saved_and_not_asked_for_again(new_stage: Callable[..., Stage]) -> None:
    """Row 7: `scontrol requeue` by hand: saved within KillWait, one call in slurmctld's log, which is that one."""
    stage = new_stage(proctrack="cgroup", kill_wait=12)
    run = stage.submit("-p", "low", toy="--save-ms 1000", script=TRAPPED)
    stage.started()
    stage.lab.checked("scontrol", "requeue", str(run.jobid))
    check_requeued(run, calls=1)
    assert run.events("requeue_called") == []
    check_resumed_at(run, check_saved(run))
    assert run.job()["Restarts"] == "1"


def test_a_training_that_ends_by_itself_keeps_its_status_and_is_not_requeued(new_stage: Callable[..., Stage]) -> None:
    """Row 15 and field cases 63 and 65: 0, 1, 77, SEGV and KILL become 0, 1, 77, 139 and 137; only 0 goes on to stage2."""
    ends = {"--exit-code 0": 0, "--exit-code 1": 1, "--exit-code 77": 77, "--end-signal SEGV": 139, "--end-signal KILL": 137}
    stage = new_stage(nodes=len(ends), proctrack="cgroup")
    script = KEEPS_THE_STATUS.replace("{run}", "{run} && echo STAGE2")
    for knob in ends:
        stage.submit("-p", "low", toy=f"--steps 5 {knob}", supervise="--every-steps 3", script=script)
    for run, code in zip(stage.runs, ends.values(), strict=True):
        record = run.wait_state("COMPLETED", "FAILED", timeout=90)
        assert run.exit_codes() == [code]
        assert f"rc={code}" in run.lines()
        assert ("STAGE2" in run.lines()) == (code == 0)
        assert record["ExitCode"] == f"{code}:0"
        assert record["JobState"] == ("COMPLETED" if code == 0 else "FAILED")
        assert record["Restarts"] == "0"
        assert run.requeue_calls() == []
        run.verify()
