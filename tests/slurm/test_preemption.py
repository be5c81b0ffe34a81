"""Preemption by a partition: the run is saved, requeued once, and goes on where it was.

Owns: rows 1 to 3 and 18 of the must-hold table and field cases 1, 24, 39 and 40.
Must not: test what happens inside the supervisor; only what a user, Slurm and the checkpoints see.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import (
    BOTH,
    DEAD_SRUN_S,
    LEAVE_S,
    check_no_step_lost,
    check_older_stands,
    check_out_before_the_kill,
    check_pending_soon,
    check_requeued,
    check_saved,
    notices,
)
from tests.support.slurm_stage import BIN, THEN, TRAPPED, instant, own_toy, toy_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_preempted_job_saves_comes_back_at_once_and_loses_no_step(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 1: a save of 3 s in the grace, PENDING within 2 s of the commit, stage2 never, resumed at the next step."""
    stage = new_stage(nodes=2, proctrack=proctrack)
    plain, trapped = (stage.submit("-p", "low", toy="--save-ms 3000", script=script) for script in (THEN, TRAPPED))
    stage.started()
    for run in stage.runs:
        run.preempt()
    steps = {}
    for run in stage.runs:
        check_requeued(run)
        steps[run.node] = check_saved(run)
    check_pending_soon(trapped)
    check_pending_soon(plain, later_s=DEAD_SRUN_S if proctrack == "cgroup" else 0)
    assert {"TERM in the script", "rc=75"} <= set(trapped.lines())
    for run in stage.runs:
        check_no_step_lost(run, steps[run.node])


@pytest.mark.parametrize("proctrack", BOTH)
def test_it_does_not_matter_how_training_ends_after_the_save(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 2 and field case 39: a trainer that exits 1, goes on training or hangs at its end is requeued as one that exits 0."""
    stage = new_stage(nodes=3, proctrack=proctrack)
    fails = stage.submit("-p", "low", toy="--save-ms 1000 --exit-code-after-leave 1", script=TRAPPED)
    ignores = stage.submit("-p", "low", toy="--ignore-leave", supervise="--leave-timeout 300ms", script=TRAPPED)
    hangs = stage.submit("-p", "low", toy="--hang-at-exit", script=TRAPPED)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
        check_saved(run)
    check_pending_soon(fails, ignores)
    check_pending_soon(hangs, later_s=LEAVE_S)


@pytest.mark.parametrize("proctrack", BOTH)
def test_without_a_grace_it_is_saved_within_killwait_or_the_older_one_stands(
    new_stage: Callable[..., Stage], proctrack: str
) -> None:
    """Row 3: GraceTime=0 leaves KillWait; Slurm requeues by itself, and the supervisor does not do it again."""
    stage = new_stage(nodes=2, proctrack=proctrack, kill_wait=12)
    quick = stage.submit("-p", "low0", toy="--save-ms 1000", script=TRAPPED)
    slow = stage.submit("-p", "low0", command=own_toy("--faults-from 2 --save-ms 30000"), script=TRAPPED)
    stage.started()
    slow.cancel("--signal=USR2")
    older = slow.wait_event("commit")["step"]
    for run in stage.runs:
        run.preempt()
    check_requeued(quick, calls=0)
    check_saved(quick)
    check_requeued(slow, code=76, calls=0)
    check_older_stands(slow, older)
    for run in stage.runs:
        check_out_before_the_kill(run)
        assert notices(run)[-1]["cause"] == "requeued already"
        assert run.job()["Restarts"] == "1"


def test_the_cause_does_not_depend_on_the_signal_that_the_site_sends(new_stage: Callable[..., Stage]) -> None:
    """Field case 24: with preempt_send_user_signal the notice is USR1 for jobs with --signal, else TERM; both are preemptions."""
    stage = new_stage(nodes=2, proctrack="cgroup", user_signal=True)
    with_signal = stage.submit("-p", "low", "-t", "60", "--signal=USR1@30", script=TRAPPED)
    without = stage.submit("-p", "low", "-t", "60", script=TRAPPED)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run, name in ((with_signal, "SIGUSR1"), (without, "SIGTERM")):
        check_requeued(run)
        check_saved(run)
        assert run.events("signal")[0]["signal"] == name
        # The first look may be too early; one that the requeue's own signal brings about sees the requeue.
        assert {notice["cause"] for notice in notices(run)} - {"not known", "requeued already"} == {"preempted"}


def test_every_kind_of_command_attaches_all_its_ranks_and_saves_them(new_stage: Callable[..., Stage]) -> None:
    """Row 18: python, two shells that stay between, and torchrun with two ranks, where the signal reaches every process."""
    stage = new_stage(nodes=4, proctrack="linuxproc")
    words = ["--steps", "100000", "--step-ms", "20", "--log", "{log}"]
    shell = f"{shlex.join(toy_words(*words))}; echo ended with $?"
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--", *toy_words(*words)[1:]]
    for command in (toy_words(*words), ["bash", "-c", shell], ["dash", "-c", shell], torchrun):
        stage.submit("-p", "low", command=command, script=TRAPPED)
    *ones, two = stage.runs
    stage.started()
    two.wait_steps(3, rank=1)
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
    for run in ones:
        check_no_step_lost(run, check_saved(run))
    two.verify()
    (step,) = two.committed()
    for rank in (0, 1):
        two.wait_event("rank_hello", rank=rank, world_size=2)
        assert two.events("rank_written", rank=rank)
        check_no_step_lost(two, step, rank)


def test_the_requeue_comes_after_the_last_rank_has_saved(new_stage: Callable[..., Stage]) -> None:
    """Field case 40: four ranks save in 1, 2, 3 and 4 s; commit and then the one requeue follow the slowest."""
    stage = new_stage(proctrack="linuxproc")
    run = stage.submit("-p", "low", command=own_toy("--ranks=4 --slower-ranks-ms 1000"), script=TRAPPED)
    for rank in range(4):
        run.wait_steps(3, rank)
    run.preempt()
    check_requeued(run)
    assert len(run.committed()) == 1
    run.verify()
    written = [run.event("rank_written", rank=rank)["ts"] for rank in range(4)]
    order = [max(written), run.event("commit")["ts"], run.event("requeue_called")["ts"]]
    assert order == sorted(order)
    assert instant(run.requeue_calls()[0].at) >= instant(order[1]) - 0.001


@pytest.mark.timeout(240)
def test_loader_workers_survive_the_notice_that_reaches_every_process(new_stage: Callable[..., Stage]) -> None:
    """Field case 1: torch with two DataLoader workers, and with none, on linuxproc: saved at the interrupted step, none lost."""
    stage = new_stage(nodes=2, proctrack="linuxproc")
    for workers in (2, 0):
        stage.submit("-p", "low", toy=f"--torch --workers {workers}", script=TRAPPED)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
        run.verify()
        (step,) = run.committed()
        check_no_step_lost(run, step)
        assert "exited unexpectedly" not in run.output()
