"""The words that ranks and supervisors say to each other, and their bytes.

Owns the message types and their encoding (MessagePack, validated while it is decoded). Must not know sockets, clocks or
threads: the simulator and the real transport use this same code, so what is tested here is what travels.
Every word may come twice, late, or never (docs/protocol.md); each one carries the round it belongs to.
And one word of the supervisor that travels in the command's environment: which ranks of mpirun are none of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

VERSION = 1
"""Version of this protocol, apart from the version of the package."""

FRAME_BYTES_MAX = 4 * 1024 * 1024
"""A longer frame is garbage. 4 MiB holds a `Saved` with about 30,000 files."""

FILES_MAX = 20_000
"""Most files that one rank may report in one `Saved`."""

WORLD_SIZE_MAX = 1_000_000
"""A larger world is garbage."""

REASON_CHARS_MAX = 500
"""A failure's reason is cut to this many characters before it is sent."""

PHASE_CHARS_MAX = 100
"""A phase's name is cut to this many characters in a Progress."""

SIGNAL_MAX = 64
"""No system of ours has more signals."""

NUMBER_MAX = (1 << 62) - 1
"""No step or safe point has a higher number."""

PID_SYSTEM_MAX = (1 << 32) - 1
"""No system gives out a higher pid (Linux: 2**22). Processes of another pid namespace make one up beyond it."""

NO_ROUND = 0
"""Round numbers start at 1; 0 stands for "no round", as in a stop that a rank made by itself."""


class Position(NamedTuple):
    """Where a rank stands: `n` finished steps, `k` safe points passed since. Ordered."""

    n: int
    k: int


class Who(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Identity of a rank, fixed at attach (docs/protocol.md, rule 11)."""

    rank: int
    generation: int
    pid: int
    task: int = 0
    """The task whose supervisor it is attached to, put in by that supervisor: pids of two nodes may be equal."""


class SavedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file that a rank wrote: path relative to the round's directory, size in bytes, XXH3-128 in hex ("" if unknown)."""

    path: str
    size_bytes: int
    xxh3_128: str


class _Word(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Common settings of all words. They hold no cycles, and come in thousands: the garbage collector need not know of them."""


# --- from a rank ------------------------------------------------------------------------------------------------------


class Hello(_Word, frozen=True, tag=True, array_like=True):
    """First word of a rank. `sharded`: its state is spread over ranks, or each has its own, so no rank can save alone."""

    who: Who
    version: int
    world_size: int
    local_rank: int
    sharded: bool


class Ack(_Word, frozen=True, tag=True, array_like=True):
    """Answer to Prepare: the hold is set, and the rank will be at `entered` at its next boundary if it goes on."""

    who: Who
    round: int
    entered: Position


class Arrived(_Word, frozen=True, tag=True, array_like=True):
    """The rank stands at `at` and waits. Round 0: it stopped by itself at a multiple of `every_steps`."""

    who: Who
    round: int
    at: Position


class Saving(_Word, frozen=True, tag=True, array_like=True):
    """The rank's save is running (repeated every second)."""

    who: Who
    round: int


class Saved(_Word, frozen=True, tag=True, array_like=True):
    """The rank's save is over. `n` is the step count that the save *began* with; `save_ms` is how long it took."""

    who: Who
    round: int
    n: int
    files: tuple[SavedFile, ...]
    save_ms: int


class Failed(_Word, frozen=True, tag=True, array_like=True):
    """The rank does not save in this round, and why. Round 0: its process dies of an exception, so it is not finished."""

    who: Who
    round: int
    reason: str
    n: int = -1
    """Round 0: how many steps were finished by then; -1 if that is not known."""


class Finished(_Word, frozen=True, tag=True, array_like=True):
    """The rank has left its training loop; there is nothing left to save (round 0: said by itself)."""

    who: Who
    round: int


class Left(_Word, frozen=True, tag=True, array_like=True):
    """The rank has obeyed Leave: `Preempted` was raised. `again`: it went on training all the same."""

    who: Who
    round: int
    again: bool


FromRank = Hello | Ack | Arrived | Saving | Saved | Failed | Finished | Left


Doing = Literal["starting", "training", "phase", "parked", "saving", "over"]
"""Starting: it has not come to its first boundary. Over: it has left its training loop, or was told to."""


class Progress(_Word, frozen=True, tag=True, array_like=True):
    """Where the rank is and what it does, said by its listener every few seconds to a supervisor that looks out for hangs.

    No word of the agreement: it is in no round, nothing answers it, and the machine never sees it.
    """

    who: Who
    entered: Position
    doing: Doing
    phase: str = ""
    """The innermost phase's name, cut to PHASE_CHARS_MAX."""
    stood_ms: int = 0
    """For so long the listener has seen it at this position, doing this."""
    dump_signal: int = 0
    """At this signal the process writes the stacks of its threads; 0: at none."""
    dump_fd: int = -1
    """The descriptor that it writes them to, in its own numbers."""


Said = FromRank | Progress
"""All that a rank says."""

# --- to a rank --------------------------------------------------------------------------------------------------------


class Welcome(_Word, frozen=True, tag=True, array_like=True):
    """Answer to Hello. `resume_from` is "" when there is nothing to resume from; `every_steps` is 0 when off."""

    version: int
    newest_round: int
    every_steps: int
    resume_from: str
    resume_step: int


class Refused(_Word, frozen=True, tag=True, array_like=True):
    """Answer to a Hello that cannot be accepted: the rank trains on unsupervised."""

    reason: str


class Prepare(_Word, frozen=True, tag=True, array_like=True):
    """Set the hold for this round, then say what you have entered."""

    round: int


class SaveAt(_Word, frozen=True, tag=True, array_like=True):
    """Run on to `at`, say Arrived, and save when Go comes.

    `directory` is absolute; `left_ms` is what remains for the save, a duration, since two nodes' monotonic clocks cannot
    be compared. `then`: "leave" keeps the rank parked after its save until Leave or Abort.
    """

    round: int
    at: Position
    directory: str
    then: Literal["leave", "go_on"]
    left_ms: int


class Go(_Word, frozen=True, tag=True, array_like=True):
    """All ranks have arrived: save now. `then` replaces SaveAt's when it is given.

    A notice may turn the round into a leave round when some ranks have arrived already. Told so in a SaveAt of its own, a rank
    that lost that one word would save, go on training and lose steps; no rank saves without Go.
    """

    round: int
    then: Literal["leave", "go_on"] | None = None


class Wait(_Word, frozen=True, tag=True, array_like=True):
    """You are heard; stay where you are."""

    round: int


class Abort(_Word, frozen=True, tag=True, array_like=True):
    """The round is over for you: go on training. Round 0 releases a rank that stopped by itself."""

    round: int
    reason: str


class Leave(_Word, frozen=True, tag=True, array_like=True):
    """End the training loop now (`Preempted`)."""

    round: int


ToRank = Welcome | Refused | Prepare | SaveAt | Go | Wait | Abort | Leave


class DecodeError(Exception):
    """The bytes are not a word of this protocol. The message says what is wrong."""


_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(Said)
_to_rank = msgspec.msgpack.Decoder(ToRank)


def encode(word: Said | ToRank) -> bytes:
    """Bytes of one word."""
    return _encoder.encode(word)


def decode_from_rank(frame: bytes) -> Said:
    """The word that a rank said. Raises DecodeError for anything that is not one."""
    _check_size(frame)
    try:
        word: Said = _from_rank.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    problem = out_of_range(word)
    if problem:
        raise DecodeError(problem)
    return word


def decode_to_rank(frame: bytes) -> ToRank:
    """The word that a supervisor said. Raises DecodeError for anything that is not one."""
    _check_size(frame)
    try:
        word: ToRank = _to_rank.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    return word


def _check_size(frame: bytes) -> None:
    if len(frame) > FRAME_BYTES_MAX:
        raise DecodeError(f"a frame of {len(frame)} bytes, more than {FRAME_BYTES_MAX}")


def out_of_range(word: Said) -> str:
    """What is wrong with the numbers of a word, or ""."""
    if word.who.rank < 0 or word.who.generation < 0 or not 0 < word.who.pid <= NUMBER_MAX:
        return f"an identity out of range: {word.who}"
    if isinstance(word, Hello):
        if not word.who.rank < word.world_size <= WORLD_SIZE_MAX:
            return f"rank {word.who.rank} of a world of {word.world_size}"
    elif not isinstance(word, Progress) and word.round < 0:
        return f"round {word.round}"
    if isinstance(word, Ack | Arrived | Progress):
        at = word.at if isinstance(word, Arrived) else word.entered
        if not (0 <= at.n <= NUMBER_MAX and 0 <= at.k <= NUMBER_MAX):
            return f"a position out of range: {tuple(at)}"
    if isinstance(word, Progress) and not (0 <= word.stood_ms <= NUMBER_MAX and 0 <= word.dump_signal <= SIGNAL_MAX):
        return "a number out of range"
    if isinstance(word, Failed) and not -1 <= word.n <= NUMBER_MAX:
        return f"a step out of range: {word.n}"
    if isinstance(word, Saved):
        if len(word.files) > FILES_MAX:
            return f"{len(word.files)} files, more than {FILES_MAX}"
        if not 0 <= word.n <= NUMBER_MAX or word.save_ms < 0 or any(file.size_bytes < 0 for file in word.files):
            return "a number out of range"
    return ""


# --- in the command's environment -------------------------------------------------------------------------------------

PROGRESS = "CKPT_SUPERVISE_PROGRESS"
"""How often ranks are to say where they are, in ms; 0 for never."""

PROGRESS_MS_MAX = 5_000
PROGRESS_MS_MIN = 200


def progress_ms(hang_floor_ms: int | None) -> int:
    """Every 5 s, and where --hang-floor is below 50 s ten times in that time; 0 for never, as nobody looks out for hangs."""
    return 0 if hang_floor_ms is None else max(PROGRESS_MS_MIN, min(PROGRESS_MS_MAX, hang_floor_ms // 10))


class Mpi(NamedTuple):
    """Variables by which one kind of mpirun tells a process who it is. `launch`: those that differ from launch to launch."""

    rank: str
    size: str
    local_rank: str
    launch: tuple[str, ...]


MPI = (
    Mpi("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("PMIX_NAMESPACE",)),
    Mpi("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ("PMI_FD", "PMI_PORT")),
    # MPICH's and Intel's; after those above, as `srun --mpi=pmi2` sets it too, for the task that mpirun is started in.
    Mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("PMI_FD", "PMI_PORT")),
)
"""First to be believed first."""

MPI_FOUND = "CKPT_SUPERVISE_MPI"
"""What of it the supervisor had in its own environment, as `mpi_found` writes it."""


def mpi_found(environment: Mapping[str, str]) -> str:
    """The words of all kinds of mpirun that have left a rank here: `OMPI_COMM_WORLD_RANK=0/4 PMI_RANK=0/1`."""
    return " ".join(filter(None, (mpi_word(environment, names) for names in MPI)))


def mpi_word(environment: Mapping[str, str], names: Mpi) -> str:
    """Rank and size that one kind of mpirun has left here, as one word; "" if none.

    With a checksum of the launch, where that shows: a rank 0 that submits the same job again is told from the rank 0 of that one.
    """
    rank, size = environment.get(names.rank, ""), environment.get(names.size, "")
    if not (rank + size).isascii() or not rank.isdigit() or not size.isdigit():
        return ""
    launch = "\0".join(environment.get(name, "") for name in names.launch).strip("\0")
    check = f"/{zlib.crc32(launch.encode('utf-8', 'surrogateescape')):08x}" if launch else ""
    return f"{names.rank}={rank}/{size}{check}"
