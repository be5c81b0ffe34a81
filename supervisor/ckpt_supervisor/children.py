"""Starts the training command, knows what became of it, and ends what is left of its tree.

Owns fork, exec and reaping. Must not decide whom to end, or when. The command finds everything as it would without
us: its file descriptors, directory, environment and terminal; only some signals are blocked in it and in all below it
(shield.py says why), and it dies with us, because an orphan would outlive the job (docs/slurm.md, section 4).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType

from ckpt_supervisor import procfs

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SYS_PIDFD_OPEN = 434
"""The same on every architecture. Pythons built with old kernel headers (conda's) lack os.pidfd_open."""

EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127
EXIT_STATUS_LOST = 1
END_PASSES_EMPTY = 2
END_PASSES_MAX = 100
"""Looks at the tree while it is being ended: it may fork meanwhile."""

_TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})


class Claims:
    """Pids of children that somebody in this process waits for, from any thread. Whoever is not in here may be reaped.

    The lock is held from before a fork until the pid is known, so a child that dies at once is never taken for an orphan.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()
        self._commands: set[int] = set()

    @contextlib.contextmanager
    def forking(self, command: bool = False) -> Iterator[Callable[[int], None]]:
        """Held around a fork; call what it yields with the child's pid. `command`: it is the training command."""

        def claim(pid: int) -> None:
            self._pids.add(pid)
            if command:
                self._commands.add(pid)

        with self._lock:
            yield claim

    def release(self, pid: int) -> None:
        """The child was waited for, or nobody waits for it any longer."""
        with self._lock:
            self._pids.discard(pid)
            self._commands.discard(pid)

    def claimed(self) -> frozenset[int]:
        """Those that are waited for now."""
        with self._lock:
            return frozenset(self._pids)

    def errands(self) -> frozenset[int]:
        """Those that are waited for now and are not the command: bounded calls of our own, such as scontrol."""
        with self._lock:
            return frozenset(self._pids - self._commands)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[Collection[int] | None]:
        """The pids, while nobody can fork; None when somebody is just forking (an exec can hang on a dead file system)."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        try:
            yield self._pids
        finally:
            self._lock.release()


@dataclasses.dataclass(frozen=True, slots=True)
class NotStarted:
    """The command was not started. `code` is the exit status for it: 127 not found, 126 cannot be run."""

    code: int
    reason: str


class Child:
    """The running command. When `pidfd` is readable it has ended, and `status()` says how."""

    def __init__(self, pid: int, pidfd: int, claims: Claims, shares_terminal: bool) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """Stays open until `close`."""
        self.shares_terminal = shares_terminal
        self._claims = claims
        self._returncode: int | None = None
        self._closed = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """The pidfd."""
        return self.pidfd

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as `status` has looked; its own exit status, or -n when signal n ended it."""
        return self._returncode

    def status(self) -> int | None:
        """None while it runs; then its exit status for others: 128 + n when signal n ended it. Never blocks.

        A status that somebody else took is EXIT_STATUS_LOST: what is not known must not pass for success, as it does in Popen.
        """
        if self._returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._ended(EXIT_STATUS_LOST)
            else:
                if pid:
                    self._ended(os.waitstatus_to_exitcode(status))
        return None if self._returncode is None else exit_code(self._returncode)

    def _ended(self, returncode: int) -> None:
        self._returncode = returncode
        self._claims.release(self.pid)

    def send(self, number: int) -> bool:
        """Signal the command itself; False when it has ended."""
        if self.status() is not None:
            return False
        return _kill(self.pid, number)

    def close(self) -> None:
        """Close the pidfd."""
        if not self._closed:
            self._closed = True
            os.close(self.pidfd)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    blocked: Collection[int],
    claims: Claims,
    *,
    own_group: bool,
    files_max: tuple[int, int] | None = None,
) -> Child | NotStarted:
    """Start the command. Only from the main thread: PR_SET_PDEATHSIG fires when the *thread* that forked ends (prctl(2)).

    `own_group` gives it a process group of its own, so that ctrl-C reaches the supervisor only. Not under Slurm: proctrack/pgid
    ends a step by its process group and would miss it. And not when stdin is our terminal: a background group is stopped when it
    reads from it. There SIGINT and SIGHUP, which the terminal sends to the whole group, are blocked in the command as well.
    `files_max`: RLIMIT_NOFILE as it was before this process has raised its own.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the command must be started from the main thread")
    shares_terminal = own_group and _stdin_is_our_terminal()
    shielded = {*blocked, *(_TERMINAL_SIGNALS if shares_terminal else ())}
    # Everything is blocked around the fork, so that no handler of ours runs in the child before its exec.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prepare = _preparation(mask | shielded, own_group and not shares_terminal, files_max)
    try:
        with claims.forking(command=True) as claim:
            process = subprocess.Popen(argv, env=env, close_fds=False, preexec_fn=prepare)  # noqa: PLW1509 - see _preparation.
            claim(process.pid)
    except OSError as error:
        return _not_started(argv[0], error)
    except subprocess.SubprocessError as error:
        return NotStarted(EXIT_CANNOT_RUN, f"{argv[0]}: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # Popen only forks and execs for us. It must never wait for the child: it would take a lost status for 0.
    process.returncode = 0
    fd = pidfd(process.pid)
    return Child(process.pid, _end_of(process.pid) if fd is None else fd, claims, shares_terminal)


def _preparation(mask: Collection[int], own_group: bool, files_max: tuple[int, int] | None) -> Callable[[], None]:
    """What the child does between fork and exec. All it needs is made ready before the fork: afterwards it must not import."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()
    ours = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]

    def prepare() -> None:
        if own_group:
            os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # It died before the line above.
            os.kill(os.getpid(), signal.SIGKILL)
        if files_max is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, files_max)
        signal.set_wakeup_fd(-1)
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def raise_files_max() -> tuple[int, int] | None:
    """Let this process open as many files as it may: each task of a step is a connection. The limits before; None if they stay.

    The command gets the old ones back: programs that use select(2) rely on descriptors below 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return None
    return soft, hard


def _not_started(command: str, error: OSError) -> NotStarted:
    """As shells do: 127 when it is not found, 126 when it is there and cannot be run."""
    not_found = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return NotStarted(EXIT_NOT_FOUND if not_found else EXIT_CANNOT_RUN, f"{command}: {error.strerror}")


def _stdin_is_our_terminal() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def exit_code(returncode: int) -> int:
    """The exit status for others: 128 + n for a death by signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None when it is gone, or the kernel has none (before 5.3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    return fd if fd >= 0 else None


def _end_of(pid: int) -> int:
    """A descriptor that is readable once this child of ours has ended, for kernels without pidfds. Leaves it to be reaped."""
    read_end, write_end = os.pipe()

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(write_end)

    threading.Thread(target=watch, name="ckpt-end-of-command", daemon=True).start()
    return read_end


def become_subreaper() -> bool:
    """Have orphans below us come back to us instead of pid 1; False when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def reap_orphans(claims: Claims) -> dict[int, int]:
    """Collect orphans that came back to us and have ended: pid to returncode. Call after each SIGCHLD.

    Children that somebody waits for are left to them. While somebody is forking nothing is reaped: that child's own SIGCHLD
    brings us here again.
    """
    reaped: dict[int, int] = {}
    with claims.standing_still() as claimed:
        if claimed is None:
            return reaped
        for pid in procfs.own_children():
            if pid in claimed or procfs.state_of(pid) != "zombie":
                continue
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    reaped[pid] = os.waitstatus_to_exitcode(status)
    return reaped


def descendants(claims: Claims | None = None) -> list[int]:
    """Every process below us, parents first, zombies included; without what the claims say we wait for ourselves."""
    spared = claims.claimed() if claims else frozenset()
    return [pid for pid in procfs.descendants() if pid not in spared]


def is_descendant(pid: int) -> bool:
    """Whether this process is below us. A pid of another namespace, or one that was used again, is not."""
    return procfs.descends(pid, os.getpid())


def state_of(pid: int) -> procfs.State:
    """What the process is doing: running, stopped, zombie, gone, uninterruptible."""
    return procfs.state_of(pid)


def end_all(number: int, claims: Claims | None = None) -> list[int]:
    """Signal every process below us, then SIGCONT, so that stopped ones take it too. Returns those that were signalled.

    Looks again until nobody new is there, as some may fork meanwhile. Calls of our own that are under way (`claims.errands()`)
    are spared: they end by themselves. Of a SIGTERM nobody dies who has it blocked.
    """
    hit: list[int] = []
    spared = claims.errands() if claims else frozenset()
    nobody_new = 0
    for _ in range(END_PASSES_MAX):
        seen = {*hit, *spared}
        fresh = [pid for pid in procfs.descendants() if pid not in seen and procfs.state_of(pid) not in ("zombie", "gone")]
        sent = [pid for pid in fresh if _kill(pid, number)]
        for pid in sent:
            _kill(pid, signal.SIGCONT)
        hit += sent
        # Twice: a child whose parent dies during the walk moves, and may be missed once.
        nobody_new = 0 if sent else nobody_new + 1
        if nobody_new == END_PASSES_EMPTY:
            break
    return hit


def send(pid: int, number: int) -> bool:
    """Signal one process; False when it is gone or not ours."""
    return _kill(pid, number)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
