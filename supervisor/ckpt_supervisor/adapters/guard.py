"""The supervisor's end of its guard: the process that starts the command, reaps all below it, and outlives us to end it.

Owns the guard's start and the words that go to and fro (guard_process.py has the other end, and says why there is one). Must not
decide whom to end. One guard serves one start of the command: it leaves the step's session once the command runs, so that what
ends a process group does not end the guard with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import marshal
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ckpt_supervisor.adapters import guard_process
from ckpt_supervisor.adapters.guard_process import FRAME

BOOT = (
    "import os,sys;sys.path[:]=[p for p in sys.path if p];"
    "f=os.fdopen(int(sys.argv[3]),encoding='utf-8');s=f.read();f.close();exec(compile(s,'guard','exec'))"
)
"""Its program comes through a pipe: a guard that has our name or our path in its command line dies with us of one `pkill -f`."""

FLAGS = ("-I", "-S")
HOME_FLAGS = ("-s", "-S")
"""PYTHONHOME, which some sites set for all of Python, has to count for this one as well."""

READ_BYTES = 65_536
READS_MAX = 100
"""Most reads in one turn of the loop."""

WAKE_S = 1.0
"""An exec takes longer only where a file server is slow."""

CLOSE_S = 1.0
"""A guard with nobody left below it is gone within milliseconds."""

UNTOUCHED = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""Python itself ignores these (signal(3)): what they were before cannot be known, and everybody expects the default."""


class Claims(Protocol):
    """Who waits for which child of ours: see children.Claims."""

    def forking(self) -> AbstractContextManager[Any]:
        """Held around a fork."""

    def release(self, pid: int) -> None:
        """The child was waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A process below us has ended, the command or an orphan: its exit status, or -n when signal n ended it."""

    pid: int
    returncode: int


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
    """The guard has got this signal, which nobody sends to it alone: it was sent to every process of the step."""

    number: int
    sender: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The guard is gone, and has taken the command with it: the orphans come back to us."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How the command is started. `score`: what it gets as oom_score_adj, "" for ours."""

    blocked: Collection[int]
    own_group: bool
    files_max: tuple[int, int] | None = None
    score: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """The signals that were blocked, and those that were ignored, when this process was started: the command finds them so."""

    blocked: frozenset[int]
    ignored: frozenset[int]
    python_home: bool = False
    """The environment names PYTHONHOME."""


class GuardEnded(OSError):
    """The guard was killed before it could start the command."""


News = Ended | Broadcast | Lost


class Guard:
    """`begin` starts the process, `start` the command; then `fd` is readable when there are `news`. `close` it in the end."""

    def __init__(self, pid: int, pipes: tuple[int, int], claims: Claims, before: Before) -> None:
        self.pid = pid
        self._orders, self.fd = pipes
        self._claims = claims
        self._before = before
        self._rest = b""
        self._is_lost = False
        self._closed = False

    @classmethod
    def begin(cls, claims: Claims, before: Before | None = None) -> Guard:
        """Start the process. Early: it is ready by the time that the command is known. Raises OSError."""
        orders_read, orders_write = os.pipe()
        words_read, words_write = os.pipe()
        source_read, source_write = os.pipe()
        theirs = (orders_read, words_write, source_read)
        flags = HOME_FLAGS if before is not None and before.python_home else FLAGS
        argv = [sys.executable, *flags, "-c", BOOT, *map(str, theirs)]
        # With everything blocked: it must not die of a notice that comes before its first line.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with claims.forking() as claim:
                for fd in theirs:
                    os.set_inheritable(fd, True)
                process = subprocess.Popen(argv, close_fds=False)
                claim(process.pid)
        except OSError:
            for fd in (orders_write, words_read, source_write):
                os.close(fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for fd in theirs:
                os.close(fd)
        process.returncode = 0  # It is waited for here, never by Popen.
        with os.fdopen(source_write, "wb") as file:
            file.write(Path(guard_process.__file__).read_bytes())
        os.set_blocking(words_read, False)
        return cls(process.pid, (orders_write, words_read), claims, before or Before(frozenset(mask), ignored_now()))

    def start(self, argv: Sequence[str], env: Mapping[str, str], manner: Manner) -> int:
        """Start the command: its pid. Raises OSError if it cannot be started."""
        environment = [(os.fsencode(key), os.fsencode(value)) for key, value in env.items()]
        order = (
            [os.fsencode(word) for word in argv],
            environment,
            sorted(map(int, self._before.blocked | frozenset(manner.blocked))),
            sorted(map(int, self._before.ignored)),
            manner.own_group,
            manner.files_max,
            manner.score,
        )
        try:
            _write_all(self._orders, guard_process.framed(order))
        except BrokenPipeError:
            raise GuardEnded(0, "the guard that starts it has ended") from None
        # No byte more than that: what comes after it has to find the loop asleep, and to wake it.
        word = self._exactly(FRAME.unpack(self._exactly(FRAME.size))[0])
        kind, number = marshal.loads(word)  # noqa: S302 - from a process of our own.
        if kind == "failed":
            raise OSError(number, os.strerror(number))
        return int(number)

    def news(self) -> list[News]:
        """What has happened below since the last call."""
        found: list[News] = []
        for word in self._words():
            if word[0] == "ended":
                found.append(Ended(word[1], os.waitstatus_to_exitcode(word[2])))
            elif word[0] == "signal":
                found.append(Broadcast(word[1], word[2]))
        return [*found, Lost()] if self._is_lost else found

    def close(self, wait_s: float = CLOSE_S) -> bool:
        """Let it go: it ends what is left below it, then itself. Whether that was so within this time; it goes on without us."""
        if self._closed:
            return True
        self._closed = True
        os.close(self._orders)
        self._wake()
        end_s = time.monotonic() + wait_s
        # Its end of the pipe closes when it ends.
        while not self._is_lost and (left_s := end_s - time.monotonic()) > 0:
            readable(self.fd, left_s)
            for _ in self._words():
                pass
        os.close(self.fd)
        return self._reaped(end_s)

    def _reaped(self, end_s: float) -> bool:
        """Collect it. If it is not over it stays claimed: it is nobody whom the command has left behind."""
        pid = 0
        try:
            while not pid and self._is_lost and time.monotonic() < end_s:
                pid, _ = os.waitpid(self.pid, os.WNOHANG)
                if not pid:
                    select.select([], [], [], 0.001)  # Its descriptors are closed a moment before it can be collected.
        except ChildProcessError:
            pid = self.pid
        if pid:
            self._claims.release(self.pid)
        return bool(pid)

    def _wake(self) -> None:
        """It may have been stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _exactly(self, size: int) -> bytes:
        """As many bytes of the first word, waited for."""
        data = b""
        while len(data) < size:
            while not readable(self.fd, WAKE_S):
                self._wake()
            chunk = os.read(self.fd, size - len(data))
            if not chunk:
                raise GuardEnded(0, "the guard that starts it has ended")
            data += chunk
        return data

    def _words(self) -> list[tuple[Any, ...]]:
        for _ in range(READS_MAX):
            try:
                chunk = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                self._is_lost = True
                break
            self._rest += chunk
        found = []
        while len(self._rest) >= FRAME.size:
            size = FRAME.size + FRAME.unpack_from(self._rest)[0]
            if len(self._rest) < size:
                break
            found.append(marshal.loads(self._rest[FRAME.size : size]))  # noqa: S302 - from a process of our own.
            self._rest = self._rest[size:]
        return found


def readable(fd: int, timeout_s: float | None = None) -> bool:
    """Wait until there is something to read. Not by select(2), which ends at descriptor 1,023: a large step has more."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1_000))


def ignored_now() -> frozenset[int]:
    """The signals that this process ignores, without those that Python has it ignore."""
    return frozenset(one for one in signal.valid_signals() - UNTOUCHED if signal.getsignal(one) is signal.SIG_IGN)


class Early:
    """Has a guard begun before the command is known, and others for later starts; use with `with`.

    What they leave to the command is what was there at the first one: this process has handlers of its own by then.
    """

    def __init__(self, claims: Claims, mask: Collection[int], env: Mapping[str, str]) -> None:
        self._claims = claims
        self._before = Before(frozenset(mask), ignored_now(), "PYTHONHOME" in env)
        self._guard: Guard | None = None

    def __enter__(self) -> Early:
        try:
            self._guard = Guard.begin(self._claims, self._before)
        except OSError:
            self._guard = None  # The start itself tries again, and says so.
        return self

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.close()

    def take(self) -> Guard:
        """It, or a new one. Raises OSError."""
        guard, self._guard = self._guard, None
        return guard or Guard.begin(self._claims, self._before)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
