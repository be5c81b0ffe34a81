"""Who a training process is, from its environment and from torch.distributed if the process has it (docs/protocol.md, rule 11).

Owns the order in which sources are believed. Must not import torch (a process without it starts fast) nor read
`os.environ` itself: `attach()` hands the environment in, so that every case is a plain call in a test.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_client import wire

RESTARTS_APART = 10_000
"""Generation = restarts in place x this + torchrun's restart count, so that it rises with either."""


class Identity(NamedTuple):
    """Place of a process in its training group."""

    rank: int
    world_size: int
    local_rank: int
    generation: int
    distributed: bool
    """torch.distributed is initialised: replicated state needs to be written only once."""


def identify(environment: Mapping[str, str], distributed: tuple[int, int] | None) -> Identity:
    """The identity of this process. `distributed` is (rank, world size) of torch.distributed, None if not initialised."""
    restart, elastic = _number(environment, "CKPT_SUPERVISE_RESTART"), _number(environment, "TORCHELASTIC_RESTART_COUNT")
    generation = (restart or 0) * RESTARTS_APART + (elastic or 0)
    found = environment.get(wire.MPI_FOUND, "").split()
    # What the supervisor had found already is not from below it: a shell that was a rank of mpirun submitted the job.
    mpi = [names for names in wire.MPI if wire.mpi_word(environment, names) not in found]
    pairs = (
        distributed,
        _pair(environment, "RANK", "WORLD_SIZE"),
        # mpirun's own, before Slurm's: below one task all ranks of mpirun have the same SLURM_PROCID (field case 119).
        *(_pair(environment, names.rank, names.size) for names in mpi),
        _pair(environment, "SLURM_PROCID", "SLURM_NTASKS"),
    )
    rank, world_size = next((pair for pair in pairs if pair is not None), (0, 1))
    locals_ = (_number(environment, name) for name in ("LOCAL_RANK", *(names.local_rank for names in mpi), "SLURM_LOCALID"))
    local = next((number for number in locals_ if number is not None), 0)
    return Identity(rank, world_size, local, generation, distributed is not None)


def torch_distributed() -> tuple[int, int] | None:
    """(rank, world size) of torch.distributed, None if it is not initialised. Looks only: imports nothing."""
    module: Any = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return int(module.get_rank()), int(module.get_world_size())


def _pair(environment: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int] | None:
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank is None or size is None or not rank < size:
        return None
    return rank, size


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
