"""Runs a save again and again under strace, each time with another of its system calls going wrong.

Owns: how the N-th call of a kind is made the one that fails. `store_faults.py CALL COUNT DIR` forks COUNT savers, number n on
DIR/n; strace was told to make call number AT of each process fail (it counts for each process), so saver n makes AT - n calls
that do nothing before it begins. One start of strace and of Python does for all, where one for each would take minutes.
Must not: judge. What a saver was told is written to DIR/n.said by pwrite, which no fault is planted into.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ckpt_supervisor.store import CommitFailed, Committed, discard, load_readers, partial_name

from tests.support import store_saver

AT = {"write": 100, "fsync": 100, "close": 500, "mkdir": 100, "rename": 100}
"""More than the start of an interpreter makes of them."""

NO_FD = 1 << 20
STEP = 2
EPOCH = 1
NOTHING: dict[str, Callable[[], object]] = {
    "write": functools.partial(os.write, NO_FD, b""),
    "fsync": functools.partial(os.fsync, NO_FD),
    "close": functools.partial(os.close, NO_FD),
    "mkdir": functools.partial(os.mkdir, ""),
    "rename": functools.partial(os.rename, "", ""),
}


def fault(call: str, error: str, lasting: bool) -> str:
    """What strace is to be told."""
    return f"{call}:error={error}:when={AT[call]}{'+' if lasting else ''}"


def name_of(error: OSError) -> str:
    """ENOSPC for 28."""
    return errno.errorcode.get(error.errno or 0, "")


def told(root: Path) -> str:
    """One save as a coordinator and its rank do it; what came of it, and of the clearing up."""
    try:
        outcome = store_saver.save(root, STEP, EPOCH)
    except OSError as error:
        said = f"not written|{name_of(error)}|{error}"
    else:
        if isinstance(outcome, Committed):
            return f"Committed||{outcome.latest_problem}|"
        assert isinstance(outcome, CommitFailed), outcome
        said = f"CommitFailed|{outcome.errno_name}|{outcome.reason}"
    return f"{said}|{discard(root, partial_name(STEP, EPOCH, 1))}"


def main() -> None:
    """Fork the savers, one after the other."""
    call, count, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    load_readers()  # As a run does; or each saver would make calls of its own for it.
    for n in range(1, count + 1):
        said = os.open(place / f"{n}.said", os.O_WRONLY | os.O_CREAT)
        pid = os.fork()
        if pid == 0:
            for _ in range(AT[call] - n):
                with contextlib.suppress(OSError):
                    NOTHING[call]()
            os.pwrite(said, told(place / str(n)).encode(), 0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        os.close(said)
        assert status == 0, f"saver {n} has ended with {status}"


if __name__ == "__main__":
    main()
