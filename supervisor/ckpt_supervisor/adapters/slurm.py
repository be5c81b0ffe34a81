"""Asks Slurm about our job, and asks it to requeue the job. The only place that starts `scontrol`.

Owns the identity that Slurm gave us (`SlurmEnv`) and the bounded, shielded call. Must not decide anything: what an
answer means for the run is the core's. Every call may be made from a worker thread, returns plain data, and never
raises because of its surroundings: a hanging, killed or confused scontrol is an answer too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ckpt_supervisor.adapters.slurm_text import (
    RequeueAnswer,
    SlurmConfig,
    classify_requeue,
    find_record,
    first_words,
    no_such_job,
    no_such_step,
    parse_config,
    parse_job,
    parse_partition_grace,
    parse_step_state,
)
from ckpt_supervisor.core.views import JobView, NoView

OUTPUT_BYTES_MAX = 1 << 20
"""Most bytes kept of what scontrol prints; the rest is read and dropped, so that it never blocks on a full pipe."""

REAP_S = 1.0
"""A killed scontrol may take this long to end; one that hangs on a dead file system is then left to whoever reaps orphans."""

REAP_POLL_S = 0.002
"""Between end of output and exit lie microseconds, so this is slept once or twice."""

SPECIAL_STEPS_FROM = 0xFFFFFFF0
"""Step ids from here on are not srun's tasks: batch script 0xfffffffb, extern 0xfffffffc, interactive 0xfffffffa (slurm.h)."""

NO_STEP = "batch"

SHIELDED = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP})
"""Blocked in scontrol: with proctrack/linuxproc it is a process of the step, and the notice's own broadcast killed 43 of 540
calls (docs/slurm.md, section 2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmEnv:
    """Who we are in Slurm's eyes, from the environment that it gave us."""

    job_id: int
    array_job_id: int | None
    array_task_id: int | None
    het_leader: int | None
    step_id: str
    """A number, or "batch" when srun did not start us: in a batch script SLURM_STEP_ID is unset."""
    procid: int
    ntasks: int
    restarts: int
    """0 on the first run; not consecutive: one interruption can count 2 (docs/slurm.md, section 2)."""
    nodeid: int
    nodename: str
    cluster: str
    localid: int = 0
    """Which of its node's tasks this one is."""
    srun: str = ""
    """Where this step's srun listens: the same for all of its tasks, and another one for each srun (docs/slurm.md, section 6)."""

    @property
    def under_srun(self) -> bool:
        """Whether srun started us. If not, no notice reaches us in the grace (docs/slurm.md, section 4)."""
        return self.step_id != NO_STEP

    @property
    def requeue_id(self) -> str:
        """The id for `requeue` and `show job`.

        The last element of an array has the array's own id as SLURM_JOB_ID: requeue of that bare number requeues every element.
        A hetjob goes by its leader (docs/slurm.md, section 2).
        """
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return str(self.het_leader or self.job_id)

    @classmethod
    def from_environ(cls, env: Mapping[str, str]) -> SlurmEnv | None:
        """Our identity, or None outside of a Slurm job. Anything that is not a plain number counts as absent."""
        job_id = _number(env.get("SLURM_JOB_ID"))
        if not job_id:
            return None
        step_id = _number(env.get("SLURM_STEP_ID"))
        under_srun = step_id is not None and step_id < SPECIAL_STEPS_FROM
        # SLURM_STEP_NUM_TASKS first: 24.11 leaves SLURM_NTASKS out of `srun --het-group=1`. In a batch script both speak of the
        # job, while we are alone.
        ntasks = _number(env.get("SLURM_STEP_NUM_TASKS")) or _number(env.get("SLURM_NTASKS"))
        return cls(
            job_id=job_id,
            array_job_id=_number(env.get("SLURM_ARRAY_JOB_ID")),
            array_task_id=_number(env.get("SLURM_ARRAY_TASK_ID")),
            het_leader=_number(env.get("SLURM_JOB_ID_HET_GROUP_0")) if _number(env.get("SLURM_HET_SIZE")) else None,
            step_id=str(step_id) if under_srun else NO_STEP,
            procid=(_number(env.get("SLURM_PROCID")) or 0) if under_srun else 0,
            ntasks=(ntasks or 1) if under_srun else 1,
            # Unset on the first run; whatever is no number means 0 (field case 54).
            restarts=_number(env.get("SLURM_RESTART_COUNT")) or 0,
            nodeid=_number(env.get("SLURM_NODEID")) or 0,
            nodename=env.get("SLURMD_NODENAME", ""),
            cluster=env.get("SLURM_CLUSTER_NAME", ""),
            localid=_number(env.get("SLURM_LOCALID")) or 0,
            srun=":".join((env.get("SLURM_SRUN_COMM_HOST", ""), port)) if (port := env.get("SLURM_SRUN_COMM_PORT", "")) else "",
        )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,10}", text, re.ASCII) else None


def locate(path_env: str | None) -> str | None:
    """Absolute path of scontrol on this PATH, or None. Asked once, at the start: not found out at the end (field case 43)."""
    found = shutil.which("scontrol", path=path_env or os.defpath)
    return os.path.abspath(found) if found else None  # noqa: PTH100 - Path.resolve would follow links that sites switch over.


class Claims(Protocol):
    """Where a child is made known that we wait for ourselves, so that nobody else reaps it."""

    def forking(self) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Held from before the fork until the pid was given to what it yields."""

    def release(self, pid: int) -> None:
        """The child was waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One call is over. `rc` is negative for a death by signal."""

    rc: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True, slots=True)
class NotRun:
    """The call did not come to an end of its own."""

    reason: str


class Scontrol:
    """`scontrol` for one job. Keeps no open thing; every method blocks for `timeout_s` at most and may run in any thread."""

    def __init__(self, path: str, our_id: str, env: Mapping[str, str], claims: Claims | None = None) -> None:
        self.path = path
        self.our_id = our_id
        # Epoch seconds, whatever the user has set (docs/slurm.md, section 3).
        self._env = {**env, "SLURM_TIME_FORMAT": "%s"}
        self._claims = claims
        self._config: SlurmConfig | None = None

    @classmethod
    def locate(cls, slurm: SlurmEnv, env: Mapping[str, str], claims: Claims | None = None) -> Scontrol | None:
        """The scontrol on PATH, for our job; None when there is none."""
        path = locate(env.get("PATH"))
        return cls(path, slurm.requeue_id, env, claims) if path else None

    def show_job(self, timeout_s: float) -> JobView | NoView:
        """Look at our job. If it is preempted and its EndTime is Unknown, the partition's GraceTime is asked for as well."""
        give_up = time.monotonic() + timeout_s
        ran = self._run(("show", "job", self.our_id), timeout_s)
        looked_ms = time.time_ns() // 1_000_000
        if isinstance(ran, NotRun):
            return NoView(ran.reason, definite=False)
        if ran.rc != 0:
            return NoView(_complaint(ran), definite=no_such_job(ran.rc, ran.stderr))
        view = parse_job(ran.stdout, self.our_id, looked_ms)
        if isinstance(view, JobView) and view.preempt_ms is not None and view.end_ms is None:
            partition = (find_record(ran.stdout, self.our_id) or {}).get("Partition", "")
            grace_ms = self.partition_grace(partition, give_up - time.monotonic())
            view = dataclasses.replace(view, grace_ms=grace_ms)
        return view

    def show_step(self, step_id: str, timeout_s: float) -> str | NoView:
        """The state of one of our job's steps. It is forgotten as soon as it is over: `definite`."""
        ran = self._run(("show", "step", f"{self.our_id}.{step_id}"), timeout_s)
        if isinstance(ran, NotRun):
            return NoView(ran.reason, definite=False)
        if ran.rc != 0:
            return NoView(_complaint(ran), definite=no_such_job(ran.rc, ran.stderr) or no_such_step(ran.rc, ran.stdout))
        return parse_step_state(ran.stdout) or NoView(f"scontrol printed no state of step {step_id}", definite=False)

    def config(self, timeout_s: float) -> SlurmConfig | None:
        """What the site has set, or None: could not look. It is asked once; sites rarely change it while a job runs."""
        if self._config is None:
            ran = self._run(("show", "config"), timeout_s)
            self._config = parse_config(ran.stdout) if isinstance(ran, Ran) and ran.rc == 0 else None
        return self._config

    def ask(self, arguments: Sequence[str], timeout_s: float) -> str | NoView:
        """What any other question that changes nothing is answered with."""
        ran = self._run(arguments, timeout_s)
        if isinstance(ran, NotRun):
            return NoView(ran.reason, definite=False)
        return NoView(_complaint(ran), definite=no_such_job(ran.rc, ran.stderr)) if ran.rc != 0 else ran.stdout

    def kill_wait(self, timeout_s: float) -> int | None:
        """KillWait in ms, or None: could not look."""
        config = self.config(timeout_s)
        return config.kill_wait_ms if config else None

    def partition_grace(self, partition: str, timeout_s: float) -> int | None:
        """GraceTime of a partition in ms, or None: could not look."""
        if not partition or partition.startswith("-"):
            return None
        ran = self._run(("show", "partition", "-o", partition), timeout_s)
        return parse_partition_grace(ran.stdout) if isinstance(ran, Ran) and ran.rc == 0 else None

    def requeue(self, timeout_s: float) -> RequeueAnswer:
        """Ask for the requeue. Once accepted, SIGTERM to our own step follows within 40 ms or so, SIGKILL after KillWait."""
        ran = self._run(("requeue", self.our_id), timeout_s)
        if isinstance(ran, NotRun):
            return RequeueAnswer("unknown", ran.reason)
        return classify_requeue(ran.rc, ran.stdout, ran.stderr)

    def _run(self, arguments: Sequence[str], timeout_s: float) -> Ran | NotRun:
        """One call: bounded in time and in output, never a zombie left, its end never mistaken."""
        what = f"scontrol {' '.join(arguments)}"
        if timeout_s <= 0:
            return NotRun(f"no time left for {what}")
        give_up = time.monotonic() + timeout_s
        try:
            child = self._start((self.path, *arguments))
        except OSError as error:
            return NotRun(f"{what} cannot be started: {error.strerror}")
        try:
            outputs = _read_all(child, give_up)
        finally:
            rc, killed = self._reap(child, give_up)
        if rc is None and not killed:
            return NotRun(f"{what}: its exit status was lost")
        if rc is None or (rc < 0 and killed):
            return NotRun(f"{what} did not answer within {timeout_s:.1f} s")
        return Ran(rc, *outputs)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with _shielded(), self._claims.forking() if self._claims else contextlib.nullcontext(_claim_nothing) as claim:
            child = subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            claim(child.pid)
        return child

    def _reap(self, child: subprocess.Popen[bytes], give_up: float) -> tuple[int | None, bool]:
        """Exit status, and whether we killed it for being late; None when it was lost, or it did not even die within REAP_S.

        Not Popen.wait: that takes a status lost to another waiter for 0, and a lost requeue would pass for an accepted one.
        """
        gone, rc, killed = False, None, False
        while not gone and time.monotonic() < give_up + REAP_S:
            gone, rc = _wait_once(child.pid)
            if not gone and not killed and time.monotonic() >= give_up:
                os.kill(child.pid, signal.SIGKILL)
                killed = True
            elif not gone:
                time.sleep(REAP_POLL_S)
        child.returncode = rc if rc is not None else -signal.SIGKILL  # Keeps Popen from waiting for it once more.
        if self._claims:
            self._claims.release(child.pid)
        return rc, killed


def _claim_nothing(_pid: int) -> None:
    return


def _wait_once(pid: int) -> tuple[bool, int | None]:
    """Whether the child is gone, and its exit status unless somebody else took it."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True, None
    return (True, os.waitstatus_to_exitcode(status)) if ended else (False, None)


def _complaint(ran: Ran) -> str:
    return first_words(ran.stderr or ran.stdout) or f"scontrol ended with {ran.rc} and no word"


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """SHIELDED is blocked in this thread while a child is made, besides what is already; the child inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_all(child: subprocess.Popen[bytes], give_up: float) -> tuple[str, str]:
    """What it prints until both pipes are closed or time is up."""
    assert child.stdout is not None
    assert child.stderr is not None
    kept = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    poll = select.poll()
    for fd in kept:
        poll.register(fd, select.POLLIN)
    open_fds = set(kept)
    while open_fds and (left_s := give_up - time.monotonic()) > 0:
        for fd, _ in poll.poll(max(1, int(left_s * 1000))):
            chunk = os.read(fd, 65_536)
            if not chunk:
                poll.unregister(fd)
                open_fds.remove(fd)
            elif len(kept[fd]) < OUTPUT_BYTES_MAX:
                kept[fd] += chunk
    texts = [bytes(data[:OUTPUT_BYTES_MAX]).decode("utf-8", "replace") for data in kept.values()]
    child.stdout.close()
    child.stderr.close()
    return texts[0], texts[1]
