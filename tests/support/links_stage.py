"""A hub and its spokes in one process, for tests: turns of the loop, words said until they are heard, strangers with keys."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psutil
import zmq
from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.invitation import Invitation
from ckpt_supervisor.adapters.links import Hub, Spoke
from ckpt_supervisor.core import between

BOUND_S = 60
STAND = between.Stand(epoch=5)


def report(task: int, pid: int = 1) -> between.Report:
    """A task's word, told from its others by the pid in it."""
    return between.Report(task, between.VERSION, 5, "node", pid)


def invite(hub: Hub) -> Invitation:
    """This hub's invitation."""
    return hub.invite("77", 0, "0", 5)


@contextlib.contextmanager
def joined(hub: Hub, task: int, invitation: Invitation | None = None) -> Iterator[Spoke]:
    """A spoke that the hub has heard."""
    invitation = invitation or invite(hub)
    with Spoke(invitation, task) as spoke:
        spoke.connect(invitation.addresses[-1])
        assert say_until_heard(hub, spoke, report(task)) == []
        yield spoke


def pump(hub: Hub, timeout_ms: int = 100) -> list[between.Up | Garbage]:
    """One turn of the loop: see who has gone, let in, then listen."""
    poller = zmq.Poller()
    poller.register(hub.socket, zmq.POLLIN)
    poller.register(hub.zap_socket, zmq.POLLIN)
    poller.register(hub.closings.socket, zmq.POLLIN)
    poller.poll(timeout_ms)
    hub.closed()
    return [*hub.answer_zap(), *hub.receive()]


def pump_until(hub: Hub, enough: Callable[[list[between.Up | Garbage]], bool]) -> list[between.Up | Garbage]:
    """Turns of the loop until what came is enough."""
    end = time.monotonic() + BOUND_S
    found: list[between.Up | Garbage] = []
    while not enough(found):
        assert time.monotonic() < end, found
        found += pump(hub)
    return found


def say_until_heard(hub: Hub, spoke: Spoke, word: between.Up) -> list[between.Up | Garbage]:
    """Say a word again and again, as supervisors do, until it has come, and all of its repetitions; what else came."""
    last = report(word.task, 999_999_999)

    def heard(found: list[between.Up | Garbage]) -> bool:
        if word not in found:
            spoke.send(word)
        return word in found

    found = pump_until(hub, heard)
    spoke.send(last)
    found += pump_until(hub, lambda found: last in found)
    return [item for item in found if item not in (word, last)]


def hear(spoke: Spoke, count: int = 1) -> list[between.Down | Garbage]:
    """The next words for this task."""
    end = time.monotonic() + BOUND_S
    found: list[between.Down | Garbage] = []
    while len(found) < count:
        assert time.monotonic() < end, found
        spoke.socket.poll(1000)
        found += spoke.receive()
    return found


@contextlib.contextmanager
def stranger(invitation: Invitation, name: bytes, client: tuple[bytes, bytes] | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A plain DEALER with the step's keys, or with others."""
    public, secret = client or (invitation.client_public.encode(), invitation.client_secret.encode())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.IPV6, 1)
        dealer.set(zmq.ROUTING_ID, name)
        dealer.set(zmq.CURVE_SERVERKEY, invitation.server_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(invitation.addresses[-1])
        yield dealer


def connections_to(port: int) -> int:
    """This process's established connections to that port."""
    seen = psutil.Process().net_connections("tcp")
    return len([one for one in seen if one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED])
