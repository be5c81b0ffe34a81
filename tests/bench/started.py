"""What the supervisor costs when nothing happens: before the command starts, in memory, and in CPU while it waits.

Owns the two baselines: a bare Python that executes the same command, for the start; nothing, for memory and CPU, which are read
from the kernel. Must not touch the supervisor while it idles.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.figure import Row, pause
from tests.support.run import SUPERVISE, environment, supervised, toy

COMMAND = ("/bin/sh", "-c", "read cpu_ns rest < /proc/$PPID/schedstat; date +%s%N; echo $cpu_ns")
"""When the command runs, and how much CPU its parent has had until then."""

BARE = (sys.executable, "-c", f"import os; os.execv({COMMAND[0]!r}, {list(COMMAND)!r})")
ROUNDS = 25
BAR_START_MS = 150.0
BAR_MEMORY_MB = 40.0
BAR_IDLE_PERCENT = 0.1
IDLE_S = 24.0
SETTLE_S = 3.0


def measure_start() -> list[Row]:
    """Start to the command's first word, under supervision and from a bare Python, in turns."""
    bare: list[float] = []
    ours: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        for number in range(ROUNDS + 1):
            bare.append(_first_words(BARE)[0])
            ms, cpu_ms = _first_words([*_program(), "--dir", f"{place}/{number}", "--", *COMMAND])
            ours.append(ms)
            cpu.append(cpu_ms)
    del bare[0], ours[0], cpu[0]  # The first round reads files that later ones find in memory.
    beyond = [one - other for one, other in zip(ours, bare, strict=True)]
    first_word, at_work, alone = (statistics.median(values) for values in (ours, cpu, bare))
    how = (
        f"median of {ROUNDS} rounds; of minima {min(ours) - min(bare):.0f}; first word after {first_word:.0f}, "
        f"of it {at_work:.0f} at work and the rest waiting for disk or a core; bare Python {alone:.0f} ms"
    )
    return [Row("start of the command, beyond bare Python", statistics.median(beyond), "ms", BAR_START_MS, how)]


def measure_idle() -> list[Row]:
    """Memory after the start, and CPU over some time with one attached rank that asks for nothing."""
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place,
        supervised(Path(place), toy("--mode", "attach", "--steps", 1_000_000, "--step-ms", 500)) as run,
    ):
        run.event("rank_hello")
        pause(SETTLE_S)
        started_kb = _resident_kb(run.pid)
        before, began = cpu_seconds(run.pid), time.monotonic()
        pause(IDLE_S)
        spent, lasted = cpu_seconds(run.pid) - before, time.monotonic() - began
        run.signal(signal.SIGUSR2)
        run.event("round_committed")
        saved_kb = _resident_kb(run.pid)
        run.signal(signal.SIGTERM)
        run.code()
    return [
        Row(
            "resident memory after the start",
            started_kb * 1024 / 1e6,
            "MB",
            BAR_MEMORY_MB,
            f"journal open, one rank; {saved_kb * 1024 / 1e6:.1f} MB after a save",
        ),
        Row(
            "idle CPU",
            100 * spent / lasted,
            "%",
            BAR_IDLE_PERCENT,
            f"{1000 * spent:.1f} ms of CPU in {lasted:.0f} s, all threads",
        ),
    ]


def _program() -> list[str]:
    """The installed command, as users start it."""
    installed = Path(sys.executable).with_name("ckpt-supervise")
    return [str(installed)] if installed.exists() else list(SUPERVISE)


def _first_words(argv: Sequence[str]) -> tuple[float, float]:
    """Milliseconds until the command's first word, and of CPU that its parent had had by then."""
    began_ns = time.time_ns()
    done = subprocess.run(argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
    ran_ns, cpu_ns = (int(word) for word in done.stdout.split())
    return (ran_ns - began_ns) / 1e6, cpu_ns / 1e6


def cpu_seconds(pid: int) -> float:
    """CPU that all threads of a process have had, to the nanosecond; /proc/PID/stat counts in ticks of 10 ms."""
    # The clock's id as clock_getcpuclockid(3) makes it: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of glibc.
    return time.clock_gettime(~pid << 3 | 2)


def _resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory: it is gone")
