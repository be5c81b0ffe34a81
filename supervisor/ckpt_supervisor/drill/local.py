"""The ground without Slurm: a real supervisor over the real command, and a Slurm that is played (controller.py, scontrol.py).

Owns the processes, their surroundings and the job's file. Everything lies in one directory that is removed afterwards; no
process of the command is alive when `end` returns: they are found by their parents and by a mark in their environment, as
slurmstepd finds those of a step by their cgroup.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ckpt_supervisor.config import INHERITED
from ckpt_supervisor.drill import controller, scontrol
from ckpt_supervisor.drill.controller import Doing, Job
from ckpt_supervisor.drill.facts import Line
from ckpt_supervisor.drill.plan import Plan
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.text import one_line

MARK = "CKPT_DRILL"
LOOK_S = 0.03
TAIL_BYTES = 4_000
TAIL_LINES = 3
ROUNDS_MAX = 50
"""Of killing what is left: each one finds what the one before had just started."""

FIRST_NUMBER = 60_000_000
NUMBERS = 6_000_000
"""Job numbers of drills: above those of most sites, and never two alike on one machine at a time, since a supervisor ends what an
earlier attempt of its own job has left running."""

_FOREIGN = re.compile(r"(SLURM|SLURMD|SBATCH|PMI|PMIX)_.*")
OURS = frozenset(f"CKPT_SUPERVISE_{name}" for name in (*INHERITED, "DIR", "CONTINUES", "RESUBMIT", "TRAIN_AGAIN"))
"""Of a supervisor around the drill, or about the user's own checkpoints and jobs."""


def number_for(place: int) -> int:
    """A job number of its own for the so manieth path of this drill."""
    return FIRST_NUMBER + (time.time_ns() // 1_000_000 * 16 + os.getpid() * 512) % NUMBERS // 16 * 16 + place % 16


class LocalGround:
    """One job of a Slurm that is played here, in `root`."""

    look_s = LOOK_S
    queue_ms = 0
    slack_ms = 20_000
    notes: tuple[str, ...] = ()

    def __init__(self, root: Path, place: int, plan: Plan, env: Mapping[str, str]) -> None:
        self.root = root
        self.directory = root / "checkpoints"
        self._plan = plan
        self._file = root / "job.json"
        self._mark = f"{root.name}-{place}-{os.getpid()}"
        wanted = plan.options.requeue
        self._job = Job(
            number=number_for(place),
            name="drill",
            user="drill",
            node="drill1",
            partition="drill",
            grace_ms=plan.grace_ms,
            kill_wait_ms=plan.kill_wait_ms,
            start_ms=_now_ms(),
            proctrack=plan.proctrack,
            requeue_exit=str(wanted.code) if wanted.how == "exit" else "",
        )
        self._env = self._environment(env)
        self._pause = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._killed = False
        self._lost = False
        self._code: int | None = None

    # --- what a rehearsal asks for --------------------------------------------------------------------------------------

    def start(self, limit_ms: int | None) -> None:
        """Run the supervisor as a step of the job's next attempt."""
        self._kill_all()
        if not self._file.exists():
            self._lay_out()
        job = self._load()
        with self._locked():
            self._store(controller.started(job, _now_ms(), limit_ms))
        self._term_at = self._kill_at = self._code = None
        self._killed = self._lost = False
        own = ("--dir", str(self.directory), "--keep", "2")
        after = ("--resubmit", "") if self._plan.options.resubmit else ()  # A real resubmission would start a real job.
        argv = [*supervisor(), *own, *self._plan.words, *after, "--", *self._command()]
        with (self.root / "output").open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env | self._slurm_env(),
                start_new_session=True,  # ctrl-C is the drill's.
            )

    def tick(self) -> None:
        """What slurmctld and slurmstepd do by themselves."""
        job = self._load()
        if self.is_over():
            return
        now = time.monotonic()
        doing = controller.end_of_time(job, _now_ms())
        if doing is not None:
            self._carry_out(doing)
        elif job.is_requeued and self._kill_at is None:
            # Its own requeue was accepted: SIGTERM 40 ms later, SIGKILL after KillWait.
            self._term_at = now + controller.TERM_AFTER_REQUEUE_MS / 1000
            self._kill_at = self._term_at + job.kill_wait_ms / 1000
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self._signal((signal.SIGTERM, signal.SIGCONT))
        if self._kill_at is not None and now >= self._kill_at:
            self._killed = True
            self._kill_all()

    def is_running(self) -> bool:
        """There is no queue here."""
        return True

    def is_over(self) -> bool:
        """Whether the supervisor has ended."""
        if self._process is None:
            return True
        code = self._process.poll()
        if code is not None and self._code is None:
            self._code = 128 - code if code < 0 else code
            with self._locked():
                job = self._load()
                self._store(controller.over(job, self._code, self._killed or self._lost))
        return code is not None

    def ask_save(self) -> None:
        """USR2, or what stands for it."""
        numbers = self._plan.options.save_signals
        self._signal(numbers[:1])

    def disturb(self, path: str) -> int | None:
        """Begin one of the interruptions that signals tell of."""
        plan, job, now_ms = self._plan, self._load(), _now_ms()
        if path == "warning":
            number = plan.options.notice_signals[0] if plan.options.notice_signals else signal.SIGUSR1
            doing = controller.warned(job, now_ms, plan.warning_ms)
            self._carry_out(replace(doing, signals=(number, signal.SIGCONT)))
            return plan.warning_ms + plan.kill_wait_ms
        if path == "grace":
            self._carry_out(controller.preempted(job, now_ms))
            return plan.grace_ms + plan.kill_wait_ms
        self._carry_out(controller.cancelled(job, now_ms) if path == "cancel" else controller.requeued(job))
        return plan.kill_wait_ms

    def strike(self, line: Line, number: int) -> None:
        """A signal to one rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line["rank_pid"]), number)

    def lose(self) -> None:
        """The node goes down."""
        with self._locked():
            self._store(controller.lost(self._load()))
        self._lost = True
        self._kill_all()

    def outcome(self) -> tuple[int | None, bool | None, bool]:
        """See Ground."""
        return self._code, self._killed, self._load().is_requeued

    def tail(self) -> str:
        """The last lines of the output of supervisor and command."""
        return tail_of(self.root / "output")

    def end(self) -> None:
        """Nothing of it runs on."""
        self._kill_all()
        if self._process is not None:
            self._process.wait()

    # --- the job's file ---------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        tool = self.root / "bin" / "scontrol"
        tool.parent.mkdir()
        words = (sys.executable, "-I", "-S", str(Path(scontrol.__file__).absolute()), str(self._file))
        tool.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        tool.chmod(0o755)
        self._store(self._job)

    def _load(self) -> Job:
        return msgspec.json.decode(self._file.read_bytes(), type=Job) if self._file.exists() else self._job

    def _store(self, job: Job) -> None:
        fresh = self._file.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(job))
        fresh.replace(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """As scontrol.main locks it."""
        with Path(f"{self._file}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --- the step -----------------------------------------------------------------------------------------------------------

    def _carry_out(self, doing: Doing) -> None:
        with self._locked():
            self._store(doing.job)
        if doing.kill_in_ms is not None:
            self._kill_at = time.monotonic() + doing.kill_in_ms / 1000
        self._signal(doing.signals)

    def _signal(self, numbers: Sequence[int]) -> None:
        """With proctrack/cgroup to the process that srun has started alone, with linuxproc to every process of the step."""
        if self._process is None or self._process.poll() is not None:
            return
        pids = [self._process.pid]
        if self._plan.proctrack == "linuxproc":
            pids += self._others()
        for number in numbers:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _kill_all(self) -> None:
        """As slurmstepd does at the end of a step: until nobody is left."""
        process = self._process
        is_there = process is not None and process.poll() is None
        below = {pid: procfs.stat(pid) for pid in (procfs.descendants(process.pid) if process is not None and is_there else ())}
        for _ in range(ROUNDS_MAX):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            others = {*self._others(), *(pid for pid, seen in below.items() if _is_there(pid, seen))}
            if not others:
                return
            for pid in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._pause.wait(LOOK_S)

    def _others(self) -> list[int]:
        """Processes of this step but the supervisor, by the mark in their environment."""
        known = {os.getpid(), None if self._process is None else self._process.pid}
        mine = (pid for pid in procfs.of_user(os.getuid()) if pid not in known)
        return [pid for pid in mine if procfs.environ(pid).get(MARK) == self._mark]

    def _command(self) -> list[str]:
        own = self.root / "own"
        own.mkdir(exist_ok=True)
        return [word.replace("{scratch}", str(own)) for word in self._plan.command]

    def _slurm_env(self) -> dict[str, str]:
        """What slurmstepd gives to the one task of a one-node step."""
        job = self._load()
        found = {
            "SLURM_JOB_ID": str(job.number), "SLURM_JOBID": str(job.number), "SLURM_JOB_NAME": job.name,
            "SLURM_JOB_PARTITION": job.partition, "SLURM_JOB_NODELIST": job.node, "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CLUSTER_NAME": "drill", "SLURMD_NODENAME": job.node, "SLURM_NNODES": "1", "SLURM_NTASKS": "1",
            "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        }  # fmt: skip
        return found | ({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {})

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The user's own, without what another job or supervisor has put there, and with the stand-in first on PATH."""
        kept = {key: value for key, value in env.items() if not _FOREIGN.fullmatch(key) and key not in OURS}
        path = os.pathsep.join((str(self.root / "bin"), env.get("PATH") or os.defpath))
        state = str(self.root / "state")
        return kept | {"PATH": path, MARK: self._mark, "CKPT_SUPERVISE_STATE": state}


def _is_there(pid: int, seen: procfs.Stat | None) -> bool:
    """Whether this process, as it was seen, still runs: one with an environment of its own (`env -i`) has no mark."""
    now = procfs.stat(pid)
    return seen is not None and now is not None and now.started == seen.started and now.state not in ("zombie", "gone")


def tail_of(path: Path) -> str:
    """The last lines of a file, on one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return one_line(" | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip()))


def supervisor() -> list[str]:
    """The command line that starts ckpt-supervise from this installation."""
    script = Path(sys.executable).with_name("ckpt-supervise")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", "ckpt_supervisor.cli"]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
