"""The toy's training with torch: a small model whose every step draws random numbers, alone or as DDP over gloo.

Owns nothing but that. What it computes depends on all that has to be restored: weights, AdamW, schedule, and the random numbers
of Python, numpy and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

SEED = 20
FEATURES = 8


class Samples(Dataset[torch.Tensor]):
    """Samples that say which one they are."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), float(index % 97))


class Order(Sampler[int]):
    """The samples of one epoch, from the one where training is."""

    def __init__(self) -> None:
        self.samples = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


class Ballast:
    """An object with state that is slow, large or faulty when it is taken, as asked for."""

    def __init__(self, args: argparse.Namespace, work: Callable[[float], None], faults: Callable[[Any], None]) -> None:
        self.args = args
        self.work = work
        self.faults = faults
        self.data = torch.arange(args.ballast_mb << 18, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The state, after --save-ms and with the faults asked for."""
        self.work(self.args.save_ms / 2)
        self.faults(self.args)
        self.work(self.args.save_ms / 2)
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        self.data = state["data"]


class Torch:
    """Model, optimizer, schedule and data."""

    def __init__(self, args: argparse.Namespace, words: Any, ballast: Ballast, work: Callable[[float], None]) -> None:
        self.args, self.words, self.ballast, self.work = args, words, ballast, work
        random.seed(SEED + words.rank)
        np.random.seed(SEED + words.rank)
        torch.manual_seed(SEED)
        model: nn.Module = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.model = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
        torch.manual_seed(SEED + words.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(args.steps, 1))
        self.n = 0
        self.order = Order()
        self.loader = self.made_loader() if args.workers else None
        self.batches: Iterator[torch.Tensor] = iter(())

    def state(self) -> dict[str, Any]:
        """Objects for steps()."""
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**state, "ballast": self.ballast}

    def batch(self, n: int) -> torch.Tensor:
        """The batch of step n, from workers if there are any."""
        if self.loader is None:
            return torch.full((4, FEATURES), float(n % 97))
        batch = next(self.batches, None)
        if batch is None:
            epoch = self.args.epoch_steps
            self.order.samples = range(4 * (n - 1), 4 * ((n - 1) // epoch + 1) * epoch)
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def made_loader(self) -> DataLoader[torch.Tensor]:
        """A loader with workers."""
        return DataLoader(
            Samples(),
            batch_size=4,
            num_workers=self.args.workers,
            multiprocessing_context=multiprocessing.get_context(self.args.start_method),
            persistent_workers=self.args.persistent,
            sampler=self.order,
            # A generator of its own: the loader would else draw from the training's on every start.
            generator=torch.Generator(),
        )

    def step(self, n: int) -> None:
        """Do step number n (from 1)."""
        self.work(self.args.step_ms)
        if self.args.ranks_collective:
            seen = torch.tensor([n, -n])
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
            if seen[0] != n or seen[1] != -n:
                raise RuntimeError(f"ranks are at different steps: {seen.tolist()}, here {n}")
        noise = random.random() + float(np.random.rand())
        loss = (self.model(self.batch(n) / 97 + torch.randn(4, FEATURES)) - noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.n = n

    def save(self, directory: Path, step: int) -> Any:
        """An own save."""
        self.words.say(f"saving {step}")
        path = directory / f"toy-{self.words.rank:05d}.pt"
        torch.save({name: thing.state_dict() for name, thing in self.state().items()} | {"step": step}, path)
        if self.args.short_file:
            os.truncate(path, path.stat().st_size - 200)
        self.words.say(f"saved {step}")
        return path

    def load(self, directory: Path) -> None:
        """Load what `save` wrote. Random numbers are not restored by it."""
        state = torch.load(directory / f"toy-{self.words.rank:05d}.pt", weights_only=True)
        for name, thing in self.state().items():
            thing.load_state_dict(state[name])
        self.n = state["step"]

    def finish(self, out: str) -> None:
        """Write the final weights."""
        if out and self.words.rank == 0:
            torch.save(dict(self.model.state_dict()), out)


@contextlib.contextmanager
def training(
    args: argparse.Namespace, words: Any, work: Callable[[float], None], faults: Callable[[Any], None]
) -> Iterator[Torch]:
    """A training, within its process group if the ranks are to be collective."""
    torch.set_num_threads(1)
    if args.ranks_collective and "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        args.ranks_collective = False
    try:
        yield Torch(args, words, Ballast(args, work, faults), work)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
