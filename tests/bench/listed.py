"""Many checkpoints in one directory: how long the list of them takes, and the choice of the newest intact one.

Owns a directory of small checkpoints, laid out without the store's fsyncs: what is measured only reads. Must not count the
reading of bytes as a cost of looking: the choice is measured beside the verification of what it has to read.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash
from ckpt_supervisor import store

from tests.bench.figure import Row
from tests.support.run import environment

CHECKPOINTS = 1_000
DAMAGED = 10
FILES = {"state.pt": 20_000, "rank-00000.pt": 5_000, "rank-00001.pt": 5_000}
ROUNDS = 5
BAR_LIST_S = 0.5
BAR_CHOICE_S = 1.0


def measure() -> list[Row]:
    """`ckptctl ls` as a whole process, and the choice of the newest intact one with damaged ones in front."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        root = Path(place)
        steps = [1_000 * number for number in range(1, CHECKPOINTS + 1)]
        for step in steps:
            _lay_out(root, step)
        listed = [_timed(lambda: _list(root)) for _ in range(ROUNDS)]
        bare = [_timed(_bare) for _ in range(ROUNDS)]
        damaged = [root / store.step_name(step) for step in steps[-DAMAGED:]]
        for path in damaged:
            _flip_last_byte(path / "state.pt")
        chosen = [_timed(lambda: _choose(root, steps[-DAMAGED - 1])) for _ in range(ROUNDS)]
        needed = [*damaged, root / store.step_name(steps[-DAMAGED - 1])]
        read = [_timed(lambda: _read(needed)) for _ in range(ROUNDS)]
    beyond = statistics.median(one - other for one, other in zip(chosen, read, strict=True))
    return [
        Row(
            f"ckptctl ls, {CHECKPOINTS:,} checkpoints",
            statistics.median(listed),
            "s",
            BAR_LIST_S,
            f"whole process; {1000 * statistics.median(bare):.0f} ms of it is a Python that imports the store",
        ),
        Row(
            f"choice of the newest intact one, {DAMAGED} damaged in front of {CHECKPOINTS - DAMAGED}",
            max(0.0, beyond),
            "s",
            BAR_CHOICE_S,
            f"beyond the verification of those {DAMAGED + 1}, {1000 * statistics.median(read):.0f} ms here",
        ),
    ]


def _lay_out(root: Path, step: int) -> None:
    """A committed checkpoint as the store leaves it."""
    path = root / store.step_name(step)
    path.mkdir()
    entries = []
    for name, size in FILES.items():
        data = step.to_bytes(8, "little") * (size // 8)
        (path / name).write_bytes(data)
        entries.append(store.FileEntry(name, len(data), xxhash.xxh3_128_hexdigest(data), 0))
    manifest = store.Manifest(
        step=step,
        world_size=2,
        ranks=(0, 1),
        job="1",
        attempt=0,
        epoch=1,
        cause="periodic",
        created_at="2026-01-31T12:00:00.000000+00:00",
        verified="full",
        files=tuple(entries),
    )
    (path / store.MANIFEST).write_bytes(store.encode_manifest(manifest))


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _list(root: Path) -> None:
    argv = [sys.executable, "-m", "ckpt_supervisor.ctl", "ls", "--dir", str(root)]
    done = subprocess.run(argv, env=environment(), capture_output=True, check=True, timeout=60)
    assert done.stdout.count(b"\n") >= CHECKPOINTS, done.stdout[-200:]


def _bare() -> None:
    argv = [sys.executable, "-c", "import ckpt_supervisor.store"]
    subprocess.run(argv, env=environment(), check=True, timeout=60)


def _choose(root: Path, step: int) -> None:
    choice = store.newest_intact(root)
    assert choice.chosen is not None and choice.chosen.step == step, choice
    assert len(choice.passed_over) == DAMAGED


def _read(paths: list[Path]) -> None:
    for path in paths:
        store.verify_checkpoint(path)
