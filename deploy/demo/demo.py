"""`make demo`: a real training run, preempted twice and resumed twice, that ends with the weights of an undisturbed one.

Owns the story and what is printed. On a throwaway Slurm where one can be had (root and apt), else in local mode; says which.
Must not leave anything behind: it writes into one directory below /tmp, and whatever it starts ends with it (demo_run.py).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from demo_run import WAIT_S, DemoError, Job, exit_on_sigterm, run, slurm_lab, started, undisturbed, wait_for, why_no_slurm

TRAIN = Path(__file__).resolve().parent / "train.py"
BIN = Path(sys.executable).parent
STEPS = 300
INTERRUPT_AT = (60, 140)
"""The run is interrupted once it has run these steps. Much is left after the last one: a busy Slurm preempts seconds late."""

SHOWN = ("command_started", "notice", "agreed", "rank_written", "verified", "commit", "requeue", "exit")
"""The journal's events that are printed."""

INTERRUPTED = 130


class Place(NamedTuple):
    """Where everything of this demo lies."""

    work: Path

    @property
    def output(self) -> Path:
        """What the supervised run printed, over all attempts."""
        return self.work / "output"

    @property
    def checkpoints(self) -> Path:
        """Its checkpoint directory."""
        return self.work / "checkpoints"

    def training(self, name: str) -> list[str]:
        """The command that trains; it leaves NAME.ledger and NAME.digest behind."""
        files = ("--ledger", str(self.work / f"{name}.ledger"), "--digest", str(self.work / f"{name}.digest"))
        return [sys.executable, str(TRAIN), "--steps", str(STEPS), *files]

    def supervised(self) -> list[str]:
        """The same below ckpt-supervise."""
        options = ("--dir", str(self.checkpoints), "--every-steps", "50", "--keep", "3")
        return [str(BIN / "ckpt-supervise"), *options, "--", *self.training("supervised")]

    def env(self, **more: str) -> dict[str, str]:
        """The supervised run's environment: what it makes for itself (socket, state) lies in `work` too."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CKPT_SUPERVISE_", "SLURM_", "XDG_RUNTIME_"))
        }
        return kept | {"TMPDIR": str(self.work), "CKPT_SUPERVISE_STATE": str(self.work / "state")} | more

    def ledger(self, name: str) -> list[tuple[int, float]]:
        """Number and time of every step that was run, in order; a line that is just being written is left out."""
        try:
            text = (self.work / f"{name}.ledger").read_text()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [(int(step), float(when)) for step, when in (line.split() for line in lines)]

    def digest(self, name: str) -> str:
        """Of the final weights; "" while training has not come to its end."""
        try:
            return (self.work / f"{name}.digest").read_text().strip()
        except FileNotFoundError:
            return ""

    def reached(self, step: int) -> bool:
        """Whether the supervised run has run this step."""
        return any(number >= step for number, _ in self.ledger("supervised")[-1:])


def main() -> int:
    """Run the demo; 0 when the weights are equal, 1 when not or when it could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="without Slurm, although it could be had")
    options = parser.parse_args()
    exit_on_sigterm()
    # Not $TMPDIR: Slurm's and munge's sockets need a short path.
    place = Place(Path(tempfile.mkdtemp(prefix="ckpt-demo-", dir="/tmp")))
    try:
        return demo(place, local=options.local)
    except DemoError as error:
        show(place.output)
        say(f"the demo has failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    finally:
        with undisturbed():
            shutil.rmtree(place.work, ignore_errors=True)


def demo(place: Place, *, local: bool) -> int:
    """Undisturbed run, interrupted run, comparison."""
    why_local = "asked for with --local" if local else why_no_slurm(say)
    tell(f"1. {STEPS} steps of training, undisturbed and unsupervised")
    began = time.monotonic()
    run(place.training("undisturbed"), env=place.env(), cwd=place.work, capture=True)
    say(f"{time.monotonic() - began:.0f} s; weights sha256 {place.digest('undisturbed')}")
    if why_local:
        tell(f"2. The same below ckpt-supervise, in local mode ({why_local}): SIGTERM twice, started again twice")
        run_local(place)
    else:
        tell("2. The same below ckpt-supervise, on a throwaway Slurm: preempted twice by a higher partition, requeued twice")
        run_on_slurm(place)
    show(place.output)
    tell("3. What happened: ckptctl log")
    events = [word for name in SHOWN for word in ("--event", name)]
    run([str(BIN / "ckptctl"), "log", "--dir", str(place.checkpoints), *events])
    tell("4. The checkpoints that were kept: ckptctl ls")
    run([str(BIN / "ckptctl"), "ls", "--dir", str(place.checkpoints)])
    tell("5. What was lost")
    code = compare(place)
    tell("6. The whole run at a glance: ckptctl timeline")
    run([str(BIN / "ckptctl"), "timeline", "--dir", str(place.checkpoints)])
    say("`ckptctl why` tells the last interruption in five lines, `ckptctl report` draws all of this as one page for a browser.")
    return code


def run_local(place: Place) -> None:
    """Interrupt with SIGTERM, start again, until training has ended by itself."""
    for step in (*INTERRUPT_AT, None):
        with started(place.supervised(), place.env(), place.output) as process:
            if step is not None:
                wait_for(lambda n=step: place.reached(n), f"step {step}", over=lambda p=process: p.poll() is not None)
                process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=WAIT_S)
        say(f"exit status {code}" if step is None else f"step {step} was reached, SIGTERM: exit status {code}")


def run_on_slurm(place: Place) -> None:
    """Bring a lab up, submit, preempt twice, wait for the end, take the lab down."""
    with slurm_lab(place.work / "lab") as conf:
        job = Job(place.env(SLURM_CONF=conf), place.work)
        options = ("--partition=low", "--requeue", "--open-mode=append", "--time=30")
        job.submit(f"exec srun {shlex.join(place.supervised())}", f"--output={place.output}", *options)
        say(f"job {job.number}: sbatch {' '.join(options)}; exec srun ckpt-supervise ... -- python train.py ...")
        for count, step in enumerate(INTERRUPT_AT):
            wait_for(lambda n=step: place.reached(n), f"step {step}", over=job.over)
            job.submit("sleep 1", "--partition=high", "--exclusive", "--output=/dev/null")
            say(f"step {step} was reached: a job of partition high wants the node")
            wait_for(lambda n=count: job.restarts() > n, "the preemption", over=job.over)
            say(f"job {job.number}: Restarts={job.restarts()}; it comes back by itself")
        wait_for(lambda: place.digest("supervised") != "" and job.over(), "the end of training", over=job.over)
        say(f"job {job.number}: {job.field('JobState')}")


def compare(place: Place) -> int:
    """Equal weights, steps that were run twice or never, and the time without training."""
    ran = place.ledger("supervised")
    numbers = [step for step, _ in ran]
    twice, never = len(numbers) - len(set(numbers)), STEPS - len(set(numbers))
    gaps = sorted((after[1] - before[1] for before, after in itertools.pairwise(ran)), reverse=True)
    pauses = " and ".join(f"{gap:.1f} s" for gap in gaps[: len(INTERRUPT_AT)])
    say(f"steps run: {len(numbers)} of {STEPS}; run twice: {twice}; never run: {never}")
    say(f"time without training: {pauses} (saving and ending, waiting in the queue, starting Python and torch)")
    undisturbed_sum, supervised_sum = place.digest("undisturbed"), place.digest("supervised")
    say(f"weights, undisturbed: {undisturbed_sum}")
    say(f"weights, interrupted: {supervised_sum}")
    same = undisturbed_sum == supervised_sum != "" and numbers == list(range(STEPS))
    say("No step was lost, and the weights are bit for bit the same." if same else "THE RUNS DIFFER.")
    return 0 if same else 1


def show(output: Path) -> None:
    """What the supervised run printed, indented."""
    with contextlib.suppress(FileNotFoundError):
        for line in output.read_text(errors="replace").splitlines():
            say(f"| {line}")


def tell(line: str) -> None:
    """A heading."""
    sys.stdout.write(f"\n== {line}\n")
    sys.stdout.flush()


def say(line: str) -> None:
    """One line below a heading."""
    sys.stdout.write(f"   {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
