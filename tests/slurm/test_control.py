"""`ckptctl save JOB` and `status JOB` on real jobs: found by their number, asked through the directory, judged by Slurm's word.

Owns: row 10 on a lab, and field case 66: after a preemption and a full run both attempts and the last result are shown.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.slurm_stage import CTL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

CALL_S = 90


def ctl(run: Run, command: str, *words: str, code: int | None = 0) -> tuple[dict[str, Any], str]:
    """One call of ckptctl for this job by its number, from elsewhere: its JSON, and what it has on stderr."""
    env = run.lab.env(CKPT_SUPERVISE_STATE=str(run.lab.root / "states"))
    argv = run.lab.argv(CTL, command, str(run.jobid), "--json", *words, cwd=Path("/"))
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=CALL_S, check=False)
    assert code in (None, done.returncode), f"{done.stdout}{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr


def state(run: Run) -> str:
    """In a word, how the job stands."""
    return str(ctl(run, "status")[0]["state"])


@pytest.mark.timeout(300)
def test_a_job_is_saved_by_its_number_and_shows_both_attempts_when_it_is_done(new_stage: Callable[..., Stage]) -> None:
    """Two tasks save one step together; then a preemption, and the rest of the run: COMPLETING is not the end, COMPLETED is."""
    stage = new_stage(nodes=1, proctrack="cgroup")
    # Without a limit it depends on which of Slurm's schedulers starts the job whether there is an end to be told of.
    run = stage.submit("-p", "low", "-t", "60", "-n2", srun="srun -n2", toy="--steps 1800")
    stage.started(ranks=2)
    value, _ = ctl(run, "save", "--wait", "--protect")
    assert (value["result"], value["job"], value["dir"]) == ("saved", str(run.jobid), str(run.dir))
    assert run.wait_event("commit", result="committed")["step"] == value["step"]
    assert run.committed() == [value["step"]]
    assert (run.dir / f".keep-step-{value['step']:09d}").exists()
    status, _ = ctl(run, "status")
    assert (status["state"], status["slurm_state"], status["attempt"]) == ("training", "RUNNING", 0)
    assert status["limit_at"] is not None

    run.preempt()
    run.wait_requeued()
    assert run.wait_event("exit", timeout=180, attempt=1, task=0)["code"] == 0
    record = run.wait_state("COMPLETED")
    assert int(record["Restarts"]) == 1 + len(run.requeued_at_its_end())
    assert run.events("command_started", attempt=2) == [], "what is done is not trained again"
    status, _ = ctl(run, "status")
    assert (status["state"], status["slurm_state"]) == ("finished", "COMPLETED")
    first, last = status["attempts"]
    assert first["end"].startswith("preempted, step ")
    assert first["end"].endswith("saved, requeued")
    assert (last["end"], last["code"]) == ("training ended", 0)
    refused, line = ctl(run, "save", "--wait", code=1)
    assert refused["result"] == "refused"
    assert "has not run since " in line
    assert "UTC (finished)" in line


@pytest.mark.timeout(240)
def test_a_job_leaves_when_its_owner_says_so_and_comes_back_only_if_that_was_said(new_stage: Callable[..., Stage]) -> None:
    """`--leave --requeue`: in the queue again, where it is not asked; `--leave`: it ends with 75, and stays away."""
    stage = new_stage(nodes=1, proctrack="cgroup", cred_expire=60)  # It comes back when it is told to.
    run = stage.submit("-p", "low")
    stage.started()
    step = ctl(run, "save", "--wait", "--leave", "--requeue")[0]["step"]
    assert run.wait_exit() == 75
    assert run.committed() == [step]
    assert run.steps()[-1] == step
    run.wait_state("PENDING", restarts=1)
    value, line = ctl(run, "save", code=None)
    assert value["result"] == "refused"
    assert "and nothing trains" in line or "has not run since" in line or "is just ending" in line
    stage.lab.release_requeued(run.jobid)
    run.wait_event("command_started", attempt=1)
    run.wait_steps(step + 3)
    assert run.events("command_started", attempt=1)[0]["resume_step"] == step
    assert run.events("exit", attempt=0)[0]["line"].startswith(f"asked to leave; step {step} is committed; ")
    assert ctl(run, "status")[0]["attempts"][0]["end"] == f"asked to leave, step {step} saved, requeued"
    assert state(run) == "training"

    last = ctl(run, "save", "--wait", "--leave")[0]["step"]
    assert run.wait_exit(2) == 75
    run.wait_state("FAILED", "COMPLETED")
    assert run.job()["Restarts"] == "1"
    assert "asked it to leave" in run.events("exit")[-1]["line"]
    assert run.newest() == last
    assert state(run) == "interrupted"
