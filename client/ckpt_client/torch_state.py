"""Saving and restoring objects with `state_dict`, and the random numbers, with torch.

The only module that imports torch; it is imported only where such objects were given. Owns who writes what: replicated state
once, in `state.pt`; what differs between ranks in `rank-00000.pt`. Everything is loaded with `weights_only=True`, and nothing is
saved that it would refuse: a checkpoint that cannot be loaded is worse than none.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_client import wire
from ckpt_client.files import DigestWriter, SaveError, write_file
from ckpt_client.identity import Identity

STATE_FILE = "state.pt"

FORMAT = 1
"""Version of the contents of a rank's file."""


class Stateful(Protocol):
    """Anything whose state can be taken and put back: modules, optimizers, schedulers, scalers, stateful loaders."""

    def state_dict(self) -> Any: ...  # noqa: D102

    def load_state_dict(self, state_dict: Any, /) -> Any: ...  # noqa: D102


class TorchState:
    """The state of one rank. Nothing is opened before `save` or `load`."""

    def __init__(self, state: Mapping[str, Stateful], who: Identity) -> None:
        self._state = dict(state)
        self._who = who
        self._random: dict[str, Any] = {}
        # A data position differs between ranks even where all the rest is replicated.
        self._own = [name for name, thing in state.items() if isinstance(thing, DataLoader | Dataset | Sampler)]
        # Without torch.distributed nobody says that the ranks' states are the same.
        if who.world_size > 1 and not who.distributed:
            self._own = list(state)
        for name, thing in state.items():
            if who.distributed and name not in self._own and any(_sharded(thing.state_dict())):
                raise TypeError(
                    f"steps(): {name}= holds sharded tensors (DTensor), which cannot be saved yet; give save= and load="
                )

    def save(self, order: wire.SaveAt) -> tuple[wire.SavedFile, ...]:
        """Write this rank's files of one round."""
        directory, durable = Path(order.directory), order.then == "leave"
        # On every rank, in the same order: some state_dict functions are collective.
        taken = {name: thing.state_dict() for name, thing in self._state.items()}
        shared = {name: part for name, part in taken.items() if name not in self._own}
        own = {
            "format": FORMAT,
            "step": order.at.n,
            "rank": self._who.rank,
            "world_size": self._who.world_size,
            "random": take_random(),
            "state": {name: part for name, part in taken.items() if name in self._own},
        }
        files = [_write(directory, rank_file(self._who.rank), own, durable=durable)]
        if shared and self._who.rank == 0:
            files.append(_write(directory, STATE_FILE, shared, durable=durable))
        return tuple(files)

    def load(self, directory: Path, step: int) -> None:
        """Put back the state of a committed checkpoint. Errors of `load_state_dict` are the caller's to see."""
        parts: dict[str, Any] = {}
        if (directory / STATE_FILE).exists():
            parts.update(_read(directory / STATE_FILE))
        own_path = directory / rank_file(self._who.rank)
        # Fewer ranks wrote this checkpoint: what they share is all there is for this one.
        if own_path.exists() or not parts:
            own = _read(own_path)
            if own["step"] != step:
                raise ValueError(f"{own_path} holds step {own['step']}, not {step}")
            parts.update(own["state"])
            self._random = own["random"]
        for name, thing in self._state.items():
            if name not in parts:
                raise KeyError(f"{directory} holds no state of {name!r}, only of {sorted(parts)}")
            thing.load_state_dict(parts[name])

    def restore_random(self) -> None:
        """Put back the random numbers, as the last thing before the first step."""
        put_random(self._random)
        self._random = {}


def rank_file(rank: int) -> str:
    """Name of a rank's own file."""
    return f"rank-{rank:05d}.pt"


def take_random() -> dict[str, Any]:
    """The states of the random number generators that this process uses, in types that `weights_only` loads."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    # A training that has not touched CUDA must not get a context on it from us.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def put_random(states: Mapping[str, Any]) -> None:
    """Put back what `take_random` took."""
    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


def _write(directory: Path, name: str, value: Mapping[str, Any], *, durable: bool) -> wire.SavedFile:
    def write(writer: DigestWriter) -> None:
        torch.save(value, cast("IO[bytes]", writer))  # It needs write and flush only.

    file = write_file(directory, name, write, durable=durable)
    refused = _refused_types(directory / name)
    if refused:
        raise SaveError(f"{name} holds objects that torch.load(weights_only=True) refuses: {', '.join(refused)}")
    return file


def _refused_types(path: Path) -> list[str]:
    look = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # Since torch 2.6.
    return [] if look is None else list(look(path))


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return value


def _sharded(value: Any) -> Iterator[bool]:
    """Whether there is a DTensor anywhere in a state."""
    if isinstance(value, torch.Tensor):
        module = sys.modules.get("torch.distributed.tensor")
        yield module is not None and isinstance(value, module.DTensor)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sharded(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _sharded(part)
