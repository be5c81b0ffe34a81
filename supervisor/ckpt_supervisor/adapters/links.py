"""The sockets between the supervisors of one job step: the coordinator's hub, and the spoke of every other task.

Owns the sockets, the step's keys, and who is believed. Must not decide what a word means, and nothing that arrives here can raise
past this module. The network between nodes is everybody's: all of it is CURVE (RFC 26), encrypted and authenticated both ways,
with keys made anew at every start, so what was recorded of one session is worth nothing in another one. A peer without the step's
client key gets no word in: either libzmq drops it, or the hub's answer to ZAP (RFC 27) does. Within the step a peer's name is its
task, and a word that claims another one is garbage. Words are MessagePack of known types, of bounded size.

ZAP is answered here and not by pyzmq's Authenticator: that one is a coroutine, and does not tell who was turned away.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

import zmq
from ckpt_client import wire
from zmq.utils import z85

from ckpt_supervisor.adapters.closings import Closings
from ckpt_supervisor.adapters.garbage import Complaints, Garbage, readable
from ckpt_supervisor.adapters.invitation import Invitation, addresses, endpoint_of, split_endpoint
from ckpt_supervisor.core import between

WORDS_PER_TURN_MAX = 1_000
"""Most words, or requests to be let in, taken in one turn of the loop, so that signals are never kept waiting by a flood."""

HANDSHAKE_MS = 10_000
"""A connection that is no peer by then is dropped. The loop answers ZAP, so it may be late by as much."""

BACKLOG = 4_096
"""All tasks of a step come at the same moment. The kernel takes no more than net.core.somaxconn."""

PING_MS, SILENCE_MS = 5_000, 15_000
"""A node that went away without a word is noticed after that silence, on both sides, and a spoke connects anew. TCP alone takes
up to 15 minutes while something is unacknowledged (tcp(7), tcp_retries2)."""

WAITING_MAX = 100
"""Most words that wait in a spoke for a coordinator that is away or does not listen."""

RECONNECT_MS, RECONNECT_MS_MAX = 100, 1_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 60, 10, 3

_ZAP = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"ckpt-step"
_ZAP_FRAMES = 9
"""Sender, empty, version, request, domain, address, name, mechanism, and CURVE's one credential: the public key."""

_SIGNATURE_BYTES = 10
"""What a ZeroMQ peer says first, unasked (RFC 23): 0xff, eight bytes, 0x7f."""


_NOBODY = b"nobody"

_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class NoLink(Exception):
    """No socket for the other tasks could be had; the message says why."""


class Hub:
    """The coordinator's side. Use with `with`; the constructor opens nothing. The loop polls `socket` and `zap_socket`."""

    def __init__(self, interface: str = "") -> None:
        self._interface = interface
        self._complaints = Complaints()
        self._denied = Complaints()
        self._names: dict[int, bytes] = {}
        """Routing id of each task's supervisor, with a part of its own: a second one cannot take the way of the first."""
        self._tasks: dict[int, int] = {}
        """Task of each connection, by the descriptor that libzmq tells with a frame (ZMQ_SRCFD) and with the end of it."""
        self._descriptors: dict[int, int] = {}
        """The other way round: each task's newest one."""

    def __enter__(self) -> Hub:
        """Raises NoLink, or ValueError for an interface that is not here."""
        local = [split_endpoint(endpoint)[0] for endpoint in addresses(self._interface, 1)] if self._interface else []
        try:
            self._server_key, server_secret = zmq.curve_keypair()
            self._client_key, self._client_secret = zmq.curve_keypair()
        except zmq.ZMQError as error:
            raise NoLink(f"the installed libzmq has no CURVE encryption ({error})") from error
        self._nonce = secrets.token_hex(16)
        self._context = zmq.Context(io_threads=1)
        try:
            self.zap_socket = self._context.socket(zmq.ROUTER)
            self.zap_socket.set(zmq.LINGER, 0)
            self.zap_socket.bind(_ZAP)  # before the other one: without it nobody is let in
            self.socket = self._context.socket(zmq.ROUTER)
            _tune(self.socket)
            self.socket.set(zmq.ROUTER_HANDOVER, 1)
            self.socket.set(zmq.BACKLOG, BACKLOG)
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, server_secret)
            self.socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # a ZAP that cannot be asked means no, not yes
            self.closings = Closings(self.socket).__enter__()
            self._endpoints = self._bind(local)
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(linger=0)
            raise NoLink(f"cannot listen for the other tasks: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(0)

    def close(self, linger_ms: int) -> None:
        """Close; what was sent and is not out yet gets that long. A second call does nothing."""
        self.closings.close()
        self._context.destroy(linger=linger_ms)

    def _bind(self, local: list[str]) -> tuple[str, ...]:
        """Listen on these addresses, each at a port of its own, or on everything at one port; the endpoints to be told."""
        if not local:
            self.socket.set(zmq.IPV6, 1)  # both kinds, or IPv4 alone where there is no IPv6
            self.socket.bind("tcp://*:*")
            self.port = _port_of(self.socket)
            return addresses("", self.port)
        endpoints = []
        for address in local:
            self.socket.set(zmq.IPV6, int(":" in address))
            self.socket.bind(endpoint_of(address, 0))
            endpoints.append(endpoint_of(address, _port_of(self.socket)))
        self.port = split_endpoint(endpoints[0])[1]
        return tuple(endpoints)

    @property
    def garbage_count(self) -> int:
        """Frames so far that were no words."""
        return self._complaints.count

    @property
    def denied_count(self) -> int:
        """Connections so far that were turned away for their key."""
        return self._denied.count

    def invite(self, job: str, attempt: int, step_id: str, epoch: int) -> Invitation:
        """What the other tasks have to know, this step's secret included."""
        return Invitation(
            job=job,
            attempt=attempt,
            step_id=step_id,
            epoch=epoch,
            host=os.uname().nodename,
            pid=os.getpid(),
            addresses=self._endpoints,
            server_key=self._server_key.decode(),
            client_public=self._client_key.decode(),
            client_secret=self._client_secret.decode(),
            nonce=self._nonce,
        )

    def send(self, task: int, word: between.Down) -> None:
        """Send one word; a task that is not connected misses it, as every word may be lost."""
        self.broadcast((task,), word)

    def broadcast(self, tasks: Iterable[int], word: between.Down) -> None:
        """Send one word to these tasks."""
        frame, send = between.encode(word), self.socket.send
        for task in tasks:
            try:
                # Not send_multipart: it costs as much again, and this is said to thousands.
                send(self._names.get(task, _NOBODY), _MORE)
                send(frame, _NOW)
            except zmq.ZMQError:
                continue

    def receive(self) -> Iterator[between.Up | Garbage]:
        """The words that are here, at most WORDS_PER_TURN_MAX of them."""
        for _ in range(WORDS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            name = frames[0].bytes
            try:
                if len(frames) != 2:
                    raise wire.DecodeError(f"{len(frames)} frames instead of 2")
                word = between.decode_up(frames[1].bytes)
                if _task_of(name) != word.task:
                    raise wire.DecodeError(f"claims to be task {word.task}")
                if self._names.setdefault(word.task, name) != name:
                    self._turn_away(name, word.task)
                    raise wire.DecodeError(f"is a second supervisor of task {word.task}")
            except wire.DecodeError as error:
                yield self._complaints.about(readable(name), str(error))
                continue
            if isinstance(word, between.Report):
                self._connected(word.task, int(frames[1].get(zmq.SRCFD)))
            yield word

    def _connected(self, task: int, descriptor: int) -> None:
        """By its newest connection alone: the end of one before that, which was read late, is not the task's."""
        before = self._descriptors.get(task, descriptor)
        if before != descriptor and self._tasks.get(before) == task:
            del self._tasks[before]
        self._descriptors[task] = descriptor
        self._tasks[descriptor] = task

    def _turn_away(self, name: bytes, task: int) -> None:
        """Only this process is told: the task's own supervisor, which has another name, goes on."""
        word = between.Turned(f"task {task} has a supervisor already")
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([name, between.encode(word)], flags=zmq.NOBLOCK)

    def closed(self) -> list[int]:
        """Tasks whose connections were closed since the last call. Asked before `receive`, as descriptors are used again."""
        tasks = [self._tasks.pop(descriptor) for descriptor in self.closings.receive() if descriptor in self._tasks]
        for task in tasks:
            self._names.pop(task, None)  # The same process, or one in its place, may come back.
        return tasks

    def strangers(self) -> list[Garbage]:
        """Whoever did not get through the handshake since the last call: told once, by what the first of them did wrong."""
        failed = self.closings.failures()
        return [self._denied.about("somebody on the port", f"failed the handshake ({failed} connections)")] if failed else []

    def answer_zap(self) -> list[Garbage]:
        """Let in those who hold the step's client key; the others, by address. At most WORDS_PER_TURN_MAX in one call."""
        turned_away = []
        for _ in range(WORDS_PER_TURN_MAX):
            try:
                request = self.zap_socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            known = len(request) == _ZAP_FRAMES and request[7] == b"CURVE" and request[8] == z85.decode(self._client_key)
            answer = (b"200", b"OK", b"step") if known else (b"400", b"not this step's key", b"")
            if not known:
                address = request[5].decode(errors="replace").removeprefix("::ffff:") if len(request) > 5 else "?"
                turned_away.append(self._denied.about(address, "does not have this step's key"))
            try:
                self.zap_socket.send_multipart([*request[:2], b"1.0", *request[3:4], *answer, b""], flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # it has gone meanwhile
        return turned_away


class Spoke:
    """The side of every other task. Use with `with`; the constructor opens nothing. The loop polls `socket`.

    Nothing is sent before `connect`. While the coordinator is away the first WAITING_MAX words wait for it and later ones are
    dropped: all words are states or may come late. ZeroMQ's own way to let none wait, IMMEDIATE, is not taken: at a disconnection
    it throws away what has arrived and is unread (measured with libzmq 4.3.5), which would be the coordinator's last word.
    """

    def __init__(self, invitation: Invitation, task: int, process: str = "") -> None:
        """`process`: what tells this supervisor from another one of the same task; whoever connects again says it again."""
        self._invitation = invitation
        self._task = task
        self._process = process or secrets.token_hex(8)
        self._complaints = Complaints()
        self.endpoint = ""

    def __enter__(self) -> Spoke:
        """Raises NoLink."""
        self._context = zmq.Context(io_threads=1)
        try:
            self.socket = self._context.socket(zmq.DEALER)
            self.closings = Closings(self.socket).__enter__()
            _tune(self.socket)
            self.socket.set(zmq.ROUTING_ID, f"task-{self._task}-{self._process}".encode())
            self.socket.set(zmq.SNDHWM, WAITING_MAX)
            self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            self.socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
            self.socket.set(zmq.CURVE_SERVERKEY, self._invitation.server_key.encode())
            self.socket.set(zmq.CURVE_PUBLICKEY, self._invitation.client_public.encode())
            self.socket.set(zmq.CURVE_SECRETKEY, self._invitation.client_secret.encode())
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise NoLink(f"no socket to the coordinator: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(0)

    def close(self, linger_ms: int) -> None:
        """Close; what was sent and is not out yet gets that long. A second call does nothing."""
        self.closings.close()
        self._context.destroy(linger=linger_ms)

    def closed(self) -> bool:
        """Whether the connection was closed since the last call."""
        return bool(self.closings.receive())

    @property
    def garbage_count(self) -> int:
        """Frames so far that were no words."""
        return self._complaints.count

    def connect(self, endpoint: str) -> None:
        """Speak to this endpoint and to no other one. Raises ValueError for what is none.

        A connection that breaks is made anew by libzmq, one that was refused for its key, or was answered by something else,
        never is: after a silence look what is `reachable` and call this again, with the same endpoint if need be.
        """
        split_endpoint(endpoint)
        if self.endpoint:
            with contextlib.suppress(zmq.ZMQError):  # given up already
                self.socket.disconnect(self.endpoint)
        self.socket.set(zmq.IPV6, int("[" in endpoint))
        self.socket.connect(endpoint)
        self.endpoint = endpoint

    def send(self, word: between.Up) -> None:
        """Send one word; it is lost while the coordinator is not connected, as every word may be."""
        try:
            self.socket.send(between.encode(word), flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def receive(self) -> Iterator[between.Down | Garbage]:
        """The words that are here, at most WORDS_PER_TURN_MAX of them."""
        for _ in range(WORDS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                if len(frames) != 1:
                    raise wire.DecodeError(f"{len(frames)} frames instead of 1")
                word = between.decode_down(frames[0])
            except wire.DecodeError as error:
                yield self._complaints.about(self.endpoint, str(error))
                continue
            yield word


def reachable(invitation: Invitation, timeout_s: float) -> str | None:
    """The first endpoint at which something answers as ZeroMQ does; None if none does. Blocks: for a worker thread.

    Each gets an equal share of the time that is left. That it is the coordinator only CURVE will tell.
    """
    end = time.monotonic() + timeout_s
    for place, endpoint in enumerate(invitation.addresses):
        share_s = (end - time.monotonic()) / (len(invitation.addresses) - place)
        if share_s > 0 and _answers(split_endpoint(endpoint), share_s):
            return endpoint
    return None


def _answers(address: tuple[str, int], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    said = b""
    try:
        with socket.create_connection(address, timeout_s) as connection:
            while len(said) < _SIGNATURE_BYTES:
                connection.settimeout(max(0.001, end - time.monotonic()))
                part = connection.recv(_SIGNATURE_BYTES - len(said))
                if not part:
                    return False
                said += part
    except OSError:
        return False
    return said[0] == 0xFF and said[-1] == 0x7F


def _tune(end: zmq.Socket[bytes]) -> None:
    """What both sides set."""
    end.set(zmq.LINGER, 0)
    end.set(zmq.MAXMSGSIZE, between.FRAME_BYTES_MAX)
    end.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    end.set(zmq.HEARTBEAT_IVL, PING_MS)
    end.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    end.set(zmq.TCP_KEEPALIVE, 1)
    end.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    end.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    end.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)


def _task_of(name: bytes) -> int:
    """The task in a routing id; -1 for what is none."""
    parts = name.split(b"-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[0] == b"task" and parts[1].isdigit() and len(parts[1]) < 8 else -1


def _port_of(end: zmq.Socket[bytes]) -> int:
    return int(end.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
