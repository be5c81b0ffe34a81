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
from typing import Any

from tests.bench import relays
from tests.bench.figure import ROOT, Row
from tests.support.run import SUPERVISE, environment

RANKS = 8
SIZES = (64, 256, 512, 1_024, 2_048)
ROUNDS = 5
BAR_MS = 600.0
BAR_MB = 150.0
BAR_EXPONENT = 1.0
BOUND_S = 60.0
COMMAND = ["/bin/sh", "-c", 'echo "$CKPT_SUPERVISE_SOCKET" > "$CKPT_SUPERVISE_DIR/socket"; exec /bin/sleep 1000']


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """What one number of supervisors came to."""

    tasks: int
    ms: float
    """From the signal to the last SaveAt, the median."""
    rounds: list[relays.Round]
    report: dict[str, Any]


def measure() -> list[Row]:
    """One coordinator for each size, several rounds with each."""
    sizes = [_of(tasks) for tasks in SIZES]
    most = sizes[-1]
    took = [told.told for told in most.rounds]
    asked, cpu, crowd_cpu = (statistics.median(values) for values in zip(*((r.asked, r.cpu, r.crowd_cpu) for r in most.rounds)))
    how = (
        f"median of {ROUNDS}: {', '.join(f'{ms:.0f}' for ms in took)}; kill(2) until the last of {most.tasks * RANKS:,} ranks has been "
        f"told; {asked:.0f} ms of it until all are asked; all other supervisors in one more process on the same cores"
    )
    return [
        Row(f"notice to the last SaveAt, {most.tasks:,} supervisors x {RANKS}", most.ms, "ms", BAR_MS, how),
        Row(
            "  told by a signal to every task",
            most.report["everywhere"][1],
            "ms",
            None,
            "once; each supervisor reports it at the same moment",
        ),
        Row(
            f"coordinator's memory with {most.tasks:,} supervisors",
            most.report["rss_mb"],
            "MB",
            BAR_MB,
            f"resident after {ROUNDS} rounds; {most.report['peak_mb']:.0f} MB at most; attaching all took {most.report['met_ms']:.0f} ms",
        ),
        Row(
            "growth with the number of supervisors",
            exponent([size.tasks for size in sizes], [size.ms for size in sizes]),
            "",
            BAR_EXPONENT,
            f"exponent of N, least squares of logarithms; {_growth(sizes[0], most):.2f} from the ends alone; "
            + ", ".join(f"{size.tasks}: {size.ms:.0f} ms" for size in sizes),
        ),
    ]


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of a line through the logarithms: 1 is linear, 2 quadratic."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(ms) for ms in times]).slope


def _growth(least: Size, most: Size) -> float:
    return math.log(most.ms / least.ms) / math.log(most.tasks / least.tasks)


def _of(tasks: int) -> Size:
    with coordinator(tasks) as directory:
        argv = [sys.executable, "-m", "tests.bench.relays", str(directory), str(tasks), str(RANKS), str(ROUNDS)]
        done = subprocess.run(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, timeout=BOUND_S, check=True)
    report = json.loads(done.stdout)
    rounds = [relays.Round(*row) for row in report["rounds"]]
    return Size(tasks, statistics.median(one.told for one in rounds), rounds, report)


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
