"""Writes torch.distributed.checkpoint directories of every kind below a directory, on any number of ranks over gloo.

Owns the small state that is saved: sharded, replicated, uneven and empty tensors, and objects that are no tensors.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "threads": {"thread_count": 5},
    "files": {"single_file_per_rank": False},
    "both": {"single_file_per_rank": False, "thread_count": 3},
}


def state(sharded: bool) -> dict[str, Any]:
    """What is saved."""
    torch.manual_seed(3)
    found: dict[str, Any] = {
        "weight": torch.randn(30, 40), "half": torch.randn(7).half(), "model": {"bias": torch.randn(3), "n": 5},
        "none": torch.zeros(0), "scalar": torch.tensor(3.0), "text": "hello",
    }  # fmt: skip
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        found["rows"] = distribute_tensor(torch.randn(9, 4), mesh, [Shard(0)])
        found["few"] = distribute_tensor(torch.randn(1, 4), mesh, [Shard(0)])
        found["same"] = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    return found


def write(directory: Path, sharded: bool) -> None:
    """One directory for each way."""
    alone: dict[str, Any] = {} if sharded else {"no_dist": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own defaults
        for way, options in WAYS.items():
            writer = dcp.FileSystemWriter(directory / way, sync_files=False, **options)
            dcp.save(state(sharded), storage_writer=writer, **alone)
        dcp.save({}, storage_writer=dcp.FileSystemWriter(directory / "empty", sync_files=False), **alone)
        if sharded:
            writer = dcp.FileSystemWriter(directory / "each", sync_files=False)
            dcp.save(state(sharded), storage_writer=writer, use_collectives=False)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        write(Path(sys.argv[1]), sharded=True)
        dist.barrier()  # torch may abort a rank at its end, and torchrun then ends those that still write.
    finally:
        dist.destroy_process_group()
