"""Where the threads of a process are: by py-spy where it may look, by the process itself at a signal, by the kernel at the least.

Owns how stacks are got, and their bounds. Must not end or stop anybody: py-spy only reads (--nonblocking: it stops no process, so
none stays stopped when py-spy is killed for being late), and the signal goes only to a process below us that has said it has a
handler for it, and has one. A process that is stopped, or sleeps uninterruptibly, cannot answer a signal: there py-spy alone can
tell more than the kernel.

A rank's stacks are read from /proc/PID/fd: no link of a file system is followed, and only a file of the client's name is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_client.wire import Progress

from ckpt_supervisor.adapters import children
from ckpt_supervisor.linux import procfs, threads

PY_SPY_S = 10.0
ALL_S = 30.0
"""All ranks together; who comes later is shown as the kernel shows it."""

ANSWER_S = 3.0
"""A process writes its stacks within milliseconds."""

LOOK_MS = 20
SETTLED_LOOKS = 5
"""So many looks that find nothing new: it has written all."""

TEXT_CHARS_MAX = 7_500
"""A line of the journal holds 8,000 of one text."""

OUTPUT_BYTES_MAX = 1 << 20
REALTIME = range(34, 65)
"""Signals that are nobody's by default (signal(7))."""

FILE_NAMES = ("/memfd:ckpt-stacks", "/ckpt-stacks-")
"""What the client's file is called, with memfd_create and without."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dump:
    """The stacks of one rank. `by`: who has told them."""

    rank: int
    pid: int
    by: str
    text: str


class Taker:
    """Takes the stacks of ranks, one after the other. `env`: where py-spy is looked for. Runs in a lane."""

    def __init__(self, env: Mapping[str, str], claims: children.Claims) -> None:
        self._env = env
        self._claims = claims
        self._py_spy = _py_spy(env)

    def take(self, words: Sequence[Progress]) -> list[Dump]:
        """The stacks of those that have said these words. Takes ALL_S at most."""
        end_s = time.monotonic() + ALL_S
        return [self._one(word, end_s) for word in words]

    def _one(self, word: Progress, end_s: float) -> Dump:
        rank, pid = word.who.rank, word.who.pid
        if not children.is_descendant(pid):
            return Dump(rank, pid, "nobody", "no process of this number is below this supervisor")
        text = self._by_py_spy(pid, end_s)
        if text:
            return Dump(rank, pid, "py-spy", cut(text))
        answers = procfs.state_of(pid) == "running"
        text = _by_signal(word) if answers and time.monotonic() < end_s else ""
        if text:
            return Dump(rank, pid, "faulthandler", cut(main_first(text)))
        return Dump(rank, pid, "the kernel", cut(threads.shown(pid)))

    def _by_py_spy(self, pid: int, end_s: float) -> str:
        """What py-spy says; "" if it is not here, may not look (ptrace(2): a container, yama), or is late."""
        left_s = min(PY_SPY_S, end_s - time.monotonic())
        if self._py_spy is None or left_s <= 0:
            return ""
        argv = [self._py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            with self._claims.forking() as claim:
                process = subprocess.Popen(
                    argv, env=dict(self._env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                claim(process.pid)
        except OSError:
            return ""
        try:
            text = _output(process, time.monotonic() + left_s)
        finally:
            is_good = self._collect(process)
        return text if is_good and "Thread" in text else ""

    def _collect(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for its end, which is at hand or brought about; whether it was a good one."""
        fd = children.pidfd(process.pid)
        if fd is not None:
            if not children.readable(fd, 2.0):
                children.send(process.pid, 9)
                children.readable(fd, 1.0)
            os.close(fd)
        returncode = -9
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            returncode = os.waitstatus_to_exitcode(status) if ended else -9
        process.returncode = returncode  # Keeps Popen from waiting for it.
        self._claims.release(process.pid)
        return returncode == 0


def cut(text: str) -> str:
    """As much of it as a line of the journal holds."""
    left = len(text) - TEXT_CHARS_MAX
    return text if left <= 0 else f"{text[:TEXT_CHARS_MAX]}\n... [{left} more]"


def main_first(text: str) -> str:
    """faulthandler writes the thread that has got the signal, which is the main one, last: it is what one looks for."""
    parts = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    return "".join(sorted(parts, key=lambda part: not part.startswith("Current thread")))


def _py_spy(env: Mapping[str, str]) -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return shutil.which("py-spy", path=env.get("PATH", os.defpath)) or (str(beside) if os.access(beside, os.X_OK) else None)


def _output(process: subprocess.Popen[bytes], end_s: float) -> str:
    """What it prints until it closes its end, or time is up."""
    assert process.stdout is not None
    kept = bytearray()
    with process.stdout as pipe:
        while (left_s := end_s - time.monotonic()) > 0 and children.readable(pipe.fileno(), left_s):
            chunk = os.read(pipe.fileno(), 65_536)
            if not chunk:
                break
            if len(kept) < OUTPUT_BYTES_MAX:
                kept += chunk
    return bytes(kept[:OUTPUT_BYTES_MAX]).decode("utf-8", "replace")


def _by_signal(word: Progress) -> str:
    """What the process writes at its signal; "" if it has none, or does not answer."""
    pid, number = word.who.pid, word.dump_signal
    if number not in REALTIME or word.dump_fd < 0:
        return ""
    path = f"/proc/{pid}/fd/{word.dump_fd}"
    fd = -1
    try:
        if not any(name in os.readlink(path) for name in FILE_NAMES):  # noqa: PTH115
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        began = os.fstat(fd)
        if not stat.S_ISREG(began.st_mode) or not procfs.catches(pid, number) or not children.send(pid, number):
            return ""  # Without a handler the signal would end it.
        _settle(fd, began.st_size)
        return os.pread(fd, OUTPUT_BYTES_MAX, began.st_size).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        if fd >= 0:
            os.close(fd)


def _settle(fd: int, size: int) -> None:
    """Wait until it has grown and grows no more, within a bound."""
    end_s = time.monotonic() + ANSWER_S
    began, same = size, 0
    while time.monotonic() < end_s and same < SETTLED_LOOKS:
        select.select([], [], [], LOOK_MS / 1_000)
        now = os.fstat(fd).st_size
        same = same + 1 if now == size and now > began else 0
        size = now
