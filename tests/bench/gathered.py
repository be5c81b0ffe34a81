"""From the start of the last of 8 tasks until all 8 commands run: the rendezvous.

Owns the tasks of one step, started without Slurm by what srun sets, all at one moment on this machine. All times are of one
clock: the start just before fork here, `command_started` in each task's journal. Must not hide that these tasks share few cores,
which nodes of their own would not: what they need of CPU is printed, and bare Pythons in the same number beside it.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt_supervisor.adapters.journal import read_lines

from tests.bench.crowd import step_environment
from tests.bench.figure import Row
from tests.support.run import SUPERVISE, environment

TASKS = 8
ROUNDS = 5
BAR_MS = 1_000.0
BOUND_S = 30.0
WORDS = 'for one in /proc/$PPID/task/*/schedstat; do read cpu_ns rest < $one; echo $cpu_ns; done > "$CPUS/$SLURM_PROCID"'
COMMAND = ("/bin/sh", "-c", f"{WORDS}; exec /bin/sleep 0.5")
"""What the threads of its supervisor have had of CPU by its start; and long enough for each journal to be open."""

BARE = (sys.executable, "-c", "import os, time; os.write(1, str(time.monotonic_ns()).encode())")


def measure() -> list[Row]:
    """Several steps, and bare Pythons in turns with them."""
    ours: list[float] = []
    bare: list[float] = []
    cpu: list[float] = []
    for _ in range(ROUNDS + 1):
        bare.append(_bare())
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
            took_ms, cpu_ms = _step(Path(place))
            ours.append(took_ms)
            cpu.append(cpu_ms)
    del bare[0], ours[0], cpu[0]  # The first round reads files that later ones find in memory.
    how = (
        f"median of {', '.join(f'{ms:.0f}' for ms in ours)}; {statistics.median(cpu):.0f} ms of CPU for each until then; "
        f"{TASKS} bare Pythons at once have all begun after {statistics.median(bare):.0f}"
    )
    return [Row(f"start of the last of {TASKS} tasks until all commands run", statistics.median(ours), "ms", BAR_MS, how)]


def _step(place: Path) -> tuple[float, float]:
    """Milliseconds until the last command runs, and what a supervisor has had of CPU when its command starts, in the mean."""
    cpus = place / "cpus"
    cpus.mkdir()
    argv = [*SUPERVISE, "--dir", str(place / "ckpt"), "--", *COMMAND]
    envs = [step_environment(task, TASKS, place) | {"CPUS": str(cpus)} for task in range(TASKS)]
    with _started(argv, envs) as (tasks, began_ms):
        codes = [task.wait(BOUND_S) for task in tasks]
    ran_ms = [
        line["mono_ms"]
        for path in (place / "ckpt" / "journal").glob("*.jsonl")
        for line in read_lines(path)
        if line["event"] == "command_started"
    ]
    if any(codes) or len(ran_ms) != TASKS:
        raise AssertionError(f"exit statuses {codes}, and {len(ran_ms)} commands were started")
    cpu_ms = sum(int(word) for path in cpus.iterdir() for word in path.read_text().split()) / TASKS / 1e6
    return max(ran_ms) + 1 - began_ms, cpu_ms  # Those times are cut to whole milliseconds.


def _bare() -> float:
    with _started(BARE, [{}] * TASKS) as (tasks, began_ms):
        return max(int(task.communicate(timeout=BOUND_S)[0]) for task in tasks) / 1e6 - began_ms


@contextlib.contextmanager
def _started(argv: Sequence[str], envs: Sequence[dict[str, str]]) -> Iterator[tuple[list[subprocess.Popen[bytes]], float]]:
    """All of them, and when the last one was started; who still runs in the end is killed."""
    tasks: list[subprocess.Popen[bytes]] = []
    began_ns = 0
    try:
        for env in envs:
            began_ns = time.monotonic_ns()
            tasks.append(
                subprocess.Popen(
                    argv, env=environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            )
        yield tasks, began_ns / 1e6
    finally:
        for task in tasks:
            task.kill()
            task.wait()
            if task.stdout is not None:
                task.stdout.close()
