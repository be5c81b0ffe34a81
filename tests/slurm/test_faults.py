"""Ranks that die, hang or leave in mid-save, and nodes that die: what stands is whole, and the job comes back.

Owns: rows 8 and 12 of the must-hold table and field cases 55 and 61.
Must not: test faults of the store itself; tests/unit and tests/process do, without a Slurm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import (
    BOTH,
    check_older_stands,
    check_out_before_the_kill,
    check_requeued,
    check_resumed_at,
    took_s,
)
from tests.support.slurm_stage import TRAPPED, own_toy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage

FAULTS = {
    "--kill-self-in-save": ("rank_gone", "ended"),
    "--stop-self-in-save": ("rank_late", "time for the save was over"),
    "--fail-save": ("rank_failed", "No space left on device"),
    "--hang-save": ("rank_late", "time for the save was over"),
}


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_rank_that_fails_in_mid_save_is_named_and_the_older_checkpoint_stands(
    new_stage: Callable[..., Stage], proctrack: str
) -> None:
    """Row 12: killed, stopped, failing and hanging saves are named; out before the kill, requeued, resumed from before."""
    stage = new_stage(nodes=len(FAULTS), proctrack=proctrack, grace=4, kill_wait=10)
    for fault in FAULTS:
        stage.submit("-p", "low", command=own_toy(f"--faults-from 2 --save-ms 1500 {fault}"), script=TRAPPED)
    stage.started()
    older = {}
    for run in stage.runs:
        run.cancel("--signal=USR2")
        older[run.node] = run.wait_event("commit", result="committed")["step"]
    for run in stage.runs:
        run.preempt()
    for run, (event, reason) in zip(stage.runs, FAULTS.values(), strict=True):
        check_requeued(run, code=76)
        check_older_stands(run, older[run.node])
        check_out_before_the_kill(run)
        named = run.events(event, rank=0, attempt=0)
        assert named
        assert reason in named[-1]["reason"]
        assert f"step-{older[run.node]:09d} stands" in run.event("exit", attempt=0)["line"]


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_job_whose_node_dies_goes_on_elsewhere_from_the_last_periodic_checkpoint(
    new_stage: Callable[..., Stage], proctrack: str
) -> None:
    """Row 8 and field case 55: SIGKILL of slurmd, slurmstepd, supervisor, trainer: another node resumes what was committed."""
    stage = new_stage(nodes=2, proctrack=proctrack)
    run = stage.submit("-p", "low", supervise="--every-steps 20 --resume-arg=--resume-from", anywhere=True, script=TRAPPED)
    run.wait_event("commit", 2, result="committed")
    died = stage.lab.node_of(run.jobid)
    stage.lab.node_kill(died)
    before = run.left_at()
    committed = run.wait_event("command_started", attempt=1)["resume_step"]
    # Committed, but for the journal's word on it, is what the kill may have come into; and it trains while a save is verified.
    begun = [entry["step"] for entry in run.events("go", attempt=0)]
    assert run.committed(attempt=0)[-1] <= committed <= begun[-1]
    assert committed in begun[-2:]
    assert before - begun[-1] <= 20
    check_resumed_at(run, committed)
    assert stage.lab.node_of(run.jobid) != died
    assert any(word[0] == "resume-arg" and word[1].endswith(f"step-{committed:09d}") for word in run.words())
    assert run.job()["Restarts"] == "1"
    assert run.requeue_calls() == []
    run.wait_steps(before + 5)
    run.verify()


def test_a_rank_that_ends_at_the_notice_does_not_hold_the_others(new_stage: Callable[..., Stage]) -> None:
    """Field case 61: rank 0 exits 0 at once by a TERM handler of its own; rank 1 does not hold the step beyond the kill.

    Nor is it waited for, if rank 0's process was over by then. One that has left its loop and still lives may mean that training
    has come to its end: then the others have what time there is.
    """
    stage = new_stage(proctrack="linuxproc", cred_expire=60)  # It comes back when everything has been looked at.
    run = stage.submit("-p", "low", command=own_toy("--ranks=2 --ends-on-term 0"), supervise="--every-steps 20", script=TRAPPED)
    run.wait_event("commit", result="committed")
    run.preempt()
    assert run.wait_exit() in (75, 76)
    committed = run.committed()
    check_requeued(run, code=run.exit_codes()[0])
    assert run.newest() == committed[-1]
    run.verify()
    check_out_before_the_kill(run)
    if run.event("rank_gone", rank=0)["mono_ms"] <= run.event("leaving")["mono_ms"]:
        assert took_s(run.events("signal")[0]["ts"], run.event("exit", attempt=0)["ts"]) < 5
    stage.lab.release_requeued(run.jobid)
    check_resumed_at(run, committed[-1])
