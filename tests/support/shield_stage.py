"""Processes with SIGTERM blocked for the tests of the shield, and senders of all kinds.

Owns their start and their end. Must not know what the shield does with them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from ckpt_supervisor.linux import procfs

from tests.support.proc_stage import BOUND_S, blocked, until

SENDER = 'while read -r number pid; do kill -"$number" "$pid"; echo sent; done'
"""A shell that sends what it is told to, one line each."""

HANDLER = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""
"""A program that ends by itself at SIGTERM, with 7."""

TRACER = """
    import ctypes, sys
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0
    print("ready", flush=True)
    sys.stdin.read()
"""
"""A debugger: it has seized that process, and leaves it alone."""


class Processes:
    """Starts processes with SIGTERM blocked, and ends them."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str, shielded: bool = True) -> subprocess.Popen[bytes]:
        """One process; `sleep` if nothing else is said."""
        with blocked(*((signal.SIGTERM,) if shielded else ())):
            pipes = subprocess.PIPE if argv else None
            self.started.append(subprocess.Popen(argv or ("sleep", "1000"), stdin=pipes, stdout=pipes))
        return self.started[-1]

    def python(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A script of Python that says a line when it is ready."""
        process = self.start(sys.executable, "-c", textwrap.dedent(script), *arguments)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def sender(self) -> Sender:
        """A process that can send signals."""
        return Sender(self.start("sh", "-c", SENDER))

    def end(self) -> None:
        """All of them."""
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait(BOUND_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class Sender:
    """A process beside the tested one that sends signals when it is told to."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid

    def send(self, number: int, pid: int) -> None:
        """Send it, and return once that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number} {pid}\n".encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"sent\n"


def lives(pid: int) -> bool:
    """Whether it has not ended. On a busy machine it may just be waiting for a page."""
    return procfs.state_of(pid) in ("running", "uninterruptible")


def stopped(process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP it, and return once it stands."""
    process.send_signal(signal.SIGSTOP)
    until(lambda: procfs.state_of(process.pid) == "stopped", "it is stopped")
