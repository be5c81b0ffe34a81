"""What was looked at, as plain data: the rules' only argument.

Owns no look and no judgement. Pure. None everywhere means "not known", never "not there".
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ckpt_supervisor.adapters.slurm_text import Partition, SlurmConfig

Where = Literal["nowhere", "outside", "script", "step"]
"""No Slurm at all. The doctor looks from outside, wherever it runs. A supervisor is a line of the job script, or a task of
srun's."""


class Srun(msgspec.Struct, frozen=True):
    """One srun: a line of the job script, or a process."""

    place: str
    """"line 12", or "process 4711"."""
    options: dict[str, str]
    """Its own options by their long names."""
    supervise: tuple[str, ...] | None = None
    """The options of the ckpt-supervise that it starts, None if it starts none."""
    command: tuple[str, ...] = ()
    """What follows the supervisor's `--`."""
    background: bool = False
    directory: str = ""
    """Of its supervisor, as it is written; "" for the default."""
    arms: tuple[tuple[str, int], ...] = ()
    """The if and case statements of the script around it, and which of their arms it is in."""

    def excludes(self, other: Srun) -> bool:
        """Whether at most one of the two runs: they are in different arms of one statement."""
        others = dict(other.arms)
        return any(others.get(name, arm) != arm for name, arm in self.arms)


class Script(msgspec.Struct, frozen=True):
    """What a job script says."""

    origin: str
    sbatch: dict[str, str] = {}
    """Options of its #SBATCH lines, by their long names."""
    sruns: tuple[Srun, ...] = ()
    bare: tuple[Srun, ...] = ()
    """Supervisors that no srun starts."""
    traps: frozenset[str] = frozenset()
    """Signals that the batch shell has a trap for: USR1."""
    requeues: tuple[int, ...] = ()
    """Lines with a `scontrol requeue` of its own."""
    variables: dict[str, str] = {}
    """What it assigns, before expansion."""
    exports_all: bool = False
    """It takes a --export=NONE back for its steps."""

    @property
    def supervised(self) -> tuple[Srun, ...]:
        """The sruns that start a supervisor."""
        return tuple(srun for srun in self.sruns if srun.supervise is not None)


class JobFacts(msgspec.Struct, frozen=True):
    """What Slurm says of the job."""

    name: str
    requeue: bool | None = None
    batch: bool | None = None
    unlimited: bool | None = None
    partition: str = ""
    nodes: int | None = None
    node_list: str = ""
    output: str = ""


class Wishes(msgspec.Struct, frozen=True):
    """The supervisor's options that the rules need."""

    wants_requeue: bool = True
    requeue_exit: int | None = None
    watched: bool = True
    """Not --lead off."""
    lead_ms: int | None = None
    """Of --lead TIME; None for auto."""
    signals: frozenset[str] = frozenset({"TERM", "INT", "HUP", "USR1", "USR2"})
    """Names of the signals that it answers."""
    keep: int = 3
    command: tuple[str, ...] = ()


class Setup(msgspec.Struct, frozen=True):
    """Everything about Slurm that the rules look at."""

    where: Where
    wishes: Wishes = Wishes()
    job: JobFacts | None = None
    site: SlurmConfig | None = None
    partition: Partition | None = None
    script: Script | None = None
    sruns: tuple[Srun, ...] = ()
    """The job's sruns that run on this node now."""
    srun: Srun | None = None
    """The one among them that has started this step, if it could be told."""
    tasks: int | None = None
    nodes: int | None = None
    open_mode: str = ""
    """SLURM_OPEN_MODE: sbatch sets it to "a" or "t" where --open-mode was given (docs/slurm.md, section 6)."""
    export_env: str = ""
    """SLURM_EXPORT_ENV."""
    other_owner: str = ""
    """Another tool at work in this job that requeues by itself."""
    scontrol: bool = True
    saves_ms: tuple[int, ...] = ()
    """How long the newest saves took."""
    silent: str = ""
    """Why Slurm could not be asked."""


class Held(msgspec.Struct, frozen=True):
    """Who holds the directory, as DIR/attempt and Slurm tell it."""

    who: str
    alive: bool | None
    """None: could not be told."""
    why: str = ""


class Place(msgspec.Struct, frozen=True):
    """What the probe found in the checkpoint directory. Errors are texts, "" for none, None where it was not tried."""

    path: str
    exists: bool
    looked_at: str
    """The directory itself, or the nearest one above it that is there."""
    kind: str = ""
    """The file system's type, as /proc/self/mountinfo has it."""
    source: str = ""
    free_bytes: int | None = None
    free_files: int | None = None
    """None also where the file system does not count them."""
    needed_bytes: int | None = None
    """For one more checkpoint like the newest."""
    checkpoints: int = 0
    quota: str = ""
    """The error by which the file system refuses what its free bytes promise."""
    usable_bytes: int | None = None
    write: str | None = None
    fsync: str | None = None
    rename: str | None = None
    directory_fsync: str | None = None
    links: str | None = None
    skew_ms: int | None = None
    """The directory's clock minus this machine's."""
    holder: tuple[str, str, str, str] | None = None
    """Job, step, host and a description."""
    holder_alive: bool | None = None
    saves_ms: tuple[int, ...] = ()
    problem: str = ""
    """What ended the look early: the stage, and why."""


class Temporary(msgspec.Struct, frozen=True):
    """One place where the ranks' socket may be."""

    path: str
    is_first: bool
    problem: str = ""
    """Why it cannot be used, "" if it can."""
    is_open: bool = False
    """Others may rename or remove what is in it: writable for all and not sticky, or somebody else's."""
    owner: str = ""


class Versions(msgspec.Struct, frozen=True):
    """What is installed where."""

    python: str
    package: str
    libraries: dict[str, str]
    training_python: str = ""
    """The `python` on PATH, where it is another one than ours."""
    training: dict[str, str] | None = None
    """What is installed in that one; None where it could not be asked."""
