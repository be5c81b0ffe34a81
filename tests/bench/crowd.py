"""From a notice to the last SaveAt with 2,048 supervisors of 8 ranks each, and how that grows with their number.

Owns the coordinator, which is a real `ckpt-supervise` of a step of so many tasks, and the growth's exponent. Must not play a
task: relays.py plays all others in one more process, by real sockets with CURVE. It shares this machine's cores with the
coordinator; on a cluster each of its tasks has a core of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import relays
from tests.bench.figure import ROOT, Row
from tests.support.run import SUPERVISE, environment

RANKS = 8
SIZES = (64, 256, 512, 1_024, 2_048)
ROUNDS = 5
BAR_MS = 600.0
BAR_MB = 150.0
BAR_EXPONENT = 1.1
"""1 is linear, and the rest is noise; N log N comes to 1.17 over these sizes."""

BOUND_S = 60.0
COMMAND = ["/bin/sh", "-c", 'echo "$CKPT_SUPERVISE_SOCKET" > "$CKPT_SUPERVISE_DIR/socket"; exec /bin/sleep 1000']


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """What one number of supervisors came to."""

    tasks: int
    rounds: list[relays.Round]
    everywhere: relays.Round
    memory_mb: list[float]
    peak_mb: float
    met_ms: float

    @property
    def ms(self) -> float:
        """From the signal to the last SaveAt, the median."""
        return statistics.median(one.told for one in self.rounds)

    @property
    def cpu_ms(self) -> float:
        """Of the coordinator, the median."""
        return statistics.median(one.cpu for one in self.rounds)


def measure() -> list[Row]:
    """One coordinator for each size, several rounds with each."""
    sizes = [_of(tasks) for tasks in SIZES]
    most = sizes[-1]
    took = ", ".join(f"{one.told:.0f}" for one in most.rounds)
    asked, crowd_cpu = (statistics.median(getattr(one, part) for one in most.rounds) for part in ("asked", "crowd_cpu"))
    before, connected, attached, *later = most.memory_mb
    return [
        Row(
            f"notice to the last SaveAt, {most.tasks:,} supervisors x {RANKS}",
            most.ms,
            "ms",
            BAR_MS,
            f"median of {took}; kill(2) until all {most.tasks * RANKS:,} ranks are told, of it {asked:.0f} until all are asked; "
            f"{most.cpu_ms:.0f} ms of CPU in the coordinator, {crowd_cpu:.0f} in the process of all others",
        ),
        Row(
            "  by a signal that reaches every task",
            most.everywhere.told,
            "ms",
            None,
            "once; each of them reports it at the same moment",
        ),
        Row(
            f"coordinator's memory, {most.tasks:,} supervisors x {RANKS}",
            max(later),
            "MB",
            BAR_MB,
            f"{before:.0f} alone, {connected:.0f} with all connected, {attached:.0f} attached (after {most.met_ms:.0f} ms), "
            f"at most {most.peak_mb:.0f} in {len(later)} rounds",
        ),
        Row(
            "growth with the number of supervisors",
            exponent(SIZES, [size.ms for size in sizes]),
            "",
            BAR_EXPONENT,
            f"exponent of N, by least squares of logarithms; from the ends alone {_between_ends(sizes):.2f}, of the CPU "
            f"{exponent(SIZES, [size.cpu_ms for size in sizes]):.2f}; "
            + ", ".join(f"{size.tasks}: {size.ms:.0f} ms" for size in sizes),
        ),
    ]


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of a line through the logarithms: 1 is linear, 2 quadratic."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(ms) for ms in times]).slope


def _between_ends(sizes: Sequence[Size]) -> float:
    least, most = sizes[0], sizes[-1]
    return math.log(most.ms / least.ms) / math.log(most.tasks / least.tasks)


def _of(tasks: int) -> Size:
    with coordinator(tasks) as directory:
        argv = [sys.executable, "-m", "tests.bench.relays", str(directory), str(tasks), str(RANKS), str(ROUNDS)]
        done = subprocess.run(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, timeout=BOUND_S, check=True)
    report = json.loads(done.stdout)
    rounds = [relays.Round(*row) for row in report["rounds"]]
    everywhere = relays.Round(*report["everywhere"])
    return Size(tasks, rounds, everywhere, report["memory_mb"], report["peak_mb"], report["met_ms"])


@contextlib.contextmanager
def coordinator(tasks: int) -> Iterator[Path]:
    """A supervisor of task 0 of so many, and its directory; killed at the end."""
    place = Path(tempfile.mkdtemp(prefix="ckpt-bench-"))
    directory = place / "ckpt"
    try:
        with (place / "err").open("wb") as err:
            process = subprocess.Popen(
                [*SUPERVISE, "--dir", str(directory), "--interface", "127.0.0.1", "--", *COMMAND],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(step_environment(0, tasks, place)),
                preexec_fn=_more_files,  # noqa: PLW1509 - no thread of this process is at work
            )
        try:
            yield directory
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def step_environment(task: int, tasks: int, place: Path) -> dict[str, str]:
    """What srun sets for one task, on a machine without Slurm's programs."""
    return {
        "SLURM_JOB_ID": relays.JOB,
        "SLURM_STEP_ID": relays.STEP,
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "CKPT_SUPERVISE_STATE": str(place / "state"),
        "TMPDIR": str(place),
        "PATH": f"{Path(sys.executable).parent}",
    }


def _more_files() -> None:
    """A descriptor for each task, as the site's limits have to allow it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
