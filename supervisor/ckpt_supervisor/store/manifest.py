"""The manifest of a checkpoint: what belongs to it, in bytes and digests.

Owns the file format of `manifest.json` and its validation. Must not decide whether a checkpoint is good: it only says
what was committed. A manifest is input like any other file on a shared disk, so its size, its paths and its numbers are
bounded before anything is done with them.

Its last line holds the XXH3-128 of every byte before that line: a bit that flips in a step, a name or a digest of the
manifest must not go unseen, nor one in its white space. The bytes are compared and not what they mean, so a manifest
that some tool has written anew is refused. Manifests from before there was a digest end without one and are read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

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
_DIGEST_LINE = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n\}\n')
_DIGEST_LINE_BYTES = 50
_END, _END_OF_FILES = b"\n}\n", b"\n ]\n}\n"

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
    save_ms: _Count = 0
    """From the instant at which all ranks began to save to the last one's word that it had; 0 if that is not known."""
    files: tuple[FileEntry, ...]
    adopted: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Names of what a program itself wrote and this is a copy of (--adopt); left out of the others."""

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
    if not data.strip(b"\0"):
        raise ManifestError(Verdict.CORRUPT, "manifest.json is all zeros")
    has_digest = _check_digest(data)
    try:
        written = msgspec.json.decode(data, type=_Format).format
        if written != FORMAT:
            raise ManifestError(Verdict.FOREIGN, f"manifest of format {written}, this version reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        is_cut = "truncated" in str(error) and not data.endswith(_END)
        raise ManifestError(Verdict.TRUNCATED if is_cut else Verdict.CORRUPT, f"manifest.json: {error}") from error
    problem = manifest_problem(manifest)
    if not problem and _lacks_its_last_byte(data):
        raise ManifestError(Verdict.TRUNCATED, "manifest.json: its last byte is not there")
    if not problem and not has_digest and not data.endswith(_END_OF_FILES):
        problem = "it does not end as it was written"
    if problem:
        raise ManifestError(Verdict.CORRUPT, f"manifest.json: {problem}")
    return manifest


def _check_digest(data: bytes) -> bool:
    """Whether a manifest has a digest. Raises ManifestError when that is another one than its bytes have."""
    line = _DIGEST_LINE.fullmatch(data, max(0, len(data) - _DIGEST_LINE_BYTES))
    if line is None:
        return False
    found = xxhash.xxh3_128_hexdigest(data[: line.start()])
    if found.encode() == line[1]:
        return True
    raise ManifestError(Verdict.CORRUPT, f"manifest.json: XXH3-128 is {found}, not the {line[1].decode()} of its last line")


def _lacks_its_last_byte(data: bytes) -> bool:
    """Whether this would be as it was written with one line feed more; what some tool has laid out anew is not."""
    whole = data + b"\n"
    return not data.endswith(_END) and whole.endswith(_END) and (_check_digest(whole) or whole.endswith(_END_OF_FILES))


def encode_manifest(manifest: Manifest) -> bytes:
    """Bytes of manifest.json, for people too. Raises ValueError for one that read_manifest would refuse."""
    problem = manifest_problem(manifest)
    if problem:
        raise ValueError(problem)
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1).removesuffix(_END.rstrip())
    except UnicodeEncodeError as error:
        raise ValueError(f"a name that is not UTF-8: {error}") from error
    data = body + b',\n "digest": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"' + _END
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
    return _adopted_problem(manifest)


def _adopted_problem(manifest: Manifest) -> str:
    """A program is given such a name to resume from: it has to lie in the checkpoint, and something has to lie there."""
    tops = {file.path.partition("/")[0] for file in manifest.files}
    names = () if manifest.adopted is msgspec.UNSET else manifest.adopted
    return next((f"{name[:80]!r} was adopted and no file has that name" for name in names if name not in tops), "")


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
            raise ManifestError(Verdict.FOREIGN, "manifest.json is not there") from error
        raise ManifestError(Verdict.UNKNOWN, f"manifest.json cannot be read: {error.strerror}") from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError(Verdict.FOREIGN, f"manifest.json is larger than {MANIFEST_BYTES_MAX} bytes")
    return data
