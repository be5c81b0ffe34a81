"""What several rows of the must-hold table ask of a job in the same words.

Owns: those judgements, over a Run of slurm_stage.py.
Must not: disturb anything; a check may wait for the facts that it judges.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.contention import lost_s
from tests.support.slurm_stage import WAIT_S, instant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.slurm_stage import Run

BOTH = ("cgroup", "linuxproc")

REQUEUED_S = 2.0
"""From the commit to PENDING."""

DEAD_SRUN_S = 3.0
"""What Slurm takes longer on cgroup when the script has no trap: five attempts to tell a dead srun (docs/slurm.md section 6)."""

SLURMD_LOOK_S = 1.0
CALM_S = 0.1
"""Lost by a busy machine: what makes srun miss none of slurmd's looks."""

LEAVE_S = 1.5
"""What a training that does not end gets by default, with the labs' KillWait (ckpt-supervise --leave-timeout)."""

RESUME_S = 90
ENDS = ("PENDING", "PREEMPTED")
"""How the first run of a requeued job stands in jobcomp.txt (docs/slurm.md section 6)."""


def check_requeued(run: Run, code: int = 75, calls: int = 1, timeout: float = WAIT_S, ends: tuple[str, ...] = ENDS) -> None:
    """Left with this status; back in the queue, once, by so many calls, all accepted; the script's next line never ran."""
    assert run.wait_exit(timeout=timeout) == code
    run.wait_requeued()
    check_calls(run, calls)
    assert {record["JobState"] for record in run.lab.jobcomp(run.jobid)} <= set(ends)
    assert "STAGE2" not in run.output()
    assert not [line for line in run.lines() if line.startswith("rc=") and line != f"rc={code}"]


def check_calls(run: Run, calls: int) -> None:
    """So many calls have reached slurmctld, all accepted; none where Slurm was first, as it may be once the grace is over.

    It looks for that every 30 s: at the very end of the grace, or half a minute later.
    """
    made = [call.error for call in run.requeue_calls()]
    by_slurm = run.requeued_by_slurm_at()
    seen = [look["preempt_s"] for look in run.events("look", attempt=0) if look["preempt_s"]]
    if made != [None] * calls and by_slurm and seen and by_slurm[0] >= seen[0] + run.lab.grace:
        assert run.events("notice", attempt=0, cause="requeued already")
        assert made in ([], ["Job is pending execution"])
    else:
        assert made == [None] * calls


def check_step_requeued(run: Run, tasks: Iterable[int], code: int = 75, calls: int = 1, killed: bool = False) -> None:
    """Each of these tasks' supervisors has left with this status; back in the queue, once, by so many calls in slurmctld's log.

    srun's own status is the highest one of its tasks: where a supervisor was `killed`, 137.
    """
    for task in tasks:
        assert run.wait_event("exit", attempt=0, task=task)["code"] == code
    run.wait_requeued()
    check_calls(run, calls)
    assert run.job()["Restarts"] == "1"
    assert len(run.requeued_at()) == 1
    assert {record["JobState"] for record in run.lab.jobcomp(run.jobid)} <= set(ENDS)
    assert not [line for line in run.lines() if line.startswith("rc=") and line != f"rc={137 if killed else code}"]
    check_all_out_before_the_kill(run)


def check_all_out_before_the_kill(run: Run) -> None:
    """As below, and for the supervisors of all tasks."""
    kill_at = max(instant(notice["ts"]) + notice["left_ms"] / 1000 for notice in run.events("notice", attempt=0))
    assert max(instant(left["ts"]) for left in run.events("exit", attempt=0)) < kill_at


def check_ranks(run: Run, ranks: Iterable[int]) -> None:
    """Every committed checkpoint is intact, of one step, and of exactly these ranks."""
    run.verify()
    wanted = list(ranks)
    for place in sorted(run.dir.glob("step-*")):
        step = int(place.name.removeprefix("step-"))
        manifest = json.loads((place / "manifest.json").read_text())
        assert (manifest["step"], manifest["ranks"]) == (step, wanted), place
        contents = [json.loads(file.read_text()) for file in sorted(place.glob("toy-*.json"))]
        assert [(content["rank"], content["step"]) for content in contents] == [(rank, step) for rank in wanted], place


def check_every_step_once(run: Run, ranks: Iterable[int]) -> None:
    """Over all runs no rank has lost a step or done one twice."""
    for rank in ranks:
        steps = run.steps(rank)
        assert steps == list(range(1, len(steps) + 1)), f"rank {rank}"


def check_saved(run: Run) -> int:
    """Exactly one save, committed, and really intact; its step."""
    run.verify()
    committed = run.committed()
    assert len(committed) == 1, f"committed {committed}"
    assert run.newest() == committed[0]
    assert sum(word[0] == "saving" for word in run.words()) == 1
    return committed[0]


def check_older_stands(run: Run, step: int) -> None:
    """This round has committed nothing; the checkpoint from before is the newest one and intact."""
    run.verify()
    assert run.committed() in ([], [step])
    assert run.newest() == step


def check_resumed_at(run: Run, step: int) -> None:
    """The job's second run begins at the step after this one (-1: at the beginning)."""
    run.wait_event("rank_hello", attempt=1, timeout=RESUME_S)
    (started,) = run.events("command_started", attempt=1, task=0)
    assert started["resume_step"] == step
    run.wait_line(f" at {max(step, 0)} rank 0", timeout=RESUME_S)


def check_no_step_lost(run: Run, step: int, rank: int = 0) -> None:
    """The job's second run goes on after `step`, and over both runs no step is missing and none was done twice."""
    check_resumed_at(run, step)
    run.wait_steps(step + 3, rank)
    steps = run.steps(rank)
    assert steps == list(range(1, len(steps) + 1))


def check_out_before_the_kill(run: Run) -> None:
    """The supervisor has left before the instant at which, by its own newest knowledge, Slurm kills the step."""
    notice = run.events("notice", attempt=0)[-1]
    kill_at = instant(notice["ts"]) + notice["left_ms"] / 1000
    assert instant(run.events("exit")[0]["ts"]) < kill_at


def notices(run: Run) -> list[dict[str, Any]]:
    """What was known of each notice, in order."""
    return run.events("notice")


def check_pending_soon(*runs: Run, later_s: float = 0.0) -> None:
    """PENDING within 2 s of the commit, `later_s` later where Slurm or the options take that long.

    slurmd looks for the end of a step 0.67 s and 1.67 s after it has told it to end. On a machine with more to do than it has
    cores the first of these looks can come before srun and the script are over: then it is one look later.
    """
    ways = [(instant(run.events("commit")[0]["ts"]), run.requeued_at()[0]) for run in runs]
    lost = [lost_s(*way) for way in ways]
    took = [end - begin - later_s - busy_s for (begin, end), busy_s in zip(ways, lost, strict=True)]
    assert max(took) <= REQUEUED_S + SLURMD_LOOK_S, f"{took}, and lost {lost}"
    if min(lost) <= CALM_S:
        assert min(took) <= REQUEUED_S, f"{took}, and lost {lost}"


def took_s(begin: str | float, end: str | float) -> float:
    """Seconds from one time to the other (epoch seconds, or as a journal has them), but for those that the machine had not."""
    first, last = (at if isinstance(at, float) else instant(at) for at in (begin, end))
    return last - first - lost_s(first, last)
