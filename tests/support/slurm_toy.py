"""The toy with a few more knobs, for what real trainings do around a notice: their own handlers, side processes, late faults.

Owns those knobs and nothing else; all others are the toy's (toy.py --help).
Must not: know Slurm. A launcher stands in for torchrun where only its ranks matter: `--ranks N` starts N toys and waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import toy

HELPER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
sys.stdin.read()
"""


class Plain(toy.Plain):
    """The toy's training, with the faults of its saves from a given save on, and an end of its own when a signal asks for it."""

    faults_from = 1
    saves = 0
    broken_off = False

    def save(self, directory: Path, step: int) -> Any:
        """The toy's save; the first ones without its faults and its slowness."""
        self.saves += 1
        wanted = self.args
        if self.saves < self.faults_from:
            calm = {
                "save_ms": 0.0,
                "fail_save": False,
                "hang_save": False,
                "kill_self_in_save": False,
                "stop_self_in_save": False,
            }
            self.args = argparse.Namespace(**{**vars(wanted), **calm})
        try:
            return super().save(directory, step)
        finally:
            self.args = wanted

    def step(self, n: int) -> None:
        """The toy's step, unless training is to end here."""
        if Plain.broken_off:
            self.words.say("broken off")
            raise SystemExit(0)
        super().step(n)


def own_handler(number: int, what: str) -> None:
    """A handler as a framework installs it: it unblocks the signal, too."""

    def handle(_number: int, _frame: object) -> None:
        os.write(1, f"own handler: {what}\n".encode())
        if number == signal.SIGTERM:
            Plain.broken_off = True

    signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def launch(ranks: int) -> int:
    """Start that many toys as torchrun would, with `{rank}` in their words replaced, and wait for all of them."""
    words = [word for word in sys.argv if not word.startswith("--ranks=")]
    started = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        argv = [sys.executable, *(word.replace("{rank}", str(rank)) for word in words)]
        started.append(subprocess.Popen(argv, env=env))
    return max(abs(process.wait()) for process in started)


def options() -> argparse.Namespace:
    """The knobs of this file; the rest is left to the toy."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("--ranks", type=int, default=0, help="as --ranks=N")
    add("--faults-from", type=int, default=1, help="number of the first save that is slow or faulty")
    add("--slower-ranks-ms", type=int, default=0, help="each rank's save takes so much longer than that of the rank before it")
    add("--own-usr1", action="store_true", help="a handler of its own that only prints")
    add("--ends-on-term", type=int, default=-1, help="this rank has a handler of its own and ends with 0 on SIGTERM")
    add("--side-process", action="store_true", help="one that dies of SIGTERM; writing to it after the save then fails")
    args, rest = parser.parse_known_args()
    if not args.ranks:
        sys.argv[1:] = rest
    return args


def main() -> int:
    """Run the toy with these knobs."""
    args = options()
    if args.ranks:
        return launch(args.ranks)
    rank = int(os.environ.get("RANK", "0"))
    if args.slower_ranks_ms:
        sys.argv += ["--save-ms", str((rank + 1) * args.slower_ranks_ms)]
    Plain.faults_from = args.faults_from
    toy.Plain = Plain  # type: ignore[misc]
    if args.own_usr1:
        own_handler(signal.SIGUSR1, "USR1")
    if args.ends_on_term == rank:
        own_handler(signal.SIGTERM, "TERM")
    if not args.side_process:
        return toy.main()
    with subprocess.Popen([sys.executable, "-c", HELPER], stdin=subprocess.PIPE) as side:
        try:
            return toy.main()
        finally:
            assert side.stdin is not None
            os.write(side.stdin.fileno(), b"the run is over\n")


if __name__ == "__main__":
    sys.exit(main())
