"""10,000 signals to a process that waits as the supervisor's loop does: how many are missed, and how late the others are seen.

Owns the receiving half: SignalInbox, the ranks' socket and the lanes in one zmq.Poller with a time-out, and a lane that is busy
beside it. The sending half is tests/support/proc_storm.py: from another process, at uneven moments, the next one of a kind only
after the last of that kind was seen, so that each is distinct.
Run as a script it is the receiver: `storm.py COUNT SEED`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import zmq
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.adapters.signals import SignalInbox
from ckpt_supervisor.adapters.transport import Transport

from tests.bench.figure import ROOT, Row
from tests.support import proc_storm
from tests.support.run import environment

COUNT = 10_000
SEED = 1
BOUND_S = 120
TIMEOUT_MS_MAX = 20
"""The loop's own time-outs end at any moment, also just when a signal comes."""


def measure() -> list[Row]:
    """One storm."""
    argv = [sys.executable, "-m", "tests.bench.storm", str(COUNT), str(SEED)]
    env = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(argv, env=env, cwd=ROOT, stdout=subprocess.PIPE, timeout=BOUND_S, check=True)
    report = json.loads(done.stdout)
    p50, p99 = report["p50_us"] / 1_000, report["p99_us"] / 1_000
    how = f"late: seen after more than {proc_storm.LATE_MS} ms; p50 {p50:.2f}, p99 {p99:.2f}, worst {report['worst_ms']:.1f} ms"
    return [
        Row(f"of {COUNT:,} signals missed", report["missed"] + (COUNT - report["missed"] - report["came"]), "", 0),
        Row(f"of {COUNT:,} signals late", report["late"], "", 0, how),
    ]


def receive(count: int, seed: int) -> None:
    """Be the loop, until the sender has ended."""
    chance = random.Random(seed)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it is ignored, and the inbox leaves that as it is.
    with (
        SignalInbox(extra=proc_storm.KINDS) as inbox,
        Lanes(("store",)) as lanes,
        Transport([tempfile.gettempdir()]) as transport,
    ):
        argv = [sys.executable, proc_storm.__file__, "send", str(os.getpid()), str(count), str(seed)]
        sender = subprocess.Popen(argv, stdin=subprocess.PIPE)
        assert sender.stdin is not None
        poller = zmq.Poller()
        for thing in (inbox.fileno(), lanes.fileno(), transport.socket):
            poller.register(thing, zmq.POLLIN)

        def at_work(_: object = None) -> None:
            lanes.post("store", "work", lambda: sum(range(chance.randrange(20_000))), at_work)

        at_work()
        while sender.returncode is None:
            ready = dict(poller.poll(chance.randrange(TIMEOUT_MS_MAX)))
            came = inbox.drain()
            if signal.SIGCHLD in came:
                sender.poll()
            now_ns = time.monotonic_ns()
            words = b"".join(proc_storm.WORD.pack(number, now_ns) for number in came if number in proc_storm.KINDS)
            if words and sender.returncode is None:
                os.write(sender.stdin.fileno(), words)
            if lanes.fileno() in ready:
                lanes.deliver()
        sender.stdin.close()


if __name__ == "__main__":
    receive(int(sys.argv[1]), int(sys.argv[2]))
