"""The toy among helpers that nobody can be rid of by asking: daemons, sessions of their own, processes deaf to every signal.

Owns those helpers, a trainer that is as deaf as they are, and one whose helpers come and go all the time; all other knobs are the
toy's (toy.py --help).
Must not end anything that outlives the toy: what becomes of it is what the tests are about. Every helper is marked on its command
line with the job, attempt and step that it belongs to (`unruly:JOB.ATTEMPT.STEP`), which tells it also where its environment is
empty; every one ends by itself after ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import toy

LIFE_S = "600"
CHAIN_PAUSE_S = 0.005
CATCHABLE = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
BLOCKED_WRITERS = 3
MORE_THAN_A_PIPE = bytes(1 << 20)
SLEEP = shutil.which("sleep") or "/bin/sleep"
POOL_S = 60
"""Bound on what takes a tenth of a second: a Pool that hangs is told and not waited for."""


def mark() -> str:
    """What the command line of each helper holds."""
    attempt = os.environ.get("SLURM_RESTART_COUNT") or "0"
    return f"unruly:{os.environ.get('SLURM_JOB_ID', '')}.{attempt}.{os.environ.get('SLURM_STEP_ID', '')}"


def deaf() -> None:
    """Ignore whatever can be ignored, also after an exec."""
    for number in CATCHABLE:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def become(kind: str, env: dict[str, str] | None = None) -> None:
    """Be a deaf process for the rest of its life; its name says which helper it is."""
    deaf()
    os.execve(SLEEP, [f"{mark()} {kind}", LIFE_S], dict(os.environ) if env is None else env)  # noqa: S606


def without_output() -> None:
    """As a daemon should: hold nobody's stdin, stdout and stderr."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)


def session() -> None:
    """A process in a session of its own."""
    os.setsid()
    become("setsid")


def daemon() -> None:
    """A process that has left its parent, with the environment of the step."""
    os.setsid()
    if os.fork() == 0:
        become("daemon")
    os._exit(0)


def scrubbed() -> None:
    """A daemon with an empty environment, as `env -i` makes it."""
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        become("scrubbed", {})
    os._exit(0)


def ignoring() -> None:
    """A child that ignores everything, in the session of the step."""
    become("deaf")


def stopped() -> None:
    """A child that is stopped; woken, it is as deaf as the others."""
    os.kill(os.getpid(), signal.SIGSTOP)
    become("stopped")


def blocked() -> None:
    """A worker in the middle of writing to a pipe that nobody reads; it holds the other end itself, so no error ever comes."""
    _reading, writing = os.pipe()
    os.write(writing, MORE_THAN_A_PIPE)


HELPERS: dict[str, Callable[[], None]] = {
    "setsid": session,
    "daemon": daemon,
    "scrubbed": scrubbed,
    "deaf": ignoring,
    "stopped": stopped,
    "blocked": blocked,
}


def start(kind: str, *, quiet: bool) -> None:
    """Start this helper; a `quiet` one does not hold the step's output."""
    for _ in range(BLOCKED_WRITERS if kind == "blocked" else 1):
        pid = os.fork()
        if pid == 0:
            if quiet:
                without_output()
            HELPERS[kind]()
            os._exit(0)
        if kind in ("daemon", "scrubbed"):
            os.waitpid(pid, 0)


def chain(count: int) -> None:
    """So many processes, one started by the other, each deaf and in a session of its own, all of which stay."""
    if os.fork():
        return
    deaf()
    for left in range(count - 1, -1, -1):
        os.setsid()
        if left == 0 or os.fork():
            become(f"chain {left}")
        threading.Event().wait(CHAIN_PAUSE_S)


def sidecar() -> int:
    """A child that ends on TERM, below it one that has inherited everything and does not end: the pipe to them never says so."""
    reading, _writing = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if os.fork() == 0:
            os.setsid()
            deaf()
        threading.Event().wait(float(LIFE_S))
        os._exit(0)
    os.close(_writing)
    return reading


def double(number: int) -> int:
    """What a Pool's workers do."""
    threading.Event().wait(0.01)
    return 2 * number


class Churn:
    """Helpers that come and go: each has something to do, and has to live until it has done it, whatever signals there are.

    Every one that has ended otherwise is told in a line `early death`, a Pool that does not end in one `hang`. `rough`: some are
    ended by their parent's SIGTERM, as `Pool.__exit__` does it; else all end by themselves.
    """

    def __init__(self, words: toy.Words, *, rough: bool) -> None:
        self.words = words
        self.rough = rough
        self.running: list[tuple[subprocess.Popen[bytes], str]] = []
        self.ended = 0

    def turn(self, n: int) -> None:
        """In step n: one more helper, a look at the others; in every tenth a Pool, in every fifth a `terminate()`."""
        kinds = {"sleep": ["sleep", "0.2"], "bash": ["bash", "-c", "sleep 0.1; exit 0"], "python": [sys.executable, "-ISc", "2"]}
        kind = list(kinds)[n % len(kinds)]
        self.running.append((subprocess.Popen(kinds[kind]), kind))
        for process, name in list(self.running):
            if process.poll() is not None:
                self.running.remove((process, name))
                self.ended += 1
                if process.returncode != 0:
                    self.words.say(f"early death of {name}: {process.returncode}")
        if n % 10 == 0:
            self.pool()
        if self.rough and n % 5 == 0:
            self.terminate()
        self.words.say(f"helpers {self.ended}", quiet=True)

    def pool(self) -> None:
        """A Pool does its work and is shut down."""
        with multiprocessing.get_context("fork").Pool(2) as pool:
            try:
                doubled = pool.map_async(double, range(4)).get(POOL_S)
            except multiprocessing.TimeoutError:
                self.words.say("hang of a pool")
                return
            if not self.rough:
                pool.close()
                pool.join()
        if doubled != [0, 2, 4, 6]:
            self.words.say(f"early death in a pool: {doubled}")

    def terminate(self) -> None:
        """A helper that would run for ever is ended by its parent."""
        with subprocess.Popen(["sleep", LIFE_S]) as process:
            self.words.say(f"terminates {process.pid}", quiet=True)
            process.terminate()
            try:
                process.wait(POOL_S)
            except subprocess.TimeoutExpired:
                self.words.say("hang of a terminate()")
                process.kill()


class Plain(toy.Plain):
    """The toy's training among its helpers."""

    knobs = argparse.Namespace()
    churn: Churn | None = None
    chained = False

    def step(self, n: int) -> None:
        """The toy's step, and what is asked for beside it."""
        knobs = self.knobs
        rank_is_meant = not knobs.stuck_ranks or str(self.words.rank) in knobs.stuck_ranks.split(",")
        if n == knobs.stuck_at and rank_is_meant:
            self.words.say("stuck")
            threading.Event().wait()
        if n == knobs.sidecar_at:
            reading = sidecar()
            self.words.say("sidecar")
            if knobs.dies_beside_it:
                os._exit(3)
            os.read(reading, 1)
        if knobs.churn:
            self.churn = self.churn or Churn(self.words, rough=knobs.churn == "rough")
            self.churn.turn(n)
        super().step(n)

    def save(self, directory: Path, step: int) -> object:
        """The toy's save; the chain begins to grow in the first one."""
        if self.knobs.chain and not self.chained:
            self.chained = True
            chain(self.knobs.chain)
        return super().save(directory, step)


def options() -> argparse.Namespace:
    """The knobs of this file; the rest is left to the toy."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("--helpers", default="", help=f"with commas between: {', '.join(HELPERS)}")
    add("--quiet-helpers", action="store_true", help="they do not hold stdout")
    add("--deaf", action="store_true", help="the trainer ignores every signal, too")
    add("--stops-at-leave", action="store_true", help="and stops itself where it should end")
    add(
        "--chain",
        type=int,
        default=0,
        metavar="N",
        help="N deaf processes, each started by the one before, from the first save on",
    )
    add("--stuck-at", type=int, default=0, metavar="STEP", help="that step never ends")
    add("--stuck-ranks", default="", help="only on these ranks, with commas between")
    add("--sidecar-at", type=int, default=0, metavar="STEP", help="start one in that step, and wait for it for ever")
    add("--dies-beside-it", action="store_true", help="exit with 3 instead of waiting")
    add("--churn", choices=("rough", "gentle"), help="helpers come and go all the time; rough: some by SIGTERM of their parent")
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return args


def main() -> int:
    """Run the toy among these helpers."""
    args = options()
    Plain.knobs = args
    toy.Plain = Plain  # type: ignore[misc]
    for kind in filter(None, args.helpers.split(",")):
        start(kind, quiet=args.quiet_helpers)
    if args.deaf:
        deaf()
    try:
        return toy.main()
    finally:
        if args.stops_at_leave:
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    sys.exit(main())
