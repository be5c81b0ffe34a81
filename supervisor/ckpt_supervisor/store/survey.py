"""The cheap part of every verification: names and sizes, without opening anything but the manifest.

Owns what can be said of a directory by looking at it from outside, and what is wrong with the words of the ranks alone.
Must not read a file's content: `ckptctl ls` and the scan for candidates do this for a thousand checkpoints at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ckpt_supervisor.store.layout import MANIFEST, parse_partial, parse_step
from ckpt_supervisor.store.look import NOT_THERE, Patience, Tree, kind_of, list_tree
from ckpt_supervisor.store.manifest import FileEntry, Manifest, ManifestError, digest_is_valid, path_problem, read_manifest
from ckpt_supervisor.store.verdict import Finding, Verdict, weightiest


class Expected(msgspec.Struct, frozen=True):
    """What a rank says it wrote: path below the directory, size, XXH3-128 in hex or "" if it has none.

    `rank` is None for a file that nobody reported.
    """

    path: str
    bytes: int
    xxh3_128: str
    rank: int | None


def survey_checkpoint(path: Path, patience: Patience) -> tuple[Manifest | None, Finding | None]:
    """Manifest, names and sizes; no other file is opened. The weightiest problem found, if any."""
    tree, problem = survey_directory(path, patience)
    if tree is None:
        return None, problem
    try:
        manifest = patience.look(lambda: _manifest_or_oserror(path))
    except ManifestError as error:
        # Who reads a manifest alone is told its name; here the path has it.
        return None, Finding(error.verdict, MANIFEST, None, error.reason.removeprefix(MANIFEST).lstrip(": "))
    except OSError as error:
        return None, Finding(Verdict.UNKNOWN, MANIFEST, None, f"cannot be read: {error.strerror}")
    step = parse_step(path.name)
    if step is not None and step != manifest.step:
        reason = f"the manifest is of step {manifest.step}, the name of {step}"
        return manifest, Finding(Verdict.MIXED, MANIFEST, None, reason)
    listed = {file.path for file in manifest.files}
    strays = (Finding(Verdict.FOREIGN, stray, None, "is not in the manifest") for stray in tree.files if stray not in listed)
    return manifest, weightiest((*refusals(tree), *size_problems(manifest.files, tree.files), *strays))


def survey_directory(path: Path, patience: Patience, skip: str = MANIFEST) -> tuple[Tree | None, Finding | None]:
    """Everything in a directory but its manifest, or why it cannot be said."""
    try:
        mode = patience.look(lambda: os.lstat(path)).st_mode
        if kind_of(mode) != "a directory":
            return None, Finding(Verdict.FOREIGN, "", None, f"{path.name} is {kind_of(mode)}, no directory")
        return patience.look(lambda: list_tree(path, skip=skip)), None
    except OSError as error:
        if error.errno in NOT_THERE:
            return None, Finding(Verdict.MISSING, "", None, f"{path.name} is not there")
        return None, Finding(Verdict.UNKNOWN, "", None, f"{path.name} cannot be looked at: {error.strerror}")


def claims_problems(wanted: Sequence[Expected]) -> list[Finding]:
    """What is wrong with the ranks' words alone."""
    findings: list[Finding] = []
    first: dict[str, Expected] = {}
    for want in wanted:
        reason = path_problem(want.path)
        if reason:
            findings.append(Finding(Verdict.FOREIGN, want.path, None, reason))
        elif want.path in first:
            both = f"reported twice, by rank {first[want.path].rank} and by rank {want.rank}"
            findings.append(Finding(Verdict.MIXED, want.path, None, both))
        elif not digest_is_valid(want.xxh3_128, may_lack=True):
            findings.append(Finding(Verdict.FOREIGN, want.path, None, f"{want.xxh3_128[:40]!r} is no XXH3-128"))
        first.setdefault(want.path, want)
    return findings


def own_name_taken(partial: Path) -> list[Finding]:
    """A save that writes a manifest.json of its own would lose it to ours."""
    if parse_partial(partial.name) is None or not os.path.lexists(partial / MANIFEST):
        return []
    return [Finding(Verdict.FOREIGN, MANIFEST, None, "is the name of the store's own manifest")]


def refusals(tree: Tree) -> list[Finding]:
    """Names that are no regular files, and names that no manifest may hold."""
    refused = [Finding(Verdict.FOREIGN, path, None, reason) for path, reason in tree.refused]
    named = (Finding(Verdict.FOREIGN, path, None, path_problem(path)) for path in tree.files)
    return refused + [finding for finding in named if finding.reason]


def size_problems(wanted: Iterable[Expected | FileEntry], sizes: dict[str, int]) -> list[Finding]:
    """Files that are not there or have another size."""
    findings = []
    for want in wanted:
        size = sizes.get(want.path)
        if size is None:
            findings.append(Finding(Verdict.MISSING, want.path, None, "is not there"))
        elif size != want.bytes:
            findings.append(size_problem(want.path, want.bytes, size))
    return findings


def size_problem(path: str, wanted: int, size: int) -> Finding:
    """Shorter is truncated; longer is none of the sizes that a kill leaves behind."""
    verdict = Verdict.TRUNCATED if size < wanted else Verdict.CORRUPT
    return Finding(verdict, path, min(size, wanted), f"{size} bytes instead of {wanted}")


def _manifest_or_oserror(path: Path) -> Manifest:
    """The same as read_manifest, but "could not look" as the OSError that it came from, so that it is tried again."""
    try:
        return read_manifest(path)
    except ManifestError as error:
        if error.verdict is Verdict.UNKNOWN and isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        raise
