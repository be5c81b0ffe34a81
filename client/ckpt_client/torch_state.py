"""Saving and restoring objects with `state_dict`, and the random numbers, with torch.

Imports torch, so it is imported only where such objects were given. Owns who writes what: replicated state once, in `state.pt`;
what differs between ranks in `rank-00000.pt`; sharded state by all ranks together (sharded_state.py). Everything is loaded with
`weights_only=True`, and nothing is saved that it would refuse: a checkpoint that cannot be loaded is worse than none.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_client import wire
from ckpt_client.channel import tell
from ckpt_client.files import DigestWriter, SaveError, write_file
from ckpt_client.identity import Identity

STATE_FILE = "state.pt"

METADATA_FILE = ".metadata"
"""Where torch.distributed.checkpoint says what is in which file."""

FORMAT = 1
"""Version of the contents of a rank's file."""


class Stateful(Protocol):
    """Anything whose state can be taken and put back: modules, optimizers, schedulers, scalers, stateful loaders."""

    def state_dict(self) -> Any: ...  # noqa: D102

    def load_state_dict(self, state_dict: Any, /) -> Any: ...  # noqa: D102


class TorchState:
    """The state of one rank. Nothing is opened before `save` or `load`, and no other rank is waited for before `save`.

    Raises TypeError for objects that cannot be saved: an optimizer of sharded parameters without their module.
    """

    def __init__(self, state: Mapping[str, Stateful], who: Identity) -> None:
        self._state = dict(state)
        self._who = who
        self._random: dict[str, Any] = {}
        # A data position differs between ranks even where all the rest is replicated.
        self._own = [name for name, thing in state.items() if isinstance(thing, DataLoader | Dataset | Sampler)]
        # Without torch.distributed nobody says that the ranks' states are the same.
        if who.world_size > 1 and not who.distributed:
            self._own = list(state)
        sharded = [name for name, thing in state.items() if who.distributed and name not in self._own and is_sharded(thing)]
        self._together = _Together(state, sharded, who) if sharded else None

    @property
    def sharded(self) -> bool:
        """Whether the state is spread over the ranks, so that no rank can save alone. The same on all ranks."""
        return self._together is not None

    def save(self, order: wire.SaveAt) -> tuple[wire.SavedFile, ...]:
        """Write this rank's files of one round, those of sharded state together with all other ranks.

        Raises SaveError, and OSError where files cannot be written; with sharded state always SaveError, on all ranks.
        """
        if self._together is None:
            return self._write(order, tuple(self._state))
        rest = tuple(name for name in self._state if name not in self._together.names)
        return self._together.save(order, lambda: self._write(order, rest))

    def load(self, directory: Path, step: int) -> None:
        """Put back the state of a committed checkpoint. Errors of `load_state_dict` are the caller's to see.

        Raises ValueError for a checkpoint of another step or of state that is sharded here and was not there, KeyError for an
        object that it does not hold, FileNotFoundError where a file is missing.
        """
        spread = self._load_spread(directory)
        parts: dict[str, Any] = {}
        if (directory / STATE_FILE).exists():
            parts.update(_read(directory / STATE_FILE))
        own_path = directory / rank_file(self._who.rank)
        # Fewer ranks wrote this checkpoint: what they share is all there is for this one.
        is_new = not own_path.exists() and bool(parts or spread)
        if not is_new:
            own = _read(own_path)
            if own["step"] != step:
                raise ValueError(f"{own_path} holds step {own['step']}, not {step}")
            parts.update(own["state"])
            self._random = own["random"]
        for name, thing in self._state.items():
            if name in spread:
                continue
            if name not in parts:
                if is_new and name in self._own:
                    tell(f"fewer ranks wrote {directory}: {name}= of rank {self._who.rank} starts from its beginning")
                    continue
                raise KeyError(f"{directory} holds no state of {name!r}, only of {sorted((*parts, *spread))}")
            if self._together is not None and name in self._together.names:
                raise ValueError(f"{directory} holds {name!r} as a whole, and it is sharded now: give load= to bring it over")
            thing.load_state_dict(parts[name])

    def _load_spread(self, directory: Path) -> frozenset[str]:
        """Load what the checkpoint holds in pieces, be it sharded here or not; the names of what that was."""
        if not (directory / METADATA_FILE).exists():
            return frozenset()
        from ckpt_client.sharded_state import ShardedState, names_in

        there = names_in(directory)
        ShardedState(self._state, [name for name in self._state if name in there]).load(directory)
        return there

    def _write(self, order: wire.SaveAt, names: tuple[str, ...]) -> tuple[wire.SavedFile, ...]:
        """Write the objects of these names, and the random numbers."""
        directory, durable = Path(order.directory), order.then == "leave"
        # On every rank, in the same order: some state_dict functions are collective.
        taken = {name: self._state[name].state_dict() for name in names}
        shared = {name: part for name, part in taken.items() if name not in self._own}
        for name, part in shared.items():
            if self._who.distributed and any(_sharded_parts(part)):
                raise SaveError(f"{name}= holds sharded tensors (DTensor) now, and did not when steps() was called")
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

    def restore_random(self) -> None:
        """Put back the random numbers, as the last thing before the first step."""
        put_random(self._random)
        self._random = {}


class _Together:
    """The sharded objects, and the process group to save them over."""

    def __init__(self, state: Mapping[str, Stateful], names: list[str], who: Identity) -> None:
        from ckpt_client.save_group import SaveGroup
        from ckpt_client.sharded_state import ShardedState

        self.names = frozenset(names)
        self._objects = ShardedState(state, names)
        self._group = SaveGroup(who)

    def save(self, order: wire.SaveAt, write_rest: Callable[[], tuple[wire.SavedFile, ...]]) -> tuple[wire.SavedFile, ...]:
        return self._objects.save(order, self._group, write_rest)


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


def is_sharded(thing: Stateful) -> bool:
    """Whether tensors of this object are spread over the ranks: a DTensor in its state, or among an optimizer's parameters."""
    # Before its first step an optimizer has no state to tell by.
    params = [group["params"] for group in thing.param_groups] if isinstance(thing, torch.optim.Optimizer) else []
    return any(_sharded_parts(params)) or any(_sharded_parts(thing.state_dict()))


def refused_types(file: Path | IO[bytes]) -> list[str]:
    """Names of the types in what torch.save wrote that torch.load(weights_only=True) refuses."""
    look = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # Since torch 2.6.
    return [] if look is None else list(look(file))


def _write(directory: Path, name: str, value: Mapping[str, Any], *, durable: bool) -> wire.SavedFile:
    def write(writer: DigestWriter) -> None:
        torch.save(value, cast("IO[bytes]", writer))  # It needs write and flush only.

    file = write_file(directory, name, write, durable=durable)
    refused = refused_types(directory / name)
    if refused:
        raise SaveError(f"{name} holds objects that torch.load(weights_only=True) refuses: {', '.join(refused)}")
    return file


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return value


def _sharded_parts(value: Any) -> Iterator[bool]:
    """Whether each tensor anywhere in a state is a DTensor."""
    if isinstance(value, torch.Tensor):
        module = sys.modules.get("torch.distributed.tensor")
        yield module is not None and isinstance(value, module.DTensor)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sharded_parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _sharded_parts(part)
