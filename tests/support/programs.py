"""Stand-ins for programs that save by themselves and know nothing of us: the seed recipe's, Megatron's, a Trainer's.

    python programs.py KIND --where DIR [--resume-from PATH] [--steps N] [--step-ms N] [--every N] [--save-ms N] [--keep N]

Each does what the real one does at the place that matters: which files it writes in which order, what it does at a signal, and
how it finds what to resume from. Real torch and real files, a tiny state. Every finished step is a line `step N`, every save
`saved N`.
Must not print: a handler that prints while the main thread is in a print raises, as Python's buffers are not reentrant.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

WIDTH = 64
_never = threading.Event()


def say(line: str) -> None:
    """One line in one write, also from a handler."""
    os.write(1, f"{line}\n".encode())


class Program:
    """A training loop whose state after n steps is a function of n."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.where = Path(given.where)
        self.where.mkdir(parents=True, exist_ok=True)
        self.step = 0
        self.weights = torch.zeros(WIDTH)
        self.stop = False

    def train_one(self) -> None:
        """One step. A handler that saves finds all of it done and said, or nothing: none is run between the last two lines."""
        _never.wait(self.given.step_ms / 1000)
        step, weights = self.step + 1, self.weights + (self.step + 1)
        line = f"step {step}\n".encode()
        write = os.write
        self.step, self.weights = step, weights
        write(1, line)

    def load(self, path: Path) -> None:
        """Take over what was saved; anything that is not whole ends the program, as it does everywhere."""
        state = torch.load(path, weights_only=True)
        self.step, self.weights = state["step"], state["model_state_dict"]
        if not torch.equal(self.weights, torch.full((WIDTH,), float(sum(range(self.step + 1))))):
            raise SystemExit(f"the weights are not those after step {self.step}")
        say(f"resumed {self.step} from {path}")

    def state(self) -> dict[str, object]:
        """What is saved."""
        return {"step": self.step, "model_state_dict": self.weights}

    def said(self) -> None:
        """A save is over."""
        say(f"saved {self.step}")


def seed(given: argparse.Namespace) -> None:
    """The recipe that everybody starts from: a handler that saves and exits, and a save every N steps, keeping three."""
    program = Program(given)
    rank = int(os.environ.get("SLURM_PROCID", "0"))

    def save() -> None:
        if rank != 0:
            return
        torch.save(program.state(), program.where / f"step_{program.step:06d}.pt")
        _never.wait(given.save_ms / 1000)
        for old in sorted(program.where.glob("step_*.pt"))[: -given.keep]:
            old.unlink()
        program.said()

    def checkpoint_and_exit(signum: int, _: object) -> None:
        say(f"Received signal {signum}. Saving checkpoint before exit...")
        save()
        sys.exit(0)

    signal.signal(getattr(signal, f"SIG{given.signal}"), checkpoint_and_exit)
    if given.resume_from:
        program.load(Path(given.resume_from))
    say(f"ready {os.getpid()}")
    while program.step < given.steps:
        program.train_one()
        if program.step % given.every == 0:
            save()
    say("done")


def megatron(given: argparse.Namespace) -> None:
    """`--exit-signal-handler`: the signal is noted, the running iteration saved, the tracker written last, exit 0. It finds its
    newest iteration by the tracker in --load."""
    program = Program(given)
    tracker = "latest_checkpointed_iteration.txt"

    def save() -> None:
        folder = program.where / f"iter_{program.step:07d}" / "mp_rank_00"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(program.state(), folder / "model_optim_rng.pt")
        _never.wait(given.save_ms / 1000)
        (program.where / tracker).write_text(str(program.step))
        program.said()

    _stop_at_signal(program)
    load = Path(given.resume_from or given.where)
    if (load / tracker).exists():
        number = int((load / tracker).read_text())
        program.load(load / f"iter_{number:07d}" / "mp_rank_00" / "model_optim_rng.pt")
    _loop(program, save)


def trainer(given: argparse.Namespace) -> None:
    """checkpoint-N directories with a file for each part, trainer_state.json last, and a rotation of its own; at the signal it
    saves at the end of the step and leaves with 143."""
    program = Program(given)

    def save() -> None:
        folder = program.where / f"checkpoint-{program.step}"
        folder.mkdir(exist_ok=True)
        torch.save({"weight": program.weights}, folder / "pytorch_model.bin")
        torch.save(program.state(), folder / "optimizer.pt")
        _never.wait(given.save_ms / 1000)
        torch.save({"last_epoch": program.step}, folder / "scheduler.pt")
        torch.save({"python": program.step}, folder / "rng_state.pth")
        state = {"best_metric": None, "epoch": 0.5, "global_step": program.step, "log_history": [], "max_steps": given.steps}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        numbered = sorted(program.where.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        for old in numbered[: -given.keep]:
            shutil.rmtree(old)
        program.said()

    _stop_at_signal(program)
    own = [path for path in program.where.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    newest = max(own, key=lambda path: int(path.name.split("-")[1]), default=None)
    chosen = Path(given.resume_from) if given.resume_from else newest
    if chosen is not None:
        state = json.loads((chosen / "trainer_state.json").read_text())
        program.load(chosen / "optimizer.pt")
        assert program.step == state["global_step"]
    _loop(program, save)
    if program.stop:
        sys.exit(143)


def _stop_at_signal(program: Program) -> None:
    def note(signum: int, _: object) -> None:
        say(f"noted {signum}")
        program.stop = True

    signal.signal(getattr(signal, f"SIG{program.given.signal}"), note)


def _loop(program: Program, save: Callable[[], None]) -> None:
    say(f"ready {os.getpid()}")
    while program.step < program.given.steps and not program.stop:
        program.train_one()
        if program.step % program.given.every == 0 and not program.stop:
            save()
    if program.stop:
        save()
    say("done")


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("seed", "megatron", "trainer"))
    parser.add_argument("--where", required=True)
    parser.add_argument("--resume-from", default="")
    parser.add_argument("--signal", default="TERM")
    for name, default in (("steps", 1_000_000), ("step-ms", 20), ("every", 10), ("save-ms", 0), ("keep", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    {"seed": seed, "megatron": megatron, "trainer": trainer}[given.kind](given)


if __name__ == "__main__":
    main()
