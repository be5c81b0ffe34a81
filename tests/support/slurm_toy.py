"""The toy with a few more knobs: what real trainings do around a notice, faults of one rank of several, ranks in lock-step.

Owns those knobs and nothing else; all others are the toy's (toy.py --help).
Must not: know Slurm. A launcher stands in for torchrun where only its ranks matter: `--ranks N` starts N toys and waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import toy
from ckpt_client import wire
from lock_step import LockStep, place_of

FAULTS = ("fail_save", "hang_save", "kill_self_in_save", "stop_self_in_save", "short_file", "wrong_step")
FAULTS_AT_EXIT = ("--hang-at-exit", "--exit-code-after-leave=1")
HELPER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
sys.stdin.read()
"""


class Plain(toy.Plain):
    """The toy's training, with more to say on who has its faults and when, in lock-step with other ranks if asked for."""

    knobs = argparse.Namespace()
    broken_off = False
    saves = 0
    lock: LockStep | None = None

    def save(self, directory: Path, step: int) -> Any:
        """The toy's save; the first ones without its faults and its slowness, and only one rank's with them if asked for."""
        self.saves += 1
        wanted, knobs = self.args, self.knobs
        args = dict(vars(wanted))
        if self.saves < knobs.faults_from or knobs.faulty_rank not in (-1, self.words.rank):
            args |= dict.fromkeys(FAULTS, False)
        if self.saves < knobs.faults_from or knobs.slow_rank not in (-1, self.words.rank):
            args["save_ms"] = 0.0
        self.args = argparse.Namespace(**args)
        try:
            if knobs.dies_in_save and knobs.faulty_rank in (-1, self.words.rank):
                os._exit(77)
            if knobs.meet_in_save:
                self.meet(f"save {step}")
            return [super().save(directory, step), *self.archives(directory)]
        finally:
            self.args = wanted

    def archives(self, directory: Path) -> list[Path]:
        """Half of an archive as torch.save writes it, if asked for: it can be seen that the rest is missing."""
        if not self.knobs.short_archive or self.saves < self.knobs.faults_from or self.knobs.faulty_rank != self.words.rank:
            return []
        path = directory / f"toy-{self.words.rank:05d}.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"." * 4096)
        os.truncate(path, path.stat().st_size // 2)
        return [path]

    def step(self, n: int) -> None:
        """The toy's step, unless training is to end here."""
        if Plain.broken_off:
            self.words.say("broken off")
            raise SystemExit(0)
        if n == self.knobs.dies_at and self.knobs.faulty_rank in (-1, self.words.rank):
            os._exit(77)
        if n == self.knobs.raises_at:
            raise RuntimeError("boom")
        self.meet(f"step {n}")
        super().step(n)

    def load(self, directory: Path) -> None:
        """The toy's load, and its words on what was loaded."""
        self.words.say(f"load {directory}")
        super().load(directory)

    def meet(self, where: str) -> None:
        """Wait for all ranks."""
        if self.knobs.lock_step:
            self.lock = self.lock or place_of(self.knobs.lock_step)
            self.lock.meet(where)


def say_another_step() -> None:
    """A client gone wrong: from the second round on it says that its save began with the step before the agreed one."""
    honest = wire.Saved

    def wrong(who: wire.Who, number: int, n: int, files: tuple[wire.SavedFile, ...], save_ms: int) -> wire.Saved:
        return honest(who, number, n - (number > 1), files, save_ms)

    wire.Saved = wrong  # type: ignore[assignment,misc]


class Unhooked:
    """What a rank without a hook calls in its place."""

    def step(self, n: int) -> None:
        """Nothing."""


def unhooked(args: argparse.Namespace, words: toy.Words, training: Any) -> Iterator[tuple[Any, int]]:
    """The numbers of the steps of a rank that never attaches: it takes the weights that rank 0 has saved."""
    resume_from = os.environ.get("CKPT_SUPERVISE_RESUME_FROM", "")
    if resume_from:
        training.n = int(Path(resume_from).name.removeprefix("step-"))
        training.value = toy.chain(training.n, words.rank)
    words.say(f"ready pid {os.getpid()} at {training.n}")
    for n in range(training.n + 1, args.steps + 1):
        yield Unhooked(), n


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
    add("--faulty-rank", type=int, default=-1, help="only this rank has the faults; -1: all")
    add("--slow-rank", type=int, default=-1, help="only this rank's save takes --save-ms; -1: all")
    add("--dies-at", type=int, default=0, metavar="STEP", help="exit with 77 there, without a word")
    add("--raises-at", type=int, default=0, metavar="STEP", help="an exception there that nobody catches")
    add("--dies-in-save", action="store_true", help="the same, in the first save")
    add("--short-archive", action="store_true", help="one file more, a torch archive that is cut off; with --faulty-rank")
    add("--says-another-step", action="store_true", help="after its second save; with --faulty-rank")
    add("--lock-step", default="", metavar="PATH", help="all ranks wait for each other in every step (lock_step.py)")
    add("--meet-in-save", action="store_true", help="and in every save")
    add("--rank-0-only", action="store_true", help="only rank 0 attaches; with --mode attach")
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
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    if args.slower_ranks_ms:
        sys.argv += ["--save-ms", str((rank + 1) * args.slower_ranks_ms)]
    Plain.knobs = args
    toy.Plain = Plain  # type: ignore[misc]
    if args.faulty_rank not in (-1, rank):
        sys.argv[1:] = [word for word in sys.argv[1:] if word not in FAULTS_AT_EXIT]
    if args.rank_0_only and rank:
        toy.numbers = unhooked
    if args.says_another_step and args.faulty_rank == rank:
        say_another_step()
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
