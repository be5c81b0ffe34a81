"""What the supervisor was told to do, and what a look at the job means.

Owns the options that decide, the causes, and the exit statuses. Pure: a cause is a function of what was seen, never of the
signal's number, which tells nothing (docs/slurm.md, section 1).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from ckpt_supervisor.core.views import JobView

EXIT_CANCELLED = 143
EXIT_INTERRUPTED = 75
"""EX_TEMPFAIL of sysexits.h. Never 0: `srun ... && stage2` would run stage2 (docs/slurm.md, section 2)."""
EXIT_STALE = 76

NOT_LOOKED = -2
"""As `resume_step`: there are checkpoints, and none has been chosen yet."""

ENDED_STATES = frozenset(
    {"COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
    | {"BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)
"""A job on its way out. Slurm shows flags such as SIGNALING or RESIZING for RUNNING: a word that is not in here runs."""

WAITING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
"""A job that waits for its next start, while this one is still here: it was requeued."""


class Cause(enum.Enum):
    """Why the supervisor was interrupted."""

    UNKNOWN = "not known"
    LOCAL = "signal"
    PREEMPTED = "preempted"
    LIMIT_AHEAD = "end of the time limit ahead"
    TIME_LIMIT = "time limit reached"
    NODE_FAILURE = "node failure"
    CANCELLED = "cancelled"
    REQUEUED = "requeued already"
    NO_END = "no end in sight"
    CRASHED = "training failed"
    HUNG = "training hung"
    ASKED = "asked to leave"


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Options that the machine decides on. Times in ms; `None` for off."""

    directory: str
    epoch: int = 1
    slurm: bool = False
    can_look: bool = False
    """There is a job and a scontrol to ask about it."""
    requeue: Literal["auto", "never", "exit"] = "auto"
    requeue_exit: int = EXIT_INTERRUPTED
    start_restarts: int = 0
    kill_wait_ms: int = 30_000
    grace_ms: int = 30_000
    """Local mode: time from the signal to the kill."""
    every_steps: int = 0
    every_ms: int | None = None
    every_auto: bool = False
    """The interval is chosen by what a save costs and how often the run is interrupted (interval.py)."""
    mtbi_ms: int = 21_600_000
    """What that begins with: the mean time between interruptions, before any was seen."""
    save_timeout_ms: int = 900_000
    leave_timeout_ms: int | None = None
    lead_ms: int | None = 30_000
    """Time before the job's end at which the watch starts the last save; None: no watch."""
    lead_auto: bool = True
    notice_horizon_ms: int = 600_000
    lingers: bool = False
    """An early notice of the time limit saves, and training goes on until the watch begins the last save."""
    max_timeouts: int | None = None
    max_crashes: int = 0
    max_stalled: int | None = 10
    """How many requeues there may be for each cause; None: any number."""
    resubmits: bool = False
    """There is a command that brings the job back where Slurm refuses to."""
    on_hang: Literal["warn", "restart", "requeue"] = "warn"
    verify_full: bool = True
    adopts: bool = False
    """The program saves where it always did; what it wrote is looked for (--adopt)."""
    passes: str = ""
    """Name of the signal that the program itself saves at (--pass-signal); "" for none."""
    restarts: int = 0
    """How often the command is started again in place."""
    tasks: int = 1
    """Supervisors of this step, one for each srun task; this one is task 0's, unless it is an heir."""
    turn_ms: int | None = None
    """How much later than the first one an heir asks Slurm: a second for each node before its own. None: for each task."""
    join_ms: int = 300_000
    """How long other tasks' supervisors are waited for before they count as not being there."""
    heir: int = 0
    """Number of the task whose supervisor has lost the coordinator and decides for itself: it saves nothing, leaves when it has
    to, and takes over the requeue in its turn (heir_waits_ms). 0: the coordinator."""
    resume_step: int = -1
    """Step resumed from; -1 for none."""
    resume_from: str = ""

    @property
    def heir_waits_ms(self) -> int:
        """How long an heir waits for its turn to ask Slurm; 0 for a coordinator."""
        if not self.heir:
            return 0
        return self.heir * 1_000 if self.turn_ms is None else self.turn_ms

    @property
    def leave_ms(self) -> int:
        """How long training may take to end after Leave: a quarter of KillWait, within 1.5 s and 10 s, unless told otherwise."""
        if self.leave_timeout_ms is not None:
            return self.leave_timeout_ms
        return max(1_500, min(10_000, self.kill_wait_ms // 4))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a look means: the cause, and the instant of the kill on the machine's clock (None: no end in sight)."""

    cause: Cause
    kill_at_ms: int | None
    explained: bool
    """False when the state does not explain a signal: the first look may be 60 ms too early (docs/slurm.md, section 3)."""


def runs(view: JobView) -> bool:
    """Whether the job is neither on its way out nor waiting for its next start."""
    return view.state not in ENDED_STATES and view.state not in WAITING_STATES


def read(view: JobView, policy: Policy, now_ms: int, earlier_preempt_ms: int | None, since_ms: int | None = None) -> Reading:
    """Cause and kill time, tested in the order of docs/slurm.md section 3: state, restarts, reason, and PreemptTime last.

    `earlier_preempt_ms` is the PreemptTime (wall clock) that an earlier look of this notice saw while the job still ran.
    `since_ms` is the latest instant at which the end of a job that is on its way out can have begun: KillWait runs from its
    SIGTERM, and a look can take seconds. None: now.
    """
    wait_ms = policy.kill_wait_ms
    ended_kill_ms = (now_ms if since_ms is None else since_ms) + wait_ms
    if view.restarts > policy.start_restarts or view.state in WAITING_STATES:
        return Reading(Cause.REQUEUED, ended_kill_ms, explained=True)
    if runs(view):
        if view.preempt_ms is not None:
            return Reading(Cause.PREEMPTED, _end_of_grace_ms(view, now_ms) + wait_ms, explained=True)
        if view.end_ms is None:
            return Reading(Cause.NO_END, None, explained=False)
        return Reading(Cause.LIMIT_AHEAD, now_ms + max(0, view.end_ms - view.looked_ms) + wait_ms, explained=False)
    return Reading(_ended_cause(view, earlier_preempt_ms), ended_kill_ms, explained=True)


def _ended_cause(view: JobView, earlier_preempt_ms: int | None) -> Cause:
    """Cause when the job is on its way out and nobody has requeued it. When in doubt it was cancelled: never revive."""
    if view.reason == "TimeLimit" or view.state == "TIMEOUT":
        return Cause.TIME_LIMIT
    if view.reason == "NodeDown" or view.state == "NODE_FAIL":
        return Cause.NODE_FAILURE
    if view.reason == "None" and view.preempt_ms is not None and view.preempt_ms == view.end_ms:
        # End of the grace with PreemptMode=CANCEL or --no-requeue; but a scancel in the very second of the notice looks the
        # same. A PreemptTime that has moved since the notice, or a job that cannot be revived anyway, settles it.
        if not view.requeue or (earlier_preempt_ms is not None and view.preempt_ms > earlier_preempt_ms):
            return Cause.PREEMPTED
    return Cause.CANCELLED


def _end_of_grace_ms(view: JobView, now_ms: int) -> int:
    """End of the grace on the machine's clock. EndTime is Unknown with TimeLimit=UNLIMITED: then PreemptTime + GraceTime."""
    if view.end_ms is not None:
        end_ms = view.end_ms
    elif view.preempt_ms is not None and view.grace_ms is not None:
        end_ms = view.preempt_ms + view.grace_ms
    else:
        end_ms = view.looked_ms
    return now_ms + max(0, end_ms - view.looked_ms)


def lead_ms(policy: Policy, longest_save_ms: int) -> int | None:
    """Time before the end at which the watch begins the last save: given, or 30 s and twice the longest save known."""
    if policy.lead_ms is None:
        return None
    return policy.lead_ms + 2 * longest_save_ms if policy.lead_auto else policy.lead_ms
