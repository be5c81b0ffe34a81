"""What it costs a save that its bytes are hashed on their way to the disk.

Owns the baseline: torch.save to a path and fsync, of the same tensors to the same disk, in turns with ours. The disk is the real
one, since beside its time the hash has to be small. Must not import torch before it is asked for.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_client.files import write_file

from tests.bench.figure import Row, not_measured

SIZE_BYTES = 1 << 30
TENSORS = 288
ROUNDS = 7
BAR = 1.05


def measure() -> list[Row]:
    """torch.save and fsync, by its own writer and through the digesting one."""
    try:
        import torch
    except ImportError:
        return [not_measured("save through the digesting writer", "torch is not installed")]
    state = {f"layer.{number}.weight": torch.rand(SIZE_BYTES // 4 // TENSORS) for number in range(TENSORS)}
    plain: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        for number in range(ROUNDS):
            sides = [(plain, _save_plainly), (ours, _save)]
            for seen, save in sides if number % 2 else reversed(sides):  # What the disk still has to do falls on both.
                seen.append(_timed(save, torch, state, Path(place) / f"{number}.pt"))
    cpu_ms = 1000 * (statistics.median(cpu for _, cpu in ours) - statistics.median(cpu for _, cpu in plain))
    ours_s, plain_s = min(ours)[0], min(plain)[0]
    ratios = sorted(one[0] / other[0] for one, other in zip(ours, plain, strict=True))
    how = (
        f"{ours_s:.2f} of {plain_s:.2f} s: the fastest of {ROUNDS} rounds each, as a shared disk takes three times as long "
        f"from one save to the next; ratio of pairs {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}; "
        f"{cpu_ms:+.0f} ms of CPU"
    )
    return [Row("save of 1 GiB through the digesting writer", ours_s / plain_s, "of torch.save and fsync", BAR, how)]


def _save_plainly(torch: Any, state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save(torch: Any, state: dict[str, Any], path: Path) -> None:
    write_file(path.parent, path.name, lambda file: torch.save(state, file), durable=True)


def _timed(
    save: Callable[[Any, dict[str, Any], Path], None], torch: Any, state: dict[str, Any], path: Path
) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of one save. The file is gone afterwards."""
    began, cpu = time.perf_counter(), time.process_time()
    save(torch, state, path)
    spent = time.perf_counter() - began, time.process_time() - cpu
    path.unlink()
    return spent
