"""What the shield costs with many processes below it, and how much longer a program waits for helpers that it ends.

Owns the two programs that are supervised, and the same one without a supervisor as the baseline. Must not end anything by itself
but what it has started. Run as a script it is one of them: `shielded.py many COUNT` or `shielded.py ending`.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.figure import ROOT, Row, pause
from tests.bench.started import cpu_seconds
from tests.support.run import environment, supervised

PROCESSES = 200
HELPERS = 8
ROUNDS = 5
SETTLE_S = 4.0
LASTS_S = 20.0
BAR_SHARE_PERCENT = 0.5
BAR_BEYOND_MS = 1_000.0
ENV = {"PYTHONPATH": str(ROOT)}
SELF = (sys.executable, "-m", "tests.bench.shielded")


def measure() -> list[Row]:
    """Both figures."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        share, how = _share_percent(Path(place))
        ours, bare = [], []
        for number in range(ROUNDS):
            bare.append(_ended_ms(Path(place) / f"bare-{number}", is_supervised=False))
            ours.append(_ended_ms(Path(place) / f"ours-{number}", is_supervised=True))
    beyond = [one - other for one, other in zip(ours, bare, strict=True)]
    told = f"median of {ROUNDS} rounds; worst {max(beyond):.0f} ms; without a supervisor {statistics.median(bare):.0f} ms"
    return [
        Row(f"CPU with {PROCESSES} processes below", share, "%", BAR_SHARE_PERCENT, how),
        Row(f"{HELPERS} helpers ended one by one, beyond the same without", statistics.median(beyond), "ms", BAR_BEYOND_MS, told),
    ]


def _share_percent(place: Path) -> tuple[float, str]:
    """Of a core, all threads of a supervisor with so many processes below it and nothing to do."""
    with supervised(place / "many", [*SELF, "many", str(PROCESSES)], env=environment(ENV)) as run:
        run.said("ready")
        pause(SETTLE_S)
        before, began = cpu_seconds(run.pid), time.monotonic()
        pause(LASTS_S)
        spent, lasted = cpu_seconds(run.pid) - before, time.monotonic() - began
        run.signal(signal.SIGTERM)
        run.code()
    return 100 * spent / lasted, f"{1000 * spent:.1f} ms of CPU in {lasted:.0f} s, all threads"


def _ended_ms(place: Path, is_supervised: bool) -> float:
    """How long the program took for ending its helpers."""
    argv = [*SELF, "ending"]
    if not is_supervised:
        done = subprocess.run(argv, env=environment(ENV), cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        return float(done.stdout.split()[2])
    with supervised(place, argv, env=environment(ENV)) as run:
        said = run.said(r"it took ([0-9.]+) ms")
        run.code()
    return float(said[1])


def many(count: int) -> None:
    """A program with so many helpers that do nothing."""
    helpers = [subprocess.Popen(["sleep", "1000"]) for _ in range(count)]
    print("ready", flush=True)
    try:
        signal.pause()
    finally:
        for helper in helpers:
            helper.kill()


def ending() -> None:
    """A program that ends its helpers, each before the next."""
    helpers = [subprocess.Popen(["sleep", "1000"]) for _ in range(HELPERS)]
    pause(2.0)  # The supervisor has started up by then, and looks at its usual pace.
    began = time.monotonic()
    for helper in helpers:
        helper.terminate()
        helper.wait()
    print(f"it took {1_000 * (time.monotonic() - began):.1f} ms", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        many(int(sys.argv[2])) if sys.argv[1] == "many" else ending()
