"""`make bench`: every figure that README promises, measured on this machine and printed beside its bar.

    python -m tests.bench.bench [--only NAME ...] [--json]

Owns the order, the table and the exit status: 1 when a figure is over its bar. Must not measure: each figure has a module of its
own here. Figures are ratios or differences within one run, against a baseline that is interleaved with what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from tests.bench import (
    acknowledged,
    crowd,
    gathered,
    hook_cost,
    hook_crowded,
    inspected,
    listed,
    requeued,
    saved,
    shielded,
    started,
    storm,
    verified,
)
from tests.bench.figure import Row, busy_cores, not_measured, table

FIGURES: dict[str, Callable[[], list[Row]]] = {
    "hook": hook_cost.measure,
    "start": started.measure_start,
    "idle": started.measure_idle,
    "shield": shielded.measure,
    "signals": storm.measure,
    "acknowledged": acknowledged.measure,
    "requeue": requeued.measure,
    "crowded": hook_crowded.measure,
    "rendezvous": gathered.measure,
    "supervisors": crowd.measure,
    "verified": verified.measure,
    "saved": saved.measure,
    "listed": listed.measure,
    "inspected": inspected.measure,
}

ERROR_CHARS_MAX = 400


def main() -> int:
    """Measure what was asked for, all of it by default."""
    parser = argparse.ArgumentParser(prog="bench", description="measure the figures that README promises")
    parser.add_argument(
        "--only", action="append", choices=FIGURES, metavar="NAME", help=f"one of {', '.join(FIGURES)}; again for more"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    given = parser.parse_args()
    rows: list[Row] = []
    busy: dict[str, float] = {}
    for name in given.only or FIGURES:
        busy[name] = round(busy_cores(), 2)
        began = time.monotonic()
        print(f"bench: {name}: others keep {busy[name]} of {os.cpu_count()} cores busy", file=sys.stderr, flush=True)
        try:
            rows += FIGURES[name]()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            rows.append(not_measured(name, " ".join(str(error).split())[:ERROR_CHARS_MAX]))
        print(f"bench: {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if given.json:
        figures = [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows]
        print(json.dumps({"python": platform.python_version(), "cores": os.cpu_count(), "busy_cores": busy, "figures": figures}))
    else:
        print(table(rows))
    return any(row.verdict == "over" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
