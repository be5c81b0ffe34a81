"""Jobs that are not the plain one: odd names, no limit, PreemptMode=CANCEL, arrays, two steps side by side, odd environments.

Owns: rows 14 and 16b of the must-hold table (but for "not under srun", see test_limits.py) and field cases 41, 53 and 54.
Must not: repeat what the plain job shows already.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from tests.support.slurm_checks import check_every_step_once, check_no_step_lost, check_requeued, check_saved, notices
from tests.support.slurm_stage import SUPERVISE, TRAPPED, Run, instant, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage

LIES = "x Restarts=7 PreemptTime=x JobState=CANCELLED EndTime=1"
GRACE_MS = 21_000
"""GraceTime and KillWait of the lab."""


def test_names_that_lie_a_missing_limit_and_cancelling_preemption_change_nothing(new_stage: Callable[..., Stage]) -> None:
    """Row 16b: `Restarts=7 PreemptTime=x` in JobName and Comment, TimeLimit=UNLIMITED, PreemptMode=CANCEL: requeued in time."""
    stage = new_stage(nodes=2, proctrack="cgroup", backfill=False)
    lies = stage.submit("-p", "low", "-J", LIES, "--comment", LIES, toy="--save-ms 500", script=TRAPPED)
    cancels = stage.submit("-p", "lowc", toy="--save-ms 500", script=TRAPPED)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
        check_saved(run)
        seen = next(entry for entry in run.events("look") if entry["preempt_s"])
        known = next(entry for entry in notices(run) if entry["cause"] == "preempted")
        assert (seen["end_s"], seen["restarts"]) == (None, 0)
        kill_at = instant(known["ts"]) * 1000 + known["left_ms"]
        assert abs(kill_at - seen["preempt_s"] * 1000 - GRACE_MS) < 1_500
    assert lies.job()["JobName"] == LIES
    assert cancels.job()["Partition"] == "lowc"


def test_two_supervised_steps_side_by_side_are_both_saved_before_the_one_requeue(new_stage: Callable[..., Stage]) -> None:
    """Row 16b: saves of 1 s and 8 s in one job: the last one done asks for the requeue, once."""
    stage = new_stage(proctrack="cgroup", grace=30)
    root = stage.lab.root
    slow = toy_words(f"--steps 100000 --step-ms 20 --save-ms 8000 --log {root / 'slow.log'}")
    other = f"srun -n1 --overlap {SUPERVISE} --dir {root / 'slow'} -- {shlex.join(slow)}"
    script = f"trap 'echo TERM in the script' TERM\n{other} &\n{{run}} &\nwait\nwait\nwait\n"
    quick = stage.submit("-p", "low", "-n", "2", toy="--save-ms 1000", srun="srun -n1 --overlap", script=script)
    slower = dataclasses.replace(quick, dir=root / "slow", log=root / "slow.log")
    stage.runs.append(slower)
    stage.started()
    quick.preempt()
    for run in (quick, slower):
        assert run.wait_exit() == 75
        check_saved(run)
    quick.wait_requeued()
    assert [call.error for call in quick.requeue_calls()] == [None]
    assert instant(quick.requeue_calls()[0].at) >= instant(slower.event("commit")["ts"]) - 0.001
    for run in (quick, slower):
        check_no_step_lost(run, run.committed()[0])


def test_only_the_preempted_element_of_an_array_comes_back(new_stage: Callable[..., Stage]) -> None:
    """Row 14 and field case 41: the element whose job id is the array's own is preempted; the other one trains on untouched."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    root = stage.lab.root
    words = shlex.join(toy_words("--steps 100000 --step-ms 20 --log")) + f" {root}/e$SLURM_ARRAY_TASK_ID.log"
    script = f"trap 'echo TERM' TERM\nsrun {SUPERVISE} --dir {root}/e$SLURM_ARRAY_TASK_ID -- {words} && echo STAGE2\necho rc=$?\n"
    options = ("-p", "low", "--array=0-1", "--exclusive")
    env = stage.lab.env(CKPT_SUPERVISE_STATE=str(root / "states"))
    array = stage.lab.sbatch(script, *options, output=root / "e%a.out", env=env)
    for number in (0, 1):
        name = f"e{number}"
        run = Run(stage.lab, f"{array}_{number}", "", root / f"{name}.out", root / name, root / f"{name}.log")
        stage.runs.append(run)
    stage.started()
    for run in stage.runs:
        run.node = run.job()["NodeList"]
    bare = next(run for run in stage.runs if run.job()["JobId"] == str(array))
    other = next(run for run in stage.runs if run is not bare)
    bare.preempt()
    check_requeued(bare)
    check_no_step_lost(bare, check_saved(bare))
    other.wait_steps(other.steps()[-1] + 5)
    record = other.job()
    assert (record["JobState"], record["Restarts"]) == ("RUNNING", "0")
    assert other.events("signal") == []
    assert other.requeue_calls() == []
    check_every_step_once(other, [0])
    assert bare.job()["Restarts"] == "1"


def test_each_attempt_keeps_its_journal_whatever_the_restart_count_says(new_stage: Callable[..., Stage]) -> None:
    """Field cases 53 and 54: the first run's output is truncated away, its journal stays; the count may be empty or no number."""
    stage = new_stage(nodes=3, proctrack="cgroup")
    for count in ("", "abc", "7"):
        script = f"export SLURM_RESTART_COUNT={count}\n{TRAPPED}"
        stage.submit("-p", "low", "--open-mode=truncate", script=script)
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        run.wait_event("commit")
        assert run.wait_exit() == 75
        run.wait_event("command_started", 2, timeout=90)
        assert run.events("command_started")[1]["resume_step"] == run.committed()[0]
        wait_for(
            lambda run=run: "resume" in run.output() or f"at {run.committed()[0]} rank" in run.output(), "the second run's output"
        )
        assert "at 0 rank 0" not in run.output()
        files = sorted(path.name for path in (run.dir / "journal").iterdir())
        assert len(files) == 2
        assert [entry["code"] for entry in run.events("exit")] == [75]
        assert [call.error for call in run.requeue_calls()] == [None]
        assert run.job()["Restarts"] == "1"
