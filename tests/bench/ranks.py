"""N ranks in lock-step below one supervisor, without torch: `ranks.py RANKS STEP_MS`.

Owns their pace: every rank does step n at the same moment, as ranks do that a collective joins, and waits in C in between, as
they do for a GPU. Their save is a few bytes. Must not outlive the process that started them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import ckpt_client as ckpt

_never = threading.Event()


def main() -> int:
    """Start the ranks and wait for their end. Forked before anything is attached, so that each one starts at once."""
    ranks, step_ms = int(sys.argv[1]), float(sys.argv[2])
    parent, began = os.getpid(), time.monotonic()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            train(rank, ranks, began, step_ms / 1_000, parent)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def train(rank: int, ranks: int, began: float, step_s: float, parent: int) -> None:
    """One rank, until it is told to leave."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))

    def save(directory: Path, step: int) -> Path:
        path = directory / f"rank-{rank}.txt"
        path.write_text(f"{step}\n")
        return path

    hook = ckpt.attach(save)
    n = 0
    while os.getppid() == parent:
        n += 1
        hook.step(n)
        _never.wait(max(0.0, began + n * step_s - time.monotonic()))
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
