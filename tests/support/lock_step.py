"""Ranks in lock-step without torch: each waits for all others, as in a collective that has no time-out.

Owns one meeting place for each start of the ranks, kept by rank 0 on this machine (all nodes of a lab are this machine) and found
through a file. Must not help anybody out: where a rank is missing, has died, or waits for something else, the others wait for
ever, as NCCL's do. Ranks that are at different steps are told so, and raise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

APART = "apart\n"
POLL_S = 0.02
_never = threading.Event()


class LockStep:
    """One rank's way to the meeting place."""

    def __init__(self, place: str, environment: Mapping[str, str]) -> None:
        """`place` is a path that all ranks of all attempts name; each start of the ranks has a file of its own beside it."""
        rank = int(environment.get("RANK", environment.get("SLURM_PROCID", "0")))
        world = int(environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1")))
        attempt, restart = (environment.get(f"{name}_COUNT") or "0" for name in ("SLURM_RESTART", "TORCHELASTIC_RESTART"))
        file = Path(f"{place}.{attempt}.{restart}.{environment.get('CKPT_SUPERVISE_RESTART', '0')}")
        if rank == 0:
            server = socket.create_server(("127.0.0.1", 0), backlog=world)
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(str(server.getsockname()[1]))
            fresh.rename(file)
            threading.Thread(target=keep, args=(server, world), daemon=True).start()
        while not file.exists():
            _never.wait(POLL_S)
        self.link = socket.create_connection(("127.0.0.1", int(file.read_text())))
        self.answers = self.link.makefile("r")
        self.link.sendall(f"{rank}\n".encode())

    def meet(self, what: str) -> None:
        """Return when all ranks have come to this point. Raises if one of them has come to another."""
        answer = ""
        # Rank 0 has died: with words of ours that it had not read the kernel resets the connection, and ends it without them.
        with contextlib.suppress(ConnectionError):
            self.link.sendall(f"{what}\n".encode())
            answer = self.answers.readline()
        if not answer:
            _never.wait()
        if answer == APART:
            raise RuntimeError(f"ranks are not in lock-step at {what!r}")


def keep(server: socket.socket, world: int) -> None:
    """Answer all ranks once all have said where they are."""
    links: dict[int, tuple[socket.socket, TextIO]] = {}
    while len(links) < world:
        link, _ = server.accept()
        words = link.makefile("r")
        links[int(words.readline())] = link, words
    while True:
        said = {words.readline() for _, words in links.values()}
        if "" in said:
            _never.wait()  # A rank is gone: nobody hears any more.
        answer = said.pop() if len(said) == 1 else APART
        for rank in sorted(links, reverse=True):  # This process may end once its own rank has its answer.
            links[rank][0].sendall(answer.encode())


def place_of(path: str) -> LockStep:
    """The meeting place of the ranks that this process belongs to."""
    return LockStep(path, os.environ)
