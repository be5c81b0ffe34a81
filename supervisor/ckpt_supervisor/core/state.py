"""What the machine knows, as frozen data. No behaviour but look-ups; no clock, no I/O.

What changes with every word of a rank (State, Round, Member, Rank) is made of msgspec's structs: their `replace` takes 0.2 us
where that of a dataclass with 35 fields takes 8, and a step may have 16,384 ranks (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
import enum

import msgspec
from ckpt_client import wire
from ckpt_client.wire import Position, Who

from ckpt_supervisor.core.between import Stand
from ckpt_supervisor.core.budget import Budget
from ckpt_supervisor.core.events import Asked, Meaning
from ckpt_supervisor.core.history import NONE, History
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.core.table import Table


class Task(msgspec.Struct, frozen=True):
    """The supervisor of another task of the step, as last heard."""

    number: int
    host: str
    pid: int
    heard_ms: int
    gone: bool = False
    signals: tuple[tuple[str, str, int], ...] = ()
    """What it has reported of signals: name, meaning, how often."""
    bye: bool = False
    cut_ms: int | None = None
    """Since when its connection is closed."""


class Burst(msgspec.Struct, frozen=True):
    """One signal that Slurm has sent to all tasks, once or a few times in a row: who has told how often of it so far."""

    name: str
    began_ms: int
    """When the newest of it was first told of."""
    times: int
    told: Table[int]
    """By task."""


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


class Rank(msgspec.Struct, frozen=True, gc=False):
    """A training process that said Hello."""

    who: Who
    world_size: int
    sharded: bool
    gone: bool = False
    cut: bool = False
    """Its task's supervisor is not heard from; the rank may live, and be heard again."""
    finished: bool = False
    left: bool = False
    died: str = ""
    """The exception that its process dies of, as it has said itself."""
    ended: str = ""
    """How its process was seen to end; "" while it was not, or where another start has made way for it."""
    stopped_at: Position | None = None
    """Where it stopped by itself at a multiple of every_steps and waits."""
    stopped_ms: int = 0

    @property
    def live(self) -> bool:
        """It can still take part in a round."""
        return not (self.gone or self.cut or self.finished or self.left)


class Member(msgspec.Struct, frozen=True, gc=False):
    """A rank's part in one round."""

    who: Who
    stage: Stage = Stage.REQUESTED
    heard_ms: int = 0
    entered: Position | None = None
    passed_ms: int | None = None
    """Since when its `entered` is beyond T."""
    saved: wire.Saved | None = None
    reason: str = ""


class Round(msgspec.Struct, frozen=True):
    """One save over all ranks."""

    number: int
    kind: Kind
    began_ms: int
    save_by_ms: int
    said_ms: int
    """When the last word was (re)sent to those who have not answered."""
    members: Table[Member] = msgspec.field(default_factory=Table)
    """By rank."""
    requested: int = 0
    """Members that have not answered yet; kept with `members`, as are the next ones, for they are asked for at every word."""
    arrived: int = 0
    written: int = 0
    missing_by_ms: int | None = None
    """Until then ranks that have not attached are waited for; None once all are here or the wait is over."""
    top: Position | None = None
    """The largest `entered` so far."""
    at: Position | None = None
    world_size: int = 0
    """As it was when T was fixed: workers that are started again during the commit may be of another number."""
    go: bool = False
    go_ms: int = 0
    held_ms: int | None = None
    """Since when the first rank stands at T."""
    written_ms: int | None = None
    """Since when all have written."""
    tries: int = 1
    verify_by_ms: int = 0
    full: bool = True
    """Every byte is checked, not only structure and sizes."""
    verified: str = ""
    unverified: frozenset[int] = frozenset()
    """Tasks whose ranks' files are still being checked."""
    committed: bool = False

    def member(self, who: Who) -> Member | None:
        """The part of this rank, if it has one."""
        member = self.members.get(who.rank)
        return member if member is not None and member.who == who else None


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """How often to save by time, and why so often. Times in ms."""

    every_ms: int
    why: str
    cost_ms: int | None = None
    """With --every auto: how long a save holds training, and the mean time between interruptions."""
    mtbi_ms: int | None = None


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
    """On the way out. `cause`: the notice's, when this began."""

    fresh: bool
    reason: str
    began_ms: int
    said_ms: int
    end_command_at_ms: int
    cause: Cause = Cause.UNKNOWN
    own_end: bool = False
    """Training is over or nearly so: it is given its time to end by itself, and no Leave is sent."""
    alone_ms: int | None = None
    """Since when all that had come to their end are gone, and others are in their loops."""
    told: bool = False
    """Leave was sent to at least one rank, or the command was ended by us."""
    passed: bool = False
    adopted: bool = False
    """The program was left to save and to end by itself; and what it then had written has been looked at."""
    asked_ms: int | None = None
    """When what was left of the command was sent SIGTERM, and when SIGKILL."""
    killed_ms: int | None = None


class Asking(enum.Enum):
    """Where the requeue stands."""

    MEETING = "meeting the other steps of the job"
    LOOKING = "looking at the job again"
    CALLING = "calling scontrol requeue"
    RESUBMITTING = "running the command of --resubmit"
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
    resubmitted: str | None = None
    """What the command of --resubmit has said, once it has brought the job back."""
    cause: Cause = Cause.UNKNOWN
    """As it was seen right before the call: once that is accepted, the job's state tells of the requeue only."""


class State(msgspec.Struct, frozen=True):
    """Everything the machine knows."""

    began_ms: int
    phase: Phase = Phase.RUNNING
    ranks: Table[Rank] = msgspec.field(default_factory=Table)
    """Every rank that attached in the newest generation, by rank."""
    world_size: int = 0
    """The largest world that any of them reported (rule 10)."""
    stopped: int = 0
    """How many of them wait at a stop of their own, and since when the first one may."""
    stopped_ms: int = 0
    generation: int = 0
    several: bool = False
    """A checkpoint of this directory holds more ranks than rank 0: then rank 0 alone makes no whole one."""
    alone: bool = False
    """Rank 0 was waited for alone once (rule 10); not again until another rank attaches."""
    resume_from: str = ""
    resume_step: int = -1
    round: Round | None = None
    given_up: GivenUp | None = None
    """The last round that ended without a checkpoint."""
    given_up_in_a_row: int = 0
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
    """Exit status of training once it has ended: all tasks' commands, or one that failed while nobody had been told to leave."""
    codes: Table[int] = msgspec.field(default_factory=Table)
    """Exit status of each task's command that has ended."""
    failed: int | None = None
    """The first of them that is not 0."""
    over: bool = False
    """The commands of all tasks have ended."""
    pids: Table[int] = msgspec.field(default_factory=Table)
    """Process of each task's command that has ended."""
    settle_ms: int | None = None
    """Since when the command is over with 0, and the last words of its ranks are awaited."""
    masked: str = ""
    """Which rank had failed behind a command that ended with 0, and why: the last time that this was so, for the journal."""
    at_work: frozenset[Who] = frozenset()
    """Ranks whose saves may still be running although their round was given up."""
    writing: frozenset[Who] = frozenset()
    """Ranks that were saving when another one's failure ended training: their writes are not cut short."""
    write_by_ms: int = 0
    started: bool = False
    """What the commands resume from is chosen; they may start."""
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
    interval: Interval | None = None
    """How often saves by time are due; None for never."""
    asked_every_ms: int | None = None
    asked_auto: bool = False
    """The owner has asked for another interval, or for one that is chosen."""
    leave_asked: Asked | None = None
    """The owner has asked it to leave after the next save."""
    held: str = ""
    """As the newest look said: somebody holds the job, so that it will not start again by itself; the reason, or the state."""
    longest_save_ms: int = 0
    saves_ms: tuple[int, ...] = ()
    """From Go to the last Saved of the newest rounds that were committed, newest first; how long each held training, below."""
    holds_ms: tuple[int, ...] = ()
    verify_ms: int = 0
    """The longest verification and commit of them."""
    history: History = NONE
    """What earlier attempts came to, once it was read."""
    began_step: int = -1
    """Step that this attempt began with."""
    attached_ms: int | None = None
    """When the first rank attached."""
    died_n: int = -1
    """Step at which a rank of the command that has ended last died, as it has said; -1 if none has."""
    last_crash: tuple[int, int] | None = None
    """That step, and the exit status, when training failed by itself the last time."""
    why_exited: str = ""
    """What is known of the reason of the command's end beyond its status."""
    adopting: bool = False
    """A look at what the program has written is under way."""
    next_adopt_ms: int | None = None
    closing_ms: int | None = None
    """Since when the command is over and the last such look is awaited."""
    closed_look: bool = False
    """It is over."""
    exit_code: int | None = None
    epoch: int = 0
    tasks: Table[Task] = msgspec.field(default_factory=Table)
    """The step's other supervisors that have reported."""
    cut_ms: int | None = None
    """Since when the first of those is cut whose connection is closed."""
    join_is_over: bool = False
    """Tasks that have not reported by now are not waited for."""
    tasks_heard_ms: int = 0
    """No task that is there was last heard before this instant."""
    stepped_ms: int = 0
    awake_ms: int = 0
    """Since when this process has not been stopped itself."""
    inherited_fresh: bool = False
    """An heir: the lost coordinator had committed the last save already."""
    inherited_asked: bool = False
    """An heir: what is left of its command was sent SIGTERM already."""
    bursts: tuple[Burst, ...] = ()
    told: Stand | None = None
    beat_ms: int = 0

    def rank(self, who: Who) -> Rank | None:
        """The rank with exactly this identity."""
        rank = self.ranks.get(who.rank)
        return rank if rank is not None and rank.who == who else None

    @property
    def live(self) -> tuple[Rank, ...]:
        """Ranks that can still take part in a round."""
        return tuple(rank for rank in self.ranks if rank.live)
