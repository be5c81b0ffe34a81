"""Supervised trainings as jobs of a lab: submit them, wait for what they say, disturb them, look back at what became of them.

Owns: the job script around one supervised toy, and reading its output, its journal, the toy's own log and Slurm's.
Must not: judge. What has to hold stands in the tests. Every wait is for a fact, has a bound, and fails with what it waited for;
tests/slurm/conftest.py adds everything there is to know about a failed test's jobs.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_supervisor.adapters.journal import read_lines

from tests.support.contention import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.support.lab import Lab
    from tests.support.lab_text import Job, JobId

T = TypeVar("T")

PYTHON = sys.executable
BIN = Path(sys.executable).parent
SUPERVISE = str(BIN / "ckpt-supervise")
CTL = str(BIN / "ckptctl")
TOY = str(Path(__file__).with_name("toy.py"))
OWN_TOY = str(Path(__file__).with_name("slurm_toy.py"))

PLAIN = "{run}\necho rc=$?\n"
THEN = "{run} && echo STAGE2\necho rc=$?\n"
TRAPPED = "trap 'echo TERM in the script' TERM\n{run} && echo STAGE2\necho rc=$?\n"

WAIT_S = 75
"""Bound on whatever takes a second or two on an idle machine: a busy one may stop any process for seconds, at any moment."""

POLL_S = 0.05
ASK_S = 0.2
"""Pause between questions to slurmctld: each is a process, on cores that the tests need."""

TAIL_LINES = 60
NOISE = re.compile(
    r"FED_INFO|_get_fed|REQUEST_JOB_INFO|cons_tres|usable nodes|Tree head|node_did_resp|backfill|scheduler|group_cache"
)
SHOW_S = 60

PORTS = (10_000, 20_000)
"""Neither those that the kernel gives to whoever connects (32768 and up) nor those of labs: nobody takes one meanwhile."""


def pause(seconds: float) -> None:
    """Let time pass where the scenario itself is a stretch of time, such as a controller that is away for 18 s."""
    threading.Event().wait(seconds)


def wait_for(look: Callable[[], T | None], what: Callable[[], str] | str, timeout: float = WAIT_S, poll_s: float = POLL_S) -> T:
    """What `look` gives as soon as it gives something true."""
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {what if isinstance(what, str) else what()}")
        pause(poll_s)


def toy_words(*knobs: str) -> list[str]:
    """The command line of a toy without torch, unless the knobs say --torch."""
    words = [word for knob in knobs for word in shlex.split(knob)]
    if "--torch" in words:
        words.remove("--torch")
        return [PYTHON, TOY, *words]
    return [PYTHON, TOY, "--no-torch", *words]


def own_toy(*knobs: str) -> list[str]:
    """The command line of slurm_toy.py; its knobs, and those of the toy."""
    words = [word for knob in knobs for word in shlex.split(knob)]
    return [PYTHON, OWN_TOY, "--no-torch", "--steps", "100000", "--step-ms", "20", "--log", "{log}", *words]


def lock_step_toy(*knobs: str) -> list[str]:
    """The same, with all ranks of the step in lock-step."""
    return own_toy("--lock-step {log}.meet", *knobs)


def free_port() -> int:
    """One that nobody listens on, for a meeting of ranks that only begins after their imports."""
    for port in random.sample(range(*PORTS), 50):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"of 50 ports between {PORTS[0]} and {PORTS[1]} none is free")


def instant(text: str) -> float:
    """Epoch seconds of a time in a journal (UTC) or in slurmctld's log (local)."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone().timestamp()


@dataclasses.dataclass
class Run:
    """One supervised job."""

    lab: Lab
    jobid: JobId
    node: str
    out: Path
    dir: Path
    log: Path
    nodes: list[str] = dataclasses.field(default_factory=list)
    """All of its nodes, where it has several."""

    # What it has said so far

    def output(self) -> str:
        """The job's output, of all of its runs."""
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def lines(self) -> list[str]:
        """The output, line by line."""
        return self.output().splitlines()

    def said(self, text: str) -> bool:
        """Whether the output holds this text."""
        return text in self.output()

    def words(self) -> list[list[str]]:
        """The toy's own log: `step 7 rank 0 t 123` as words. A line counts once its end can be read too."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self, rank: int = 0) -> list[int]:
        """Every step that this rank has done, in order, of all runs."""
        return [int(word[1]) for word in self.words() if word[0] == "step" and word[3] == str(rank)]

    def left_at(self, rank: int = 0, start: int = 0) -> int:
        """The step that this rank had come to at the end of its so manieth start, also if it has been started again since."""
        last: list[int] = []
        for word in self.words():
            if word[-3] == str(rank) and word[0] == "ready":
                last.append(int(word[4]))
            elif word[-3] == str(rank) and word[0] == "step":
                last[-1] = int(word[1])
        return last[start]

    def journal(self) -> list[dict[str, Any]]:
        """All events of this job in the journal's files, in order of time."""
        files = sorted((self.dir / "journal").glob(f"{self.jobid}-*.jsonl"))
        entries = [entry for path in files for entry in read_lines(path)]
        return sorted(entries, key=lambda entry: str(entry["ts"]))

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """The events of this name whose fields have these values."""
        return [
            entry
            for entry in self.journal()
            if entry["event"] == name and all(entry.get(key) == value for key, value in fields.items())
        ]

    def event(self, name: str, **fields: object) -> dict[str, Any]:
        """The only event of this name with these fields."""
        found = self.events(name, **fields)
        assert len(found) == 1, f"job {self.jobid}: {len(found)} events {name} {fields}, not one"
        return found[0]

    def exit_codes(self) -> list[int]:
        """Exit statuses of the supervisors so far, by their own word."""
        return [entry["code"] for entry in self.events("exit")]

    def committed(self, **fields: object) -> list[int]:
        """Steps that were committed, in order; `attempt=0` for those of the first run only."""
        return [entry["step"] for entry in self.events("commit", result="committed", **fields)]

    def supervisor(self, task: int, attempt: int = 0) -> int:
        """Process id of a task's supervisor."""
        return int(self.wait_event("rank_hello", attempt=attempt, task=task)["pid"])

    def trainer(self, rank: int, attempt: int = 0) -> int:
        """Process id of a rank."""
        return int(self.wait_event("rank_hello", attempt=attempt, rank=rank)["rank_pid"])

    def job(self) -> Job:
        """Slurm's record."""
        return self.lab.job(self.jobid)

    # Waiting

    def wait_line(self, text: str, times: int = 1, timeout: float = WAIT_S) -> None:
        """Until lines with this text are there so often."""
        wait_for(
            lambda: sum(text in line for line in self.lines()) >= times, f"{times} lines with {text!r} in {self.out}", timeout
        )

    def wait_steps(self, least: int = 5, rank: int = 0, timeout: float = WAIT_S) -> int:
        """Until this rank has done step number `least`; the newest one."""
        wait_for(lambda: max(self.steps(rank), default=0) >= least, f"step {least} of rank {rank} in {self.log}", timeout)
        return max(self.steps(rank))

    def wait_event(self, name: str, times: int = 1, timeout: float = WAIT_S, **fields: object) -> dict[str, Any]:
        """Until so many of these events are in the journal; the last of them."""
        what = f"{times} events {name} {fields} of job {self.jobid}"
        wait_for(lambda: len(self.events(name, **fields)) >= times, what, timeout)
        return self.events(name, **fields)[times - 1]

    def wait_exit(self, times: int = 1, timeout: float = WAIT_S) -> int:
        """Until the supervisor has said that it leaves, for the so manieth time; its exit status."""
        return int(self.wait_event("exit", times, timeout)["code"])

    def wait_state(self, *states: str, timeout: float = WAIT_S, restarts: int | None = None) -> Job:
        """Until Slurm's record has one of these states."""

        def there() -> Job | None:
            record = self.lab.seen(self.jobid)
            is_there = record is not None and record["JobState"] in states and restarts in (None, int(record["Restarts"]))
            return record if is_there else None

        return wait_for(there, lambda: f"{'/'.join(states)} with restarts={restarts}, but {self.job()}", timeout, ASK_S)

    def wait_requeued(self, restarts: int = 1, timeout: float = WAIT_S) -> None:
        """Until the job waits for its next start, or has started already."""
        self.wait_state("PENDING", "RUNNING", restarts=restarts, timeout=timeout)

    # Disturbing

    def preempt(self) -> int:
        """A job of `high` asks for this job's nodes."""
        return self.lab.preempt(self.nodes or [self.node])

    def cancel(self, *options: str) -> None:
        """`scancel`."""
        self.lab.cancel(self.jobid, *options)

    # Looking back

    def requeue_calls(self) -> list[Any]:
        """The calls that reached slurmctld."""
        return self.lab.requeue_calls(self.jobid)

    def requeued_at(self) -> list[float]:
        """When slurmctld had the job PENDING again: its old run was entirely over."""
        return self._logged(rf"Requeuing JobId={re.escape(str(self.jobid))}\b")

    def requeued_by_slurm_at(self) -> list[float]:
        """When Slurm itself has requeued the job for a preemption: at once, or at some time after the end of its grace."""
        return self._logged(rf"preempted JobId={re.escape(str(self.jobid))} has been requeued\b")

    def requeued_at_its_end(self) -> list[float]:
        """When Slurm 24.11 has requeued the job since it ended, by itself, in a start after a preemption (docs/slurm.md)."""
        return self._logged(rf"_job_complete: requeue JobId={re.escape(str(self.jobid))} per user/system request")

    def _logged(self, what: str) -> list[float]:
        pattern = re.compile(rf"^\[([^\]]*)\] {what}")
        found = (pattern.match(line) for line in self.lab.log.read_text(errors="replace").splitlines())
        return [instant(match[1]) for match in found if match]

    def verify(self) -> None:
        """Every committed checkpoint is intact; there may be none."""
        if not list(self.dir.glob("step-*")):
            return
        done = subprocess.run(
            [CTL, "verify", "--all", "--dir", self.dir], capture_output=True, text=True, timeout=SHOW_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"

    def newest(self) -> int:
        """Step of the newest intact checkpoint; -1 for none."""
        words = [CTL, "latest", "--json", "--dir", str(self.dir)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SHOW_S, check=False)
        return int(json.loads(done.stdout)["step"]) if done.returncode == 0 else -1

    def explain(self) -> str:
        """Everything there is to know about it."""
        parts = [f"node {self.node}, checkpoints {self.dir}"]
        for title, words in (
            ("scontrol show job", self.lab.argv("scontrol", "show", "job", str(self.jobid))),
            ("ckptctl log", [CTL, "log", "--level", "debug", "--dir", str(self.dir)]),
            ("ckptctl ls", [CTL, "ls", "--dir", str(self.dir)]),
        ):
            done = subprocess.run(words, env=self.lab.env(), capture_output=True, text=True, timeout=SHOW_S, check=False)
            parts.append(f"--- {title}: {done.returncode}\n{done.stdout}{done.stderr}")
        parts.append("--- toy\n" + "\n".join(self._toy_in_short()))
        parts.append(f"--- requeue calls\n{self.requeue_calls()}\n--- output\n{self.output()}")
        return "\n".join(parts)

    def _toy_in_short(self) -> list[str]:
        """The toy's log, with steps in a row on one line."""
        short: list[str] = []
        for words in self.words():
            if words[0] == "step" and short and short[-1].startswith("step "):
                short[-1] = f"{short[-1].split(' ..')[0]} .. {' '.join(words)}"
            else:
                short.append(" ".join(words))
        return short[-TAIL_LINES:]


class Stage:
    """One test's lab with its jobs, each on a node of its own."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.runs: list[Run] = []
        watch()

    def submit(
        self,
        *options: str,
        toy: str = "",
        supervise: str = "",
        srun: str = "srun",
        script: str = PLAIN,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        anywhere: bool = False,
        nodes: int = 1,
        beside: Run | None = None,
    ) -> Run:
        """Submit a supervised toy with these knobs, or another command, in a script that has it in place of {run}.

        The nodes are the next ones, or those of the job that it is `beside`, unless `anywhere` leaves that to Slurm. The
        directory is one of its own; `{log}` in a command is the toy's log.
        """
        taken = len({node for run in self.runs for node in run.nodes})
        mine = self.lab.nodes[taken : taken + nodes] if beside is None else beside.nodes
        nodes = len(mine)
        where = [f"-N{nodes}"] if anywhere else [f"-N{nodes}", "-w", ",".join(mine)]
        name = f"r{len(self.runs) + 1}"
        root = self.lab.root
        run = Run(self.lab, 0, mine[0], root / f"{name}.out", root / name, root / f"{name}.log", mine)
        # Long enough that no test sees the end of it unless it asks to.
        words = list(command) if command is not None else toy_words("--steps 100000 --step-ms 20 --log", str(run.log), toy)
        words = [word.replace("{log}", str(run.log)) for word in words]  # also inside of a shell's words
        line = f"{srun} {SUPERVISE} --dir {run.dir} {supervise} -- {shlex.join(words)}".strip()
        text = script.replace("{run}", line)
        more = {"CKPT_SUPERVISE_STATE": str(root / "states"), **(env or {})}
        run.jobid = self.lab.sbatch(text, *where, "-J", name, *options, output=run.out, env=self.lab.env(**more))
        self.runs.append(run)
        return run

    def prepare(self, name: str, supervise: str, toy: str) -> int:
        """A run outside of Slurm that leaves a checkpoint where the job of this name will look; its step."""
        place = self.lab.root / name
        words = [SUPERVISE, "--dir", str(place), *shlex.split(supervise), "--", *toy_words(toy)]
        env = {key: value for key, value in self.lab.env().items() if key != "SLURM_CONF"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return max(int(path.name.removeprefix("step-")) for path in place.glob("step-*"))

    def started(self, runs: Collection[Run] | None = None, least: int = 3, ranks: int = 1) -> None:
        """Until all of them are training, with so many ranks each."""
        for run in self.runs if runs is None else runs:
            for rank in range(ranks):
                run.wait_steps(least, rank)

    def explain(self) -> str:
        """All jobs, and the end of slurmctld's log."""
        tail = self.lab.log.read_text(errors="replace").splitlines()
        calm = [line for line in tail if not NOISE.search(line)]
        jobs = [f"===== job {run.jobid}\n{run.explain()}" for run in self.runs]
        return "\n".join([*jobs, "===== slurmctld", *calm[-TAIL_LINES:]])
