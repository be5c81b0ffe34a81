"""Trainings that fail by themselves: started again in place, requeued within a budget, and no further.

Owns: rows 3 and 5 of the issue "Deadlines, requeue policy, crashes" on real Slurm. CKPT_TEST_FIGURES in the environment: a file
to which the seconds from a kill to the first steps of the ranks that were started again are appended.
Must not: repeat what the core's tests show without a Slurm; here it is the step, its tasks and the queue that have to play along.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_ranks, took_s
from tests.support.slurm_stage import lock_step_toy, own_toy, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

KEEPS_THE_STATUS = "{run}\nrc=$?\necho rc=$rc\nexit $rc\n"
RANKS = range(4)
KILLED = 137

IN_PLACE_S = 5.0
"""From the kill of one rank to the first steps of all, but for the time in which the machine had more to do than it could."""


def check_failed(run: Run, code: int, requeues: int) -> None:
    """The job has ended with the trainer's status, and nobody has asked for more requeues than that."""
    record = run.wait_state("FAILED", timeout=90)
    assert record["ExitCode"] == f"{code}:0"
    assert record["Restarts"] == str(requeues)
    assert [call.error for call in run.requeue_calls()] == [None] * requeues
    assert f"rc={code}" in run.lines()


@pytest.mark.timeout(240)
def test_a_training_that_fails_at_the_same_step_every_time_stops_after_its_budget(new_stage: Callable[..., Stage]) -> None:
    """Row 3: after step 7 in every run: after --max-crashes requeues its own status; what fails 3 starts is set aside."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    budgets = {"stops": 2, "tries the one before": 4}
    for budget in budgets.values():
        options = f"--every-steps 3 --max-crashes {budget}"
        stage.submit("-p", "low", command=own_toy("--step-ms 150 --dies-at 8"), supervise=options, script=KEEPS_THE_STATUS)
    for run, budget in zip(stage.runs, budgets.values(), strict=True):
        assert run.wait_exit(budget + 1, timeout=180) == 77
        check_failed(run, 77, budget)
        assert run.exit_codes() == [77] * (budget + 1)
        assert [entry["crashes"] for entry in run.events("recalled")] == list(range(budget + 1))
        last = run.events("exit")[-1]["line"]
        assert "training failed by itself with status 77" in last
        assert f"after {budget} of {budget} requeues (--max-crashes)" in last
        run.verify()
    stops, tries = stage.runs
    assert [entry["resume_step"] for entry in stops.events("command_started")] == [-1, 6, 6]
    assert [entry["resume_step"] for entry in tries.events("command_started")] == [-1, 6, 6, 6, 3]
    assert not list(stops.dir.glob(".failed-*"))
    assert [path.name for path in tries.dir.glob(".failed-*") if path.is_dir()] == [".failed-step-000000006-1-0"]
    assert "set aside" in tries.events("passed_over")[0]["text"]
    assert "set aside" in tries.output()


def kill(run: Run, rank: int, start: int) -> float:
    """SIGKILL this rank of that start in place (0: the first one); when, in s since the epoch."""
    pid = int(run.wait_event("rank_hello", start + 1, rank=rank, task=0)["rank_pid"])
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def first_steps(run: Run, since: float) -> dict[int, tuple[int, float]] | None:
    """The first step of each rank that has begun since then, and when it was done; None until all have done one."""
    found: dict[int, tuple[int, float]] = {}
    began = set()
    for words in run.words():
        rank, at = int(words[-3]), int(words[-1]) / 1000
        if words[0] == "ready" and at >= since:
            began.add(rank)
        elif words[0] == "step" and rank in began:
            found.setdefault(rank, (int(words[1]), at))
    return found if len(found) == len(RANKS) else None


def note(what: str, seconds: float) -> None:
    """One line for whoever wants the figures."""
    name = os.environ.get("CKPT_TEST_FIGURES")
    if name:
        with Path(name).open("a") as file:
            file.write(f"{what}: {seconds:.2f} s, load {os.getloadavg()[0]:.1f}\n")


def check_started_again(run: Run, since: float, start: int) -> None:
    """All ranks go on together, from the newest checkpoint, soon."""
    steps = wait_for(lambda: first_steps(run, since), f"steps of all ranks of job {run.jobid} after start {start}")
    began = run.events("command_started", restart=start)
    assert {entry["task"] for entry in began} == set(RANKS)
    (resumed,) = {entry["resume_step"] for entry in began}
    assert {step for step, _ in steps.values()} == {resumed + 1}
    assert resumed == max(entry["step"] for entry in run.events("commit", result="committed") if entry["ts"] < began[0]["ts"])
    last = max(at for _, at in steps.values())
    note(f"start in place {start} of 4 ranks on 2 nodes", last - since)
    assert took_s(since, last) < IN_PLACE_S


@pytest.mark.timeout(240)
def test_all_ranks_of_a_step_are_started_again_in_place_when_one_of_them_dies(new_stage: Callable[..., Stage]) -> None:
    """Row 5: --restarts 2, 4 ranks on 2 nodes: twice within seconds, from one step; then the status, or the queue."""
    stage = new_stage(nodes=4, proctrack="cgroup", cred_expire=300)  # It comes back when everything has been looked at.
    how = {"command": lock_step_toy(), "nodes": 2, "script": KEEPS_THE_STATUS}
    ends, comes_back = (
        stage.submit("-n4", "-p", "low", supervise=f"--restarts 2 --every-steps 25 --keep 50 --max-crashes {crashes}", **how)
        for crashes in (0, 1)
    )
    for run in stage.runs:
        run.wait_event("commit", result="committed")
    for start, rank in enumerate((3, 0), 1):
        for run in stage.runs:
            run.wait_steps(run.committed()[-1] + 1, rank)
            check_started_again(run, kill(run, rank, start - 1), start)
    for run in stage.runs:
        kill(run, 1, 2)
    for run in stage.runs:
        for task in RANKS:
            assert run.wait_event("exit", attempt=0, task=task)["code"] == KILLED
        line = run.event("exit", attempt=0, task=0)["line"]
        assert f"training failed by itself with status {KILLED} of task 1" in line
        check_ranks(run, RANKS)
    check_failed(ends, KILLED, 0)
    assert "after 2 of 2 starts in place (--restarts)" in ends.event("exit", task=0)["line"]
    stage.lab.release_requeued(comes_back.jobid)
    comes_back.wait_event("recalled", attempt=1, crashes=1, timeout=60)
    (resumed,) = {comes_back.wait_event("command_started", attempt=1, task=task, timeout=60)["resume_step"] for task in RANKS}
    assert resumed == comes_back.committed(attempt=0)[-1]
    for rank in RANKS:
        comes_back.wait_steps(comes_back.steps()[-1] + 1, rank)
    assert [call.error for call in comes_back.requeue_calls()] == [None]
