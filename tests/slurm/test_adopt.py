"""Programs that save by themselves, unchanged, as jobs: preempted, requeued, resumed from what they wrote.

Owns: row S7 of the store's must-hold table on real Slurm (--adopt, --pass-signal). On cgroup a notice reaches the supervisor
alone, on linuxproc every process of the step: the program has to get its signal exactly once on both (docs/slurm.md section 4).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor import store

from tests.support.slurm_checks import BOTH, check_requeued
from tests.support.slurm_stage import PYTHON, THEN, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs.py"
RESUME_S = 150
"""Each of these programs imports torch first."""

pytestmark = pytest.mark.timeout(400)


def numbers(run: Run, word: str) -> list[int]:
    """What follows this word at the beginning of the output's lines."""
    return [int(found) for found in re.findall(rf"^{word} (\d+)", run.output(), re.MULTILINE)]


def submit(stage: Stage, kind: str, pattern: str, *options: str, name: str = "TERM", words: tuple[str, ...] = ()) -> Run:
    """One of the stand-ins in a job; it writes into the checkpoint directory itself."""
    place = stage.lab.root / f"r{len(stage.runs) + 1}"
    command = [PYTHON, str(PROGRAMS), kind, "--where", str(place), "--signal", name, "--save-ms", "300", *words]
    supervise = f"--adopt '{pattern}' --pass-signal {name} --resume-arg=--resume-from"
    return stage.submit("-p", "low", *options, command=command, supervise=supervise, script=THEN)


@pytest.mark.parametrize("proctrack", [*BOTH, "pgid"])
def test_preempted_programs_save_once_come_back_and_go_on(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """The seed recipe with two tasks, and a Trainer that saves at USR1 while Slurm sends TERM: no step is lost or done twice."""
    stage = new_stage(nodes=3, proctrack=proctrack, kill_wait=12)
    seed = submit(stage, "seed", "step_*.pt", "-n2")
    trainer = submit(stage, "trainer", "checkpoint-*", name="USR1")
    megatron = submit(stage, "megatron", "iter_*,latest_checkpointed_iteration.txt")
    wait_for(lambda: len(numbers(seed, "ready")) >= 2, "the handlers of both tasks", RESUME_S)
    for run in stage.runs:
        run.wait_line("saved 10", timeout=RESUME_S)
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
        (adopted,) = (entry["steps"] for entry in run.events("adopted", attempt=0)[-1:])
        last = adopted[-1]
        assert run.output().count("Received signal") == (2 if run is seed else 0)
        assert len(re.findall("^noted", run.output(), re.MULTILINE)) == (0 if run is seed else 1)
        passed = run.event("signal_passed", attempt=0, task=0)
        assert passed["by_slurm"] is (proctrack != "cgroup" and run is not trainer)
        run.verify()
        assert store.read_manifest(run.dir / f"step-{last:09d}").adopted
        run.wait_line(f"resumed {last} from {run.dir}/step-{last:09d}/", timeout=RESUME_S)
    for run in (trainer, megatron):
        run.wait_line("step", len(numbers(run, "step")) + 3)
        steps = numbers(run, "step")
        assert steps == list(range(1, len(steps) + 1))


def test_a_save_that_takes_longer_than_kill_wait_has_the_grace(new_stage: Callable[..., Stage]) -> None:
    """The first guess of the kill is KillWait after the signal; the look that follows finds the whole grace."""
    stage = new_stage(grace=30)
    run = submit(stage, "trainer", "checkpoint-*", words=("--every", "1000000", "--save-ms", "9000"))
    run.wait_line("step 5", timeout=RESUME_S)
    run.preempt()
    check_requeued(run)
    (adopted,) = (entry["steps"] for entry in run.events("adopted", attempt=0))
    assert adopted[-1] == numbers(run, "saved")[-1]
    run.wait_line(f"resumed {adopted[-1]} from {run.dir}/step-{adopted[-1]:09d}/", timeout=RESUME_S)


def test_a_program_that_is_cancelled_is_kept_and_stays_cancelled(new_stage: Callable[..., Stage]) -> None:
    """What it wrote at the signal is adopted; a person ended the job, so it does not come back."""
    stage = new_stage(kill_wait=12)
    run = submit(stage, "megatron", "iter_*")
    run.wait_line("step 5", timeout=RESUME_S)
    run.cancel()
    assert run.wait_exit() == 143
    run.wait_state("CANCELLED")
    (adopted,) = (entry["steps"] for entry in run.events("adopted"))
    assert run.newest() == adopted[-1] >= numbers(run, "step")[-1]
    assert run.requeue_calls() == []
