"""What can happen to the machine: the words of ranks, and what the supervisor's own eyes and hands report.

Owns the event types. Plain data, no behaviour. Adding an event here makes mypy name every phase that has not decided on it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from ckpt_client import wire

from ckpt_supervisor.core.between import Check, CheckedFile, Report, Stand, Tell, Turned
from ckpt_supervisor.core.history import History
from ckpt_supervisor.core.views import JobView, NoView


class Meaning(enum.Enum):
    """What a signal stands for under the options in force. The shell maps numbers to meanings; the core never sees numbers."""

    LEAVE = "save and leave"
    NOTICE = "the notice signal: save and leave, unless no end is in sight"
    SAVE = "save and go on"
    INTERRUPT = "a person's ctrl-C: save and leave; the second one ends at once"


@dataclasses.dataclass(frozen=True, slots=True)
class SignalCame:
    """A signal reached the supervisor."""

    name: str
    meaning: Meaning
    task: int = 0
    """The task that it has reached."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskCut:
    """The connection of this task's supervisor (0: the coordinator's) was closed: it has ended, or will connect again at once."""

    task: int


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """What a look at the job gave. Its instants are wall clock; `view.looked_ms` is the wall clock of this event's `now`."""

    view: JobView | NoView
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank has ended (its pidfd says so)."""

    who: wire.Who
    how: str


@dataclasses.dataclass(frozen=True, slots=True)
class CommandExited:
    """A task's command has ended with this exit code (128 + n for signal n). Task 0 is the machine's own, an heir's too."""

    code: int
    task: int = 0
    pid: int = 0
    """Its process; 0 if there was none, or if the status is not that of this process."""
    why: str = ""
    """What is known of the reason beyond the status, such as a kill for lack of memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """A task has verified its ranks' files of a round. `verified` is "full" or "structure"; `problem` is "" when intact."""

    round: int
    verified: str
    problem: str
    bytes_read: int
    task: int = 0
    files: tuple[CheckedFile, ...] = ()
    """As they were found, for whoever writes the manifest."""


class CommitResult(enum.Enum):
    """How a commit ended."""

    COMMITTED = "committed"
    ALREADY_THERE = "already there"
    FENCED = "refused: a newer attempt owns the directory"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """A commit is over."""

    round: int
    step: int
    result: CommitResult
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Adopted:
    """A look at what the program has written is over: the steps that are checkpoints now and were none before; `problem`: why
    its newest is none, "" if there is no reason."""

    steps: tuple[int, ...]
    problem: str
    final: bool
    fresh: bool = True
    """The newest of them was not there yet when the signal was handed on to the program."""
    again: int = -1
    """A step that was a checkpoint already, and that the program has written once more at its signal; -1 for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """What the other supervised steps of this job say: `ready` when this one may call requeue now."""

    ready: bool
    reason: str


class RequeueResult(enum.Enum):
    """What `scontrol requeue` came to (docs/slurm.md, section 2)."""

    ACCEPTED = "accepted"
    PENDING = "already pending"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class RequeueReturned:
    """The requeue call is over, one way or the other."""

    result: RequeueResult
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """What earlier attempts came to was read."""

    history: History


@dataclasses.dataclass(frozen=True, slots=True)
class Stalled:
    """Ranks below this task make no progress any more. `kind`: which way, in a word or two; `text`: for people, with numbers."""

    task: int
    ranks: tuple[int, ...]
    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The owner asks for something from outside (`ckptctl save`). `every`: `every_ms` is the interval from now on; None: auto."""

    what: Literal["leave_after_save", "every"]
    every_ms: int | None = None
    requeue: bool = False
    """After leaving the job is to come back."""
    who: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Resubmitted:
    """The command of --resubmit is over."""

    accepted: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `behind`: there is more that has come and was not taken in yet."""

    behind: bool = False


FromCoordinator = Stand | Tell | Check | Turned
"""What a task's supervisor hears from the coordinator. They are no events of the machine: relay.py takes them."""

Event = (
    wire.Hello
    | wire.Ack
    | wire.Arrived
    | wire.Saving
    | wire.Saved
    | wire.Failed
    | wire.Finished
    | wire.Left
    | Report
    | TaskCut
    | SignalCame
    | Looked
    | RankGone
    | CommandExited
    | Verified
    | Committed
    | Adopted
    | Met
    | RequeueReturned
    | Resubmitted
    | Recalled
    | Stalled
    | Asked
    | Tick
)
