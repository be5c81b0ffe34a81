"""Small checkpoints of every format there is, and how they get damaged.

Owns samples as bytes by path, and the kinds of damage that the field cases name (CUT in docs/field-cases.md: 67 to 75). Must not
judge: what has to come of a damage is said by the tests.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ckpt_supervisor.store import Committed, Expected, Manifest, Mode, Verdict, check_files, commit, make_partial, take_epoch

Files = dict[str, bytes]

CUTS: dict[str, Callable[[int], int]] = {
    "0": lambda _: 0,
    "1 byte": lambda _: 1,
    "header": lambda size: min(100, size - 1),
    "middle": lambda size: size // 2,
    "last record": lambda size: max(0, size - size // 10 - 1),
    "size-1": lambda size: size - 1,
    "size-22": lambda size: max(0, size - 22),
}
"""Where a file is cut, by its size."""


def torch_file(state: object, zip_format: bool = True, checksums: bool = True) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(state, stream, _use_new_zipfile_serialization=zip_format)
    finally:
        torch.serialization.set_crc32_options(True)
    return stream.getvalue()


def some_state(seed: int) -> dict[str, object]:
    """A model's and an optimizer's state, a few kilobytes, another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(12, 20, generator=generator) for name in ("a", "b")}
    return {"model": weights, "moments": torch.randn(500, generator=generator), "step": seed}


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int, int]], metadata: bool = True) -> bytes:
    """The length and the JSON of these tensors: type, shape, first and last byte."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    for name, (dtype, shape, start, end) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def safetensors_file(names: Sequence[str], seed: int, dtype: str = "F32") -> bytes:
    """A file with these tensors of 6 x 10 elements."""
    width = {"F32": 4, "BF16": 2}[dtype]
    size = 60 * width
    data = random.Random(seed).randbytes(size * len(names))
    tensors = {name: (dtype, (6, 10), at * size, (at + 1) * size) for at, name in enumerate(names)}
    return safetensors_header(tensors) + data


def sharded_model(seed: int, shards: int = 3) -> Files:
    """A model in several files of safetensors and their index, as save_pretrained writes it."""
    files: Files = {}
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = [f"layers.{2 * shard + k}.weight" for k in range(2)]
        files[name] = safetensors_file(tensors, 100 * seed + shard)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 240 * 2 * shards}, "weight_map": weight_map}
    return files | {"config.json": b'{"model_type": "toy"}', "model.safetensors.index.json": json.dumps(index, indent=2).encode()}


def trainer_directory(seed: int, step: int = 500, processes: int = 1) -> Files:
    """What the Trainer of transformers writes into checkpoint-<step>, but for the model."""
    log = {"epoch": 1.0, "grad_norm": float("nan"), "loss": 0.5, "step": step}  # as it is written when training diverges
    state = {"best_metric": None, "epoch": 1.0, "global_step": step, "log_history": [log], "max_steps": 9 * step}
    rng = ["rng_state.pth"] if processes == 1 else [f"rng_state_{process}.pth" for process in range(processes)]
    return {
        "optimizer.pt": torch_file(some_state(seed)),
        "scheduler.pt": torch_file({"last_epoch": step, "seed": seed}),
        "trainer_state.json": json.dumps(state, indent=2).encode(),
        "training_args.bin": torch_file({"learning_rate": 1e-4, "seed": seed}),
        **{name: torch_file({"cpu": torch.arange(seed, seed + 40)}) for name in rng},
    }


def dcp_directory(seed: int) -> Files:
    """What torch.distributed.checkpoint writes, from one process."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes this for a single process
        dcp.save(some_state(seed), checkpoint_id=name, no_dist=True)
        return read_files(Path(name))


def lightning_file(seed: int) -> bytes:
    """What a Lightning trainer saves as a `.ckpt`."""
    state = some_state(seed)
    return torch_file({"epoch": 0, "global_step": seed, "pytorch-lightning_version": "2.5.0", "state_dict": state["model"]})


SAMPLES: dict[str, Callable[[int], Files]] = {
    "torch zip": lambda seed: {
        "state.pt": torch_file(some_state(seed)),
        "rank-00000.pt": torch_file(torch.arange(seed, seed + 50)),
    },
    "torch zip without checksums": lambda seed: {"state.pt": torch_file(some_state(seed), checksums=False)},
    "legacy": lambda seed: {"state.pt": torch_file(some_state(seed), zip_format=False)},
    "dcp": dcp_directory,
    "safetensors": lambda seed: {"model.safetensors": safetensors_file(["a", "b", "c"], seed)},
    "Trainer with shards": lambda seed: {**sharded_model(seed), **trainer_directory(seed)},
    "Lightning": lambda seed: {"epoch=0-step=7.ckpt": lightning_file(seed)},
    "plain": lambda seed: {"weights": random.Random(seed).randbytes(3000), "notes.txt": b"nothing else %d\n" % seed},
}
"""A good checkpoint of each format, another one for each seed, with the same paths for all seeds."""


def read_files(directory: Path) -> Files:
    """All files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Put these files there."""
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def committed_files(root: Path, step: int, files: Mapping[str, bytes], mode: Mode = "full") -> Path:
    """A committed checkpoint of these files, which no rank has hashed."""
    epoch = take_epoch(root, "1", 0, "0").epoch
    partial = write_files(make_partial(root, step, epoch, 1), files)
    report, entries = check_files(partial, [Expected(path, len(data), "", 0) for path, data in files.items()], mode)
    assert report.verdict is Verdict.INTACT, report
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="2026-11-29",
        verified=mode, files=entries,
    )  # fmt: skip
    outcome = commit(root, partial, manifest)
    assert isinstance(outcome, Committed), outcome
    return outcome.path


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def cut(path: Path, where: str) -> None:
    """Cut a file at one of the places of CUTS."""
    os.truncate(path, CUTS[where](path.stat().st_size))
