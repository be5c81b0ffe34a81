"""Several supervisors in one job step: all ranks save one step together, whoever was told, and the job is requeued once.

Owns: rows 1, 3 and 4 of the issue "One job, many supervisors, many ranks", its rank-0-only hook (row 9), what ends a step without
a save, and field cases 61, 104 and 141.
Must not: test what goes wrong in a save; test_step_faults.py does.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import (
    BOTH,
    check_every_step_once,
    check_ranks,
    check_resumed_at,
    check_step_requeued,
    took_s,
)
from tests.support.slurm_stage import TRAPPED, instant, lock_step_toy, pause

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

RANKS = range(8)
CYCLES = 5
SEED = 20
APART_S = 1.0
"""Between the exits of a step's supervisors."""

KEEPS_THE_STATUS = "{run}\nrc=$?\necho rc=$rc\nexit $rc\n"
ENDS_WITHIN_S = 4.0
"""From a rank's crash to the last supervisor's exit."""


def interrupt(run: Run, attempt: int) -> None:
    """What has to hold of a preempted run, once the next one trains."""
    for task in RANKS:
        assert run.wait_event("exit", attempt=attempt, task=task)["code"] == 75
    committed = run.events("commit", attempt=attempt, result="committed")[-1]
    run.wait_requeued(attempt + 1)
    assert run.left_at(0, attempt) == committed["step"]  # It may have come back since.


@pytest.mark.timeout(400)
def test_eight_ranks_on_four_nodes_lose_no_step_however_often_they_are_preempted(new_stage: Callable[..., Stage]) -> None:
    """Row 1: two jobs of `srun -N4 -n8` in lock-step, preempted 5 times each at random moments: 8 ranks, one step, each time."""
    chance = random.Random(SEED)
    stage = new_stage(nodes=4, proctrack="cgroup", cpus=4)
    toy = lock_step_toy("--save-ms 200 --meet-in-save")
    options = ("-n8", "--ntasks-per-node=2", "--mem=64", "-p", "low")
    submit = functools.partial(stage.submit, *options, command=toy, script=TRAPPED)
    first = submit(supervise="--keep 500 --every-steps 70", nodes=4)
    second = submit(supervise="--keep 20", beside=first)
    for attempt in range(CYCLES):
        for run in (first, second):
            run.wait_steps(max(run.steps(), default=0) + 1, timeout=90)
        pause(chance.uniform(0, 2))
        first.preempt()
        for run in (first, second):
            interrupt(run, attempt)
    for run in (first, second):
        for rank in RANKS:
            run.wait_steps(run.committed()[-1] + 1, rank, timeout=90)
        check_ranks(run, RANKS)
        check_every_step_once(run, RANKS)
        assert [call.error for call in run.requeue_calls()] == [None] * CYCLES


def test_a_signal_to_one_task_alone_has_all_ranks_save_the_same_step(new_stage: Callable[..., Stage]) -> None:
    """Row 3: USR2, then TERM, by pid to one relay's supervisor, and to the coordinator's: 4 ranks, one step, one requeue."""
    stage = new_stage(nodes=4, proctrack="cgroup", kill_wait=12)
    told = {}
    for task in (3, 0):
        run = stage.submit("-n4", "-p", "low", command=lock_step_toy(), script=TRAPPED, nodes=2)
        told[run.node] = task
    stage.started(ranks=4)
    for number in (signal.SIGUSR2, signal.SIGTERM):
        for run in stage.runs:
            os.kill(run.supervisor(told[run.node]), number)
        for run in stage.runs:
            saved = run.wait_event("commit", 1 if number == signal.SIGUSR2 else 2, result="committed")
            if number == signal.SIGUSR2:
                run.wait_steps(saved["step"] + 1)  # At the step of a checkpoint nothing is saved again.
    for run in stage.runs:
        check_step_requeued(run, range(4))
        check_ranks(run, range(4))
        assert {entry["task"] for entry in run.events("signal", signal="SIGUSR2")} == {0, told[run.node]}
        assert len(run.committed()) == 2
        check_resumed_at(run, run.committed()[-1])
    for run in stage.runs:
        for rank in range(4):
            run.wait_steps(run.committed()[-1] + 1, rank)
        check_every_step_once(run, range(4))


def test_the_requeue_comes_after_the_last_task_has_verified_its_files(new_stage: Callable[..., Stage]) -> None:
    """Row 4: four ranks on four nodes save in 2, 4, 6 and 8 s; then the commit, and then one `scontrol requeue`."""
    stage = new_stage(nodes=4, proctrack="cgroup", grace=30)
    toy = lock_step_toy("--slower-ranks-ms 2000")
    run = stage.submit("-n4", "-p", "low", command=toy, script=TRAPPED, nodes=4)
    stage.started(ranks=4)
    run.preempt()
    check_step_requeued(run, range(4))
    check_ranks(run, range(4))
    assert len(run.committed()) == 1
    words = [run.event("rank_written", rank=rank, task=0) for rank in range(4)]
    assert [word["save_ms"] >= 2000 * number for number, word in enumerate(words, 1)] == [True] * 4
    written = [word["mono_ms"] for word in words]
    verified = [run.event("verified", task=task, of_task=None)["mono_ms"] for task in range(4)]
    order = [max(written), max(verified), run.event("commit")["mono_ms"], run.event("requeue_called")["mono_ms"]]
    assert order == sorted(order)
    assert instant(run.requeue_calls()[0].at) >= instant(run.event("commit")["ts"]) - 0.001


def test_a_hook_on_rank_0_alone_is_saved_alone_and_nobody_waits(new_stage: Callable[..., Stage]) -> None:
    """Row 9: `if rank == 0:` around attach() in a script of 4 ranks in lock-step: every manifest says [0]."""
    stage = new_stage(nodes=2, proctrack="linuxproc")
    toy = lock_step_toy("--mode attach --rank-0-only")
    run = stage.submit("-n4", "-p", "low", command=toy, supervise="--every-steps 50 --keep 500", script=TRAPPED, nodes=2)
    run.wait_event("commit", 2, result="committed")
    run.wait_steps(run.committed()[-1] + 5, rank=3)
    run.preempt()
    check_step_requeued(run, range(4))
    check_ranks(run, [0])
    step = run.committed(attempt=0)[-1]
    check_resumed_at(run, step)
    for rank in range(4):
        run.wait_steps(step + 5, rank)
    check_every_step_once(run, [0])


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_step_that_ends_by_itself_ends_as_a_whole_and_stays_ended(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """One rank's crash ends all with its status, within seconds and without a commit; scancel: 143; all ranks at their end: 0."""
    stage = new_stage(nodes=10, proctrack=proctrack, kill_wait=12)
    submit = functools.partial(stage.submit, "-p", "low", nodes=2, script=KEEPS_THE_STATUS)
    crashes = submit("-n2", command=lock_step_toy("--faulty-rank 1 --dies-at 40"))
    in_save = lock_step_toy("--faulty-rank 1 --dies-in-save --slow-rank 0 --save-ms 1000")
    strict = submit("-n2", command=in_save, supervise="--every-steps 30", srun="srun -K")
    waits = submit("-n2", command=in_save, supervise="--every-steps 30", srun="srun -W 2")
    cancelled = submit("-n4", command=lock_step_toy("--save-ms 500"))
    finished = submit("-n4", command=lock_step_toy("--steps 60"), supervise="--every-steps 25", srun="srun -K -W 2")
    for run in (crashes, strict, waits):
        record = run.wait_state("FAILED")
        assert record["ExitCode"] == "77:0"
        assert {entry["task"]: entry["code"] for entry in run.events("exit")} == {0: 77, 1: 77}
        assert run.event("exit", task=0)["line"] == "training failed by itself with status 77 of task 1"
        assert "rc=77" in run.lines()
        assert run.committed() == []
        died = run.events("command_exited", code=77)[0]["ts"]
        assert took_s(died, max(entry["ts"] for entry in run.events("exit"))) < ENDS_WITHIN_S
    cancelled.wait_steps(3, rank=3)
    cancelled.cancel()
    cancelled.wait_state("CANCELLED")
    assert {cancelled.wait_event("exit", task=task)["code"] for task in range(4)} == {143}
    check_ranks(cancelled, range(4))
    assert len(cancelled.committed()) == 1
    assert finished.wait_state("COMPLETED")["ExitCode"] == "0:0"
    assert [finished.event("exit", task=task)["code"] for task in range(4)] == [0] * 4
    assert finished.committed() == [25, 50]
    check_ranks(finished, range(4))
    for run in stage.runs:
        assert run.requeue_calls() == []
        assert run.job()["Restarts"] == "0"


def test_trainers_that_end_early_late_or_with_an_error_make_no_difference(new_stage: Callable[..., Stage]) -> None:
    """-K and -W 2: rank 1's trainer exits 1 after the save, or hangs at its end long after rank 0's: 75, all at once."""
    stage = new_stage(nodes=8, proctrack="cgroup")
    for srun in ("srun -K", "srun -W 2"):
        for fault in ("--exit-code-after-leave=1", "--hang-at-exit"):
            toy = lock_step_toy("--faulty-rank 1", fault)
            options = {"supervise": "--leave-timeout 3s", "srun": srun, "script": TRAPPED}
            stage.submit("-n2", "-p", "low", command=toy, nodes=2, **options)
    stage.started(ranks=2)
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_step_requeued(run, range(2))
        check_ranks(run, range(2))
        assert len(run.committed()) == 1
        left = [entry["ts"] for entry in run.events("exit", attempt=0)]
        assert took_s(min(left), max(left)) < APART_S


def test_a_rank_that_ends_at_the_notice_ends_the_step_in_time_with_one_status(new_stage: Callable[..., Stage]) -> None:
    """Field case 61: rank 0's trainer exits 0 at once on its own TERM handler, rank 1 waits for it in a collective."""
    stage = new_stage(nodes=4, proctrack="linuxproc")
    for srun in ("srun", "srun -K -W 2"):
        toy = lock_step_toy("--ends-on-term 0")
        stage.submit("-n2", "-p", "low", command=toy, supervise="--every-steps 20 --keep 500", srun=srun, script=TRAPPED, nodes=2)
    for run in stage.runs:
        run.wait_event("commit", result="committed")
        run.preempt()
    for run in stage.runs:
        code = run.wait_event("exit", attempt=0, task=0)["code"]
        assert code in (75, 76)
        check_step_requeued(run, range(2), code)
        check_ranks(run, range(2))
        assert took_s(run.events("signal")[0]["ts"], run.event("exit", attempt=0, task=1)["ts"]) < 6
        check_resumed_at(run, run.committed(attempt=0)[-1])


def test_all_ranks_are_given_one_path_and_no_socket_lies_on_the_shared_file_system(new_stage: Callable[..., Stage]) -> None:
    """Field cases 104 and 141: a TMPDIR for each node; the ranks' sockets lie there, the path to resume from is one string."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    root = stage.lab.root
    for node in stage.lab.nodes:
        (root / "tmp" / node).mkdir(parents=True)
    srun = f'srun bash -c \'TMPDIR={root}/tmp/$SLURMD_NODENAME exec "$0" "$@"\''
    run = stage.submit("-n4", "-p", "low", command=lock_step_toy(), srun=srun, script=TRAPPED, nodes=2)
    stage.started(ranks=4)
    sockets = {node: len([path for path in (root / "tmp" / node).rglob("*") if path.is_socket()]) for node in stage.lab.nodes}
    assert sockets == dict.fromkeys(stage.lab.nodes, 2)
    assert [path for path in run.dir.rglob("*") if path.is_socket()] == []
    run.preempt()
    check_step_requeued(run, range(4))
    step = run.committed()[-1]
    for rank in range(4):
        run.wait_event("rank_hello", attempt=1, rank=rank, task=0)
        run.wait_steps(step + 1, rank)
    started = {(entry["resume_from"], entry["resume_step"]) for entry in run.events("command_started", attempt=1)}
    assert started == {(str(run.dir / f"step-{step:09d}"), step)}
    loads = {word[1] for word in run.words() if word[0] == "load"}
    assert loads == {str(run.dir / f"step-{step:09d}")}
    check_every_step_once(run, range(4))
