"""Files of safetensors, and sets of files that an index names.

Owns the arithmetic of the header: 8 bytes of length, JSON, and then the tensors without a gap and with nothing behind
them, as the stock loader demands (field case 72: one loader takes a trailing byte, the other does not). Must not read
tensors: the format has no checksums, so that a flipped bit or a payload of zeros shows in a digest alone.

A set is a directory with `*.index.json` whose `weight_map` names a file for each tensor: `model.safetensors.index.json`
or `pytorch_model.bin.index.json`. Its `metadata.total_size` is no proof by itself: what writes it counts the storage
that a tensor is a view of, and others never correct it when they convert.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeGuard

import msgspec

from ckpt_supervisor.store.formats.structure import Damage, Folder, SetLook, Structure
from ckpt_supervisor.store.look import read_up_to
from ckpt_supervisor.store.manifest import path_problem
from ckpt_supervisor.store.verdict import Finding, Verdict

HEADER_BYTES_MAX = 100_000_000
"""The stock loader's own bound."""

TENSORS_MAX = 200_000
COMMAS_MAX = 4_000_000
"""Bounds the numbers in a header before it is parsed; a text in `__metadata__` may hold many commas."""

DIMENSIONS_MAX = 64
NUMBER_MAX = 2**63 - 1
INDEX_BYTES_MAX = 64 * 1024 * 1024
INDEX_COMMAS_MAX = 500_000
SET_TENSORS_MAX = 1_000_000
"""Most tensors of one set of files."""

FINDINGS_MAX = 20

_LENGTH = struct.Struct("<Q")
_FIRST_BYTES = re.compile(rb'\{[ \t\r\n]*["}]')
_INDEX_NAME = re.compile(r"[^/]+\.(?:safetensors|bin)\.index(?:\.[^/.]+)?\.json")
_METADATA = "__metadata__"
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "C128": 128,
}  # fmt: skip
"""Bits of one element. A type that is not here is taken for a newer one, and only its place is checked."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor: element type and its bytes [start, end), counted from the header's end."""

    dtype: str
    start: int
    end: int


class _Index(msgspec.Struct):
    weight_map: dict[str, str] | None = None
    metadata: dict[str, msgspec.Raw] | None = None


def read_structure(fd: int, size: int) -> Structure | None:
    """None if this is no safetensors file. Raises Damage, or OSError."""
    return None if read_tensors(fd, size) is None else Structure("safetensors")


def read_tensors(fd: int, size: int) -> dict[str, Tensor] | None:
    """The tensors of a well-formed file; None if it is none of safetensors. Raises Damage, or OSError."""
    head = os.pread(fd, _LENGTH.size + 64, 0)
    if len(head) < _LENGTH.size + 1 or not _begins(head[_LENGTH.size :]):
        return None
    (length,) = _LENGTH.unpack_from(head)
    if not 2 <= length <= HEADER_BYTES_MAX:
        return None
    data_at = _LENGTH.size + length
    if data_at > size:
        raise Damage(Verdict.TRUNCATED, size, f"ends inside the header, which is to reach to byte {data_at}")
    header = os.pread(fd, length, _LENGTH.size)
    if len(header) != length:
        raise Damage(Verdict.TRUNCATED, _LENGTH.size + len(header), "ends inside the header")
    tensors = _parse(header)
    end = _end_of(tensors)
    if data_at + end > size:
        raise Damage(Verdict.TRUNCATED, size, f"{data_at + end - size} bytes of the last tensors are not there")
    if data_at + end < size:
        raise Damage(Verdict.CORRUPT, data_at + end, f"{size - data_at - end} bytes after the last tensor")
    return tensors


def _begins(text: bytes) -> bool:
    found = _FIRST_BYTES.match(text)
    return found is not None or (text.startswith(b"{") and not text[1:].strip(b" \t\r\n"))


def _parse(header: bytes) -> dict[str, Tensor]:
    if header.count(b'"data_offsets"') > TENSORS_MAX or header.count(b",") > COMMAS_MAX:
        raise Damage(Verdict.CORRUPT, _LENGTH.size, f"a header of more than {TENSORS_MAX} tensors is out of bounds")
    try:
        found = json.loads(header.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damage(Verdict.CORRUPT, _LENGTH.size, f"the header is broken: {error}") from error
    if not isinstance(found, dict):
        raise Damage(Verdict.CORRUPT, _LENGTH.size, "the header is no JSON object")
    found.pop(_METADATA, None)
    return {name: _tensor(name, value) for name, value in found.items()}


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _tensor(name: str, value: object) -> Tensor:
    """One entry, with its span checked against its type and shape."""
    found = value if isinstance(value, dict) else {}
    dtype, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise Damage(Verdict.CORRUPT, _LENGTH.size, f"the header's entry of tensor {name[:80]!r} is broken")
    start, end = offsets
    elements = 1
    for dimension in shape:
        elements = min(elements * dimension, NUMBER_MAX)  # a product of 64 such numbers would have a thousand digits
    bits = _BITS.get(dtype)
    if start > end or (bits is not None and elements * bits != 8 * (end - start)):
        reason = f"tensor {name[:80]!r} of {elements} {dtype[:20]} does not fill bytes {start} to {end}"
        raise Damage(Verdict.CORRUPT, _LENGTH.size, reason)
    return Tensor(dtype, start, end)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= DIMENSIONS_MAX
        and all(type(number) is int and 0 <= number <= NUMBER_MAX for number in value)
    )


def _end_of(tensors: Mapping[str, Tensor]) -> int:
    """Where the last tensor ends; each one has to begin where the one before it ends."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            reason = f"tensor {name[:80]!r} begins at byte {tensor.start} of the data, not at {at}"
            raise Damage(Verdict.CORRUPT, _LENGTH.size, reason)
        at = tensor.end
    return at


def read_set(folder: Folder) -> SetLook | None:
    """What the directory's index files name: every shard is there, and every tensor in the one that it should be in."""
    names = [name for name in folder.files if name.endswith(".json") and _INDEX_NAME.fullmatch(name)]
    findings: list[Finding] = []
    known = False
    for name in sorted(names):
        index = _read_index(folder, name, findings)
        if index is not None and index.weight_map is not None:
            known = True
            findings += islice(_index_problems(folder, name, index), FINDINGS_MAX)
    return SetLook("index and shards", tuple(findings[:FINDINGS_MAX])) if known or findings else None


def _read_index(folder: Folder, name: str, findings: list[Finding]) -> _Index | None:
    if folder.files[name] > INDEX_BYTES_MAX:
        findings.append(Finding(Verdict.CORRUPT, name, None, f"an index of more than {INDEX_BYTES_MAX} bytes is out of bounds"))
        return None
    fd = folder.open_file(name)
    try:
        data = read_up_to(fd, INDEX_BYTES_MAX)
    finally:
        os.close(fd)
    if data.count(b",") > INDEX_COMMAS_MAX:
        findings.append(Finding(Verdict.CORRUPT, name, None, f"an index of more than {INDEX_COMMAS_MAX} names is out of bounds"))
        return None
    try:
        return msgspec.json.decode(data, type=_Index)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        verdict = Verdict.CORRUPT if data else Verdict.TRUNCATED
        findings.append(Finding(verdict, name, None, f"is no index of tensors: {error}"))
        return None


def _index_problems(folder: Folder, name: str, index: _Index) -> Iterator[Finding]:
    tensors_of: dict[str, list[str]] = {}
    weight_map = index.weight_map or {}
    for tensor, shard in weight_map.items():
        tensors_of.setdefault(shard, []).append(tensor)
    if not tensors_of:
        yield Finding(Verdict.CORRUPT, name, None, "names no tensor")
    headers: dict[str, dict[str, Tensor]] = {}
    all_read = True
    for shard in sorted(tensors_of):
        problem = path_problem(shard)
        if problem:
            yield Finding(Verdict.FOREIGN, name, None, f"names a file {problem}")
        elif shard not in folder.files:
            yield Finding(Verdict.MISSING, shard, None, f"is not there, and {name} names it for {len(tensors_of[shard])} tensors")
        elif all_read:
            header = _tensors_of(folder, shard)
            all_read = header is not None
            headers |= {shard: header} if header is not None else {}
            if sum(map(len, headers.values())) > SET_TENSORS_MAX:
                yield Finding(Verdict.CORRUPT, name, None, f"a set of more than {SET_TENSORS_MAX} tensors is out of bounds")
                return
    for shard, header in headers.items():
        absent = [tensor for tensor in tensors_of[shard] if tensor not in header]
        if absent:
            foreign = [tensor for tensor in header if weight_map.get(tensor, shard) != shard]
            yield _absent(name, shard, absent, foreign)
    if index.metadata and len(headers) == len(tensors_of):
        yield from _sum_problem(name, index.metadata, headers)


def _tensors_of(folder: Folder, shard: str) -> dict[str, Tensor] | None:
    """None where the shard is none of safetensors, or is broken, which is said where single files are read.

    Then no other one is read either: what is broken is refused anyhow, and a bound on the time is kept.
    """
    fd = folder.open_file(shard)
    try:
        return read_tensors(fd, folder.files[shard])
    except Damage:
        return None
    finally:
        os.close(fd)


def _absent(name: str, shard: str, absent: list[str], foreign: list[str]) -> Finding:
    """Tensors that are not in their file. If those of another file are (`foreign`), files were mixed up."""
    tensor = absent[0]
    said = f"does not hold {tensor[:80]!r}" + (f" and {len(absent) - 1} others" if len(absent) > 1 else "")
    if foreign:
        return Finding(Verdict.MIXED, shard, None, f"{said}, as {name} says, but {foreign[0][:80]!r} of another file")
    return Finding(Verdict.MISSING, shard, None, f"{said}, as {name} says")


def _sum_problem(
    name: str, metadata: Mapping[str, msgspec.Raw], headers: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[Finding]:
    """A sum that is wrong counts only together with shards that have no element type in common: two saves, then."""
    try:
        stated = msgspec.json.decode(metadata.get("total_size", msgspec.Raw(b"null")), type=int | float | None)
    except msgspec.DecodeError:
        return
    found = sum(tensor.end - tensor.start for header in headers.values() for tensor in header.values())
    types = [{tensor.dtype for tensor in header.values()} for header in headers.values() if header]
    if stated is not None and stated != found and types and not set.intersection(*types):
        reason = f"says {stated} bytes, the shards hold {found}, and they have no element type in common"
        yield Finding(Verdict.MIXED, name, None, reason)
