"""The manifest of a checkpoint: what belongs to it, in bytes and digests.

Owns the file format of `manifest.json` and its validation. Must not decide whether a checkpoint is good: it only says
what was committed. A manifest is input like any other file on a shared disk, so its size, its paths and its numbers are
bounded before anything is done with them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from ckpt_supervisor.store.layout import MANIFEST, NUMBER_MAX
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, open_regular, read_up_to
from ckpt_supervisor.store.verdict import Mode, Verdict

FORMAT = 1
MANIFEST_BYTES_MAX = 32 * 1024 * 1024
"""A longer one is refused. It holds FILES_MAX files with names of 200 bytes."""

FILES_MAX = 100_000
"""Most files in one checkpoint."""

PATH_BYTES_MAX = 4096
NAME_BYTES_MAX = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGEST = re.compile(r"[0-9a-f]{32}")

_Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class FileEntry(msgspec.Struct, frozen=True):
    """One file: path below the checkpoint, size, XXH3-128 in hex ("" only where `verified` is structure), its rank."""

    path: str
    bytes: _Count
    xxh3_128: str
    rank: _Count | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was committed. `created_at` is for people; nothing is decided by it."""

    format: int = FORMAT
    step: _Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    ranks: tuple[_Count, ...]
    job: str
    attempt: _Count
    epoch: _Count
    cause: str
    created_at: str
    verified: Mode
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files)


class ManifestError(Exception):
    """There is no usable manifest; `verdict` says what that means for the checkpoint."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason


class _Format(msgspec.Struct):
    """Read first, so that a later format is named and not called corrupt."""

    format: int


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest in this directory. Raises ManifestError, also when it cannot be looked at (verdict unknown)."""
    data = _read(Path(directory) / MANIFEST)
    if not data:
        raise ManifestError(Verdict.TRUNCATED, "manifest.json is empty")
    try:
        written = msgspec.json.decode(data, type=_Format).format
        if written != FORMAT:
            raise ManifestError(Verdict.FOREIGN, f"manifest of format {written}, this version reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(Verdict.CORRUPT, f"manifest.json: {error}") from error
    problem = manifest_problem(manifest)
    if problem:
        raise ManifestError(Verdict.CORRUPT, f"manifest.json: {problem}")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Bytes of manifest.json, for people too. Raises ValueError for one that read_manifest would refuse."""
    problem = manifest_problem(manifest)
    if problem:
        raise ValueError(problem)
    try:
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError(f"a name that is not UTF-8: {error}") from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise ValueError(f"a manifest of {len(data)} bytes, more than {MANIFEST_BYTES_MAX}")
    return data


def manifest_problem(manifest: Manifest) -> str:
    """What is wrong with a manifest, "" if nothing."""
    if not 0 < len(manifest.files) <= FILES_MAX:
        return f"{len(manifest.files)} files; 1 to {FILES_MAX} are possible"
    if len(set(manifest.ranks)) != len(manifest.ranks) or any(rank >= manifest.world_size for rank in manifest.ranks):
        return f"ranks {manifest.ranks[:8]} of a world of {manifest.world_size}"
    seen: set[str] = set()
    for file in manifest.files:
        problem = path_problem(file.path)
        if not problem and file.path in seen:
            problem = f"{file.path!r} is listed twice"
        if not problem and not digest_is_valid(file.xxh3_128, may_lack=manifest.verified == "structure"):
            problem = f"{file.path!r} has no usable digest"
        if problem:
            return problem
        seen.add(file.path)
    return ""


def path_problem(path: str) -> str:
    """Why a path cannot name a file of a checkpoint, "" if it can: relative, plain, inside the directory, not ours."""
    parts = path.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return f"{path[:80]!r} is not UTF-8"
    problems = (
        (_CONTROL.search(path) is not None, "holds a control character"),
        (path.startswith("/"), "is absolute"),
        (any(part in ("", ".", "..") for part in parts), "is not a plain path below the checkpoint"),
        (path == MANIFEST, "is the manifest's own name"),
        (max(sizes) > NAME_BYTES_MAX or sum(sizes) + len(parts) > PATH_BYTES_MAX, "is too long"),
    )
    return next((f"{path[:80]!r} {reason}" for is_wrong, reason in problems if is_wrong), "")


def digest_is_valid(digest: str, may_lack: bool) -> bool:
    """Whether this is an XXH3-128 in lower-case hex, or "" where that is allowed."""
    return _DIGEST.fullmatch(digest) is not None or (may_lack and digest == "")


def _read(path: Path) -> bytes:
    try:
        fd = open_regular(path)
        try:
            data = read_up_to(fd, MANIFEST_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except NotRegular as error:
        raise ManifestError(Verdict.FOREIGN, f"manifest.json {error}") from error
    except OSError as error:
        if error.errno in NOT_THERE:
            raise ManifestError(Verdict.FOREIGN, "no manifest.json") from error
        raise ManifestError(Verdict.UNKNOWN, f"manifest.json cannot be read: {error.strerror}") from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError(Verdict.FOREIGN, f"manifest.json is larger than {MANIFEST_BYTES_MAX} bytes")
    return data
