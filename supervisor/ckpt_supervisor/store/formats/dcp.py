"""Directories of torch.distributed.checkpoint: `.metadata`, and `__<rank>_<number>.distcp` files that it names.

Owns what these files say of each other. Must not unpickle: dcp_metadata.py reads what `.metadata` says. An item of a
`.distcp` file is a torch zip of its own, whose checksums no loader looks at. Torch 2.13 leaves neither gaps nor overlaps
between the items of a file, nor bytes behind the last one, whatever the number of ranks and threads and with one file to
an item; a rank or thread that has nothing to write leaves an empty file that `.metadata` does not name (measured). With
use_collectives=False each rank writes a `__<rank>.metadata` for its own files.

Not seen without digests: that two files of the same layout are swapped; what became of an item that never was a torch
zip, as planners of others may write, unless it is a tensor or turned to zeros.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import msgspec

from ckpt_supervisor.store.formats.dcp_metadata import Item, Unfamiliar, read_listing
from ckpt_supervisor.store.formats.structure import LISTING_BYTES_MAX, Damage, Extent, Folder, SetLook
from ckpt_supervisor.store.formats.torch_zip import read_window
from ckpt_supervisor.store.look import read_up_to
from ckpt_supervisor.store.manifest import path_problem
from ckpt_supervisor.store.verdict import Finding, Verdict

FORMAT = "torch distributed"
METADATA = ".metadata"
SUFFIX = ".distcp"
FINDINGS_MAX = 100
METADATAS_MAX = 1000
EXTENTS_MAX = 2_000_000
"""Most checksums of one directory that are looked at; the rest are left out."""

HUGE_BYTES = 48 * 1024 * 1024
"""A `.metadata` of real tensors takes 250 bytes for each part of one; the bounds of the reader are those of 260,000."""

_SHARD = re.compile(rb"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_OF_RANK = re.compile(r"__[0-9]{1,9}\.metadata")
_METADATA_CLASS = b"torch.distributed.checkpoint.metadata"
_CLASS_WITHIN_BYTES = 256
_PEEK_BYTES = 64


class _Looking(msgspec.Struct):
    """The look at one directory."""

    folder: Folder
    findings: list[Finding] = msgspec.field(default_factory=list)
    items: list[Item] = msgspec.field(default_factory=list)
    extents: dict[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    count: int = 0
    is_partial: bool = False
    """There is too much of it for a look at every item."""
    zips: list[Item] = msgspec.field(default_factory=list)
    others: list[tuple[Item, bool]] = msgspec.field(default_factory=list)

    def find(self, verdict: Verdict, path: str, offset: int | None, reason: str) -> None:
        """Something is wrong."""
        self.findings.append(Finding(verdict, path, offset, reason))


def read_set(folder: Folder) -> SetLook | None:
    """None if this is no directory of torch.distributed.checkpoint. Raises NotRegular, OSError."""
    direct = [name for name in folder.files if "/" not in name]
    shards = [name for name in direct if name.endswith(SUFFIX)]
    metadatas = [METADATA] if METADATA in folder.files else sorted(filter(_OF_RANK.fullmatch, direct))
    if not shards and (not metadatas or not _is_ours(folder, metadatas[0])):
        return None
    looking = _Looking(folder)
    if not metadatas:
        looking.find(Verdict.MISSING, METADATA, None, f"is not there, and {len(shards)} {SUFFIX} files are")
        return SetLook(FORMAT, tuple(looking.findings))
    if len(metadatas) > METADATAS_MAX:
        looking.find(Verdict.FOREIGN, "", None, f"more than {METADATAS_MAX} files of metadata are not read")
        return SetLook(FORMAT, tuple(looking.findings))
    try:
        for name in metadatas:
            _read_metadata(looking, name)
    except Unfamiliar:
        if not shards:
            return None  # another kind of storage: nothing here is said of files
        looking.find(Verdict.CORRUPT, name, None, f"does not say what is in the {SUFFIX} files")
    if not looking.findings and not looking.is_partial:
        _check_files(looking, shards)
    return SetLook(FORMAT, tuple(looking.findings[:FINDINGS_MAX]), {} if looking.findings else looking.extents)


def _is_ours(folder: Folder, name: str) -> bool:
    """Without any shard beside it: other programs have a `.metadata`, too."""
    fd = folder.open_file(name)
    try:
        head = os.pread(fd, _CLASS_WITHIN_BYTES, 0)
    finally:
        os.close(fd)
    return not head or _METADATA_CLASS in head


def _read_metadata(looking: _Looking, name: str) -> None:
    size = looking.folder.files[name]
    if size == 0:
        looking.find(Verdict.TRUNCATED, name, 0, "is empty")
        return
    fd = looking.folder.open_file(name)
    try:
        data = read_up_to(fd, min(size, LISTING_BYTES_MAX))
    finally:
        os.close(fd)
    if size > looking.folder.listing_bytes_max:
        looking.is_partial = True
        for shard in sorted(set(_SHARD.findall(data))):
            held = looking.folder.files.get(shard.decode())
            if held is None:
                looking.find(Verdict.MISSING, shard.decode(), None, "is not there, and the metadata names it")
            elif held == 0:
                looking.find(Verdict.TRUNCATED, shard.decode(), 0, "is empty, and the metadata names it")
        return
    try:
        listing = read_listing(data)
    except Damage as error:
        if error.verdict is Verdict.FOREIGN and size > HUGE_BYTES:
            looking.is_partial = True  # Beyond what is gone through, as the largest real ones may be.
        else:
            looking.find(error.verdict, name, error.offset, error.reason)
        return
    looking.items += listing.items
    for lacking in listing.lacking:
        looking.find(Verdict.MISSING, name, None, f"no file holds {lacking}")


def _check_files(looking: _Looking, shards: list[str]) -> None:
    by_path: dict[str, list[Item]] = {}
    for item in looking.items:
        by_path.setdefault(item.path, []).append(item)
    for path in sorted(by_path):
        if len(looking.findings) >= FINDINGS_MAX:
            return
        _check_file(looking, path, by_path[path])
    for shard in sorted(shards):
        if shard not in by_path and looking.folder.files[shard] > 0:
            looking.find(Verdict.MIXED, shard, None, "is of another save: the metadata names no item in it")
    looking.findings += _not_zips(looking)


def _check_file(looking: _Looking, path: str, items: list[Item]) -> None:
    """The items of one file: all there, one behind the other, each well-formed."""
    problem = path_problem(path)
    if problem:
        looking.find(Verdict.FOREIGN, METADATA, None, f"names a file that {problem}")
        return
    size = looking.folder.files.get(path)
    if size is None:
        looking.find(Verdict.MISSING, path, None, f"is not there, and the metadata names {len(items)} items in it")
        return
    items.sort(key=lambda item: (item.offset, item.length))
    end = max(item.offset + item.length for item in items)
    if end > size:
        looking.find(Verdict.TRUNCATED, path, size, f"{end - size} bytes are missing of {end}")
        return
    fd = looking.folder.open_file(path)
    try:
        misplaced = _layout_problem(items, size)
        if misplaced is not None and not _is_safetensors(fd, size):
            looking.find(Verdict.CORRUPT, path, *misplaced)
        elif misplaced is None:
            found = tuple(_check_items(looking, fd, items))
            if found:
                looking.extents[path] = found
    finally:
        os.close(fd)


def _layout_problem(items: list[Item], size: int) -> tuple[int, str] | None:
    end = 0
    for item in items:
        if item.offset < end:
            return item.offset, f"item {item.name} lies over another"
        if item.offset > end:
            return end, f"{item.offset - end} bytes before item {item.name} belong to none"
        end = item.offset + item.length
    return None if end == size else (end, f"{size - end} bytes after the last item")


def _is_safetensors(fd: int, size: int) -> bool:
    """SerializationFormat.SAFETENSORS writes such a file and states places that are none (torch 2.13)."""
    head = os.pread(fd, 9, 0)
    return len(head) == 9 and int.from_bytes(head[:8], "little") <= size - 8 and head.endswith(b"{")


def _check_items(looking: _Looking, fd: int, items: list[Item]) -> Iterator[Extent]:
    for item in items:
        if len(looking.findings) >= FINDINGS_MAX or looking.count > EXTENTS_MAX:
            return
        if not item.is_plain or item.length == 0:
            continue
        try:
            structure = read_window(fd, item.offset, item.length)
        except Damage as error:
            looking.find(Verdict.CORRUPT, item.path, error.offset, f"item {item.name}: {error.reason}")
            continue
        if structure is None:
            is_zeros = not any(os.pread(fd, min(item.length, _PEEK_BYTES), item.offset))
            looking.others.append((item, is_zeros))
            continue
        looking.zips.append(item)
        looking.count += len(structure.extents)
        held = max((extent.end - extent.start for extent in structure.extents), default=None)
        if held is not None and item.tensor_bytes is not None and held < item.tensor_bytes:
            reason = f"item {item.name} holds {held} bytes, not the tensor's {item.tensor_bytes}"
            looking.find(Verdict.MIXED, item.path, item.offset, reason)
        # One name for all records: a hundred thousand items have a million of them.
        yield from (Extent(extent.start, extent.end, extent.crc32, item.name) for extent in structure.extents)


def _not_zips(looking: _Looking) -> Iterator[Finding]:
    """Items that should be torch zips and have not the least of one: overwritten, most likely with zeros."""
    has_tensors = any(item.is_tensor for item in looking.zips)
    for item, is_zeros in looking.others:
        if item.is_tensor:
            # A raw tensor is as long as its numbers; a torch zip is longer.
            longer = item.tensor_bytes is not None and item.length > item.tensor_bytes
            is_bad = has_tensors or (is_zeros and longer)
        else:
            is_bad = is_zeros and bool(looking.zips)
        if is_bad:
            yield Finding(Verdict.CORRUPT, item.path, item.offset, f"item {item.name} is not the archive that it was")
