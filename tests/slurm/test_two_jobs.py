"""Two jobs, or two steps, with one directory: what Slurm says of the one that holds it decides.

Owns: the questions to a real Slurm about another job. All nodes of a lab are one machine, where a holder's process would be seen:
the tests write another host's name into DIR/attempt, as it would stand there on a cluster.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_stage import SUPERVISE, Run, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage


def on_another_host(run: Run) -> None:
    """The holder of this run's directory is from now on a process of a host that is not this one."""
    holder = json.loads((run.dir / "attempt").read_text())
    (run.dir / "attempt").write_text(json.dumps({**holder, "host": "elsewhere"}))


def beside(stage: Stage, run: Run, *options: str, supervise: str = "") -> Run:
    """Another job with this run's directory."""
    other = stage.submit("-p", "low", *options, supervise=f"--dir {run.dir} {supervise}")
    other.dir = run.dir
    return other


def refused(run: Run) -> str:
    """The line of a supervisor that has not started."""
    run.wait_line("rc=2")
    return next(line for line in run.lines() if "in use by job" in line)


@pytest.mark.timeout(300)
def test_slurm_is_asked_whether_the_job_that_holds_the_directory_still_lives(new_stage: Callable[..., Stage]) -> None:
    """Running, held in the queue, cancelled: refused, refused as it comes back, taken over; a second step is refused, too."""
    stage = new_stage(nodes=4, proctrack="cgroup")
    first = stage.submit("-p", "low", supervise="--every-steps 50")
    stage.started()
    first.wait_event("commit", result="committed")
    on_another_host(first)

    line = refused(beside(stage, first))
    assert f"job {first.jobid} step 0 (attempt 0)" in line
    assert "on elsewhere: Slurm says RUNNING" in line
    assert f"say --continues {first.jobid} if this job takes over from that one" in line

    words = ("srun", f"--jobid={first.jobid}", "--overlap", "-n1", "-N1", SUPERVISE, "--dir", str(first.dir), "--", "true")
    step = stage.lab.run(*words, timeout=60)
    assert step.returncode == 2, step.stderr
    assert "Slurm says RUNNING" in step.stderr

    stage.lab.checked("scontrol", "requeuehold", str(first.jobid))
    first.wait_exit()
    first.wait_state("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
    assert "it has been requeued and comes back" in refused(beside(stage, first))

    first.cancel()
    first.wait_state("CANCELLED")
    last = beside(stage, first)
    newest = first.newest()
    last.wait_steps(newest + 5)
    assert f"was held last by job {first.jobid}, which has ended (Slurm says CANCELLED)" in last.output()
    assert last.event("command_started")["resume_step"] == newest
    assert last.steps()[0] == newest + 1


@pytest.mark.timeout(300)
def test_a_job_that_continues_a_running_one_takes_its_directory(new_stage: Callable[..., Stage]) -> None:
    """Its saves count, the old one's are refused by name; a requeue of the old one finds the directory taken."""
    stage = new_stage(nodes=3, proctrack="cgroup", cred_expire=90)  # Who comes back does so when it is told to.
    old = stage.submit("-p", "low", supervise="--every-steps 40")
    stage.started()
    old.wait_event("commit", result="committed")
    on_another_host(old)
    new = beside(stage, old, supervise=f"--every-steps 40 --continues {old.jobid}")
    new.wait_event("commit", result="committed")
    lost = old.wait_event("commit", result="refused: a newer attempt owns the directory")
    assert f"held by job {new.jobid}" in lost["reason"]
    assert old.job()["JobState"] == "RUNNING"

    stage.lab.checked("scontrol", "requeue", str(old.jobid))
    stage.lab.release_requeued(old.jobid)
    wait_for(lambda: "in use by job" in old.output(), f"{old.out} says who has the directory", 90)
    assert f"in use by job {new.jobid}" in old.output()
    new.preempt()
    assert new.wait_exit() == 75
    new.verify()
    assert new.newest() == new.committed()[-1]


def test_an_array_element_holds_its_directory_under_its_own_name(new_stage: Callable[..., Stage]) -> None:
    """Element 0 is asked for as JOB_0, and not as the whole array."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    run = stage.submit("-p", "low", "--array=0")
    stage.started()
    on_another_host(run)
    line = refused(beside(stage, run))
    assert f"in use by job {run.jobid}_0 step 0" in line
    assert "Slurm says RUNNING" in line
    assert f"--continues {run.jobid}_0" in line
