"""A supervisor that is killed takes its step along, whatever ran below it, and the next start begins clean.

Owns: row 6 of the issue "Shield and teardown" and field cases 17 and 135: kills at random moments of a step's life, of the
supervisor, of its guard, of both, of the supervisor's process group, of all that have our name on their command line, of srun.
Must not: test ends that the supervisor sees coming; test_teardown.py does. CKPT_TEST_KILLS_6 in the environment is the number of
kills of the supervisor alone, over all kinds of process tracking.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import step_processes
from tests.support.slurm_checks import took_s
from tests.support.slurm_stage import pause, wait_for
from tests.support.step_processes import StepId, unruly_toy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.slurm_stage import Run, Stage

TRACKINGS = ("cgroup", "linuxproc", "pgid")
KILLS = int(os.environ.get("CKPT_TEST_KILLS_6", "12"))
SEED = 6
NODES = 2
"""Of each lab, with one job on each: more at a time measures the machine."""

ENDS_WITHIN_S = 5.0
AT_ONCE_S = 0.5
"""From the job's end as Slurm sees it: nobody is alive by then, as far as it can be seen from here."""

LOOP = 'for i in $(seq 0 99); do\n  echo "begin $i at $(date +%s%N)"\n  {run}\n  echo "step $i rc=$? at $(date +%s%N)"\ndone\n'
OPTIONS = "--requeue never --every-steps 15 --keep 50 --notice-horizon 24h"
"""A notice that comes long before the end counts, too."""

HELPERS = "--save-ms 150 --helpers setsid,daemon,scrubbed,deaf,stopped,blocked"
QUIET = "--save-ms 150 --helpers setsid,daemon,deaf,stopped,blocked --quiet-helpers"
"""Where nobody is left to end a daemon with an empty environment, and nobody must hold the step's output."""

PARTS = {"start": 0.8, "train": 1.5, "leave": 1.0}
"""Parts of a step's life, and within how many seconds of their beginning the kill comes."""


@dataclasses.dataclass(frozen=True)
class Blow:
    """One kill: of whom, in which part of the step's life, and how long after that part has begun."""

    who: str
    part: str
    after_s: float


def blows(job: int, count: int, kinds: Sequence[str] = ("supervisor",)) -> list[Blow]:
    """That many random moments: while it starts, in training with its saves, between a notice and the end."""
    chance = random.Random(f"{SEED} {job}")
    parts = ("train", "start", "leave", "train")
    made = [Blow(kinds[i % len(kinds)], parts[(job + i + i // len(parts)) % len(parts)], 0) for i in range(count)]
    # A guard that is killed before it has started the command is replaced, and the step goes on.
    made = [dataclasses.replace(one, part="train") if (one.who, one.part) == ("guard", "start") else one for one in made]
    return [dataclasses.replace(blow, after_s=chance.uniform(0, PARTS[blow.part])) for blow in made]


def line_at(run: Run, pattern: str) -> tuple[str, int] | None:
    """The first group of the output's line of this kind, and the time that it names in ns."""
    found = re.search(rf"^{pattern} at (\d+)\n", run.output(), re.MULTILINE)
    return (found[1], int(found[2])) if found else None


def is_training(run: Run, since_ns: int) -> bool:
    """Whether a toy has begun since then."""
    return any(word[0] == "ready" and int(word[-1]) >= since_ns // 1_000_000 for word in run.words())


def strike(run: Run, step: StepId, blow: Blow) -> int | None:
    """Wait for the moment and kill; when that was, in ns since the epoch. None: whoever was meant had ended by then."""
    _, began_ns = wait_for(lambda: line_at(run, f"begin ({step.step})"), f"the beginning of {step}")
    top = wait_for(lambda: step_processes.supervisor(step), f"the supervisor of {step}", poll_s=0.01)
    if blow.part != "start":
        wait_for(lambda: is_training(run, began_ns), f"training in {step}")
    if blow.part == "leave":
        os.kill(top, signal.SIGUSR1)
    pause(blow.after_s)
    if blow.who == "all by Slurm":
        at_ns = time.time_ns()
        run.lab.run("scancel", f"{run.jobid}.{step.step}")
        return at_ns
    victims = victims_of(step, top, blow.who)
    at_ns = time.time_ns()
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    return at_ns if victims else None


def victims_of(step: StepId, top: int, who: str) -> list[int]:
    """Whom to kill now; nobody when the step's supervisor has left by itself."""
    seen = step_processes.alive(step)
    if top not in {process.pid for process in seen}:
        return []
    if who == "supervisor":
        return [top]
    if who == "group":
        with contextlib.suppress(ProcessLookupError):  # It may have left since it was seen.
            return [-os.getpgid(top)]
        return []
    if who == "named":
        return [process.pid for process in seen if "ckpt-supervise" in process.title]
    guards = wait_for(lambda: guards_of(step, top), f"a guard of {step}", poll_s=0.01)
    return [pid for pid in guards if pid != top] if who == "guard" else [top, *guards]


def guards_of(step: StepId, top: int) -> list[int]:
    """The guard of this supervisor; the supervisor itself when it has left, so that nobody waits."""
    seen = step_processes.alive(step)
    guards = [process.pid for process in seen if process.parent == top and "guard" in process.title]
    return guards or [top] * (top not in {process.pid for process in seen})


def check_blow(run: Run, step: StepId, blow: Blow, at_ns: int) -> float:
    """Nobody of the step has outlived it, and srun has returned in time; the seconds that it took."""
    step_processes.gone_after(step, max(0.0, at_ns / 1e9 + ENDS_WITHIN_S - time.time()), f"{blow}")
    code, over_ns = wait_for(lambda: line_at(run, f"step {step.step} rc=(\\d+)"), f"the end of {step} after {blow}")
    seconds = took_s(at_ns / 1e9, over_ns / 1e9)
    if blow.who != "all by Slurm":  # How long srun takes over its own SIGKILL is not ours.
        assert seconds < ENDS_WITHIN_S, f"{step}: {seconds:.1f} s after {blow}"
    others = ("75", "76") if blow.part == "leave" else ()  # On its way out it has the status of that.
    assert code in ("137", *others), f"{step} after {blow}"
    return seconds


def strike_all(run: Run, planned: Sequence[Blow]) -> list[str]:
    """All of these blows, each in the next step of the job; what each did, for people. Ends with a step that trains."""
    told = []
    number = 0
    for blow in planned:
        at_ns = None
        for _ in range(5):  # Only a step that is leaving can be over before the blow.
            step = StepId(run.jobid, 0, number)
            number += 1
            at_ns = strike(run, step, blow)
            if at_ns is not None:
                told.append(f"{check_blow(run, step, blow, at_ns):5.2f} s {run.lab.proctrack} {blow}")
                break
    _, began_ns = wait_for(lambda: line_at(run, f"begin ({number})"), f"step {number}")
    wait_for(lambda: is_training(run, began_ns), f"training in step {number}")
    return told


def check_resumed_each_time(run: Run) -> None:
    """Every start has resumed from the newest checkpoint that the journal knows of, or a newer one; none is damaged."""
    newest = -1
    for entry in run.journal():
        if entry["event"] == "commit" and entry["result"] == "committed":
            newest = max(newest, entry["step"])
        elif entry["event"] == "command_started":
            assert entry["resume_step"] >= newest, entry
    assert newest > 0
    run.verify()
    assert "Traceback" not in run.output()


def submit_loops(new_stage: Callable[..., Stage], knobs: str = HELPERS, nodes: int = NODES) -> list[Run]:
    """A job on each node of three labs, one for each kind of process tracking, that starts one step after the other."""
    stages = [new_stage(nodes=nodes, proctrack=proctrack) for proctrack in TRACKINGS]
    how = {"command": unruly_toy(knobs), "supervise": OPTIONS, "script": LOOP}
    return [stage.submit("-p", "low", "-t", "60", **how) for _ in range(nodes) for stage in stages]


def strike_at_once(runs: Sequence[Run], planned: Sequence[Sequence[Blow]]) -> None:
    """Each job has its blows, side by side with all others; then everything ends, and is gone."""
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
        results = [pool.submit(strike_all, run, mine) for run, mine in zip(runs, planned, strict=True)]
        told = [line for result in results for line in result.result()]
    print("\n".join(sorted(told)))
    for run in runs:
        run.cancel()
    for run in runs:
        run.wait_state("CANCELLED")
        check_resumed_each_time(run)
        step_processes.gone_after(StepId(run.jobid, 0, None), AT_ONCE_S, "the job's end")


@pytest.mark.timeout(240 + 10 * KILLS)
def test_a_supervisor_killed_at_any_moment_leaves_nobody_behind_and_the_next_start_resumes(
    new_stage: Callable[..., Stage],
) -> None:
    """Row 6: SIGKILL while it starts, trains, saves, leaves; helpers in sessions of their own, daemons, deaf, stopped ones."""
    runs = submit_loops(new_stage)
    each = -(-KILLS // len(runs))
    strike_at_once(runs, [blows(job, each) for job in range(len(runs))])


@pytest.mark.timeout(240 + 10 * KILLS)
def test_whoever_of_ours_is_killed_the_step_ends(new_stage: Callable[..., Stage]) -> None:
    """Row 6: SIGKILL of the guard, of the supervisor's process group, of all named after us, and of everybody by Slurm."""
    runs = submit_loops(new_stage, nodes=1)
    kinds = ("guard", "group", "named", "all by Slurm")
    each = max(len(kinds), KILLS // 3)
    strike_at_once(runs, [blows(job, each, kinds) for job in range(len(runs))])


def test_supervisor_and_guard_killed_at_once_leave_what_the_next_start_ends(new_stage: Callable[..., Stage]) -> None:
    """Row 6: with both gone the command dies, and what it left is ended by the next step's start on linuxproc and pgid."""
    runs = submit_loops(new_stage, QUIET, nodes=1)
    for run in runs:
        first = StepId(run.jobid, 0, 0)
        at_ns = strike(run, first, Blow("both", "train", 0.5))
        assert at_ns is not None
        code, over_ns = wait_for(lambda run=run: line_at(run, r"step 0 rc=(\d+)"), f"the end of {first}")
        assert code == "137"
        assert took_s(at_ns / 1e9, over_ns / 1e9) < ENDS_WITHIN_S
    for run in runs:
        _, began_ns = wait_for(lambda run=run: line_at(run, "begin (1)"), "step 1")
        wait_for(lambda run=run, began_ns=began_ns: is_training(run, began_ns), "training in step 1")
        step_processes.gone_after(StepId(run.jobid, 0, 0), ENDS_WITHIN_S, "the next start")
        run.cancel()
    for run in runs:
        run.wait_state("CANCELLED")
        check_resumed_each_time(run)


def test_a_job_requeued_by_hand_after_the_kill_starts_clean_on_the_same_node(new_stage: Callable[..., Stage]) -> None:
    """Row 6: the supervisor is killed and the job requeued at once: the next attempt, on the same node, resumes."""
    stages = [new_stage(nodes=1, proctrack=proctrack) for proctrack in TRACKINGS]
    how = {"command": unruly_toy(HELPERS), "supervise": "--every-steps 15"}
    runs = [stage.submit("-p", "low", **how, script="{run}\nsleep 60\n") for stage in stages]
    for run in runs:
        run.wait_event("commit", result="committed")
        os.kill(run.supervisor(0), signal.SIGKILL)
        run.lab.checked("scontrol", "requeue", str(run.jobid))
    for run in runs:
        step_processes.gone_after(StepId(run.jobid, 0, 0), ENDS_WITHIN_S, "SIGKILL and requeue")
        run.wait_state("PENDING", "RUNNING", restarts=1)
        started = run.wait_event("command_started", attempt=1, timeout=90)
        assert started["resume_step"] >= run.committed(attempt=0)[-1]
        run.wait_steps(started["resume_step"] + 3)
        run.verify()


SRUN_ENDED = """{run} &
pid=$!
while [ ! -e {go} ]; do sleep 0.05; done
{kill}
wait $pid
echo "srun rc=$? at $(date +%s%N)"
while [ ! -e {go}2 ]; do sleep 0.05; done
{run}
"""
ENDS_OF_SRUN = ("kill -TERM $pid", "kill -KILL $pid")
BOTH_SRUNS = "kill -KILL $(cat /proc/$pid/task/*/children) $pid"
"""srun has a child that ends the step when srun is killed: only without both do the tasks live on."""


def submit_srun_ended(stage: Stage, kill: str) -> tuple[Run, Path]:
    """A job whose script ends its own srun so when there is this file, and starts a second step when there is one named FILE2."""
    go = stage.lab.root / f"go{len(stage.runs)}"
    script = SRUN_ENDED.replace("{go}", str(go)).replace("{kill}", kill)
    how = {"command": unruly_toy("--save-ms 600 --helpers setsid,daemon,deaf"), "supervise": "--every-steps 20 --keep 50"}
    return stage.submit("-p", "low", **how, script=script), go


def test_srun_ended_by_the_script_leaves_whole_checkpoints_and_nobody(new_stage: Callable[..., Stage]) -> None:
    """Field cases 17 and 135: TERM and KILL to srun in mid-save: what was committed stands, nothing half written, resumed."""
    stages = [new_stage(nodes=len(ENDS_OF_SRUN), proctrack=proctrack) for proctrack in TRACKINGS]
    jobs = [submit_srun_ended(stage, kill) for stage in stages for kill in ENDS_OF_SRUN]
    for run, go in jobs:
        run.wait_event("commit", result="committed")
        run.wait_event("rank_saving", 2)
        go.touch()
    for run, go in jobs:
        wait_for(lambda run=run: line_at(run, r"srun rc=(\d+)"), "the end of srun")
        step_processes.gone_after(StepId(run.jobid, 0, 0), ENDS_WITHIN_S, "the end of srun")
        run.verify()
        go.with_name(f"{go.name}2").touch()
    for run, _ in jobs:
        started = run.wait_event("command_started", 2)
        assert started["resume_step"] >= max(run.committed(step_id="0"))
        run.wait_steps(started["resume_step"] + 3)


def test_training_goes_on_without_both_sruns_and_is_saved_when_the_job_ends(new_stage: Callable[..., Stage]) -> None:
    """Field case 135: neither srun nor its child is left: the step trains and saves on, its output lost, until the job's end."""
    stages = [new_stage(nodes=1, proctrack=proctrack, kill_wait=12) for proctrack in TRACKINGS]
    jobs = [submit_srun_ended(stage, BOTH_SRUNS) for stage in stages]
    for run, go in jobs:
        run.wait_event("commit", result="committed")
        go.touch()
        wait_for(lambda run=run: line_at(run, r"srun rc=(\d+)"), "the end of srun")
    for run, _ in jobs:
        saved = run.wait_event("commit", len(run.committed()) + 2, result="committed")
        assert saved["step_id"] == "0"
        run.cancel()
    for run, _ in jobs:
        assert run.wait_exit() == 143
        step_processes.gone_after(StepId(run.jobid, 0, 0), ENDS_WITHIN_S, "the job's end")
        run.wait_state("CANCELLED")
        run.verify()
