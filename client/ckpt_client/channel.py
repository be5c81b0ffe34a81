"""The socket to the supervisor and the thread that listens on it.

Owns everything of zmq in the client: one context and one DEALER of its own, used by one thread at a time, and the supervisor's
pidfd. Must not know what words mean: it drives `protocol.Rank` under the shared lock, and the training thread only leaves words
in the outbox and rings. Nothing here may keep a process from ending: every wait has a bound, and the thread is a daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import zmq

from ckpt_client import above, wire
from ckpt_client.progress import Pace
from ckpt_client.protocol import Rank

HELLO_EVERY_MS = 500
"""Hello is repeated this often until it is answered."""

HELLO_MAX_MS = 10_000
"""A supervisor that has not answered by then is not waited for."""

GOODBYE_MS = 200
"""The last words get this long to reach the kernel when the process ends."""

JOIN_SECONDS_MAX = 0.5
"""The listener gets this long to close at the end of the process; it is a daemon thread, so nothing waits longer."""

FLUSH_SECONDS_MAX = 0.1
KERNEL_SECONDS = 0.005
"""The library's own thread has a word in the kernel within 0.2 ms."""

WAKE_BYTES = 4_096
"""Read at once from the pipe that wakes the listener; a pipe and not an eventfd, which some Pythons lack."""

WORDS_PER_TURN_MAX = 1_000
"""Most words taken from the socket before the outbox is looked at."""

# A signal that a thread raises by its own fault must stay deliverable, or faulthandler would never speak.
_OWN_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def now_ms() -> int:
    """Monotonic clock in whole milliseconds."""
    return time.monotonic_ns() // 1_000_000


def tell(text: str) -> None:
    """One line on stderr. A closed stderr is no reason to end a training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"ckpt: {text}\n")
        sys.stderr.flush()


class Line:
    """An open connection to the supervisor. Made by `open_line`; used by one thread at a time."""

    __slots__ = ("_closed", "bell_fd", "context", "dealer", "monitor", "supervisor_fd", "wake_fd")

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        dealer: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        fds: tuple[int, int, int],
    ) -> None:
        self.context = context
        self.dealer = dealer
        self.monitor = monitor
        self.wake_fd, self.bell_fd, self.supervisor_fd = fds
        self._closed = False

    def send(self, word: wire.Said) -> None:
        """Send without waiting. A word that does not fit is lost, as any word may be."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send(wire.encode(word), zmq.NOBLOCK)

    def receive(self) -> Iterator[wire.ToRank]:
        """The words that have come. Anything else is dropped."""
        for _ in range(WORDS_PER_TURN_MAX):
            try:
                frames = self.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with contextlib.suppress(wire.DecodeError):
                yield wire.decode_to_rank(frames[-1])

    def wait(self, timeout_ms: int) -> bool:
        """Wait until something has come, somebody rang, or the time is over. False: the supervisor is gone."""
        poller = zmq.Poller()
        poller.register(self.dealer, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        poller.register(self.wake_fd, zmq.POLLIN)
        if self.supervisor_fd >= 0:
            poller.register(self.supervisor_fd, zmq.POLLIN)
        came = dict(poller.poll(timeout_ms))
        if self.wake_fd in came:
            os.read(self.wake_fd, WAKE_BYTES)
        return self.monitor not in came and self.supervisor_fd not in came

    def close(self, linger_ms: int) -> None:
        """Close all of it. Takes `linger_ms` at most."""
        if self._closed:
            return
        self._closed = True
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)
        self.dealer.close(linger=linger_ms)
        self.context.term()
        os.close(self.wake_fd)
        os.close(self.bell_fd)
        if self.supervisor_fd >= 0:
            os.close(self.supervisor_fd)


def open_line(endpoint: str, own_pid: int, supervisor_pid: int) -> Line:
    """Connect to the supervisor as `own_pid`. Raises zmq.ZMQError for an endpoint that cannot be one."""
    with contextlib.ExitStack() as undo:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, str(own_pid).encode())
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(endpoint)
        undo.pop_all()
    wake_fd, bell_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return Line(context, dealer, monitor, (wake_fd, bell_fd, _watch(supervisor_pid)))


def greet(line: Line, hello: wire.Hello, timeout_ms: int) -> wire.Welcome | wire.Refused | None:
    """Say Hello until it is answered. None: no answer in time, or the supervisor is gone."""
    end_ms = now_ms() + timeout_ms
    next_ms = now_ms()
    while (now := now_ms()) < end_ms:
        if now >= next_ms:
            line.send(hello)
            next_ms = now + HELLO_EVERY_MS
        alive = line.wait(min(next_ms, end_ms) - now)
        for word in line.receive():
            if isinstance(word, wire.Welcome | wire.Refused):
                return word
        if not alive:
            return None
    return None


class Listener:
    """The thread that hears, answers and repeats while the training thread is elsewhere, deep in C for example."""

    def __init__(self, line: Line, rank: Rank, changed: threading.Condition) -> None:
        self._line = line
        self._rank = rank
        self._changed = changed
        self._closing = False
        self._open = True
        self._flushing = False
        self._pace: Pace | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt-listener", daemon=True)

    def tell_progress(self, pace: Pace) -> None:
        """Say now and then where training is. The first time from here, before `start`: it may stand still from then on."""
        self._pace = pace
        self._line.send(pace.word(now_ms()))

    def start(self) -> None:
        """Start the thread with all signals blocked: the main thread has to get them, at once."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def ring(self) -> None:
        """Have the outbox looked at now. Called by the training thread, under the lock."""
        if self._open:
            with contextlib.suppress(BlockingIOError):  # Full: it is awake already.
                os.write(self._line.bell_fd, b"\0")

    def flush(self) -> None:
        """Wait, within a bound, until what there is to say is on its way: the process may end with os._exit()."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._flushing = self._open
            self.ring()
            self._changed.wait_for(lambda: not self._flushing or not self._open, FLUSH_SECONDS_MAX)
            self._changed.wait(KERNEL_SECONDS)

    def close(self) -> None:
        """Send what is left to say, close, and wait for that within a bound."""
        with self._changed:
            self._closing = True
            self.ring()
        self._thread.join(JOIN_SECONDS_MAX)

    def forked(self) -> None:
        """In a forked child, which has the descriptors but no right to use them."""
        self._open = False

    def _run(self) -> None:
        linger_ms = 0
        try:
            while self._turn():
                pass
            linger_ms = GOODBYE_MS if self._closing else 0
        finally:
            with self._changed:
                self._open = False  # The descriptor's number may be somebody else's soon.
                self._rank.supervisor_died()
                self._changed.notify_all()
            self._line.close(linger_ms)

    def _turn(self) -> bool:
        """One wait and what follows from it. False: it was the last one."""
        with self._changed:
            timeout_ms = 0 if self._rank.outbox else self._rank.quiet_ms(now_ms())
            if self._pace is not None:
                timeout_ms = min(timeout_ms, self._pace.every_ms)
        alive = self._line.wait(timeout_ms)
        with self._changed:
            now = now_ms()
            for word in self._line.receive():
                self._rank.hear(word, now)
                # Only then: a parked thread that is woken rings, and the two would keep each other awake.
                self._changed.notify_all()
            self._rank.tick(now)
            answers: list[wire.Said] = [*self._rank.take_outbox()]
            progress = None if self._pace is None else self._pace.look(now)
        for answer in answers if progress is None else (*answers, progress):
            self._line.send(answer)
        if self._flushing:
            with self._changed:
                self._flushing = bool(self._rank.outbox)
                self._changed.notify_all()
        return alive and not self._closing


def _watch(pid: int) -> int:
    """A pidfd of the supervisor, -1 where there is none to be had.

    Only of an ancestor: the number may be another process's by now. 0 stands for one in another pid namespace: there the closed
    socket has to tell (EVENT_DISCONNECTED), which it does everywhere.
    """
    if not above.is_ancestor(pid):
        return -1
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # Pythons built on old systems (conda's) lack it.
        return -1
