"""Jobs that cannot be requeued, and controllers and clients that do not answer: saved, told why, and never lost.

Owns: row 16 of the must-hold table and field cases 48 and 50.
Must not: leave a frozen slurmctld behind; each such test has a lab of its own, and `down` kills it.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_out_before_the_kill, check_requeued, check_resumed_at, check_saved
from tests.support.slurm_stage import SUPERVISE, TRAPPED, Run, pause, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.slurm_stage import Stage

AWAY_S = 18


@contextlib.contextmanager
def allocation(stage: Stage, run: Run) -> Iterator[None]:
    """A supervised toy in an allocation that a person holds with salloc."""
    toy = toy_words("--steps 100000 --step-ms 20 --log", str(run.log))
    inside = ["srun", SUPERVISE, "--dir", str(run.dir), "--", *toy]
    words = stage.lab.argv("salloc", "-p", "low", "-w", run.node, *inside)
    env = stage.lab.env(CKPT_SUPERVISE_STATE=str(stage.lab.root / "states"))
    with (
        run.out.open("wb") as out,
        subprocess.Popen(words, env=env, cwd=stage.lab.root, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as salloc,
    ):
        try:
            run.wait_line("Granted job allocation")
            run.jobid = int(run.output().split("Granted job allocation")[1].split()[0])
            yield
            salloc.wait(60)
        finally:
            salloc.kill()


def test_jobs_that_may_not_be_requeued_are_saved_and_say_what_to_do(new_stage: Callable[..., Stage]) -> None:
    """Row 16 and field case 48: salloc and --no-requeue: warned at the start, saved, 75, and one line with why and what to do."""
    stage = new_stage(nodes=2, proctrack="cgroup", grace=4)
    forbidden = stage.submit("-p", "low", "--no-requeue", script=TRAPPED)
    root = stage.lab.root
    held = Run(stage.lab, 0, stage.lab.nodes[1], root / "salloc.out", root / "salloc", root / "salloc.log")
    stage.runs.append(held)
    with allocation(stage, held):
        stage.started()
        for run in stage.runs:
            run.preempt()
        for run in stage.runs:
            assert run.wait_exit() == 75
    for run, warned, why in (
        (forbidden, "may not be requeued (Requeue=0)", "Requested operation is presently disabled"),
        (held, "no batch job", "only batch jobs can be requeued"),
    ):
        check_saved(run)
        check_out_before_the_kill(run)
        assert warned in run.output()
        line = run.event("exit")["line"]
        assert why in line
        assert "start the same command again" in line
        assert run.job()["Restarts"] == "0"


def test_a_site_that_forbids_requeue_is_noticed_at_the_start(new_stage: Callable[..., Stage]) -> None:
    """Field case 50: JobRequeue=0: the warning at the start, the save, 75 and what to do; never a silent success."""
    stage = new_stage(proctrack="cgroup", job_requeue=False, grace=4)
    run = stage.submit("-p", "low", script=TRAPPED)
    stage.started()
    run.wait_event("warning")
    run.preempt()
    assert run.wait_exit() == 75
    check_saved(run)
    assert "may not be requeued (Requeue=0)" in run.output()
    assert "start the same command again" in run.event("exit")["line"]
    assert "STAGE2" not in run.output()
    assert run.job()["Restarts"] == "0"


def tools(root: Path, name: str, text: str | None) -> str:
    """A directory for PATH with srun and a scontrol that does this (None: there is none); `$REAL` is the real one."""
    place = root / name
    place.mkdir()
    (place / "srun").symlink_to("/usr/bin/srun")
    if text is not None:
        (place / "scontrol").write_text(f"#!/bin/bash\nREAL=/usr/bin/scontrol\n{text}")
        (place / "scontrol").chmod(0o755)
    return str(place)


@pytest.mark.timeout(300)
def test_without_an_answer_from_scontrol_it_stays_until_slurm_requeues_it(new_stage: Callable[..., Stage]) -> None:
    """Row 16: scontrol missing, and hanging: saved, not lost by an early exit: it stays to the end of the grace."""
    stage = new_stage(nodes=2, proctrack="cgroup", grace=4)
    for name, text in (("missing", None), ("hangs", "/usr/bin/sleep 1000\n")):
        path = tools(stage.lab.root, name, text)
        stage.submit("-p", "low", script=f"PATH={path}\n{TRAPPED}")
    stage.started()
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        run.wait_event("commit", result="committed")
    for run in stage.runs:
        run.wait_requeued(timeout=90)
        assert run.requeue_calls() == []
        assert run.job()["Restarts"] == "1"
        assert "STAGE2" not in run.output()
        check_resumed_at(run, run.committed()[0])
    assert "scontrol was not found" in stage.runs[0].output()


def test_a_requeue_whose_answer_is_lost_is_found_out_and_not_repeated(new_stage: Callable[..., Stage]) -> None:
    """Row 16: scontrol passes the requeue on and then hangs: the job's own record tells that it was accepted."""
    stage = new_stage(proctrack="cgroup", kill_wait=12)
    text = '"$REAL" "$@"\nrc=$?\n[ "$1" = requeue ] && /usr/bin/sleep 1000\nexit $rc\n'
    path = tools(stage.lab.root, "lost", text)
    run = stage.submit("-p", "low", script=f"PATH={path}\n{TRAPPED}")
    stage.started()
    run.preempt()
    check_requeued(run)
    check_saved(run)
    check_out_before_the_kill(run)


def test_a_scontrol_at_work_survives_the_broadcast_of_the_notice(new_stage: Callable[..., Stage]) -> None:
    """Row 16: on linuxproc scontrol is a process of the step: no call is killed, whatever signals come in the middle of it."""
    stage = new_stage(proctrack="linuxproc", kill_wait=20, cred_expire=60)  # The second run's calls are not counted.
    calls = stage.lab.root / "calls"
    text = f'echo "begin $*" >>{calls}\n/usr/bin/sleep 0.7\n"$REAL" "$@"\nrc=$?\necho "end $* $rc" >>{calls}\nexit $rc\n'
    path = tools(stage.lab.root, "slow", text)
    run = stage.submit("-p", "low", "-t", "5", toy="--save-ms 8000", script=f"PATH={path}\n{TRAPPED}")
    stage.started()
    run.preempt()
    run.wait_event("signal")
    for number, name in enumerate(("TERM", "USR1", "TERM"), 1):
        wait_for(lambda number=number: calls.read_text().count("begin show job") > number, "a look at the job under way")
        run.cancel(f"--signal={name}")
    check_requeued(run)
    check_saved(run)
    said = calls.read_text().splitlines()
    begun = [line.removeprefix("begin ") for line in said if line.startswith("begin") and "requeue" not in line]
    ended = [line.removeprefix("end ").rpartition(" ")[0] for line in said if line.startswith("end")]
    assert len(begun) >= 4
    assert sum(line.startswith("show") for line in ended) >= len(begun) - 1  # but for the one that runs when the step ends


@pytest.mark.timeout(300)
def test_a_controller_that_is_away_in_the_grace_is_waited_for(new_stage: Callable[..., Stage]) -> None:
    """Row 16: slurmctld away for 18 s, frozen, or killed and started again: saved, stayed, and requeued once when it is back."""
    frozen, dead = (new_stage(proctrack=proctrack, grace=80) for proctrack in ("cgroup", "linuxproc"))
    runs = [stage.submit("-p", "low", toy="--save-ms 3000", script=TRAPPED) for stage in (frozen, dead)]
    for stage, run in zip((frozen, dead), runs, strict=True):
        stage.started()
        stage.lab.save_state(run.jobid)
    for run, away in zip(runs, (frozen.lab.controller_stop, dead.lab.controller_kill), strict=True):
        run.preempt()
        run.wait_event("notice", cause="preempted")
        away()
    for run in runs:
        run.wait_event("commit", result="committed")
    pause(AWAY_S)
    assert [run.exit_codes() for run in runs] == [[], []]
    frozen.lab.controller_cont()
    dead.lab.controller_start()
    for run in runs:
        assert run.wait_exit(timeout=90) == 75
        run.wait_requeued()
        assert len([call for call in run.requeue_calls() if call.error is None]) == 1
        assert run.job()["Restarts"] == "1"
        check_saved(run)
        assert "STAGE2" not in run.output()
