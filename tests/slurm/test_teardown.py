"""After the save everything of the step is ended, within the deadline, whatever it is and however it hides.

Owns: row 7 of the issue "Shield and teardown" and field cases 132, 133 and 136: daemons, deaf, stopped, blocked and forking
processes at the end of a step that the supervisor sees coming, on all kinds of process tracking.
Must not: kill the supervisor while it has work to do; test_supervisor_killed.py does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import step_processes
from tests.support.slurm_checks import (
    check_all_out_before_the_kill,
    check_out_before_the_kill,
    check_requeued,
    check_saved,
    check_step_requeued,
    took_s,
)
from tests.support.slurm_stage import TRAPPED, wait_for
from tests.support.step_processes import StepId, unruly_toy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

TRACKINGS = ("cgroup", "linuxproc", "pgid")
GONE_WITHIN_S = 5.0
AT_ONCE_S = 0.5
"""From the supervisor's own end: nobody is alive by then, as far as it can be seen from here."""

UNRULY = {
    "daemon": "--helpers setsid,daemon,scrubbed",
    "deaf": "--helpers deaf,blocked --deaf --ignore-leave",
    "stopped": "--helpers stopped --stops-at-leave",
    "forks": "--chain 200",
}


def check_nobody_outlives_the_supervisor(run: Run) -> None:
    """When the supervisor of the first attempt has ended nobody of its step is alive."""
    step = StepId(run.jobid, 0, 0)
    top = step_processes.supervisor(step)
    if top is not None:
        wait_for(lambda: not Path(f"/proc/{top}").exists(), f"the end of {top}", poll_s=0.01)
    step_processes.gone_after(step, AT_ONCE_S, "the supervisor's end")


def check_nothing_is_drained(stage: Stage) -> None:
    """Slurm has no complaint about any node."""
    assert stage.lab.checked("sinfo", "-h", "-R") == ""


def test_whatever_a_trainer_leaves_behind_is_gone_within_the_deadline(new_stage: Callable[..., Stage]) -> None:
    """Row 7: a double-forked daemon, a deaf trainer, a stopped one, a chain of 200 forks: saved, ended, requeued."""
    stages = [new_stage(nodes=len(UNRULY), proctrack=proctrack) for proctrack in TRACKINGS]
    for stage in stages:
        for knobs in UNRULY.values():
            stage.submit("-p", "low", command=unruly_toy("--save-ms 500", knobs), script=TRAPPED)
    runs = [run for stage in stages for run in stage.runs]
    for run in runs:
        run.wait_steps(3)
        run.preempt()
    for run in runs:
        run.wait_event("requeue_called")
        check_nobody_outlives_the_supervisor(run)
    for run in runs:
        check_requeued(run)
        check_out_before_the_kill(run)
        check_saved(run)
    for stage in stages:
        check_nothing_is_drained(stage)


ENDINGS = ("USR1", "TERM", "scancel", "crash")


def end_by(run: Run, ending: str, top: int) -> None:
    """One way to end a job whose trainer has just died; it may be over by then, and scancel says so."""
    if ending == "crash":
        with contextlib.suppress(ProcessLookupError):
            os.kill(top, signal.SIGKILL)
    else:
        words = [] if ending == "scancel" else [f"--signal={ending}"]
        done = run.lab.run("scancel", *words, str(run.jobid))
        assert done.returncode == 0 or run.job()["JobState"] != "RUNNING", done.stderr


def is_over(run: Run) -> bool:
    """Whether the job's first run has ended, as Slurm sees it."""
    record = run.job()
    return record["JobState"] in ("COMPLETED", "CANCELLED", "FAILED", "PENDING") or record["Restarts"] != "0"


def test_no_worker_or_helper_of_a_dead_trainer_lives_on_whoever_ends_the_job(new_stage: Callable[..., Stage]) -> None:
    """Field case 132: SIGKILL of the trainer, then USR1, TERM, scancel or a crash: 0 left after 5 s, the node is free again."""
    stages = [new_stage(nodes=len(ENDINGS), proctrack=proctrack) for proctrack in TRACKINGS]
    for stage in stages:
        for _ in ENDINGS:
            stage.submit("-p", "low", command=unruly_toy("--helpers blocked,setsid,daemon"))
    runs = [(run, ending) for stage in stages for run, ending in zip(stage.runs, ENDINGS, strict=True)]
    for run, _ in runs:
        run.wait_steps(3)
    for run, ending in runs:
        top, trainer = run.supervisor(0), run.trainer(0)
        os.kill(trainer, signal.SIGKILL)
        end_by(run, ending, top)
    for run, ending in runs:
        step_processes.gone_after(StepId(run.jobid, 0, None), GONE_WITHIN_S, f"SIGKILL and {ending}")
    for run, _ in runs:
        # A notice that is heard of before the trainer's end has the job requeued; it may have come back since.
        wait_for(lambda run=run: is_over(run), lambda run=run: f"the end of the first run, but {run.job()}")
    for stage in stages:
        stage.lab.cancel_all()
        assert set(stage.lab.checked("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()) == {"idle"}
        check_nothing_is_drained(stage)


def test_deaf_ranks_that_never_answer_are_ended_before_the_kill_and_no_node_is_drained(new_stage: Callable[..., Stage]) -> None:
    """Field case 133: ranks 1 to 3 ignore TERM and never ack, UnkillableStepTimeout=10: each supervisor ends its own rank."""
    stages = [new_stage(nodes=2, proctrack=proctrack, grace=4, kill_wait=10) for proctrack in TRACKINGS]
    toy = unruly_toy("--deaf --helpers setsid,deaf --stuck-at 50 --stuck-ranks 1,2,3")
    for stage in stages:
        with Path(stage.lab.info["conf"]).open("a") as conf:
            conf.write("UnkillableStepTimeout=10\n")
        stage.lab.checked("scontrol", "reconfigure")
        stage.submit("-n4", "-p", "low", command=toy, supervise="--every-steps 20", script=TRAPPED, nodes=2)
    runs = [stage.runs[0] for stage in stages]
    for run in runs:
        for rank in range(1, 4):
            run.wait_line(f"stuck rank {rank}")
        run.preempt()
    for run in runs:
        for task in range(4):
            assert run.wait_event("exit", attempt=0, task=task)["code"] == 76
        step_processes.gone_after(StepId(run.jobid, 0, 0), GONE_WITHIN_S, "the last supervisor's end")
    for run in runs:
        check_step_requeued(run, range(4), code=76)
        check_all_out_before_the_kill(run)
        run.verify()
    for stage in stages:
        check_nothing_is_drained(stage)


def test_a_sidecar_that_holds_the_trainers_pipes_holds_nobody_up(new_stage: Callable[..., Stage]) -> None:
    """Field case 136: its parent waits for it for ever: out before the kill; or dies beside it: that end is known by itself."""
    stages = [new_stage(nodes=2, proctrack=proctrack, grace=4, kill_wait=10) for proctrack in TRACKINGS]
    for stage in stages:
        stage.submit("-p", "low", command=unruly_toy("--sidecar-at 30"), supervise="--every-steps 20", script=TRAPPED)
        stage.submit("-p", "low", command=unruly_toy("--sidecar-at 30 --dies-beside-it"), supervise="--every-steps 20")
    for stage in stages:
        waits, dies = stage.runs
        waits.wait_line("sidecar")
        waits.preempt()
        dies.wait_line("sidecar")
        died_ms = next(int(word[-1]) for word in dies.words() if word[0] == "sidecar")
        assert dies.wait_exit() == 3
        assert took_s(died_ms / 1000, dies.event("command_exited")["ts"]) < 1
        step_processes.gone_after(StepId(dies.jobid, 0, 0), GONE_WITHIN_S, "the trainer's end")
        dies.wait_line("rc=3")
    for stage in stages:
        waits, _ = stage.runs
        waits.wait_event("requeue_called")
        check_nobody_outlives_the_supervisor(waits)
        check_requeued(waits, code=76)
        check_out_before_the_kill(waits)
        check_nothing_is_drained(stage)
