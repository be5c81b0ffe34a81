"""The sockets between the supervisors of a step, and everybody else: nobody without the step's key is heard or disturbs.

Other users of the host, strangers with wrong keys, a proxy that records and replays, silent connections and floods of random
bytes stand for what else there is on a cluster's network.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.invitation import Invitation, endpoint_of, split_endpoint
from ckpt_supervisor.adapters.links import Hub, Spoke
from ckpt_supervisor.core import between

from tests.support.links_stage import (
    BOUND_S,
    STAND,
    connections_to,
    hear,
    invite,
    joined,
    pump,
    pump_until,
    report,
    say_until_heard,
    stranger,
)

DISTURBED_S = 2.0
"""How long random bytes go on."""


def test_nobody_is_let_in_before_the_loop_has_answered() -> None:
    """A right key is not enough while ZAP is unanswered: an answer that does not come is no."""
    with Hub() as hub, stranger(invite(hub), b"task-1-x") as dealer:
        dealer.send(between.encode(report(1)))
        assert hub.zap_socket.poll(BOUND_S * 1000)
        assert hub.socket.poll(200) == 0
        assert pump_until(hub, bool) == [report(1)]


def test_a_client_with_the_wrong_key_is_denied_and_told_once() -> None:
    """It knows the server's public key and has pairs of its own; it comes again and again, and is told by its address."""
    with Hub() as hub, joined(hub, 1) as good:
        invitation = invite(hub)
        for number in range(3):
            with stranger(invitation, b"task-1-x", zmq.curve_keypair()) as dealer:
                dealer.send(between.encode(report(1, 666)))
                address = split_endpoint(invitation.addresses[-1])[0]
                assert pump_until(hub, bool) == [Garbage(address, "does not have this step's key", number == 0)]
        assert (hub.denied_count, hub.garbage_count) == (3, 0)
        hub.send(1, STAND)
        assert hear(good) == [STAND]


NOBODY_PROGRAM = """
import os, sys
import zmq
from zmq.utils.monitor import recv_monitor_message
endpoint, how, server_key = sys.argv[1:]
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.set(zmq.LINGER, 0)
dealer.set(zmq.IPV6, 1)
dealer.set(zmq.ROUTING_ID, b"task-1-x")
if how == "PLAIN":
    dealer.set(zmq.PLAIN_USERNAME, b"root")
    dealer.set(zmq.PLAIN_PASSWORD, b"x")
if how in ("CURVE", "GUESS"):
    public, secret = zmq.curve_keypair()
    dealer.set(zmq.CURVE_PUBLICKEY, public)
    dealer.set(zmq.CURVE_SECRETKEY, secret)
    dealer.set(zmq.CURVE_SERVERKEY, server_key.encode() if how == "CURVE" else zmq.curve_keypair()[0])
monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
dealer.connect(endpoint)
print("in" if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else "refused", flush=True)
"""


@pytest.mark.parametrize("how", ["NULL", "PLAIN", "GUESS", "CURVE"])
def test_another_user_of_this_host_without_the_step_key_does_not_get_in(how: str) -> None:
    """With no security, a password, or a guessed server key libzmq drops him; knowing the server's public key he is told of."""
    assert os.geteuid() == 0, "becoming another user takes root"
    with Hub() as hub, joined(hub, 1) as good:
        invitation = invite(hub)
        argv = [sys.executable, "-c", NOBODY_PROGRAM, invitation.addresses[-1], how, invitation.server_key]
        found: list[between.Up | Garbage] = []
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as other:
            end = time.monotonic() + BOUND_S
            while other.poll() is None:
                assert time.monotonic() < end
                found += pump(hub, 20)
            assert other.stdout is not None
            assert other.stdout.read() == "refused\n"
        assert [item.first for item in found if isinstance(item, Garbage)][:1] == ([True] if how == "CURVE" else [])
        assert all(isinstance(item, Garbage) for item in found)
        hub.send(1, STAND)
        assert hear(good) == [STAND]


def record(hub: Hub, invitation: Invitation) -> list[bytes]:
    """What a spoke's side of a real session sent, byte by byte, as a listener on the wire saw it."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def copy(source: socket.socket, target: socket.socket, kept: list[bytes] | None) -> None:
            with contextlib.suppress(OSError):
                while part := source.recv(65_536):
                    if kept is not None:
                        kept.append(part)
                    target.sendall(part)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            client = server.accept()[0]
            with client, socket.create_connection(("127.0.0.1", hub.port)) as upstream:
                back = threading.Thread(target=copy, args=(upstream, client, None))
                back.start()
                copy(client, upstream, sent)
                back.join(BOUND_S)

        proxy = threading.Thread(target=serve)
        proxy.start()
        with Spoke(invitation, 1) as spoke:
            spoke.connect(endpoint_of("127.0.0.1", server.getsockname()[1]))
            say_until_heard(hub, spoke, report(1, 4711))
        proxy.join(BOUND_S)
    return sent


def test_a_recorded_session_is_worth_nothing() -> None:
    """Replayed as it was, part by part and all at once: no word comes of it, and the task that it was of is not disturbed."""
    with Hub() as hub:
        invitation = invite(hub)
        sent = record(hub, invitation)
        assert sum(map(len, sent)) > 64 + 200, "greeting, hello, initiate and words"
        assert b"4711" not in b"".join(sent)
        pump(hub, 200)
        with joined(hub, 1) as good:
            for parts in (sent, [b"".join(sent)], [bytes([byte]) for byte in b"".join(sent)]):
                assert replay(hub, parts) == []
            hub.send(1, STAND)
            assert hear(good) == [STAND]
            assert connections_to(hub.port) == 1
        assert (hub.garbage_count, hub.denied_count) == (0, 0)


def replay(hub: Hub, parts: list[bytes]) -> list[between.Up | Garbage]:
    """Send these bytes until the hub closes the connection; what came of it."""
    found: list[between.Up | Garbage] = []
    with socket.create_connection(("127.0.0.1", hub.port)) as connection, contextlib.suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            found += pump(hub, 0)
        connection.settimeout(0.05)
        end = time.monotonic() + BOUND_S
        while True:
            assert time.monotonic() < end, "the connection stays open"
            found += pump(hub, 0)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(65_536):
                    break
    return found


def test_random_bytes_on_the_port_disturb_nobody() -> None:
    """For a while, after none or some of a true greeting: the others' words and answers come as before, no garbage is counted."""
    chance = random.Random(11)
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with Hub() as hub, joined(hub, 1) as good:
        end, rounds = time.monotonic() + DISTURBED_S, 0
        while time.monotonic() < end or rounds <= 20:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", hub.port), 5) as connection:
                connection.sendall(greeting[: chance.choice([0, 0, 10, 12, 64])] + chance.randbytes(chance.randrange(5_000)))
            rounds += 1
            assert say_until_heard(hub, good, report(1, rounds + 1)) == []
            hub.send(1, STAND)
            assert hear(good) == [STAND]
        assert (hub.garbage_count, hub.denied_count, connections_to(hub.port)) == (0, 0, 1)


def test_connections_that_say_nothing_do_not_keep_others_out() -> None:
    """Two hundred that were opened and are kept, before anybody else comes."""
    with Hub() as hub, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", hub.port), 5))
        with joined(hub, 1) as good:
            hub.send(1, STAND)
            assert hear(good) == [STAND]


def test_a_spoke_with_a_stale_invitation_gets_nowhere() -> None:
    """A lower epoch's keys are no use at the port of the new one, and the new one's own peers notice nothing."""
    with Hub() as old:
        stale = invite(old)
    with Hub() as hub, joined(hub, 1) as good, Spoke(msgspec.structs.replace(stale, addresses=invite(hub).addresses), 2) as lost:
        lost.connect(invite(hub).addresses[-1])
        for number in range(10):
            lost.send(report(2))
            assert say_until_heard(hub, good, report(1, 10 + number)) == []
        assert list(lost.receive()) == []


def test_every_start_has_keys_and_a_nonce_of_its_own() -> None:
    """Nothing of one session is of use in another one; within one, every invitation holds the same keys."""
    with Hub() as one, Hub() as two:
        first, second = invite(one), invite(two)
        assert invite(one) == first
        for field in ("server_key", "client_public", "client_secret", "nonce", "addresses"):
            assert getattr(first, field) != getattr(second, field)
        assert (first.host, first.pid) == (os.uname().nodename, os.getpid())
        assert msgspec.json.decode(msgspec.json.encode(first), type=Invitation) == first
