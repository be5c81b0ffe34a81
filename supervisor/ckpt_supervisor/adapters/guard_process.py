"""The guard: the process between the supervisor and the command, and its whole program.

Owns the command's start, the reaping of everything below it, and the end of all that when the supervisor dies: only an ancestor
that lives on can do it where Slurm follows parents or process groups (docs/slurm.md, section 4), since orphans come back to it,
however often they have forked and whatever sessions they have made. It also sees what was sent to every process of the step.
Must not decide anything, nor import what is not in the standard library: the supervisor starts it before anything else, by its
source text (guard.py), so that it costs no time and no process is taken for the supervisor by its name. No threads: the command
dies with the thread that has started it (prctl(2), PR_SET_PDEATHSIG).

Frames are a length and a marshalled tuple. From the supervisor there is one, how to start; the end of that pipe is its death.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs a millisecond, and this is not the place for it.
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

FRAME = struct.Struct("=I")
FRAME_BYTES_MAX = 64 << 20
"""Arguments and environment of a process are far below that (execve(2))."""

SIGINFO_BYTES = 128
"""struct signalfd_siginfo; its number at 0, the sender's pid at 12 (signalfd(2))."""
SIGINFOS_MAX = 64

SWEEP_S_MAX = 10.0
"""Somebody in uninterruptible sleep does not hold the guard for ever."""
SWEEP_PAUSE_MS = 5
CLEANING_S = 0.5
"""Processes that clean up shared memory once all others are dead get this long for it."""
CLEANERS = (b"resource_tracker import main", b"torch_shm_manager")

FILES_MAX = 1 << 16
PARTS_MAX = 10_000

QUEUED_BYTES_MAX = 1 << 20
"""The supervisor may be stopped: words wait here, and of those beyond only the command's own end."""

Order = tuple[list[bytes], list[tuple[bytes, bytes]], list[int], list[int], bool, object, str]
"""argv, environment, mask, ignored signals, a group of its own, limits of open files or None, oom score or ""."""


def main(orders: int, words: int) -> None:
    """Start what is ordered, watch over it, and leave nobody behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Where that is ignored the kernel collects children, and nobody hears of it.
    fill_standard()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_NAME, b"ckpt-guard", 0, 0, 0)
    order = read_frame(orders)
    if order is None:
        return
    try:
        signals = signal_fd(libc)  # First, so that no end is missed.
        command, number = start(libc, order, (orders, words, signals))
    except OSError as error:  # No room for a descriptor or a process.
        command, number = 0, error.errno or errno.EIO
    if number:
        os.write(words, framed(("failed", number)))
        return
    watch = Watch(command, orders, words, signals)
    watch.said_started()
    let_go({orders, words, signals})
    watch.run()
    sweep(signals)


def fill_standard() -> None:
    """Put something where a standard descriptor is closed, so that no pipe of ours takes its place. Nobody below inherits it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # The lowest that is free.


def start(libc: ctypes.CDLL, order: Order, ours: tuple[int, int, int]) -> tuple[int, int]:
    """Fork and exec: the pid, and 0; or 0, and the errno of what went wrong. Raises OSError if there is no room for a process."""
    read_end, write_end = os.pipe()
    guard = os.getpid()
    took(ours[2])  # What came before the command is there was not sent to the command.
    pid = os.fork()
    if pid == 0:
        try:
            for fd in ours:
                os.close(fd)
            prepare(libc, order, guard)
            execute(order[0], dict(order[1]))
        except OSError as error:
            os.write(write_end, struct.pack("=i", error.errno or errno.EINVAL))
        except ValueError:  # A NUL in an argument, or limits that cannot be set.
            os.write(write_end, struct.pack("=i", errno.EINVAL))
        finally:
            os._exit(127)
    os.close(write_end)
    told = os.read(read_end, 4)
    os.close(read_end)
    if len(told) == 4:
        os.waitpid(pid, 0)
        return 0, struct.unpack("=i", told)[0]
    return pid, 0


def prepare(libc: ctypes.CDLL, order: Order, guard: int) -> None:
    """What the command finds is what it would find without us, but for the mask and its death with the guard's."""
    _argv, _environment, mask, ignored, own_group, files_max, score = order
    if own_group:
        os.setpgid(0, 0)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(files_max, tuple):
        resource.setrlimit(resource.RLIMIT_NOFILE, files_max)
    if score:
        set_score(score)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if int(number) <= signal.SIGSYS:  # The others keep what they have (glibc leaves its own two, 32 and 33, ignored).
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def set_score(score: str) -> None:
    """Raising it is always allowed (proc(5), oom_score_adj)."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(fd, score.encode())
    except OSError:
        pass
    finally:
        os.close(fd)


def execute(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """As execvpe(3), on the command's own PATH. Raises OSError."""
    if b"/" in argv[0]:
        os.execve(argv[0], argv, environment)  # noqa: S606 - that is what we are for.
    refused: OSError | None = None
    for place in environment.get(b"PATH", os.fsencode(os.defpath)).split(b":"):
        try:
            os.execve(os.path.join(place, argv[0]), argv, environment)  # noqa: PTH118, S606 - bytes, and no pathlib here.
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused = error
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def let_go(kept: set[int]) -> None:
    """Leave the step's session and its terminal, hold nobody's files open: an end of these must be seen by who waits for it."""
    # It never leads a group; if it did setsid(2) would be refused, and a command that runs would end for it.
    if os.getpid() != os.getpgrp():
        os.setsid()  # The command stays in the old one; a guard in its process group would be killed together with it.
    os.chdir("/")
    for fd in open_files():
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:
                continue  # That of the list itself.
    try:
        fill_standard()
    except OSError:
        return  # No /dev/null: nothing of ours is opened any more that could take its place.


def open_files() -> list[int]:
    """Our descriptors; without /proc, those that there may be."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - no pathlib here.
    except OSError:
        return list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES_MAX)))


def signal_fd(libc: ctypes.CDLL) -> int:
    """Readable when a signal has come, and tells who has sent it. Python has none of its own."""
    mask = ctypes.create_string_buffer(128)
    struct.pack_into("=Q", mask, 0, (1 << 64) - 1 & ~(1 << signal.SIGKILL - 1) & ~(1 << signal.SIGSTOP - 1))
    fd: int = libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return fd


class Watch:
    """From the command's start to the supervisor's end."""

    def __init__(self, command: int, orders: int, words: int, signals: int) -> None:
        self._command = command
        self._orders = orders
        self._words = words
        self._signals = signals
        self._queue = b""

    def said_started(self) -> None:
        """The first word. From then on our death is that of the command, and nobody starts it once more."""
        os.set_blocking(self._words, False)
        self._say(("started", self._command))

    def run(self) -> None:
        """Until the supervisor is gone, or has closed its end, which is the same."""
        poller = select.poll()
        poller.register(self._orders, select.POLLIN)
        poller.register(self._signals, select.POLLIN)
        while True:
            poller.register(self._words, select.POLLOUT if self._queue else 0)
            ready = dict(poller.poll())
            if self._orders in ready or ready.get(self._words, 0) & ~select.POLLOUT:
                return
            if self._signals in ready:
                self._take()
            self._flush()

    def _take(self) -> None:
        came = took(self._signals)
        for place in range(0, len(came), SIGINFO_BYTES):
            number, sender = struct.unpack_from("=I8xI", came, place)
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._say(("signal", number, sender))

    def _reap(self) -> None:
        for pid, status in reaped():
            self._say(("ended", pid, status), must=pid == self._command)

    def _say(self, word: tuple[object, ...], must: bool = True) -> None:
        if must or len(self._queue) < QUEUED_BYTES_MAX:
            self._queue += framed(word)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._queue:
                self._queue = self._queue[os.write(self._words, self._queue) :]
        except BlockingIOError:
            return  # It is stopped, or busy.
        except BrokenPipeError:
            self._queue = b""  # It is gone: the other pipe says so too.


def sweep(signals: int) -> None:
    """End everything below. Whoever loses a parent becomes a child of ours, so it is over when there are no children left."""
    began = time.monotonic()
    while time.monotonic() < began + SWEEP_S_MAX:
        for pid in children():
            if time.monotonic() < began + CLEANING_S and cleans_up(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        list(reaped())
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                continue
        except ChildProcessError:
            return
        poller = select.poll()
        poller.register(signals, select.POLLIN)
        if poller.poll(SWEEP_PAUSE_MS):
            took(signals)


def took(signals: int) -> bytes:
    """The signals that have come."""
    try:
        return os.read(signals, SIGINFO_BYTES * SIGINFOS_MAX)
    except BlockingIOError:
        return b""


def reaped() -> list[tuple[int, int]]:
    """Children that have ended, and how, as waitpid says it."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, status))


def children() -> list[int]:
    """Our children; by a look at every process where the kernel has no list of them (CONFIG_PROC_CHILDREN)."""
    me = os.getpid()
    text = contents(f"/proc/{me}/task/{me}/children")
    if text is not None:
        return [int(word) for word in text.split()]
    found: list[int] = []
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - no pathlib here.
    except OSError:
        return found
    for name in names:
        fields = (contents(f"/proc/{name}/stat") or b"").rpartition(b")")[2].split() if name.isdecimal() else []
        if len(fields) > 1 and int(fields[1]) == me:
            found.append(int(name))
    return found


def cleans_up(pid: int) -> bool:
    """Whether this process removes shared memory once all others have ended. Decides only who comes last."""
    line = contents(f"/proc/{pid}/cmdline") or b""
    return any(name in line for name in CLEANERS)


def contents(path: str) -> bytes | None:
    """Of a file of /proc; None if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    parts: list[bytes] = []
    try:
        while len(parts) < PARTS_MAX and (part := os.read(fd, 1 << 20)):  # A page at a time.
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


def framed(word: tuple[Any, ...]) -> bytes:
    """A frame."""
    data = marshal.dumps(word)
    return FRAME.pack(len(data)) + data


def read_frame(fd: int) -> Order | None:
    """The next frame, waited for; None at the end of the pipe."""
    head = read_all(fd, FRAME.size)
    size = FRAME.unpack(head)[0] if len(head) == FRAME.size else 0
    if not 0 < size <= FRAME_BYTES_MAX:
        return None
    data = read_all(fd, size)
    order: Order | None = marshal.loads(data) if len(data) == size else None  # noqa: S302 - from our own parent.
    return order


def read_all(fd: int, size: int) -> bytes:
    """As many bytes, fewer at the end of the pipe."""
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            break
        data += chunk
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
