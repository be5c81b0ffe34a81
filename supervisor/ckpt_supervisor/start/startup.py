"""Before the command starts: which job this is, and what its command line becomes.

Pure but for the host's name and one cheap look at the directory. Must not ask Slurm.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path

from ckpt_supervisor.adapters.slurm import SlurmEnv


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Which run this is: names for the journal, the manifest and the fence."""

    name: str
    attempt: int
    step_id: str
    task: int
    slurm: SlurmEnv | None

    @property
    def tasks(self) -> int:
        """How many supervisors this step has."""
        return self.slurm.ntasks if self.slurm is not None and self.slurm.under_srun else 1


def job_of(slurm: SlurmEnv | None) -> Job:
    """The job from Slurm's environment, else one named after this host."""
    if slurm is None:
        return Job(f"local-{socket.gethostname()}", 0, "local", 0, None)
    return Job(slurm.requeue_id, slurm.restarts, slurm.step_id, slurm.procid, slurm)


def has_checkpoints(directory: Path) -> bool:
    """Whether there is any trace of a checkpoint; a cheap look that decides nothing but whether a thread is needed."""
    try:
        traces = ("step-", ".damaged-step-", ".failed-step-", ".trash-step-")
        return any(entry.name.startswith(traces) or entry.name == "latest" for entry in directory.iterdir())
    except OSError:
        return True


def explicit_value(command: Sequence[str], resume_arg: str) -> str | None:
    """What the command itself already gives the resume argument: the last value of several, None if there is none."""
    value = None
    for place, word in enumerate(command if resume_arg else ()):
        if word.startswith(f"{resume_arg}="):
            value = word.removeprefix(f"{resume_arg}=")
        elif word == resume_arg and place + 1 < len(command) and not command[place + 1].startswith("-"):
            value = command[place + 1]
    return value or None


def command_line(command: Sequence[str], resume_arg: str, path: str) -> list[str]:
    """The command with the resume argument: appended, or put in the place of the user's own value, never there twice."""
    if not resume_arg or not path:
        return list(command)
    words: list[str] = []
    rest = list(command)
    found = False
    while rest:
        word = rest.pop(0)
        if word.startswith(f"{resume_arg}="):
            found = True
            words.append(f"{resume_arg}={path}")
        elif word == resume_arg:
            found = True
            words += [word, path]
            if rest and not rest[0].startswith("-"):
                rest.pop(0)
        else:
            words.append(word)
    return words if found else [*words, resume_arg, path]
