"""After a week of interruptions: `ckptctl timeline` and `why` name each one's cause, and count the lost steps as the trainer did.

Owns: row 1 of the issue "Log inspection" on real Slurm: one job for each way to be interrupted, all side by side.
Must not: test how a job is saved or comes back; the files about that do. Here is judged what is told of it afterwards, against
the trainer's own log: a step is lost if it was done and lies above the one that the next start went on from. CKPT_TEST_TIMELINES
in the environment: a file for all that the two commands print for people, to be looked at.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.contention import lost_s
from tests.support.schemas import held
from tests.support.slurm_stage import CTL, TRAPPED, instant, lock_step_toy, own_toy, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.support.slurm_stage import Run, Stage

pytestmark = pytest.mark.timeout(500)

LIMIT_S = 240
"""Bound on what comes at the latest 96 s after a start with a limit of one minute, on a machine with other things to do."""

CALL_S = 90
LOOK_S = 0.15
SLACK_MS = 1_500
"""Between what the trainer writes down and what its supervisor hears of it, but for the time that a busy machine has not."""

FRESH_MS = 2_500
"""A step that the trainer has done so long ago is the newest one still when the blow falls: the next takes 10 s."""

KILLED = "{run}\nsleep 600\n"
"""The job outlives its step."""

EARLY = "--every-steps 10 --keep 50"
SELDOM = "--every-steps 3 --keep 50 --hang-floor 10s"
"""And a rank says every second where it is."""

BRISK = "--step-ms 200"
SLOW_SAVE = "--step-ms 200 --faults-from 2 --save-ms 60000"
LONG_STEPS = "--step-ms 10000"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to be interrupted, and what has to be told of it."""

    cause: str
    toy: str = BRISK
    options: tuple[str, ...] = ("-p", "low")
    supervise: str = EARLY
    script: str = TRAPPED
    nodes: int = 1
    slurm: str | None = None
    """What Slurm's own words in the job's output come to; None: nothing is asked of them."""

    is_least: bool = False
    """Nobody has told how far it had come at its very end."""

    comes_back: bool = True
    starts: int = 1
    """Of the trainer, in the attempt that was interrupted."""


LIMIT = ("-p", "low", "-t", "1")
TWO = ("-p", "low", "-n2", "--no-requeue")
WAYS: dict[str, Way] = {
    "ahead of its limit": Way("end of the time limit ahead", options=LIMIT),
    "at its limit": Way("time limit reached", options=LIMIT, supervise=f"{EARLY} --lead off", slurm="time limit reached"),
    "preempted": Way("preempted"),
    "preempted in a save too long": Way("preempted", SLOW_SAVE, slurm="preempted"),
    "preempted without grace": Way("requeued already", SLOW_SAVE, ("-p", "low0"), slurm="preempted"),
    "requeued by hand": Way("requeued already"),
    "cancelled": Way("cancelled", comes_back=False),
    "asked": Way("asked to leave"),
    "crashed": Way("training failed", "--step-ms 200 --raises-at 28", supervise=f"{EARLY} --max-crashes 1"),
    "killed twice": Way(
        "training failed", LONG_STEPS, supervise=f"{SELDOM} --restarts 1 --max-crashes 1", is_least=True, starts=2
    ),
    "hung": Way("training hung", LONG_STEPS, supervise=f"{SELDOM} --on-hang requeue", is_least=True),
    "node lost": Way("lost without a word", LONG_STEPS, supervise=SELDOM, is_least=True),
    "one node of two lost": Way("node failure", LONG_STEPS, TWO, SELDOM, nodes=2, is_least=True, comes_back=False),
    "supervisor killed": Way("lost without a word", LONG_STEPS, supervise=SELDOM, script=KILLED, is_least=True),
}
LOSSLESS = {"ahead of its limit", "at its limit", "preempted", "requeued by hand", "cancelled", "asked"}
"""Saved at the very step. Of the others steps were lost, one at least."""


def ctl(run: Run, command: str, *words: str) -> str:
    """What one call of ckptctl prints of this job's directory."""
    env = run.lab.env(CKPT_SUPERVISE_STATE=str(run.lab.root / "states"))
    argv = run.lab.argv(CTL, command, *words, "--dir", str(run.dir), cwd=Path("/"))
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=CALL_S, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def struck(run: Run, start: int = 0) -> None:
    """Until the journal has told of the newest step of this start, done a moment ago, and no checkpoint holds it."""

    def there() -> bool:
        own = starts(run)
        if len(own) <= start or not own[start].steps:
            return False
        last, kept = own[start].last, run.committed()
        told = run.events("progress", task=0)[-1:]
        is_told = [entry["step"] for entry in told] == [last]
        return bool(kept) and last > max(kept) and is_told and time.time() * 1000 - own[start].steps[last] < FRESH_MS

    wait_for(there, f"a step of job {run.jobid} above its newest checkpoint, told a moment ago", LIMIT_S, LOOK_S)


def saved(run: Run) -> None:
    """Until there is a checkpoint, and training is beyond it."""
    step = run.wait_event("commit", result="committed", timeout=90)["step"]
    run.wait_steps(step + 2)


def preempt(run: Run) -> None:
    """By a job of higher priority."""
    saved(run)
    run.preempt()


def requeue(run: Run) -> None:
    """By somebody's own hand."""
    saved(run)
    run.lab.checked("scontrol", "requeue", str(run.jobid))


def cancel(run: Run) -> None:
    """By its owner."""
    saved(run)
    run.cancel()


def ask(run: Run) -> None:
    """By its owner, through the directory."""
    saved(run)
    ctl(run, "save", "--leave", "--requeue")


def kill_twice(run: Run) -> None:
    """SIGKILL of the only rank, and again after its start in place."""
    for start in range(2):
        struck(run, start)
        os.kill(int(run.events("rank_hello", task=0)[-1]["rank_pid"]), signal.SIGKILL)


def stop(run: Run) -> None:
    """SIGSTOP of the only rank."""
    struck(run)
    os.kill(run.trainer(0), signal.SIGSTOP)


def lose_node(run: Run) -> None:
    """Everything of its last node by SIGKILL, and the node comes back later."""
    struck(run)
    run.lab.node_kill(run.nodes[-1])
    if len(run.nodes) == 1:
        run.wait_state("PENDING", restarts=1)
        run.lab.node_start(run.nodes[-1])


def kill_supervisor(run: Run) -> None:
    """SIGKILL, and the job is requeued by hand when nobody is left."""
    struck(run)
    os.kill(run.supervisor(0), signal.SIGKILL)
    run.lab.checked("scontrol", "requeue", str(run.jobid))


STRIKES: Mapping[str, Callable[[Run], None]] = {
    "preempted": preempt,
    "preempted in a save too long": preempt,
    "preempted without grace": preempt,
    "requeued by hand": requeue,
    "cancelled": cancel,
    "asked": ask,
    "killed twice": kill_twice,
    "hung": stop,
    "node lost": lose_node,
    "one node of two lost": lose_node,
    "supervisor killed": kill_supervisor,
}
"""The others end by themselves."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What the two commands say of a job, of `why` about its first attempt: the JSON, and the lines for people."""

    run: Run
    timeline: dict[str, Any]
    drawn: str
    why: dict[str, Any]
    lines: list[str]


def told_of(name: str, run: Run) -> Told:
    """Have it interrupted, wait for what becomes of it (the first steps of its next attempt, or its end), and ask."""
    way = WAYS[name]
    STRIKES.get(name, lambda _: None)(run)
    if way.comes_back:
        wait_for(lambda: len(starts(run)) > way.starts and starts(run)[-1].steps, f"{name}: its next start", LIMIT_S, LOOK_S)
    else:
        wait_for(lambda: run.events("exit", task=0), f"{name}: the end of job {run.jobid}", LIMIT_S, LOOK_S)
    first = ("--attempt", "0")
    (timeline,) = held("timeline", ctl(run, "timeline", "--json").splitlines())
    (why,) = held("why", ctl(run, "why", "--json", *first).splitlines())
    told = Told(run, timeline, ctl(run, "timeline"), why, ctl(run, "why", *first).splitlines())
    run.cancel()
    return told


@pytest.fixture(scope="module")
def told(new_module_stage: Callable[..., Stage]) -> dict[str, Told]:
    """All jobs of this file, interrupted side by side, and what is told of each."""
    stage = new_module_stage(nodes=sum(way.nodes for way in WAYS.values()), proctrack="auto", kill_wait=12)
    for way in WAYS.values():
        command = (lock_step_toy if way.nodes > 1 else own_toy)(way.toy)
        stage.submit(*way.options, command=command, supervise=way.supervise, script=way.script, nodes=way.nodes)
    with concurrent.futures.ThreadPoolExecutor(len(WAYS)) as pool:
        asked = {name: pool.submit(told_of, name, run) for name, run in zip(WAYS, stage.runs, strict=True)}
    found = {name: done.result() for name, done in asked.items()}
    wanted = os.environ.get("CKPT_TEST_TIMELINES")
    if wanted:
        parts = [f"===== {name}\n{one.drawn}\n{chr(10).join(one.lines)}\n" for name, one in found.items()]
        Path(wanted).write_text("\n".join(parts))
    return found


@dataclasses.dataclass
class Start:
    """One start of the trainer, by its own log."""

    base: int
    """The step that it went on from."""

    began_ms: int
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Each step that it has done, and when that was."""

    @property
    def last(self) -> int:
        """The step that it had come to."""
        return max(self.steps, default=self.base)


def starts(run: Run) -> list[Start]:
    """All starts of rank 0, oldest first."""
    found: list[Start] = []
    for words in run.words():
        if words[-3] != "0":
            continue
        if words[0] == "ready":
            found.append(Start(int(words[4]), int(words[-1])))
        elif words[0] == "step":
            found[-1].steps[int(words[1])] = int(words[-1])
    return found


def spent(run: Run, way: Way) -> list[tuple[Start, int]]:
    """The trainer's starts in the interrupted attempt, and the step that stood after each."""
    own = starts(run)
    bases = [start.base for start in own[1:]] + ([] if way.comes_back else [run.newest()])
    return list(zip(own[: way.starts], bases, strict=False))


@pytest.mark.parametrize("name", WAYS)
def test_each_cause_is_named_and_lost_steps_are_those_that_the_trainer_counted(told: dict[str, Told], name: str) -> None:
    """Row 1: what both commands say of the interrupted attempt, to scripts and to people."""
    way, one = WAYS[name], told[name]
    first = one.timeline["attempts"][0]
    assert (first["attempt"], first["cause"]) == (0, way.cause)
    lost = sum(start.last - base for start, base in spent(one.run, way))
    assert (first["lost_steps"], first["lost_is_least"]) == (lost, way.is_least)
    assert (lost == 0) == (name in LOSSLESS)
    assert first["restarts"] == way.starts - 1
    check_reason(one, way, lost)
    check_words(one, way, lost)
    check_times(one, way)


def check_reason(one: Told, way: Way, lost: int) -> None:
    """`why --json` tells the same of it, and what Slurm has said."""
    assert (one.why["cause"], one.why["lost_steps"], one.why["lost_is_least"]) == (way.cause, lost, way.is_least)
    assert way.slurm in (None, one.why["slurm_cause"]), one.why["slurm"]
    assert one.why["committed_step"] == spent(one.run, way)[-1][1]
    assert one.why["decided"]
    assert one.why["change"]


def check_words(one: Told, way: Way, lost: int) -> None:
    """What people read: the cause, and the loss."""
    least = "at least " if way.is_least else ""
    assert way.cause in one.drawn
    assert (f"{least}{lost} lost" if lost else "none lost") in one.drawn
    head, *rest = one.lines
    assert way.cause in head
    assert way.slurm is None or way.slurm in head, head
    (line,) = [line for line in rest if line.startswith("  lost ")]
    assert (f"{least}{lost} step" if lost else "nothing; step") in line


def check_times(one: Told, way: Way) -> None:
    """Trained and lost are the times that the trainer had for those steps, and goodput is made of them."""
    first, totals = one.timeline["attempts"][0], one.timeline["totals"]
    kept_ms = lost_ms = busy_ms = 0
    for start, base in spent(one.run, way):
        kept_ms += start.steps.get(base, start.began_ms) - start.began_ms
        lost_ms += start.steps.get(start.last, start.began_ms) - start.steps.get(base, start.began_ms)
        told_ms = {start.began_ms, start.steps.get(base, start.began_ms), start.steps.get(start.last, start.began_ms)}
        busy_ms += sum(1000 * lost_s(at / 1000 - 1, at / 1000 + 2) for at in told_ms)
    trained_ms = sum(
        1000 * (instant(span["end_at"]) - instant(span["begin_at"])) for span in first["spans"] if span["kind"] == "training"
    )
    assert trained_ms == pytest.approx(kept_ms, abs=SLACK_MS + busy_ms), first["spans"]
    assert first["lost_ms"] > lost_ms - SLACK_MS / 2 - busy_ms, first["spans"]
    allocated_ms = sum(1000 * (instant(other["last_word_at"]) - instant(other["began_at"])) for other in one.timeline["attempts"])
    assert totals["allocated_ms"] == pytest.approx(allocated_ms, abs=10)
    parts = {kind: ms for kind, ms in totals["kinds_ms"].items() if kind != "queued"}
    assert sum(parts.values()) == pytest.approx(allocated_ms, abs=100)
    counted_ms = allocated_ms - totals["pending_ms"]
    assert totals["goodput"] == pytest.approx((parts["training"] - totals["pending_ms"]) / counted_ms, abs=0.001)
    assert 0 <= totals["goodput"] <= 1
    assert totals["lost_steps"] == sum(other["lost_steps"] for other in one.timeline["attempts"])
