"""A storm of signals at an inbox: `proc_storm.py COUNT SEED` prints one JSON line with what was missed and how late the rest was.

Two processes. The receiver waits in poll(2) on the inbox and says when each signal came. The sender sends the next one of
a kind only after the last of that kind has come, so that each is distinct (the kernel merges equal pending ones). Both read
one monotonic clock. What a busy machine does is no lateness of the inbox: the time that the receiver had something to run and
no processor to run on is taken off, as the kernel tells it.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from ckpt_supervisor.adapters.signals import SignalInbox

KINDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT, signal.SIGRTMIN + 3)
WORD = struct.Struct("<BQ")
MISSED_S = 30.0
"""A signal that has not come by then has been missed, and the storm is over. A busy machine may stop a process for seconds."""

LATE_MS = 50
KILL_NS = 1_000_000
"""Who has taken longer to send was stopped on the way: it was sent at the end of that."""


def send(target: int, count: int, seed: int) -> None:
    """Send, wait for the word that it came, report."""
    chance = random.Random(seed)
    sent: dict[int, int] = {}
    late_us: list[int] = []
    missed = False
    rest = b""
    for number in range(count + len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        give_up = time.monotonic() + MISSED_S
        while kind in sent and time.monotonic() < give_up:
            readable, _, _ = select.select([0], [], [], MISSED_S)
            rest += os.read(0, 65_536) if readable else b""
            whole = len(rest) // WORD.size * WORD.size
            for came_of, when_ns in WORD.iter_unpack(rest[:whole]):
                late_us.append(max(0, when_ns - sent.pop(came_of)) // 1_000)
            rest = rest[whole:]
        missed = sent.pop(kind, None) is not None
        if missed:
            break
        if number < count:
            select.select([], [], [], chance.choice((0, 0, 0.0001, 0.0005, 0.001)))
            before_ns = time.monotonic_ns()
            os.kill(target, kind)
            after_ns = time.monotonic_ns()
            sent[kind] = before_ns if after_ns - before_ns < KILL_NS else after_ns
    came, late_us = len(late_us), sorted(late_us) or [0]
    report = {
        "sent": count, "missed": int(missed), "late": sum(us > LATE_MS * 1_000 for us in late_us), "came": came,
        "worst_ms": late_us[-1] / 1_000, "p50_us": late_us[len(late_us) // 2], "p99_us": late_us[len(late_us) * 99 // 100],
    }  # fmt: skip
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def waited_ns() -> int:
    """For how long this process has waited for a processor so far; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def receive(count: int, seed: int) -> None:
    """Wait in poll as the supervisor's loop does, with an uneven bit of work in between."""
    chance = random.Random(seed)
    with SignalInbox(extra=KINDS) as inbox:
        argv = [sys.executable, __file__, "send", str(os.getpid()), str(count), str(seed)]
        sender = subprocess.Popen(argv, stdin=subprocess.PIPE)
        assert sender.stdin is not None
        poll = select.poll()
        poll.register(inbox.fileno(), select.POLLIN)
        waited = waited_ns()
        while sender.returncode is None:
            poll.poll()
            came = inbox.drain()
            if signal.SIGCHLD in came:
                sender.poll()
            before, waited = waited, waited_ns()
            came_ns = time.monotonic_ns() - (waited - before)
            words = b"".join(WORD.pack(number, came_ns) for number in came if number != signal.SIGCHLD)
            if words and sender.returncode is None:
                os.write(sender.stdin.fileno(), words)
            sum(range(chance.randrange(2_000)))
        sender.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(*(int(word) for word in sys.argv[2:]))
    else:
        receive(*(int(word) for word in sys.argv[1:]))
