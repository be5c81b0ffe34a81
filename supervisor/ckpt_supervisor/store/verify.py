"""Whether the bytes on the disk are the ones that were meant.

Owns the check of a partial directory against what the ranks reported, and of a committed one against its manifest. Must
not change anything, map a file, follow a link or unpickle. It ends at the first file that is wrong: nothing after it
can make the checkpoint good, and the time belongs to the next candidate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ckpt_supervisor.store.formats import Damage, Structure, read_structure
from ckpt_supervisor.store.layout import MANIFEST, parse_partial, parse_step
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, Stop, Tree, kind_of, list_tree, open_regular
from ckpt_supervisor.store.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    digest_is_valid,
    path_problem,
    read_manifest,
)
from ckpt_supervisor.store.stream import Shrunk, Source, Stopped, read_content, spread
from ckpt_supervisor.store.verdict import Finding, Mode, Report, Verdict, report_of, weightiest

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read), from several threads but never at the same time."""

FINDINGS_MAX = 100
"""Most findings in one report; the first ones say enough."""


class Expected(msgspec.Struct, frozen=True):
    """What a rank says it wrote: path below the directory, size, XXH3-128 in hex or "" if it has none.

    `rank` is None for a file that nobody reported.
    """

    path: str
    bytes: int
    xxh3_128: str
    rank: int | None


class _Pass(msgspec.Struct):
    """One pass over the files of a directory, shared by its threads under `lock`."""

    directory: Path
    mode: Mode
    threads: int
    progress: Progress | None
    stop: Stop | None
    patience: Patience
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    total_bytes: int = 0
    bytes_read: int = 0
    entries: list[FileEntry] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    unchecked: list[str] = msgspec.field(default_factory=list)

    def on_bytes(self, count: int) -> None:
        with self.lock:
            self.bytes_read += count
            if self.progress is not None:
                self.progress(self.bytes_read, self.total_bytes)


def check_files(
    directory: str | os.PathLike[str],
    expected: Iterable[Expected],
    mode: Mode = "full",
    threads: int = 2,
    progress: Progress | None = None,
    stop: Stop | None = None,
    elsewhere: Iterable[Expected] = (),
    share: bool = False,
) -> tuple[Report, tuple[FileEntry, ...]]:
    """Check a directory that is about to be committed. The entries are its manifest's; none unless it is intact.

    Files that no rank reported belong to the checkpoint too (rank None). In mode structure the digests are the ranks'
    own. `elsewhere`: what other nodes read; only names and sizes of it are looked at here, and it makes no entries.
    `share`: this is such another node; what is not expected here is somebody else's.
    """
    wanted = tuple(expected)
    others = tuple(elsewhere)
    passing = _Pass(Path(directory), mode, threads, progress, stop, Patience(stop))
    findings = _claims_problems((*wanted, *others))
    tree, problem = _survey(passing.directory, passing.patience)
    if tree is not None and not findings and share:
        findings = _size_problems(wanted, tree.files)
    elif tree is not None and not findings:
        reported = {want.path for want in (*wanted, *others)}
        strays = tuple(Expected(path, size, "", None) for path, size in tree.files.items() if path not in reported)
        findings = [
            *_own_name_taken(passing.directory),
            *_refusals(tree),
            *_size_problems((*wanted, *others), tree.files),
        ]
        wanted += strays
        if others and not wanted:
            return report_of(findings[:FINDINGS_MAX], 0, mode), ()
        if not wanted:
            findings.append(Finding(Verdict.MISSING, "", None, "no rank has written or reported a file"))
    elif problem is not None:
        findings.append(problem)
    if not findings:
        _read_files(passing, wanted)
        findings = passing.findings
    report = report_of(findings[:FINDINGS_MAX], passing.bytes_read, mode, sorted(passing.unchecked))
    entries = sorted(passing.entries, key=lambda entry: entry.path) if report.verdict is Verdict.INTACT else ()
    return report, tuple(entries)


def verify_checkpoint(
    path: str | os.PathLike[str],
    mode: Mode = "full",
    threads: int = 2,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Report:
    """Check a committed checkpoint against its manifest."""
    passing = _Pass(Path(path), mode, threads, progress, stop, Patience(stop))
    manifest, problem = survey_checkpoint(passing.directory, passing.patience)
    if manifest is None or problem is not None:
        return report_of((problem,) if problem is not None else (), 0, mode)
    _read_files(passing, tuple(Expected(file.path, file.bytes, file.xxh3_128, file.rank) for file in manifest.files))
    return report_of(passing.findings[:FINDINGS_MAX], passing.bytes_read, mode, sorted(passing.unchecked))


def survey_checkpoint(path: Path, patience: Patience) -> tuple[Manifest | None, Finding | None]:
    """The cheap part: manifest, names and sizes; no other file is opened. The weightiest problem found, if any."""
    tree, problem = _survey(path, patience)
    if tree is None:
        return None, problem
    try:
        manifest = patience.look(lambda: _manifest_or_oserror(path))
    except ManifestError as error:
        return None, Finding(error.verdict, MANIFEST, None, error.reason)
    except OSError as error:
        return None, Finding(Verdict.UNKNOWN, MANIFEST, None, f"cannot be read: {error.strerror}")
    step = parse_step(path.name)
    if step is not None and step != manifest.step:
        reason = f"the manifest is of step {manifest.step}, the name of {step}"
        return manifest, Finding(Verdict.MIXED, MANIFEST, None, reason)
    listed = {file.path for file in manifest.files}
    strays = (Finding(Verdict.FOREIGN, stray, None, "is not in the manifest") for stray in tree.files if stray not in listed)
    return manifest, weightiest((*_refusals(tree), *_size_problems(manifest.files, tree.files), *strays))


def _manifest_or_oserror(path: Path) -> Manifest:
    """The same as read_manifest, but "could not look" as the OSError that it came from, so that it is tried again."""
    try:
        return read_manifest(path)
    except ManifestError as error:
        if error.verdict is Verdict.UNKNOWN and isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        raise


def _claims_problems(wanted: Sequence[Expected]) -> list[Finding]:
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


def _own_name_taken(partial: Path) -> list[Finding]:
    """A save that writes a manifest.json of its own would lose it to ours."""
    if parse_partial(partial.name) is None or not os.path.lexists(partial / MANIFEST):
        return []
    return [Finding(Verdict.FOREIGN, MANIFEST, None, "is the name of the store's own manifest")]


def _survey(path: Path, patience: Patience) -> tuple[Tree | None, Finding | None]:
    """Everything in a directory, or why it cannot be said."""
    try:
        mode = patience.look(lambda: os.lstat(path)).st_mode
        if kind_of(mode) != "a directory":
            return None, Finding(Verdict.FOREIGN, "", None, f"{path.name} is {kind_of(mode)}, no directory")
        return patience.look(lambda: list_tree(path, skip=MANIFEST)), None
    except OSError as error:
        if error.errno in NOT_THERE:
            return None, Finding(Verdict.MISSING, "", None, f"{path.name} is not there")
        return None, Finding(Verdict.UNKNOWN, "", None, f"{path.name} cannot be looked at: {error.strerror}")


def _refusals(tree: Tree) -> list[Finding]:
    refused = [Finding(Verdict.FOREIGN, path, None, reason) for path, reason in tree.refused]
    named = (Finding(Verdict.FOREIGN, path, None, path_problem(path)) for path in tree.files)
    return refused + [finding for finding in named if finding.reason]


def _size_problems(wanted: Iterable[Expected | FileEntry], sizes: dict[str, int]) -> list[Finding]:
    findings = []
    for want in wanted:
        size = sizes.get(want.path)
        if size is None:
            findings.append(Finding(Verdict.MISSING, want.path, None, "is not there"))
        elif size != want.bytes:
            findings.append(_size_problem(want.path, want.bytes, size))
    return findings


def _size_problem(path: str, wanted: int, size: int) -> Finding:
    verdict = Verdict.TRUNCATED if size < wanted else Verdict.CORRUPT
    return Finding(verdict, path, min(size, wanted), f"{size} bytes instead of {wanted}")


def _read_files(passing: _Pass, wanted: Sequence[Expected]) -> None:
    """Look into every file. A file that is a large part of the whole gets all threads; the others get one each."""
    passing.total_bytes = sum(want.bytes for want in wanted)
    large_bytes = passing.total_bytes // (2 * max(1, passing.threads)) + 1
    for want in wanted:
        if want.bytes >= large_bytes:
            _look_into(passing, want, passing.threads)
    small = sorted((want for want in wanted if want.bytes < large_bytes), key=lambda want: -want.bytes)
    spread(small, passing.threads, lambda want: _look_into(passing, want, 1))


def _look_into(passing: _Pass, want: Expected, threads: int) -> None:
    if passing.findings:
        return
    try:
        entry, is_checked = passing.patience.look(lambda: _check_file(passing, want, threads))
    except _Wrong as error:
        finding = error.finding
    except NotRegular as error:
        finding = Finding(Verdict.FOREIGN, want.path, None, str(error))
    except Stopped:
        finding = Finding(Verdict.UNKNOWN, want.path, None, "the check was ended before this file was read")
    except OSError as error:
        verdict, reason = Verdict.UNKNOWN, f"cannot be read: {error.strerror}"
        if error.errno in NOT_THERE:
            verdict, reason = Verdict.MISSING, "is not there"
        finding = Finding(verdict, want.path, None, reason)
    else:
        with passing.lock:
            passing.entries.append(entry)
            if not is_checked:
                passing.unchecked.append(want.path)
        return
    with passing.lock:
        passing.findings.append(finding)


class _Wrong(Exception):
    """This file is not what it should be."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def _check_file(passing: _Pass, want: Expected, threads: int) -> tuple[FileEntry, bool]:
    """The file's manifest entry, and whether a checksum speaks for its bytes.

    Raises _Wrong, NotRegular, Stopped, OSError.
    """
    fd = open_regular(passing.directory / want.path)
    try:
        size = os.fstat(fd).st_size
        if size != want.bytes:
            raise _Wrong(_size_problem(want.path, want.bytes, size))
        structure = _structure(fd, want)
        if passing.mode == "structure":
            return FileEntry(want.path, size, want.xxh3_128, want.rank), want.xxh3_128 != ""
        digest = _check_content(passing, fd, want, structure, threads)
        if os.fstat(fd).st_size != size:
            raise _Wrong(Finding(Verdict.CORRUPT, want.path, size, "is still being written"))
        is_checked = want.xxh3_128 != "" or bool(structure.extents) or size == 0
        return FileEntry(want.path, size, digest, want.rank), is_checked
    except Shrunk as error:
        raise _Wrong(Finding(Verdict.TRUNCATED, want.path, error.offset, "was cut while it was read")) from error
    finally:
        os.close(fd)


def _structure(fd: int, want: Expected) -> Structure:
    try:
        return read_structure(fd, want.bytes)
    except Damage as error:
        # The size is the reported one: what looks cut was overwritten. A stray's size is nobody's word.
        was_overwritten = error.verdict is Verdict.TRUNCATED and want.rank is not None
        verdict = Verdict.CORRUPT if was_overwritten else error.verdict
        raise _Wrong(Finding(verdict, want.path, error.offset, error.reason)) from error


def _check_content(passing: _Pass, fd: int, want: Expected, structure: Structure, threads: int) -> str:
    """Read all bytes: against the rank's digest, else against the checksums in the file. The digest found."""
    extents = () if want.xxh3_128 else structure.extents
    content = read_content(Source(fd, want.bytes, extents), threads, passing.on_bytes, passing.stop)
    bad = content.bad
    if want.xxh3_128 and content.xxh3_128 != want.xxh3_128:
        if structure.extents:  # read once more, to say where
            bad = read_content(Source(fd, want.bytes, structure.extents), threads, passing.on_bytes, passing.stop).bad
        reason = f"XXH3-128 is {content.xxh3_128}, not {want.xxh3_128}"
    elif bad:
        reason = "CRC32 does not match"
    else:
        return content.xxh3_128
    where = f" (record {bad[0].name})" if bad else ""
    raise _Wrong(Finding(Verdict.CORRUPT, want.path, bad[0].start if bad else None, reason + where))
