"""What the machine asks of the shell. Plain data, no behaviour; every command is bounded by the shell and answered by an event
where it can fail."""

from __future__ import annotations

import dataclasses

from ckpt_client import wire

from ckpt_supervisor.core.between import Stand, Up


@dataclasses.dataclass(frozen=True, slots=True)
class Say:
    """Send one word to one rank: its process `pid` below this task's supervisor."""

    pid: int
    word: wire.ToRank
    task: int = 0


def to(who: wire.Who, word: wire.ToRank) -> Say:
    """A word to this rank."""
    return Say(who.pid, word, who.task)


@dataclasses.dataclass(frozen=True, slots=True)
class Announce:
    """Tell these tasks, or all, where the step stands."""

    stand: Stand
    tasks: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PassUp:
    """Pass a rank's word on to the coordinator, together with others."""

    word: wire.FromRank


@dataclasses.dataclass(frozen=True, slots=True)
class SendUp:
    """Say this to the coordinator."""

    word: Up


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOver:
    """The coordinator is lost: from here on this supervisor decides for its own task."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class TurnAway:
    """Tell a supervisor that it cannot take part as this task, and why."""

    task: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LookUp:
    """Ask Slurm about the job, after a pause; answered by Looked."""

    why: str
    after_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What the ranks below one task wrote: their processes, and (rank, file) in order of ranks."""

    task: int
    pids: tuple[int, ...]
    files: tuple[tuple[int, wire.SavedFile], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verify:
    """Check what the ranks wrote for this round; answered by Verified, once by each task.

    `files` are those of this task's ranks, (rank, file) in order of ranks; `shares` those that other tasks check beside this one.
    """

    round: int
    partial: str
    files: tuple[tuple[int, wire.SavedFile], ...]
    full: bool
    shares: tuple[Share, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class CheckAgain:
    """Ask these tasks once more to check what their ranks wrote: the question or its answer may be lost. Not this task's own
    files."""

    round: int
    partial: str
    full: bool
    shares: tuple[Share, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """Make the verified round a committed checkpoint; answered by Committed."""

    round: int
    partial: str
    step: int
    world_size: int
    ranks: tuple[int, ...]
    cause: str
    verified: str
    save_ms: int = 0
    """From Go to the last rank's Saved."""


@dataclasses.dataclass(frozen=True, slots=True)
class DropPartial:
    """Remove the partial directory of a round that was given up (out of the way of everything else)."""

    partial: str


@dataclasses.dataclass(frozen=True, slots=True)
class Prune:
    """Remove old checkpoints; no round is running."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adopt:
    """Look for what the program has written where --adopt says, and make checkpoints of it; answered by Adopted.

    `final`: whoever wrote has ended, so that what is there is not being written any more.
    """

    final: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PassSignal:
    """Hand the signal of --pass-signal on to the program, unless it has had it already."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartCommand:
    """Start the command again in place; `restart` counts from 1."""

    restart: int
    after_ms: int = 0
    """Pause before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskCommand:
    """SIGTERM (and SIGCONT) to what is left of the command's processes: they are asked to end. EndCommand follows."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndCommand:
    """SIGKILL (after SIGCONT) what is left of the command's processes."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Meet:
    """Say that this step is ready to requeue and ask about the job's other supervised steps; answered by Met."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallRequeue:
    """Call `scontrol requeue`; answered by RequeueReturned. Comes last (docs/slurm.md, section 2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resubmit:
    """Run the command of --resubmit, as Slurm does not requeue the job; answered by Resubmitted."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """Leave with this status; `line` says in one line what happened, on which numbers, and what to do."""

    code: int
    line: str


Command = (
    Say
    | Announce
    | TurnAway
    | LookUp
    | Verify
    | CheckAgain
    | Commit
    | DropPartial
    | Prune
    | Adopt
    | PassSignal
    | StartCommand
    | AskCommand
    | EndCommand
    | Meet
    | CallRequeue
    | Resubmit
    | Exit
)

RelayCommand = Say | PassUp | SendUp | TakeOver | Verify | PassSignal | StartCommand | AskCommand | EndCommand | Exit
"""What a task's supervisor asks of its shell while it follows the coordinator (relay.py)."""
