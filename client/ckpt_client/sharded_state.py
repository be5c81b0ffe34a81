"""Saving and loading objects whose tensors are spread over the ranks (DTensor, as from `fully_shard`), with torch's own DCP.

Owns what goes into `.metadata` and `__<rank>_*.distcp`, and how it comes back, also on another number of ranks. Imported only
where state is sharded, since torch.distributed.checkpoint takes its time to import. Saving is together, over one process group
(save_group.py); loading needs no other rank. Only `.metadata` is unpickled at load, by torch; all else loads with
`weights_only=True`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ckpt_client import wire
from ckpt_client.files import DigestWriter, SaveError, one_line
from ckpt_client.save_group import SaveGroup
from ckpt_client.torch_state import Stateful, refused_types

WriteRest = Callable[[], tuple[wire.SavedFile, ...]]
"""Writes what this rank has besides its shards."""


class ShardedState:
    """The sharded objects among `state`, those called `names`. Nothing is opened before `save` or `load`.

    Raises TypeError for an optimizer without the modules that its parameters are in: their names go into the checkpoint.
    """

    def __init__(self, state: Mapping[str, Stateful], names: list[str]) -> None:
        # Modules first: taking the state of one puts the parameters in place that FSDP2 has gathered for a forward pass, and what
        # an optimizer does at load (it runs a step) must not be the last thing that touches the weights.
        self._things = {name: state[name] for name in sorted(names, key=lambda name: not isinstance(state[name], nn.Module))}
        modules = {name: thing for name, thing in state.items() if isinstance(thing, nn.Module)}
        self._module_of = {
            name: _module_of(name, thing, modules) for name, thing in self._things.items() if isinstance(thing, Optimizer)
        }

    def save(self, order: wire.SaveAt, group: SaveGroup, write_rest: WriteRest) -> tuple[wire.SavedFile, ...]:
        """Write this rank's files of one round, together with all other ranks; training goes on with them when it fails.

        What fails on one rank, `write_rest` included, fails on all, with that rank named. Raises SaveError.
        """
        planner = _SavePlanner(self._take, group.renew)
        writer = _Writer(Path(order.directory), write_rest, group.renew, durable=order.then == "leave")
        with group.within(order.round, order.left_ms) as ranks:
            try:
                save({}, storage_writer=writer, planner=planner, process_group=ranks)
            except CheckpointException as error:
                _raise_as_save_error(error, dist.get_rank(ranks))
        return tuple(writer.files)

    def load(self, directory: Path) -> None:
        """Put back the state of a committed checkpoint, in place, whatever number of ranks wrote it. Waits for no other rank.

        Raises KeyError or ValueError when the checkpoint and the objects do not hold the same, and what `load_state_dict` raises.
        """
        reader = FileSystemReader(directory)
        metadata = reader.read_metadata()
        there = {path[:3] for path in metadata.planner_data.values()}
        target = {name: self._target(name, thing, there) for name, thing in self._things.items()}
        # As dcp.load does, which has had a way without other ranks (no_dist) in some versions only.
        planner = _LoadPlanner()
        planner.set_up_planner(target, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
        for name, thing in reversed(self._things.items()):
            self._put(name, thing, target[name])

    def _take(self) -> dict[str, Any]:
        return {name: self._part(name, thing) for name, thing in self._things.items()}

    def _part(self, name: str, thing: Stateful) -> Any:
        if isinstance(thing, nn.Module):
            return get_model_state_dict(thing)
        # torch fills the state of an optimizer that has none yet, by a step with gradients of 0 (_init_optim_state, torch 2.13):
        # training would go on from that. Without state there is nothing to name.
        if isinstance(thing, Optimizer) and thing.state:
            return get_optimizer_state_dict(self._module_of[name], thing)
        return thing.state_dict()

    def _target(self, name: str, thing: Stateful, there: set[tuple[Any, ...]]) -> Any:
        """The state to load into: tensors of the sizes and placements that this rank has."""
        if not isinstance(thing, Optimizer):
            return self._part(name, thing)
        # The step is harmless here, as all that it leaves behind is replaced: it makes tensors to load into.
        part: dict[str, Any] = get_optimizer_state_dict(self._module_of[name], thing)
        # A parameter that has had no gradient before the save has no state there.
        part["state"] = {key: value for key, value in part["state"].items() if (name, "state", key) in there}
        return part

    def _put(self, name: str, thing: Stateful, part: Any) -> None:
        if isinstance(thing, nn.Module):
            set_model_state_dict(thing, part)
        elif isinstance(thing, Optimizer):
            # Not strict, for those parameters without state.
            set_optimizer_state_dict(self._module_of[name], thing, part, options=StateDictOptions(strict=False))
        else:
            thing.load_state_dict(part)


def names_in(directory: Path) -> frozenset[str]:
    """The objects that a checkpoint holds through DCP. Raises FileNotFoundError without `.metadata`."""
    metadata = FileSystemReader(directory).read_metadata()
    return frozenset(str(path[0]) for path in metadata.planner_data.values())


class _SavePlanner(DefaultSavePlanner):
    """Takes the state where DCP watches: what that raises is told to all ranks."""

    def __init__(self, take: Callable[[], dict[str, Any]], renew: Callable[[], None]) -> None:
        super().__init__()
        self._take = take
        self._renew = renew

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        super().set_up_planner(self._take(), storage_meta, is_coordinator)
        self._renew()

    def create_global_plan(self, all_plans: Any) -> Any:
        # What is no tensor is written by one rank for all, such as the names in an optimizer's groups.
        if any(plan.planner_data.keys() != all_plans[0].planner_data.keys() for plan in all_plans):
            raise SaveError("the ranks hold different parts of the state, as pipeline stages do: give save= and load=")
        return super().create_global_plan(all_plans)

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        data = super().transform_object(write_item, object)
        if not isinstance(data, io.BytesIO):
            return data
        data.seek(0)
        refused = refused_types(data)
        if refused:
            raise SaveError(
                f"{write_item.index.fqn} holds objects that torch.load(weights_only=True) refuses: {', '.join(refused)}"
            )
        return data


class _LoadPlanner(DefaultLoadPlanner):
    """Loads what is no tensor safely, and nothing in part."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = {key for key, path in metadata.planner_data.items() if path[0] in state_dict}
        missing, unknown = sorted(set(self.state_dict) - saved), sorted(saved - set(self.state_dict))
        if missing:
            raise KeyError(f"the checkpoint holds no {', '.join(missing[:5])}")
        if unknown:
            raise ValueError(f"the checkpoint holds {', '.join(unknown[:5])}, for which there is no place")

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch's own does the same with weights_only=False (torch 2.13).
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class _Writer(FileSystemWriter):
    """Writes into a round's directory, and knows what it meant to write."""

    def __init__(self, directory: Path, write_rest: WriteRest, renew: Callable[[], None], *, durable: bool) -> None:
        super().__init__(directory, sync_files=False, overwrite=False)
        self.files: list[wire.SavedFile] = []
        self.fs = _Files(self.files, durable=durable)
        self._write_rest = write_rest
        self._renew = renew

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.files += self._write_rest()
        written = super().write_data(plan, planner)
        self._renew()
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._renew()


class _Files(FileSystem):
    """Files that are hashed while they are written. DCP writes each under one name and may rename it."""

    def __init__(self, files: list[wire.SavedFile], *, durable: bool) -> None:
        self._files = files
        self._durable = durable

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as opened:
                yield opened
            return
        # O_EXCL: a second writer of the same name is a mistake that must not pass.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            stream = _Stream(fd)
            yield stream
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        self._files.append(wire.SavedFile(Path(path).name, stream.size_bytes, stream.hexdigest()))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        old, new = Path(path).name, Path(new_path).name
        self._files[:] = [wire.SavedFile(new, f.size_bytes, f.xxh3_128) if f.path == old else f for f in self._files]


class _Stream(DigestWriter):
    """DCP closes what it has written; the descriptor is closed by who opened it."""

    __slots__ = ()

    def close(self) -> None:
        pass


def _module_of(name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The module whose parameters these are, or one around several of them."""
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    theirs = {own: {id(param) for param in module.parameters()} for own, module in modules.items()}
    owners = sorted(own for own, params in theirs.items() if params & wanted)
    found = set().union(*(theirs[own] for own in owners))
    if not wanted <= found:
        raise TypeError(
            f"steps(): {name}= is an optimizer of sharded parameters (DTensor), and {len(wanted - found)} of {len(wanted)} are in"
            f" no module that is passed: pass that too, as in steps(..., model=model, {name}={name}), or give save= and load="
        )
    # One that contains another is enough.
    for own in owners:
        if wanted <= theirs[own]:
            return modules[own]
    around = nn.Module()
    for own in owners:
        around.add_module(own, modules[own])
    return around


def _raise_as_save_error(error: CheckpointException, here: int) -> None:
    """As one line with the ranks in it: CheckpointException is no Exception, and its text is a page of stack traces."""
    failures = {rank: wrapped[0] for rank, wrapped in sorted(error.failures.items())}
    rank, first = next(iter(failures.items()))
    mine = failures.get(here)
    if mine is not None and not isinstance(mine, Exception):
        raise mine  # KeyboardInterrupt and the like.
    text = str(first) if isinstance(first, SaveError) else one_line(first)
    raise SaveError(f"rank {rank}{f' and {len(failures) - 1} more' if len(failures) > 1 else ''}: {text}") from error
