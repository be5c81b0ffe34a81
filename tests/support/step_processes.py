"""The processes of one job step as an outsider sees them: found in /proc, whoever their parents are by now.

Owns telling them from all others, by the step that their environment names or, where that is empty, by the mark on a command line
that toy_unruly.py puts there. Must not signal anybody. srun and the batch script belong to the job and not to the step.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.contention import lost_s
from tests.support.slurm_stage import PYTHON, pause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.lab_text import JobId

LOOK_S = 0.02
READ_MAX = 1 << 17
STEPD = "slurmstepd"
UNRULY_TOY = str(Path(__file__).with_name("toy_unruly.py"))


def unruly_toy(*knobs: str) -> list[str]:
    """The command line of an unruly toy that does not end by itself."""
    words = " ".join(knobs).split()
    return [PYTHON, UNRULY_TOY, "--no-torch", "--steps", "100000", "--step-ms", "20", "--log", "{log}", *words]


@dataclasses.dataclass(frozen=True)
class StepId:
    """One step of one run of a job."""

    job: JobId
    attempt: int = 0
    step: int | None = 0
    """None: every step of it."""


@dataclasses.dataclass(frozen=True)
class Process:
    """One that lives; a zombie does not."""

    pid: int
    parent: int
    session: int
    name: str
    title: str

    def __str__(self) -> str:
        return f"{self.pid} (below {self.parent}) {self.title[:100]}"


def _read(pid: int, name: str) -> str:
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(READ_MAX).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _belongs(pid: int, step: StepId, title: str) -> bool:
    mark = f"unruly:{step.job}.{step.attempt}."
    if title.startswith(mark) and (step.step is None or title.split(maxsplit=1)[0] == f"{mark}{step.step}"):
        return True
    words = _read(pid, "environ").split("\0")
    if f"SLURM_JOB_ID={step.job}" not in words:
        return False
    steps = [word for word in words if word.startswith("SLURM_STEP_ID=")]
    if not steps or step.step is not None and steps != [f"SLURM_STEP_ID={step.step}"]:
        return False
    counts = [word for word in words if word.startswith("SLURM_RESTART_COUNT=")]
    return (counts or ["SLURM_RESTART_COUNT=0"])[0] == f"SLURM_RESTART_COUNT={step.attempt}"


def alive(step: StepId) -> list[Process]:
    """Every process of this step that lives now."""
    return list(_alive(step))


def _alive(step: StepId) -> Iterator[Process]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - many times a second.
        if not entry.isdigit():
            continue
        pid = int(entry)
        head, _, tail = _read(pid, "stat").rpartition(")")
        fields = tail.split()
        if not fields or fields[0] in ("Z", "X"):
            continue
        title = _read(pid, "cmdline").replace("\0", " ").strip()
        name = head.partition("(")[2]
        if name not in (STEPD, "srun") and _belongs(pid, step, title):
            yield Process(pid, int(fields[1]), int(fields[3]), name, title)


def supervisor(step: StepId) -> int | None:
    """The task itself: what slurmstepd started; None before and after."""
    found = (process for process in _alive(step) if _read(process.parent, "comm").strip() == STEPD)
    return next((process.pid for process in found), None)


def gone_after(step: StepId, bound_s: float, what: str) -> float:
    """Seconds from now until none of them is left; fails with those that are when that takes longer. `what`: after which.

    Seconds in which the machine had more to do than it could are not counted: whoever has got SIGKILL needs a core to end.
    """
    began, began_at = time.monotonic(), time.time()
    while left := alive(step):
        over_s = time.monotonic() - began - bound_s
        if over_s > 0 and over_s > lost_s(began_at, time.time()):
            raise AssertionError(f"{step}: left after {what} and {bound_s:.1f} s: {'; '.join(map(str, left))}")
        pause(LOOK_S)
    return time.monotonic() - began
