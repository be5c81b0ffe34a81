"""Any file at all: nothing is known about its inside.

Owns the last resort of the format readers, and the one thing that a name may say: what can never be a file of that kind.
Must not judge content beyond that: only a digest can, and one is taken of every file.
"""

from __future__ import annotations

import os

from ckpt_supervisor.store.formats.structure import Damage, Structure
from ckpt_supervisor.store.verdict import Verdict

HEAD_BYTES = 4096
_OF_TORCH = (".pt", ".pth", ".ckpt", ".distcp")
_SHARD = ".distcp"
"""A rank that has nothing to write leaves an empty one; whether it should hold something `.metadata` says (dcp.py)."""

_PICKLED = (".pt", ".pth", ".ckpt", ".bin")
PICKLE_BYTES_MAX = 1024 * 1024
"""Of a longer one that no reader has recognised it is not asked where its pickle ends."""

_SAFETENSORS = ".safetensors"
_ZIP_MAGIC = b"PK\x03\x04"
_SHORTEST_ZIP = 64


def read_structure(_fd: int, _size: int) -> Structure:
    """Every file is a plain one."""
    return Structure("plain")


def broken_promise(fd: int, size: int, name: str) -> Damage | None:
    """What is wrong with a file that no reader has recognised, although its name says that one should. Raises OSError.

    Only what no writer of such files leaves: an empty one, one that begins with zeros (its data never reached the disk),
    the first bytes of an archive, a name that stands for one format alone. Other unrecognised ones may be anybody's.
    """
    if name.endswith(_PICKLED) and 0 < size <= PICKLE_BYTES_MAX and _is_cut_pickle(os.pread(fd, size, 0)):
        return Damage(Verdict.TRUNCATED, size, "ends inside its first pickle")
    if not name.endswith((*_OF_TORCH, _SAFETENSORS)):
        return None
    if size == 0:
        if name.endswith(_SHARD):
            return None
        return Damage(Verdict.TRUNCATED, 0, "is empty")
    head = os.pread(fd, min(size, HEAD_BYTES), 0)
    if head and not head.strip(b"\0"):
        return Damage(Verdict.CORRUPT, 0, "begins with zeros only: its data was never written, or was overwritten")
    if name.endswith(_SAFETENSORS):
        return Damage(Verdict.TRUNCATED if size < HEAD_BYTES else Verdict.CORRUPT, min(size, 8), "has no header of safetensors")
    if size < _SHORTEST_ZIP and head[:4] == _ZIP_MAGIC[: len(head)]:
        return Damage(Verdict.TRUNCATED, size, "ends inside the archive's first record")
    return None


def _is_cut_pickle(data: bytes) -> bool:
    """Whether these bytes begin as a pickle of protocol 2 or later and end before it does."""
    from ckpt_supervisor.store.pickled import PickleProblem, read_pickle

    if data[:1] != b"\x80" or not 2 <= data[1:2].ljust(1, b"\2")[0] <= 5:
        return False
    try:
        read_pickle(data, 0, [], nesting_max=None)
    except PickleProblem as error:
        return error.kind == "cut"
    return False
