"""What real supervisors of several tasks write is enough to compare their nodes' clocks by, and to put all lines in order."""

from __future__ import annotations

import itertools
import json
import signal
from datetime import datetime, timezone
from pathlib import Path

import pytest
from ckpt_supervisor.view.clocks import offsets
from ckpt_supervisor.view.merging import Merge, Seen, Sift
from ckpt_supervisor.view.reading import files, moment_ns

from tests.support.tasks_stage import step_of

MS = 1_000_000
PREEMPTED_MS = 3_000
"""So long a process may stand, on a busy machine, between what it does and the stamp of the line about it."""


def in_order(directory: Path, but_for_ms: float) -> bool:
    """Whether the merged lines are in their true order, which the one monotonic clock of this machine tells."""
    merge = Merge(Sift(), Seen(), lambda *_: None)
    times = [json.loads(raw)["mono_ms"] for _, raw in merge.lines(files(directory))]
    newest = list(itertools.accumulate(times, max))
    return all(at >= before - but_for_ms for at, before in zip(times, newest, strict=True))


def set_clock(path: Path, ahead_ms: int) -> None:
    """As if this journal had been written on another node, whose clock is so far ahead."""
    shifted = []
    for raw in path.read_text().splitlines():
        line = json.loads(raw)
        at_ns = moment_ns(line["ts"])
        assert at_ns is not None
        seconds, rest = divmod(at_ns + ahead_ms * MS, 10**9)
        stamp = f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest // 1_000:06d}Z"
        shifted.append(json.dumps({**line, "ts": stamp, "host": f"node{line['task']}"}, separators=(",", ":")))
    path.write_text("\n".join(shifted) + "\n")


@pytest.mark.parametrize("saves", [True, False])
def test_clocks_of_real_tasks_are_compared_in_both_directions(tmp_path: Path, saves: bool) -> None:
    """Their start alone is enough, without any save; true order comes back whatever the clocks were."""
    with step_of(tmp_path, 3) as step:
        step.trained()
        step[0].signal(signal.SIGTERM if saves else signal.SIGUSR2)
        if saves:
            step.codes()
        else:
            step.event("round_committed")
        kept = {path.name: path.read_bytes() for path in (step.dir / "journal").iterdir()}
        directory = step.dir
    for name, data in kept.items():
        # Without a save: as it was when all had attached.
        lines = [line + b"\n" for line in data.split(b"\n")[:-1] if saves or b'"round"' not in line]
        (directory / "journal" / name).write_bytes(b"".join(lines))
    assert offsets(files(directory)) == {}
    assert in_order(directory, PREEMPTED_MS)
    for file in files(directory):
        set_clock(file.path, {0: 0, 1: 90_000, 2: -90_000}[file.task])
    found = {task: offset for (_, task), offset in offsets(files(directory)).items()}
    assert {task: round(offset.ms / 10_000) for task, offset in found.items()} == {1: 9, 2: -9}
    for task, offset in found.items():
        assert offset.within_ms is not None
        assert abs(offset.ms - {1: 90_000, 2: -90_000}[task]) <= offset.within_ms + PREEMPTED_MS
    assert in_order(directory, PREEMPTED_MS + 2 * max(offset.within_ms or 0 for offset in found.values()))
