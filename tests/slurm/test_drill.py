"""`ckptctl drill` on real Slurm: jobs of its own for every path, and a job that runs already (issue: row 9; field case 26)."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.slurm_stage import CTL, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.lab import Lab
    from tests.support.slurm_stage import Stage

PATHS = ("warning", "grace", "nograce", "limit", "cancel", "crash", "hang", "nodeloss")
CALL_S = 400


def drill(lab: Lab, *words: str, command: Sequence[str] = ()) -> tuple[int, dict[str, dict[str, Any]], str]:
    """One drill: exit status, results by path, stderr."""
    argv = lab.argv(CTL, "drill", "--json", *words, *(("--", *command) if command else ()))
    env = lab.env(CKPT_SUPERVISE_STATE=str(lab.root / "states"))
    done = subprocess.run(argv, env=env, cwd=lab.root, capture_output=True, text=True, timeout=CALL_S, check=False)
    return done.returncode, {line["path"]: line for line in map(json.loads, done.stdout.splitlines())}, done.stderr


@pytest.mark.timeout(CALL_S + 60)
def test_every_path_passes_on_jobs_of_its_own_and_none_is_left(new_stage: Callable[..., Stage]) -> None:
    """Eight short jobs side by side, one of them preempted by a real preemptor; afterwards no job and no scratch directory."""
    lab = new_stage(nodes=len(PATHS), kill_wait=12).lab
    words = [
        *("--cluster", "--side-by-side", str(len(PATHS)), "--path", ",".join(PATHS), "--start-timeout", "120s"),
        *("--sbatch-args", "-p low -N1 --exclusive", "--preempt-with", "-p high", "--options", "--every-steps 500 --lead 10s"),
    ]
    code, found, err = drill(lab, *words, command=toy_words("--steps 1000000 --step-ms 20"))
    assert {name: line["why"] for name, line in found.items() if not line["passed"]} == {}, err
    assert (code, tuple(found)) == (0, PATHS), err
    assert all(found[name]["requeued"] and found[name]["lost_steps"] == 0 for name in ("warning", "grace", "nograce", "limit"))
    assert (found["cancel"]["code"], found["cancel"]["requeued"]) == (143, False)
    assert not any("SIGTERM only" in note for note in found["grace"]["notes"])
    assert lab.checked("squeue", "-h", "-o", "%A %T %j") == ""
    assert list(lab.root.glob(".ckpt-drill-*")) == []


def test_a_signal_by_hand_saves_a_job_that_runs_and_it_trains_on(new_stage: Callable[..., Stage]) -> None:
    """Field case 26: no end is in sight, so the job neither dies nor leaves. One whose limit is near is left alone."""
    stage = new_stage(nodes=2)
    run, short = stage.submit("-p", "low", "-t", "60"), stage.submit("-p", "low", "-t", "5")
    stage.started()
    code, found, err = drill(stage.lab, "--job", str(run.jobid))
    assert (code, found["running"]["passed"]) == (0, True), f"{found}{err}"
    assert found["running"]["saved_step"] in run.committed()
    run.wait_steps(found["running"]["saved_step"] + 3)
    record = run.job()
    assert (record["JobState"], record["Restarts"]) == ("RUNNING", "0")
    code, found, err = drill(stage.lab, "--job", str(short.jobid))
    assert (code, found) == (1, {})
    assert "would leave" in err
    assert short.events("signal") == []


def test_ctrl_c_cancels_the_jobs_of_a_drill(new_stage: Callable[..., Stage]) -> None:
    """130, no job in the queue, no scratch directory."""
    lab = new_stage(nodes=1).lab
    words = ("drill", "--cluster", "--path", "warning", "--sbatch-args=--partition=low", "--", *toy_words("--step-ms 600000"))
    with (lab.root / "drill.err").open("w") as err:
        process = subprocess.Popen(lab.argv(CTL, *words), env=lab.env(), cwd=lab.root, stdin=subprocess.DEVNULL, stderr=err)
    try:
        wait_for(lambda: "step boundary" in (lab.root / "drill.err").read_text(), "the job trains")
        assert lab.checked("squeue", "-h", "-o", "%j") == "ckpt-drill-warning"
        process.send_signal(signal.SIGINT)
        assert process.wait(CALL_S) == 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert lab.checked("squeue", "-h", "-o", "%A") == ""
    assert list(lab.root.glob(".ckpt-drill-*")) == []
