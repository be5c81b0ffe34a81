"""TOY with sharded state: FSDP2 over gloo on any number of ranks, or the same model in one piece without torch.distributed.

Owns the knobs and what it prints, also to the file of --words: `start N D` and `step N D`, where D is a digest of the whole
weights and optimizer state after N steps, gathered from all ranks; `saving N TROUBLE` by every rank; `preempted`, `end`.
With --meet it tries the process group of saves alone, and every rank says `met N S`, in S seconds.
Must not sleep in place of a fact: it waits only where it imitates work, or a rank that stays away.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from typing import Any

import ckpt_client as ckpt
import torch
import torch.distributed as dist
from ckpt_client.identity import Identity
from ckpt_client.save_group import SaveGroup
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toy import Words, work

FEATURES = 8


class Model(nn.Module):
    """Uneven shards, a buffer, a frozen parameter, and one that never gets a gradient and so no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 5))
        self.outer = nn.Linear(5, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One number for each row of `batch`, of shape (rows, FEATURES)."""
        if torch.is_grad_enabled():
            self.seen += 1
        found: torch.Tensor = self.outer(self.inner(batch) * self.frozen)
        return found


class Trouble:
    """Replicated state, whose taking on one rank goes wrong at a step as asked for: `--at 3:1:raise` at step 3 on rank 1."""

    def __init__(self, words: Words, at: list[str]) -> None:
        self.words = words
        self.at = {(int(n), int(rank)): what for n, rank, what in (item.split(":") for item in at)}
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        """The state, or none."""
        what = self.at.get((self.n, self.words.rank), "")
        if self.n:
            self.words.say(f"saving {self.n} {what}")
        if what == "raise":
            raise OSError("no space left here")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what.isdecimal():
            work(int(what))
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        self.n = state["n"]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and of the whole optimizer state, in one order whatever the number of ranks."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + whole(value))
    for name, param in model.named_parameters():
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            found.update(f"{name} {key}".encode() + whole(value))
    return found.hexdigest()[:16]


def whole(value: torch.Tensor) -> bytes:
    """The bytes of a tensor, gathered from all ranks."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().contiguous().numpy().tobytes()


def train(args: argparse.Namespace, words: Words) -> None:
    """Build, resume, train."""
    torch.manual_seed(3)
    random.seed(words.rank)
    model = Model()
    if dist.is_initialized():
        for part in (model.inner, model):
            fully_shard(part)
    torch.manual_seed(words.rank)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    trouble = Trouble(words, args.at)
    loop = ckpt.steps(args.steps, optimizer=optimizer, model=model, scheduler=scheduler, trouble=trouble)
    say(words, f"start {loop.start} {digest(model, optimizer)}")
    try:
        for n in loop:
            work(args.step_ms)
            batch = torch.randn(4, FEATURES) + random.random()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            trouble.n = n + 1
            say(words, f"step {n + 1} {digest(model, optimizer)}")
            with torch.no_grad():
                # Leaves FSDP2's outermost parameters gathered, with no backward to shard them again.
                model(batch)
    except ckpt.Preempted:
        say(words, "preempted")
        raise
    say(words, "end")


def meet(words: Words) -> None:
    """Four saves over one SaveGroup; the second fails on rank 1 alone, after its last exchange, as the others know nothing of."""
    group = SaveGroup(Identity(words.rank, dist.get_world_size(), words.rank, 0, distributed=True))
    for number in range(1, 5):
        began = time.monotonic()
        with contextlib.suppress(OSError):
            exchange(group, number, fails=number == 2 and words.rank == 1)
        words.say(f"met {number} {time.monotonic() - began:.1f}")


def exchange(group: SaveGroup, number: int, *, fails: bool) -> None:
    """What a save is to the group. It fails with a cycle of references to the group, as torch's do."""
    with group.within(number, 60_000) as ranks:
        dist.all_reduce(torch.zeros(1), group=ranks)
        failed: list[Any] = [ranks]
        if fails:
            try:
                raise OSError("no space left here")
            except OSError as error:
                failed.append(error)
                raise


def say(words: Words, what: str) -> None:
    """Once, not by every rank."""
    if words.rank == 0:
        words.say(what)


def main() -> None:
    """Run the toy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", default="")
    parser.add_argument("--meet", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--at", action="append", default=[], metavar="STEP:RANK:TROUBLE", help="raise, die, or a time in ms")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = Words(args.words, int(os.environ.get("RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        if args.meet:
            meet(words)
        else:
            train(args, words)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
