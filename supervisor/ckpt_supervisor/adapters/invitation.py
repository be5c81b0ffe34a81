"""What a task's supervisor has to know to reach the coordinator: where that listens, and the keys of the step.

Owns the type, the spelling of endpoints, and which addresses of this host are worth trying. Must not open a socket or a file:
rendezvous.py carries invitations and links.py uses them, and adapters do not import each other. Addresses are literals, since a
compute node often cannot resolve another one's name, or resolves it to a network that the other does not listen on.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Annotated

import msgspec

ADDRESSES_MAX = 32
"""Most endpoints in one invitation."""

_KEY = msgspec.Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
"""32 bytes in Z85 (ZeroMQ RFC 32)."""

_NONCE = msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")
_ENDPOINT = re.compile(r"tcp://(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})")

_MADE_UP = re.compile(r"(docker|br-|virbr|veth|vnet|cni|flannel|cali|lxc|lxd|podman)")
"""Bridges to containers and virtual machines of this host: every node may have the same addresses there."""


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach one coordinator. Whoever holds it may speak for any task of the step: it is secret."""

    job: str
    attempt: int
    step_id: str
    epoch: int
    host: str
    pid: int
    addresses: tuple[str, ...]
    """Endpoints as ZeroMQ writes them, best first: tcp://10.1.2.3:4567, tcp://[2001:db8::1]:4567."""
    server_key: Annotated[str, _KEY]
    client_public: Annotated[str, _KEY]
    client_secret: Annotated[str, _KEY]
    nonce: Annotated[str, _NONCE]
    """Differs at every start of a coordinator."""

    def __post_init__(self) -> None:
        if not 0 < len(self.addresses) <= ADDRESSES_MAX:
            raise ValueError(f"{len(self.addresses)} addresses")
        for endpoint in self.addresses:
            split_endpoint(endpoint)

    def __repr__(self) -> str:
        """Without its secret, which must not get into a journal."""
        step = f"job={self.job!r}, attempt={self.attempt}, step_id={self.step_id!r}, epoch={self.epoch}"
        return f"Invitation({step}, host={self.host!r}, pid={self.pid})"


def endpoint_of(address: str, port: int) -> str:
    """`tcp://10.1.2.3:4567`, `tcp://[2001:db8::1]:4567`."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Address and port. Raises ValueError for anything but a literal and a port: no name is ever looked up."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ValueError(f"no endpoint: {endpoint[:80]!r}")
    address = ipaddress.IPv6Address(match["v6"]) if match["v6"] else ipaddress.IPv4Address(match["v4"])
    port = int(match["port"])
    if not 0 < port < 1 << 16:
        raise ValueError(f"no port: {endpoint[:80]!r}")
    return str(address), port


def addresses(interface: str, port: int) -> tuple[str, ...]:
    """Endpoints of this host at a port, best first; with `interface` (a name, or an address), only those of that one.

    IPv4 before IPv6; then what other nodes rarely reach: bridges of this host, link-local IPv4, and loopback, which serves a
    cluster of one machine. Link-local IPv6 is left out: it is nothing without the name of the other host's own interface. Raises
    ValueError, which names what there is, if `interface` is not here, is down or has no address.
    """
    found = sorted(_seen(), key=lambda seen: _place(*seen))
    wanted = interface.strip("[]")
    if interface:
        chosen = [address for name, address in found if wanted in (name, str(address))]
    else:
        chosen = [address for _, address in found]
    if not chosen:
        what = f"no interface or address {interface!r} that is up" if interface else "no address"
        there = ", ".join(f"{name} ({address})" for name, address in found) or "none at all"
        raise ValueError(f"{what} on this host; there are: {there}")
    return tuple(endpoint_of(str(address), port) for address in chosen[:ADDRESSES_MAX])


def _seen() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Interfaces that are up, and their addresses."""
    import psutil  # Only task 0 needs it, after its key is made.

    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if address.version == 4 or not address.is_link_local:
                yield name, address


def _place(name: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[bool, bool, bool, int]:
    return address.is_loopback, address.is_link_local, _MADE_UP.match(name) is not None, address.version
