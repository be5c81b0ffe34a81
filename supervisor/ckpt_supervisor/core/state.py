"""What the machine knows, as frozen data. No behaviour but look-ups; no clock, no I/O."""

from __future__ import annotations

import dataclasses
import enum

from ckpt_client import wire
from ckpt_client.wire import Position, Who

from ckpt_supervisor.core.budget import Budget
from ckpt_supervisor.core.events import Meaning
from ckpt_supervisor.core.policy import Cause


class Phase(enum.Enum):
    """Where the supervisor stands. Within a round phases go forward only, in this order."""

    RUNNING = 0
    AGREEING = 1
    SAVING = 2
    VERIFYING = 3
    COMMITTING = 4
    LEAVING = 5
    REQUEUEING = 6
    DONE = 7


class Stage(enum.Enum):
    """The chain of words of one rank in one round; each is in the journal."""

    REQUESTED = "requested"
    AGREED = "agreed"
    ARRIVED = "arrived"
    SAVING = "saving"
    WRITTEN = "written"
    VERIFIED = "verified"
    COMMITTED = "committed"
    FAILED = "failed"
    LATE = "late"
    GONE = "gone"
    FINISHED = "finished"


class Kind(enum.Enum):
    """What a round is for."""

    PERIODIC = "periodic"
    SAVE = "save and go on"
    LEAVE = "save and leave"


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """A training process that said Hello."""

    who: Who
    world_size: int
    sharded: bool
    heard_ms: int
    gone: bool = False
    finished: bool = False
    left: bool = False
    stopped_at: Position | None = None
    """Where it stopped by itself at a multiple of every_steps and waits."""
    stopped_ms: int = 0

    @property
    def live(self) -> bool:
        """It can still take part in a round."""
        return not (self.gone or self.finished or self.left)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A rank's part in one round."""

    who: Who
    stage: Stage = Stage.REQUESTED
    entered: Position | None = None
    passed_ms: int | None = None
    """Since when its `entered` is beyond T."""
    saved: wire.Saved | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One save over all ranks."""

    number: int
    kind: Kind
    began_ms: int
    members: tuple[Member, ...]
    save_by_ms: int
    said_ms: int
    """When the last word was (re)sent to those who have not answered."""
    missing_by_ms: int | None = None
    """Until then ranks that have not attached are waited for; None once all are here or the wait is over."""
    at: Position | None = None
    world_size: int = 0
    """As it was when T was fixed: workers that are started again during the commit may be of another number."""
    go: bool = False
    go_ms: int = 0
    tries: int = 1
    verify_by_ms: int = 0
    verified: str = ""
    committed: bool = False

    def member(self, who: Who) -> Member | None:
        """The part of this rank, if it has one."""
        for member in self.members:
            if member.who == who:
                return member
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class GivenUp:
    """A round as it stood when it was given up, for the journal; nothing is decided on it."""

    round: Round
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """A notice in force: the supervisor means to leave."""

    name: str
    meaning: Meaning
    first_ms: int
    kill_at_ms: int
    budget: Budget
    cause: Cause = Cause.UNKNOWN
    signals: int = 1
    interrupts: int = 0
    term_ms: int | None = None
    """The first SIGTERM of this notice."""
    end_term_ms: int | None = None
    """The first SIGTERM since the job was last seen to run: KillWait may run from there."""
    looked: bool = False
    deadline_known: bool = False
    """A look has explained the signal: the kill is no guess any more."""
    preempt_ms: int | None = None
    relook_ms: int | None = None
    relooks: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Leaving:
    """On the way out."""

    fresh: bool
    reason: str
    began_ms: int
    said_ms: int
    end_command_at_ms: int
    own_end: bool = False
    """Training is over or nearly so: it is given its time to end by itself, and no Leave is sent."""
    told: bool = False
    """Leave was sent to at least one rank, or the command was ended by us."""
    killed_ms: int | None = None


class Asking(enum.Enum):
    """Where the requeue stands."""

    MEETING = "meeting the other steps of the job"
    LOOKING = "looking at the job again"
    CALLING = "calling scontrol requeue"
    PAUSED = "trying again soon"
    ACCEPTED = "accepted"
    OVER = "not to be called any more"
    """Refused, impossible, or the job was cancelled meanwhile. Training still gets its time to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Requeue:
    """The requeue's own state."""

    asking: Asking
    began_ms: int
    asked_ms: int = 0
    """When the other steps of the job were last asked."""
    again_ms: int | None = None
    calls: int = 0
    failures: int = 0
    accepted_ms: int | None = None
    term_seen: bool = False
    reason: str = ""
    cause: Cause = Cause.UNKNOWN
    """As it was seen right before the call: once that is accepted, the job's state tells of the requeue only."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything the machine knows."""

    began_ms: int
    phase: Phase = Phase.RUNNING
    ranks: tuple[Rank, ...] = ()
    """Ranks of the newest generation, by rank."""
    seen: tuple[int, ...] = ()
    """Every rank that attached in this generation."""
    generation: int = 0
    alone: bool = False
    """Rank 0 was waited for alone once (rule 10); not again until another rank attaches."""
    resume_from: str = ""
    resume_step: int = -1
    round: Round | None = None
    given_up: GivenUp | None = None
    """The last round that ended without a checkpoint."""
    newest_round: int = 0
    last_n: int = -1
    """Step of the last T that was fixed: a rank's own stop at or before it is an echo."""
    committed_step: int = -1
    """Newest step that is known to be committed and intact; -1 for none."""
    committed_here: bool = False
    """This attempt has committed at least once."""
    notice: Notice | None = None
    leaving: Leaving | None = None
    requeue: Requeue | None = None
    code: int | None = None
    """Exit status of the command once it has ended."""
    restarts: int = 0
    start_restarts: int = 0
    """Restarts of the job when this attempt began."""
    looking: bool = False
    look_again: bool = False
    asked_ms: int | None = None
    """When the newest look was asked for, whatever came of it."""
    looked_ms: int | None = None
    ran_ms: int | None = None
    """When the newest look was asked for that saw the job run."""
    end_at_ms: int | None = None
    """End of the job's time on the machine's clock, as last seen."""
    end_seen_ms: int = 0
    next_look_ms: int | None = None
    next_save_ms: int | None = None
    longest_save_ms: int = 0
    exit_code: int | None = None

    def rank(self, who: Who) -> Rank | None:
        """The rank with exactly this identity."""
        for rank in self.ranks:
            if rank.who == who:
                return rank
        return None

    @property
    def live(self) -> tuple[Rank, ...]:
        """Ranks that can still take part in a round."""
        return tuple(rank for rank in self.ranks if rank.live)

    @property
    def world_size(self) -> int:
        """The largest world that any rank reported (rule 10)."""
        return max((rank.world_size for rank in self.ranks), default=0)
