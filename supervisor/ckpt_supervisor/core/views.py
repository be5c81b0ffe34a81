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


@dataclasses.dataclass(frozen=True, slots=True)
class NoView:
    """Could not look. `definite`: there is no such job or no Slurm client; otherwise it is worth trying again."""

    reason: str
    definite: bool
