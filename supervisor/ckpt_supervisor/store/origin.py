"""What the wrong bytes in a file are: another file's, an older checkpoint's, zeros.

Owns the words that make a refusal useful to the person who has to find out how it came about. Must not decide whether
something is refused: it is asked only after that, so that its reads cost nothing where all is well. "Mixed" is the one
verdict that is found here: a file that another checkpoint's manifest lists was put into this one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from ckpt_supervisor.store.formats.structure import Extent
from ckpt_supervisor.store.layout import parse_partial, parse_step
from ckpt_supervisor.store.look import NotRegular, list_names, open_regular
from ckpt_supervisor.store.manifest import FileEntry, ManifestError, read_manifest
from ckpt_supervisor.store.verdict import Finding, Verdict

NEIGHBOURS_MAX = 16
"""Most other checkpoints whose manifests are looked at, the ones with the nearest steps."""

SEARCH_BYTES_MAX = 64 * 1024 * 1024
"""A file of the wrong size is read, to say what it is, up to this size."""

_BLOCK_BYTES = 1 << 20
_ZERO_TAIL_BYTES = 4096
_ZEROS = bytes(_BLOCK_BYTES)


def origin_of(directory: Path, path: str, digest: str, same: Mapping[str, str]) -> tuple[Verdict, str] | None:
    """Whose bytes these are, as a verdict and words. `same`: the path of each digest of this checkpoint."""
    if same.get(digest, path) != path:
        return Verdict.CORRUPT, f"holds the bytes of {same[digest]}"
    for name, files in _neighbours(directory):
        for file in files:
            if file.xxh3_128 == digest:
                whose = f"is the one of {name}" if file.path == path else f"is {file.path} of {name}"
                return Verdict.MIXED, whose
    return None


def origin_of_size(directory: Path, finding: Finding, size: int, files: Sequence[FileEntry]) -> Finding:
    """The same finding about a file's size, with whose bytes they are where these are another file's."""
    if not 0 < size <= SEARCH_BYTES_MAX:
        return finding
    same = {file.xxh3_128: file.path for file in files if file.xxh3_128 and file.bytes == size}
    if not same and not any(file.bytes == size for _, others in _neighbours(directory) for file in others):
        return finding
    try:
        digest = _digest(directory / finding.path, size)
    except (OSError, NotRegular):
        return finding
    origin = origin_of(directory, finding.path, digest, same)
    if origin is None:
        return finding
    return Finding(origin[0], finding.path, finding.offset, f"{finding.reason}: {origin[1]}")


def zeros_in(fd: int, size: int, bad: Sequence[Extent]) -> str:
    """Where the wrong bytes are nothing but zeros, in words; "" if they are not. Raises OSError."""
    if bad and bad[0].end > bad[0].start and _first_other(fd, bad[0].start, bad[0].end) is None:
        return "its bytes are all zeros"
    tail = size - min(_ZERO_TAIL_BYTES, size // 2 + 1)
    if _first_other(fd, tail, size) is not None:
        return ""
    start = tail
    while start > 0 and _first_other(fd, max(0, start - _BLOCK_BYTES), start) is None:
        start = max(0, start - _BLOCK_BYTES)
    if start > 0:
        before = os.pread(fd, min(start, _BLOCK_BYTES), max(0, start - _BLOCK_BYTES))
        start -= len(before) - len(before.rstrip(b"\0"))
    return f"all zeros from byte {start} on" if start else "all zeros"


def _first_other(fd: int, start: int, end: int) -> int | None:
    """Where a block begins that is not all zeros; None if all are."""
    for at in range(start, end, _BLOCK_BYTES):
        block = os.pread(fd, min(_BLOCK_BYTES, end - at), at)
        if block != _ZEROS[: len(block)]:
            return at
        if not block:
            return None
    return None


def _neighbours(directory: Path) -> Iterator[tuple[str, tuple[FileEntry, ...]]]:
    """Other committed checkpoints beside this one, nearest steps first, and what their manifests list."""
    partial = parse_partial(directory.name)
    own = partial[0] if partial is not None else parse_step(directory.name)
    if own is None:
        return
    try:
        names = list_names(directory.parent)
    except OSError:
        return
    steps = sorted((abs(step - own), name) for name in names if name != directory.name and (step := parse_step(name)) is not None)
    for _, name in steps[:NEIGHBOURS_MAX]:
        try:
            yield name, read_manifest(directory.parent / name).files
        except ManifestError:
            continue


def _digest(path: Path, size: int) -> str:
    digest = xxhash.xxh3_128()
    fd = open_regular(path)
    try:
        for at in range(0, size, _BLOCK_BYTES):
            digest.update(os.pread(fd, min(_BLOCK_BYTES, size - at), at))
    finally:
        os.close(fd)
    return digest.hexdigest()
