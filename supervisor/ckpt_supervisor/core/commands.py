"""What the machine asks of the shell. Plain data, no behaviour; every command is bounded by the shell and answered by an event
where it can fail."""

from __future__ import annotations

import dataclasses

from ckpt_client import wire


@dataclasses.dataclass(frozen=True, slots=True)
class Say:
    """Send one word to one rank (its process `pid`)."""

    pid: int
    word: wire.ToRank


@dataclasses.dataclass(frozen=True, slots=True)
class LookUp:
    """Ask Slurm about the job; answered by Looked."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Verify:
    """Check what the ranks wrote for this round; answered by Verified. `files` holds (rank, file) in order of ranks."""

    round: int
    partial: str
    files: tuple[tuple[int, wire.SavedFile], ...]
    full: bool


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


@dataclasses.dataclass(frozen=True, slots=True)
class DropPartial:
    """Remove the partial directory of a round that was given up (out of the way of everything else)."""

    partial: str


@dataclasses.dataclass(frozen=True, slots=True)
class Prune:
    """Remove old checkpoints; no round is running."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartCommand:
    """Start the command again in place; `restart` counts from 1."""

    restart: int


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
class Exit:
    """Leave with this status; `line` says in one line what happened, on which numbers, and what to do."""

    code: int
    line: str


Command = Say | LookUp | Verify | Commit | DropPartial | Prune | StartCommand | EndCommand | Meet | CallRequeue | Exit
