"""From a signal to "every rank has acknowledged": 8 ranks below one real supervisor, hundreds of saves on request.

Owns the reading of the clock: from just before kill(2) in this process to the supervisor's own time in its journal for "agreed",
which is after the last rank's word has come and was counted. That time is in whole milliseconds, cut; 1 ms is added, so what is
printed is too high rather than too low. Must not disturb: while ranks answer this process sleeps.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.figure import ROOT, Row, pause, percentile
from tests.support.run import Run, eventually, supervised

RANKS = 8
STEP_MS = 10.0
ROUNDS = 300
ROUNDS_S = 40.0
"""No new round is begun after so long."""

BETWEEN_S = (0.03, 0.08)
"""Between a commit and the next signal: older checkpoints are deleted meanwhile, and the ranks catch up with their pace."""

ROUND_S = 20.0
LOOK_S = 0.03
BAR_MS = 20.0


def measure() -> list[Row]:
    """The time for each of many rounds, at random moments within a step."""
    command = [sys.executable, "-m", "tests.bench.ranks", str(RANKS), str(STEP_MS)]
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place,
        supervised(Path(place), command, env={"PYTHONPATH": str(ROOT)}) as run,
    ):
        eventually(lambda: len(run.events("rank_hello")) == RANKS, f"{RANKS} ranks")
        rounds = list(_rounds(run))
        run.signal(signal.SIGTERM)
        run.code()
    taken = [ms for ms, _ in rounds]
    handled = [ms for _, ms in rounds]
    how = f"{len(taken)} rounds; p50 {percentile(taken, 0.5):.1f}, worst {max(taken):.1f} ms; kill(2) to `agreed` in the journal"
    return [
        Row(f"signal to all of {RANKS} ranks' acks, p99", percentile(taken, 0.99), "ms", BAR_MS, how),
        Row(
            "  of it until the supervisor has the signal, p99",
            percentile(handled, 0.99),
            "ms",
            None,
            f"p50 {percentile(handled, 0.5):.1f} ms",
        ),
    ]


def _rounds(run: Run) -> Iterator[tuple[float, float]]:
    """One save after the other: ms until all had acknowledged, and until the supervisor knew of the signal."""
    chance = random.Random(8)
    tail = Tail(run.journals()[-1])
    end = time.monotonic() + ROUNDS_S
    for _ in range(ROUNDS):
        if time.monotonic() > end:
            return
        pause(chance.uniform(*BETWEEN_S))
        sent_ms = time.monotonic_ns() / 1e6
        run.signal(signal.SIGUSR2)
        seen: dict[str, dict[str, Any]] = {}
        give_up = time.monotonic() + ROUND_S
        while not {"round_committed", "round_given_up"} & set(seen):
            if time.monotonic() > give_up:
                raise AssertionError(f"no end of a round within {ROUND_S} s:{run.story()}")
            pause(LOOK_S)
            seen |= {line["event"]: line for line in tail.fresh()}
        if "round_given_up" in seen:
            raise AssertionError(f"a round was given up: {seen['round_given_up']}")
        yield seen["agreed"]["mono_ms"] + 1 - sent_ms, seen["signal"]["mono_ms"] + 1 - sent_ms


class Tail:
    """The lines of a journal as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size

    def fresh(self) -> list[dict[str, Any]]:
        """Those that came since the last look, whole ones only."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return [json.loads(line) for line in data.splitlines() if line.strip()]
