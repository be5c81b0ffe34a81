"""What arrived at a socket and is no word, and who was told about already.

Owns the counting and its bound. Must not know sockets or words: the ranks' socket and the supervisors' use the same, and adapters
do not import each other. A peer that sends garbage without end costs one line, not a journal full of them.
"""

from __future__ import annotations

import dataclasses

PEERS_MAX = 1_000
"""Most peers whose garbage is told about."""

NAME_BYTES_MAX = 32
"""A longer name of a peer is cut: it is as long as the peer likes."""

REASON_CHARS_MAX = 500
"""A longer reason is cut: it may quote what the peer sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Garbage:
    """A frame that is not a word. `first`: nothing was told about this peer yet."""

    peer: str
    reason: str
    first: bool


class Complaints:
    """Counts the garbage of one socket; only the first of each peer, and of PEERS_MAX peers, is `first`."""

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self.count = 0

    def about(self, peer: str, reason: str) -> Garbage:
        """One more piece of it."""
        self.count += 1
        first = peer not in self._peers and len(self._peers) < PEERS_MAX
        if first:
            self._peers.add(peer)
        return Garbage(peer, reason[:REASON_CHARS_MAX], first)


def readable(name: bytes) -> str:
    """A peer's name, which may be any bytes, as text of a bounded length."""
    return name[:NAME_BYTES_MAX].decode(errors="replace")
