"""Which connections of a socket have been closed by the other end, soon after it happens.

Owns a ZeroMQ monitor socket, which counts failed handshakes too. A process that dies has its connections closed by its kernel at
once, where silence tells of it only after seconds. Must not be believed alone: libzmq also closes a connection that has been
silent for long, and connects again by itself.
"""

from __future__ import annotations

import struct
from types import TracebackType

import zmq

FAILURES = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""What a stranger's connection ends with; one that says nothing at all is a probe (links.reachable)."""

EVENTS_PER_TURN_MAX = 10_000

_EVENT = struct.Struct("=HI")
"""First frame of a monitor's message: event and value (zmq_socket_monitor(3)); the value is the descriptor here."""


class Closings:
    """Use with `with`, before the socket is connected or bound. The loop polls `socket`."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self._failures = 0

    def __enter__(self) -> Closings:
        address = f"inproc://closings-{id(self)}"
        self._watched.monitor(address, zmq.EVENT_DISCONNECTED | FAILURES)
        self.socket = self._watched.context.socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        # No bound here: libzmq's I/O thread waits in a monitor's full pipe, and then nobody is heard at all. A thousand
        # connections of a stranger between two turns of the loop would do it.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(address)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Before the watched socket is closed. A second call does nothing."""
        if not self.socket.closed:
            self._watched.monitor(None, 0)
            self.socket.close(linger=0)

    def failures(self) -> int:
        """How many connections have failed their handshake since the last call."""
        count, self._failures = self._failures, 0
        return count

    def receive(self) -> list[int]:
        """The descriptors of the connections that were closed since the last call."""
        closed = []
        for _ in range(EVENTS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            event, value = _EVENT.unpack(frames[0])
            if event & FAILURES:
                self._failures += 1
            else:
                closed.append(value)
        return closed
