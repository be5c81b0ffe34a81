"""TOY: a trainer with knobs, for tests of everything around it.

Owns the knobs and the words it prints, one fact a line: `ready pid P at N rank R t MS`, `step N rank R t MS` after each step, and
`saving N`, `saved N`, `eval N`, `preempted`, `end`, `exit` likewise.
Without torch it starts in a tenth of a second, and its state is a chain of numbers that only an unbroken run of steps gives.
Must not sleep in place of a fact: it waits only where work is imitated.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckpt_client as ckpt
from ckpt_client.meeting import held

MASK = (1 << 64) - 1
PARTS = 50
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_never = threading.Event()


def work(ms: float) -> None:
    """Imitate work that takes this long and lets other threads run, as a long C call does."""
    if ms > 0:
        _never.wait(ms / 1000)


class Words:
    """What the toy says, appended line by line to --log and to stdout."""

    def __init__(self, log: str, rank: int) -> None:
        self.fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else -1
        self.rank = rank

    def say(self, what: str, *, quiet: bool = False) -> None:
        """One line in one write, so that lines of several ranks never mix."""
        line = f"{what} rank {self.rank} t {time.time_ns() // 1_000_000}\n".encode()
        if self.fd >= 0:
            os.write(self.fd, line)
        if self.fd < 0 or not quiet:
            with contextlib.suppress(BrokenPipeError):  # Whoever read this may be dead.
                os.write(1, line)


class Plain:
    """A training without torch: after n steps the value is `chain(n, rank)`."""

    def __init__(self, args: argparse.Namespace, words: Words) -> None:
        self.args = args
        self.words = words
        self.n = 0
        self.value = words.rank

    def step(self, n: int) -> None:
        """Do step number n (from 1). Raises if a step was lost or repeated."""
        if n != self.n + 1:
            raise RuntimeError(f"step {n} after {self.n}")
        work(self.args.step_ms)
        self.n, self.value = n, link(self.value, n)

    def save(self, directory: Path, step: int) -> Any:
        """An own save, with every fault that --help lists."""
        args = self.args
        self.words.say(f"saving {step}")
        name = f"toy-{self.words.rank:05d}.json"
        content = {"step": step - 1 if args.wrong_step else step, "rank": self.words.rank, "value": self.value}
        data = json.dumps(content).encode() + b" " * (args.ballast_mb << 20)
        place = Path(args.save_elsewhere) if args.save_elsewhere else directory
        place.mkdir(parents=True, exist_ok=True)
        with (place / name).open("wb", buffering=0) as file:
            write_slowly(file, data, args)
        if args.short_file:
            os.truncate(place / name, len(data) // 2)
        self.words.say(f"saved {step}")
        return place / name

    def load(self, directory: Path) -> None:
        """Load a committed checkpoint; raises unless it is whole, of this rank and of the step its name says."""
        content = json.loads((directory / f"toy-{self.words.rank:05d}.json").read_bytes())
        self.n, self.value = content["step"], content["value"]
        named = int(directory.name.removeprefix("step-"))
        if self.n != named or content["rank"] != self.words.rank or self.value != chain(self.n, self.words.rank):
            raise RuntimeError(f"{directory} holds {content}")

    def state(self) -> dict[str, Any]:
        """Objects for steps(): none without torch."""
        return {}

    def finish(self, out: str) -> None:
        """Write the final state."""
        if out and self.words.rank == 0:
            Path(out).write_text(json.dumps({"n": self.n, "value": self.value}))


def link(value: int, n: int) -> int:
    """The value after step n."""
    return (value * 6364136223846793005 + n) & MASK


def chain(n: int, rank: int) -> int:
    """The value after n steps."""
    value = rank
    for i in range(1, n + 1):
        value = link(value, i)
    return value


def write_slowly(file: Any, data: bytes, args: argparse.Namespace) -> None:
    """Write in parts that together take --save-ms, with the faults asked for in the middle."""
    size = max(1, -(-len(data) // PARTS))
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    for number, part in enumerate(parts):
        if number == len(parts) // 2:
            faults_in_save(args)
        file.write(part)
        work(args.save_ms / len(parts))


def faults_in_save(args: argparse.Namespace) -> None:
    """What goes wrong in the middle of a save, if asked for."""
    if args.fail_save:
        raise OSError(28, "No space left on device (asked for by --fail-save)")
    if args.kill_self_in_save:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.stop_self_in_save:
        os.kill(os.getpid(), signal.SIGSTOP)
    if args.hang_save:
        _never.wait()


def evaluate(args: argparse.Namespace, words: Words, loop: Any, n: int) -> None:
    """An evaluation every --eval-every steps."""
    if not args.eval_every or n % args.eval_every or (args.eval_alone and words.rank):
        return
    words.say(f"eval {n}")
    with loop.phase("eval", alone=args.eval_alone):
        for _ in range(args.eval_safe_points):
            work(args.eval_ms / (args.eval_safe_points + 1))
            loop.safe_point()
        work(args.eval_ms / (args.eval_safe_points + 1))
    words.say(f"eval-end {n}")


def train(args: argparse.Namespace, words: Words, training: Any) -> None:
    """The loop, in the manner of --mode."""
    for loop, n in numbers(args, words, training):
        if args.silence_ms and (met := held()) and met.attachment:
            met.attachment.rank.silence_ms = args.silence_ms
        training.step(n)
        words.say(f"step {n}", quiet=True)
        if args.mode == "attach":
            with contextlib.suppress(ckpt.Preempted) if args.ignore_leave else contextlib.nullcontext():
                loop.step(n * args.stride)
        evaluate(args, words, loop, n)
    words.say("end")


def numbers(args: argparse.Namespace, words: Words, training: Any) -> Iterator[tuple[Any, int]]:
    """The numbers of the steps to do, with the loop or hook they belong to."""
    if args.mode == "attach":
        hook = ckpt.attach(training.save, training.load)
        words.say(f"ready pid {os.getpid()} at {training.n}")
        for n in range(training.n + 1, args.steps + 1):
            yield hook, n
        hook.close()
        return
    if args.mode == "own":
        loop = ckpt.steps(args.steps, save=training.save, load=training.load)
    else:
        loop = ckpt.steps(args.steps, **training.state())
    words.say(f"ready pid {os.getpid()} at {loop.start}")
    for i in loop:
        yield loop, i + 1


def run(args: argparse.Namespace, words: Words, training: Any) -> int:
    """Train, and leave as asked for. Returns the exit code."""
    try:
        train(args, words, training)
    except ckpt.Preempted:
        words.say("preempted")
        if args.ignore_leave:
            train_on(args, words, training)
        if args.hang_at_exit:
            _never.wait()
        if args.exit_code_after_leave:
            return int(args.exit_code_after_leave)
        raise
    training.finish(args.out)
    if args.hang_at_exit:
        _never.wait()
    if args.end_signal:
        os.kill(os.getpid(), signal.Signals[f"SIG{args.end_signal}"])
    return int(args.exit_code)


def train_on(args: argparse.Namespace, words: Words, training: Any) -> None:
    """Go on as if nothing had been said."""
    for n in range(training.n + 1, args.steps + 1):
        training.step(n)
        words.say(f"step {n}", quiet=True)


def options() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100)
    add("--step-ms", type=float, default=10)
    add("--startup-ms", type=float, default=0, help="before attaching, as imports do")
    add("--mode", choices=("steps", "attach", "own"), default="")
    add("--no-torch", action="store_true")
    add("--stride", type=int, default=1, help="hook.step(n * stride) in mode attach")
    add("--save-ms", type=float, default=0)
    add("--ballast-mb", type=int, default=0, help="makes the checkpoint this much larger")
    add("--save-elsewhere", default="", metavar="DIR", help="own save writes here and returns the path")
    for fault in ("fail", "hang"):
        add(f"--{fault}-save", action="store_true")
    for flag in ("short-file", "wrong-step", "kill-self-in-save", "stop-self-in-save", "ignore-leave", "hang-at-exit"):
        add(f"--{flag}", action="store_true")
    add("--eval-every", type=int, default=0)
    add("--eval-ms", type=float, default=0)
    add("--eval-safe-points", type=int, default=0)
    add("--eval-alone", action="store_true", help="only rank 0 evaluates")
    add("--workers", type=int, default=0, help="DataLoader workers")
    add("--start-method", default="fork", help="of the workers")
    add("--persistent", action="store_true", help="workers that outlive an epoch")
    add("--epoch-steps", type=int, default=1 << 18)
    add("--ranks-collective", action="store_true", help="DDP over gloo, and one all_reduce a step that checks the lock-step")
    add("--exit-code", type=int, default=0, help="at the end of training")
    add("--end-signal", default="", help="die of this at the end of training, for example SEGV")
    add("--exit-code-after-leave", type=int, default=0)
    add("--silence-ms", type=int, default=0, help="go on when nothing is heard for so long while parked")
    add("--log", "--words", default="", help="torchrun takes --log for its own: say --words there")
    add("--out", default="", help="final weights")
    add("--resume-from", default="", help="only said")
    args = parser.parse_args()
    args.mode = args.mode or ("own" if args.no_torch else "steps")
    if args.no_torch and (args.mode == "steps" or args.ranks_collective):
        parser.error("--no-torch has no state_dict objects and no collectives")
    return args


def main() -> int:
    """Run the toy."""
    args = options()
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    words = Words(args.log, rank)
    atexit.register(words.say, "exit")
    if args.resume_from:
        words.say(f"resume-arg {args.resume_from}")
    work(args.startup_ms)
    if args.no_torch:
        return run(args, words, Plain(args, words))
    import toy_torch

    with toy_torch.training(args, words, work, faults_in_save) as training:
        return run(args, words, training)


if __name__ == "__main__":
    sys.exit(main())
