"""The ground with Slurm: a short batch job of its own for each path, disturbed with what its owner may do.

Owns those jobs: it cancels them by their numbers, and no other one. Asks Slurm gently: one `show job` every few seconds for each
path that is at work; everything else is read from the journal, in the scratch directory that the nodes share. Must not need an
administrator: a preemption takes a job that preempts (--preempt-with), else SIGTERM stands in for it.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_supervisor.adapters.slurm import Scontrol
from ckpt_supervisor.config_text import signal_name
from ckpt_supervisor.core.policy import ENDED_STATES, WAITING_STATES
from ckpt_supervisor.core.views import JobView, NoView
from ckpt_supervisor.drill.facts import Line
from ckpt_supervisor.drill.local import OURS, supervisor, tail_of
from ckpt_supervisor.drill.plan import Plan
from ckpt_supervisor.drill.rehearse import NotStartedError

TOOLS = ("sbatch", "scancel", "scontrol", "srun", "squeue")
ASK_S = 2.0
CALL_S = 60.0
LOOK_S = 0.3
QUEUE_MS = 3_600_000
RELEASE_S = 4.0
"""A requeued job is let in again after this: within 2 s of the requeue it fails ("Job credential revoked", docs/slurm.md)."""

MORE_MIN = 10
"""What the time limit of a drill's job has beyond its starts."""

END_S = 90.0
SLACK_MS = 180_000
"""Slurm keeps whole minutes, looks at time limits every 30 s, and is up to a minute late; the epilog takes its time too."""


def missing(env: Mapping[str, str]) -> str:
    """What hinders a drill on the cluster; "" for nothing."""
    lacking = [name for name in TOOLS if shutil.which(name, path=env.get("PATH")) is None]
    return f"--cluster needs Slurm's commands, and {', '.join(lacking)} cannot be found on PATH" if lacking else ""


def script(plan: Plan, root: Path, directory: Path) -> str:
    """The job script, in the shape of deploy/templates."""
    own = ("--dir", str(directory), "--keep", "2")
    after = ("--resubmit", "") if plan.options.resubmit else ()
    (root / "own").mkdir(exist_ok=True)
    command = [word.replace("{scratch}", str(root / "own")) for word in plan.command]
    words = [*supervisor(), *own, *plan.words, *after, "--", *command]
    return f"#!/bin/bash\nexec srun {shlex.join(words)}\n"


def submit_words(plan: Plan, path: str, root: Path) -> list[str]:
    """Options of sbatch that a drill gives itself; the user's come after them and win."""
    minutes = math.ceil(4 * plan.start_ms / 60_000) + MORE_MIN
    return [
        "sbatch", "--parsable", f"--job-name=ckpt-drill-{path}", f"--output={root / 'output'}", "--open-mode=append", "--requeue",
        f"--time={minutes}",
    ]  # fmt: skip


class ClusterGround:
    """One job on the real Slurm."""

    look_s = LOOK_S
    queue_ms = QUEUE_MS
    slack_ms = SLACK_MS

    def __init__(self, root: Path, plan: Plan, env: Mapping[str, str], sbatch: Sequence[str], preempt: Sequence[str]) -> None:
        self.root = root
        self.directory = root / "checkpoints"
        self.notes: tuple[str, ...] = ()
        self._plan = plan
        self._env = {key: value for key, value in env.items() if _is_kept(key)}
        self._sbatch, self._preempt = tuple(sbatch), tuple(preempt)
        self._jobs: list[str] = []
        self._own_jobs: list[str] = []
        self._attempt = 0
        self._view: JobView | NoView | None = None
        self._seen_running = False
        self._asked_at = -math.inf
        self._release_at: float | None = None

    @property
    def job(self) -> str:
        """The job of the present attempt."""
        return self._jobs[-1]

    def start(self, limit_ms: int | None) -> None:
        """Submit, or let the requeued job in again."""
        view = self._look() if self._jobs else None
        comes_back = isinstance(view, JobView) and view.restarts > self._attempt
        if isinstance(view, JobView) and comes_back:
            self._attempt = view.restarts
            self._release_at = time.monotonic() + RELEASE_S
        else:
            self._submit()
        self._seen_running = False
        self._view = None
        if limit_ms is not None:
            self._call("scontrol", "update", f"JobId={self.job}", f"TimeLimit={math.ceil(limit_ms / 60_000)}")

    def tick(self) -> None:
        """Look at the job when it is time, and release it."""
        now = time.monotonic()
        if self._release_at is not None and now >= self._release_at:
            self._release_at = None
            self._call("scontrol", "update", f"JobId={self.job}", "StartTime=now")
        if now - self._asked_at >= ASK_S:
            self._look()

    def is_running(self) -> bool:
        """Whether Slurm has started this attempt."""
        return self._seen_running

    def is_over(self) -> bool:
        """Whether this attempt is entirely over: requeued and waiting, or ended."""
        view = self._view
        if isinstance(view, NoView):
            return view.definite
        if view is None or view.state == "COMPLETING":
            return False
        if view.restarts > self._attempt:
            return True
        return view.state in ENDED_STATES and view.state not in WAITING_STATES

    def ask_save(self) -> None:
        """`scancel --signal` of the signal that means: save and go on."""
        self._call("scancel", f"--signal={self._save_signal()}", self.job)

    def _save_signal(self) -> str:
        return signal_name(self._plan.options.save_signals[0]).removeprefix("SIG")

    def disturb(self, path: str) -> int | None:
        """What an owner may do to a job."""
        plan = self._plan
        if path == "warning":
            return self._warn()
        if path == "grace" and self._preempt:
            return self._preempted()
        if path == "grace":
            self.notes = (
                "rehearsed with SIGTERM only; a real preemption needs a job that preempts: --preempt-with '-p PARTITION'",
            )
            self._call("scancel", "--signal=TERM", self.job)
        elif path == "cancel":
            self._call("scancel", self.job)
        else:
            self._call("scontrol", "requeue", self.job)
        return plan.kill_wait_ms

    def _warn(self) -> int:
        """The limit is moved near, and the signal that sbatch --signal would have sent is sent."""
        plan = self._plan
        minutes = math.ceil((self._ran_s() + plan.warning_ms / 1000) / 60)
        self._call("scontrol", "update", f"JobId={self.job}", f"TimeLimit={minutes}")
        view = self._look()
        name = signal_name(plan.options.notice_signals[0]) if plan.options.notice_signals else "USR1"
        self._call("scancel", f"--signal={name.removeprefix('SIG')}", self.job)
        end_ms = view.end_ms if isinstance(view, JobView) else None
        left_ms = plan.warning_ms if end_ms is None else max(0, end_ms - time.time_ns() // 1_000_000)
        return left_ms + plan.kill_wait_ms

    def _preempted(self) -> int:
        nodes = self._call("squeue", "-h", "-j", self.job, "-o", "%N").strip()
        where = ["-w", nodes] if nodes else []
        name = ["-J", "ckpt-drill-preemptor", "--exclusive", "--time=1", "-o", "/dev/null", "--wrap", "sleep 1"]
        said = self._call("sbatch", "--parsable", *name, *where, *self._preempt)
        self._own_jobs.append(said.strip().split(";")[0])
        return self._plan.grace_ms + self._plan.kill_wait_ms

    def strike(self, line: Line, number: int) -> None:
        """A signal to one rank, from a step of its own beside it."""
        nodes = self._call("squeue", "-h", "-j", self.job, "-o", "%D").strip()
        where = ["-w", str(line["host"])] if nodes not in ("", "1") else []
        words = ["--overlap", "--immediate=60", f"--jobid={self.job}", "-N1", "-n1", *where]
        self._call("srun", *words, "kill", f"-{int(number)}", str(line["rank_pid"]))

    def lose(self) -> None:
        """SIGKILL of the step: nobody hears of it before."""
        if self.root.name == "nodeloss":
            self.notes = ("rehearsed by SIGKILL of the step; after a real loss Slurm requeues a job with --requeue by itself",)
        self._call("scancel", "--signal=KILL", f"{self.job}.0")

    def outcome(self) -> tuple[int | None, bool | None, bool]:
        """See Ground; the journal has the exit status."""
        view = self._look()
        return None, None, isinstance(view, JobView) and view.restarts > self._attempt

    def tail(self) -> str:
        """The last lines of the job's output."""
        return tail_of(self.root / "output")

    def end(self) -> None:
        """Cancel every job of this path, and wait until they are gone from their nodes."""
        for number in (*self._own_jobs, *self._jobs):
            self._call("scancel", number)
        pause, end = threading.Event(), time.monotonic() + END_S
        while self._jobs and time.monotonic() < end:
            view = self._look()
            if isinstance(view, NoView) or (view.state in ENDED_STATES and view.state != "COMPLETING"):
                return
            pause.wait(ASK_S)

    def _submit(self) -> None:
        file = self.root / "job.sbatch"
        file.write_text(script(self._plan, self.root, self.directory))
        words = submit_words(self._plan, self.root.name, self.root)
        said = self._call(*words, *self._sbatch, str(file)).strip().split(";")[0]
        if not said.isdecimal():
            raise NotStartedError(f"sbatch: {said or tail_of(self.root / 'errors')}")
        self._jobs.append(said)
        self._attempt = 0

    def _ran_s(self) -> float:
        said = self._call("squeue", "-h", "-j", self.job, "-o", "%S", more={"SLURM_TIME_FORMAT": "%s"}).strip()
        return time.time() - int(said) if said.isdecimal() else 0.0

    def _look(self) -> JobView | NoView:
        self._asked_at = time.monotonic()
        path = shutil.which("scontrol", path=self._env.get("PATH"))
        assert path is not None
        view = Scontrol(path, self.job, self._env).show_job(CALL_S)
        if isinstance(view, JobView) or view.definite:
            self._view = view
        if isinstance(view, JobView) and view.restarts == self._attempt and view.state not in WAITING_STATES:
            self._seen_running = True
        return view

    def _call(self, *words: str, more: Mapping[str, str] | None = None) -> str:
        """One command of Slurm's; what it printed. What it complained of is kept in a file."""
        try:
            done = subprocess.run(
                words,
                env=self._env | dict(more or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            done = subprocess.CompletedProcess(words, 1, "", str(error))
        if done.stderr or done.returncode:
            with (self.root / "errors").open("a") as file:
                file.write(f"{shlex.join(words)}: {done.returncode}: {done.stderr.strip()}\n")
        return done.stdout


def _is_kept(key: str) -> bool:
    """The drill may run inside of a job; the jobs that it submits are none of that one's."""
    if key in ("SLURM_CONF", "CKPT_SUPERVISE_STATE"):
        return True
    return key not in OURS and not key.startswith(("SLURM_", "SLURMD_", "SBATCH_", "PMI_", "PMIX_"))
