"""The socket to the ranks on this node: a ROUTER on an ipc path that only this user can reach.

Owns the socket, its directory, and who may be believed: a peer's name is its pid, and a word that claims another one is garbage.
Garbage is counted, dropped and told once per peer; nothing that arrives here can raise past this module.

Two things keep other users out, either would do: the directory has mode 0700, and libzmq asks the kernel who has connected
(SO_PEERCRED, unix(7)) and drops a connection of another uid before it reads from it, once for each connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import zmq
from ckpt_client import wire

from ckpt_supervisor.adapters.garbage import Complaints, Garbage, readable

__all__ = ["Garbage", "NoPlace", "Transport"]

PATH_BYTES_MAX = 107
"""A Unix socket's path has to fit into sun_path with its NUL (unix(7): 108 bytes)."""

WORDS_PER_TURN_MAX = 1_000
"""Most words taken in one turn of the loop, so that signals are never kept waiting by a flood."""


def places(env: Mapping[str, str]) -> list[str]:
    """Where the socket may be, the best first; "" for what is not set."""
    # Not XDG_RUNTIME_DIR before them: containers rarely see it, and it is removed when the user's last session ends.
    return [env.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp", env.get("XDG_RUNTIME_DIR", "")]  # noqa: S108 - mkdtemp inside


class NoPlace(Exception):
    """No directory could hold the socket; the message names those that were tried."""


class Transport:
    """Use with `with`; the constructor opens nothing."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._complaints = Complaints()
        self.endpoint = ""

    def __enter__(self) -> Transport:
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.MAXMSGSIZE, wire.FRAME_BYTES_MAX)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        with contextlib.suppress(zmq.ZMQError):  # a libzmq without it (its Linux builds have it): then the directory alone
            self.socket.set(zmq.IPC_FILTER_UID, os.geteuid())
        tried = []
        for place in filter(None, self._places):
            problem = self._bind_in(place)
            if not problem:
                return self
            tried.append(f"{place} ({problem})")
        self._context.destroy(linger=0)
        raise NoPlace(f"no place for the socket: {', '.join(tried)}; set TMPDIR to a short path on a local disk")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    @property
    def garbage_count(self) -> int:
        """Frames so far that were no words."""
        return self._complaints.count

    def _bind_in(self, place: str) -> str:
        """Bind in a new 0700 directory below `place`; what is in the way, or ""."""
        try:
            # Absolute, since the command may change its directory.
            directory = Path(tempfile.mkdtemp(prefix="ckpt-", dir=Path(place).absolute()))
        except OSError as error:
            return error.strerror or str(error)
        path = directory / "s"
        lock = -1
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            problem = _unfit(path) or _close_to_others(lock)
            if not problem:
                # For as long as this process lives: whoever sweeps up (start/stale.py) can tell it from one that was killed, also
                # between bind and listen, when a socket refuses connections.
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.socket.bind(f"ipc://{path}")
        except (zmq.ZMQError, OSError) as error:
            problem = error.strerror or str(error)
        if problem:
            shutil.rmtree(directory, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
        else:
            self._directory, self._lock = directory, lock
            self.endpoint = f"ipc://{path}"
        return problem

    def send(self, pid: int, word: wire.ToRank) -> None:
        """Send one word; a rank that is not connected misses it, as every word may be lost."""
        try:
            self.socket.send_multipart([str(pid).encode(), wire.encode(word)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def receive(self) -> Iterator[wire.Said | Garbage]:
        """The words that are here, at most WORDS_PER_TURN_MAX of them."""
        for _ in range(WORDS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            peer = readable(frames[0])
            try:
                if len(frames) != 2:
                    raise wire.DecodeError(f"{len(frames)} frames instead of 2")
                word = wire.decode_from_rank(frames[1])
                if str(word.who.pid) != peer:
                    raise wire.DecodeError(f"claims to be process {word.who.pid}")
            except wire.DecodeError as error:
                yield self._complaints.about(peer, str(error))
                continue
            yield word


def _unfit(path: Path) -> str:
    """Why ZeroMQ cannot bind to this path, or "": it takes text, as UTF-8, and puts it into sun_path."""
    name = os.fsencode(path)
    if len(name) > PATH_BYTES_MAX:
        return f"a path longer than {PATH_BYTES_MAX} bytes"
    return "" if name == str(path).encode(errors="replace") else "a path that is no UTF-8"


def _close_to_others(fd: int) -> str:
    """Make sure that a new directory is this user's alone; why it is not, or "". Some file systems give all the same mode."""
    if os.fstat(fd).st_mode & 0o777 != 0o700:
        os.fchmod(fd, 0o700)
    seen = os.fstat(fd)
    if seen.st_uid != os.geteuid():
        return f"a new directory there belongs to uid {seen.st_uid}"
    return "" if seen.st_mode & 0o777 == 0o700 else f"a new directory there has mode {seen.st_mode & 0o777:04o}"
