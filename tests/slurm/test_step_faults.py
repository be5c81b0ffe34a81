"""What goes wrong in a step of several tasks: a rank, a relay or the coordinator lost, a save that fails, a node that dies.

Owns: rows 5 to 7 of the issue "One job, many supervisors, many ranks" and field case 84.
Must not: repeat what a step of one task shows already (test_faults.py).
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import (
    BOTH,
    check_older_stands,
    check_ranks,
    check_resumed_at,
    check_step_requeued,
)
from tests.support.slurm_stage import TRAPPED, lock_step_toy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

LOSSES = {
    "rank before": ("--step-ms 500", {0, 1}, "rank 1 (task 1"),
    "rank during": ("--faulty-rank 1 --faults-from 2 --save-ms 1500 --kill-self-in-save", {0, 1}, "rank 1 (task 1"),
    "rank after": ("--slow-rank 0 --faults-from 2 --save-ms 3000", {0, 1}, "task 1 ended with status 137"),
    "rank stopped": ("", {0, 1}, "rank 1 (task 1"),
    "relay": ("--faults-from 2 --save-ms 2000", {0}, "task 1"),
    "coordinator": ("--faults-from 2 --save-ms 2000", {1}, "task 0's supervisor, was lost"),
}
"""The toy's knobs, the tasks whose supervisors are left, and what the last word of one of them has to name."""


def lose(run: Run, what: str) -> None:
    """Preempt the job, and take away what is to be lost at its moment."""
    if what == "rank stopped":
        os.kill(run.trainer(1), signal.SIGSTOP)
    run.preempt()
    if what == "rank before":
        run.wait_event("round_begun", 2)
        os.kill(run.trainer(1), signal.SIGKILL)
    elif what == "rank after":
        run.wait_event("rank_written", 2, rank=1, task=0)
        os.kill(run.trainer(1), signal.SIGKILL)
    elif what in ("relay", "coordinator"):
        run.wait_event("rank_saving", 2, rank=1, task=0)
        os.kill(run.supervisor(1 if what == "relay" else 0), signal.SIGKILL)


@pytest.mark.parametrize("srun", ["srun", "srun -K"])
@pytest.mark.parametrize("proctrack", BOTH)
def test_whoever_is_lost_in_the_grace_the_older_checkpoint_stands_and_the_job_comes_back(
    new_stage: Callable[..., Stage], proctrack: str, srun: str
) -> None:
    """Row 5: a rank killed before, during and after its save, one stopped, a relay and task 0 killed: older stands, named."""
    stage = new_stage(nodes=2 * len(LOSSES), proctrack=proctrack, grace=4)
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
        check_step_requeued(run, tasks, code=76)
        check_older_stands(run, step)
        check_ranks(run, range(2))
        lines = [entry["line"] for entry in run.events("exit", attempt=0)]
        assert [line for line in lines if named in line and f"step-{step:09d} stands" in line], lines
    for run, step in zip(stage.runs, older, strict=True):
        check_resumed_at(run, step)
