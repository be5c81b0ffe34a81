"""The formats of checkpoint files, one module each, told apart by what the bytes are and never by the name.

A reader is `read_structure(fd, size)`: None when the file is not of its format, a Structure when it is well-formed,
Damage when it is of that format and broken. Readers use pread only, never unpickle, and bound every count that the file
states. A file of several formats at once goes to the first reader in the list. Some modules read sets too: sets.py.

The readers are imported by `load`, or when they are first needed: that takes 20 ms, and a run's command is started before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_supervisor.store.formats import plain
from ckpt_supervisor.store.formats.plain import broken_promise
from ckpt_supervisor.store.formats.structure import LISTING_BYTES_MAX, Damage, Extent, Structure
from ckpt_supervisor.store.look import Patience, Stop

if TYPE_CHECKING:
    from ckpt_supervisor.store.formats.sets import Sets

__all__ = ["LISTING_BYTES_MAX", "Damage", "Extent", "Structure", "broken_promise", "load", "read_sets", "read_structure"]

Reader = Callable[[int, int], Structure | None]


@functools.cache
def load() -> tuple[Reader, ...]:
    """The readers of single files; all others are imported too.

    A run calls it as soon as its command is started: not to import from a slow disk, nor from another release, at its last save.
    """
    from ckpt_supervisor.store.formats import safetensors, sets, torch_legacy, torch_zip  # noqa: F401 - sets: see above.

    return torch_zip.read_structure, torch_zip.read_chain, torch_legacy.read_structure, safetensors.read_structure


def read_structure(fd: int, size: int) -> Structure:
    """The structure of an open file. Raises Damage, or OSError."""
    for reader in load():
        structure = reader(fd, size)
        if structure is not None:
            return structure
    return plain.read_structure(fd, size)


def read_sets(
    directory: Path,
    files: Mapping[str, int],
    patience: Patience,
    stop: Stop | None,
    listing_bytes_max: int = LISTING_BYTES_MAX,
) -> Sets:
    """What the files of each directory say of each other: sets.py."""
    from ckpt_supervisor.store.formats.sets import read_sets as read

    return read(directory, files, patience, stop, listing_bytes_max)
