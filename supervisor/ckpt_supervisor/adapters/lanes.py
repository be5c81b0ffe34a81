"""Worker threads for everything that touches a disk or Slurm: one lane each, so that a slow one holds up nothing else.

Owns the threads and the way their results come back to the loop. Must not know what the work is. The threads are daemons: work
that hangs on a dead file system never keeps the process from ending. Signals are blocked in them, so that the kernel gives them
to the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

RESULTS_PER_TURN_MAX = 100

QUEUED_MAX = 10_000
"""More than that waits in no lane; only the journal's can come near it, and loses its newest lines then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """The work raised: a fault of ours, told and survived."""

    what: str
    error: BaseException


class Lanes:
    """Use with `with`. `post(lane, what, work, done)` runs `work()` in the lane's thread; `done(result)` runs in the loop's."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._queues: dict[str, queue.SimpleQueue[tuple[str, Callable[[], Any], Callable[[Any], None], bool]]] = {
            name: queue.SimpleQueue() for name in names
        }
        self._results: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._started: set[str] = set()

    def __enter__(self) -> Lanes:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The write end stays open: a thread that is still at work may yet write to it.
        self._read_end.close()

    def fileno(self) -> int:
        """Readable when a result is here."""
        return self._read_end.fileno()

    def room(self, lane: str) -> bool:
        """Whether a lane that a dead disk holds up may take more."""
        return self._queues[lane].qsize() < QUEUED_MAX

    def post(self, lane: str, what: str, work: Callable[[], Any], done: Callable[[Any], None], *, wakes: bool = True) -> None:
        """Queue one piece of work. Not `wakes`: its result can wait until the loop wakes for something else."""
        self._queues[lane].put((what, work, done, wakes))
        if lane not in self._started:
            self._started.add(lane)
            threading.Thread(target=self._run, args=(lane,), name=f"ckpt-{lane}", daemon=True).start()

    @property
    def has_results(self) -> bool:
        """Whether there is something to deliver, also if nothing has woken the loop for it."""
        return not self._results.empty()

    def deliver(self) -> None:
        """Run `done` for the results that are here."""
        with contextlib.suppress(BlockingIOError):
            self._read_end.recv(4096)
        for _ in range(RESULTS_PER_TURN_MAX):
            try:
                done, result = self._results.get_nowait()
            except queue.Empty:
                return
            done(result)
        self._wake()

    def _run(self, lane: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            what, work, done, wakes = self._queues[lane].get()
            result: Any
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - a fault in one piece of work must not end the lane: it is told as data.
                result = Broken(what, error)
            self._results.put((done, result))
            if wakes:
                self._wake()

    def _wake(self) -> None:
        try:
            self._write_end.send(b"\0")
        except (BlockingIOError, OSError):
            return  # Full means that the loop is awake already.
