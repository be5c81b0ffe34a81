"""A storm of signals at an inbox: `proc_storm.py COUNT SEED` prints one JSON line with what was missed and how late the rest was.

Two processes. The receiver waits in poll(2) on the inbox and says when each signal came. The sender sends the next one of
a kind only after the last of that kind has come, so that each is distinct (the kernel merges equal pending ones). Both read
one monotonic clock.
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

from ckpt_supervisor.signals import SignalInbox

KINDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT, signal.SIGRTMIN + 3)
WORD = struct.Struct("<BQ")
MISSED_S = 3.0
"""A signal that has not come by then has been missed."""

LATE_MS = 50


def send(target: int, count: int, seed: int) -> None:
    """Send, wait for the word that it came, report."""
    chance = random.Random(seed)
    sent: dict[int, int] = {}
    late_us: list[int] = []
    missed = 0
    rest = b""
    for number in range(count + len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        give_up = time.monotonic() + MISSED_S
        while kind in sent and time.monotonic() < give_up:
            readable, _, _ = select.select([0], [], [], MISSED_S)
            rest += os.read(0, 65_536) if readable else b""
            whole = len(rest) // WORD.size * WORD.size
            for came, when_ns in WORD.iter_unpack(rest[:whole]):
                late_us.append((when_ns - sent.pop(came)) // 1_000)
            rest = rest[whole:]
        missed += sent.pop(kind, None) is not None
        if number < count:
            select.select([], [], [], chance.choice((0, 0, 0.0001, 0.0005, 0.001)))
            sent[kind] = time.monotonic_ns()
            os.kill(target, kind)
    late_us.sort()
    report = {
        "sent": count, "missed": missed, "late": sum(us > LATE_MS * 1_000 for us in late_us), "came": len(late_us),
        "worst_ms": late_us[-1] / 1_000, "p50_us": late_us[len(late_us) // 2], "p99_us": late_us[len(late_us) * 99 // 100],
    }  # fmt: skip
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def receive(count: int, seed: int) -> None:
    """Wait in poll as the supervisor's loop does, with an uneven bit of work in between."""
    chance = random.Random(seed)
    with SignalInbox(extra=KINDS) as inbox:
        argv = [sys.executable, __file__, "send", str(os.getpid()), str(count), str(seed)]
        sender = subprocess.Popen(argv, stdin=subprocess.PIPE)
        assert sender.stdin is not None
        poll = select.poll()
        poll.register(inbox.fileno(), select.POLLIN)
        while sender.returncode is None:
            poll.poll()
            came = inbox.drain()
            if signal.SIGCHLD in came:
                sender.poll()
            now_ns = time.monotonic_ns()
            words = b"".join(WORD.pack(number, now_ns) for number in came if number != signal.SIGCHLD)
            if words and sender.returncode is None:
                os.write(sender.stdin.fileno(), words)
            sum(range(chance.randrange(2_000)))
        sender.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(*(int(word) for word in sys.argv[2:]))
    else:
        receive(*(int(word) for word in sys.argv[1:]))
