"""The HTTP port of --metrics-port: answers `GET /metrics` on this host's loopback, one connection after the other.

Owns the socket, the thread and their bounds. Must not be reachable from another host, and must not be what anything waits for:
a client has half a second for all of its request and answer, so that a queue full of silent ones passes within what Prometheus
waits.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import socket
import threading
import time
from collections.abc import Callable

HOST = "127.0.0.1"
"""Nobody but users of this host can ask: numbers of a run are no secret among them, and are nobody else's business."""

CLIENT_S = 0.5
HEAD_BYTES_MAX = 16_384
BACKLOG = 8
PATHS = ("/metrics", "/")

Render = Callable[[str], tuple[bytes, str]]
"""By the header Accept: what to answer, and its content type."""


def listen(port: int) -> socket.socket:
    """A socket that listens at this port, or at any free one for 0. Raises OSError when it is in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A port of a supervisor that has just ended is free: its closed connections may linger in the kernel.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def close(listener: socket.socket) -> None:
    """Nobody is answered any more."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread in accept(2), which a close alone does not.
    listener.close()


def serve(listener: socket.socket, render: Render) -> None:
    """Answer from now on, in a thread of its own. Called in a lane: the new thread has all signals blocked, as that has."""
    threading.Thread(target=_run, args=(listener, render), name="ckpt-scrape", daemon=True).start()


def _run(listener: socket.socket, render: Render) -> None:
    while True:  # Until the socket is closed, which ends accept.
        try:
            client, _ = listener.accept()
        except OSError as error:
            if not _passes(error):
                return
            threading.Event().wait(1.0)  # No descriptor left: another try must not be a busy loop.
            continue
        with client, contextlib.suppress(OSError):
            _answer(client, render, time.monotonic() + CLIENT_S)


def _passes(error: OSError) -> bool:
    """Whether accept may succeed another time (accept(2)): everything but a socket that listens no more."""
    return error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP)


def _answer(client: socket.socket, render: Render, end_s: float) -> None:
    head = _head(client, end_s)
    if head is None:
        return
    line, _, rest = head.partition(b"\r\n")
    method, _, target = line.decode("latin-1").partition(" ")
    path = target.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, content_type, body = "405 Method Not Allowed", "text/plain", b"GET and HEAD only\n"
    elif path not in PATHS:
        status, content_type, body = "404 Not Found", "text/plain", b"it is /metrics\n"
    else:
        try:
            accept = http.client.parse_headers(io.BytesIO(rest)).get("Accept", "")
        except http.client.HTTPException:
            accept = ""
        body, content_type = render(accept)
        status = "200 OK"
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close", "", "")
    client.settimeout(max(0.01, end_s - time.monotonic()))
    client.sendall("\r\n".join(lines).encode("latin-1") + (b"" if method == "HEAD" else body))


def _head(client: socket.socket, end_s: float) -> bytes | None:
    """The request up to the empty line, all of it; None if it does not come in time, or is too long."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return None
        client.settimeout(left_s)
        part = client.recv(HEAD_BYTES_MAX - len(head))
        if not part:
            return None
        head += part
    return head if b"\r\n\r\n" in head else None
