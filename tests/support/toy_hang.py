"""TOY: a trainer that stands still from a step on, in the way that its first argument names.

Owns the ways: `wait` (a lock that nobody releases), `loop` (Python code without an end), `gil` (a regular expression that takes
for ever, in C code that keeps the interpreter), `collective` (gloo: rank 1 does not take part). Any other word stands for none.
Must not do anything else: it saves nothing.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path

import ckpt_client as ckpt

STANDS_AT = 40
STEP_S = 0.05
_never = threading.Event()


def lost_in_c() -> None:
    """Nothing of Python runs until it is killed: the engine tries 2**60 ways."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def lost_in_python() -> None:
    """The listener has its turns."""
    while not _never.is_set():
        pass


def lost_in_a_collective(rank: int) -> None:
    """Rank 1 is elsewhere, and the others wait for it."""
    import torch
    import torch.distributed as dist

    dist.barrier()  # All come to a stand at the same moment, however far apart a busy machine has brought them.
    if rank == 1:
        _never.wait()
    dist.all_reduce(torch.ones(1))


def save(_directory: Path, _step: int) -> None:
    """Nobody asks for it."""


def main() -> None:
    """Train, and stand still."""
    how = sys.argv[1]
    rank = int(os.environ.get("RANK", "0"))
    if how == "collective":
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    hook = ckpt.attach(save)
    for n in range(1, 10_000):
        _never.wait(STEP_S)
        if n == STANDS_AT:
            stand(how, rank)
        hook.step(n)
        os.write(1, f"step {n} rank {rank}\n".encode())


def stand(how: str, rank: int) -> None:
    """Stand still."""
    if how == "wait":
        _never.wait()
    elif how == "loop":
        lost_in_python()
    elif how == "gil":
        lost_in_c()
    elif how == "collective":
        lost_in_a_collective(rank)


if __name__ == "__main__":
    main()
