"""What goes wrong in a step of several tasks: a rank, a relay or the coordinator lost, a save that fails, a node that dies.

Owns: rows 5 to 7 of the issue "One job, many supervisors, many ranks" and field case 84.
Must not: repeat what a step of one task shows already (test_faults.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.slurm_checks import (
    BOTH,
    check_older_stands,
    check_ranks,
    check_resumed_at,
    check_step_requeued,
)
from tests.support.slurm_stage import TRAPPED, lock_step_toy, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

LOSSES = {
    # Slow saves, for the case that the notice comes in the very moment in which a step ends.
    "rank before": ("--step-ms 500 --slow-rank 1 --faults-from 2 --save-ms 6000", {0, 1}, "rank 1 (task 1"),
    "rank during": ("--faulty-rank 1 --faults-from 2 --save-ms 1500 --kill-self-in-save", {0, 1}, "rank 1 (task 1"),
    "rank after": ("--slow-rank 0 --faults-from 2 --save-ms 6000", {0, 1}, "task 1 ended with status 137"),
    "rank stopped": ("--step-ms 500 --slow-rank 1 --faults-from 2 --save-ms 6000", {0, 1}, "rank 1 (task 1"),
    "relay": ("--faults-from 2 --save-ms 6000", {0}, "task 1"),
    "coordinator": ("--faults-from 2 --save-ms 6000", {1}, "task 0's supervisor, was lost"),
}
"""The toy's knobs, the tasks whose supervisors are left, and what the last word of one of them has to name."""


def lose(run: Run, what: str) -> None:
    """Preempt the job, and take away what is to be lost at its moment."""
    run.preempt()
    if what in ("rank before", "rank stopped"):
        run.wait_event("round_begun", 2)
        # Not before the notice is over: on linuxproc its SIGCONT, which follows the SIGTERM, reaches every process of the step.
        log = run.lab.root / f"slurmd.{run.nodes[-1]}.log"
        sent = f"Sent signal {signal.SIGCONT:d} to StepId={run.jobid}.0"
        wait_for(lambda: sent in log.read_text(errors="replace"), f"{sent!r} in {log}")
        os.kill(run.trainer(1), signal.SIGKILL if what == "rank before" else signal.SIGSTOP)
    elif what == "rank after":
        run.wait_event("rank_written", 2, rank=1, task=0)
        os.kill(run.trainer(1), signal.SIGKILL)
    elif what in ("relay", "coordinator"):
        run.wait_event("rank_saving", 2, rank=1, task=0)
        os.kill(run.supervisor(1 if what == "relay" else 0), signal.SIGKILL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("srun", ["srun", "srun -K"])
@pytest.mark.parametrize("proctrack", BOTH)
def test_whoever_is_lost_in_the_grace_the_older_checkpoint_stands_and_the_job_comes_back(
    new_stage: Callable[..., Stage], proctrack: str, srun: str
) -> None:
    """Row 5: a rank killed before, during and after its save, one stopped, a relay and task 0 killed: older stands, named."""
    # With -K a killed task starts KillWait for all others, and no further SIGTERM tells of an accepted requeue.
    stage = new_stage(nodes=2 * len(LOSSES), proctrack=proctrack, grace=4, kill_wait=12)
    for knobs, _, _ in LOSSES.values():
        stage.submit("-n2", "-p", "low", command=lock_step_toy(knobs), srun=srun, script=TRAPPED, nodes=2)
    stage.started(ranks=2)
    older = []
    for run in stage.runs:
        run.cancel("--signal=USR2")
    for run in stage.runs:
        older.append(run.wait_event("commit", result="committed")["step"])
        run.wait_steps(older[-1] + 1, 1)
    for run, what in zip(stage.runs, LOSSES, strict=True):
        lose(run, what)
    for run, step, (_, tasks, named) in zip(stage.runs, older, LOSSES.values(), strict=True):
        check_step_requeued(run, tasks, code=76, killed=tasks != {0, 1})
        check_older_stands(run, step)
        check_ranks(run, range(2))
        lines = [entry["line"] for entry in run.events("exit", attempt=0)]
        assert [line for line in lines if named in line and f"step-{step:09d} stands" in line], lines
    for run, step in zip(stage.runs, older, strict=True):
        check_resumed_at(run, step)


SAVES = {
    "--fail-save": "No space left on device",
    "--short-archive": "toy-00001.pt",
    "--says-another-step": "saved step 59, agreed was step 60",
}
"""The fault of rank 1's saves from the second one on, and what the round that is given up has to name."""


def test_a_save_that_fails_on_one_rank_costs_that_checkpoint_and_nothing_else(new_stage: Callable[..., Stage]) -> None:
    """Row 6: rank 1's save raises, is cut off, is of another step: periodic saves go by, and as the last one the older stands."""
    stage = new_stage(nodes=2 * len(SAVES), proctrack="cgroup", grace=6)
    for fault in SAVES:
        toy = lock_step_toy("--faulty-rank 1 --faults-from 2", fault)
        stage.submit("-n2", "-p", "low", command=toy, supervise="--every-steps 30 --keep 20", script=TRAPPED, nodes=2)
    for run, named in zip(stage.runs, SAVES.values(), strict=True):
        given_up = run.wait_event("round_given_up", step=60)
        assert named in given_up["reason"]
        assert "rank 1" in given_up["reason"] or "task 1" in given_up["reason"]
    for run in stage.runs:
        for rank in range(2):
            run.wait_steps(95, rank)
        run.preempt()
    for run in stage.runs:
        check_step_requeued(run, range(2), code=76)
        check_ranks(run, range(2))
        assert run.committed(attempt=0) == [30]
        line = run.event("exit", attempt=0, task=0)["line"]
        assert "rank 1" in line or "task 1" in line
        check_resumed_at(run, 30)


REFUSED = "refused: a newer attempt owns the directory"
ENDS_OF_A_SAVE = ("round_given_up", "commit")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stopped", [False, True])
def test_an_older_attempt_that_lives_on_where_slurm_has_lost_it_commits_nothing_more(
    new_stage: Callable[..., Stage], stopped: bool
) -> None:
    """Row 7: two nodes lost with all that runs there; the job starts elsewhere, the old step saves on, or wakes in its save."""
    stage = new_stage(nodes=4, proctrack="linuxproc")
    toy = lock_step_toy(f"--save-ms {4000 if stopped else 500}")
    # Of what they print through Slurm nothing arrives any more.
    srun = f'srun bash -c \'exec "$0" "$@" >>{stage.lab.root}/own.out 2>&1\''
    how = {"supervise": "--every-steps 40", "srun": srun, "script": TRAPPED}
    run = stage.submit("-n2", "-p", "low", command=toy, anywhere=True, nodes=2, **how)
    run.wait_event("commit", 2, result="committed")
    old = run.supervisor(0)
    nodes = stage.lab.nodes_of(run.jobid)
    sruns = sruns_of(run)
    if stopped:
        run.wait_event("rank_saving", 3, rank=1, task=0)
    stage.lab.node_cut(nodes)
    end(sruns)
    if stopped:
        os.kill(old, signal.SIGSTOP)  # Not before: a stopped process whose slurmstepd dies gets SIGHUP and SIGCONT.
    resumed = run.wait_event("command_started", attempt=1, task=0, timeout=90)
    began = resumed["ts"]
    if stopped:
        os.kill(old, signal.SIGCONT)
    run.wait_event("commit", 2, attempt=1, result="committed", timeout=90)
    if stopped:
        wait_for(lambda: any(last(run, name, 0) > began for name in ENDS_OF_A_SAVE), "a save of the old attempt")
    else:
        run.wait_event("commit", attempt=0, result=REFUSED)
    commits = run.events("commit", attempt=0)
    assert max(entry["step"] for entry in commits if entry["result"] == "committed") == resumed["resume_step"]
    if not stopped:
        assert commits[-1]["result"] == REFUSED
    steps = run.committed()
    assert steps == sorted(steps)
    run.wait_event("commit", 3, attempt=1, result="committed")
    assert run.newest() >= steps[-1]
    newest = int((run.dir / "latest").readlink().name.removeprefix("step-"))
    wait_for(lambda: newest in run.committed(attempt=1), f"the word on step {newest} of the new attempt")
    run.verify()


def sruns_of(run: Run) -> list[psutil.Process]:
    """The sruns of this job's present attempt: the next one's have the same command line."""
    seen = psutil.process_iter(["name", "cmdline"])
    return [one for one in seen if one.info["name"] == "srun" and str(run.dir) in (one.info["cmdline"] or ())]


def end(sruns: list[psutil.Process]) -> None:
    """A node that is lost takes srun along.

    One that lives on gives its step up 8 s later and has Slurm end the step of that number, by then perhaps the next attempt's.
    """
    for process in sruns:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def last(run: Run, name: str, attempt: int) -> str:
    """When this event came last in this attempt; "" for never."""
    return max((str(entry["ts"]) for entry in run.events(name, attempt=attempt)), default="")
