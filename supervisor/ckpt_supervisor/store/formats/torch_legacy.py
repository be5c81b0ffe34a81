"""Files of torch.save before torch 1.6, or with _use_new_zipfile_serialization=False: pickles, then the raw storages.

Owns the arithmetic of such a file: a magic number, a protocol version, the writer's machine, the object and the list of
storage keys, each a pickle of its own; then for each key an element count (int64) and so many elements. Must not unpickle:
pickled.py reads what the pickles say. The format has no checksums, so only the structure can be checked. Pickles that are
out of the reader's bounds, or of storages of an unknown kind, are left to the plain reader: what this one adds is worth no
false alarm. Files older than torch 0.4 (tar archives) are left to it, too.
"""

from __future__ import annotations

import os
from typing import Any

from ckpt_supervisor.store.formats.structure import Damage, Structure
from ckpt_supervisor.store.pickled import Global, PickleProblem, read_pickle
from ckpt_supervisor.store.verdict import Verdict

FORMAT = "torch legacy"

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

HEAD_BYTES_MAX = 256 * 1024 * 1024
STORAGES_MAX = 1_000_000
SAVES_MAX = 1000
"""Most bytes before the storages; most storages; most torch.save calls into one file."""

_MAGICS = (MAGIC_NUMBER.to_bytes(10, "little"), str(MAGIC_NUMBER).encode())
_MAGIC_WITHIN_BYTES = 64
_HEAD_BYTES_FIRST = 1024 * 1024

_ELEMENT_BYTES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8, "QInt8Storage": 1, "QInt32Storage": 4, "QUInt8Storage": 1, "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1, "UntypedStorage": 1,
}  # fmt: skip
"""By the class that the object names. Newer types of numbers are written as UntypedStorage, counted in bytes."""


class _Unknown(Exception):
    """Nothing that this reader can judge."""


def read_structure(fd: int, size: int) -> Structure | None:
    """None if this is not a legacy file of torch.save. Raises Damage, or OSError."""
    end = 0
    try:
        for _ in range(SAVES_MAX):
            if not _begins_like_ours(fd, end):
                break
            end = _end_of_save(fd, size, end)
            if end == size:
                return Structure(FORMAT)
    except _Unknown:
        return None
    if end == 0:
        return None
    raise Damage(Verdict.CORRUPT, end, f"{size - end} bytes after the last storage")


def _begins_like_ours(fd: int, offset: int) -> bool:
    head = os.pread(fd, _MAGIC_WITHIN_BYTES, offset)
    return any(magic in head for magic in _MAGICS)


def _end_of_save(fd: int, size: int, start: int) -> int:
    """Where the last storage of this torch.save ends. Raises Damage or _Unknown."""
    keys, storages, at = _read_head(fd, size, start)
    if len(keys) > STORAGES_MAX:
        raise _Unknown
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise Damage(Verdict.CORRUPT, at, "the object's storages are not the ones that follow")
    for key in keys:
        count, element_bytes = storages[key]
        stated = os.pread(fd, 8, at)
        if len(stated) < 8:
            raise Damage(Verdict.TRUNCATED, size, f"the file ends before storage {key[:40]}")
        if int.from_bytes(stated, "little", signed=True) != count:
            raise Damage(Verdict.CORRUPT, at, f"storage {key[:40]} has another size than the object says")
        at += 8 + count * element_bytes
        if at > size:
            raise Damage(Verdict.TRUNCATED, size, f"{at - size} bytes are missing of storage {key[:40]}")
    return at


def _read_head(fd: int, size: int, start: int) -> tuple[list[str], dict[str, tuple[int, int]], int]:
    """The storages' keys in the file's order, element count and element size of each, and where they start.

    Nothing says how long the pickles are, so that more is read until they end.
    """
    length = min(size - start, _HEAD_BYTES_FIRST)
    while True:
        data = os.pread(fd, length, start)
        try:
            keys, storages, used = _parse_head(data)
            return keys, storages, start + used
        except PickleProblem as error:
            if error.kind == "bounds":
                raise _Unknown from error
            is_all = len(data) < length or start + length >= size
            if error.kind == "broken":
                raise Damage(Verdict.CORRUPT, start + error.offset, f"a pickle before the storages is {error.reason}") from error
            if is_all:
                raise Damage(Verdict.TRUNCATED, size, "the file ends before its storages") from error
        if length >= HEAD_BYTES_MAX:
            raise _Unknown
        length = min(size - start, length * 8, HEAD_BYTES_MAX)


def _parse_head(data: bytes) -> tuple[list[str], dict[str, tuple[int, int]], int]:
    at = 0
    for word in (MAGIC_NUMBER, PROTOCOL_VERSION, None):
        value, next_at = read_pickle(data, at, nesting_max=None)
        if word is not None and value != word:
            raise PickleProblem("broken", at, f"broken: not {word}")
        at = next_at
    persistent: list[Any] = []
    _, keys_at = read_pickle(data, at, persistent, nesting_max=None)
    keys, end = read_pickle(data, keys_at, nesting_max=None)
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise PickleProblem("broken", keys_at, "broken: no list of storages")
    storages: dict[str, tuple[int, int]] = {}
    for stated in persistent:
        storage = _storage_of(stated, at)
        if storage is not None:
            storages.setdefault(storage[0], storage[1:])
    return keys, storages, end


def _storage_of(stated: Any, at: int) -> tuple[str, int, int] | None:
    """Key, element count and element size from a persistent id; None for that of a module's class."""
    if type(stated) is tuple and stated[:1] == ("module",):
        return None
    if type(stated) is not tuple or len(stated) != 6 or stated[0] != "storage":
        raise PickleProblem("broken", at, "broken: a reference to what is no storage")
    _, kind, key, _, count, _ = stated
    if type(kind) is not Global or type(key) is not str or type(count) is not int or count < 0:
        raise PickleProblem("broken", at, "broken: a reference to what is no storage")
    element_bytes = _ELEMENT_BYTES.get(kind.name)
    if element_bytes is None:
        raise _Unknown
    return key, count, element_bytes
