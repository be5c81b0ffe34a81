"""Real processes as tests see them: a script in a Python of its own, its lines with a bound, and facts waited for with a bound.

Owns nothing of the product. Must not sleep for an effect: everything here waits for a fact, and gives up after BOUND_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

BOUND_S = 60.0
"""For facts that come within a second on an idle machine."""

POLL_S = 0.01


def until(fact: Callable[[], object], what: str, bound_s: float = BOUND_S) -> None:
    """Return once the fact holds; fail when it does not within the bound."""
    give_up = time.monotonic() + bound_s
    while not fact():
        assert time.monotonic() < give_up, f"not within {bound_s} s: {what}"
        threading.Event().wait(POLL_S)


def python_env(**more: str) -> dict[str, str]:
    """Our environment, and our import path for a Python of its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def end_below(pid: int) -> None:
    """End what runs below a process. psutil, so that it works where the code under test is at fault."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Stage:
    """A script that runs in a Python of its own and says JSON lines; ended when the `with` block ends."""

    def __init__(self, script: str, *arguments: str, env: Mapping[str, str] | None = None, wrapper: tuple[str, ...] = ()) -> None:
        self._argv = [*wrapper, sys.executable, "-c", textwrap.dedent(script), *arguments]
        self._env = env or python_env()

    def __enter__(self) -> Stage:
        self.process = subprocess.Popen(self._argv, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid
        self._rest = b""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end_below(self.pid)
        self.process.kill()
        self.process.wait(BOUND_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def said(self, bound_s: float = BOUND_S) -> Any:
        """The next line, read as JSON."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        give_up = time.monotonic() + bound_s
        while b"\n" not in self._rest:
            readable, _, _ = select.select([fd], [], [], max(0.0, give_up - time.monotonic()))
            assert readable, f"the script said nothing within {bound_s} s"
            chunk = os.read(fd, 65_536)
            assert chunk, f"the script ended with {self.process.wait(BOUND_S)} and said nothing more"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def say(self, line: str = "") -> None:
        """One line on the script's stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def ends(self, bound_s: float = BOUND_S) -> int:
        """Its exit status."""
        return self.process.wait(bound_s)


@contextlib.contextmanager
def blocked(*numbers: int) -> Iterator[None]:
    """These signals are blocked in this thread, and in what it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def mask_of(pid: int | str, which: str = "SigBlk") -> set[int]:
    """The signals in one mask of /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    bits = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith(f"{which}:"))
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}
