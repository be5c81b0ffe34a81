"""The paths of a rehearsal in words, and what the drill was told.

Pure data. Owns the names, their order, and what each one plays; must not know how (controller.py, cluster_text.py).
"""

from __future__ import annotations

import msgspec

from ckpt_supervisor.config import Options

LEAD_GUESS_MS = 30_000
"""`--lead auto` begins the last save this long before the end, and twice the longest save earlier (core/policy.py)."""

START_SLACK_MS = 5_000
"""A second start may take this much longer than the first, besides half of it again."""


class Way(msgspec.Struct, frozen=True):
    """One way in which a job is interrupted."""

    name: str
    plays: str


PATHS = (
    Way("warning", "USR1 before the time limit (sbatch --signal=USR1@120)"),
    Way("grace", "preemption by a partition with GraceTime: TERM, and TERM again at its end"),
    Way("nograce", "preemption without a grace, or scontrol requeue: TERM, and KillWait"),
    Way("limit", "the time limit comes, and no signal tells of it"),
    Way("cancel", "scancel: TERM, and KillWait"),
    Way("crash", "a rank is killed"),
    Way("hang", "a rank stands still (SIGSTOP), and then comes a preemption without a grace"),
    Way("nodeloss", "everything is killed at once, without a word"),
)
NAMES = tuple(path.name for path in PATHS)
NOTICES = frozenset({"warning", "grace", "nograce", "limit"})
"""Paths with a last save, after which the job has to come back from just that step."""


class Plan(msgspec.Struct, frozen=True):
    """What the drill was told. Times in ms."""

    options: Options
    """Of ckpt-supervise, as it would read them."""
    words: tuple[str, ...]
    """The same as they were written."""
    command: tuple[str, ...]
    grace_ms: int
    kill_wait_ms: int
    warning_ms: int
    limit_ms: int | None
    start_ms: int
    """Bound on everything that training needs in its own time: start, attach, the next step boundary."""
    proctrack: str = "cgroup"
    requeue_exit: tuple[int, ...] | None = None
    """RequeueExit of the site; None if there was none to ask."""

    @property
    def lead_ms(self) -> int | None:
        """When the watch begins the last save; None if there is no watch."""
        lead = self.options.lead
        return LEAD_GUESS_MS if lead.auto else lead.ms


def limit_for(plan: Plan, start_ms: int, save_ms: int) -> int:
    """A time limit that leaves room for the start and then some training, before the watch begins the last save."""
    if plan.limit_ms is not None:
        return plan.limit_ms
    lead_ms = plan.lead_ms or 0
    more_ms = 2 * save_ms if plan.options.lead.auto else 0
    return lead_ms + more_ms + start_ms * 3 // 2 + START_SLACK_MS


def named(text: str) -> tuple[str, ...] | str:
    """The paths in `warning,grace`, in the order of the table; a text says what is wrong."""
    asked = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in asked if word not in NAMES]
    if unknown or not asked:
        return f"--path {text!r}: choose from {', '.join(NAMES)}"
    return tuple(name for name in NAMES if name in asked)
