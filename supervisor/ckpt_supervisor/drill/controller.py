"""What Slurm does to a job: which signals its step gets, when the kill comes, and what the job's record says meanwhile.

Pure. Owns the order of things of docs/slurm.md, sections 1 to 3, as Slurm 22.05 has it, which is the stricter version: who
leaves during the grace without a requeue has lost the job. Instants are wall clock in ms; Slurm keeps whole seconds.
"""

from __future__ import annotations

import signal

import msgspec
from msgspec.structs import replace

YEAR_MS = 365 * 86_400_000
"""EndTime of a job with a limit that no rehearsal reaches."""

TERM_AFTER_REQUEUE_MS = 40
TWICE = (signal.SIGTERM, signal.SIGCONT, signal.SIGTERM)
"""At the time limit and at the end of a grace SIGTERM comes twice (docs/slurm.md, section 1)."""


class Job(msgspec.Struct, frozen=True):
    """The record that the stand-in for scontrol prints."""

    number: int
    name: str
    user: str
    node: str
    partition: str
    grace_ms: int
    kill_wait_ms: int
    start_ms: int
    proctrack: str = "cgroup"
    requeue_exit: str = ""
    requeue: bool = True
    state: str = "RUNNING"
    reason: str = "None"
    limit_ms: int | None = None
    end_ms: int | None = None
    preempt_ms: int | None = None
    restarts: int = 0
    attempt: int = 0
    """What `restarts` was when this attempt began."""
    requeue_calls: int = 0

    @property
    def is_requeued(self) -> bool:
        """It comes back after this attempt."""
        return self.restarts > self.attempt


class Doing(msgspec.Struct, frozen=True):
    """What happens now: the new record, signals to the step, and how long after them comes SIGKILL (None: it is not set yet)."""

    job: Job
    signals: tuple[int, ...] = ()
    kill_in_ms: int | None = None


def started(job: Job, now_ms: int, limit_ms: int | None = None) -> Job:
    """The next attempt, with this time limit."""
    end_ms = now_ms + (YEAR_MS if limit_ms is None else limit_ms)
    return replace(
        job,
        state="RUNNING",
        reason="None",
        start_ms=now_ms,
        limit_ms=YEAR_MS if limit_ms is None else limit_ms,
        end_ms=_whole(end_ms),
        preempt_ms=None,
        attempt=job.restarts,
        requeue_calls=0,
    )


def warned(job: Job, now_ms: int, warning_ms: int) -> Doing:
    """`--signal=USR1@t`: the limit is that near."""
    return Doing(replace(job, end_ms=_whole(now_ms + warning_ms)), (signal.SIGUSR1, signal.SIGCONT))


def preempted(job: Job, now_ms: int) -> Doing:
    """The grace of a preemption begins. Its end is end_of_time's."""
    job = replace(job, preempt_ms=now_ms // 1000 * 1000, end_ms=_whole(now_ms + job.grace_ms))
    return Doing(job, (signal.SIGTERM, signal.SIGCONT))


def requeued(job: Job) -> Doing:
    """Preempted without a grace, or requeued by somebody: it is decided already."""
    job = replace(job, state="COMPLETING", restarts=job.restarts + 1, preempt_ms=None, end_ms=None)
    return Doing(job, (signal.SIGTERM, signal.SIGCONT), job.kill_wait_ms)


def cancelled(job: Job, now_ms: int) -> Doing:
    """`scancel`."""
    return Doing(replace(job, state="COMPLETING", end_ms=now_ms), (signal.SIGTERM, signal.SIGCONT), job.kill_wait_ms)


def lost(job: Job) -> Job:
    """The node is gone, and with `--requeue` the job comes back."""
    return replace(job, state="COMPLETING", reason="NodeDown", restarts=job.restarts + int(job.requeue), end_ms=None)


def end_of_time(job: Job, now_ms: int) -> Doing | None:
    """The grace or the time limit is over, or None: not yet. After a grace Slurm requeues, after the limit it does not."""
    if job.state != "RUNNING" or job.end_ms is None or now_ms < job.end_ms:
        return None
    if job.preempt_ms is not None:
        return Doing(requeued(job).job, TWICE, job.kill_wait_ms)
    return Doing(replace(job, state="COMPLETING", reason="TimeLimit", end_ms=now_ms // 1000 * 1000), TWICE, job.kill_wait_ms)


def over(job: Job, code: int, killed: bool) -> Job:
    """The step has ended with this code. A code that the site lists (RequeueExit) brings the job back."""
    if job.state == "RUNNING" and not killed and job.requeue_exit and str(code) == job.requeue_exit:
        return replace(job, state="PENDING", restarts=job.restarts + 1)
    if job.is_requeued:
        return replace(job, state="PENDING")
    if job.state == "COMPLETING":
        return replace(job, state="TIMEOUT" if job.reason == "TimeLimit" else "CANCELLED")
    return replace(job, state="COMPLETED" if code == 0 else "FAILED")


def _whole(ms: int) -> int:
    """The next whole second."""
    return -(-ms // 1000) * 1000
