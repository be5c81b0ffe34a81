"""What a long run's journals cost to look at: a million lines of 64 tasks and 50 attempts, 3,200 files.

Owns the made-up run, and one row for each figure of each command. The files are in the page cache, as those of a run that has
just ended are: a file server adds its own time for each file that is opened.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.figure import Row
from tests.support import many_lines
from tests.support.run import environment

LINES = 1_000_000
TASKS = 64
ATTEMPTS = 50
ROUNDS = 5
TIMEOUT_S = 300
BAR_FIRST_LINE_S = 0.3
BAR_PEAK_MB = 300
BAR_TIMELINE_S = 3.0
BAR_REPORT_S = 10.0
BAR_REPORT_MB = 7.0
"""Of the page: it is opened over slow lines, too."""

LOOKED = f"{LINES:,} lines, {TASKS} tasks, {ATTEMPTS} attempts"


def measure() -> list[Row]:
    """Each command as a whole process."""
    with many() as root:
        return [*_log(root), *_timeline(root), *_report(root)]


@contextmanager
def many() -> Iterator[Path]:
    """The run. Raises nothing but what a full disk does."""
    place = Path(tempfile.mkdtemp(prefix="ckpt-bench-"))
    try:
        many_lines.write(place, LINES, TASKS, ATTEMPTS)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _log(root: Path) -> list[Row]:
    first = [first_line_s(root) for _ in range(ROUNDS)]
    bare = [_bare_s() for _ in range(ROUNDS)]
    took_s, peak_mb, lines = whole(root, "log")
    debug_s, debug_mb, all_lines = whole(root, "log", "--level", "debug", "--json")
    start = f"whole process; {1_000 * statistics.median(bare):.0f} ms of it is `ckptctl` with nothing to look at"
    return [
        Row(f"ckptctl log, first of {LOOKED}", statistics.median(first), "s", BAR_FIRST_LINE_S, start),
        Row("ckptctl log, all of it", took_s, "s", None, f"{lines:,} lines shown"),
        Row("ckptctl log, peak memory", peak_mb, "MB", BAR_PEAK_MB, "resident, of the whole process"),
        Row(
            "ckptctl log --level debug --json, all of it",
            debug_s,
            "s",
            None,
            f"{all_lines:,} lines shown, {debug_mb:.0f} MB at most",
        ),
    ]


def _timeline(root: Path) -> list[Row]:
    took_s, peak_mb, _ = whole(root, "timeline")
    why_s, why_mb, _ = whole(root, "why", many_lines.JOB, "--no-slurm")
    return [
        Row("ckptctl timeline, of the same", took_s, "s", BAR_TIMELINE_S, "whole process"),
        Row("ckptctl timeline, peak memory", peak_mb, "MB", BAR_PEAK_MB, "resident, of the whole process"),
        Row("ckptctl why, of the same", why_s, "s", None, f"{why_mb:.0f} MB at most"),
    ]


def _report(root: Path) -> list[Row]:
    page = root / "report.html"
    took_s, peak_mb, _ = whole(root, "report", "-o", str(page))
    return [
        Row("ckptctl report, of the same", took_s, "s", BAR_REPORT_S, "whole process"),
        Row("ckptctl report, peak memory", peak_mb, "MB", BAR_PEAK_MB, "resident, of the whole process"),
        Row("ckptctl report, the page", page.stat().st_size / 1e6, "MB", BAR_REPORT_MB, "4.8 MB of it is plotly.js"),
    ]


def first_line_s(root: Path, *words: str) -> float:
    """From the command to the first line on its stdout."""
    began = time.perf_counter()
    with subprocess.Popen(
        _argv(root, "log", *words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
        process.kill()
    assert line.endswith(b"\n"), line
    return took


def whole(root: Path, *words: str) -> tuple[float, float, int]:
    """A command to its end: seconds, peak of resident memory in MB, lines of output."""
    began = time.perf_counter()
    with subprocess.Popen(_argv(root, *words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert process.stdout is not None
        lines = sum(block.count(b"\n") for block in iter(lambda: process.stdout.read(1 << 20), b""))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (words, process.returncode)
    return time.perf_counter() - began, usage.ru_maxrss / 1_024, lines


def _bare_s() -> float:
    began = time.perf_counter()
    argv = _argv(Path("/nonexistent"), "log")
    subprocess.run(argv, env=environment(), capture_output=True, check=False, timeout=TIMEOUT_S)
    return time.perf_counter() - began


def _argv(root: Path, command: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "ckpt_supervisor.ctl", command, *words, "--dir", str(root)]
