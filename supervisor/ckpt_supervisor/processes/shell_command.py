"""One bounded run of a shell command of the user's, --on-event's or --resubmit's: its input, its time, and what is left of it.

Owns the child. Must not decide when it is due, or what follows from a failure (watches/notify.py, core/leaving.py). It runs in a
session of its own, deaf to the signals that a broadcast to the step would kill it by, as scontrol is (adapters/slurm.py). What it
reads comes from memory, so one that never reads holds up nobody; output beyond a bound is read and dropped, so one that floods
does not block. All of its session is killed when its time is over, or, if that is asked for, when it has ended. Only what has
made a session of its own meanwhile (setsid, a daemon) is not found again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, NamedTuple

from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.text import one_line

POLL_MS = 20
REAP_S = 0.5
"""One that was killed may take this long to end; it is then left to whoever reaps orphans."""

KILLS_MAX = 3
"""So often it is looked for more of the session: who forks while it is killed comes to an end with the next look."""

READ_BYTES_MAX = 65_536
READS_MAX = 16
"""Most reads before it is looked again whether time is over: a command may print for ever."""

TEXT_CHARS_MAX = 300
"""So much of its output is told."""


class Way(NamedTuple):
    """How it is run."""

    command: str
    env: Mapping[str, str]
    claims: Claims
    blocked: frozenset[int]
    """Signals that it does not get."""


class Done(NamedTuple):
    """What came of it: `said` is the beginning of what it printed, `problem` what went wrong, "" for nothing."""

    said: str
    problem: str


def run(way: Way, give_up_s: Callable[[], float], line: str = "", *, ends_all: bool = True) -> Done:
    """Run it once with this line on its standard input. Blocks; may run in any thread.

    `give_up_s`: until when it may take, on the monotonic clock. Asked again and again: it may become less meanwhile. `ends_all`:
    what it leaves in the background is ended with it, also where it has ended by itself.
    """
    try:
        child = _start(way, line)
    except OSError as error:
        return Done("", f"sh cannot be started: {error.strerror}")
    began = time.monotonic()
    try:
        said, status, in_time = _watch(child, give_up_s, ends_all)
    finally:
        way.claims.release(child.pid)
    text = one_line(said.decode(errors="replace").strip())[:TEXT_CHARS_MAX]
    told = f": {text}" if text else ""
    if not in_time:
        return Done(text, f"it did not end within {time.monotonic() - began:.1f} s and was killed{told}")
    if status is None:
        return Done(text, f"its exit status was lost{told}")
    return Done(text, f"it ended with {status if status > 0 else 128 - status}{told}" if status else "")


def _start(way: Way, line: str) -> subprocess.Popen[bytes]:
    # A lane has all signals blocked, and so would its child: no SIGALRM, no SIGPIPE for anybody below it.
    # Blocked ones protect the shell until it ignores them, which its own children take over: dash gives them an empty mask.
    ignoring = f"trap '' {' '.join(map(str, sorted(way.blocked)))}"
    before = signal.pthread_sigmask(signal.SIG_SETMASK, way.blocked)
    try:
        with _memory(f"{line}\n".encode() if line else b"") as stdin, way.claims.forking() as claim:
            child = subprocess.Popen(
                ("/bin/sh", "-c", f"{ignoring}\n{way.command}"),
                env=way.env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            claim(child.pid)
            way.claims.set_apart(child.pid)  # What it starts is none of the command's: training's end is not its end.
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _memory(data: bytes) -> IO[bytes]:
    """A file of no name that holds this, to be read from its beginning."""
    file: IO[bytes]
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("ckpt-event"), "w+b", buffering=0)
    else:  # Pythons that were built for glibc before 2.27.
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the caller's `with`.
    file.write(data)
    file.seek(0)
    return file


def _watch(child: subprocess.Popen[bytes], give_up_s: Callable[[], float], ends_all: bool) -> tuple[bytes, int | None, bool]:
    """What it prints until it ends, its status (None: lost, or it did not even die), and whether it ended in time.

    Its end counts, not that of its output, which something that it left in the background may hold open. Not Popen.wait: that
    takes a status lost to another waiter for 0.
    """
    assert child.stdout is not None
    kept = bytearray()
    with child.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN)
        is_open, killed_s = True, None
        while True:
            gone, has_status = _ended(child.pid)
            is_open = is_open and _read(pipe.fileno(), kept)
            now = time.monotonic()
            if gone or (killed_s is not None and now >= killed_s + REAP_S):
                break
            if killed_s is None and now >= give_up_s():
                killed_s = now
                _kill(child.pid)
            if is_open:
                poll.poll(POLL_MS)
            else:
                select.select((), (), (), POLL_MS / 1000)
    if has_status and (ends_all or killed_s is not None):
        _kill(child.pid)  # What it has left in the background. Until it is waited for nobody else has its number.
    status = _waited(child.pid) if has_status else None
    child.returncode = status if status is not None else -signal.SIGKILL  # Keeps Popen from waiting for it once more.
    return bytes(kept), status, killed_s is None


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for _ in range(KILLS_MAX):
        # A shell with job control, as `set -m` makes one, gives each of its jobs a group of its own.
        if not sum(_kill_of(pid, session) for pid in procfs.everybody()):
            return


def _kill_of(pid: int, session: int) -> bool:
    """Kill it if it is of this session; whether there was somebody to kill."""
    if not _is_of(pid, session):
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _is_of(pid, session):  # The number is another one's by now.
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _is_of(pid: int, session: int) -> bool:
    kin = procfs.kin(pid)
    return kin is not None and kin.session == session and kin.state not in ("zombie", "gone")


def _read(fd: int, kept: bytearray) -> bool:
    """Take what is there, within a bound; False once there will be no more."""
    for _ in range(READS_MAX):
        try:
            chunk = os.read(fd, READ_BYTES_MAX)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        kept += chunk[: max(0, READ_BYTES_MAX - len(kept))]
    return True


def _ended(pid: int) -> tuple[bool, bool]:
    """Whether it is gone, and whether it can still be waited for."""
    try:
        return (True, True) if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None else (False, False)
    except ChildProcessError:
        return True, False


def _waited(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def signals(*some: Iterable[int]) -> frozenset[int]:
    """All of these."""
    return frozenset(int(number) for numbers in some for number in numbers)
