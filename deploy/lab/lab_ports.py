"""Free TCP ports for a lab.

Owns: the choice, and a lock on each block so that two labs that start at the same time do not choose
the same block. Must not: hold anything once the daemons listen; from then on the ports speak for themselves.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import TYPE_CHECKING

from lab_conf import NODES_MAX, LabError

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = NODES_MAX + 8
FIRST, LAST = 20_000, 32_000  # below Linux's ephemeral ports (32768 and up)


def is_free(port: int) -> bool:
    """True if a daemon could listen there, on every address as Slurm does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def reserved(count: int, wanted: int | None) -> Iterator[int]:
    """Gives the first of enough free ports, and keeps other labs off them until this one listens."""
    if wanted is not None:
        taken = [port for port in range(wanted, wanted + count) if not is_free(port)]
        if taken:
            raise LabError(f"port {', '.join(map(str, taken))} is taken")
        yield wanted
        return
    blocks = list(range(FIRST, LAST, BLOCK))
    random.shuffle(blocks)
    for base in blocks:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
            try:
                # An abstract name (unix(7)): one holder at a time, gone with the process, no file left behind.
                lock.bind(f"\0slurm-lab-ports-{base}")
            except OSError:
                continue
            if all(is_free(port) for port in range(base, base + count)):
                yield base
                return
    raise LabError(f"no {count} free ports between {FIRST} and {LAST}")
