"""What sites do otherwise: RequeueExit in place of scontrol, JobRequeue=0, a Prolog that fails, jobs of several components.

Owns: field cases 42 (heterogeneous jobs), 50 (the way out: --resubmit), 51 (held after a failed launch) and, with RequeueExit,
39 and 57.
Must not: repeat what a plain job shows.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import ENDS, check_every_step_once, check_no_step_lost, check_requeued, check_saved
from tests.support.slurm_stage import SUPERVISE, TRAPPED, Run, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage

KEEPS_THE_STATUS = "trap 'echo TERM in the script' TERM\n{run}\nrc=$?\necho rc=$rc\nexit $rc\n"


def test_where_the_site_requeues_by_exit_status_one_save_and_that_status_bring_it_back(new_stage: Callable[..., Stage]) -> None:
    """Field cases 39 and 57: RequeueExit=85: a hook's SIGTERM before its node goes, and a preemption: no scontrol call."""
    stage = new_stage(nodes=2, proctrack="cgroup", requeue_exit=85, kill_wait=12)
    hooked, preempted = (
        stage.submit("-p", "low", toy="--save-ms 500", supervise="--requeue exit:85", script=KEEPS_THE_STATUS) for _ in range(2)
    )
    stage.started()
    os.kill(hooked.supervisor(0), signal.SIGTERM)
    preempted.preempt()
    for run in stage.runs:
        check_requeued(run, code=85, calls=0, ends=(*ENDS, "FAILED"))
        check_no_step_lost(run, check_saved_once(run))
        assert run.job()["Restarts"] == "1"


def check_saved_once(run: Run) -> int:
    """One save, committed and intact; its step. The next run may have begun."""
    (step,) = run.committed(attempt=0)
    run.verify()
    return step


def test_a_job_that_may_not_be_requeued_comes_back_as_a_new_one_by_its_own_command(new_stage: Callable[..., Stage]) -> None:
    """Field case 50: JobRequeue=0 and --resubmit: the new job goes on where the old one was; one that fails is named."""
    stage = new_stage(nodes=2, proctrack="cgroup", job_requeue=False)
    root = stage.lab.root
    keeps = f"cp $0 {root}/again.sh\n{TRAPPED}"
    again = f"sbatch -p low -d afterany:$SLURM_JOB_ID --open-mode=append -o {root}/r1.out {root}/again.sh"
    old = stage.submit("-p", "low", supervise=f"--resubmit '{again}'", script=keeps)
    fails = stage.submit("-p", "low", supervise="--resubmit 'echo no budget >&2; exit 3'", script=TRAPPED)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        assert run.wait_exit() == 75
        assert run.job()["Restarts"] == "0"
    step = check_saved_once(old)
    told = old.event("resubmit")
    assert told["accepted"]
    assert "--resubmit has brought it back (Submitted batch job " in old.event("exit")["line"]
    new = dataclasses.replace(old, jobid=int(told["reason"].split()[-1]))
    stage.runs.append(new)
    assert new.jobid != old.jobid
    new.wait_event("command_started", resume_step=step, timeout=90)
    new.wait_steps(step + 3)
    check_every_step_once(new, [0])
    assert not fails.event("resubmit")["accepted"]
    line = fails.event("exit")["line"]
    assert "Slurm refused the requeue" in line
    assert "the command of --resubmit failed (it ended with 3: no budget)" in line
    check_saved(fails)


@pytest.mark.timeout(240)
def test_a_job_that_is_held_since_its_launch_failed_goes_on_when_somebody_releases_it(new_stage: Callable[..., Stage]) -> None:
    """Field case 51: the Prolog fails at the second start: "launch failed requeued held"; released later it resumes."""
    stage = new_stage(proctrack="cgroup", kill_wait=12)
    lab, broken = stage.lab, stage.lab.root / "broken"
    prolog = lab.root / "prolog.sh"
    prolog.write_text(f"#!/bin/sh\ntest ! -e {broken}\n")
    prolog.chmod(0o755)
    with (lab.root / "slurm.conf").open("a") as conf:
        conf.write(f"Prolog={prolog}\n")
    lab.checked("scontrol", "reconfigure")
    run = stage.submit("-p", "low", script=TRAPPED)
    stage.started()
    broken.touch()
    lab.checked("scontrol", "requeue", str(run.jobid))
    assert run.wait_exit() == 75
    step = check_saved_once(run)

    is_held = lambda job: "held" in job["Reason"].lower() and job["JobState"] in ("PENDING", "REQUEUE_HOLD")  # noqa: E731
    record = lab.wait_job(run.jobid, is_held, 90, "hold, and its first run is over")
    assert record["Priority"] == "0"
    assert len(run.events("command_started")) == 1

    def reason() -> str:
        return lab.run("squeue", "-h", "-o", "%r", "-j", str(run.jobid)).stdout.strip()

    held = wait_for(reason, "a reason in squeue")
    assert "launch failed requeued held" in held
    assert run.newest() == step

    broken.unlink()
    wait_for(lambda: "drain" in lab.checked("sinfo", "-h", "-p", "low", "-o", "%T"), f"{run.node} is drained")
    lab.checked("scontrol", "update", f"NodeName={run.node}", "State=RESUME")
    lab.checked("scontrol", "release", str(run.jobid))
    later = run.wait_event("command_started", 2, timeout=90)
    assert later["resume_step"] == step
    run.wait_steps(step + 3)
    check_every_step_once(run, [0])


def test_of_a_job_with_several_components_the_leader_is_requeued(new_stage: Callable[..., Stage]) -> None:
    """Field case 42: `sbatch -N1 : -N1`, the supervisor in component 1: one call, for the leader; both come back."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    root = stage.lab.root
    words = shlex.join(toy_words("--steps 100000 --step-ms 20 --log", f"{root}/h.log"))
    srun = f"srun --het-group=1 {SUPERVISE} --dir {root}/h -- {words}"
    script = f"trap 'echo TERM in the script' TERM\n{srun}\necho rc=$?\n"
    options = ("-p", "low", "-N1", "-n1", ":", "-p", "low", "-N1", "-n1")
    env = stage.lab.env(CKPT_SUPERVISE_STATE=str(root / "states"))
    leader = stage.lab.sbatch(script, *options, output=root / "h.out", env=env)
    run = Run(stage.lab, leader, stage.lab.nodes[0], root / "h.out", root / "h", root / "h.log", stage.lab.nodes)
    stage.runs.append(run)
    stage.started()
    os.kill(run.supervisor(0), signal.SIGTERM)
    assert run.wait_exit() == 75
    newest = run.committed(attempt=0)[-1]
    assert [call.error for call in run.requeue_calls()] == [None]
    run.wait_requeued()
    stage.lab.release_requeued(run.jobid)  # Left alone it is not started for minutes (docs/slurm.md section 6).
    started = run.wait_event("command_started", 2, timeout=90)
    assert started["resume_step"] == newest
    components = run.lab.jobs(leader)
    assert {int(record["JobId"]) - leader for record in components} == {0, 1}
    assert {record["Restarts"] for record in components} == {"1"}
    run.wait_steps(newest + 3)
    check_every_step_once(run, [0])
