"""What a look at the job gave. Pure data; "could not look" is a type of its own, never an empty view."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class JobView:
    """What `scontrol show job` said at one moment. Instants are epoch milliseconds (wall clock); None for None or Unknown."""

    state: str
    reason: str
    restarts: int
    end_ms: int | None
    preempt_ms: int | None
    grace_ms: int | None
    """GraceTime of its partition, where it had to be asked: preempted, and EndTime Unknown."""
    requeue: bool
    batch: bool
    looked_ms: int
    time_limit_unlimited: bool

    @property
    def held(self) -> str:
        """Why the job will not start again before somebody releases it, "" where it may (docs/slurm.md, section 6)."""
        if "held" in self.reason.lower():
            return self.reason
        return self.state if self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") else ""


@dataclasses.dataclass(frozen=True, slots=True)
class NoView:
    """Could not look. `definite`: there is no such job or no Slurm client; otherwise it is worth trying again."""

    reason: str
    definite: bool
