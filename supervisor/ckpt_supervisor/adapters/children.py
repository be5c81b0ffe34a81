"""The training command as the supervisor has it: its start, what became of it, and the end of what is left of its tree.

Owns the questions asked about processes below us and the signals sent to them. Must not decide whom to end, or when. The command
finds everything as it would without us: its file descriptors, directory, environment and terminal; only some signals are blocked
in it and in all below it (shield.py says why), and it dies with us, because an orphan would outlive the job (docs/slurm.md,
section 4). A guard starts it and watches over what it starts (guard.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType

from ckpt_supervisor.adapters.guard import Broadcast, Early, Ended, Guard, GuardEnded, Lost, Manner, News, readable
from ckpt_supervisor.linux import procfs

__all__ = ["Broadcast", "Child", "Claims", "Ended", "Guard", "Lost", "News", "NotStarted", "readable", "start"]

PR_SET_CHILD_SUBREAPER = 36
SYS_PIDFD_OPEN = 434
"""The same on every architecture. Pythons built with old kernel headers (conda's) lack os.pidfd_open."""

PID_MAX = 1 << 22
"""PID_MAX_LIMIT of 64-bit kernels (proc(5)). A rank in another pid namespace goes by a larger number, which is no process's."""

EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127
END_PASSES_EMPTY = 2
END_PASSES_MAX = 100
"""Looks at the tree while it is being ended: it may fork meanwhile."""

GUARDS_MAX = 2
"""A guard that was killed before it could start the command is replaced once."""

LOST_S = 1.0
"""A command whose guard was killed dies with it; one that sleeps uninterruptibly is not waited for."""

_TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})


class Claims:
    """Pids of children that somebody in this process waits for, from any thread. Whoever is not in here may be reaped.

    The lock is held from before a fork until the pid is known, so a child that dies at once is never taken for an orphan.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()
        self._apart: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def forking(self) -> Iterator[Callable[[int], None]]:
        """Held around a fork; call what it yields with the child's pid."""
        with self._lock:
            yield self._pids.add

    def release(self, pid: int) -> None:
        """The child was waited for, or nobody waits for it any longer."""
        with self._lock:
            self._pids.discard(pid)
            self._apart -= {pid}

    def set_apart(self, pid: int) -> None:
        """What this child starts is not the command's either: a shell that is at work for us. Until it is released."""
        self._apart |= {pid}

    def is_apart(self, pid: int) -> bool:
        """Whether this process was started by such a child."""
        return any(procfs.descends(pid, root) for root in self._apart)

    def claimed(self) -> frozenset[int]:
        """Those that are waited for now: the guard, and bounded calls of our own, such as scontrol."""
        with self._lock:
            return frozenset(self._pids)

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
    """The running command. When it is readable there is news of it or of others below its guard; `status()` says how it ended."""

    def __init__(self, pid: int, guard: Guard, shares_terminal: bool) -> None:
        self.pid = pid
        self.shares_terminal = shares_terminal
        self.guard_pid = guard.pid
        self._guard = guard
        self._returncode: int | None = None
        self._news: list[News] = []
        self._is_lost = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable when there is news, and from the guard's end on. Stays open until `close`."""
        return self._guard.fd

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as `status` has looked; its own exit status, or -n when signal n ended it."""
        return self._returncode

    def status(self) -> int | None:
        """None while it runs; then its exit status for others: 128 + n when signal n ended it. Never blocks for long.

        The command of a guard that was killed has died of SIGKILL with it.
        """
        self._read()
        return None if self._returncode is None else exit_code(self._returncode)

    def take(self) -> list[News]:
        """What has happened since the last call, to this command and to others. Lost comes once, and is the last of it."""
        self._read()
        news, self._news = self._news, []
        return news

    def _read(self) -> None:
        if self._is_lost:
            return
        for one in self._guard.news():
            if isinstance(one, Ended) and one.pid == self.pid:
                self._returncode = one.returncode
            if isinstance(one, Lost):
                self._is_lost = True
                if self._returncode is None:
                    self._returncode = _died_with_guard(self.pid)
                    self._news.append(Ended(self.pid, self._returncode))
            self._news.append(one)

    def send(self, number: int) -> bool:
        """Signal the command itself; False when it has ended."""
        if self.status() is not None:
            return False
        return _kill(self.pid, number)

    def close(self, wait_s: float = LOST_S) -> bool:
        """Let the guard go, which ends whoever is left below it; whether all of them are gone within this time."""
        return self._guard.close(wait_s)


def _died_with_guard(pid: int) -> int:
    """How the command of a guard that is gone has ended: it comes back to us, who are its next subreaper."""
    _kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + LOST_S
    while time.monotonic() < end_s:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            if procfs.state_of(pid) == "gone":
                return -signal.SIGKILL  # Collected as any orphan is; that is what it has died of.
            ended = 0  # A process that dies closes its files first, and hands its children on a moment later.
        if ended:
            return os.waitstatus_to_exitcode(status)
        select.select([], [], [], 0.001)
    return -signal.SIGKILL


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    blocked: Collection[int],
    claims: Claims,
    *,
    own_group: bool,
    early: Early | None = None,
    files_max: tuple[int, int] | None = None,
    score: str = "",
) -> Child | NotStarted:
    """Start the command, by a guard that was begun early or by a new one.

    `own_group` gives it a process group of its own, so that ctrl-C reaches the supervisor only. Not under Slurm: proctrack/pgid
    ends a step by its process group and would miss it. And not when stdin is our terminal: a background group is stopped when it
    reads from it. There SIGINT and SIGHUP, which the terminal sends to the whole group, are blocked in the command as well; also
    under Slurm, in a shell that somebody has on a node (`srun --pty bash`).
    `files_max`: RLIMIT_NOFILE as it was before this process has raised its own. `score`: its oom_score_adj, "" for ours.
    """
    shares_terminal = _stdin_is_our_terminal()
    shielded = {*blocked, *(_TERMINAL_SIGNALS if shares_terminal else ())}
    manner = Manner(shielded, own_group and not shares_terminal, files_max, score)
    problem: OSError | ValueError = OSError(0, "")
    for _ in range(GUARDS_MAX):
        try:
            guard = Guard.begin(claims) if early is None else early.take()
        except OSError as error:
            return NotStarted(EXIT_CANNOT_RUN, f"the guard of the command could not be started: {error.strerror}")
        try:
            return Child(guard.start(argv, env, manner), guard, shares_terminal)
        except (OSError, ValueError) as error:
            guard.close()
            problem = error
            if not isinstance(error, GuardEnded):
                break
    return _not_started(argv[0], problem)


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


def _not_started(command: str, error: OSError | ValueError) -> NotStarted:
    """As shells do: 127 when it is not found, 126 when it is there and cannot be run."""
    if isinstance(error, ValueError):
        return NotStarted(EXIT_CANNOT_RUN, f"{command}: {error}")
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
    if not 0 < pid <= PID_MAX:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    return fd if fd >= 0 else None


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
    """Every process below us, parents first, zombies included; without what the claims say is at work for us."""
    found = procfs.descendants()
    if claims is None:
        return found
    spared = claims.claimed()
    return [pid for pid in found if pid not in spared and not claims.is_apart(pid)]


def is_descendant(pid: int) -> bool:
    """Whether this process is below us. A pid of another namespace, or one that was used again, is not."""
    return procfs.descends(pid, os.getpid())


def state_of(pid: int) -> procfs.State:
    """What the process is doing: running, stopped, zombie, gone, uninterruptible."""
    return procfs.state_of(pid)


def end_all(number: int, claims: Claims | None = None, exempt: Callable[[int], bool] | None = None) -> list[int]:
    """Signal every process below us, then SIGCONT, so that stopped ones take it too. Returns those that were signalled.

    Looks again until nobody new is there, as some may fork meanwhile. Calls of our own that are under way (`claims.claimed()`)
    are spared, with what they have started: they end by themselves; so are those that `exempt` says. Of a SIGTERM nobody dies who
    has it blocked.
    """
    hit: list[int] = []
    spared = claims.claimed() if claims else frozenset()
    nobody_new = 0
    for _ in range(END_PASSES_MAX):
        seen = {*hit, *spared}
        fresh = [pid for pid in procfs.descendants() if pid not in seen and procfs.state_of(pid) not in ("zombie", "gone")]
        if claims is not None:
            fresh = [pid for pid in fresh if not claims.is_apart(pid)]
        if exempt is not None:
            fresh = [pid for pid in fresh if not exempt(pid)]
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
    if not 0 < pid <= PID_MAX:
        return False
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
