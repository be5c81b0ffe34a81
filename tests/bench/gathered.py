"""From the start of the last of 8 tasks until all 8 commands run: the rendezvous.

Owns the tasks of one step, started without Slurm by what srun sets, all at one moment on this machine. All times are of one
clock: the start just before fork here, `command_started` in each task's journal. Must not hide that these tasks share few cores,
which nodes of their own would not: what they need of CPU is printed, and bare Pythons in the same number beside it.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ckpt_supervisor.journal import read_lines

from tests.bench.crowd import step_environment
from tests.bench.figure import Row
from tests.support.run import SUPERVISE, environment

TASKS = 8
ROUNDS = 5
BAR_MS = 1_000.0
BOUND_S = 30.0
COMMAND = ("/bin/sleep", "0.5")
"""Long enough for each journal to be open, and short."""

BARE = (sys.executable, "-c", "import os, time; os.write(1, str(time.monotonic_ns()).encode())")


def measure() -> list[Row]:
    """Several steps, and bare Pythons in turns with them."""
    ours: list[float] = []
    bare: list[float] = []
    cpu: list[float] = []
    for _ in range(ROUNDS + 1):
        bare.append(_bare())
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
            before = _children_cpu_ms()
            ours.append(_step(Path(place)))
            cpu.append((_children_cpu_ms() - before) / TASKS)
    del bare[0], ours[0], cpu[0]  # The first round reads files that later ones find in memory.
    how = (
        f"median of {', '.join(f'{ms:.0f}' for ms in ours)}; {statistics.median(cpu):.0f} ms of CPU for each to its end; "
        f"{TASKS} bare Pythons at once have all begun after {statistics.median(bare):.0f}"
    )
    return [Row(f"start of the last of {TASKS} tasks until all commands run", statistics.median(ours), "ms", BAR_MS, how)]


def _step(place: Path) -> float:
    argv = [*SUPERVISE, "--dir", str(place / "ckpt"), "--", *COMMAND]
    tasks, began_ms = _started(argv, [step_environment(task, TASKS, place) for task in range(TASKS)])
    codes = [task.wait(BOUND_S) for task in tasks]
    ran_ms = [
        line["mono_ms"]
        for path in (place / "ckpt" / "journal").glob("*.jsonl")
        for line in read_lines(path)
        if line["event"] == "command_started"
    ]
    if any(codes) or len(ran_ms) != TASKS:
        raise AssertionError(f"exit statuses {codes}, and {len(ran_ms)} commands were started")
    return max(ran_ms) + 1 - began_ms  # Those times are cut to whole milliseconds.


def _children_cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e3


def _bare() -> float:
    tasks, began_ms = _started(BARE, [{}] * TASKS)
    return max(int(task.communicate(timeout=BOUND_S)[0]) for task in tasks) / 1e6 - began_ms


def _started(argv: Sequence[str], envs: Sequence[dict[str, str]]) -> tuple[list[subprocess.Popen[bytes]], float]:
    """All of them, and when the last one was started."""
    tasks: list[subprocess.Popen[bytes]] = []
    try:
        for env in envs:
            began_ns = time.monotonic_ns()
            tasks.append(
                subprocess.Popen(
                    argv,
                    env=environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
    except OSError:
        for task in tasks:
            task.kill()
            task.wait()
        raise
    return tasks, began_ns / 1e6
