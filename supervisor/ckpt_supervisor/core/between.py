"""The words that the supervisors of one job step say to each other, and their bytes (docs/protocol.md, "Several supervisors").

Owns these types and their encoding. Pure, like the ranks' own words (ckpt_client.wire), which travel inside. What has to arrive
is said as a state that is repeated every second (`Report`, `Stand`), never as a change that a lost frame would take with it.
"""

from __future__ import annotations

import msgspec
from ckpt_client import wire
from ckpt_client.wire import FromRank, ToRank

from ckpt_supervisor.core.hangs import DOINGS_MAX, Doing

VERSION = 1
"""Version of these words; all supervisors of a step come from one release."""

FRAME_BYTES_MAX = 8 * 1024 * 1024
"""A longer frame is garbage. A rank's longest word is half of that; and libzmq holds that much for a stranger's handshake,
too."""

TASKS_MAX = 65_536
"""More tasks than that in one step are garbage."""

SIGNALS_MAX = 64
"""Most different signals that one task can tell of."""


class _Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Common settings of all words."""


# --- from a task's supervisor to the coordinator ----------------------------------------------------------------------


class Report(_Word, frozen=True, tag=True, array_like=True):
    """Where a task stands: its first word, and repeated every second. All of it is absolute, nothing is a difference."""

    task: int
    version: int
    epoch: int
    """Of the coordinator that it means to follow."""
    host: str
    pid: int
    signals: tuple[tuple[str, str, int], ...] = ()
    """Name, meaning (the name of an `events.Meaning`) and how often it has come here so far."""
    restart: int = -1
    """Which start of the command `code` speaks of; -1 before the first."""
    code: int | None = None
    """Exit status of that start, None while it runs."""
    gone: tuple[tuple[wire.Who, str], ...] = ()
    """Ranks of this task whose processes have ended, and how."""
    lost: bool = False
    """It had lost the coordinator and decides for itself: nobody is to wait for its ranks."""
    bye: bool = False
    """Its last word: it has heard the exit status, its command is over, and it leaves."""
    finished: tuple[wire.Who, ...] = ()
    """Ranks of this task that have left their training loops by themselves."""
    command: int = 0
    """Process of the command that has ended with `code`; 0 if that is not to be told."""
    why: str = ""
    """What is known of that end beyond its status, such as a kill for lack of memory."""


class Heard(_Word, frozen=True, tag=True, array_like=True):
    """What ranks of this task said, in order."""

    task: int
    words: tuple[FromRank, ...]


class CheckedFile(msgspec.Struct, frozen=True, array_like=True):
    """One file as it was found on the disk; the manifest's entry for it."""

    path: str
    size_bytes: int
    xxh3_128: str
    rank: int | None


class Checked(_Word, frozen=True, tag=True, array_like=True):
    """The files of this task's ranks have been verified; `problem` is "" when they are intact, and flushed to the disk."""

    task: int
    round: int
    problem: str
    bytes_read: int
    files: tuple[CheckedFile, ...]
    verified: str
    """"full" or "structure"."""


class Busy(_Word, frozen=True, tag=True, array_like=True):
    """Ranks of this task are busy with what is no step (a phase, a save, their first one): others may be waiting for them.

    Said every few seconds while it is so. For the watch on hangs alone, as the next one: the machine does not see them.
    """

    task: int
    doings: tuple[Doing, ...]


class Stuck(_Word, frozen=True, tag=True, array_like=True):
    """Ranks of this task stand still, and it was looked which way: `kind` in a word or two, `text` for people."""

    task: int
    ranks: tuple[int, ...]
    kind: str
    text: str


Up = Report | Heard | Checked | Busy | Stuck

# --- from the coordinator to a task's supervisor ------------------------------------------------------------------------


class Stand(_Word, frozen=True, tag=True, array_like=True):
    """Where the step stands: the answer to Report, repeated every second and at every change. Absolute, as Report is."""

    epoch: int
    restart: int = -1
    """The start of the command that is wanted: 0 for the first; -1 while the checkpoint to resume from is looked for."""
    resume_from: str = ""
    resume_step: int = -1
    committed_step: int = -1
    """The newest step that is known to be committed, for whoever has to tell it should the coordinator be lost."""
    end: str = ""
    """End your command, and why; "" to let it run."""
    code: int | None = None
    """Exit with this status."""
    fresh: bool = False
    """The last save is committed, and the step is on its way out."""
    start_restarts: int = 0
    """How often the job had been restarted when this attempt began, as the coordinator has seen it."""
    kill_wait_ms: int = 30_000
    """Time between Slurm's SIGTERM and its SIGKILL, as the coordinator knows it."""
    left_ms: int | None = None
    """A notice is in force, and this is left until the expected kill. None: there is none."""
    passed: bool = False
    """The signal of --pass-signal is to be handed on to the commands."""
    ask: str = ""
    """Ask what is left of your command to end (SIGTERM), and why; "" to leave it alone. `end` comes after it."""


class Tell(_Word, frozen=True, tag=True, array_like=True):
    """Pass this word on to these processes."""

    pids: tuple[int, ...]
    word: ToRank


class Check(_Word, frozen=True, tag=True, array_like=True):
    """Verify what these ranks of yours said they had written for this round, answered by Checked."""

    round: int
    partial: str
    pids: tuple[int, ...]
    full: bool


class Turned(_Word, frozen=True, tag=True, array_like=True):
    """You cannot take part, and why: another release, another epoch, a number that is taken."""

    reason: str


class Excused(_Word, frozen=True, tag=True, array_like=True):
    """What ranks of the job are busy with that is no step, whatever task they are of; said as Busy is."""

    doings: tuple[Doing, ...]


Down = Stand | Tell | Check | Turned | Excused


def stamped(word: FromRank, task: int) -> FromRank:
    """A rank's word with the task put in whose supervisor it came to."""
    return msgspec.structs.replace(word, who=msgspec.structs.replace(word.who, task=task))


_encoder = msgspec.msgpack.Encoder()
_up = msgspec.msgpack.Decoder(Up)
_down = msgspec.msgpack.Decoder(Down)


def encode(word: Up | Down) -> bytes:
    """Bytes of one word."""
    return _encoder.encode(word)


def decode_up(frame: bytes) -> Up:
    """A word to the coordinator. Raises wire.DecodeError for anything that is not one."""
    _check_size(frame)
    try:
        word: Up = _up.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wire.DecodeError(str(error)) from error
    if not 0 < word.task < TASKS_MAX:
        raise wire.DecodeError(f"task {word.task}")
    if isinstance(word, Report) and len(word.signals) > SIGNALS_MAX:
        raise wire.DecodeError(f"{len(word.signals)} kinds of signals")
    if isinstance(word, Busy) and len(word.doings) > DOINGS_MAX:
        raise wire.DecodeError(f"{len(word.doings)} things that ranks are busy with")
    if isinstance(word, Heard):
        for said in word.words:
            problem = wire.out_of_range(said)
            if problem:
                raise wire.DecodeError(problem)
    return word


def decode_down(frame: bytes) -> Down:
    """A word of the coordinator. Raises wire.DecodeError for anything that is not one."""
    _check_size(frame)
    try:
        word: Down = _down.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wire.DecodeError(str(error)) from error
    return word


def _check_size(frame: bytes) -> None:
    if len(frame) > FRAME_BYTES_MAX:
        raise wire.DecodeError(f"a frame of {len(frame)} bytes, more than {FRAME_BYTES_MAX}")
