"""Directories whose files say something of each other: what one of them names must be there and fit.

Owns which readers of sets there are and which directories they see. Must not judge single files. A reader is
`read_set(folder)`: None when the directory is not of its layout, a SetLook when it is.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ckpt_supervisor.store.formats import dcp, hf, lightning, parts, safetensors
from ckpt_supervisor.store.formats.structure import LISTING_BYTES_MAX, Damage, Extent, Folder, SetLook
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, Stop, open_regular
from ckpt_supervisor.store.verdict import Finding, Verdict

OPENS_MAX = 200_000
"""Most files that the readers of sets open in one checkpoint."""

READ_BYTES_MAX = 1024**3
READ_EACH_MAX = 64 * 1024 * 1024
"""Most bytes that they read of all files but shards, and at most so many of each count: a sparse file costs nothing."""

FINDINGS_MAX = 100
_SHARDS = (".safetensors", ".distcp")

READERS = (dcp.read_set, safetensors.read_set, hf.read_set, lightning.read_set, parts.read_set)


class Sets(msgspec.Struct):
    """What all readers found in all directories, paths relative to the checkpoint."""

    findings: list[Finding] = msgspec.field(default_factory=list)
    extents: dict[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)


def read_sets(
    directory: Path,
    files: Mapping[str, int],
    patience: Patience,
    stop: Stop | None,
    listing_bytes_max: int = LISTING_BYTES_MAX,
) -> Sets:
    """Look at every directory that holds a file itself. `listing_bytes_max`: see Folder."""
    found = Sets()
    paths = sorted(files)
    opening = _Opening(directory, files)
    for below in sorted({path.rpartition("/")[0] for path in paths}):
        if stop is not None and stop.is_set():
            found.findings.append(Finding(Verdict.UNKNOWN, below, None, "the check was ended before it was looked at"))
            break
        prefix = f"{below}/" if below else ""
        first = bisect_left(paths, prefix)
        last = bisect_left(paths, f"{below}0") if below else len(paths)  # "0" is the character after "/"
        inside = {path[len(prefix) :]: files[path] for path in paths[first:last]}
        folder = Folder((directory / below).name, inside, opening.below(below), listing_bytes_max)
        for look in _looks(folder, patience):
            found.findings += [
                Finding(finding.verdict, prefix + finding.path if finding.path else below, finding.offset, finding.reason)
                for finding in look.findings
            ]
            found.extents.update({prefix + path: extents for path, extents in look.extents.items()})
        if len(found.findings) >= FINDINGS_MAX:
            break
    return found


def _looks(folder: Folder, patience: Patience) -> list[SetLook]:
    """What each reader says; what keeps one from saying it is a finding too."""
    looks = []
    for reader in READERS:
        try:
            look = patience.look(lambda reader=reader: reader(folder))  # type: ignore[misc]
        except Damage as error:
            look = _problem(error.verdict, error.reason, error.offset)
        except NotRegular as error:
            look = _problem(Verdict.FOREIGN, f"a file of it {error}")
        except OSError as error:
            name = os.path.basename(os.fsdecode(error.filename)) if error.filename else "a file of it"  # noqa: PTH119
            if error.errno in NOT_THERE:
                look = _problem(Verdict.MISSING, f"{name} is not there")
            else:
                look = _problem(Verdict.UNKNOWN, f"{name} cannot be read: {error.strerror}")
        if look is not None:
            looks.append(look)
    return looks


def _problem(verdict: Verdict, reason: str, offset: int | None = None) -> SetLook:
    return SetLook("unread", (Finding(verdict, "", offset, reason),))


class _Opening:
    """Opens files for readers, a bounded number of times and of bytes."""

    def __init__(self, directory: Path, files: Mapping[str, int]) -> None:
        self._directory = directory
        self._files = files
        self._left = OPENS_MAX
        self._left_bytes = READ_BYTES_MAX

    def below(self, below: str) -> _OpenBelow:
        """The same for paths relative to a directory."""
        return _OpenBelow(self, below)

    def open(self, path: str) -> int:
        """A descriptor. Raises Damage when there were too many, NotRegular, OSError."""
        self._left -= 1
        if not path.endswith(_SHARDS):
            self._left_bytes -= min(self._files.get(path, 0), READ_EACH_MAX)
        if self._left < 0 or self._left_bytes < 0:
            raise Damage(Verdict.FOREIGN, None, "more would have to be read than any checkpoint needs")
        return open_regular(self._directory / path)


class _OpenBelow:
    def __init__(self, opening: _Opening, below: str) -> None:
        self._opening = opening
        self._below = below

    def __call__(self, path: str) -> int:
        return self._opening.open(f"{self._below}/{path}" if self._below else path)
