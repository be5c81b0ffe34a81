"""The formats of checkpoint files, one module each, told apart by what the bytes are and never by the name.

A reader is `read_structure(fd, size)`: None when the file is not of its format, a Structure when it is well-formed,
Damage when it is of that format and broken. Readers use pread only, never unpickle, and bound every count that the file
states. A file of several formats at once goes to the first reader in the list.
"""

from __future__ import annotations

from ckpt_supervisor.store.formats import plain, torch_zip
from ckpt_supervisor.store.formats.structure import Damage, Extent, Structure

__all__ = ["Damage", "Extent", "Structure", "read_structure"]

_KNOWN = (torch_zip.read_structure,)


def read_structure(fd: int, size: int) -> Structure:
    """The structure of an open file. Raises Damage, or OSError."""
    for reader in _KNOWN:
        structure = reader(fd, size)
        if structure is not None:
            return structure
    return plain.read_structure(fd, size)
